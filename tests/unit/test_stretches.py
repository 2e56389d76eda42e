"""Finding stretches in which nothing has to stay: what a search has proved is not looked at again."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from p2pstore.memory.extent_allocator import ExtentAllocator
from p2pstore.memory.victims import LOOKED_AT_PER_STEP, StretchSearch
from p2pstore.runtime.stepping import run_through
from tests.unit.eviction_entries import allocate

GRANULE = 4096


class World:
    """An allocator full of single granules, of which some have to stay."""

    def __init__(self, granules: int) -> None:
        self.allocator = ExtentAllocator(granules * GRANULE, GRANULE)
        self.staying: set[int] = set()
        self.looked = 0
        self.search = StretchSearch(self.allocator, self._stays)
        self.allocator.on_opened = self.search.opened

    def _stays(self, offset: int) -> bool:
        self.looked += 1
        return offset in self.staying

    def fill(self, granules: int = 1) -> None:
        while allocate(self.allocator, granules * GRANULE) is not None:
            pass

    def find(self, granules: int) -> list[int]:
        return run_through(self.search.find(granules * GRANULE))

    def let_go(self, offset: int) -> None:
        self.staying.discard(offset)
        self.search.opened(offset)

    def longest(self) -> int:
        """Bytes of the longest stretch in which something lies that may go."""
        longest = begin = 0
        inside = False
        for offset, size, taken in self._extents():
            if taken and offset in self.staying:
                begin, inside = offset + size, False
                continue
            inside |= taken
            if inside:
                longest = max(longest, offset + size - begin)
        return longest

    def _extents(self) -> list[tuple[int, int, bool]]:
        taken = [(offset, size, True) for offset, size in self.allocator.extents()]
        free = [(offset, size, False) for offset, size in self.allocator.free_extents()]
        return sorted(taken + free)


def test_what_a_failed_search_proved_is_not_proved_again() -> None:
    world = World(16_384)
    world.fill()
    world.staying = {offset for offset, _ in world.allocator.extents() if offset // GRANULE % 10}
    assert world.find(15) == []
    first = world.looked
    assert first <= 16_384
    for granules in (15, 16, 40, 15):
        assert world.find(granules) == []
    assert world.looked == first


def test_only_what_may_go_by_now_is_looked_at_again() -> None:
    world = World(16_384)
    world.fill()
    world.staying = {offset for offset, _ in world.allocator.extents() if offset // GRANULE % 10}
    assert world.find(15) == []
    first = world.looked
    for granule in range(5_001, 5_010):
        world.let_go(granule * GRANULE)
    assert world.find(15) == []
    for granule in range(5_011, 5_020):
        world.let_go(granule * GRANULE)
    (found,) = world.find(15)
    assert 5_000 <= found // GRANULE <= 5_020
    assert world.looked < first + 500


def test_a_smaller_value_is_looked_for_anew() -> None:
    world = World(1_000)
    world.fill()
    world.staying = {offset for offset, _ in world.allocator.extents() if offset // GRANULE % 10}
    assert world.find(3) == []
    world.staying.discard(501 * GRANULE)
    assert world.find(2)


def test_others_have_their_turn_while_a_search_goes_on() -> None:
    world = World(16_384)
    world.fill()
    world.staying = {offset for offset, _ in world.allocator.extents() if offset // GRANULE % 10}
    steps = world.search.find(15 * GRANULE)
    turns, looked = 0, 0
    for _ in steps:
        assert world.looked - looked <= 2 * LOOKED_AT_PER_STEP
        looked, turns = world.looked, turns + 1
        if turns == 20:  # behind what was passed: room for the value
            for granule in range(1_000, 1_020):
                world.allocator.free(granule * GRANULE)
                world.staying.discard(granule * GRANULE)
    assert turns > 20
    assert world.find(20) == []  # it is free, as a put would have seen
    world.let_go(1_020 * GRANULE)
    assert world.find(21)


class SearchAgainstExtents(RuleBasedStateMachine):
    """A search finds something exactly when there is something, whatever happened since the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(48)
        self.running: Any = None

    def taken(self) -> list[int]:
        return [offset for offset, _ in self.world.allocator.extents()]

    @rule(granules=st.integers(1, 6))
    def put(self, granules: int) -> None:
        offset = allocate(self.world.allocator, granules * GRANULE)
        if offset is not None:  # it was being written, and may go now
            self.world.let_go(offset)

    @precondition(lambda self: self.taken())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.taken()))
        self.world.staying.discard(offset)
        self.world.allocator.free(offset)

    @precondition(lambda self: self.taken())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.world.staying.add(data.draw(st.sampled_from(self.taken())))

    @precondition(lambda self: self.world.staying)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.world.let_go(data.draw(st.sampled_from(sorted(self.world.staying))))

    @rule(granules=st.integers(1, 20))
    def find(self, granules: int) -> None:
        if self.world.allocator.largest_free_bytes >= granules * GRANULE:
            return  # a put with free room does not search
        found = self.world.find(granules)
        assert bool(found) == (self.world.longest() >= granules * GRANULE)
        assert not self.world.staying.intersection(found)
        assert set(found) <= set(self.taken())

    @rule(granules=st.integers(1, 20))
    def begin_to_find(self, granules: int) -> None:
        """Go on with the search that is under way, if there is one, or begin one."""
        if self.running is None:
            self.running = self.world.search.find(granules * GRANULE)
        if next(self.running, self) is self:
            self.running = None


def test_a_search_against_all_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstore.memory.victims.LOOKED_AT_PER_STEP", 3)
    run_state_machine_as_test(
        SearchAgainstExtents, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
