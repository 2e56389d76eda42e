"""Flushing a namespace; sweeping many objects in steps; what a returning peer may show."""

import pytest

from p2pstore.core import floors as sweeping
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import ColdObject, ColdSorted, Operation
from p2pstore.core.remove import PUSHES_AT_ONCE, FlushEnd, FlushOperation
from p2pstore.core.serving import reply_of
from p2pstore.errors import CapacityExceeded
from p2pstore.gossip.records import SCOPE_NAMESPACE
from p2pstore.objects import Version, namespace_digest
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ClusterRecords, RecordsTaken
from p2pstore.wire import Code, Empty, Failure
from tests.unit.core_harness import NAMESPACE, Harness, clock_at, digest_of

NAME = namespace_digest(NAMESPACE)


def return_with(world: Harness, objects: list[ColdObject]) -> None:
    """The peer has these on its SSD."""
    newest = max((each.version.clock for each in objects), default=0)
    world.core.earlier_life.return_with(objects, newest, world.now)


def flush(world: Harness, timeout_seconds: float = 10.0) -> FlushOperation:
    operation = FlushOperation(world.core, NAMESPACE, timeout_seconds)
    world.start(operation)
    return operation


def floor_of(world: Harness) -> Version:
    return world.gossip.cluster_records.floors.floor_for(b"", NAME)


# --- flush -----------------------------------------------------------------------------------


def test_there_is_no_flush_without_room_for_its_floor() -> None:
    """Others would not take in a floor beyond the limit, and a flush that they never hear of must not be reported."""
    world = Harness(others=1)
    world.gossip.cluster_records.floors.limit = 3
    for number in range(3):
        operation = FlushOperation(world.core, f"namespace {number}")
        world.start(operation)
        (ask,) = world.asks(DataKind.CLUSTER_RECORDS)
        world.answer(ask, Empty())
        assert operation.result == FlushEnd(1, ())
    world.stored("k", b"value")
    assert isinstance(flush(world).result, CapacityExceeded)
    assert world.find("k") is not None
    world.check_idle()


def test_all_live_peers_are_told_at_once() -> None:
    world = Harness(others=5)
    world.stored("k", b"value")
    elsewhere = world.put("k", b"value", namespace="elsewhere")
    world.die(world.others[0])
    operation = flush(world)
    assert world.find("k") is None
    assert [entry.digest for entry in world.segment.entries()] == [elsewhere.digest]
    asks = world.asks(DataKind.CLUSTER_RECORDS)
    assert {ask.peer_id for ask in asks} == {other.peer_id for other in world.others[1:]}
    for ask in asks[:-1]:
        assert not operation.done
        world.answer(ask, Empty())
    world.answer(asks[-1], None)
    assert operation.result == FlushEnd(3, (asks[-1].peer_id,))
    world.check_idle()


def test_who_was_ahead_of_the_floor_is_told_of_a_second_one() -> None:
    """Values that it put before it heard of the flush, by a clock that is ahead, go as well."""
    world = Harness(others=2)
    operation = flush(world)
    first = floor_of(world)
    ahead = first.clock + (3000 << 16)
    early, late = world.asks(DataKind.CLUSTER_RECORDS)
    world.answer(early, RecordsTaken(first.clock - 1))
    world.answer(late, RecordsTaken(ahead))
    assert not operation.done
    assert floor_of(world).clock > ahead
    asks = world.asks(DataKind.CLUSTER_RECORDS)
    assert {ask.peer_id for ask in asks} == {other.peer_id for other in world.others}
    for ask in asks:
        world.answer(ask, RecordsTaken(floor_of(world).clock + 1))  # puts go on: that is no news
    assert operation.result == FlushEnd(2, ())
    world.check_idle()


def test_a_flush_by_another_member_is_told_with_its_name() -> None:
    world = Harness(others=1)
    world.stored("k", b"value")
    name = namespace_digest(NAMESPACE)
    world.learn_floor(world.others[0], name, Version(clock_at(1.0), 1), SCOPE_NAMESPACE)
    assert world.find("k") is None
    who = world.core.name_of(world.others[0].peer_id)
    assert world.notes("floors") == [f"{who} has flushed the namespace {NAMESPACE!r}: its objects go"]
    flush(world)
    assert not world.notes("floors"), "of its own it needs no telling"


def test_a_clock_from_the_future_moves_no_floor() -> None:
    world = Harness(others=1)
    operation = flush(world)
    (ask,) = world.asks(DataKind.CLUSTER_RECORDS)
    world.answer(ask, RecordsTaken(floor_of(world).clock + (3600_000 << 16)))
    assert operation.result == FlushEnd(1, ())


def test_the_floor_is_above_every_version_that_was_heard_of() -> None:
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value", clock=clock_at(9.0), writer=0xFFFF)
    world.hold(world.others[0], "odd", b"value", clock=clock_at(3600.0))
    flush(world)
    assert floor_of(world).covers(thing.version)
    assert floor_of(world).clock < clock_at(10.0)


def test_the_same_bytes_can_be_put_again_at_once() -> None:
    world = Harness()
    world.stored("k", b"value")
    assert flush(world).result == FlushEnd(0, ())
    assert world.put("k", b"value").result.status == PutStatus.CREATED
    assert world.value("k") == b"value"


def test_pushes_are_bounded_and_go_on_as_answers_come() -> None:
    world = Harness(others=PUSHES_AT_ONCE + 5)
    operation = flush(world)
    first = world.asks(DataKind.CLUSTER_RECORDS)
    assert len(first) == PUSHES_AT_ONCE
    for ask in first:
        world.answer(ask, Failure(int(Code.BUSY), "later") if ask is first[0] else Empty())
    rest = world.asks(DataKind.CLUSTER_RECORDS)
    assert len({ask.tag for ask in first + rest}) == PUSHES_AT_ONCE + 5
    for ask in rest:
        world.answer(ask, Empty())
    assert operation.result == FlushEnd(PUSHES_AT_ONCE + 4, (first[0].peer_id,))


def test_the_deadline_ends_it_and_names_the_silent() -> None:
    world = Harness(others=3)
    operation = flush(world, timeout_seconds=2.0)
    ask, *silent = world.asks(DataKind.CLUSTER_RECORDS)
    assert ask.timeout_seconds == 2.0
    world.answer(ask, Empty())
    world.pass_time(1.9)
    assert not operation.done
    world.pass_time(0.2)
    assert operation.result.told == 1
    assert set(operation.result.not_told) == {each.peer_id for each in silent}
    world.check_idle()


def test_cancelling_leaves_the_floor_and_nothing_else() -> None:
    world = Harness(others=2)
    world.stored("k", b"value")
    operation = flush(world)
    world.core.operations.cancel(operation, world.now)
    for ask in world.asks(DataKind.CLUSTER_RECORDS):
        world.answer(ask, Empty())
    assert world.find("k") is None
    world.check_idle()


def test_who_asks_with_the_namespace_is_not_sent_to_a_holder_that_has_not_heard() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"value")
    flush(world)
    plain = LookupOperation(world.core, [digest_of("k")], ask_homes=False)
    named = LookupOperation(world.core, [digest_of("k")], ask_homes=False, namespace=NAME)
    for operation in (plain, named):
        world.start(operation)
    assert [len(copies) for copies in (*plain.result, *named.result)] == [1, 0]


# --- sweeping --------------------------------------------------------------------------------


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "WITHDRAWN_PER_STEP", 2)


def filled(monkeypatch: pytest.MonkeyPatch, others: int = 1) -> Harness:
    world = Harness(others=others)
    for number in range(7):
        world.stored(f"k{number}", b"value")
    small_steps(monkeypatch)
    return world


def test_a_sweep_takes_steps_and_nobody_is_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(monkeypatch, others=0)
    operation = flush(world)
    assert world.segment.object_count == 5
    assert not operation.done, "it waits for what is held here"
    left = world.segment.entries()[0]
    assert world.core.objects.find(left.digest, world.now) is None
    later = world.put("later", b"value")
    assert later.result.status == PutStatus.CREATED
    assert world.core.objects.find(later.digest, world.now) is not None
    assert world.core.next_tick(world.now) <= world.now
    world.pass_time(0.1)
    assert operation.result == FlushEnd(0, ())
    assert [entry.digest for entry in world.segment.entries()] == [later.digest]
    assert world.announced("k0") is None
    world.check_idle()


def test_threads_are_lent_nothing_that_a_flush_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(monkeypatch, others=0)
    kept = world.put("kept", b"value", namespace="elsewhere")
    (entry,) = [each for each in world.segment.entries() if each.digest == kept.digest]

    def lent(*, decides: bool = False) -> bool:
        found = world.core.objects.lend(entry.digest, world.now, decides=decides)
        if found is not None:
            world.segment.leases.end_loan(found[0])
        return found is not None

    assert lent()
    flush(world)
    assert not lent()
    assert lent(decides=True), "the event loop sees that it stays"
    world.pass_time(1.0)
    assert lent()
    world.segment.remove(entry.digest)
    assert not lent()


def test_what_expired_is_lent_no_longer() -> None:
    world = Harness()
    entry = world.stored("k", b"value", ttl_seconds=5.0)
    found = world.core.objects.lend(entry.digest, world.now + 4.0, decides=False)
    assert found is not None
    world.segment.leases.end_loan(found[0])
    assert world.core.objects.lend(entry.digest, world.now + 5.0, decides=False) is None


def test_who_is_told_answers_when_it_has_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(monkeypatch)
    floor = world.core.version_above(Version(0, 0), world.now)
    signed = world.floor_from(world.others[0], NAME, floor, SCOPE_NAMESPACE)
    request = ClusterRecords([signed.body], [signed.signature])
    operation = world.serve(world.others[0], DataKind.CLUSTER_RECORDS, request)
    assert isinstance(operation, Operation)
    world.pass_time(0.1)
    assert operation.done
    taken = reply_of(operation)
    assert isinstance(taken, RecordsTaken)
    assert taken.newest_clock <= floor.clock  # as it was before it heard of the floor
    assert world.segment.object_count == 0
    again = world.serve(world.others[0], DataKind.CLUSTER_RECORDS, request)
    assert isinstance(again, RecordsTaken)
    assert again.newest_clock >= floor.clock
    world.check_idle()


def test_a_floor_that_comes_during_a_sweep_has_the_sweep_go_round_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = filled(monkeypatch, others=0)
    for number in range(5):
        world.put(f"k{number}", b"value", namespace="elsewhere")
    flush(world)
    other = FlushOperation(world.core, "elsewhere")
    world.start(other)
    world.pass_time(0.1)
    assert other.done
    assert world.segment.object_count == 0
    world.check_idle()


def test_cancelling_a_flush_that_waits_for_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(monkeypatch, others=0)
    operation = flush(world)
    world.core.operations.cancel(operation, world.now)
    assert world.core.operations_under_way == 0
    world.pass_time(0.1)
    assert world.segment.object_count == 0
    world.check_idle()


# --- distrust --------------------------------------------------------------------------------


def test_copies_that_may_have_been_removed_are_withdrawn() -> None:
    world = Harness(others=1)
    world.stored("old", b"value")
    middle = world.core.clock.latest
    world.stored("new", b"value")
    world.miss_a_horizon(middle)
    assert world.find("old") is None
    assert world.announced("old") is None
    assert world.find("new") is not None
    assert world.core.counters["horizons_missed"] == 1
    world.pass_time(0.1)
    (note,) = world.notes("floors")
    assert "it discarded 1 copies of objects" in note
    assert f"by the signed records of {world.gossip.membership.name_of(world.others[0].peer_id)}" in note
    assert world.notes("floors") == []
    world.check_idle()


def test_a_crash_before_all_are_withdrawn_makes_none_look_checked() -> None:
    """The next life would take objects that outlive the process for checked ones."""
    world = Harness(others=1, memory_bytes=2 << 20)
    for number in range(150):
        world.stored(f"k{number}", b"value")
    before = world.core.earlier_life.seen_to_save
    world.miss_a_horizon(world.core.clock.latest)
    world.gossip.floors.seen[1] = world.core.clock.latest
    assert world.segment.object_count, "all were withdrawn in one step: the test has lost its power"
    assert world.core.earlier_life.seen_to_save == before
    world.pass_time(0.1)
    assert world.segment.object_count == 0
    assert world.core.earlier_life.seen_to_save == world.gossip.floors.seen != before


def test_a_fetch_that_was_under_way_is_not_believed() -> None:
    """Its holder may have missed the same floor."""
    world = Harness(others=1)
    thing = world.hold(world.others[0], "k", b"value")
    world.core.operations.fetch(digest_of("k"), world.now)
    pull = world.pull_wanted()
    destination = world.core.operations.copy_destination(pull.operation, world.now)
    destination.prepare(thing.slot, thing.trailer)[:] = thing.value
    world.miss_a_horizon(thing.version.clock)
    assert destination.commit(world.now) is None
    assert world.find("k") is None
    assert world.segment.used_bytes == 0


def test_doubtful_locations_are_neither_used_nor_told() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"value")
    world.pass_time(0.5)
    assert world.core.copies.known(digest_of("k"), world.now)
    world.miss_a_horizon(thing.version.clock)
    late = world.join(7)
    world.push(late, thing)
    members = {copy.member for copy in world.core.copies.known(digest_of("k"), world.now)}
    assert members == {world.others[0].member}, "who was here before may take its time"


# --- returning -------------------------------------------------------------------------------


def cold(key: str, clock: int) -> ColdObject:
    return ColdObject(digest_of(key), NAME, Version(clock, 1, 5))


def returned(world: Harness) -> tuple[set[bytes], set[bytes]]:
    world.pass_time(0.5)
    effects = world.effects(ColdSorted)
    assert [effect.last for effect in effects] == [False] * (len(effects) - 1) + [True] * bool(effects)
    good = {each.digest for effect in effects for each in effect.good}
    return good, {each.digest for effect in effects for each in effect.discarded}


def test_cold_objects_wait_until_all_floors_are_known() -> None:
    world = Harness(others=1)
    objects = [cold("kept", clock_at(-50.0)), cold("removed", clock_at(-60.0))]
    return_with(world, objects)
    assert returned(world) == (set(), set())
    world.learn_floor(world.others[0], digest_of("removed"), Version(clock_at(-55.0), 1))
    world.gossip.floors.synchronised = True
    assert returned(world) == ({digest_of("kept")}, {digest_of("removed")})
    assert returned(world) == (set(), set())


def test_a_namespace_s_floor_and_a_missed_horizon_count() -> None:
    world = Harness(others=1)
    objects = [cold(f"k{age}", clock_at(-float(age))) for age in (10, 20, 30)]
    return_with(world, objects)
    world.learn_floor(world.others[0], NAME, Version(clock_at(-25.0), 1), SCOPE_NAMESPACE)
    world.gossip.floors.synchronised = True
    world.miss_a_horizon(clock_at(-15.0))
    good, discarded = returned(world)
    assert good == {digest_of("k10")}
    assert discarded == {digest_of("k20"), digest_of("k30")}


def test_alone_there_is_nothing_to_wait_for() -> None:
    world = Harness()
    return_with(world, [cold("k", clock_at(-10.0))])
    assert returned(world) == ({digest_of("k")}, set())


def test_after_a_month_nothing_is_trusted() -> None:
    world = Harness()
    month = 31 * 86_400.0
    return_with(world, [cold("k", clock_at(-month))])
    assert returned(world) == (set(), {digest_of("k")})


def test_what_is_saved_as_seen_waits_for_the_cold_objects() -> None:
    world = Harness()
    earlier = {5: clock_at(-100.0)}
    world.gossip.floors.load(earlier)
    return_with(world, [cold("k", clock_at(-10.0))])
    assert world.core.earlier_life.seen_to_save == earlier
    returned(world)
    assert len(world.gossip.floors.seen) == 2
    assert world.core.earlier_life.seen_to_save == earlier, "until they are settled"
    world.core.earlier_life.cold_settled()
    assert world.core.earlier_life.seen_to_save == world.gossip.floors.seen
