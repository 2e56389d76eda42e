"""The interface of eviction policies. Pure.

A policy gives the order in which the objects of one rank would go, and the cost of losing one. The allocator's windows
choose the victims among them; `eviction` excludes objects that must stay and orders the ranks. Every step takes
constant time, and a policy's memory of evicted objects is bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from p2pstore.memory.entries import EntryList, ObjectEntry, unlink

LOST_FOR_GOOD: Final = 4.0
"""Factor on the cost of losing an object that neither the SSD nor another peer has."""

NEW_SHARE: Final = 0.1
"""Share of a rank's bytes for new objects, where a policy sets room apart for them."""


class EvictionQueue(ABC):
    """The objects of one rank, in one or more `EntryList`s: `unlink` takes them out."""

    @abstractmethod
    def add(self, *entries: ObjectEntry) -> None:
        """Queue entries that are in no queue, as ones that were used at their `last_access`."""

    @abstractmethod
    def used(self, entry: ObjectEntry) -> None:
        """An entry of this queue was used at its `last_access`."""

    @abstractmethod
    def coldest(self) -> Iterator[ObjectEntry]:
        """The entries in the order of eviction. The queue must not change during the iteration."""


class EvictionPolicy(ABC):
    """Ranks the worth of one segment's objects. All times are Unix seconds."""

    queued = 0
    """How many entries are in queues: the order of eviction counts them."""

    @abstractmethod
    def new_queue(self) -> EvictionQueue:
        """A queue for one rank."""

    @abstractmethod
    def cost(self, entry: ObjectEntry, now: float) -> float:
        """The cost of losing the entry, above 0; compared within a rank, and summed over windows."""

    def stays_until(self, entry: ObjectEntry) -> float:
        """The larger, the longer it stays; of the dimension of Unix seconds."""
        return entry.last_access

    @abstractmethod
    def admitted(self, entries: Sequence[ObjectEntry], now: float) -> None:
        """New entries, before they are queued, with a `standing` of 0."""

    @abstractmethod
    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """An entry is read `count` times, queued or not; its `last_access` is still that of the use before."""

    @abstractmethod
    def evicted(self, entries: Sequence[ObjectEntry]) -> None:
        """Entries had to go for others."""


def worth(entry: ObjectEntry) -> float:
    """Bytes lost, weighted: less where the SSD or another peer has them."""
    kept = entry.on_ssd or entry.is_kept_elsewhere
    return (1.0 if kept else LOST_FOR_GOOD) * entry.extent_bytes


class LeastRecentlyUsed(EvictionPolicy):
    """The least recently used object goes first."""

    def new_queue(self) -> EvictionQueue:
        return _RecencyQueue()

    def cost(self, entry: ObjectEntry, now: float) -> float:
        return worth(entry) / (1.0 + max(0.0, now - entry.last_access))

    def admitted(self, entries: Sequence[ObjectEntry], now: float) -> None:
        """They are used last, as every entry that is queued."""

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """How often does not matter."""

    def evicted(self, entries: Sequence[ObjectEntry]) -> None:
        """Nothing is remembered of them."""


class _RecencyQueue(EvictionQueue):
    def __init__(self) -> None:
        self._entries = EntryList()

    def add(self, *entries: ObjectEntry) -> None:
        self._entries.append(*entries)

    def used(self, entry: ObjectEntry) -> None:
        unlink(entry)
        self._entries.append(entry)

    def coldest(self) -> Iterator[ObjectEntry]:
        return iter(self._entries)


MIN_GHOSTS: Final = 65_536
"""The minimum number of ghosts: 14 MB. A peer with few large objects evicts them long before their next read, and only
more ghosts than live objects tell it which are read again."""
MAX_FORGOTTEN: Final = 16
"""In one step, when much was removed at once."""


class Ghosts:
    """Standing and last access of evicted objects, by digest; the oldest are forgotten."""

    def __init__(self, least: int = MIN_GHOSTS) -> None:
        self._least = least
        self._kept: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, entries: Sequence[ObjectEntry], live: int) -> None:
        """Remember entries; as many as there are live objects, or the least, but some more for a while when there are
        far fewer live objects all of a sudden."""
        kept = self._kept
        for entry in entries:
            before = len(kept)
            kept[entry.digest] = (entry.standing, entry.last_access)
            if len(kept) == before:
                kept.move_to_end(entry.digest)
        too_many = len(kept) - max(self._least, live)
        for _ in range(min(too_many, MAX_FORGOTTEN * len(entries))):
            kept.popitem(last=False)

    def take(self, entries: Iterable[ObjectEntry]) -> list[tuple[ObjectEntry, int, float]]:
        """Those of the entries that are remembered, with standing and last access when they were evicted, once."""
        kept = self._kept
        return [(each, *kept.pop(each.digest)) for each in entries if each.digest in kept]
