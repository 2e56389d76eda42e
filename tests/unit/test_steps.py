"""Nothing holds the event loop for long: how much work one step has at most, counted, for the largest requests."""

import json
import mmap
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2pstore.core import peer_core, serving
from p2pstore.core import peer_core as operations
from p2pstore.core.copies.earlier_life import COLD_PER_STEP
from p2pstore.core.floors import WITHDRAWN_PER_STEP
from p2pstore.core.operation import ColdObject, ColdSorted, Operation
from p2pstore.core.puts.publishing import PUBLISHED_PER_STEP
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.errors import CapacityExceeded, ProtocolError
from p2pstore.gossip.floors.cluster_records import PURGE_STEP
from p2pstore.gossip.floors.cluster_records import ClusterRecords as KeptRecords
from p2pstore.gossip.floors.floor_set import SLICE_BITS, FloorSet
from p2pstore.gossip.records import SignedRecord, floor_of_keys, read_peer_record, sign_cluster_record
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import Access, LocalClient
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.extent_allocator import GROWN_PER_STEP
from p2pstore.memory.key_listing import RUN_KEYS, KeyListing
from p2pstore.memory.object_leases import DROPPED_PER_STEP
from p2pstore.memory.references import References
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import Pin, SlotState
from p2pstore.memory.segment_objects import EXPIRED_PER_STEP, SegmentObjects
from p2pstore.memory.victims import EVICTED_PER_STEP, LOOKED_AT_PER_STEP
from p2pstore.objects import Version, chunk_sums
from p2pstore.peer import statistics
from p2pstore.peer.for_clients.local_gets import LocalGets
from p2pstore.peer.for_clients.local_puts import LocalPuts
from p2pstore.put_facts import PutOptions
from p2pstore.runtime.stepping import Steps, run_through
from p2pstore.runtime.trio_tasks import in_turns, take_turns
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import ClusterRecords, Lookup
from p2pstore.wire import decode_body, encode_body
from simulation.segment_checks import check_segment
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import NAMESPACE, Harness, clock_at, digest_of, peer_record
from tests.unit.eviction_entries import allocate

GRANULE = 4096
CLIENT = LocalClient(7, NAMESPACE, Access.WRITE, 1, "")


def new_world(granules: int, **facts: Any) -> Harness:
    return Harness(
        memory_bytes=granules * GRANULE,
        new_memory=lambda length: memoryview(mmap.mmap(-1, length)),
        **facts,
    )


def fill(
    world: Harness, count: int, *, pinned: Callable[[int], bool] = lambda number: False, **options: Any
) -> None:
    for number in range(count):
        pin = int(Pin.HARD) if pinned(number) else 0
        operation = world.put(f"k{number}", b"v", pin=pin, **options)
        assert isinstance(operation, PutOperation)
        assert operation.done
    world.forget_effects()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[int]]:
    """How often a method was called since `[0]` was set to 0."""
    calls, method = [0], getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return method(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, counting)
        yield calls


def most_in_a_step(steps: Steps[Any], calls: list[int]) -> tuple[int, Any]:
    """The most calls in one step, and the result, or the error."""
    most = 0
    while True:
        calls[0] = 0
        try:
            next(steps)
        except StopIteration as end:
            return max(most, calls[0]), end.value
        except CapacityExceeded as error:
            return max(most, calls[0]), error
        most = max(most, calls[0])


# --- room ------------------------------------------------------------------------------------


def _take_the_rest(segment: Segment) -> None:
    """Nothing is free any more."""
    allocator = segment.areas.shared.allocator
    while allocator.largest_free_bytes:
        assert allocate(allocator, allocator.largest_free_bytes) is not None


def test_a_failed_search_for_room_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(4_096)
    fill(world, 1_024, pinned=lambda number: number % 10 != 0)
    _take_the_rest(world.segment)
    looked = []
    with counted(monkeypatch, EvictionOrder, "may_go") as calls:
        for _ in range(100):
            steps = world.segment.reserve_in_steps(60_000, 200, session="c", now=1.9e9)
            most, error = most_in_a_step(steps, calls)
            assert isinstance(error, CapacityExceeded)
            assert most <= LOOKED_AT_PER_STEP
            looked.append(most)
    assert looked[0]
    assert not any(looked[1:])


def test_many_small_objects_go_for_a_large_one_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(1_024)
    fill(world, 1_024)
    segment = world.segment
    assert not segment.free_bytes
    value = 700 * GRANULE
    with counted(monkeypatch, SegmentObjects, "free") as freed:
        steps = segment.reserve_in_steps(value - 500, 200, session="c", now=1.9e9)
        most, room = most_in_a_step(steps, freed)
    assert most <= EVICTED_PER_STEP
    assert room.length == value - 500
    check_segment(segment)


def test_others_get_none_of_what_is_cleared_for_a_large_one() -> None:
    world = new_world(1_024)
    fill(world, 1_024)
    segment = world.segment
    steps = segment.reserve_in_steps(700 * GRANULE, 200, session="c", now=1.9e9)
    small, room = 0, None
    while room is None:
        try:
            next(steps)
        except StopIteration as end:
            room = end.value
        if segment.object_count < 1_024:  # it has begun
            segment.reserve(10, 10, session="other", now=1.9e9)
            small += 1
            check_segment(segment)
    assert small > 700 // EVICTED_PER_STEP
    assert len(segment.reservations.of("c")) == 1
    check_segment(segment)


def test_a_reservation_that_is_called_off_in_the_middle_leaves_nothing_behind() -> None:
    world = new_world(1_024)
    fill(world, 1_024)
    segment = world.segment
    for made in range(5, 40, 7):
        steps = segment.reserve_in_steps(600 * GRANULE, 200, session="c", now=1.9e9)
        for _ in range(made):
            next(steps, None)
        steps.close()
        segment.drop_session("c")
        check_segment(segment)
    assert segment.used_bytes == segment.object_count * GRANULE


def test_a_large_one_is_refused_when_something_in_its_place_is_leased_meanwhile() -> None:
    world = new_world(512)
    fill(world, 512)
    segment = world.segment
    steps = segment.reserve_in_steps(511 * GRANULE, 200, session="c", now=1.9e9)
    next(steps)
    while segment.object_count > 512 - EVICTED_PER_STEP:
        next(steps)
    entry = min(segment.entries(), key=lambda each: abs(each.offset - segment.geometry.total_bytes))
    segment.leases.lease(entry, session="reader", now=1.9e9)
    with pytest.raises(CapacityExceeded):
        run_through(steps)
    check_segment(segment)
    assert segment.used_bytes == segment.object_count * GRANULE


def test_windows_of_many_extents_are_grown_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(1_024)
    fill(world, 1_024, pinned=lambda number: number == 512)
    with counted(monkeypatch, EvictionOrder, "cost_at") as calls:
        steps = world.segment.reserve_in_steps(900 * GRANULE, 200, session="c", now=1.9e9)
        most, error = most_in_a_step(steps, calls)
    assert isinstance(error, CapacityExceeded)
    assert most <= 4 * GROWN_PER_STEP + 32


# --- time ------------------------------------------------------------------------------------


def test_what_expires_at_the_same_moment_goes_some_at_a_time() -> None:
    world = new_world(1_024)
    fill(world, 1_000, ttl_seconds=10.0)
    world.now += 20.0
    left = [world.segment.object_count]
    while left[-1]:
        world.core.tick(world.now)
        left.append(world.segment.object_count)
        assert world.core.next_tick(world.now) <= world.now or not left[-1]
    gone = [before - after for before, after in pairwise(left)]
    assert max(gone) <= EXPIRED_PER_STEP
    check_segment(world.segment)


def test_room_of_what_has_expired_is_used_before_anything_else_goes() -> None:
    world = new_world(1_024)
    fill(world, 200)
    for number in range(824):
        world.put(f"short {number}", b"v", ttl_seconds=10.0)
    world.now += 20.0
    assert not world.segment.free_bytes
    world.segment.reserve(500 * GRANULE, 200, session="c", now=world.core.unix(world.now))
    assert all(world.find(f"k{number}") for number in range(200))


def test_keys_are_put_in_order_some_at_a_time() -> None:
    listing, count = KeyListing(), 10_000
    for number in range(count):
        entry: Any = SimpleNamespace(
            namespace="n", key=f"{number * 7919 % count:05d}", state=SlotState.LIVE
        )
        listing.add(entry)
    steps = 1
    while not listing.prepare("n"):
        steps += 1
    assert steps >= count // RUN_KEYS
    found, more = listing.page("n", "", "01234", 3)
    assert ([entry.key for entry in found], more) == (["01235", "01236", "01237"], True)
    assert listing.page("n", "no such", "", 3) == ([], False)


def test_what_a_namespace_floor_forbids_goes_some_at_a_time() -> None:
    world = new_world(1_024)
    fill(world, 1_000)
    before = world.segment.object_count
    world.core.floors.sweep.begin(world.now, distrusted=1 << 62)
    assert before - world.segment.object_count <= WITHDRAWN_PER_STEP


# --- other peers -----------------------------------------------------------------------------


def test_large_lookups_and_pushes_of_floors_are_answered_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = new_world(1_024, others=1)
    fill(world, 500)
    (other,) = world.others
    packed = b"".join(digest_of(f"k{number}") for number in range(1_500))
    operation = world.serve(other, DataKind.LOOKUP, Lookup(packed))
    assert not operation.done
    world.pass_time(0.1)
    reply = serving.reply_of(operation)
    assert [bool(holdings) for holdings in reply.items] == [n < 500 for n in range(1_500)]  # type: ignore[attr-defined]

    floors = [
        world.floor_from(other, digest_of(f"k{number}"), Version(clock_at(5.0), 9))
        for number in range(200)
    ]
    pushed = ClusterRecords([each.body for each in floors], [each.signature for each in floors])
    operation = world.serve(other, DataKind.CLUSTER_RECORDS, pushed)
    assert not operation.done
    assert world.segment.object_count >= 500 - serving.RECORDS_PER_STEP
    world.pass_time(0.1)
    assert operation.done
    assert world.segment.object_count == 300


def test_few_members_make_no_step_larger() -> None:
    assert Harness().core.keys_per_step <= peer_core.LOOKED_UP_PER_STEP


# --- clients of this host --------------------------------------------------------------------


class Peer:
    """A server for local clients, under trio."""

    def __init__(self, world: Harness) -> None:
        node: Any = SimpleNamespace(
            core=world.core, now=world.now, ssd=None, start_soon=lambda function: None
        )
        self.puts = LocalPuts(node, issuer=None)  # type: ignore[arg-type]  # no ticket is asked for
        self.gets = LocalGets(node, None, 1 << 40)  # type: ignore[arg-type]


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their turn after each step."""
    monkeypatch.setattr("p2pstore.runtime.trio_tasks.TURN_SECONDS", 0.0)
    monkeypatch.setattr("p2pstore.runtime.trio_tasks.FIRST_TURN_SECONDS", 0.0)


async def turns_of(answer: Any) -> tuple[int, Any]:
    """How often others had their turn until an answer was there, and the answer."""
    turns, result = 0, None
    answer = in_turns(answer) if isinstance(answer, Generator) else answer

    async def wait(scope: trio.CancelScope) -> None:
        nonlocal result
        result = await answer if isinstance(answer, Awaitable) else answer
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, nursery.cancel_scope)
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1
    return turns, result


@pytest.mark.usefixtures("short_turns")
async def test_batches_of_local_clients_let_others_have_their_turn() -> None:
    world = new_world(1_024)
    fill(world, 100)
    peer = Peer(world)
    reserve = local.Reserve([(1, 200, 300)], NAMESPACE)
    turns, reserved = await turns_of(peer.puts.reserve(CLIENT, reserve))
    assert turns > 300 // PUBLISHED_PER_STEP
    sums = chunk_sums(b"v")
    rooms = [(span.first, span.count) for span in reserved.spans]
    keys = [f"new {n}" for n in range(300)]
    commit = local.Commit(NAMESPACE, keys, rooms, [1], sums * 300, [PutOptions()])
    turns, committed = await turns_of(peer.puts.commit(CLIENT, commit))
    assert turns > 300 // PUBLISHED_PER_STEP
    assert not any(each.error.code for _, each in committed.outcomes)
    packed = b"".join(digest_of(f"new {n}") for n in range(300))
    turns, leased = await turns_of(peer.gets.lease(CLIENT, local.Lease(packed, fetch=False)))
    assert turns >= 300
    leases = [each.lease for each in leased.items]
    assert all(leases)
    turns, _ = await turns_of(peer.gets.release(CLIENT, local.Release([*leases, 1 << 40])))
    assert turns >= 300
    assert not world.segment.leased_bytes
    check_segment(world.segment)


@pytest.mark.usefixtures("short_turns")
async def test_a_batch_of_reservations_that_is_called_off_leaves_none() -> None:
    world = new_world(1_024)
    peer = Peer(world)
    reserve = local.Reserve([(1, 200, 1_000)], NAMESPACE)
    work = in_turns(peer.puts.reserve(CLIENT, reserve))
    assert isinstance(work, Awaitable)
    rest: Awaitable[Any] = work

    async def wait() -> None:
        await rest

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        while not world.segment.used_bytes:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not world.segment.used_bytes
    fill(world, 10)
    packed = b"".join(digest_of(f"k{n}") for n in range(10))
    answer = peer.gets.lease(CLIENT, local.Lease(packed, fetch=False))
    assert isinstance(answer, Awaitable)
    with trio.CancelScope() as scope:
        scope.cancel()
        await answer
    assert not world.segment.leased_bytes


@pytest.mark.usefixtures("short_turns")
async def test_one_piece_of_work_at_a_time_has_a_turn() -> None:
    """Of many that are worked on, so that it does not add up."""
    done: list[int] = []
    passes: list[int] = []

    def work() -> Steps[None]:
        for _ in range(20):
            done.append(len(passes))
            yield

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(take_turns, work())
        await trio.lowlevel.checkpoint()
        while len(done) < 200:
            passes.append(len(done))
            await trio.lowlevel.checkpoint()
    later = done[30:]
    assert max(later.count(number) for number in set(later)) <= 2


def test_a_short_answer_is_there_at_once() -> None:
    def work() -> Steps[int]:
        return 5
        yield

    assert in_turns(work()) == 5


def test_what_a_client_holds_ends_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(1_024)
    fill(world, 800)
    for entry in world.segment.entries():
        world.segment.leases.lease(entry, session="c", now=1.9e9)
    for _ in range(200):
        world.segment.reserve(1, 100, session="c", now=1.9e9)
    with counted(monkeypatch, References, "let_go") as calls:
        most, _ = most_in_a_step(world.segment.drop_session_in_steps("c"), calls)
    assert most <= DROPPED_PER_STEP
    assert not world.segment.leased_bytes
    assert world.segment.used_bytes == 800 * GRANULE


def test_lists_of_requests_are_bounded_before_they_are_decoded() -> None:
    with pytest.raises(ProtocolError, match="length"):
        decode_body(local.Abort, encode_body(local.Abort([1] * (MAX_BATCH + 1))))


# --- many members, floors and objects of an earlier life -------------------------------------


def test_what_is_told_of_members_is_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Harness()
    for number in range(1, 301):
        record = peer_record(SimulatedSigner(peer_id_of(number)))
        world.core.gossip.membership.observe_record(read_peer_record(record), record, world.now)
    with counted(monkeypatch, statistics, "_member_document") as calls:
        most, document = most_in_a_step(statistics.cluster_document(world.core, world.now), calls)
    assert most <= statistics.MEMBERS_PER_STEP
    assert document["peers"] == len(document["members"]) == 301
    steps = statistics.json_in_steps(document)
    assert len(list(iter(steps))) > 1
    assert json.loads(run_through(statistics.json_in_steps(document))) == document


def floors_of_a_second(count: int) -> tuple[KeptRecords, list[SignedRecord]]:
    """Floors of one key each, all of the same second."""
    records, signer = KeptRecords(), SimulatedSigner(peer_id_of(1))
    kept = []
    for number in range(count):
        record = floor_of_keys(
            [digest_of(f"k{number}")], bytes(16), Version(clock_at(0.0) + number, 9), signer.peer_id
        )
        signed = sign_cluster_record(record, signer)
        assert records.offer(record, signed)
        kept.append(signed)
    return records, kept


def test_floors_of_one_second_are_dropped_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _ = floors_of_a_second(3_000)
    (writer,) = records.floors.writers
    records.floors.raise_horizon({writer: clock_at(0.0) + 1_999})
    with counted(monkeypatch, FloorSet, "_drop") as dropped:
        while records.floors.purging:
            dropped[0] = 0
            records.purge()
            assert dropped[0] <= PURGE_STEP
    assert records.floors.count == len(records) == 1_000
    assert records.floors.hash_below(0) == 0


def test_floors_are_listed_in_steps_for_the_disk() -> None:
    records, kept = floors_of_a_second(1_000)
    steps = records.dump_in_steps()
    for _ in range(3):
        next(steps)
    dropped = records.floors.writers[0]
    records.floors.raise_horizon({dropped: clock_at(0.0) + 499})
    while records.floors.purging:
        records.purge()
    found = {signed.body for signed in run_through(steps)}
    assert {signed.body for signed in kept[500:]} <= found


def test_the_hashes_of_many_ends_are_those_of_each() -> None:
    records, _ = floors_of_a_second(10)
    floors = records.floors
    first = clock_at(0.0) >> SLICE_BITS
    ends = [(first + number) << SLICE_BITS for number in (3, -2, 0, 1, 600)]
    assert floors.hashes_below(ends) == {end: floors.hash_below(end) for end in ends}


def test_objects_of_an_earlier_life_come_back_some_at_a_time() -> None:
    world = ColdWorld()
    objects = [
        ColdObject(digest_of(f"k{number}"), bytes(16), Version(clock_at(0.0), 9))
        for number in range(500)
    ]
    world.core.earlier_life.return_with(objects, clock_at(0.0), world.now)
    found: list[ColdSorted] = []
    while world.core.earlier_life.returning:
        world.now += 0.1
        world.core.tick(world.now)
        for effect in world.effects(ColdSorted):
            found.append(effect)
            assert len(effect.good) + len(effect.discarded) <= COLD_PER_STEP
    assert sum(len(each.good) + len(each.discarded) for each in found) == 500


class Sleeper(Operation):
    """Wants to be woken once."""

    woken = 0

    def start(self, now: float) -> None:
        self.set_alarm(now + 1.0)

    def wake(self, now: float) -> None:
        Sleeper.woken += 1
        self.finish(None, now)


def test_operations_that_end_together_end_some_at_a_time() -> None:
    world = Harness()
    for _ in range(300):
        world.core.operations.start(Sleeper(world.core), world.now)
    world.now += 2.0
    Sleeper.woken, before = 0, 0
    while Sleeper.woken < 300:
        assert world.core.next_tick(world.now) <= world.now
        world.core.tick(world.now)
        assert 0 < Sleeper.woken - before <= operations.WOKEN_PER_TICK
        before = Sleeper.woken
