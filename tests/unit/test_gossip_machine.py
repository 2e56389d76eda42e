"""Whole gossip machines against each other, in virtual time, over a network that loses and splits."""

import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.digests import pack_digest
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import (
    Ack,
    Answer,
    Ask,
    Claim,
    Contact,
    ControlKind,
    Delta,
    Duplicate,
    Exchange,
    ExchangeReply,
    FetchSnapshot,
    Later,
    Leave,
    LogChunk,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.members.member_table import MembershipConfig
from p2pstore.gossip.members.probing import MAX_RELAYED
from p2pstore.gossip.records import (
    ClusterRecord,
    ClusterRecordKind,
    LogHead,
    PeerRecord,
    SignedRecord,
    member_of,
    sign_cluster_record,
    sign_peer_record,
)
from p2pstore.wire import Code, Empty, Failure, Message
from simulation.gossip_data import log_snapshot, view_snapshot
from simulation.gossip_host import UNIX_START
from simulation.gossip_peer import GossipPeer, address_of
from simulation.signer import SimulatedSigner, peer_id_of
from tests.present import present
from tests.unit.digest_rows import digest_from
from tests.unit.gossip_network import Network, Node, digest_of, location, peer_record


def network(seed: int = 1, **config: object) -> Network:
    return Network(seed, GossipConfig(**config))  # type: ignore[arg-type]  # fields by name


def joined(count: int, seed: int = 1, **config: object) -> tuple[Network, list[Node]]:
    """A cluster that has converged."""
    net = network(seed, **config)
    nodes = net.start_all(count)
    assert net.run(10, net.converged)
    return net, nodes


def asked(net: Network) -> float:
    """How many requests were made: each has a reply."""
    return net.totals().control_messages_out / 2


def status(node: Node, other: Node) -> Status:
    state = present(node.gossip.membership.get(other.peer_id))
    return state.status


def floor(signer: SimulatedSigner, key: int, clock: int) -> tuple[ClusterRecord, SignedRecord]:
    record = ClusterRecord(1, int(ClusterRecordKind.FLOOR), digest_of(key), clock, 1, signer.peer_id)
    return record, sign_cluster_record(record, signer)


# --- joining and spreading -------------------------------------------------------------------


def test_peers_join_in_any_order() -> None:
    net = network()
    second = net.start(1)
    net.run(3)
    assert not second.gossip.contacts.admitted_once
    net.start(0)
    assert net.run(5, net.converged)
    assert second.gossip.contacts.admitted_once
    assert second.gossip.addresses.of(peer_id_of(0)) == [address_of(0)]
    assert second.gossip.membership.name_of(peer_id_of(0)) == "peer-0"


def test_idle_gossip_is_one_probe_and_one_exchange_a_second() -> None:
    net, nodes = joined(5)
    net.run(10)
    before = asked(net)
    net.run(20)
    assert (asked(net) - before) / 20 / len(nodes) == pytest.approx(2.0, abs=0.3)


def test_idle_records_are_not_signed_again() -> None:
    net, nodes = joined(3)
    net.run(5)
    signed = [node.signer.signed for node in nodes]
    net.run(10)
    assert [node.signer.signed for node in nodes] == signed


def test_steady_writing_costs_a_bounded_number_of_messages_and_signatures() -> None:
    net, nodes = joined(4)
    before, signed = asked(net), nodes[0].signer.signed
    for step in range(500):
        nodes[0].hold(location(step))
        net.run(0.01)
    assert (asked(net) - before) / 5 / len(nodes) <= 120
    assert nodes[0].signer.signed - signed <= 5 * (5 + 20) + 2  # records, and runs
    assert net.run(1, net.converged)


def test_home_peers_know_at_once() -> None:
    net, nodes = joined(8)
    writer = nodes[3]
    for key in range(40):
        writer.gossip.hold(location(key), net.now)
    pushes = writer.gossip.partitions.take_pushes(net.now)
    for key in range(40):
        expected = set(writer.gossip.homes(digest_of(key))) - {writer.peer_id}
        told = {p.peer_id for p in pushes if digest_of(key) in p.message.operations}
        assert told == expected
    assert len(writer.gossip.homes(digest_of(1))) == 3
    assert all(len(p.message.operations) == 42 * len(p.message.sequences) for p in pushes)
    for push in pushes:
        writer.gossip.partitions.pushed(push.token, [], (), net.now)
    writer.hold(location(99))
    assert writer.gossip.partitions.take_pushes(net.now + 0.019) == []
    assert writer.gossip.partitions.take_pushes(net.now + 0.0201) != []


# --- faults ----------------------------------------------------------------------------------


def test_a_crashed_peer_is_found_dead_and_its_locations_hidden_then_freed() -> None:
    net, nodes = joined(4)
    member = nodes[3].gossip.member
    nodes[3].hold(location(1))
    assert net.run(
        3, lambda: all(node.gossip.directory.head(member).sequence for node in nodes[:3])
    )  # a record that its owner never signed is not believed for long
    net.stop(3)
    assert net.run(9, net.converged)
    for node in nodes[:3]:
        assert [(f.member, f.hidden) for f in node.gossip.directory.holders(digest_of(1))] == [
            (member, True)
        ]
        assert nodes[3].peer_id not in node.gossip.rank(digest_of(1))
    net.run(61)
    assert nodes[0].gossip.directory.holders(digest_of(1)) == []
    assert nodes[0].gossip.directory.record_count == 0


def test_a_lost_connection_is_probed_at_once() -> None:
    net, nodes = joined(2)
    effects = nodes[0].gossip.connection_lost(nodes[1].peer_id, net.now)
    assert [(e.kind, e.peer_id) for e in effects if isinstance(e, Ask)] == [
        (ControlKind.PING, nodes[1].peer_id)
    ]
    assert nodes[0].gossip.connection_lost(nodes[1].peer_id, net.now) == []  # under way
    assert nodes[0].gossip.connection_lost(peer_id_of(77), net.now) == []


def test_the_wrongly_accused_refutes_without_voiding_its_log() -> None:
    net, nodes = joined(3)
    nodes[1].hold(location(1))
    assert net.run(2, net.converged)
    record = nodes[1].gossip.record(net.now)
    lie = Claim(nodes[1].peer_id, nodes[1].gossip.incarnation, int(Status.DEAD), 5)
    nodes[0].gossip.serve(
        nodes[2].peer_id, ControlKind.PING, Ping(nodes[0].gossip.incarnation, [lie]), net.now
    )
    assert status(nodes[0], nodes[1]) == Status.SUSPECT
    nodes[0].rest()
    assert net.run(3, lambda: status(nodes[0], nodes[1]) == Status.ALIVE and net.converged())
    assert nodes[1].gossip.membership.own.incarnation == nodes[1].gossip.incarnation + 1
    assert nodes[1].gossip.record(net.now) == record
    assert net.snapshots == 0


def test_an_answer_to_a_ping_says_what_time_it_is() -> None:
    net, nodes = joined(2)
    ping = Ping(nodes[0].gossip.incarnation, [])
    reply, _ = nodes[0].gossip.serve(nodes[1].peer_id, ControlKind.PING, ping, net.now)
    assert isinstance(reply, Ack)
    assert reply.unix_ms == pytest.approx(1000 * (UNIX_START + net.now), abs=1)


def test_a_forged_incarnation_is_outbid_when_its_victim_hears_of_it() -> None:
    net, nodes = joined(3)
    in_an_hour = int(1000 * (UNIX_START + 3600))
    for incarnation in (in_an_hour, 1 << 50):  # the second is too high to be believed
        lie = Claim(nodes[1].peer_id, incarnation, int(Status.SUSPECT), 5)
        nodes[0].gossip.serve(nodes[2].peer_id, ControlKind.PING, Ping(1, [lie]), net.now)
        net.run(8)
        assert net.converged()
        assert status(nodes[0], nodes[1]) == Status.ALIVE
        assert nodes[1].gossip.membership.own.incarnation == in_an_hour + 1


def test_a_restarted_peer_replaces_its_past() -> None:
    net, nodes = joined(3)
    nodes[2].hold(location(1))
    assert net.run(2, net.converged)
    net.stop(2)
    again = net.start(2)
    again.hold(location(2))
    assert net.run(3, net.converged)
    for node in nodes[:2]:
        assert node.gossip.directory.holders(digest_of(1)) == []
    assert again.running


def test_leaving_is_known_at_once_and_not_undone() -> None:
    net, nodes = joined(5)
    leaver = nodes[4]
    leaver.carry_out(leaver.gossip.leave(net.now))
    leaver.rest()
    assert net.run(0.5, lambda: all(status(n, leaver) == Status.LEFT for n in nodes[:4]))
    net.run(30)  # the process lingers, and answers
    assert all(status(n, leaver) == Status.LEFT for n in nodes[:4])
    net.stop(4)
    assert net.converged()
    net.start(4)
    assert net.run(3, net.converged)


@pytest.mark.parametrize(
    ("behind", "leaves"), [(5, True), (1000, True), (3_600_000, True), (3_600_000, False)]
)
def test_a_peer_that_comes_back_by_an_earlier_clock_is_heard(behind: int, leaves: bool) -> None:
    """Its clock was fast in its last life, and what it had saved of that is gone."""
    net, nodes = joined(3)
    net.stop(2)
    net.incarnation += behind
    first = net.start(2)
    assert net.run(10, net.converged)
    if leaves:
        first.carry_out(first.gossip.leave(net.now))
        net.run(1)
    net.incarnation = first.gossip.incarnation - behind - 1000
    net.stop(2)
    net.run(20)
    again = net.start(2)
    assert net.run(20, net.converged)
    again.hold(location(7))
    assert net.run(10, lambda: bool(nodes[0].gossip.directory.holders(digest_of(7))))
    assert again.running


def test_bootstrap_addresses_are_tried_ever_less_often_and_the_book_only_when_alone() -> None:
    net = network()
    node = net.start(1)
    node.gossip.addresses.load([(peer_id_of(5), (address_of(5),))])
    tried: list[tuple[float, tuple[str, ...]]] = []

    def watch(effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, Contact):
                tried.append((net.now, effect.addresses))
                node.gossip.contact_failed(effect.addresses, net.now)

    while net.now < 300:
        net.now = max(node.gossip.next_tick(net.now), net.now + 0.001)
        watch(list(node.gossip.tick(net.now)))
    for address in (address_of(0), address_of(5)):
        times = [time for time, addresses in tried if addresses == (address,)]
        gaps = [b - a for a, b in pairwise(times)]
        assert 10 < len(times) < 25
        assert 0.3 < gaps[0] < 0.9
        assert 20 < gaps[-1] < 40
    assert node.gossip.addresses.entries() == [(peer_id_of(5), (address_of(5),))]


def alone(number: int, incarnation: int) -> Node:
    net = network()
    net.incarnation = incarnation - 1000
    return net.start(number, None)


def test_a_twin_that_starts_later_goes() -> None:
    net, nodes = joined(2)
    net.run(10)
    original = nodes[1].gossip
    nodes[1].hold(location(1))
    twin = alone(1, 10_000_000)
    twin.gossip.tick(net.now)
    record = twin.gossip.record(net.now)
    delta = Delta([record], [], [], [])
    _, effects = original.serve(nodes[0].peer_id, ControlKind.DELTA, delta, net.now)
    assert effects == []  # it is older, and makes itself higher
    assert original.incarnation == 10_000_001
    assert original.log.head.count == 1
    delta = Delta([original.record(net.now)], [], [], [])
    _, effects = twin.gossip.serve(nodes[0].peer_id, ControlKind.DELTA, delta, net.now)
    assert [type(effect) for effect in effects] == [Duplicate]
    assert net.run(5, lambda: nodes[0].knows(nodes[1]))
    _, effects = original.serve(
        nodes[0].peer_id,
        ControlKind.DELTA,
        Delta([alone(1, 20_000_000).gossip.record(net.now)], [], [], []),
        net.now,
    )
    assert effects == []  # it defends itself against each newcomer
    assert original.incarnation == 20_000_001


# --- behind the ring -------------------------------------------------------------------------

SMALL_RING: dict[str, Any] = {"ring_limit": 4, "directory": DirectoryConfig(relay_limit=4)}


def test_who_is_behind_the_ring_takes_a_snapshot() -> None:
    net, nodes = joined(3, **SMALL_RING)
    net.network.partition({0, 1}, {2})
    for key in range(50):
        nodes[0].hold(location(key))
        if key % 3 == 0:
            nodes[0].release(digest_of(key))
    net.run(2)
    net.heal()
    assert net.run(10, net.converged)
    assert net.snapshots > 0


def test_a_snapshot_with_a_wrong_hash_is_refused_and_fetched_again() -> None:
    net, nodes = joined(2, **SMALL_RING)
    for key in range(50):
        nodes[0].hold(location(key))
    reader = nodes[1].gossip
    fetch = None
    record = nodes[0].gossip
    while fetch is None:
        net.now += 0.3
        reader.serve(
            nodes[0].peer_id, ControlKind.DELTA, Delta([record.record(net.now)], [], [], []), net.now
        )
        for effect in reader.tick(net.now):
            fetch = effect if isinstance(effect, FetchSnapshot) else fetch
    known = present(log_snapshot(record, fetch.member))
    head, packed = known
    with pytest.raises(ProtocolError):
        reader.snapshot_fetched(fetch.token, head, packed[:-42], net.now)
    assert reader.directory.position(record.member)[1] == 0
    assert net.run(10, net.converged)
    assert net.snapshots == 1


def test_a_lying_relay_costs_a_snapshot_from_the_owner() -> None:
    net, nodes = joined(3)

    def tamper(source: GossipPeer, target: GossipPeer, message: Message) -> Message | None:
        # The owner talks to the reader only by snapshots and probes: all else comes through the liar.
        if {source.number, target.number} == {0, 2} and not isinstance(message, Ping | Ack):
            return None
        if source.number != 1 or target.number != 2:
            return message
        if isinstance(message, ExchangeReply):
            return msgspec.structs.replace(message, delta=forge(message.delta))
        return forge(message) if isinstance(message, Delta) else message

    def forge(delta: Delta) -> Delta:
        logs = [msgspec.structs.replace(each, operations=forged(each.operations)) for each in delta.logs]
        return msgspec.structs.replace(delta, logs=logs, operations=forged(delta.operations))

    def forged(operations: bytes) -> bytes:
        return bytes(byte ^ (place == 0) for place, byte in enumerate(operations))

    net.tamper = tamper
    nodes[0].hold(location(1))
    assert net.run(30, net.converged)
    assert net.snapshots > 0


# --- cluster records -------------------------------------------------------------------------

# --- nonsense --------------------------------------------------------------------------------


def everything(node: Node) -> object:
    """All that a request could have changed."""
    gossip = node.gossip
    return (
        [replace(state, heard_at=0.0) for state in gossip.membership.states()],
        gossip.directory.record_count,
        [view_snapshot(gossip.directory, s.member) for s in gossip.membership.states()],
        gossip.cluster_records.bucket_hashes,
        gossip.incarnation,
    )


def forged(body: PeerRecord) -> SignedRecord:
    return msgspec.structs.replace(
        sign_peer_record(body, SimulatedSigner(body.peer_id)), signature=b"0" * 64
    )


def own(**fields: object) -> SignedRecord:
    """A record that peer 1 really signed."""
    return sign_peer_record(peer_record(1, **fields), SimulatedSigner(peer_id_of(1)))


GOOD = own(incarnation=50_000)
UNSIGNED_FLOOR = msgspec.structs.replace(floor(SimulatedSigner(peer_id_of(1)), 1, 1)[1], signature=b"")
RUN_OF_NONE = struct.pack("<HHIB", 0, 0, 1, 0)
RUN_FROM_NOTHING = struct.pack("<HHIB", 0, 1, 0, 0)
NONSENSE: list[tuple[ControlKind, Message]] = [
    (ControlKind.PING, Ping(-1, [])),
    (ControlKind.PING, Ping(1, [Claim(b"x", 1, 0, 0)])),
    (ControlKind.PING, Ping(1, [Claim(peer_id_of(1), 9, 1, 0), Claim(peer_id_of(1), 9, -1, 0)])),
    (ControlKind.PING, Ping(1, [Claim(peer_id_of(1), 9_000, 1, 0)] * 5000)),
    (ControlKind.EXCHANGE, Exchange(b"x" * 27, 0, b"", [])),
    (ControlKind.EXCHANGE, Exchange(b"", 0, b"x" * 511, [])),
    (ControlKind.EXCHANGE, Exchange(bytes(28 * 16_385), 0, b"", [])),
    (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [], 0, 0, 1, b"", b"x" * 512)),
    (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [], 0, 0, 1, b"", b"\x40" + bytes(512))),
    (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [], 0, 0, 1, b"", bytes(5 * 513))),
    (ControlKind.DELTA, Delta([GOOD], [], [], [], 1, b"x" * 10, b"")),
    (ControlKind.DELTA, Delta([GOOD], [], [], [], 1, b"", bytes(42))),
    (ControlKind.DELTA, Delta([GOOD], [], [], [], 1, RUN_OF_NONE, b"")),
    (ControlKind.DELTA, Delta([GOOD], [], [], [], 1, RUN_FROM_NOTHING, bytes(42))),
    (ControlKind.EXCHANGE, Exchange(b"", 0, b"", [Claim(peer_id_of(1), -9, 0, 0)])),
    (ControlKind.DELTA, Delta([GOOD, forged(peer_record(1, incarnation=60_000))], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, own(incarnation=60_000, cluster="other")], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, own(incarnation=1 << 62)], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, own(incarnation=60_000, sequence=1 << 32)], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, own(incarnation=60_000, sequence=-1)], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, own(incarnation=60_000, head=LogHead(-1, 0, 0))], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, SignedRecord(b"\xc1", b"")], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD, SignedRecord(b"\x90", b"")], [], [], [])),
    (ControlKind.DELTA, Delta([GOOD], [LogChunk(1, 1, 1, b"x" * 33)], [], [])),
    (ControlKind.DELTA, Delta([GOOD], [LogChunk(1, 1, 0, b"")], [], [])),
    (ControlKind.DELTA, Delta([GOOD], [], [SignedRecord(b"junk", b"")], [])),
    (ControlKind.DELTA, Delta([GOOD], [], [UNSIGNED_FLOOR], [])),
    (ControlKind.DELTA, Delta([GOOD] * 1025, [], [], [])),
    (ControlKind.DELTA, Delta([GOOD], [], [], [Claim(peer_id_of(1), 1, -1, 0)])),
    (ControlKind.LEAVE, Leave(own(incarnation=60_000))),
    (
        ControlKind.LEAVE,
        Leave(sign_peer_record(peer_record(9, leaving=True), SimulatedSigner(peer_id_of(9)))),
    ),
]


@pytest.mark.parametrize(("kind", "request_"), NONSENSE)
def test_nonsense_is_refused_and_changes_nothing(kind: ControlKind, request_: Message) -> None:
    net, nodes = joined(3)
    nodes[0].hold(location(1))
    before = everything(nodes[0])
    with pytest.raises(ProtocolError):
        nodes[0].gossip.serve(nodes[1].peer_id, kind, request_, net.now)
    assert everything(nodes[0]) == before
    assert net.run(5, net.converged)


@pytest.mark.parametrize("kind_and_request", [p for p in NONSENSE if p[0] == ControlKind.DELTA])
def test_nonsense_in_a_reply_is_refused_too(kind_and_request: tuple[ControlKind, Message]) -> None:
    net, nodes = joined(2)
    delta = kind_and_request[1]
    assert isinstance(delta, Delta)
    ask = None
    while ask is None:
        net.now += 1.0
        for effect in nodes[0].gossip.tick(net.now):
            if isinstance(effect, Ask) and effect.kind == ControlKind.EXCHANGE:
                ask = effect
    before = everything(nodes[0])
    with pytest.raises(ProtocolError):
        nodes[0].gossip.answered(ask.token, ExchangeReply(delta, b"", 0, b""), net.now)
    assert everything(nodes[0]) == before
    assert nodes[0].gossip.answered(ask.token, None, net.now) == []  # answered once only


def test_requests_of_a_later_version_are_declined() -> None:
    _, nodes = joined(2)
    reply, _ = nodes[0].gossip.serve(nodes[1].peer_id, 99, Empty(), 1.0)
    assert isinstance(reply, Failure)
    assert reply.code == Code.UNSUPPORTED


digest_entries = st.tuples(
    st.sampled_from([member_of(peer_id_of(n)) for n in range(4)]),
    st.sampled_from([0, 1, 2000, 1 << 63, (1 << 64) - 1]),
    st.sampled_from([0, 1, 5, (1 << 32) - 1]),
    st.sampled_from([0, 1, 5, 1 << 63, (1 << 64) - 1]),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(digest_entries, max_size=6), st.integers(), st.binary(max_size=3))
def test_any_digest_is_answered(
    entries: list[tuple[int, int, int, int]], cluster_hash: int, junk: bytes
) -> None:
    net, nodes = joined(3)
    nodes[0].hold(location(1))
    request = Exchange(pack_digest(digest_from(entries)) + junk, cluster_hash, junk, [])
    try:
        nodes[0].gossip.serve(nodes[1].peer_id, ControlKind.EXCHANGE, request, net.now)
    except ProtocolError:
        assert junk
    assert net.run(5, net.converged)


# --- any schedule ----------------------------------------------------------------------------

QUICK = MembershipConfig(probe_interval_seconds=0.3, probe_timeout_seconds=0.15)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("run"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("split"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("lossy"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("heal"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("floor"), st.integers(0, 2), st.integers(0, 5)),
    ),
    max_size=40,
)


def apply_action(net: Network, action: tuple[str, int, int], clock: int) -> None:
    what, which, key = action
    node = net.nodes.get(which)
    if what == "run":
        net.run(which / 10)
    elif what == "split":
        net.network.partition({which}, set(net.nodes) - {which})
    elif what == "lossy":
        net.network.faults.loss = which / 10
    elif what == "heal":
        net.heal()
    elif node is None:
        return
    elif what == "hold":
        node.hold(location(key, clock))
    elif what == "release" and digest_of(key) in node.held:
        node.release(digest_of(key))
    elif what == "floor":
        node.gossip.cluster_records.offer(*floor(node.signer, key, clock))
    elif what == "restart":
        net.stop(which)
        net.start(which, bootstrap=(which + 1) % len(net.nodes or [0, 0]))
    if node is not None and what in ("hold", "release", "floor"):
        net.nodes[which].rest()


def single_writer(net: Network) -> None:
    """No view is ever ahead of its owner, nor different from what the owner held there."""
    for node in net.nodes.values():
        for other in net.nodes.values():
            if node is not other:
                incarnation, sequence = node.gossip.directory.position(other.gossip.member)
                assert (incarnation, sequence) <= (other.gossip.incarnation, other.gossip.log.sequence)
                if sequence == other.gossip.log.sequence and (incarnation == other.gossip.incarnation):
                    assert node.knows(other)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 3), st.integers(0, 1 << 30), actions)
def test_after_any_schedule_all_agree_and_nothing_comes_back(
    count: int, seed: int, schedule: list[tuple[str, int, int]]
) -> None:
    net = network(seed, membership=QUICK, ring_limit=8, directory=DirectoryConfig(relay_limit=8))
    net.start_all(count)
    for clock, action in enumerate(schedule, start=1):
        apply_action(net, action, clock)
        single_writer(net)
    net.heal()

    def agreed() -> bool:
        hashes = {node.gossip.cluster_records.hash for node in net.nodes.values()}
        return net.converged() and len(hashes) == 1

    assert net.run(60, agreed)
    net.run(3)
    assert agreed()
    assert not net.problems
    for key in range(6):
        for node in net.nodes.values():
            found = {f.member for f in node.gossip.directory.holders(digest_of(key))}
            held = {
                other.gossip.member
                for other in net.nodes.values()
                if other is not node and digest_of(key) in other.held
            }
            assert found == held


# --- what is said to whom --------------------------------------------------------------------


def exchanges(node: Node, now: float) -> list[Ask]:
    asks = [effect for effect in node.gossip.tick(now) if isinstance(effect, Ask)]
    return [ask for ask in asks if ask.kind == ControlKind.EXCHANGE]


def test_a_stranger_that_calls_is_asked_at_once_who_it_is() -> None:
    net, nodes = joined(5)
    nodes[0].gossip.serve(peer_id_of(77), ControlKind.PING, Ping(1, []), net.now)
    assert nodes[0].gossip.next_tick(net.now) == net.now
    assert [ask.peer_id for ask in exchanges(nodes[0], net.now)] == [peer_id_of(77)]
    nodes[0].gossip.serve(peer_id_of(77), ControlKind.PING, Ping(1, []), net.now)
    assert exchanges(nodes[0], net.now) == []  # one at a time


def test_buckets_are_sent_to_those_whose_records_differed() -> None:
    net, nodes = joined(2)
    node, now = nodes[0], net.now + 5
    for expected in (0, 512, 0):
        (ask,) = exchanges(node, now)
        assert isinstance(ask.request, Exchange)
        assert len(ask.request.cluster_buckets) == expected
        theirs = 1 if expected == 0 else node.gossip.cluster_records.hash
        reply = ExchangeReply(Delta([], [], [], []), b"", theirs, b"")
        node.gossip.answered(ask.token, reply, now)
        now += 5


def test_who_may_hold_a_member_dead_gets_its_record_but_not_its_log() -> None:
    net, nodes = joined(3)
    for node in nodes:
        node.hold(location(node.number))
    assert net.run(2, net.converged)
    delta = nodes[0].gossip.knowledge.delta_for(digest_from([]), 1 << 20)
    assert len(delta.records) == 3
    assert [chunk.member for chunk in delta.logs] == [nodes[0].gossip.member]


def test_nonsense_from_a_pinged_peer_does_not_use_up_the_pings_for_others() -> None:
    network = Network(1)
    network.start_all(4)
    assert network.run(20, network.converged)
    helper = network.nodes[0].gossip
    for _ in range(2 * MAX_RELAYED):
        request = PingRequest(peer_id_of(2), 400)
        reply, effects = helper.serve(peer_id_of(1), ControlKind.PING_REQUEST, request, network.now)
        assert isinstance(reply, Later)
        (ask,) = [effect for effect in effects if isinstance(effect, Ask)]
        nonsense = Ack(1, [Claim(peer_id_of(3), -1, 1, 0)])
        (answer,) = helper.answered(ask.token, nonsense, network.now)
        assert isinstance(answer, Answer)
        assert isinstance(answer.reply, Failure)
