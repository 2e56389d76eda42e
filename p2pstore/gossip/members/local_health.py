"""How far a peer trusts its own probes: Lifeguard's local health (Dadgar et al. 2018). Pure.

A peer that is starved of CPU, or whose network fails, sees everybody else fail. What tells it so is its own
record: probes without an answer, helpers from which not even a refusal came back, and accusations of itself
that it had to refute. The worse that record, the longer it waits for answers, and the less often it asks.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 8
"""The worst score: everything takes nine times as long."""


class LocalHealth:
    """A score from 0 (well) to `most`; every wait is multiplied by one more than it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._score = 0

    @property
    def score(self) -> int:
        """0 when all goes well."""
        return self._score

    @property
    def multiplier(self) -> int:
        """By what probe intervals and timeouts are multiplied: 1 when all goes well."""
        return self._score + 1

    def better(self) -> None:
        """A probe succeeded."""
        self._score = max(0, self._score - 1)

    def worse(self, by: int = 1) -> None:
        """A probe failed, a helper did not even refuse, or an accusation of this peer had to be refuted."""
        self._score = min(self._most, self._score + by)
