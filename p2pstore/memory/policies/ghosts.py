"""What is remembered of objects that are gone. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from p2pstore.memory.entries import ObjectEntry

LEAST_GHOSTS: Final = 65_536
"""So many are remembered at least: 14 MB. A peer with few large objects evicts them long before they would be asked
for again, and only a memory longer than its own contents tells it which are."""
MOST_FORGOTTEN: Final = 16
"""In one step, when much was removed at once."""


class Ghosts:
    """What was thought of objects that were evicted, by digest; the oldest are forgotten."""

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
