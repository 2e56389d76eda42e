"""What was counted in the last minutes, whether or not anybody looked. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

INTERVAL_SECONDS: Final = 10.0
INTERVALS: Final = 120
"""Twenty minutes of them."""


class _Sample(NamedTuple):
    at: float
    totals: tuple[int, ...]


class RecentCounts:
    """Counters that only grow, looked at every `INTERVAL_SECONDS`. Times are monotonic seconds."""

    def __init__(self, names: Sequence[str], intervals: int = INTERVALS) -> None:
        self._names = tuple(names)
        self._samples: deque[_Sample] = deque(maxlen=intervals + 1)

    def sample(self, totals: Mapping[str, int], now: float) -> None:
        """The counters stand so; one that is missing stands at 0."""
        self._samples.append(_Sample(now, self._values(totals)))

    def since(self, totals: Mapping[str, int], now: float) -> tuple[float, dict[str, int]]:
        """Over how many seconds up to now it is known what was counted, and how much each counter has grown."""
        first = self._samples[0] if self._samples else _Sample(now, self._values(totals))
        grown = map(int.__sub__, self._values(totals), first.totals)
        return now - first.at, dict(zip(self._names, grown, strict=True))

    def document(self, names: Sequence[str]) -> dict[str, Any]:
        """How much these grew in each interval, the oldest first, and how many seconds each interval took."""
        steps = list(pairwise(self._samples))
        places = [self._names.index(name) for name in names]
        return {
            "seconds": [round(later.at - sooner.at, 1) for sooner, later in steps],
            "grown": {
                name: [later.totals[place] - sooner.totals[place] for sooner, later in steps]
                for name, place in zip(names, places, strict=True)
            },
        }

    def _values(self, totals: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(totals.get(name, 0) for name in self._names)
