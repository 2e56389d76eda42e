"""How fast operations come, to tell a cluster under load from a quiet one. Pure.

In a quiet cluster gossip spends bytes to be quick: news is relayed eagerly, and comes several times. Under load it
spends time to save bytes.
"""

from __future__ import annotations

import math
from typing import Final

RATE_SECONDS: Final = 0.25
"""The rate is judged so often ..."""
RATE_MEMORY_SECONDS: Final = 1.0
"""... and averaged over about so long."""


class OperationRate:
    """Whether operations come faster than `limit` a second. Once they did, until there are less than half as
    many."""

    def __init__(self, limit: float) -> None:
        self.is_high = False
        self._limit = limit
        self._count = 0
        self._rate = 0.0
        self._since = -math.inf

    def add(self, count: int) -> None:
        """So many operations were seen."""
        self._count += count

    def judge(self, now: float) -> None:
        """Call it a few times a second."""
        elapsed = now - self._since
        if elapsed < RATE_SECONDS:
            return
        self._since = now
        if math.isfinite(elapsed):
            weight = 1.0 - math.exp(-elapsed / RATE_MEMORY_SECONDS)
            self._rate += weight * (self._count / elapsed - self._rate)
        self._count = 0
        self.is_high = self._rate > (self._limit / 2 if self.is_high else self._limit)
