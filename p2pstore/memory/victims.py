"""The choice of victims for a put: the cheapest windows, by the cost of losing objects and their places. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest
from math import inf
from operator import itemgetter
from typing import Final

from p2pstore.memory.areas import SearchArea, SearchAreas
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.extent_allocator import ExtentAllocator, Window, choose_windows
from p2pstore.memory.segment_layout import Geometry
from p2pstore.runtime.stepping import Steps

MAX_WINDOWS: Final = 8
AHEAD_SHARE: Final = 256
"""Up to `MAX_WINDOWS` windows a value go at once, as long as those ahead of need are at most 1/256 of the segment."""
EVICTED_PER_STEP: Final = 256
"""Objects that go at once, at some 6 us each."""


class Victims:
    """Chooses among what is in the `order` of eviction. Offsets are those within the segment, as the order has them."""

    def __init__(self, geometry: Geometry, order: EvictionOrder) -> None:
        self._data_bytes = geometry.data_bytes
        self._base = geometry.data_offset
        self._order = order
        self._searches: dict[tuple[int, ...], StretchSearch] = {}
        """By the groups of a place, which name it."""

    def for_room(
        self, size: int, places: SearchAreas, now: float, alike: int = 1, *, thoroughly: bool
    ) -> Steps[list[int]]:
        """The objects in the cheapest window of `size` bytes in any of these places. The search looks around
        candidates and, with `thoroughly`, then anywhere; nothing when no window is found. For small values some more
        windows go with it, up to `alike` for a batch of equal ones: the next puts need them, and a search takes longer
        than the rest of a put."""
        ahead = min(MAX_WINDOWS * alike, 1 + self._data_bytes // AHEAD_SHARE // size)
        count = min(max(ahead, alike), EVICTED_PER_STEP)
        found: list[Window] = []
        hemmed_in = []
        for place in places:
            evictable = self._order.evictable_bytes(place.groups)
            if not evictable or evictable + place.area.allocator.free_bytes < size:
                continue
            candidates = self._order.candidates(size, place.groups, now, len(places), count)
            windows: list[Window]
            if all(each.extent_bytes >= size for each in candidates):
                costs = self._order.costs(candidates, now)
                extents = ([each.offset - self._base] for each in candidates)
                windows = list(zip(costs, extents, strict=True))
            else:
                least_used = (each.offset - self._base for each in candidates)
                windows = yield from self._windows(place, least_used, size, count, now)
            found += windows
            if not windows and not place.is_lent:
                hemmed_in.append(place)
        # Objects that must stay hem in all candidates: look everywhere. Not in a lent area: most of its objects must
        # stay, and a namespace without room of its own would cause a scan of all of it.
        if not found and thoroughly:
            count = 1
            for place in hemmed_in:
                anywhere = yield from self._search_of(place).find(size)
                found += yield from self._windows(place, anywhere, size, count, now)
        if not found:
            return []
        _, chosen = min(found, key=itemgetter(0))
        if len(chosen) <= EVICTED_PER_STEP:
            chosen = choose_windows(found, count)
        return [self._base + extent for extent in chosen]

    def for_slots(self, groups: tuple[int, ...], now: float, alike: int = 1) -> list[int]:
        """The cheapest objects of these groups, if there are any, one for each of `alike` values: their places do not
        matter."""
        count = min(alike, EVICTED_PER_STEP)
        candidates = self._order.candidates(1, groups, now, len(groups), count)
        offsets = [entry.offset for entry in candidates]
        if len(offsets) <= count:
            return offsets
        costs = self._order.costs(candidates, now)
        return [at for _, at in nsmallest(count, zip(costs, offsets, strict=True))]

    def _windows(
        self, place: SearchArea, candidates: Iterable[int], size: int, count: int, now: float
    ) -> Steps[list[Window]]:
        def cost(extent: int) -> float | None:
            return self._order.cost_at(self._base + extent, now, place.groups)

        # A list: others may have their turn, and change the order, before all were looked at.
        return place.area.allocator.find_windows(size, list(candidates), cost, count)

    def _search_of(self, place: SearchArea) -> StretchSearch:
        search = self._searches.get(place.groups)
        if search is None:

            def stays(extent: int) -> bool:
                return not self._order.may_go(self._base + extent, place.groups)

            search = self._searches[place.groups] = StretchSearch(place.area.allocator, stays)
            self._order.on_evictable = self._evictable
            place.area.allocator.on_opened = self._opened
        return search

    def _evictable(self, offset: int) -> None:
        self._opened(offset - self._base)

    def _opened(self, extent: int) -> None:
        """An extent of any place: where it is none of a search's, that finds nothing there."""
        for search in self._searches.values():
            search.opened(extent)


MAX_STRETCHES: Final = 8
"""Stretches that are compared, where a search finds several."""
MAX_OPENED: Final = 4_096
"""Changes that a search keeps track of. With more of them it begins anew."""
MAX_ROUNDS: Final = 3
"""Times that one search begins anew, because of other searches or too many changes, before it gives up."""
LOOKED_AT_PER_STEP: Final = 512
"""Extents, at 0.3 us each."""


class StretchSearch:
    """Searches one allocator. `stays` says of a taken extent, by its offset, whether it has to stay.

    The owner tells `opened` of each extent that was freed or may go from now on, and of the neighbours of each that
    was taken: these are what a stretch that was there before is made smaller to.
    """

    def __init__(self, allocator: ExtentAllocator, stays: Callable[[int], bool]) -> None:
        self._allocator = allocator
        self._stays = stays
        self._needed = inf
        """Bytes: no stretch of this size lies among the extents passed, except around those of `_opened`."""
        self._passed: int | None = None
        """The last extent passed that has to stay; None before the first one."""
        self._done = False
        """Whether all extents were passed."""
        self._opened: dict[int, int] = {}
        """Each with a number that is new when it is told anew."""
        self._told = 0
        self._round = 0

    def opened(self, offset: int) -> None:
        """The extent there was freed or may go, or is next to one that was taken."""
        if self._needed == inf:
            return
        self._note(offset)
        if len(self._opened) > MAX_OPENED:
            self._begin(inf)

    def _note(self, offset: int) -> None:
        self._told += 1
        self._opened[offset] = self._told

    def find(self, needed: int) -> Steps[list[int]]:
        """An extent that may go of each of some stretches of at least `needed` bytes; none when there is none."""
        rounds = 0
        while rounds < MAX_ROUNDS:
            if needed < self._needed:
                self._begin(needed)
                rounds += 1
            found = yield from self._look_at_opened(needed)
            if needed >= self._needed and (found or self._done):
                return found
            if not self._done and needed > self._needed:
                self._needed = needed
            yield from self._walk()
        return []

    def _begin(self, needed: float) -> None:
        self._needed, self._passed, self._done = needed, None, False
        self._round += 1
        self._opened.clear()

    def _look_at_opened(self, needed: int) -> Steps[list[int]]:
        """Extents of `_opened` that lie in a stretch that is long enough. Those of stretches that are too short for
        what was asked for last are forgotten."""
        found: dict[int, tuple[int, int]] = {}
        for offset in list(self._opened):
            if len(found) == MAX_STRETCHES:
                break
            if any(begin <= offset < end for begin, end in found.values()):
                continue
            told = self._opened.get(offset)
            begin, end, inside = yield from self._around(offset, needed)
            if self._opened.get(offset) == told:  # not told anew while this went on
                self._opened.pop(offset, None)
            if inside is not None and end - begin >= self._needed:
                self._note(inside)
                if end - begin >= needed:
                    found[inside] = begin, end
        return list(found)

    def _around(self, offset: int, needed: int) -> Steps[tuple[int, int, int | None]]:
        """The stretch around an extent, as far as it is needed: where it begins and ends, and an extent there that may
        go."""
        begin = end = offset
        inside: int | None = None
        looked = 0
        while end - begin < needed:
            following = self._allocator.end_of(end)
            if following is None or (self._allocator.is_taken(end) and self._stays(end)):
                break
            if self._allocator.is_taken(end):
                inside = end
            end = following
            looked += 1
            if looked % LOOKED_AT_PER_STEP == 0:
                yield
        while end - begin < needed and end > offset:
            before = self._allocator.begin_of(begin)
            if before is None or (self._allocator.is_taken(before) and self._stays(before)):
                break
            if self._allocator.is_taken(before):
                inside = before
            begin = before
            looked += 1
            if looked % LOOKED_AT_PER_STEP == 0:
                yield
        return begin, end, inside

    def _walk(self) -> Steps[None]:
        """Pass extents until some stretches were found, which are `_opened` then, or all were passed."""
        allocator, stays, round_number = self._allocator, self._stays, self._round
        last = allocator.begin + allocator.data_bytes
        begin = position = self._resumed_at()
        inside: int | None = None
        looked = found = 0
        while position < last and found < MAX_STRETCHES:
            end = allocator.end_of(position)
            if end is None:  # others had their turn, and it is within another extent now
                begin = position = self._resumed_at()
                inside = None
                continue
            if allocator.is_taken(position) and stays(position):
                self._passed, begin, inside = position, end, None
            elif inside is None and allocator.is_taken(position):
                inside = position
            if inside is not None and end - begin >= self._needed:
                self._note(inside)
                found += 1
                begin, inside = end, None
            position = end
            looked += 1
            if looked % LOOKED_AT_PER_STEP == 0:
                yield
                if self._round != round_number:  # begun anew, by another search
                    return
        self._done = position >= last

    def _resumed_at(self) -> int:
        """Where to walk on."""
        if self._passed is not None and self._allocator.is_taken(self._passed):
            return self._passed + self._allocator.size_of(self._passed)
        return self._allocator.begin
