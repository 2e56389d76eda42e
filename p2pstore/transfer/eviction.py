"""What is evicted first: ranks, the order of last use within a rank, what eviction costs. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from p2pstore.objects import MIB
from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.layout import Pin, SlotState

EvictionPolicy = Callable[[ObjectEntry, float], float]
"""(entry, now in Unix seconds) -> what losing it costs, above 0; compared within a rank."""

CANDIDATES_PER_RANK: Final = 8
CANDIDATES_FOR_LARGE: Final = 32
LARGE_BYTES: Final = 1 * MIB
"""Where windows are large, it matters more which one is taken, and choosing takes little beside the copy: with 8
candidates values of all sizes up to a sixteenth of the segment keep 94.6 % of it in use, with 16 96 %, with 32 98 %."""

SECOND_TOUCH_HITS: Final = 2
"""What came from the SSD, or went there, is worth as much as other objects when it was read so often."""
LOST_FOR_GOOD: Final = 4.0
"""So much more does it cost to lose what is not on the SSD as well."""

_CHEAP, _NORMAL, _SOFT_PINNED = range(3)
_RANK_WEIGHTS: Final = (1e-9, 1.0, 1e9)
"""So far apart that a window is cheap when it holds nothing of a higher rank."""


def least_recently_used(entry: ObjectEntry, now: float) -> float:
    """The default policy: bytes lost, worth less the longer nobody asked for them, and less where the SSD has them."""
    weight = 1.0 if entry.on_ssd else LOST_FOR_GOOD
    return weight * entry.extent_bytes / (1.0 + max(0.0, now - entry.last_access))


def rank_of(entry: ObjectEntry) -> int | None:
    """Lower ranks are evicted first; None means not at all. Soft replicas go first, and what the SSD has and was
    hardly asked for: so a pass over many cold objects does not push out what is in use."""
    if entry.references or entry.pin is Pin.HARD or entry.state is not SlotState.LIVE:
        return None
    if entry.pin is Pin.SOFT:
        return _SOFT_PINNED
    seldom_read = entry.on_ssd and entry.hits < SECOND_TOUCH_HITS
    return _CHEAP if entry.soft or seldom_read else _NORMAL


class EvictionOrder:
    """The entries that may be evicted, by their offset in the segment.

    What is leased or hard-pinned is not among them, so that finding candidates never walks past it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evictable_bytes = 0
        # OrderedDict, not dict: taking from the front of a dict slows down with every deletion.
        self._ranks = tuple(OrderedDict[int, ObjectEntry]() for _ in range(3))
        self._rank_at: dict[int, int] = {}
        self._held: set[int] = set()

    def __contains__(self, entry: ObjectEntry) -> bool:
        return entry.offset in self._rank_at and entry.offset not in self._held

    def update(self, entry: ObjectEntry) -> None:
        """Take in that the entry's references, pin or state changed; it counts as just used."""
        self.discard(entry)
        rank = rank_of(entry)
        if rank is not None:
            self._ranks[rank][entry.offset] = entry
            self._rank_at[entry.offset] = rank
            self.evictable_bytes += entry.extent_bytes

    def hold(self, entry: ObjectEntry) -> None:
        """An entry that is not used, but looked at, may not be evicted until `put_back`; it keeps its place."""
        self._held.add(entry.offset)
        self.evictable_bytes -= entry.extent_bytes

    def put_back(self, entry: ObjectEntry) -> None:
        """The end of `hold`. Where its rank is another one by now, the entry is the last there."""
        if entry.offset in self._held:
            self._held.discard(entry.offset)
            self.evictable_bytes += entry.extent_bytes
        if self._rank_at.get(entry.offset) != rank_of(entry):
            self.update(entry)

    def discard(self, entry: ObjectEntry) -> None:
        """The entry may not be evicted for now."""
        rank = self._rank_at.pop(entry.offset, None)
        if rank is not None:
            del self._ranks[rank][entry.offset]
            if entry.offset in self._held:
                self._held.discard(entry.offset)
            else:
                self.evictable_bytes -= entry.extent_bytes

    def touch(self, entry: ObjectEntry) -> None:
        """The entry was used just now."""
        rank = self._rank_at.get(entry.offset)
        if rank == _CHEAP and entry.on_ssd and entry.offset not in self._held:
            self.update(entry)  # it may be worth more by now
        elif rank is not None:
            self._ranks[rank].move_to_end(entry.offset)

    def coldest(self) -> Iterator[ObjectEntry]:
        """What would be evicted first, by rank and last use. Nothing may change the order meanwhile."""
        for rank in self._ranks:
            yield from rank.values()

    def at(self, offset: int) -> ObjectEntry:
        """The evictable entry at `offset`. Raises `KeyError` when there is none."""
        return self._ranks[self._rank_at[offset]][offset]

    def cost_at(self, offset: int, now: float) -> float | None:
        """What evicting the entry at `offset` costs; None when nothing evictable begins there."""
        rank = self._rank_at.get(offset)
        if rank is None or offset in self._held:
            return None
        return self.policy(self._ranks[rank][offset], now) * _RANK_WEIGHTS[rank]

    def candidates(self, needed_bytes: int) -> Iterator[int]:
        """Offsets of the least recently used entries of each rank, the lowest rank first: more of them where much is
        needed."""
        count = CANDIDATES_PER_RANK if needed_bytes < LARGE_BYTES else CANDIDATES_FOR_LARGE
        for rank in self._ranks:
            yield from islice(rank, count)
