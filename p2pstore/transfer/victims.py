"""What is to go so that there is room: the cheapest windows, by what losing things costs and where they lie. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from p2pstore.transfer.allocator import Window, choose_windows
from p2pstore.transfer.areas import Place, Places
from p2pstore.transfer.eviction import EvictionOrder
from p2pstore.transfer.layout import Geometry

MOST_WINDOWS: Final = 8
AHEAD_SHARE: Final = 256
"""So many windows go at once, as long as those ahead of need are less than this part of the segment."""
MOST_STRETCHES: Final = 8
"""So many are compared, where a search everywhere finds several."""


class Victims:
    """Chooses among what is in the `order` of eviction. Offsets are those within the segment, as the order has them."""

    def __init__(self, geometry: Geometry, order: EvictionOrder) -> None:
        self._data_bytes = geometry.data_bytes
        self._base = geometry.data_offset
        self._order = order

    def for_room(self, size: int, places: Places, now: float, *, thoroughly: bool) -> list[int]:
        """What lies in the cheapest window of `size` bytes in any of these places; nothing when there is none as far
        as candidates tell, or if need be (`thoroughly`) anywhere. For small values some more windows go with it: they
        would be next, and looking for them takes longer than all the rest of a put."""
        count = min(MOST_WINDOWS, 1 + self._data_bytes // AHEAD_SHARE // size)
        found: list[Window] = []
        hemmed_in = []
        for place in places:
            evictable = self._order.evictable_bytes(place.groups)
            if not evictable or evictable + place.area.allocator.free_bytes < size:
                continue
            offsets = self._order.candidates(size, place.groups, len(places))
            least_used = (offset - self._base for offset in offsets)
            windows = self._windows(place, least_used, size, count, now)
            found += windows
            if not windows and not place.is_lent:
                hemmed_in.append(place)
        # What must stay hems in all candidates: look everywhere, which may take long. In what is lent, most is to stay,
        # and whoever has no room of its own would have all of it looked through with every put.
        if not found and thoroughly:
            count = 1
            for place in hemmed_in:
                anywhere = islice(self._stretches(place, size), MOST_STRETCHES)
                found += self._windows(place, anywhere, size, count, now)
        return [self._base + extent for extent in choose_windows(found, count)] if found else []

    def for_slot(self, groups: tuple[int, ...], now: float) -> list[int]:
        """The cheapest object of these groups, if there is one: what it lies in does not matter."""
        candidates = self._order.candidates(1, groups, len(groups))
        costs = ((self._order.cost_at(at, now, groups), at) for at in candidates)
        cheapest = min(((cost, at) for cost, at in costs if cost is not None), default=None)
        return [] if cheapest is None else [cheapest[1]]

    def _windows(
        self, place: Place, candidates: Iterable[int], size: int, count: int, now: float
    ) -> list[Window]:
        def cost(extent: int) -> float | None:
            return self._order.cost_at(self._base + extent, now, place.groups)

        return place.area.allocator.windows(size, candidates, cost, count)

    def _stretches(self, place: Place, size: int) -> Iterator[int]:
        def stays(extent: int) -> bool:
            return not self._order.may_go(self._base + extent, place.groups)

        return place.area.allocator.stretches(size, stays)
