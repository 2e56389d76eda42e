"""Bringing objects to memory before they are asked for: some at a time, so that they do not push each other out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_QUEUED: Final = 16_384
"""As many as one request has. What is asked for beyond that is not brought: it can still be read."""
AT_ONCE: Final = 16
UNDER_WAY_SHARE: Final = 8
"""At most this part of memory is for what is on its way, as far as lengths are known."""
BEGUN_PER_STEP: Final = 64
"""Of those that are here already, or end at once because nobody has them."""


class Prefetching:
    """Fetches that nobody waits for."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._queue: deque[bytes] = deque()
        self._under_way: dict[bytes, int] = {}
        """Bytes of each; 0 where the length is not known."""
        self._beginning = False
        self._more_at = math.inf

    def __len__(self) -> int:
        """How many are queued or on their way."""
        return len(self._queue) + len(self._under_way)

    def add(self, digests: Iterable[bytes], now: float) -> None:
        """Bring these, in order."""
        for digest in digests:
            if len(self._queue) == MAX_QUEUED:
                break
            self._queue.append(digest)
        self._go_on(now)

    def next_tick(self) -> float:
        """When `tick` has something to do."""
        return self._more_at

    def tick(self, now: float) -> None:
        """Bring some more."""
        if now >= self._more_at:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        if self._beginning:  # one of those that begin ended at once
            return
        self._beginning = True
        try:
            self._begin(now)
        finally:
            self._beginning = False

    def _begin(self, now: float) -> None:
        core = self._core
        self._more_at = math.inf
        begun = 0
        while self._queue and len(self._under_way) < AT_ONCE and not self._is_full:
            if begun == BEGUN_PER_STEP:
                self._more_at = now
                return
            begun += 1
            digest = self._queue.popleft()
            if digest in self._under_way or core.objects.find(digest, now) is not None:
                continue
            cold = core.cold.find(digest, now)
            self._under_way[digest] = 0 if cold is None else cold.length
            operation = core.operations.fetch(digest, now, on_finish=partial(self._ended, digest))
            if operation.shared_by > 1:  # somebody else's: it says nothing here when it ends
                operation.shared_by -= 1
                del self._under_way[digest]

    @property
    def _is_full(self) -> bool:
        most = self._core.segment.data_bytes // UNDER_WAY_SHARE
        return bool(self._under_way) and sum(self._under_way.values()) >= most

    def _ended(self, digest: bytes, result: Any, now: float) -> None:
        if self._under_way.pop(digest, None) is not None:
            self._go_on(now)
