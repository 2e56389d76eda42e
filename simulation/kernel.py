"""Virtual time, from one seed. The same seed gives the same run."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from random import Random
from typing import Final

MAX_EVENTS: Final = 50_000_000


class Kernel:
    """An event queue in virtual seconds. `trace_hash` tells whether two runs were the same."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._trace = hashlib.blake2b(digest_size=16)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at virtual time `when` (at once if that has passed); ties in order of calling."""
        self._order += 1
        heapq.heappush(self._queue, (max(when, self.now), self._order, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run all events up to virtual time `until`, or until `stop()`."""
        while self._queue and self._queue[0][0] <= until and not stop():
            when, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            self.events += 1
            if self.events > MAX_EVENTS:
                raise RuntimeError("the simulation does not come to rest")
            action()
        if not stop():
            self.now = max(self.now, until)

    def trace(self, *words: object) -> None:
        self._trace.update(repr((round(self.now, 9), *words)).encode())

    @property
    def trace_hash(self) -> str:
        return self._trace.hexdigest()
