"""A network that loses, doubles and delays messages, from the kernel's seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulation.kernel import Kernel


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
        self.bytes_sent = 0

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Deliver once, more often, or never."""
        rng, faults = self.kernel.rng, self.faults
        self.messages += 1
        self.bytes_sent += size_bytes
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
        """Undo all partitions."""
        self.blocked.clear()
