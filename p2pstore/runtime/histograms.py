"""Histograms whose buckets are powers of two, for durations and sizes alike: counting is one index of a list. Pure.

Values are whole numbers: microseconds or bytes. A client counts in the same buckets as its peer, so that it can tell
a thousand reads by a list of some twenty numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

BUCKETS: Final = 42
"""Bucket n holds what is above 2^(n-1) and at most 2^n, the last one all that is more: 13 days, or 1 TiB."""
MAX_COUNT: Final = 1 << 53
"""Above it a number is no count."""


class Histogram:
    """Counts by bucket, and the sum of all values."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: Sequence[int] = (), total: int = 0) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0
        self.merge(counts, total)

    def add(self, value: int, count: int = 1) -> None:
        """`count` values of this size were seen."""
        bucket = (value - 1).bit_length() if value > 1 else 0
        self.counts[bucket if bucket < BUCKETS else BUCKETS - 1] += count
        self.total += value * count

    def add_seconds(self, seconds: float, count: int = 1) -> None:
        """`count` times this duration, kept in microseconds."""
        self.add(ceil(seconds * 1e6), count)

    def merge(self, counts: Sequence[int], total: int) -> None:
        """Add counts of another process. Numbers that are no counts are passed over."""
        for bucket, count in enumerate(counts[:BUCKETS]):
            if 0 < count < MAX_COUNT:
                self.counts[bucket] += count
        if 0 < total < MAX_COUNT:
            self.total += total

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> int:
        """The quantile of this share: the upper end of a bucket. 0 when there was no value."""
        left = self.count * share
        for bucket, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return 1 << bucket
        return 0

    def trimmed(self) -> list[int]:
        """The counts without the empty buckets at the end."""
        last = max((bucket for bucket, count in enumerate(self.counts) if count), default=-1)
        return self.counts[: last + 1]

    def cumulative(self, buckets: Sequence[int]) -> list[int]:
        """How many values were at most 2^n, for each n of `buckets`, which rise; and last, how many in all."""
        sums, below, start = [], 0, 0
        for bucket in buckets:
            below += sum(self.counts[start : bucket + 1])
            start = bucket + 1
            sums.append(below)
        return [*sums, below + sum(self.counts[start:])]

    def document(self) -> dict[str, Any]:
        return {"counts": self.trimmed(), "total": self.total}


def milliseconds(histogram: Histogram) -> Mapping[str, float]:
    """Median and 99th percentile of durations, for people."""
    return {"p50_ms": histogram.quantile(0.5) / 1000, "p99_ms": histogram.quantile(0.99) / 1000}
