"""A list of entries from the coldest to the warmest, linked through the entries themselves. Pure.

An entry can be placed beside any other in constant time, which a dict in order of insertion cannot do, and the list
costs no memory of its own. An entry is in one list at most.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pstore.memory.entries import ObjectEntry


class EntryList:
    """Entries in order, and the sum of their extents in bytes."""

    __slots__ = ("bytes", "coldest", "warmest")

    def __init__(self) -> None:
        self.coldest: ObjectEntry | None = None
        self.warmest: ObjectEntry | None = None
        self.bytes = 0

    def append(self, entry: ObjectEntry) -> None:
        """Add an entry that is in no list, as the warmest."""
        entry.within = self
        entry.colder = self.warmest
        if self.warmest is None:
            self.coldest = entry
        else:
            self.warmest.warmer = entry
        self.warmest = entry
        self.bytes += entry.extent_bytes

    def insert_before(self, entry: ObjectEntry, warmer: ObjectEntry) -> None:
        """Add an entry that is in no list, next to one of this list and colder than it."""
        colder = warmer.colder
        entry.within = self
        entry.colder, entry.warmer = colder, warmer
        warmer.colder = entry
        if colder is None:
            self.coldest = entry
        else:
            colder.warmer = entry
        self.bytes += entry.extent_bytes

    def remove(self, entry: ObjectEntry) -> None:
        """Take out an entry of this list."""
        colder, warmer = entry.colder, entry.warmer
        if colder is None:
            self.coldest = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            self.warmest = colder
        else:
            warmer.colder = colder
        entry.within = entry.colder = entry.warmer = None
        self.bytes -= entry.extent_bytes

    def __iter__(self) -> Iterator[ObjectEntry]:
        """From the coldest on. Nothing may change the list meanwhile."""
        entry = self.coldest
        while entry is not None:
            yield entry
            entry = entry.warmer
