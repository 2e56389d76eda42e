"""Floors in order of time, coarsely: which are the oldest, without sorting all of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

Name = TypeVar("Name")

SLICE_BITS: Final = 26
"""A slice of time is 1.024 s: 2^26 of the hybrid clock."""


class FloorIndex(Generic[Name]):
    """Names by the clock of their floors, in slices of time."""

    def __init__(self) -> None:
        self._slices: dict[int, dict[Name, None]] = {}
        self._order: list[int] = []
        """A heap of slice numbers; some of them may be empty by now, or named twice."""
        self._newest = 0
        """No slice has a higher number."""

    def add(self, name: Name, clock: int) -> None:
        """Note a floor; it must not be here yet."""
        number = clock >> SLICE_BITS
        names = self._slices.get(number)
        if names is None:
            names = self._slices[number] = {}
            self._newest = max(self._newest, number)
            heapq.heappush(self._order, number)
        names[name] = None

    def remove(self, name: Name, clock: int) -> bool:
        """Forget a floor. False when it is not here."""
        number = clock >> SLICE_BITS
        names = self._slices.get(number)
        if names is None or name not in names:
            return False
        del names[name]
        if not names:
            self._drop_slice(number)
        return True

    def pop_oldest(self, up_to: int) -> Name | None:
        """Take out one of the oldest slice, when that slice begins at `up_to` or before."""
        if not self.any_before(up_to):
            return None
        names = self._slices[self._order[0]]
        name, _ = names.popitem()
        if not names:
            self._drop_slice(self._order[0])
        return name

    def any_before(self, up_to: int) -> bool:
        """Whether `pop_oldest` would give one."""
        number = self._first()
        return number is not None and number << SLICE_BITS <= up_to

    def since(self, clock: int) -> Iterator[Name]:
        """The names in the slices that begin at `clock` or later."""
        first = -(-clock >> SLICE_BITS)
        numbers: Sequence[int] = range(first, self._newest + 1)
        if len(numbers) > len(self._slices):
            numbers = [number for number in self._slices if number >= first]
        for number in numbers:
            yield from self._slices.get(number, ())

    def cut(self, count: int) -> int:
        """A clock below which about the oldest `count` floors are, and at least one; 0 without floors."""
        end = 0
        for number in sorted(self._slices):
            end = (number + 1) << SLICE_BITS
            count -= len(self._slices[number])
            if count <= 0:
                break
        return end

    def _drop_slice(self, number: int) -> None:
        del self._slices[number]
        if len(self._order) > 2 * len(self._slices) + 1000:
            self._order = sorted(self._slices)  # which is a heap

    def _first(self) -> int | None:
        while self._order:
            if self._order[0] in self._slices:
                return self._order[0]
            heapq.heappop(self._order)
        return None
