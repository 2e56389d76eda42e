"""The cost of exchanges in bytes and messages, with real encoding; and what a member cannot do to others by them."""

from collections import Counter
from functools import partial

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.anti_entropy import SEND_MICROSECONDS
from p2pstore.gossip.exchange.delta_checks import MAX_READ_RUNS, TAKE_MICROSECONDS, work_microseconds
from p2pstore.gossip.exchange.digests import Run, pack_runs
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Ask, ControlKind, Delta, Exchange, ExchangeReply, LogChunk
from p2pstore.gossip.locations.log import SignedRun, sign_run
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    ClusterRecord,
    ClusterRecordKind,
    sign_cluster_record,
    sign_peer_record,
)
from p2pstore.wire import HEADER_BYTES, Failure, Message, encode_body
from simulation.gossip_peer import GossipPeer
from simulation.signer import SimulatedSigner, SimulatedVerifier, peer_id_of
from tests.unit.digest_rows import digest_from
from tests.unit.gossip_network import (
    Network,
    Node,
    bury,
    digest_of,
    location,
    operations_after,
    peer_record,
)

PEERS = 20
CHANGES_PER_SECOND = 100.0


class CountingNetwork(Network):
    """Counts the frames' bytes and the messages of each peer, and keeps what was sent."""

    def __init__(self, seed: int, config: GossipConfig | None = None) -> None:
        super().__init__(seed, config)
        self.received_bytes: Counter[int] = Counter()
        self.messages_of: Counter[int] = Counter()
        self.operations_received = 0
        self.sent: list[Message] = []
        self.tamper = self._count

    def _count(self, source: GossipPeer, target: GossipPeer, message: Message) -> Message:
        self.received_bytes[target.number] += HEADER_BYTES + len(encode_body(message))
        self.messages_of.update((source.number, target.number))
        self.sent.append(message)
        delta = message.delta if isinstance(message, ExchangeReply) else message
        if isinstance(delta, Delta):
            packed = len(delta.operations) + sum(len(chunk.operations) for chunk in delta.logs)
            self.operations_received += packed // LOCATION_BYTES
        return message

    def begin(self) -> None:
        self.received_bytes.clear()
        self.messages_of.clear()
        self.sent.clear()
        self.operations_received = 0


def formed(count: int, seed: int = 1, config: GossipConfig | None = None) -> CountingNetwork:
    net = CountingNetwork(seed, config)
    net.start_all(count)
    assert net.run(30, net.converged)
    return net


def load(net: CountingNetwork, per_second: float) -> None:
    """Every peer changes what it holds at this rate, from now on."""
    keys = iter(range(10_000_000))

    def change(node: Node) -> None:
        node.hold(location(key := next(keys), key + 1))
        net.kernel.after(net.kernel.rng.uniform(0.5, 1.5) / per_second, lambda: change(node))

    for node in net.nodes.values():
        net.kernel.after(net.kernel.rng.random() / per_second, partial(change, node))


@pytest.mark.slow
def test_the_cost_of_a_loaded_cluster() -> None:
    net = formed(PEERS)
    load(net, CHANGES_PER_SECOND)
    net.run(1.5)
    net.begin()
    seconds = 1.5
    net.run(seconds)
    ideal = (PEERS - 1) * CHANGES_PER_SECOND * seconds
    received = sum(net.received_bytes.values()) / PEERS
    assert 0.5 * ideal * LOCATION_BYTES < received < ideal * LOCATION_BYTES  # packed
    assert net.operations_received / PEERS < ideal * 1.07  # hardly anything comes twice
    bound = net.config.messages_per_second * seconds + net.config.message_burst
    assert max(net.messages_of.values()) <= bound
    assert sum(net.messages_of.values()) / PEERS / seconds < 120
    lags = [
        (other.gossip.log.sequence - node.gossip.directory.position(other.gossip.member)[1])
        for node in net.nodes.values()
        for other in net.nodes.values()
        if node is not other
    ]
    assert max(lags) / CHANGES_PER_SECOND < 0.8


def test_the_cost_of_an_idle_cluster() -> None:
    net = formed(PEERS)
    net.run(8)
    net.begin()
    net.run(5)
    assert sum(net.messages_of.values()) / PEERS / 5 < 16
    assert sum(net.received_bytes.values()) / PEERS / 5 < 60 * PEERS


@pytest.mark.slow
def test_messages_are_bounded_when_operations_trickle() -> None:
    """Too few to count as load, enough to keep all peers busy telling the others."""
    net = formed(PEERS)
    load(net, 5.0)
    net.run(1)
    net.begin()
    net.run(3)
    assert 60 < sum(net.messages_of.values()) / PEERS / 3 < 120


def test_one_that_floods_a_peer_does_not_keep_it_from_beginning_exchanges() -> None:
    net = formed(6)
    net.run(3)
    victim, flooder = net.nodes[2], net.nodes[3]
    question = Exchange(b"", victim.gossip.cluster_records.hash, b"", [])
    keys, begun = iter(range(10_000)), 0

    def ask(sender: Node) -> type:
        reply, _ = victim.gossip.serve(sender.peer_id, ControlKind.EXCHANGE, question, net.now)
        return type(reply)

    def count(source: GossipPeer, _target: GossipPeer, message: Message) -> Message:
        nonlocal begun
        begun += source is victim and isinstance(message, Exchange)
        return message

    def change() -> None:
        victim.hold(location(next(keys)))
        net.kernel.after(0.05, change)

    net.tamper = count
    change()
    answers: Counter[type] = Counter()
    for _ in range(4 * 250):
        net.run(0.004)
        answers[ask(flooder)] += 1
    assert begun / 4 > 3
    assert answers[ExchangeReply] <= 5 * net.config.messages_per_second
    assert answers[Failure] == 1000 - answers[ExchangeReply]
    assert ask(net.nodes[4]) is ExchangeReply
    assert net.run(5, partial(reached, net, victim, victim.gossip.log.sequence))
    net.run(1)
    assert ask(flooder) is ExchangeReply


def reached(net: Network, writer: Node, sequence: int) -> bool:
    return all(
        node is writer or node.gossip.directory.position(writer.gossip.member)[1] >= sequence
        for node in net.nodes.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_one_put_is_everywhere_soon(loss: float) -> None:
    net = formed(PEERS, seed=3)
    writer, needed = net.nodes[5], []
    net.network.faults.loss = loss
    for key in range(7):
        net.run(2)
        begin = net.now
        writer.hold(location(key))
        assert net.run(2, partial(reached, net, writer, writer.gossip.log.sequence))
        needed.append(net.now - begin)
    assert sorted(needed)[3] < 0.15
    assert max(needed) < 0.8


def test_numbers_alone_are_sent_to_those_who_know_the_same_members() -> None:
    net = formed(5)
    net.run(5)
    net.begin()
    net.run(5)
    asked = [message for message in net.sent if isinstance(message, Exchange | ExchangeReply)]
    assert len(asked) >= 40
    for message in asked:
        assert (message.digest, len(message.positions)) == (b"", 9 * 5)
    net.begin()
    net.start(5)
    assert net.run(5, net.converged)
    assert any(message.digest for message in net.sent if isinstance(message, Exchange))


def one_ask(node: Node, now: float) -> Ask:
    asks = [
        effect
        for effect in node.gossip.tick(now)
        if isinstance(effect, Ask) and effect.kind == ControlKind.EXCHANGE
    ]
    assert len(asks) == 1
    return asks[0]


def test_operations_of_members_that_are_not_known_here_change_nothing() -> None:
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    of = node.gossip.knowledge.table.current().of
    place = of.members.tolist().index(other.gossip.member)
    run = bytes((place, 0, 1, 0, 1, 0, 0, 0, 0))
    operation = location(1).encode()
    signature = sign_run(other.signer, other.gossip.incarnation, 1, operation)
    for members_hash, expected in ((of.hash + 1, 0), (of.hash, 1)):
        delta = Delta([], [], [], [], members_hash, run, operation, signature)
        node.gossip.serve(other.peer_id, ControlKind.DELTA, delta, net.now)
        assert node.gossip.directory.position(other.gossip.member)[1] == expected


def test_an_exchange_that_is_not_answered_holds_up_the_others_for_half_a_second_only() -> None:
    net = formed(6)
    node, now = net.nodes[0], net.now + 5
    asked: list[Ask] = []
    for _ in range(400):
        now += 0.02
        node.gossip.hold(location(len(asked), 1 + len(asked)), now)
        effects = node.gossip.tick(now)
        asked += [e for e in effects if isinstance(e, Ask) and e.kind == ControlKind.EXCHANGE]
    assert len(asked) == 16  # and never more than these, while no peer answers


def test_a_joiner_takes_in_many_floors_in_little_steps() -> None:
    net = formed(3)
    for key in range(600):
        signer = net.nodes[0].signer
        record = ClusterRecord(
            1, int(ClusterRecordKind.FLOOR), digest_of(key), key + 1, 1, signer.peer_id
        )
        signed = sign_cluster_record(record, signer)
        for node in net.nodes.values():
            node.gossip.cluster_records.load([(record, signed)])
    net.run(5)
    net.begin()
    joiner = net.start(3)
    records = joiner.gossip.cluster_records
    assert net.run(3, lambda: len(records) == 600)
    sent = [m.delta if isinstance(m, ExchangeReply) else m for m in net.sent]
    counts = [len(delta.cluster_records) for delta in sent if isinstance(delta, Delta)]
    assert max(counts) == 40
    assert sum(counts) < 1.5 * 600


def test_one_delta_brings_no_more_than_its_receiver_can_carry_out_at_once() -> None:
    net = formed(3)
    node, other = net.nodes[0], net.nodes[1]
    for key in range(6000):
        node.hold(location(key, key + 1))
    member, incarnation = node.gossip.member, node.gossip.incarnation
    whole = operations_after(node.gossip.log, 0)
    delta = node.gossip.knowledge.delta_for(digest_from([]), 1 << 22)
    work = [work_microseconds(chunk.count) for chunk in delta.logs]
    assert len(work) == 2
    assert SEND_MICROSECONDS / 2 < sum(work) <= SEND_MICROSECONDS

    def chunk(first: int, count: int) -> LogChunk:
        operations = whole[first * LOCATION_BYTES : (first + count) * LOCATION_BYTES]
        signature = sign_run(node.signer, incarnation, first + 1, operations)
        return LogChunk(member, incarnation, first + 1, operations, signature)

    pieces = [chunk(first, 4) for first in range(0, 6000, 4)]
    taken = other.gossip.checks.check(Delta([], pieces, [], []), net.now).logs
    assert taken == pieces[: TAKE_MICROSECONDS // work_microseconds(4)]
    too_long = Delta([], [chunk(0, 6000)], [], [])
    assert other.gossip.checks.check(too_long, net.now).logs == []
    assert net.run(10, net.converged)


def test_of_one_delta_a_bounded_number_of_signatures_is_checked() -> None:
    net = formed(2)
    node, sender = net.nodes[0], net.nodes[1]
    records = []
    for number in range(10, 300):
        signer = SimulatedSigner(peer_id_of(number))
        records.append(sign_peer_record(peer_record(number), signer))
    verified: list[bytes] = []

    class Counting(SimulatedVerifier):
        def verify(self, peer_id: bytes, message: bytes, signature: bytes) -> bool:
            verified.append(peer_id)
            return super().verify(peer_id, message, signature)

    node.gossip.checks.verifier = Counting()
    delta = Delta(records, [], [], [])
    for expected in (40, 80):
        node.gossip.serve(sender.peer_id, ControlKind.DELTA, delta, net.now)
        assert len(verified) == expected
    node.gossip.serve(sender.peer_id, ControlKind.DELTA, Delta(records[250:], [], [], []), net.now)
    assert len(verified) == 120


def exchanges_of(node: Node, seconds: float, now: float, question: Exchange | None) -> int:
    """How many exchanges a peer under load begins, while another member asks it this 17 times a second."""
    gossip, begun = node.gossip, 0
    for step in range(int(seconds * 50)):
        now += 0.02
        if step % 10 == 0:
            for _ in range(200):
                gossip.hold(location(step, 1 + gossip.log.sequence), now)
        if question is not None and step % 3 == 0:
            gossip.serve(peer_id_of(1), ControlKind.EXCHANGE, question, now)
        for effect in gossip.tick(now):
            if isinstance(effect, Ask):
                begun += effect.kind == ControlKind.EXCHANGE
                gossip.questions.take(effect.token)
    return begun


def test_who_never_sends_what_it_promises_does_not_keep_a_loaded_peer_from_asking_others() -> None:
    net = formed(4)
    node, hostile = net.nodes[0], net.nodes[1]
    for number in range(10):
        hostile.hold(location(number))
    (ask,) = (
        effect
        for effect in hostile.gossip.tick(net.now + 5)
        if isinstance(effect, Ask) and effect.kind == ControlKind.EXCHANGE
    )
    assert isinstance(ask.request, Exchange)
    undisturbed = exchanges_of(node, 10, net.now, None)
    assert undisturbed > 50
    assert exchanges_of(node, 10, net.now + 10, ask.request) > undisturbed / 3


def test_of_one_delta_a_bounded_number_of_runs_is_looked_at() -> None:
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    member, incarnation = other.gossip.member, other.gossip.incarnation
    operation = location(1).encode()
    signature = sign_run(other.signer, incarnation, 1, operation)
    good = LogChunk(member, incarnation, 1, operation, signature)
    known = LogChunk(member, incarnation - 1, 1, operation, signature)
    beyond = LogChunk(member, incarnation, -1, b"?")
    check = node.gossip.checks.check
    for at, expected in ((MAX_READ_RUNS - 1, [good]), (MAX_READ_RUNS, [])):
        chunks = [known] * at + [good] + [beyond] * 9_000
        if not expected:
            del chunks[at]
        assert check(Delta([], chunks, [], []), net.now).logs == expected
    runs = [Run(0, SignedRun(1, operation, signature))] * MAX_READ_RUNS
    runs += [Run(9_999, SignedRun(1, operation, signature))] * 9_000
    of = node.gossip.knowledge.table.current().of
    check(Delta([], [], [], [], of.hash, *pack_runs(runs)), net.now)


def test_runs_of_no_operations_are_nonsense() -> None:
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    empty = LogChunk(other.gossip.member, other.gossip.incarnation, 1, b"")
    with pytest.raises(ProtocolError, match="no operations"):
        node.gossip.checks.check(Delta([], [empty], [], []), net.now)


def test_nothing_is_kept_of_askers_that_are_no_members() -> None:
    net = formed(2)
    gossip = net.nodes[0].gossip
    question = Exchange(b"", 0, b"", [], members_hash=5)
    for number in range(100, 200):
        gossip.serve(peer_id_of(number), ControlKind.EXCHANGE, question, net.now)
    exchanges = gossip.exchanges
    kept = exchanges._invited.keys() | exchanges._unreliable
    assert kept <= {peer_id_of(1)}


def test_claims_wait_for_a_message_that_goes() -> None:
    """The bringer of news is not told it; so no claim rides on that message either."""
    net = formed(2)
    node, other = net.nodes[0], net.nodes[1]
    now = net.now + 1
    record = peer_record(9)
    node.gossip.membership.observe_record(
        record, sign_peer_record(record, SimulatedSigner(record.peer_id)), now
    )
    bury(node.gossip.membership, [9], now)
    of = node.gossip.knowledge.table.current().of
    operation = location(1).encode()
    signature = sign_run(other.signer, other.gossip.incarnation, 1, operation)
    runs = pack_runs(
        [Run(of.members.tolist().index(other.gossip.member), SignedRun(1, operation, signature))]
    )
    node.gossip.serve(other.peer_id, ControlKind.DELTA, Delta([], [], [], [], of.hash, *runs), now)
    assert node.gossip.eager_news
    assert node.gossip.eager_news.spread(now) == []
    claims = node.gossip.membership.claims(to=other.peer_id)
    assert [claim.peer_id for claim in claims] == [peer_id_of(9)]
