"""Which chunks are there, which reader brings the others, and that no two write to one place."""

import heapq
from dataclasses import dataclass, field
from itertools import chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pstore.runtime.flow import PATIENCE
from p2pstore.transfer.reading.arriving import ASSUMED_CHUNK_SECONDS, CHANGE_SECONDS, Slices


def test_chunks_are_handed_out_in_runs_and_come_back() -> None:
    slices = Slices(10, 4)
    assert slices.take(1) == range(4)
    assert slices.take(2) == range(4, 8)
    slices.verified(1, 0)
    slices.verified(1, 2)
    slices.leave(1)
    assert slices.take(3) == range(1, 2)  # a run ends where something is there
    assert slices.take(3) == range(3, 4)
    assert slices.take(3) == range(8, 10)
    assert slices.take(3) == range(0)
    assert not slices.complete


def test_nothing_is_brought_by_two() -> None:
    slices = Slices(3, 4)
    slices.claim(1, range(1, 2))
    with pytest.raises(ValueError, match="not all free"):
        slices.claim(2, range(3))
    with pytest.raises(KeyError):
        slices.verified(2, 1)


class ManyReaders(RuleBasedStateMachine):
    """Readers that take, bring and leave in any order, against a model of sets."""

    @initialize(chunks=st.integers(1, 40), slice_chunks=st.integers(1, 16))
    def begin(self, chunks: int, slice_chunks: int) -> None:
        self.slices = Slices(chunks, slice_chunks)
        self.chunks = chunks
        self.there: set[int] = set()
        self.owned: dict[int, set[int]] = {reader: set() for reader in range(4)}

    @rule(reader=st.integers(0, 3))
    def take(self, reader: int) -> None:
        taken = set(range(self.chunks)) - self.there - set().union(*self.owned.values())
        run = self.slices.take(reader)
        assert set(run) <= taken
        assert bool(run) == bool(taken)
        assert len(run) <= self.slices.slice_chunks
        self.owned[reader] |= set(run)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([each for each in self.owned if self.owned[each]]))
        number = data.draw(st.sampled_from(sorted(self.owned[reader])))
        self.slices.verified(reader, number)
        self.owned[reader].remove(number)
        self.there.add(number)

    @rule(reader=st.integers(0, 3))
    def leave(self, reader: int) -> None:
        self.slices.leave(reader)
        self.owned[reader].clear()

    @invariant()
    def knows_when_it_is_complete(self) -> None:
        assert self.slices.there == len(self.there)
        assert self.slices.complete == (len(self.there) == self.chunks)


TestManyReaders = ManyReaders.TestCase


# --- several readers, in virtual time ------------------------------------------------------------


@dataclass
class Speed:
    """A holder: what a chunk takes with it, and after how many of them it hangs or dies."""

    chunk_seconds: float
    hangs_after: int = 1 << 30
    dies_after: int = 1 << 30


@dataclass
class Race:
    """The shells' use of `Slices`, in virtual time."""

    slices: Slices
    speeds: list[Speed]
    now: float = 0.0
    brought: list[list[int]] = field(default_factory=list)
    overtaken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.brought = [[] for _ in self.speeds]
        self._runs: dict[int, list[int]] = {}
        self._waiting: set[int] = set()
        self._turns = [0] * len(self.speeds)
        """The plan of a reader counts only while nothing else happened to it."""
        self._events: list[tuple[float, int, int]] = []

    def run(self) -> float:
        """The time it takes; infinite when no reader brings the rest."""
        for reader in range(len(self.speeds)):
            self._act(reader)
        while self._events and not self.slices.complete:
            self.now, reader, turn = heapq.heappop(self._events)
            if turn == self._turns[reader]:
                self._go_on(reader)
        return self.now if self.slices.complete else float("inf")

    def _plan(self, reader: int, seconds: float) -> None:
        self._turns[reader] += 1
        heapq.heappush(self._events, (self.now + seconds, reader, self._turns[reader]))

    def _act(self, reader: int) -> None:
        self._waiting.discard(reader)
        step = self.slices.next_step(reader, self.now)
        if step.overtake is not None:
            self.overtaken.append(step.overtake)
            self._stop(step.overtake)
            self._act(reader)
        elif step.read:
            self._runs[reader] = list(self.slices.take(reader, self.now))
            assert self._runs[reader]
            self._next_chunk(reader)
        elif step.wait_seconds:
            self._waiting.add(reader)
            self._plan(reader, step.wait_seconds)

    def _stop(self, reader: int) -> None:
        self._turns[reader] += 1
        self._runs.pop(reader)
        self.slices.leave(reader, self.now)
        for other in list(self._waiting):
            if other in self._waiting:  # it may have acted meanwhile, when another one stopped
                self._act(other)

    def _next_chunk(self, reader: int) -> None:
        speed = self.speeds[reader]
        if len(self.brought[reader]) >= speed.dies_after:
            self._stop(reader)
        elif len(self.brought[reader]) < speed.hangs_after:
            self._plan(reader, speed.chunk_seconds)

    def _go_on(self, reader: int) -> None:
        if reader in self._waiting:
            self._act(reader)
            return
        number = self._runs[reader].pop(0)
        self.slices.verified(reader, number, self.now)
        self.brought[reader].append(number)
        if self._runs[reader]:
            self._next_chunk(reader)
        else:
            del self._runs[reader]
            self._act(reader)


def test_equals_share_evenly_and_wait_for_each_other() -> None:
    race = Race(Slices(256, 16), [Speed(0.001)] * 4)
    assert race.run() == pytest.approx(0.064)
    assert [len(each) for each in race.brought] == [64] * 4
    assert race.overtaken == []


def test_a_fast_one_does_more() -> None:
    race = Race(Slices(256, 16), [Speed(0.001), Speed(0.004)])
    race.run()
    assert 200 <= len(race.brought[0]) <= 240


@pytest.mark.parametrize("slow", [Speed(1.0), Speed(0.001, hangs_after=20)])
def test_nobody_waits_long_for_the_slowest(slow: Speed) -> None:
    race = Race(Slices(256, 16), [slow, Speed(0.001)])
    patience = PATIENCE * (16 * 0.001 + CHANGE_SECONDS)
    assert race.run() < 0.256 + patience + 0.016
    assert race.overtaken == [0]


def test_one_that_is_not_much_slower_may_finish() -> None:
    race = Race(Slices(32, 16), [Speed(0.002), Speed(0.001)])
    assert race.run() == pytest.approx(0.032)
    assert race.overtaken == []


SPEEDS = st.builds(
    Speed,
    st.floats(0.001, 1.0),
    st.one_of(st.just(1 << 30), st.integers(0, 60)),
    st.one_of(st.just(1 << 30), st.integers(0, 60)),
)


@given(st.integers(1, 200), st.integers(1, 20), st.floats(0.001, 0.01), st.lists(SPEEDS, max_size=3))
@example(19, 19, 0.0078125, [Speed(0.1875)])
@example(16, 8, 0.0078125, [Speed(0.001, dies_after=8)])
@example(17, 17, 0.002, [Speed(0.0034, dies_after=2), Speed(0.5, dies_after=0)])
def test_whatever_the_others_do_one_steady_reader_completes_it_soon(
    chunks: int, slice_chunks: int, chunk_seconds: float, others: list[Speed]
) -> None:
    race = Race(Slices(chunks, slice_chunks), [*others, Speed(chunk_seconds)])
    alone = chunks * chunk_seconds
    # Before its first chunk it counts as fast as any.
    patience = PATIENCE * (min(chunks, slice_chunks) * ASSUMED_CHUNK_SECONDS + CHANGE_SECONDS)
    seconds = race.run()
    brought = sorted(chain.from_iterable(race.brought))
    assert len(set(brought)) == len(brought)
    if len(others) in race.overtaken:  # by a faster one, which may have died: it is asked again
        return
    assert seconds < 3 * alone + len(others) * patience + 1.0
    assert brought == list(range(chunks))


@given(st.integers(1, 100), st.lists(SPEEDS, min_size=1, max_size=4))
def test_nothing_is_brought_twice_and_nothing_is_forgotten(chunks: int, speeds: list[Speed]) -> None:
    race = Race(Slices(chunks, 8), speeds)
    race.run()
    numbers = list(chain.from_iterable(race.brought))
    assert len(numbers) == len(set(numbers)) == race.slices.there
    if not race.slices.complete:  # no reader is left that could
        for reader, speed in enumerate(speeds):
            stopped = len(race.brought[reader]) >= min(speed.hangs_after, speed.dies_after)
            assert stopped or reader in race.overtaken


def test_other_readers_begin_with_a_clean_slate() -> None:
    race = Race(Slices(64, 16), [Speed(1.0), Speed(0.001, dies_after=50)])
    race.run()
    assert race.overtaken == [0]
    assert not race.slices.take(0)
    race.slices.share(64)
    assert race.slices.take(0)
    with pytest.raises(ValueError, match="under way"):
        race.slices.share(16)
