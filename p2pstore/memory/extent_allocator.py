"""Which bytes of the data area are taken: best fit over extents, and windows worth evicting. Pure.

Which allocator hardly matters for how full memory gets; which extents are evicted does. Evicting
the cheapest contiguous window that fits keeps 97-99 % of memory in use under a mixed load, random
victims 77-81 %. So extents are found by where they begin and by where they end, and a window grows
over its neighbours in constant time per step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import itemgetter
from typing import Final

from p2pstore.runtime.stepping import Steps

MUCH_MORE: Final = 4.0
"""A window at this factor above the cheapest one's cost is not evicted along with it."""
GROWN_PER_STEP: Final = 64
"""Extents by which a window is grown in one step: a microsecond each, ten where others hold what is in them."""
MAX_GROWN: Final = 65_536
"""Most extents of all windows together that are compared."""

Window = tuple[float, list[int]]
"""The cost of evicting some extents, and their offsets: with the free ones between them they are long enough."""


def choose_windows(found: Sequence[Window], count: int = 1) -> list[int]:
    """The extents of the cheapest window, and with them those of up to `count - 1` others that cost little more and
    share nothing with those before them. Of equal ones the first goes first."""
    ordered = sorted(found, key=itemgetter(0))
    limit = ordered[0][0] * (MUCH_MORE if count > 1 else 1.0)
    victims: dict[int, None] = {}
    for cost, window in ordered:
        if not count or cost > limit:
            break
        if victims.keys().isdisjoint(window):
            for extent in window:
                victims[extent] = None
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
        self._used: dict[int, int] = {}  # granule of the start -> end
        self._used_ending: dict[int, int] = {}  # granule of the end -> start
        # Numbers of granules: a dictionary finds multiples of a power of two only after many collisions.
        self._free: dict[int, int] = {}
        self._free_ending: dict[int, int] = {}
        self._sizes: list[int] = []  # the sizes of which there are free extents, ascending
        self._free_of_size: dict[
            int, dict[int, None]
        ] = {}  # a dict is an ordered set: last in, first out
        self.on_opened: Callable[[int], None] | None = None
        """Is told the offset of each extent that was freed, and of the neighbours of each that was taken."""
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
        return self._used[offset // self.granule] - offset

    def is_taken(self, offset: int) -> bool:
        """Whether a taken extent begins there."""
        return offset // self.granule in self._used

    def end_of(self, offset: int) -> int | None:
        """Where the extent ends, taken or free, that begins there; None when none does."""
        return self._used.get(offset // self.granule) or self._free.get(offset)

    def begin_of(self, end: int) -> int | None:
        """Where the extent begins, taken or free, that ends there; None when none does."""
        begin = self._used_ending.get(end // self.granule)
        return self._free_ending.get(end) if begin is None else begin

    def hole_before(self, offset: int) -> int:
        """Where the free extent begins that ends at `offset`, or else `offset`."""
        return self._free_ending.get(offset, offset)

    def extents(self) -> list[tuple[int, int]]:
        """(offset, size) of all taken extents in address order; for checks."""
        granule = self.granule
        return [(start * granule, end - start * granule) for start, end in sorted(self._used.items())]

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, size) of all free extents in address order; for checks."""
        return [(start, end - start) for start, end in sorted(self._free.items())]

    def allocate_many(self, size_bytes: int, count: int) -> list[int]:
        """Offsets of up to `count` new extents, as many as there is room for. Those that are cut from one free extent
        lie one after the other.

        `size_bytes` is a positive number of whole granules; anything else raises `ValueError`.
        """
        _check_whole(size_bytes, self.granule)
        made: list[int] = []
        while len(made) < count:
            position = bisect_left(self._sizes, size_bytes)
            if position == len(self._sizes):
                break
            found = self._sizes[position]
            start = next(reversed(self._free_of_size[found]))
            self._drop_free(start, found)
            end = start + min(count - len(made), found // size_bytes) * size_bytes
            if end < start + found:
                self._add_free(end, start + found)
            made += self._take(start, end, size_bytes)
        return made

    def claim(self, offset: int) -> int | None:
        """Take the whole free extent that begins at `offset`. None when none does."""
        end = self._free.get(offset)
        if end is None:
            return None
        self._drop_free(offset, end - offset)
        self._take(offset, end, end - offset)
        return offset

    def grow(self, offset: int) -> int:
        """Have a taken extent take the free one behind it, if there is one; how many bytes came with it."""
        end = self._used[offset // self.granule]
        new_end = self._free.get(end)
        if new_end is None:
            return 0
        self._drop_free(end, new_end - end)
        del self._used_ending[end // self.granule]
        self.used_bytes -= end - offset
        self._take(offset, new_end, new_end - offset)
        return new_end - end

    def _take(self, start: int, end: int, size_bytes: int) -> range:
        """Have extents of this size taken, from `start` to `end`. The neighbours of them have others beside them."""
        used, ending, granule = self._used, self._used_ending, self.granule
        starts = range(start, end, size_bytes)
        for offset in starts:
            behind = offset + size_bytes
            used[offset // granule] = behind
            ending[behind // granule] = offset
        self.used_bytes += end - start
        if self.on_opened is not None:
            self.on_opened(end)
            before = self.begin_of(start)
            if before is not None:
                self.on_opened(before)
        return starts

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
            self._used[start // self.granule] = position
            self._used_ending[position // self.granule] = start
            self.used_bytes += size
        if position < end:
            self._add_free(position, end)

    def free(self, *offsets: int) -> int:
        """Give extents back; the bytes of them. Raises `KeyError` where none begins."""
        granule, freed = self.granule, 0
        start = end = -1
        for offset in sorted(offsets):
            if offset != end:
                if start >= 0:
                    self._merge_free(start, end)
                start = offset
            end = self._used.pop(offset // granule)
            del self._used_ending[end // granule]
            freed += end - offset
        if start >= 0:
            self._merge_free(start, end)
        self.used_bytes -= freed
        return freed

    def shrink(self, offset: int, size_bytes: int) -> None:
        """Give back the tail of an extent, of which `size_bytes` remain."""
        granule = self.granule
        _check_whole(size_bytes, granule)
        end = self._used[offset // granule]
        kept = offset + size_bytes
        if kept > end:
            raise ValueError(f"an extent of {end - offset:,} bytes cannot grow to {size_bytes:,}")
        if kept < end:
            self._used[offset // granule] = kept
            del self._used_ending[end // granule]
            self._used_ending[kept // granule] = offset
            self.used_bytes -= end - kept
            self._merge_free(kept, end)

    def find_windows(
        self,
        needed_bytes: int,
        candidates: Iterable[int],
        cost: Callable[[int], float | None],
        count: int = 1,
    ) -> Steps[list[Window]]:
        """Windows whose eviction frees `needed_bytes` in one piece: some of them, with the cheapest; an empty list when
        there is none. With a `count` above 1, also those that `choose_windows` takes along.

        Each candidate (an evictable extent) is grown over its free and evictable neighbours, the
        cheaper side first, until it is long enough; `cost` is None for an extent that must stay. Of windows of very
        many extents few are compared (`MAX_GROWN`).
        """
        much_more = MUCH_MORE if count > 1 else 1.0
        found: list[Window] = []
        limit = inf
        grown_extents = 0
        used, granule = self._used, self.granule
        for candidate in candidates:
            if used.get(candidate // granule, 0) - candidate >= needed_bytes:
                total = cost(candidate)
                grown = None if total is None or total >= limit else (total, [candidate])
            else:
                grown = yield from self._grow_window(candidate, needed_bytes, cost, limit)
            if grown is not None:
                found.append(grown)
                limit = min(limit, grown[0] * much_more)
                grown_extents += len(grown[1])
                if grown_extents >= MAX_GROWN:
                    break
        return found

    def _grow_window(
        self, candidate: int, needed: int, cost: Callable[[int], float | None], limit: float
    ) -> Steps[Window | None]:
        """Cost and extents of the window around a candidate; None if barred or above `limit`."""
        total = cost(candidate)
        if total is None:
            return None
        granule = self.granule
        left, right = candidate, self._used[candidate // granule]
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
                neighbour = self._used_ending.get(left // granule)
                left_cost = None if neighbour is None else cost(neighbour)
            if look_right:
                right_cost = cost(right) if right // granule in self._used else None
            look_left = left_cost is not None and (right_cost is None or left_cost <= right_cost)
            look_right = not look_left and right_cost is not None
            if look_left and left_cost is not None:
                total += left_cost
                left = self._used_ending[left // granule]
                victims.append(left)
            elif look_right and right_cost is not None:
                total += right_cost
                victims.append(right)
                right = self._used[right // granule]
            else:
                return None
            if len(victims) % GROWN_PER_STEP == 0:
                yield
                if any(
                    self.end_of(edge) is None and self.begin_of(edge) is None for edge in (left, right)
                ):  # during the pause the extents changed: neither begins nor ends one there
                    return None
                left_cost = right_cost = None
                look_left = look_right = True
        return None

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
        if self.on_opened is not None:
            self.on_opened(start)

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


def _check_whole(size_bytes: int, granule: int) -> None:
    if size_bytes <= 0 or size_bytes % granule:
        raise ValueError(f"{size_bytes:,} bytes are not a whole number of granules of {granule:,}")
