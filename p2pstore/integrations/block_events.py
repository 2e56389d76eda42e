"""An engine's blocks in the pool as events for routers: each is stored once, and removed once. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

MAX_TOLD: Final = 200_000
"""Blocks that were told of as stored. Beyond it the oldest are told of as removed."""
CHECKED_AT_ONCE: Final = 4096


class BlockEvent(NamedTuple):
    """Blocks that came to the pool, or left it."""

    keys: list[bytes]
    removed: bool


class BlockEvents:
    """A block is told of as stored when this engine stored it or found it there, and as removed when a check finds that
    no peer has it any more. Consumers that count see one removal for each store. Any thread may call."""

    def __init__(self, max_told: int = MAX_TOLD) -> None:
        self._max_told = max_told
        self._told: OrderedDict[bytes, None] = OrderedDict()
        """The one that was checked longest ago first."""
        self._events: list[BlockEvent] = []
        self._lock = threading.Lock()

    def found(self, keys: Sequence[bytes], *, new: bool) -> None:
        """These blocks are in the pool. `new`: they were not there a moment ago, so what was told before is over."""
        with self._lock:
            if new:
                self._remove([key for key in keys if key in self._told])
            added = [key for key in dict.fromkeys(keys) if key not in self._told]
            self._told.update(dict.fromkeys(added))
            self._tell(added, removed=False)
            surplus = len(self._told) - self._max_told
            if surplus > 0:
                self._remove([*islice(self._told, surplus)])

    def to_check(self) -> list[bytes]:
        """The blocks to be checked next: all in turn."""
        with self._lock:
            some = [*islice(self._told, CHECKED_AT_ONCE)]
            for key in some:
                self._told.move_to_end(key)
            return some

    def checked(self, keys: Sequence[bytes], there: Sequence[bool]) -> None:
        """The end of a check."""
        with self._lock:
            gone = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            self._remove([key for key in gone if key in self._told])

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def _remove(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._told[key]
        self._tell(keys, removed=True)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if keys:
            self._events.append(BlockEvent(keys, removed))
