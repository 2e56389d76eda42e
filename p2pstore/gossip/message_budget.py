"""How many gossip messages a peer may still send and answer now: a bucket that fills steadily. Pure.

A message costs some half millisecond of CPU at each end, so gossip is bounded by their number, whatever the
size of the cluster and its load. All count, those of others too; but probes and answers never wait: what they
take is missing for exchanges and eager messages, which do.
"""

from __future__ import annotations

import math


class MessageBudget:
    """`per_second` messages, of which `burst` may come at once."""

    def __init__(self, per_second: float, burst: float) -> None:
        if per_second <= 0 or burst <= 0:
            raise ValueError("a message budget must let some messages pass")
        self._per_second = per_second
        self._burst = burst
        self._left = burst
        self._at = -math.inf

    def take(self, count: int, now: float) -> None:
        """So many messages are sent or came. It may go below nothing, down to an empty bucket's depth: after a
        flood of others' messages this peer asks again within a second or so."""
        self._left = max(-self._burst, self._level(now) - count)
        self._at = max(now, self._at)

    def ready_at(self, count: int) -> float:
        """From when on so many are there."""
        missing = min(count, self._burst) - self._left
        return -math.inf if missing <= 0 else self._at + missing / self._per_second

    def _level(self, now: float) -> float:
        if self._at == -math.inf:
            return self._burst
        return min(self._burst, self._left + max(0.0, now - self._at) * self._per_second)
