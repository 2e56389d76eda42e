"""S3-FIFO: two queues that nothing moves in when it is read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from p2pstore.memory.entries import EntryList, ObjectEntry, unlink
from p2pstore.memory.policies.interface import NEW_SHARE, EvictionPolicy, EvictionQueue, Ghosts, worth

MAX_READS_COUNTED: Final = 3
READS_TO_STAY: Final = 2
"""Reads of a new object after which it joins the main queue."""
MAX_PROMOTED: Final = 1_024
"""In one step: half a millisecond. Where even more were read since room was needed last, one of them goes."""
_MAIN: Final = 4
"""The bit of `standing` that says in which of both queues an entry is; the lower two count its reads."""


class S3Fifo(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): new objects pass a small queue, and only those that are read there, or come
    back soon after they were evicted from it, take room for long. Queues are measured in bytes, as objects differ.

    An entry that is leased leaves its queue, and comes back at its end.
    """

    def __init__(self) -> None:
        self._ghosts = Ghosts(least=0)

    def new_queue(self) -> EvictionQueue:
        return _SmallAndMain()

    def cost(self, entry: ObjectEntry, now: float) -> float:
        reads = (entry.standing & MAX_READS_COUNTED) + (entry.standing & _MAIN)
        return worth(entry) * (1 + reads) / (1.0 + max(0.0, now - entry.last_access))

    def admitted(self, entries: Sequence[ObjectEntry], now: float) -> None:
        for entry, _, _ in self._ghosts.take(entries):
            entry.standing = _MAIN

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        reads = min(MAX_READS_COUNTED, (entry.standing & MAX_READS_COUNTED) + count)
        entry.standing = (entry.standing & _MAIN) | reads

    def evicted(self, entries: Sequence[ObjectEntry]) -> None:
        small = [entry for entry in entries if not entry.standing & _MAIN]
        self._ghosts.add(small, int(self.queued * (1 - NEW_SHARE)))


class _SmallAndMain(EvictionQueue):
    def __init__(self) -> None:
        self._small, self._main = EntryList(), EntryList()

    def add(self, *entries: ObjectEntry) -> None:
        self._small.append(*[entry for entry in entries if not entry.standing & _MAIN])
        self._main.append(*[entry for entry in entries if entry.standing & _MAIN])

    def used(self, entry: ObjectEntry) -> None:
        """Reads were counted; nothing moves before room is needed."""

    def coldest(self) -> Iterator[ObjectEntry]:
        self._promote()
        yield from self._small if self._takes_small else self._main
        yield from self._main if self._takes_small else self._small

    @property
    def _takes_small(self) -> bool:
        everything = self._small.bytes + self._main.bytes
        return self._small.bytes > NEW_SHARE * everything or self._main.coldest is None

    def _promote(self) -> None:
        """Until the first one that would go has not been read: those before it stay. Each read pays for one step."""
        for _ in range(MAX_PROMOTED):
            entry = self._small.coldest if self._takes_small else self._main.coldest
            if entry is None:
                return
            if entry.within is self._small:
                if entry.standing < READS_TO_STAY:
                    return
                unlink(entry)
                entry.standing = _MAIN
                self._main.append(entry)
            else:
                if entry.standing == _MAIN:
                    return
                unlink(entry)
                entry.standing -= 1
                self._main.append(entry)
