"""What is to go so that there is room: the cheapest windows, by what losing things costs and where they lie. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

from p2pstore.memory.areas import Place, Places
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.extent_allocator import Window, choose_windows
from p2pstore.memory.segment_layout import Geometry
from p2pstore.memory.stretches import StretchSearch
from p2pstore.runtime.stepping import Steps

MOST_WINDOWS: Final = 8
AHEAD_SHARE: Final = 256
"""So many windows go at once, as long as those ahead of need are less than this part of the segment."""
EVICTED_PER_STEP: Final = 64
"""Objects that go at once, at 20 us each."""


class Victims:
    """Chooses among what is in the `order` of eviction. Offsets are those within the segment, as the order has them."""

    def __init__(self, geometry: Geometry, order: EvictionOrder) -> None:
        self._data_bytes = geometry.data_bytes
        self._base = geometry.data_offset
        self._order = order
        self._searches: dict[tuple[int, ...], StretchSearch] = {}
        """By the groups of a place, which name it."""

    def for_room(
        self, size: int, places: Places, now: float, alike: int = 1, *, thoroughly: bool
    ) -> Steps[list[int]]:
        """What lies in the cheapest window of `size` bytes in any of these places; nothing when there is none as far
        as candidates tell, or if need be (`thoroughly`) anywhere. For small values some more windows go with it, and
        for `alike` ones as many as that: they would be next, and looking for them takes longer than all the rest of a
        put."""
        ahead = min(MOST_WINDOWS, 1 + self._data_bytes // AHEAD_SHARE // size)
        count = max(ahead, min(alike, EVICTED_PER_STEP))
        found: list[Window] = []
        hemmed_in = []
        for place in places:
            evictable = self._order.evictable_bytes(place.groups)
            if not evictable or evictable + place.area.allocator.free_bytes < size:
                continue
            offsets = self._order.candidates(size, place.groups, now, len(places), count)
            least_used = (offset - self._base for offset in offsets)
            windows = yield from self._windows(place, least_used, size, count, now)
            found += windows
            if not windows and not place.is_lent:
                hemmed_in.append(place)
        # What must stay hems in all candidates: look everywhere. In what is lent, most is to stay, and whoever has no
        # room of its own would have all of it looked through.
        if not found and thoroughly:
            count = 1
            for place in hemmed_in:
                anywhere = yield from self._search_of(place).find(size)
                found += yield from self._windows(place, anywhere, size, count, now)
        if not found:
            return []
        cheapest = choose_windows(found)
        chosen = cheapest if len(cheapest) > EVICTED_PER_STEP else choose_windows(found, count)
        return [self._base + extent for extent in chosen]

    def for_slots(self, groups: tuple[int, ...], now: float, alike: int = 1) -> list[int]:
        """The cheapest objects of these groups, if there are any, one for each of so many values: what they lie in does
        not matter."""
        count = min(alike, EVICTED_PER_STEP)
        candidates = self._order.candidates(1, groups, now, len(groups), count)
        costs = ((self._order.cost_at(at, now, groups), at) for at in candidates)
        cheapest = nsmallest(count, ((cost, at) for cost, at in costs if cost is not None))
        return [at for _, at in cheapest]

    def _windows(
        self, place: Place, candidates: Iterable[int], size: int, count: int, now: float
    ) -> Steps[list[Window]]:
        def cost(extent: int) -> float | None:
            return self._order.cost_at(self._base + extent, now, place.groups)

        # A list: others may have their turn, and change the order, before all were looked at.
        return place.area.allocator.find_windows(size, list(candidates), cost, count)

    def _search_of(self, place: Place) -> StretchSearch:
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
