"""What the tier counts and measures. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import Any, Final

_SHORTEST_SECONDS: Final = 1e-6
_STEPS_PER_OCTAVE: Final = 4
_BUCKETS: Final = 32 * _STEPS_PER_OCTAVE
"""Up to an hour."""
BANDWIDTH_SECONDS: Final = 10


class LatencyHistogram:
    """Durations in buckets of a quarter of an octave: percentiles are right to within 19 %."""

    def __init__(self) -> None:
        self.count = 0
        self.total_seconds = 0.0
        self._buckets = [0] * _BUCKETS

    def add(self, seconds: float) -> None:
        """One more took so long."""
        octaves = log2(max(seconds, _SHORTEST_SECONDS) / _SHORTEST_SECONDS)
        self._buckets[min(_BUCKETS - 1, int(octaves * _STEPS_PER_OCTAVE))] += 1
        self.count += 1
        self.total_seconds += seconds

    def percentile(self, share: float) -> float:
        """Seconds that this share of all did not exceed (the upper end of the bucket); 0 when there was none."""
        left = self.count * share
        for bucket, count in enumerate(self._buckets):
            left -= count
            if count and left <= 0:
                return float(_SHORTEST_SECONDS * 2 ** ((bucket + 1) / _STEPS_PER_OCTAVE))
        return 0.0

    def octaves(self) -> dict[str, Any]:
        """For JSON: how many took at most 1 us, at most 2, 4, 8 and so on, each without those before; and all together,
        in microseconds."""
        steps = _STEPS_PER_OCTAVE
        counts = [sum(self._buckets[start : start + steps]) for start in range(0, _BUCKETS, steps)]
        while counts and not counts[-1]:
            counts.pop()
        return {"counts": [0, *counts], "total": round(self.total_seconds * 1e6)}

    def document(self) -> dict[str, float]:
        """For JSON, in milliseconds."""
        shares = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
        return {name: round(self.percentile(share) * 1000, 3) for name, share in shares.items()}


class Bandwidth:
    """Bytes per second over the last ten whole seconds."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._seconds: dict[int, int] = {}

    def add(self, count: int, now: float) -> None:
        """So many bytes more."""
        self.total_bytes += count
        second = int(now)
        if second not in self._seconds:
            self._forget(second)
        self._seconds[second] = self._seconds.get(second, 0) + count

    def bytes_per_second(self, now: float) -> float:
        """Of the whole seconds that are over."""
        self._forget(int(now))
        over = sum(count for second, count in self._seconds.items() if second < int(now))
        return over / BANDWIDTH_SECONDS

    def _forget(self, second: int) -> None:
        for each in [each for each in self._seconds if abs(second - each) > BANDWIDTH_SECONDS]:
            del self._seconds[each]


@dataclass(slots=True)
class Measures:
    """Since the start of the process."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Records that were not what had been written."""
    expired: int = 0
    unanswered: int = 0
    """Loads that nobody waited for any more, or that did not begin, because the disk did not answer."""
    stored_objects: int = 0
    stored_bytes: int = 0
    """Bytes of values that were given to `store` and written."""
    compressed_parts: int = 0
    kept_records: int = 0
    evicted_objects: int = 0
    reclaimed_segments: int = 0
    read_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    write_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    read: Bandwidth = field(default_factory=Bandwidth)
    written: Bandwidth = field(default_factory=Bandwidth)
    """All that went to the disk: records, those that were kept, footers, dead marks."""

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte stored; 0 when nothing was stored."""
        return self.written.total_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def document(self, now: float) -> dict[str, Any]:
        """For JSON."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "damaged": self.damaged,
            "expired": self.expired,
            "unanswered": self.unanswered,
            "stored_objects": self.stored_objects,
            "stored_bytes": self.stored_bytes,
            "compressed_parts": self.compressed_parts,
            "kept_records": self.kept_records,
            "evicted_objects": self.evicted_objects,
            "reclaimed_segments": self.reclaimed_segments,
            "bytes_read": self.read.total_bytes,
            "bytes_written": self.written.total_bytes,
            "write_amplification": round(self.write_amplification, 4),
            "read_latency": self.read_latency.document(),
            "write_latency": self.write_latency.document(),
            "read_durations": self.read_latency.octaves(),
            "write_durations": self.write_latency.octaves(),
            "read_bytes_per_second": round(self.read.bytes_per_second(now)),
            "written_bytes_per_second": round(self.written.bytes_per_second(now)),
        }
