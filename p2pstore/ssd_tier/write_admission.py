"""Whether an object that leaves memory is written to the SSD: policy, write budget, shares of namespaces. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.objects import KIB, MAX_OBJECT_BYTES, MIB

SECONDS_A_DAY: Final = 86_400.0


class WriteRefusal(Enum):
    """Why an object is not written."""

    READ_ONLY = "read_only"
    TOO_SMALL = "too_small"
    TOO_LARGE = "too_large"
    OVER_CAP = "over_cap"
    """Its namespace is at its cap."""
    SEEN_ONCE = "seen_once"
    QUEUE_FULL = "queue_full"
    WRITE_BUDGET_SPENT = "write_budget_spent"
    NO_ROOM = "no_room"
    """No segment became free in time."""
    OUTDATED = "outdated"
    """The tier holds, or was told to discard, this version or a newer one."""
    FAILED = "failed"
    """The disk failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """Rules for what is written to the SSD."""

    min_bytes: int = 16 * KIB
    """Each object takes a header page of 4 KiB: smaller ones cost more than they give."""
    max_bytes: int = MAX_OBJECT_BYTES
    min_hits: int = 1
    """Reads before an object is worth a write; a last copy needs none."""
    write_bytes_per_day: int | None = None
    """The device's rating; None: no limit."""
    burst_seconds: float = 3600.0
    """How much of the budget may be saved up and spent at once."""
    max_queued_bytes: int = 256 * MIB
    """Bytes on their way to the disk; beyond that objects are not written."""
    compress: bool = True
    """Whether lz4 is tried where a sample says that it pays."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_bytes <= self.max_bytes:
            raise ValueError("min_bytes must be between 0 and max_bytes")
        if self.write_bytes_per_day is not None and self.write_bytes_per_day < 1:
            raise ValueError("write_bytes_per_day must be positive, or None for no limit")
        if self.burst_seconds <= 0 or self.max_queued_bytes < 1 or self.min_hits < 0:
            raise ValueError("burst_seconds and max_queued_bytes must be positive, min_hits >= 0")


class WriteBudget:
    """A token bucket of bytes per day. Mandatory writes may leave it in debt."""

    def __init__(self, bytes_per_day: int, burst_seconds: float, now: float) -> None:
        self.bytes_per_second = bytes_per_day / SECONDS_A_DAY
        self.burst_bytes = self.bytes_per_second * burst_seconds
        self._balance = self.burst_bytes
        self._at = now

    def balance(self, now: float) -> float:
        """Bytes that may be written now; below 0 when in debt. A clock that goes back earns nothing."""
        if now > self._at:
            earned = (now - self._at) * self.bytes_per_second
            self._balance = min(self.burst_bytes, self._balance + earned)
        self._at = now
        return self._balance

    def spend(self, count: int, now: float) -> None:
        """Take `count` bytes, whatever the balance is."""
        self._balance = self.balance(now) - count


@dataclass(slots=True)
class Admission:
    """Decides, and counts what it refused by reason."""

    policy: AdmissionPolicy
    now: float
    """When it begins."""
    admitted: int = 0
    refused: Counter[WriteRefusal] = field(default_factory=Counter)
    budget: WriteBudget | None = field(init=False)

    def __post_init__(self) -> None:
        per_day = self.policy.write_bytes_per_day
        self.budget = WriteBudget(per_day, self.policy.burst_seconds, self.now) if per_day else None

    def decide(
        self,
        length_bytes: int,
        *,
        hits: int,
        last_copy: bool,
        queued_bytes: int,
        read_only: bool,
        now: float,
        fits_share: bool = True,
    ) -> WriteRefusal | None:
        """None when the object should be written: its bytes are then taken from the budget."""
        policy, budget = self.policy, self.budget
        if read_only:
            refusal = WriteRefusal.READ_ONLY
        elif length_bytes < policy.min_bytes:
            refusal = WriteRefusal.TOO_SMALL
        elif length_bytes > policy.max_bytes:
            refusal = WriteRefusal.TOO_LARGE
        elif hits < policy.min_hits and not last_copy:
            refusal = WriteRefusal.SEEN_ONCE
        # An object that is longer than the whole queue goes when the queue is empty.
        elif queued_bytes and queued_bytes + length_bytes > policy.max_queued_bytes:
            refusal = WriteRefusal.QUEUE_FULL
        elif budget is not None and budget.balance(now) < min(length_bytes, budget.burst_bytes):
            refusal = WriteRefusal.WRITE_BUDGET_SPENT
        elif not fits_share:
            refusal = WriteRefusal.OVER_CAP
        else:
            self.admitted += 1
            self.spend(length_bytes, now)
            return None
        self.refused[refusal] += 1
        return refusal

    def spend(self, count: int, now: float) -> None:
        """Charge bytes that are written without a decision: durable puts, records that reclaim keeps."""
        if self.budget is not None:
            self.budget.spend(count, now)


@dataclass(frozen=True, slots=True)
class Share:
    """The reserve and the cap of one namespace."""

    reserved_bytes: int = 0
    most_bytes: int | None = None
    """None: as much as there is."""


Shares = Callable[[], Mapping[str, Share]]
"""The shares of this moment."""


def no_shares() -> Mapping[str, Share]:
    """Of a disk that all namespaces share alike."""
    return {}


class NamespaceBytes:
    """Bytes of these namespaces in each segment. Others are not counted."""

    def __init__(self, namespaces: Iterable[str], segments: int) -> None:
        self._in_segments = {name: np.zeros(segments, np.int64) for name in namespaces}

    def count(self, namespace: str, segment: int, size_bytes: int) -> None:
        counted = self._in_segments.get(namespace)
        if counted is not None:
            counted[segment] += size_bytes

    def load(
        self,
        names: Iterable[str],
        namespaces: npt.NDArray[np.uint32],
        segments: npt.NDArray[np.uint32],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        """Count many records: for each which of `names` it is in, its segment and its size."""
        for number, name in enumerate(names):
            counted = self._in_segments.get(name)
            if counted is not None:
                its = namespaces == number
                counted += np.bincount(segments[its], sizes[its], len(counted)).astype(np.int64)

    def bytes_of(self, namespace: str) -> int:
        """All bytes of a counted namespace; 0 for others."""
        counted = self._in_segments.get(namespace)
        return 0 if counted is None else int(counted.sum())

    def above_reserve(self, shares: Mapping[str, Share]) -> dict[str, int]:
        """How much of what each namespace with a reserve has may go for others."""
        return {
            name: max(0, self.bytes_of(name) - share.reserved_bytes)
            for name, share in shares.items()
            if share.reserved_bytes and name in self._in_segments
        }

    def reserved_in(self, segment: int, above_reserve: Mapping[str, int]) -> int:
        """Bytes of a segment that give way to no other namespace."""
        return sum(
            max(0, int(self._in_segments[name][segment]) - above)
            for name, above in above_reserve.items()
        )
