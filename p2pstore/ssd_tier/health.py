"""The tier's health and counters: failures of the disk and their consequence, reasons of misses, patience of readers,
latencies and bandwidth. Pure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from p2pstore.errors import P2PStoreError
from p2pstore.runtime.histograms import Histogram, milliseconds
from p2pstore.ssd_tier.disk_protocol import Waits

MAX_FAILED_SEGMENTS: Final = 3
"""Segments in which a write or a sync failed, before nothing more is written."""
MAX_FAILED_DISCARDS: Final = 5
"""Attempts to write down discards that failed, one after the other."""
MAX_FAILED_READS: Final = 16
"""Reads that failed, one after the other."""
MAX_SILENT_SECONDS: Final = 30.0
"""As long as the kernel usually waits for a device before it resets it."""
REPLACE: Final = (
    "look at the kernel's log for that disk, replace it or free space, and start this peer again"
)
FOUND_AGAIN: Final = (
    "put it back as it was, or leave it, and start this peer again: it makes a new log where none is"
)
_NOT_WRITABLE: Final = {errno.ENOSPC, errno.EROFS, errno.EDQUOT}
PATIENCE_SECONDS: Final = 4.0
"""Less than the 5 s for which readers elsewhere wait without progress: so they hear of it, and go elsewhere."""
BANDWIDTH_SECONDS: Final = 10


class TierState(Enum):
    """A state only gets worse, until the next start."""

    OK = "ok"
    READ_ONLY = "read_only"
    """Objects are read and discarded, but none is written."""
    OFF = "off"
    """Nothing is read or written. Recent discards may be undone by a restart."""


class TierOff(P2PStoreError):
    """The tier is off after repeated failures: discards that are not durable by now never will be."""


@dataclass(slots=True)
class Health:
    """Counts failures and draws the conclusions."""

    state: TierState = TierState.OK
    why: str = ""
    """The cause of a state worse than OK."""
    cure: str = ""
    """The cure, for people."""
    failed_segments: int = 0
    read_errors: int = 0
    write_errors: int = 0
    sync_errors: int = 0
    discard_errors: int = 0
    _failed_reads: int = 0
    _failed_discards: int = 0

    def write_failed(self, error: OSError) -> None:
        """A record, a footer or a segment's start could not be written: its segment takes nothing more."""
        self.write_errors += 1
        self._segment_failed(error, "writing")

    def sync_failed(self, error: OSError) -> None:
        """All writes since the last sync are in an unknown state."""
        self.sync_errors += 1
        self._segment_failed(error, "syncing")

    def read_failed(self, error: OSError) -> None:
        """A record could not be read, twice."""
        self.read_errors += 1
        self._failed_reads += 1
        if self._failed_reads >= MAX_FAILED_READS:
            self._worsen(TierState.OFF, f"{self._failed_reads} reads in a row failed: {error}")

    def read_worked(self) -> None:
        """The disk gave bytes, right or wrong."""
        self._failed_reads = 0

    def discards_failed(self, error: OSError) -> None:
        """Dead marks could not be written or synced; they are tried again."""
        self.discard_errors += 1
        self._failed_discards += 1
        if self._failed_discards >= MAX_FAILED_DISCARDS:
            times = f"{self._failed_discards} times in a row"
            self._worsen(TierState.OFF, f"discards could not be written, {times}: {error}")

    def discards_worked(self) -> None:
        """Dead marks were written and synced."""
        self._failed_discards = 0

    def misplaced(self, why: str) -> None:
        """No request fails, but what is written would not be found by the next start."""
        self._worsen(TierState.READ_ONLY, why, FOUND_AGAIN)

    def waited(self, waits: Waits) -> None:
        """How long the disk has been at what it does now. A stuck request may still end later."""
        if waits.silent_seconds >= MAX_SILENT_SECONDS:
            why = f"it does not answer: nothing came from it for {waits.silent_seconds:.0f} s"
            self._worsen(TierState.OFF, why)
        elif waits.longest_seconds >= MAX_SILENT_SECONDS:
            why = f"it has not answered a request for {waits.longest_seconds:.0f} s, though others"
            self._worsen(TierState.READ_ONLY, why)

    def _segment_failed(self, error: OSError, what: str) -> None:
        self.failed_segments += 1
        if error.errno in _NOT_WRITABLE:
            self._worsen(TierState.READ_ONLY, f"{what} failed: {error}")
        elif self.failed_segments >= MAX_FAILED_SEGMENTS:
            times = f"{self.failed_segments} times"
            self._worsen(TierState.READ_ONLY, f"{what} failed, {times} by now: {error}")

    def _worsen(self, state: TierState, why: str, cure: str = REPLACE) -> None:
        order = list(TierState)
        if order.index(state) > order.index(self.state):
            self.state, self.why, self.cure = state, why, cure


class Miss(Enum):
    """See `ColdMiss`."""

    ABSENT = "absent"
    EXPIRED = "expired"
    DAMAGED = "damaged"
    """The disk returned other bytes than were written; the object was dropped."""
    READ_ERROR = "read_error"
    """The disk gave nothing, twice; the object was dropped."""
    SILENT = "silent"
    """The disk does not answer just now. It may again, and the object is still there."""
    OFF = "off"
    """The tier is off: the disk failed too often."""


class ColdMiss(P2PStoreError):
    """The tier does not have the object, or has it no longer; `reason` says why. Ask another peer."""

    def __init__(self, reason: Miss, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Overdue = Callable[[str], None]
"""Told, once, that an object is not to be waited for any more, and why. It may come all the same."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A read of an object that waits at most `patience_seconds` without progress."""

    moved: float
    """When something of it came; at first, when it was asked for."""
    patience_seconds: float
    overdue: Overdue
    told: bool = False

    def judge(self, waits: Waits, now: float) -> None:
        """Call `overdue` once, if it is. A request that only waits behind others on a working disk is not."""
        seconds = min(now - self.moved, waits.longest_seconds)
        if not self.told and seconds >= self.patience_seconds:
            self.told = True
            self.overdue(f"the SSD did not answer within {self.patience_seconds:g} s")


class Bandwidth:
    """Bytes per second over the last ten whole seconds."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._seconds: dict[int, int] = {}

    def add(self, count: int, now: float) -> None:
        """Count bytes moved at `now`, in Unix seconds."""
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
    """Loads that were given up or refused because the disk did not answer."""
    stored_objects: int = 0
    stored_bytes: int = 0
    """Bytes of values that were given to `store` and written."""
    compressed_parts: int = 0
    kept_records: int = 0
    evicted_objects: int = 0
    reclaimed_segments: int = 0
    read_latency: Histogram = field(default_factory=Histogram)
    write_latency: Histogram = field(default_factory=Histogram)
    read: Bandwidth = field(default_factory=Bandwidth)
    written: Bandwidth = field(default_factory=Bandwidth)
    """All that went to the disk: records, those that were kept, footers, dead marks."""

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte stored; 0 when nothing was stored."""
        return self.written.total_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def document(self, now: float) -> dict[str, Any]:
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
            "read_latency": milliseconds(self.read_latency),
            "write_latency": milliseconds(self.write_latency),
            "read_durations": self.read_latency.document(),
            "write_durations": self.write_latency.document(),
            "read_bytes_per_second": round(self.read.bytes_per_second(now)),
            "written_bytes_per_second": round(self.written.bytes_per_second(now)),
        }
