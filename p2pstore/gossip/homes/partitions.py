"""Partitions of all keys. Pure.

There are 1,024 of them; a key belongs to the one that the first ten bits of its digest name, so partitions are
alike in size. What a peer holds of one partition is a small log of its own (`log`): an operation number, and
the set that the operations add up to, of which the XOR hash is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PARTITION_COUNT: Final = 1_024
"""Operation numbers within one travel in 32 bits: 100 changes a second fill them in 1,300 years."""


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """Timing and bounds of the partitioned directory."""

    push_seconds: float = 0.02
    """Shortest time between two batches of operations to homes."""
    push_timeout_seconds: float = 0.5
    push_resend_seconds: float = 0.15
    """After so long, at least, operations that a home did not answer are sent once more."""
    push_retry_seconds: float = 0.05
    push_longest_retry_seconds: float = 2.0
    syncs_per_second: float = 200.0
    sync_bytes_per_second: float = 8.0 * 1024 * 1024
    """How fast whole partitions go to homes that are new."""
    sync_spread_seconds: float = 0.002
    """For each member: within what time after a change the owners begin with that."""
    audit_seconds: float = 10.0
    """Each home is told once in this time what it should have,"""
    audit_pause_seconds: float = 0.02
    """or, where there are many, one after the other with this pause."""
    trusted_audits: float = 2.5
    """A home vouches for an owner that it has heard an audit of within so many times that time."""
    former_home_seconds: float = 10.0
    """How long a member that is home no longer is told of operations, and keeps what it has."""
    complete_seconds: float = 0.25
    """How long a home goes by what it found when it looked whether all owners had told it."""
    max_records: int = 20_000_000
    """Of others, kept as their home."""
    cached_locations: int = 100_000
    cached_seconds: float = 30.0
    max_denied: int = 100_000


def partition_of(digest: bytes) -> int:
    """The first ten bits, as a number."""
    return digest[0] << 2 | digest[1] >> 6
