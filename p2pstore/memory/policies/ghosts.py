"""Ghosts: memories of evicted objects. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from p2pstore.memory.entries import ObjectEntry

LEAST_GHOSTS: Final = 65_536
"""The minimum number of ghosts: 14 MB. A peer with few large objects evicts them long before their next read, and only
more ghosts than live objects tell it which are read again."""
MOST_FORGOTTEN: Final = 16
"""In one step, when much was removed at once."""


class Ghosts:
    """Standing and last access of evicted objects, by digest; the oldest are forgotten."""

    def __init__(self, least: int = LEAST_GHOSTS) -> None:
        self._least = least
        self._kept: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, entry: ObjectEntry, live: int) -> None:
        """Remember an entry; as many as there are live objects, or the least, but some more for a while when there are
        far fewer live objects all of a sudden."""
        self._kept.pop(entry.digest, None)
        self._kept[entry.digest] = (entry.standing, entry.last_access)
        too_many = len(self._kept) - max(self._least, live)
        for _ in range(min(too_many, MOST_FORGOTTEN)):
            self._kept.popitem(last=False)

    def take(self, digest: bytes) -> tuple[int, float] | None:
        """Its standing and last access when it was evicted, once; None for what is not remembered."""
        return self._kept.pop(digest, None)
