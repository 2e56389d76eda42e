"""Which records of a segment are kept when it is reclaimed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEPT_SHARE: Final = 0.2
"""At most this share of a segment is written again: each byte of the log costs at most 1.25 bytes of writing."""
RESERVED_SHARE: Final = 0.5
"""The same where it is reserved for its namespace: at most 2 bytes of writing."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Record]):
    """A live record of the segment."""

    record: Record
    bytes: int
    """On the disk, its header included."""
    hits: int
    """Reads of its object since it was written (or kept)."""
    last_copy: bool
    """Whether no other peer is known to hold its object."""
    reserved: bool = False
    """Whether its namespace has no more on the disk than what gives way to no other."""


def choose_kept(
    candidates: Iterable[Candidate[Record]], segment_bytes: int
) -> list[Candidate[Record]]:
    """The records worth keeping, the hottest first, as far as the share goes.

    A record is worth it when it is reserved, its object was hit, or is the last copy. Reserved ones go first; among
    equally hot ones last copies. What does not fit is skipped for what does.
    """
    worth = [each for each in candidates if each.reserved or each.hits or each.last_copy]
    worth.sort(key=lambda each: (not each.reserved, -each.hits, not each.last_copy))
    kept: list[Candidate[Record]] = []
    kept_bytes = 0
    for each in worth:
        share = RESERVED_SHARE if each.reserved else KEPT_SHARE
        if kept_bytes + each.bytes <= int(segment_bytes * share):
            kept_bytes += each.bytes
            kept.append(each)
    return kept
