"""Reading a log after a start, segment by segment: its start and its footer. Pure.

Only a segment that was opened and has no footer is searched; what it was synced of nobody knows, so payloads are
checked, too. No clean shutdown is needed, and there is no sign of one.
What counts of all that was found is decided by `refill`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from p2pstore.objects import KIB
from p2pstore.ssd_tier.dead_marks import DeadMarks
from p2pstore.ssd_tier.footer import (
    Footer,
    decode_footer,
    decode_footer_tail,
    footer_from_headers,
)
from p2pstore.ssd_tier.log_layout import PAGE_BYTES, DamagedRecord, segment_position
from p2pstore.ssd_tier.rows import ROW
from p2pstore.ssd_tier.segment_search import Bytes, Read, SegmentSearch
from p2pstore.ssd_tier.superblock import (
    SEGMENT_START_BYTES,
    Superblock,
    decode_segment_header,
)

_END_BYTES: Final = 32 * KIB
"""Read at the end of a segment: the whole footer of some 200 records."""


class FoundState(Enum):
    """What a segment turned out to be."""

    FREE = "free"
    """Nothing of its generation was written to it."""
    SEALED = "sealed"
    UNSEALED = "unsealed"
    """It was open when the log ended, or its footer is damaged: to be sealed, or reclaimed. Records whose payload is
    torn are marked dead."""
    DAMAGED = "damaged"
    """Its header is: nothing of it counts. To be reclaimed, with a generation above that of anything in it."""


@dataclass(slots=True)
class FoundSegment:
    """What was read of a segment. `generation` is the highest one that was ever there; `unreadable_bytes` could not
    be read: a damaged segment with any of these may have had a higher one, so nothing may be written to it again."""

    segment: int
    state: FoundState
    generation: int
    marks: DeadMarks
    footer: Footer
    unreadable_bytes: int = 0


SegmentReading = Generator[Read, Bytes | None, FoundSegment]
"""Yields what to read, is sent the bytes or None where the disk failed, and returns what was found. The memory of the
bytes may be used again as soon as the next thing is asked for."""


def read_segment(superblock: Superblock, segment: int) -> SegmentReading:
    """Read one segment."""
    store_id, size = superblock.store_id, superblock.segment_bytes
    position = segment_position(segment, size)
    start = yield Read(position, SEGMENT_START_BYTES)
    if start is None:
        return (yield from _damaged(superblock, segment, SEGMENT_START_BYTES))
    try:
        header = decode_segment_header(start[:PAGE_BYTES], store_id, segment)
    except DamagedRecord:
        return (yield from _damaged(superblock, segment, 0))
    generation = header.generation
    marks = DeadMarks.decode(start[PAGE_BYTES:], store_id, segment, generation)
    if not header.opened:
        clean = DeadMarks(
            store_id, segment, generation
        )  # whatever is left of an earlier generation
        return FoundSegment(segment, FoundState.FREE, generation, clean, _nothing())
    footer = yield from _read_footer(superblock, segment, generation)
    if footer is not None:
        return FoundSegment(segment, FoundState.SEALED, generation, marks, footer)
    search = SegmentSearch(superblock, segment)
    yield from search.find_records(generation)
    yield from search.check_payloads()
    for torn in search.torn:
        marks.mark(torn.place.number)
    footer = footer_from_headers(search.records)
    return FoundSegment(
        segment, FoundState.UNSEALED, generation, marks, footer, search.unreadable_bytes
    )


def _read_footer(
    superblock: Superblock, segment: int, generation: int
) -> Generator[Read, Bytes | None, Footer | None]:
    """The footer, or None where there is none that is whole."""
    end = segment_position(segment + 1, superblock.segment_bytes)
    last = yield Read(end - _END_BYTES, _END_BYTES)
    if last is None:
        return None
    try:
        tail = decode_footer_tail(last[-PAGE_BYTES:], superblock.store_id, segment, generation)
        length = tail.body_bytes
        body: Bytes | None = last[-PAGE_BYTES - length : -PAGE_BYTES]
        if length > _END_BYTES - PAGE_BYTES:
            body = yield Read(end - PAGE_BYTES - length, length)
        return None if body is None else decode_footer(tail, body)
    except DamagedRecord:
        return None


def _damaged(superblock: Superblock, segment: int, unreadable_bytes: int) -> SegmentReading:
    search = SegmentSearch(superblock, segment)
    yield from search.find_generations()
    generation = search.highest_generation
    return FoundSegment(
        segment,
        FoundState.DAMAGED,
        generation,
        DeadMarks(superblock.store_id, segment, generation),
        _nothing(),
        unreadable_bytes + search.unreadable_bytes,
    )


def _nothing() -> Footer:
    return Footer(np.empty(0, ROW), [], b"")
