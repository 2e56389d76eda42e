"""Room for values that are to come: free extents and slots, or those of the cheapest victims. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from typing import Final

from p2pstore.errors import CapacityExceeded
from p2pstore.memory.areas import SearchAreas
from p2pstore.memory.entries import ObjectEntry, Reservations
from p2pstore.memory.eviction import SET_ASIDE_PER_STEP, WhoKeeps, rank_of
from p2pstore.memory.segment_layout import Geometry, SlotState, extent_bytes
from p2pstore.memory.segment_objects import SegmentObjects
from p2pstore.memory.victims import EVICTED_PER_STEP, Victims
from p2pstore.objects import format_bytes
from p2pstore.runtime.stepping import Steps

AHEAD_LEFT: Final = 16
"""Evict ahead of demand only while evictable bytes are at least 16 times the request; otherwise the newest object would
be the victim."""

MAX_TRIES: Final = 4
"""Attempts to make room. Victims may be leased or sent between the choice and the eviction."""

MAX_LISTED: Final = 4_096
"""Objects outside of its own part that a namespace at its cap is searched for victims."""

MAX_STEPS_AHEAD: Final = 4
"""Steps of making room ahead of demand: the put itself does the rest."""


class RoomMaker:
    """Finds and makes room. Methods that return `Steps` allow any change of the segment between two steps. All `now`
    are Unix seconds."""

    def __init__(self, geometry: Geometry, objects: SegmentObjects, reservations: Reservations) -> None:
        self.in_making: set[int] = set()
        """Extents taken for reservations that are not made yet."""
        self._geometry = geometry
        self._objects = objects
        self._reservations = reservations
        self._areas = objects.areas
        self._order = objects.order
        self._table = objects.table
        self.victims = Victims(geometry, objects.order)

    def ask_who_keeps(self, are_kept_elsewhere: WhoKeeps) -> None:
        """Evict objects that another peer keeps before those that are here alone. The function is called while objects
        are evicted, and may change nothing here."""
        self._order.are_kept_elsewhere = are_kept_elsewhere

    @property
    def cheap_bytes(self) -> int:
        """Memory of soft copies, and of objects that the SSD has and that are hardly read: it goes first."""
        return self._order.cheap_bytes

    def coldest(self, *, cheap: bool = True) -> Iterator[ObjectEntry]:
        """Live objects in the order of eviction, without `cheap` those after the cheap ones. The segment must not
        change before the last one was taken."""
        found = self._order.coldest(cheap=cheap)
        if not self._objects.returned:
            return found
        return (entry for entry in found if entry.state is SlotState.LIVE)

    def has_room(self, length: int, trailer_length: int, *, namespace: str = "") -> bool:
        """Whether such a value fits without an eviction."""
        size = extent_bytes(length, max(1, trailer_length))
        return self._has_room(size, self._areas.searches(namespace)[-1])

    def can_spare(
        self, length: int, trailer_length: int, count: int = 1, *, namespace: str = ""
    ) -> bool:
        """Whether room for `count` values may be reserved ahead of demand: it is free, or 16 times as much is
        evictable."""
        size = count * extent_bytes(length, max(1, trailer_length))
        places = self._areas.searches(namespace)[-1]
        if self._has_room(size, places):
            return True
        self._objects.references.settle()
        if self._has_room(size, places):
            return True
        return self._order.evictable_bytes(_groups_of(places)) >= AHEAD_LEFT * size

    def make_ahead(
        self, length: int, trailer_length: int, count: int = 1, *, now: float, namespace: str = ""
    ) -> None:
        """Evict the victims of the next such value, and of `count` where that is easy, if it does not fit and
        `can_spare`. The next reservation may take the room, whatever it is for."""
        size = extent_bytes(length, max(1, trailer_length))
        places = self._areas.searches(namespace)[-1]
        if self._has_room(size, places):
            return
        if not self.can_spare(length, trailer_length, namespace=namespace) or self._has_room(
            size, places
        ):
            return
        steps = self.take(size, namespace, now, count)
        with suppress(CapacityExceeded), closing(steps):
            try:
                for _ in range(MAX_STEPS_AHEAD):
                    next(steps)
            except StopIteration as end:
                extent, slot = end.value
                self._table.free_slots([slot])
                self._areas.free(extent)

    def _has_room(self, size: int, places: SearchAreas) -> bool:
        return self._areas.has_room(size, places) and self._table.has_free_slot

    def take(self, size: int, namespace: str, now: float, alike: int) -> Steps[tuple[int, int]]:
        """An extent of `size` bytes and a slot, where need be of victims; with them go those of up to `alike` such
        values where that is easy. Raises `CapacityExceeded`."""
        yield from self._keep_within_cap(size, namespace)
        extent = yield from self._take_extent(size, namespace, now, alike)
        self.in_making.add(extent)
        try:
            slot = yield from self._take_slot(extent, namespace, now, alike)
        except BaseException:
            self._areas.free(extent)
            raise
        finally:
            self.in_making.discard(extent)
        return extent, slot

    def _take_slot(self, extent: int, namespace: str, now: float, alike: int) -> Steps[int]:
        """A slot for what goes to that extent, and place for others `alike`. What a namespace has of its quota makes
        place for more of it last."""
        slot = self._table.take_slot()
        if slot is None:
            slot = yield from self._when_expired(self._table.take_slot, now)
        if slot is None:
            groups = _groups_of(self._areas.searches(namespace)[-1])
            area = self._areas.at(extent)
            kept = area.owned if area.owner == namespace else None
            others = tuple(group for group in groups if group != kept)
            self._objects.references.settle()
            for _ in range(MAX_TRIES):  # as for room
                victims = self.victims.for_slots(others, now, alike) or self.victims.for_slots(
                    groups, now, alike
                )
                if not victims:
                    break
                self._objects.evict(self._order.at(*victims))
                slot = self._table.take_slot()
                if slot is not None:
                    break
        if slot is None:
            what = f"none of the {self._geometry.slots:,} object slots is free"
            raise self._no_room(what, namespace)
        return slot

    def _keep_within_cap(self, size: int, namespace: str) -> Steps[None]:
        """Evict what a namespace has until an extent of this size keeps it within its cap: of its own part the coldest
        first, then what it has elsewhere, in the order of the puts. Values on their way count once they are there.
        Raises `CapacityExceeded` when too little may go."""
        areas = self._areas
        while (above := areas.above_cap(namespace, size)) > 0:
            self._objects.references.settle()
            use = areas.uses[namespace]
            victims: list[ObjectEntry] = []
            for entry in self._victims_of(namespace) if above <= use.used_bytes else ():
                victims.append(entry)
                above -= entry.extent_bytes
                if above <= 0 or len(victims) == EVICTED_PER_STEP:
                    break
            if not victims:
                raise CapacityExceeded(
                    f"namespace {namespace!r} has {format_bytes(use.used_bytes)} of the "
                    f"{format_bytes(use.cap_bytes or 0)} that it may have (--cap), and too little of that may go from "
                    f"memory for {format_bytes(size)} more: release views, unpin, or raise the cap"
                )
            self._objects.evict(victims)
            if areas.above_cap(namespace, size) > 0:
                yield

    def _victims_of(self, namespace: str) -> Iterator[ObjectEntry]:
        own = self._areas.own_group(namespace)
        for entry in self._order.coldest_of(own):
            if entry in self._order:
                yield entry
        for entry in islice(self._objects.listing.entries_of(namespace), MAX_LISTED):
            if entry.group != own and entry in self._order:
                yield entry

    def _take_extent(self, size: int, namespace: str, now: float, alike: int) -> Steps[int]:
        searches = self._areas.searches(namespace)
        for places in searches:
            extent = self._areas.take(size, places)
            if extent is None:
                take = partial(self._areas.take, size, places)
                extent = yield from self._when_expired(take, now)
            last = places is searches[-1]
            if extent is None:
                extent = yield from self._take_made_room(size, places, now, alike, thoroughly=last)
            if extent is not None:
                return extent
        raise self._no_room(f"{format_bytes(size)} do not fit", namespace)

    def _when_expired(self, take: Callable[[], int | None], now: float) -> Steps[int | None]:
        """Call `take` again after each step that withdraws expired objects, and settles ended leases and loans."""
        self._objects.expire(now)
        while (taken := take()) is None and self._objects.expires_on(now):
            yield
            self._objects.expire(now)
        return taken

    def _take_made_room(
        self, size: int, places: SearchAreas, now: float, alike: int, *, thoroughly: bool
    ) -> Steps[int | None]:
        """Evict victims, and take their extent. A victim may be leased or sent before it is evicted: then others are
        chosen, at most `MAX_TRIES` times. None without victims."""
        for _ in range(MAX_TRIES):
            self._objects.references.settle()
            victims = yield from self.victims.for_room(size, places, now, alike, thoroughly=thoroughly)
            if not victims:
                return None
            if len(victims) > EVICTED_PER_STEP:
                extent = yield from self._clear(victims, size)
            else:
                self._objects.evict(self._order.at(*victims))
                extent = self._areas.take(size, places)
            while self._order.to_end_aside:
                self._order.end_some_aside()
                yield
            if extent is not None:
                return extent
        return None

    def _clear(self, victims: list[int], size: int) -> Steps[int | None]:
        """An extent of `size` bytes in place of these entries, which are neighbours but for free extents; None when one
        of them has to stay by now. First all are set aside, so that no others choose them; then they go, some at a
        time, and what is cleared is taken at once."""
        base = self._geometry.data_offset
        entries: list[ObjectEntry] = []
        at, gone, whole = -1, 0, False
        try:
            for offset in sorted(victims):
                if not self._order.at(offset):
                    return None
                entries.append(self._order.set_aside(offset))
                if len(entries) % SET_ASIDE_PER_STEP == 0:
                    yield
            first = entries[0].offset - base
            hole = self._areas.at(first).allocator.hole_before(first)
            for begin in range(0, len(entries), EVICTED_PER_STEP):
                some = entries[begin : begin + EVICTED_PER_STEP]
                if any(rank_of(entry) is None for entry in some):
                    return None
                self._objects.evict(some)
                gone += len(some)
                if not begin and self._areas.claim(hole) is not None:
                    at = hole
                    self.in_making.add(at)
                if at < 0 or at + self._areas.grow(at) <= some[-1].offset - base:
                    return None
                yield
            whole = self._areas.grow(at) >= size
            if whole:
                self._areas.shrink(at, size)
            return at if whole else None
        finally:
            self._order.to_end_aside.extend(entries[gone:])
            self.in_making.discard(at)
            if at >= 0 and not whole:
                self._areas.free(at)

    def _no_room(self, what: str, namespace: str) -> CapacityExceeded:
        leased, reserved = (self._objects.references.referenced_bytes, self._reservations.reserved_bytes)
        all_evictable = self._order.evictable_bytes()
        evictable = self._order.evictable_bytes(_groups_of(self._areas.searches(namespace)[-1]))
        pinned = self._areas.used_bytes - leased - reserved - all_evictable
        kept = ""
        if self._areas.uses:
            kept = f", {format_bytes(all_evictable - evictable)} kept for other namespaces (--quota)"
        return CapacityExceeded(
            f"{what}: of {format_bytes(self._areas.data_bytes)}, {format_bytes(leased)} are leased or "
            f"being sent, {format_bytes(pinned)} hard-pinned, {format_bytes(reserved)} being written"
            f"{kept} and {format_bytes(evictable)} evictable; release views, unpin, or give the peer more "
            "--memory"
        )


def _groups_of(places: SearchAreas) -> tuple[int, ...]:
    """The groups of objects that may be evicted in these places."""
    return tuple(group for place in places for group in place.groups)
