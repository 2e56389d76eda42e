"""The parts of a segment's data area: one for each namespace that has a quota, and what all share. Pure.

A quota is a contiguous range of the data area, not a byte count. Room is made by evicting neighbours: protected objects
scattered over all of the memory would leave no room for large values. The offset of an object also tells whether it is
kept for its namespace. Other namespaces use a range while its owner leaves it free, and give way to the owner. A cap is
a byte count: the most that a namespace may have, at any offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.extent_allocator import ExtentAllocator

MAX_QUOTAS: Final = 16
"""Each is looked at whenever room has to be made."""

NO_QUOTAS: Final[Mapping[str, int]] = MappingProxyType({})
"""And no caps."""

EVERYBODYS: Final = 0
"""The group of what lies in the part that all share."""


@dataclass(frozen=True, slots=True)
class Area:
    """A part of the data area, and the namespace that it is kept for; None for the shared part. Its objects are in one
    of two groups of the order of eviction: the owner's objects, or those of others. (In the shared part, both are
    one.)"""

    allocator: ExtentAllocator
    owner: str | None
    owned: int
    guests: int

    def group_of(self, namespace: str) -> int:
        """The group of an object of that namespace."""
        return self.owned if namespace == self.owner else self.guests


@dataclass(frozen=True, slots=True)
class SearchArea:
    """An area where room may be taken, and the groups of objects that may be evicted there for it."""

    area: Area
    groups: tuple[int, ...]

    @property
    def is_lent(self) -> bool:
        """Whether it is another namespace's, and only what that leaves free may be used."""
        return self.area.owner is not None and self.area.owned not in self.groups


SearchAreas = tuple[SearchArea, ...]


@dataclass(slots=True)
class QuotaUse:
    """Use of one namespace's quota, in bytes of whole extents."""

    quota_bytes: int
    used_bytes: int = 0
    """All its bytes in memory, in any part."""
    kept_bytes: int = 0
    """Bytes in the namespace's own part, which are evicted for no other namespace."""
    cap_bytes: int | None = None
    """The maximum of `used_bytes`; None for no limit."""


class Areas:
    """All parts, and which of them a namespace may use, in which order. Offsets are bytes within the data area.

    `quotas`: bytes for each namespace, rounded up to whole granules. `caps`: the most that some of these may have.
    Raises `ValueError` when the quotas are more than there is, or too many.
    """

    def __init__(
        self,
        data_bytes: int,
        granule: int,
        quotas: Mapping[str, int],
        caps: Mapping[str, int] = NO_QUOTAS,
    ) -> None:
        sizes = {name: -(-size // granule) * granule for name, size in quotas.items()}
        shared = data_bytes - sum(sizes.values())
        if shared < 0 or len(sizes) > MAX_QUOTAS:
            raise ValueError(f"{len(sizes)} quotas of {sum(sizes.values()):,} bytes together")
        self.shared = Area(ExtentAllocator(shared, granule), None, EVERYBODYS, EVERYBODYS)
        self._all = [self.shared]
        self._begins = [0]
        self._owned: dict[str, Area] = {}
        begin = shared
        for number, (name, size) in enumerate(sizes.items()):
            area = Area(ExtentAllocator(size, granule, begin), name, 1 + 2 * number, 2 + 2 * number)
            self._all.append(area)
            self._begins.append(begin)
            self._owned[name] = area
            begin += size
        self.uses = {name: QuotaUse(size, cap_bytes=caps.get(name)) for name, size in sizes.items()}
        self._searches = {name: self._searches_for(name) for name in sizes}
        self._searches_of_others = self._searches_for(None)
        self.used_bytes = 0
        self.data_bytes = data_bytes

    def __iter__(self) -> Iterator[Area]:
        """The shared part first, then in order of their offsets."""
        return iter(self._all)

    @property
    def group_count(self) -> int:
        """How many groups of objects there are."""
        return 1 + 2 * len(self._owned)

    @property
    def free_bytes(self) -> int:
        return self.data_bytes - self.used_bytes

    @property
    def largest_bytes(self) -> int:
        """The largest extent that there could ever be."""
        return max(area.allocator.data_bytes for area in self._all)

    def searches(self, namespace: str) -> tuple[SearchAreas, ...]:
        """Where to look for room, one after the other: in the namespace's own part, where what others have gives way;
        then everywhere, where whatever is not kept for another namespace may go."""
        return self._searches.get(namespace, self._searches_of_others)

    def above_cap(self, namespace: str, size_bytes: int) -> int:
        """By how many bytes the namespace would be above its cap after adding `size_bytes`; 0 or less when it would not
        be."""
        use = self.uses.get(namespace)
        if use is None or use.cap_bytes is None:
            return 0
        return use.used_bytes + size_bytes - use.cap_bytes

    def own_group(self, namespace: str) -> int:
        """The group of what a namespace with a quota has in its own part."""
        return self._owned[namespace].owned

    def take(self, size_bytes: int, places: SearchAreas) -> int | None:
        """An extent in the first of these places that has room without evicting anything; None when none has."""
        made = self.take_many(size_bytes, 1, places)
        return made[0] if made else None

    def take_many(self, size_bytes: int, count: int, places: SearchAreas) -> list[int]:
        """`take` up to `count` times: as many extents as there is room for."""
        made: list[int] = []
        for place in places:
            made += place.area.allocator.allocate_many(size_bytes, count - len(made))
            if len(made) == count:
                break
        self.used_bytes += len(made) * size_bytes
        return made

    def claim(self, offset: int) -> int | None:
        """Take the whole free extent that begins at `offset`; None when none does."""
        allocator = self.at(offset).allocator
        claimed = allocator.claim(offset)
        if claimed is not None:
            self.used_bytes += allocator.size_of(claimed)
        return claimed

    def grow(self, offset: int) -> int:
        """Have a taken extent take the free one behind it as well; its bytes now."""
        allocator = self.at(offset).allocator
        self.used_bytes += allocator.grow(offset)
        return allocator.size_of(offset)

    def has_room(self, size_bytes: int, places: SearchAreas) -> bool:
        """Whether `take` would find an extent there."""
        return any(place.area.allocator.largest_free_bytes >= size_bytes for place in places)

    def holds(self, offset: int, size_bytes: int) -> bool:
        """Whether an extent there would lie in one part."""
        area = self.at(offset).allocator
        return area.begin <= offset and offset + size_bytes <= area.begin + area.data_bytes

    def take_at(self, extents: Iterable[tuple[int, int]]) -> None:
        """Have these (offset, size) taken, in the order of their offsets; each lies in one part. For areas of which
        nothing was taken yet."""
        of_areas: dict[int, list[tuple[int, int]]] = {}
        for offset, size in extents:
            of_areas.setdefault(self.at(offset).allocator.begin, []).append((offset, size))
            self.used_bytes += size
        for begin, some in of_areas.items():
            self.at(begin).allocator.take(some)

    def at(self, offset: int) -> Area:
        """The part in which `offset` lies."""
        if len(self._all) == 1:
            return self.shared
        return self._all[bisect_right(self._begins, offset) - 1]

    def free(self, *offsets: int) -> None:
        """Give extents back. Raises `KeyError` where none begins."""
        if len(self._all) == 1:
            self.used_bytes -= self.shared.allocator.free(*offsets)
            return
        for offset in offsets:
            self.used_bytes -= self.at(offset).allocator.free(offset)

    def shrink(self, offset: int, size_bytes: int) -> None:
        """Give back the tail of an extent, of which `size_bytes` remain."""
        allocator = self.at(offset).allocator
        before = allocator.size_of(offset)
        allocator.shrink(offset, size_bytes)
        self.used_bytes -= before - size_bytes

    def count(self, entry: ObjectEntry, sign: int) -> None:
        """Take in that an object came (1) or went (-1), for `uses`."""
        use = self.uses.get(entry.namespace)
        if use is not None:
            use.used_bytes += sign * entry.extent_bytes
            if entry.group == self._owned[entry.namespace].owned:
                use.kept_bytes += sign * entry.extent_bytes

    def _searches_for(self, namespace: str | None) -> tuple[SearchAreas, ...]:
        own = self._owned.get(namespace) if namespace is not None else None
        others = [area for area in self._all if area is not own]
        everywhere = tuple(SearchArea(area, (area.guests,)) for area in others)
        if own is None:
            return (everywhere,)
        all_of_own = SearchArea(own, (own.owned, own.guests))
        return ((SearchArea(own, (own.guests,)),), (all_of_own, *everywhere))
