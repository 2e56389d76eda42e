"""Virtual time and a faulty network, from one seed. The same seed gives the same run."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
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
            self.now, _, action = heapq.heappop(self._queue)
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


@dataclass(slots=True)
class Faults:
    """What the network does to each message. Probabilities 0 to 1, latencies in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    minimum_latency: float = 0.0002
    maximum_latency: float = 0.001
    slow: float = 0.0
    """Probability of a message that takes `slow_latency` instead, and so overtakes nothing."""
    slow_latency: float = 0.3


class FaultyNetwork:
    """Delivers messages between numbered hosts, late, twice, or not at all.

    `blocked` holds (from, to) pairs: a partition may be one-way.
    """

    def __init__(self, kernel: Kernel, faults: Faults) -> None:
        self.kernel = kernel
        self.faults = faults
        self.blocked: set[tuple[int, int]] = set()
        self.messages = 0

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Deliver once, more often, or never."""
        rng, faults = self.kernel.rng, self.faults
        self.messages += 1
        self.kernel.trace("send", source, target, size_bytes)
        copies = 2 if rng.random() < faults.duplication else 1
        for _ in range(copies):
            if rng.random() < faults.loss:
                continue
            latency = rng.uniform(faults.minimum_latency, faults.maximum_latency)
            if rng.random() < faults.slow:
                latency = faults.slow_latency * rng.random()
            self.kernel.after(latency, lambda: self._arrive(source, target, deliver))

    def _arrive(self, source: int, target: int, deliver: Callable[[], None]) -> None:
        if (source, target) not in self.blocked:
            deliver()

    def partition(self, *groups: set[int]) -> None:
        """Cut every link between hosts of different groups."""
        for first in groups:
            for second in groups:
                if first is not second:
                    self.blocked |= {(a, b) for a in first for b in second}

    def heal(self) -> None:
        self.blocked.clear()
