"""Simulated reads from holders that die, fall silent and reuse their memory, at every moment of a read.

What every transport has to do, the simulated one does in `tests/contract/test_transport.py`.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import plan_geometry
from p2pstore.objects import CHUNK_BYTES, MIB
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.transport import BufferDestination, Pulled, PullReport, pull_with_failover
from p2pstore.wire import Code
from simulation.network import Faults
from simulation.tasks import Task
from simulation.transport import SimulatedTransport
from tests.contract.simulated import READ_SECONDS, SimulatedHarness
from tests.contract.test_transport import pattern, put

PROGRESS_SECONDS = 5.0
MOMENTS = range(120)
"""Events of a read of two chunks, and some more."""
OLD, NEW = pattern(CHUNK_BYTES + 77), pattern(CHUNK_BYTES + 77, seed=1)


def fresh_segment(data_bytes: int = 3 * MIB) -> tuple[Segment, memoryview]:
    geometry = plan_geometry(data_bytes)
    memory = memoryview(bytearray(geometry.total_bytes))
    return Segment(memory, segment_id=bytes(16), incarnation=7, geometry=geometry), memory


class World:
    """One reader, and a holder of one object; `more` of them."""

    def __init__(self, value: bytes, more: int = 0, faults: Faults | None = None) -> None:
        self.value = value
        self.harness = SimulatedHarness(*fresh_segment(), faults)
        self.kernel = self.harness.kernel
        for _ in range(more):
            self.harness.add_owner(*fresh_segment())
        self.owners = list(self.harness.owners.values())
        for owner in self.owners:
            self.digest = put(owner.segment, "key", value)
        self.buffer = bytearray(len(value))
        self.transport = SimulatedTransport(
            self.harness.network, 0, self.harness.owners, READ_SECONDS, PROGRESS_SECONDS
        )

    def pull(self, answer_seconds: float = PROGRESS_SECONDS) -> Task[Pulled]:
        """A read of the first holder begins."""
        copy = replace(self.harness.copy(), answer_seconds=answer_seconds)
        return Task(
            self.kernel, lambda: self.transport.pull(copy, self.digest, BufferDestination(self.buffer))
        )

    def pull_from_any(self) -> Task[PullReport]:
        """A read of all holders in turn begins."""
        copies = [self.harness.copy(member=owner.number) for owner in self.owners]
        return Task(
            self.kernel,
            lambda: pull_with_failover(
                copies, [self.transport], self.digest, BufferDestination(self.buffer)
            ),
        )

    def turn(self, events: int) -> None:
        for _ in range(events):
            self.harness.turn()

    def failure(self, task: Task[Pulled]) -> PullFailed:
        self.kernel.run_until(self.kernel.now + 60.0)
        with pytest.raises(PullFailed) as caught:
            task.result()
        return caught.value


@pytest.mark.parametrize("answer_seconds", [1.5, 60.0])
def test_a_silent_holder_costs_a_deadline_and_less_when_hurried(answer_seconds: float) -> None:
    world = World(b"value")
    world.harness.network.blocked.add((1, 0))
    task = world.pull(answer_seconds)
    deadline = min(answer_seconds, PROGRESS_SECONDS)
    world.kernel.run_until(deadline - 0.01)
    assert not task.ended
    world.kernel.run_until(deadline + 0.01)
    assert task.ended
    failure = world.failure(task)
    assert (failure.code, failure.retriable) == (Code.DEADLINE_EXCEEDED, True)


@pytest.mark.parametrize("answer_seconds", [1.5, 60.0])
def test_a_holder_that_falls_silent_in_the_middle_costs_the_same(answer_seconds: float) -> None:
    world = World(pattern(5000))
    task = world.pull(answer_seconds)
    while not any(world.buffer):
        world.turn(1)
    world.harness.network.blocked.add((0, 1))
    deadline = min(answer_seconds, PROGRESS_SECONDS)
    world.kernel.run_until(deadline - 0.1)
    assert not task.ended
    assert world.failure(task).code is Code.DEADLINE_EXCEEDED


def test_a_holder_that_dies_at_any_moment_fails_over() -> None:
    sources = set()
    for moment in MOMENTS:
        world = World(OLD, more=1)
        task = world.pull_from_any()
        world.turn(moment)
        world.owners[0].end()
        world.kernel.run_until(60.0)
        report = task.result()
        assert world.buffer == OLD
        assert report.copy is not None
        sources.add(report.copy.member)
        died_in_time = [Code.UNAVAILABLE] if report.copy.member == 2 else []
        assert [failure.code for failure in report.failures] == died_in_time
    assert sources == {1, 2}


def test_the_next_holder_is_not_asked_for_what_is_there() -> None:
    """Whenever the first one dies: what it had delivered by then stays, and only the rest is read."""
    resumed = 0
    for moment in MOMENTS:
        world = World(OLD, more=1)
        first_chunk = world.owners[1].segment.find(world.digest, time.time())
        assert first_chunk is not None
        task = world.pull_from_any()
        world.turn(moment)
        world.owners[0].end()
        if world.buffer[:CHUNK_BYTES] == OLD[:CHUNK_BYTES] and any(world.buffer[CHUNK_BYTES:]):
            spoilt = slice(first_chunk.offset, first_chunk.offset + 10)
            world.owners[1].memory[spoilt] = bytes(10)  # it would not do to read it again
            resumed += 1
        world.kernel.run_until(60.0)
        task.result().unwrap()
        assert world.buffer == OLD
    assert resumed > 3


def replace_value(world: World) -> None:
    """The key gets another value of the same length, where the old one was."""
    segment = world.owners[0].segment
    segment.remove(world.digest)
    put(segment, "key", NEW, clock=2)


def reuse_memory(world: World) -> None:
    """Another object is put where this one was."""
    segment = world.owners[0].segment
    segment.remove(world.digest)
    put(segment, "another", NEW)


def fill_memory(world: World) -> None:
    """Objects are put until this one is evicted, and further."""
    segment = world.owners[0].segment
    for number in range(3):
        put(segment, f"filler {number}", NEW)
    assert segment.find(world.digest, time.time()) is None


@pytest.mark.parametrize("change", [replace_value, reuse_memory, fill_memory])
def test_memory_that_changes_at_any_moment_gives_a_whole_value_or_none(
    change: Callable[[World], None],
) -> None:
    outcomes = set()
    for moment in MOMENTS:
        world = World(OLD)
        task = world.pull()
        world.turn(moment)
        change(world)
        world.kernel.run_until(60.0)
        try:
            assert world.buffer == (NEW if task.result().slot.version.clock == 2 else OLD)
            outcomes.add("delivered")
        except PullFailed as failure:
            outcomes.add(failure.code.name)
    lacking = set() if change is replace_value else {"NO_SUCH_KEY"}
    assert outcomes == {"delivered", "STALE"} | lacking


def test_a_read_that_is_cancelled_at_any_moment_writes_nothing_more() -> None:
    for moment in MOMENTS:
        world = World(OLD)
        task = world.pull()
        world.turn(moment)
        if task.ended:
            break
        task.cancel()
        left = bytes(world.buffer)
        world.kernel.run_until(60.0)
        assert bytes(world.buffer) == left
    assert moment > 40
