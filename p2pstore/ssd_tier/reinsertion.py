"""Which records of a segment are kept when it is reclaimed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEPT_SHARE: Final = 0.2
"""At most this share of a segment is written again: each byte of the log costs at most 1.25 bytes of writing."""

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


def choose_kept(
    candidates: Iterable[Candidate[Record]], segment_bytes: int
) -> list[Candidate[Record]]:
    """The records worth keeping, the hottest first, as far as the share goes.

    A record is worth it when its object was hit, or is the last copy; among equally hot ones last copies go first. What
    does not fit is skipped for what does.
    """
    worth = [each for each in candidates if each.hits or each.last_copy]
    worth.sort(key=lambda each: (-each.hits, not each.last_copy))
    left = int(segment_bytes * KEPT_SHARE)
    kept: list[Candidate[Record]] = []
    for each in worth:
        if each.bytes <= left:
            left -= each.bytes
            kept.append(each)
    return kept
