"""What failures of the disk mean for the tier: whether it goes on, only reads, or is off. Pure."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum
from typing import Final

from p2pstore.errors import P2PStoreError
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
FOUND_AGAIN: Final = "put it back as it was, or leave it, and start this peer again: it makes a new log where none is"
_NOT_WRITABLE: Final = {errno.ENOSPC, errno.EROFS, errno.EDQUOT}


class TierState(Enum):
    """It only gets worse: what ends it is a new start."""

    OK = "ok"
    READ_ONLY = "read_only"
    """Objects are read and discarded, but none is written."""
    OFF = "off"
    """Nothing is read or written. What was discarded lately may be found again after a restart."""


class TierOff(P2PStoreError):
    """The disk failed so often that the tier is off: discards that were not durable by then never will be."""


@dataclass(slots=True)
class Health:
    """Counts failures and draws the conclusions."""

    state: TierState = TierState.OK
    why: str = ""
    """What made the state worse than OK."""
    cure: str = ""
    """What to do about it, for people."""
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
        """What was written since the last sync is in an unknown state."""
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
        """How long the disk has been at what it does now. A stuck request may yet end; nobody waits so long for it."""
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
