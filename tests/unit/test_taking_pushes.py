"""Large pushes are taken in step by step: nothing else waits for them."""

from itertools import pairwise
from random import Random

import pytest

from p2pstore.core.serving import MAX_COMING_OF_ONE, TakePushOperation, reply_of
from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.gossip.homes.home_updates import (
    AUDIT_ENTRY,
    MAX_SET_RECORDS,
    OPERATION_COST,
    STEP_COST,
    in_steps,
)
from p2pstore.gossip.homes.home_views import HomeViews
from p2pstore.gossip.homes.partition_homes import PartitionConfig
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_index import hash_of
from p2pstore.gossip.records import LOCATION_BYTES, PARTITION_COUNT, LocationRecord, partition_of
from p2pstore.home_messages import PartitionSet, Push, Pushed
from p2pstore.objects import Version
from p2pstore.transfer import data_messages as messages
from p2pstore.transfer.data_messages import DataKind
from p2pstore.wire import Code, Failure
from tests.unit.core_harness import OTHER_INCARNATION, Harness, Other
from tests.unit.location_set import check_update
from tests.unit.test_core_partitioned import acquainted, empty_partitions, partitioned

MANY = 4_096


def records(count: int, seed: int = 1) -> list[bytes]:
    rng = Random(seed)
    return [LocationRecord(rng.randbytes(16), Version(7, 3), 5, 1).encode() for _ in range(count)]


def run_of(packed: list[bytes], first_sequence: int = 50) -> Push:
    """The first operations of their partitions."""
    numbers: dict[int, int] = {}
    said = []
    for operation in packed:
        partition = partition_of(operation)
        numbers[partition] = numbers.get(partition, 0) + 1
        said.append(numbers[partition].to_bytes(4, "little"))
    sequences = list(range(first_sequence, first_sequence + len(packed)))
    return Push(OTHER_INCARNATION, sequences, b"".join(packed), b"".join(said))


def whole(packed: list[bytes], number: int = 1) -> PartitionSet:
    return PartitionSet(partition_of(packed[0]), number, hash_of(packed), b"".join(packed))


def in_one_partition(count: int) -> list[bytes]:
    return [bytes(2) + record[2:] for record in records(count)]


def begin(world: Harness, other: Other, push: Push) -> TakePushOperation:
    operation = world.serve(other, DataKind.PUSH, push)
    assert isinstance(operation, TakePushOperation)
    return operation


def test_parts_are_all_of_an_update_in_order_and_bounded() -> None:
    sets = [whole(in_one_partition(MAX_SET_RECORDS)), *empty_partitions().sets[1:]]
    audit = b"".join(AUDIT_ENTRY.pack(each, 1, 2) for each in range(PARTITION_COUNT))
    run = run_of(records(MANY))
    push = Push(5, run.sequences, run.operations, run.numbers, 99, sets, audit, 10)
    parts = [part for part in in_steps(push) if part is not None]
    whole_update = check_update(push)
    assert [each for part in parts for each in part.operations] == whole_update.operations
    assert [each for part in parts for each in part.sets] == whole_update.sets
    assert [part.audit for part in parts if part.audit] == [whole_update.audit]
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.audit_seconds for part in parts[:-1]} == {0}
    assert parts[-1].audit_seconds == 10
    for part in parts:
        assert OPERATION_COST * len(part.operations) + len(part.audit) <= STEP_COST
        assert sum(len(each.records) for each in part.sets) <= MAX_SET_RECORDS * LOCATION_BYTES


def test_a_small_update_is_one_part() -> None:
    assert [part is not None and part.last for part in in_steps(run_of(records(64)))] == [True]
    assert [part is not None and part.last for part in in_steps(empty_partitions())] == [True]


def test_nonsense_at_the_end_is_found_before_anything_is_taken_in() -> None:
    sets = [whole(in_one_partition(MAX_SET_RECORDS)), PartitionSet(7, 1, 1, b"")]
    steps = in_steps(Push(OTHER_INCARNATION, [], b"", sets=sets))
    assert next(steps) is None
    with pytest.raises(ProtocolError, match="hash"):
        next(steps)


def test_more_audits_than_partitions_are_refused() -> None:
    audit = AUDIT_ENTRY.pack(1, 1, 1) * (PARTITION_COUNT + 1)
    with pytest.raises(ProtocolError, match="audit"):
        next(in_steps(Push(OTHER_INCARNATION, [], b"", audit=audit)))


def test_a_large_push_leaves_the_loop_between_steps() -> None:
    world = acquainted(partitioned())
    views, other = world.gossip.partitions.views, world.others[0]
    operation = begin(world, other, run_of(records(MANY)))
    counts = [views.record_count]
    while not operation.done:
        assert len(counts) < MANY
        assert world.core.next_tick(world.now) <= world.now, "it goes on at once"
        world.core.tick(world.now)
        counts.append(views.record_count)
        ping = world.serve(world.others[1], DataKind.PING, messages.Ping())
        assert isinstance(ping, messages.Pong), "others are answered meanwhile"
    assert reply_of(operation) == Pushed()
    steps = [after - before for before, after in pairwise(counts)]
    assert max(steps) <= STEP_COST // OPERATION_COST
    assert counts[-1] > MANY // 500, "those that this peer is a home of, and more"
    world.check_idle()


def test_one_step_a_tick_however_many_push() -> None:
    world = acquainted(partitioned())
    views = world.gossip.partitions.views
    operations = [
        begin(world, other, run_of(records(MANY, seed=place)))
        for place, other in enumerate(world.others)
    ]
    steps = 0
    while not all(operation.done for operation in operations):
        steps += 1
        assert steps < MANY, "it does not end"
        before = views.record_count
        world.core.tick(world.now)
        assert views.record_count - before <= STEP_COST // OPERATION_COST
    assert [reply_of(operation) for operation in operations] == [Pushed()] * len(operations)
    assert world.core.pushes_coming.next is None


def test_who_pushes_much_holds_up_only_itself() -> None:
    world = acquainted(partitioned())
    greedy, modest = world.others[:2]
    many = [
        begin(world, greedy, run_of(records(MANY, seed=place), first_sequence=50 + MANY * place))
        for place in range(MAX_COMING_OF_ONE)
    ]
    refused = world.serve(greedy, DataKind.PUSH, run_of(records(MANY), first_sequence=90_000))
    assert isinstance(refused, TakePushOperation)
    assert isinstance(reply_of(refused), Failure)
    one = begin(world, modest, run_of(records(MANY // 4, seed=99)))
    for _ in range(MANY):
        if one.done:
            break
        world.core.tick(world.now)
    assert reply_of(one) == Pushed()
    assert sum(each.done for each in many) <= 1, "it did not wait for all of them"
    for each in many:
        world.core.operations.cancel(each, world.now)
    assert world.core.pushes_coming.next is None


def test_who_does_not_wait_any_more_stands_in_nobodys_way() -> None:
    world = acquainted(partitioned())
    first, second, third = (
        begin(world, other, run_of(records(MANY, seed=place)))
        for place, other in enumerate(world.others[:3])
    )
    world.core.operations.cancel(second, world.now)
    world.core.operations.cancel(first, world.now)
    assert isinstance(first.result, DeadlineExceeded)
    world.pass_time(0.1)
    assert reply_of(third) == Pushed()
    assert world.core.pushes_coming.next is None


def test_nonsense_that_is_found_late_is_said() -> None:
    world = acquainted(partitioned())
    sets = [whole(in_one_partition(MAX_SET_RECORDS)), PartitionSet(7, 1, 1, b"")]
    push = Push(OTHER_INCARNATION, [], b"", sets=sets)
    operation = begin(world, world.others[0], push)
    world.pass_time(0.1)
    reply = reply_of(operation)
    assert isinstance(reply, Failure)
    assert reply.code == Code.MALFORMED
    assert world.gossip.partitions.views.record_count == 0


def test_what_is_taken_in_by_steps_is_what_would_be_at_once() -> None:
    packed = records(MANY)
    run = run_of([*packed, *records(500, seed=2)])
    skipped = Push(  # a gap in the partition of the tenth operation
        OTHER_INCARNATION,
        run.sequences[:10] + run.sequences[11:],
        run.operations[: 10 * LOCATION_BYTES] + run.operations[11 * LOCATION_BYTES :],
        run.numbers[:40] + run.numbers[44:],
    )
    at_once, by_steps = (HomeViews(PartitionConfig(), Directory()) for _ in range(2))
    behind = at_once.take(1, check_update(skipped), 0.0)
    said: set[int] = set()
    for part in in_steps(skipped):
        assert part is not None
        said.update(by_steps.take(1, part, 0.0))
    assert said == set(behind) == {partition_of(packed[10])}
    assert by_steps.record_count == at_once.record_count < len(packed) + 500
    for record in packed:
        assert by_steps.directory.holders(record[:16]) == at_once.directory.holders(record[:16])


def test_a_partition_that_is_too_large_is_not_kept() -> None:
    home = HomeViews(PartitionConfig(), Directory())
    large = whole(in_one_partition(MAX_SET_RECORDS + 1))
    assert home.take(1, check_update(Push(5, [], b"", sets=[large])), 0.0) == [0]
    assert home.record_count == 0
