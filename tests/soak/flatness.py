"""Whether something grows: a line through the second half of what was measured, which outliers do not turn. Pure.

In its first minutes a process grows as its connections, caches and heap fill; how far, a ceiling says. Whether it goes
on shows in lives that are long enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

MIN_SAMPLES: Final = 10
MAX_SAMPLES: Final = 400
WARM_SECONDS: Final = 600.0
"""Age of a peer after which nothing may grow any more."""
SETTLED_SECONDS: Final = 2 * WARM_SECONDS
"""Minimum length of a life whose line is judged."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The second half of a series: its median, and the rise of the line through it from begin to end (negative: it
    falls)."""

    median: float
    rise: float
    seconds: float
    settled: bool
    """Whether all of it is after the first minutes."""


@dataclass(frozen=True, slots=True)
class GrowthLimit:
    """A rise is too large above both `absolute` and `share` x the median; a median is too large above `most`."""

    absolute: float
    share: float
    most: float

    def allows(self, growth: Growth) -> bool:
        too_steep = growth.settled and growth.rise > max(self.absolute, self.share * growth.median)
        return growth.median <= self.most and not too_steep


def growth_of(samples: Sequence[tuple[float, float]]) -> Growth | None:
    """`samples` are (time in seconds, value), in order. None for too few: nothing can be said of them. The slope is the
    median of the slopes between all pairs (Theil and Sen)."""
    if not samples:
        return None
    first_at, last_at = samples[0][0], samples[-1][0]
    begin = (first_at + last_at) / 2
    later = np.array([each for each in samples if each[0] >= begin], dtype=np.float64)
    if len(later) < MIN_SAMPLES:
        return None
    later = later[:: -(-len(later) // MAX_SAMPLES)]
    first, second = np.triu_indices(len(later), 1)
    times = later[second, 0] - later[first, 0]
    slopes = (later[second, 1] - later[first, 1])[times > 0] / times[times > 0]
    seconds = float(later[-1, 0] - later[0, 0])
    settled = last_at - first_at >= SETTLED_SECONDS
    return Growth(float(np.median(later[:, 1])), float(np.median(slopes)) * seconds, seconds, settled)
