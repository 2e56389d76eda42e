"""The allocator against a model (a set of intervals), and how full memory stays under churn."""

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pstore.memory.extent_allocator import ExtentAllocator, choose_windows
from p2pstore.runtime.stepping import run_through
from tests.unit.eviction_entries import allocate

GRANULE = 16


class AllocatorAgainstIntervals(RuleBasedStateMachine):
    """`taken` maps offset -> size; everything else about the allocator follows from it."""

    @initialize(granules=st.integers(1, 64), begin=st.sampled_from([0, 3]))
    def create(self, granules: int, begin: int) -> None:
        self.begin, self.end = begin * GRANULE, (begin + granules) * GRANULE
        self.allocator = ExtentAllocator(granules * GRANULE, GRANULE, self.begin)
        self.taken: dict[int, int] = {}

    def holes(self) -> list[tuple[int, int]]:
        position, holes = self.begin, []
        for start, size in [*sorted(self.taken.items()), (self.end, 0)]:
            if start > position:
                holes.append((position, start - position))
            position = start + size
        return holes

    @rule(granules=st.integers(1, 20))
    def allocate(self, granules: int) -> None:
        size = granules * GRANULE
        fitting = [hole for hole in self.holes() if hole[1] >= size]
        offset = allocate(self.allocator, size)
        if not fitting:
            assert offset is None
            return
        best = min(length for _, length in fitting)
        assert offset in [start for start, length in fitting if length == best]
        assert offset is not None
        self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.allocator.size_of(offset) == self.taken.pop(offset)
        self.allocator.free(offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        kept = data.draw(st.integers(1, self.taken[offset] // GRANULE)) * GRANULE
        self.allocator.shrink(offset, kept)
        self.taken[offset] = kept

    @rule(offset=st.integers(0, 70))
    def free_nothing(self, offset: int) -> None:
        if offset * GRANULE not in self.taken:
            with pytest.raises(KeyError):
                self.allocator.free(offset * GRANULE)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), granules=st.integers(1, 64))
    def find_window(self, data: st.DataObject, granules: int) -> None:
        barred = data.draw(st.sets(st.sampled_from(sorted(self.taken))))
        costs = {offset: float(offset % 7 + 1) for offset in self.taken if offset not in barred}
        size = granules * GRANULE
        runs = self.runs_without(barred)
        found = run_through(self.allocator.find_windows(size, sorted(costs), costs.get))
        wide = [(begin, length) for begin, length, used in runs if length >= size and used]
        if not wide:
            assert not found
        else:
            window = choose_windows(found)
            assert not barred.intersection(window)
            assert self.freed_by(window) >= size

    def runs_without(self, barred: set[int]) -> list[tuple[int, int, int]]:
        """(offset, bytes, extents) of each stretch between barred extents."""
        runs: list[tuple[int, int, int]] = []
        begin, used = self.begin, 0
        for start, size in sorted(self.taken.items()):
            if start in barred:
                runs.append((begin, start - begin, used))
                begin, used = start + size, 0
            else:
                used += 1
        return [*runs, (begin, self.end - begin, used)]

    def freed_by(self, window: list[int]) -> int:
        """The hole around the window once it is evicted; 0 if that is not one piece."""
        kept = {start: size for start, size in self.taken.items() if start not in window}
        before, self.taken = self.taken, kept
        holes = self.holes()
        self.taken = before
        around = [
            length for start, length in holes if all(start <= at < start + length for at in window)
        ]
        return max(around, default=0)

    @invariant()
    def agrees(self) -> None:
        allocator = self.allocator
        holes = self.holes()
        assert allocator.extents() == sorted(self.taken.items())
        assert allocator.free_extents() == holes
        assert allocator.used_bytes == sum(self.taken.values())
        assert allocator.free_bytes == self.end - self.begin - allocator.used_bytes
        assert allocator.largest_free_bytes == max((length for _, length in holes), default=0)
        assert len(allocator) == len(self.taken)


TestAllocatorAgainstIntervals = AllocatorAgainstIntervals.TestCase
TestAllocatorAgainstIntervals.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)


def test_equal_extents_are_reused_last_in_first_out() -> None:
    allocator = ExtentAllocator(20 * GRANULE, GRANULE)
    offsets = [allocate(allocator, GRANULE) for _ in range(20)]
    freed = [offset for offset in offsets[1::2] if offset is not None]
    random.Random(3).shuffle(freed)
    for offset in freed:
        allocator.free(offset)
    assert [allocate(allocator, GRANULE) for _ in freed] == freed[::-1]


@pytest.mark.parametrize("size", [0, -GRANULE, GRANULE + 1])
def test_sizes_that_are_no_granules_are_refused(size: int) -> None:
    allocator = ExtentAllocator(4 * GRANULE, GRANULE)
    with pytest.raises(ValueError, match="granules"):
        allocate(allocator, size)
    if size:
        with pytest.raises(ValueError, match="granules"):
            ExtentAllocator(size, GRANULE)


def test_an_area_of_nothing_has_room_for_nothing() -> None:
    allocator = ExtentAllocator(0, GRANULE)
    assert allocate(allocator, GRANULE) is None
    assert not run_through(allocator.find_windows(GRANULE, [], lambda _: 1.0))
    assert (allocator.free_bytes, allocator.largest_free_bytes, allocator.free_extents()) == (0, 0, [])


def test_an_extent_does_not_grow() -> None:
    allocator = ExtentAllocator(4 * GRANULE, GRANULE)
    offset = allocate(allocator, GRANULE)
    assert offset is not None
    with pytest.raises(ValueError, match="cannot grow"):
        allocator.shrink(offset, 2 * GRANULE)


def window(
    sizes: list[int], needed: int, candidates: list[int], costs: dict[int, float], count: int = 1
) -> object:
    """Windows in a full area of extents of `sizes` granules; extents are named by their number."""
    allocator = ExtentAllocator(sum(sizes) * GRANULE, GRANULE)
    offsets = [allocate(allocator, size * GRANULE) for size in sizes]
    number = {offset: index for index, offset in enumerate(offsets)}
    found = run_through(
        allocator.find_windows(
            needed * GRANULE,
            [offset for index in candidates if (offset := offsets[index]) is not None],
            lambda offset: costs.get(number[offset]),
            count,
        )
    )
    return sorted(number[offset] for offset in choose_windows(found, count)) if found else None


def test_a_window_grows_over_the_cheaper_side_first() -> None:
    assert window([1, 1, 1], 2, [1], {0: 5, 1: 1, 2: 3}) == [1, 2]
    assert window([1, 1, 1], 2, [1], {0: 3, 1: 1, 2: 5}) == [0, 1]


def test_what_must_stay_stops_a_window() -> None:
    assert window([1, 1, 1], 2, [1], {0: 5, 1: 1}) == [0, 1]
    assert window([1, 1, 1], 3, [1], {0: 5, 1: 1}) is None
    assert window([1, 1, 1], 1, [2], {0: 5, 1: 1}) is None


def test_the_cheapest_of_several_windows_wins() -> None:
    costs = {0: 1.0, 1: 9.0, 2: 9.0, 3: 2.0, 4: 2.0}
    assert window([1, 1, 1, 1, 1], 2, [0, 3], costs) == [3, 4]
    assert window([1, 1, 1, 1, 1], 2, [0], costs) == [0, 1]
    costs = {0: 9.0, 1: 1.0, 3: 2.0, 4: 2.0}
    assert window([1, 1, 1, 1, 1], 2, [1, 3], costs) == [3, 4]
    assert window([1, 1, 1, 1, 1], 2, [1], costs) == [0, 1]


Eviction = Callable[[ExtentAllocator, "OrderedDict[int, int]", int, int], list[int]]
"""(allocator, when each extent was taken, now, size) -> extents to evict."""


def test_several_windows_at_once() -> None:
    ones = dict.fromkeys(range(8), 1.0)
    assert window([1] * 8, 1, [2, 0, 5], ones, count=2) == [0, 2]
    assert window([1] * 8, 1, [2, 0, 5], ones, count=9) == [0, 2, 5]
    # The windows of 1 and 2 share an extent with that of 0; all grow to the left, where both sides cost the same.
    assert window([1] * 8, 2, [0, 1, 2, 6], {**ones, 0: 0.5}, count=3) == [0, 1, 5, 6]
    # Windows that cost much more than the cheapest stay, whichever comes first.
    costs = {0: 9.0, 2: 2.0, 4: 1.0, 6: 3.9}
    assert window([1] * 8, 1, [0, 2, 4, 6], costs, count=8) == [2, 4, 6]
    assert window([1] * 8, 1, [4, 6, 2, 0], costs, count=8) == [2, 4, 6]


def cheapest_windows(
    allocator: ExtentAllocator, born: OrderedDict[int, int], now: int, size: int
) -> list[int]:
    oldest = list(islice(born, 8))
    found = run_through(
        allocator.find_windows(size, oldest, lambda at: allocator.size_of(at) / (now - born[at]))
    )
    return choose_windows(found)


def utilisation(evict: Eviction) -> float:
    """Mean share of memory in use in a steady churn of extents of 1 to 256 granules."""
    rng = random.Random(11)
    allocator = ExtentAllocator(16384 * GRANULE, GRANULE)
    born: OrderedDict[int, int] = OrderedDict()
    used = []
    for now in range(6000):
        size = int(math.exp(rng.uniform(0, math.log(256)))) * GRANULE
        while (offset := allocate(allocator, size)) is None:
            for victim in evict(allocator, born, now, size):
                allocator.free(victim)
                del born[victim]
        born[offset] = now
        if now > 2000:
            used.append(allocator.used_bytes / allocator.data_bytes)
    return sum(used) / len(used)


def test_memory_stays_full_under_a_mixed_load() -> None:
    assert utilisation(cheapest_windows) >= 0.97
