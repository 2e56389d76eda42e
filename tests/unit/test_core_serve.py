"""A peer's answers to others, its refusals, and its next wake-up."""

import pytest

from p2pstore.core.copies.proofs import sign_versions
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.operation import AskPeer
from p2pstore.core.serving import MAX_HOLDINGS, reply_of
from p2pstore.errors import NoSuchKey, ProtocolError
from p2pstore.gossip.gossip_messages import Duplicate
from p2pstore.gossip.records import decode_location, writer_of
from p2pstore.home_messages import Holding, Push, Pushed
from p2pstore.memory.segment_layout import Pin
from p2pstore.transfer.data_messages import DataKind, Ping, Pong
from p2pstore.transfer.peer_messages import (
    MAX_LOOKUP_DIGESTS,
    ClusterRecords,
    Keys,
    ListKeys,
    Locations,
    Lookup,
    Replicate,
    Replicated,
    Statistics,
)
from p2pstore.wire import Code, Empty, Failure
from simulation.signer import SimulatedSigner, peer_id_of
from tests.present import present
from tests.unit.core_harness import (
    NAMESPACE,
    OTHER_INCARNATION,
    Harness,
    Other,
    RemoteObject,
    clock_at,
    digest_of,
    peer_record,
    remote_object,
)

# --- lookups and pushes ----------------------------------------------------------------------


def look_up(world: Harness, *keys: str) -> list[list[Holding]]:
    packed = b"".join(digest_of(key) for key in keys)
    reply = world.serve(world.others[0], DataKind.LOOKUP, Lookup(packed))
    assert isinstance(reply, Locations)
    return reply.items


def test_a_lookup_names_the_copy_here_and_those_known_elsewhere() -> None:
    world = Harness(others=2)
    world.stored("mine", b"1")
    thing = world.hold(world.others[1], "theirs", b"2")
    mine, absent, theirs = look_up(world, "mine", "absent", "theirs")
    (holding,) = mine
    assert (holding.member, holding.incarnation) == (world.core.member, world.core.incarnation)
    assert holding.sequence == world.gossip.log.sequence
    assert decode_location(holding.record) == world.announced("mine")
    assert absent == []
    (holding,) = theirs
    assert (holding.member, holding.incarnation) == (world.others[1].member, OTHER_INCARNATION)
    assert holding.record == world.location(thing)


def test_a_lookup_tells_of_the_dead_only_when_nobody_else_holds_a_key() -> None:
    world = Harness(others=3)
    dead, alive = world.others[:2]
    world.hold(dead, "held by the dead", b"1")
    world.hold(dead, "held by both", b"1")
    world.hold(alive, "held by both", b"1")
    world.die(dead)
    (only,), (best,) = look_up(world, "held by the dead", "held by both")
    assert (only.member, best.member) == (dead.member, alive.member)


def test_a_lookup_tells_of_no_copy_that_a_floor_forbids() -> None:
    world = Harness(others=3)
    thing = world.hold(world.others[1], "removed", b"2")
    world.learn_floor(world.others[2], digest_of("removed"), thing.version)
    assert look_up(world, "removed") == [[]]


def test_a_lookup_names_a_few_holders() -> None:
    world = Harness(others=1)
    thing = remote_object("k", b"1")
    for number in range(100, 200):
        world.push(Other(SimulatedSigner(peer_id_of(number))), thing)
    assert len(look_up(world, "k")[0]) == MAX_HOLDINGS


@pytest.mark.parametrize(
    "packed", [b"x", bytes(17), bytes(16 * (MAX_LOOKUP_DIGESTS + 1))], ids=["1", "17", "too many"]
)
def test_nonsense_lookups_are_protocol_errors(packed: bytes) -> None:
    world = Harness(others=1)
    with pytest.raises(ProtocolError):
        world.serve(world.others[0], DataKind.LOOKUP, Lookup(packed))


def test_a_push_is_known_at_once_and_a_withdrawal_forgets_it() -> None:
    world = Harness(others=1)
    thing = remote_object("k", b"1")
    world.push(world.others[0], thing)
    assert len(world.core.copies.known(digest_of("k"), world.now)) == 1
    world.push(world.others[0], thing, removed=True)
    assert world.core.copies.known(digest_of("k"), world.now) == []


def test_a_push_from_before_a_restart_is_not_taken_over_a_newer_one() -> None:
    world = Harness(others=1)
    thing = remote_object("k", b"1")
    sender = world.others[0]
    gone = world.location(thing, removed=True)
    assert world.serve(sender, DataKind.PUSH, Push(OTHER_INCARNATION, [9], gone)) == Pushed()
    world.serve(sender, DataKind.PUSH, Push(OTHER_INCARNATION, [8], world.location(thing)))
    world.serve(sender, DataKind.PUSH, Push(OTHER_INCARNATION - 1, [99], world.location(thing)))
    assert world.core.copies.known(digest_of("k"), world.now) == []


@pytest.mark.parametrize(("sequences", "cut"), [([], 0), ([1, 2], 0), ([1], 1)])
def test_nonsense_pushes_are_protocol_errors(sequences: list[int], cut: int) -> None:
    world = Harness(others=1)
    operations = world.location(remote_object("k", b"1"))
    with pytest.raises(ProtocolError):
        world.serve(
            world.others[0],
            DataKind.PUSH,
            Push(OTHER_INCARNATION, sequences, operations[: len(operations) - cut]),
        )
    assert world.core.copies.known(digest_of("k"), world.now) == []


# --- replicas for others ---------------------------------------------------------------------


def asked(world: Harness, thing: RemoteObject, **options: object) -> object:
    """Another peer asks for a copy."""
    version = thing.version
    world.core.proofs.believe(thing.slot.digest, version)  # asked for before
    request = Replicate(
        thing.slot.digest,
        version.clock,
        version.writer,
        len(thing.value),
        root=version.root,
        **options,  # type: ignore[arg-type]  # fields by name
    )
    return world.serve(world.others[0], DataKind.REPLICATE, request)


def test_a_replica_is_pulled_from_whoever_asks_and_is_firm() -> None:
    world = Harness(others=2)
    thing = remote_object("k", b"value")
    operation = asked(world, thing)
    assert isinstance(operation, FetchOperation)
    pull = world.pull_wanted()
    (copy,) = pull.copies
    assert (copy.peer_id, copy.record.version.clock) == (world.others[0].peer_id, thing.version.clock)
    entry = present(world.deliver(pull, thing))
    assert not entry.soft
    reply = reply_of(operation)
    assert reply == Replicated(thing.version.clock, thing.version.writer)
    assert not world.asks(DataKind.LOOKUP)
    world.check_idle()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_proof_stays_beside_the_version_that_it_is_of(replaced: bool) -> None:
    """The writer may replace what it asked to copy before that is pulled: the proof is of the older version then."""
    world = Harness(others=1)
    writer = world.others[0].signer
    older, newer = (
        remote_object("k", value, clock_at(at), writer_of(writer.peer_id))
        for value, at in ((b"older", -60.0), (b"newer", -50.0))
    )
    (proof,) = sign_versions([(older.slot.digest, older.version)], writer)
    assert isinstance(asked(world, older, proof=proof), FetchOperation)
    entry = present(world.deliver(world.pull_wanted(), newer if replaced else older))
    assert world.core.proofs.of(entry, world.now) == (b"" if replaced else proof)


def test_a_replica_that_is_here_needs_no_pull_and_becomes_firm() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    world.core.operations.fetch(digest_of("k"), world.now)
    entry = present(world.deliver(world.pull_wanted(), thing))
    assert asked(world, thing, soft=True) == Replicated(thing.version.clock, thing.version.writer)
    assert entry.soft
    assert asked(world, thing) == Replicated(thing.version.clock, thing.version.writer)
    assert not entry.soft
    record = present(world.announced("k"))
    assert not record.soft


def test_who_holds_it_hears_how_many_copies_are_wanted_and_says_so() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"value")
    mine = remote_object("k", b"value", entry.version.clock, entry.version.writer)
    for wanted, heard in ((3, 3), (2, 3), (1000, 64)):
        assert isinstance(asked(world, mine, replicas=wanted), Replicated)
        assert entry.replicas == heard
    record = present(world.announced("k"))
    assert record.replicas == 4, "4 or more"


def test_a_newer_version_here_is_kept_and_told() -> None:
    world = Harness(others=1)
    mine = world.stored("k", b"newer")
    reply = asked(world, remote_object("k", b"older"))
    assert reply == Replicated(mine.version.clock, mine.version.writer)
    assert world.find("k") is mine


def test_an_older_version_here_is_replaced() -> None:
    world = Harness(others=1)
    world.stored("k", b"older")
    thing = remote_object("k", b"newer", clock=clock_at(5.0))
    assert isinstance(asked(world, thing), FetchOperation)
    world.deliver(world.pull_wanted(), thing)
    assert world.value("k") == b"newer"


def test_what_could_never_fit_is_refused_before_any_byte_moves() -> None:
    world = Harness(others=1, memory_bytes=64 * 1024)
    reply = asked(world, remote_object("k", bytes(70_000)))
    assert isinstance(reply, Failure)
    assert reply.code == Code.CAPACITY_EXCEEDED
    world.check_idle()


@pytest.mark.parametrize("value", [b"", b"value"])
def test_a_peer_without_memory_keeps_no_replica(value: bytes) -> None:
    world = Harness(others=1, memory_bytes=0)
    reply = asked(world, remote_object("k", value))
    assert isinstance(reply, Failure)
    assert reply.code == Code.CAPACITY_EXCEEDED
    world.check_idle()


def test_a_replica_that_failed_is_a_failure() -> None:
    world = Harness(others=1)
    operation = asked(world, remote_object("k", b"value"))
    assert isinstance(operation, FetchOperation)
    world.fail(world.pull_wanted(), Code.NO_SUCH_KEY)
    reply = reply_of(operation)
    assert isinstance(reply, Failure)
    assert isinstance(operation.result, NoSuchKey)
    world.check_idle()


def test_a_stranger_that_asks_for_a_replica_introduces_itself() -> None:
    world = Harness(others=1)
    stranger = Other(SimulatedSigner(peer_id_of(55)))
    signed = peer_record(stranger.signer)
    world.others.insert(0, stranger)
    asked(world, remote_object("k", b"1"), record_body=signed.body, record_signature=signed.signature)
    assert stranger.peer_id in world.core.live_peers()


def test_a_forged_introduction_is_a_protocol_error() -> None:
    world = Harness(others=1)
    signed = peer_record(SimulatedSigner(peer_id_of(55)))
    with pytest.raises(ProtocolError):
        asked(world, remote_object("k", b"1"), record_body=signed.body, record_signature=bytes(64))
    assert not world.core.operations_under_way


def test_an_introduction_with_this_peer_s_own_identity_is_noticed() -> None:
    world = Harness(others=1)
    signed = peer_record(world.signer, incarnation=world.core.incarnation + 1)
    asked(world, remote_object("k", b"1"), record_body=signed.body, record_signature=signed.signature)
    assert world.effects(Duplicate)


@pytest.mark.parametrize("change", [{"digest": b"short"}, {"length": -1}])
def test_nonsense_about_replicas_is_a_protocol_error(change: dict[str, object]) -> None:
    world = Harness(others=1)
    fields: dict[str, object] = {"digest": bytes(16), "clock": 1, "writer": 1, "length": 5}
    with pytest.raises(ProtocolError):
        world.serve(
            world.others[0],
            DataKind.REPLICATE,
            Replicate(**(fields | change)),  # type: ignore[arg-type]  # fields by name
        )
    assert not world.core.operations_under_way


# --- lists -----------------------------------------------------------------------------------


def list_here(world: Harness, **options: object) -> Keys:
    fields: dict[str, object] = {"prefix": "", "after": "", "limit": 100, **options}
    request = ListKeys(NAMESPACE, **fields)  # type: ignore[arg-type]  # fields by name
    operation = world.serve(world.others[0], DataKind.LIST, request)
    while not operation.done:
        world.pass_time(0.0001)
    reply = reply_of(operation)
    assert isinstance(reply, Keys)
    return reply


def keys_of(page: Keys) -> list[str]:
    return [item.key for item in page.items]


def test_lists_are_paged_by_prefix_in_order() -> None:
    world = Harness(others=1)
    for key in ("b3", "a1", "b1", "b2", "c1"):
        world.stored(key, b"1")
    page = list_here(world, prefix="b", limit=2)
    assert (keys_of(page), page.more) == (["b1", "b2"], True)
    page = list_here(world, prefix="b", after="b2", limit=2)
    assert (keys_of(page), page.more) == (["b3"], False)
    page = list_here(world, limit=5)
    assert (len(page.items), page.more) == (5, False)


def test_a_list_of_pinned_keys_fills_its_page_across_what_is_not_pinned() -> None:
    world = Harness(others=1)
    for number in range(30):
        world.stored(f"k{number:02}", b"1", pin=2 if number % 10 == 9 else 0)
    page = list_here(world, limit=2, pinned=True)
    assert (keys_of(page), page.more) == (["k09", "k19"], True)
    page = list_here(world, limit=2, pinned=True, after="k19")
    assert (keys_of(page), page.more) == (["k29"], False)


@pytest.mark.parametrize("limit", [-5, 0])
def test_a_limit_below_one_still_gets_somewhere(limit: int) -> None:
    world = Harness(others=1)
    for key in "abc":
        world.stored(key, b"1")
    page = list_here(world, limit=limit)
    assert (keys_of(page), page.more) == (["a"], True)


def test_an_item_says_what_the_object_is() -> None:
    world = Harness(others=1)
    entry = world.stored("k", b"12345", pin=2, ttl_seconds=50.0)
    lease = world.segment.leases.lease(entry, session="reader", now=world.core.unix(world.now))
    (item,) = list_here(world).items
    assert (item.length, item.pin, item.soft, item.leased) == (5, Pin.HARD, False, True)
    assert (item.clock, item.writer) == (entry.version.clock, entry.version.writer)
    assert item.expires_unix_ms == entry.expires_unix_ms
    world.segment.leases.release(lease, session="reader")


# --- the rest --------------------------------------------------------------------------------


def test_a_ping_says_how_far_the_log_is() -> None:
    world = Harness(others=1)
    world.stored("k", b"1")
    reply = world.serve(world.others[0], DataKind.PING, Ping())
    assert reply == Pong(1, world.gossip.log.sequence)
    assert reply.sequence > 0


def test_unknown_requests_are_unsupported() -> None:
    world = Harness(others=1)
    reply = world.serve(world.others[0], DataKind.STATISTICS, Statistics())
    assert isinstance(reply, Failure)
    assert reply.code == Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("bodies", "signatures"), [([b"nonsense"], [bytes(64)]), ([b"x"], []), ([], [b"x"])]
)
def test_nonsense_cluster_records_are_protocol_errors(
    bodies: list[bytes], signatures: list[bytes]
) -> None:
    world = Harness(others=1)
    with pytest.raises(ProtocolError):
        world.serve(world.others[0], DataKind.CLUSTER_RECORDS, ClusterRecords(bodies, signatures))
    assert not len(world.gossip.cluster_records)


# --- driving ---------------------------------------------------------------------------------


def test_answers_and_outcomes_for_operations_that_are_over_do_nothing() -> None:
    world = Harness(others=1)
    world.core.answered(999, 0, Empty(), world.now)
    world.core.operations.pulled(999, None, world.now)  # type: ignore[arg-type]  # it is not looked at
    assert not world.core.take_effects()


def test_fresh_locations_are_pushed_to_their_homes_in_batches() -> None:
    world = Harness(others=5)
    world.stored("first", b"1")
    world.core.flush_pushes(world.now)
    for ask in world.asks(DataKind.PUSH):
        world.answer(ask, Pushed())
    for number in range(20):
        world.put(f"k{number}", b"1")
    world.core.flush_pushes(world.now)
    assert not world.asks(DataKind.PUSH), "not yet"
    assert world.core.next_tick(world.now) <= world.now + 0.021
    world.pass_time(0.021)
    asks = world.asks(DataKind.PUSH)
    assert 3 <= len(asks) <= 5
    pushes = [ask.request for ask in asks if isinstance(ask.request, Push)]
    told = sum(len(push.sequences) for push in pushes)
    homes = [world.core.homes(digest_of(f"k{number}")) for number in range(20)]
    assert told == sum(map(len, homes))


def test_a_tick_is_due_at_least_every_second_and_does_what_is_due() -> None:
    world = Harness(others=2)
    world.core.tick(world.now)
    begin, ticks = world.now, 0
    while world.now < begin + 10.0:
        due = world.core.next_tick(world.now)
        assert world.now <= due <= world.now + 1.0
        world.now = due
        world.core.tick(world.now)
        ticks += 1
        assert ticks < 2000, "it spins"


def test_what_expired_is_collected_by_a_tick() -> None:
    world = Harness()
    world.pass_time(1.5)
    world.stored("k", b"1", ttl_seconds=2.0)
    world.pass_time(3.2)
    assert world.segment.object_count == 0


def test_nobody_is_asked_about_a_lone_peer_s_keys() -> None:
    world = Harness()
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    assert isinstance(operation.result, NoSuchKey)
    assert not world.effects(AskPeer)
