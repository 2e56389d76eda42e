"""The simplest policy: what nobody asked for longest goes first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.entry_list import EntryList
from p2pstore.memory.policies.interface import EvictionPolicy, EvictionQueue, worth


class LeastRecentlyUsed(EvictionPolicy):
    """What nobody asked for longest goes first."""

    def new_queue(self) -> EvictionQueue:
        return _RecencyQueue()

    def cost(self, entry: ObjectEntry, now: float) -> float:
        return worth(entry) / (1.0 + max(0.0, now - entry.last_access))

    def admitted(self, entry: ObjectEntry, now: float) -> None:
        """It is the one used last, as every entry that is queued."""

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """How often does not matter."""

    def evicted(self, entry: ObjectEntry) -> None:
        """Nothing is remembered of it."""


class _RecencyQueue(EvictionQueue):
    def __init__(self) -> None:
        self._entries = EntryList()

    def add(self, entry: ObjectEntry) -> None:
        self._entries.append(entry)

    def remove(self, entry: ObjectEntry) -> None:
        self._entries.remove(entry)

    def used(self, entry: ObjectEntry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def coldest(self) -> Iterator[ObjectEntry]:
        return iter(self._entries)
