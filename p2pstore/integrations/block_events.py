"""An engine's blocks in the pool as events for routers: each is stored once, and removed once. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
"""An engine's key of a block."""

MAX_TOLD: Final = 200_000
"""Blocks that were told of as stored. Beyond it the oldest are told of as removed."""
CHECKED_AT_ONCE: Final = 4096


class BlockEvent(NamedTuple, Generic[K]):
    """Blocks that came to the pool, or left it."""

    keys: list[K]
    removed: bool


class BlockEvents(Generic[K]):
    """A block is told of as stored when this engine stored it or found it there, and as removed when a check finds that
    no peer has it any more. Consumers that count see one removal for each store. Any thread may call."""

    def __init__(self, max_told: int = MAX_TOLD) -> None:
        self._max_told = max_told
        self._told: OrderedDict[K, None] = OrderedDict()
        """The one that was checked longest ago first."""
        self._new: set[K] | None = None
        """Blocks that were found while a check is under way, which says nothing of them. None between checks."""
        self._events: list[BlockEvent[K]] = []
        self._lock = threading.Lock()

    def found(self, keys: Sequence[K], *, new: bool) -> None:
        """These blocks are in the pool. `new`: they were not there a moment ago, so what was told before is over."""
        with self._lock:
            if self._new is not None:
                self._new.update(keys)
            if new:
                self._remove([key for key in keys if key in self._told])
            added = [key for key in dict.fromkeys(keys) if key not in self._told]
            self._told.update(dict.fromkeys(added))
            self._tell(added, removed=False)
            surplus = len(self._told) - self._max_told
            if surplus > 0:
                self._remove([*islice(self._told, surplus)])

    def to_check(self) -> list[K]:
        """The blocks to be checked next: all in turn. One check at a time."""
        with self._lock:
            self._new = set()
            some = [*islice(self._told, CHECKED_AT_ONCE)]
            for key in some:
                self._told.move_to_end(key)
            return some

    def checked(self, keys: Sequence[K], there: Sequence[bool]) -> None:
        with self._lock:
            new, self._new = self._new or (), None
            absent = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            self._remove([key for key in absent if key in self._told and key not in new])

    def gone(self, keys: Sequence[K]) -> None:
        with self._lock:
            self._remove([key for key in dict.fromkeys(keys) if key in self._told])

    def forget(self) -> None:
        """All is removed, and told of again when it is found: for an engine that told consumers to forget all."""
        with self._lock:
            self._remove(list(self._told))

    def take(self) -> list[BlockEvent[K]]:
        with self._lock:
            events, self._events = self._events, []
            return events

    def _remove(self, keys: list[K]) -> None:
        for key in keys:
            del self._told[key]
        self._tell(keys, removed=True)

    def _tell(self, keys: list[K], *, removed: bool) -> None:
        if keys:
            self._events.append(BlockEvent(keys, removed))


class CountedBlocks(Generic[K]):
    """Blocks of an engine that counts their bytes. It is told with the sizes, in order, by the caller's thread."""

    def __init__(
        self,
        tell_stored: Callable[[list[K], list[int]], None],
        tell_removed: Callable[[list[K], list[int]], None],
    ) -> None:
        self._tell_stored, self._tell_removed = tell_stored, tell_removed
        self._events: BlockEvents[K] = BlockEvents()
        self._sizes: dict[K, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sizes)

    def found(self, sizes: Mapping[K, int]) -> None:
        """These blocks are in the pool. A block that is counted already keeps its size."""
        with self._lock:
            for key, size in sizes.items():
                self._sizes.setdefault(key, size)
            self._events.found(list(sizes), new=False)
            self._tell()

    def gone(self, keys: Sequence[K]) -> None:
        with self._lock:
            self._events.gone(keys)
            self._tell()

    def check(self, contains: Callable[[list[K]], Sequence[bool]]) -> None:
        keys = self._events.to_check()
        there = contains(keys)
        with self._lock:
            self._events.checked(keys, there)
            self._tell()

    def _tell(self) -> None:
        for event in self._events.take():
            tell = self._tell_removed if event.removed else self._tell_stored
            tell(event.keys, [self._sizes[key] for key in event.keys])
            for key in event.keys if event.removed else ():
                del self._sizes[key]
