"""From a disk to a log: it is made where there is none, made longer where there is more room, and read."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import trio

from p2pstore.errors import ConfigError
from p2pstore.objects import format_bytes
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk_protocol import Disk
from p2pstore.ssd_tier.footer import footer_pages
from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.log_layout import (
    MAX_RECORDS_PER_SEGMENT,
    PAGE_BYTES,
    STORE_ID_BYTES,
    DamagedRecord,
    Superblock,
    cluster_mark,
    decode_superblock,
    first_writes,
    segments_that_fit,
)
from p2pstore.ssd_tier.log_segments import SegmentState, SegmentTable
from p2pstore.ssd_tier.recovery import FoundSegment, FoundState, read_segment, refill

MIN_SEGMENTS: Final = 4
"""Two that are open, and two free."""
REQUESTS_AT_ONCE: Final = 16
WINDOW_BYTES: Final = 1 << 20
_UNKNOWN_GENERATIONS_BITS: Final = 48


async def open_superblock(disk: Disk, segment_bytes: int, cluster: str = "") -> Superblock:
    """The log on this disk. `segment_bytes` is for a new one: an older one keeps its own. A log belongs to the first
    cluster that opens it; without a name, to whichever it did.

    Raises `ConfigError` when the disk is too small, or holds something else, or another cluster's log; and `OSError`.
    """
    mark = cluster_mark(cluster) if cluster else 0
    page = aligned_buffer(PAGE_BYTES)
    await disk.read_into(0, [page])
    if not any(page):
        return await _make(disk, segment_bytes, mark)
    try:
        superblock = decode_superblock(page)
    except DamagedRecord as error:
        raise ConfigError(
            f"{error}; name another directory or device, or remove what is there"
        ) from error
    if mark and superblock.cluster_mark not in (0, mark):
        raise ConfigError(
            f"the log of cold objects belongs to another cluster than {cluster!r}: name another directory or device "
            "for this one, or remove that log: what is in it is then gone"
        )
    if superblock.total_bytes > disk.size_bytes:
        raise ConfigError(
            f"the log of cold objects has {format_bytes(superblock.total_bytes)}, but there are only "
            f"{format_bytes(disk.size_bytes)}: a log cannot shrink; give it its old size (a file "
            "that was cut short becomes as long again, without what was cut off), or remove it"
        )
    fitting = segments_that_fit(disk.size_bytes, superblock.segment_bytes)
    wanted = replace(
        superblock,
        segments=max(fitting, superblock.segments),
        cluster_mark=mark or superblock.cluster_mark,
    )
    if wanted != superblock:
        await _write_first(disk, wanted, superblock.segments)
    return wanted


async def _make(disk: Disk, segment_bytes: int, mark: int) -> Superblock:
    segments = segments_that_fit(disk.size_bytes, segment_bytes)
    if segments < MIN_SEGMENTS:
        needed = Superblock(bytes(STORE_ID_BYTES), MIN_SEGMENTS, segment_bytes).total_bytes
        raise ConfigError(
            f"{format_bytes(disk.size_bytes)} are too little for cold objects: give the SSD tier at least "
            f"{format_bytes(needed)}"
        )
    superblock = Superblock(secrets.token_bytes(STORE_ID_BYTES), segments, segment_bytes, mark)
    await _write_first(disk, superblock, 0)
    return superblock


async def _write_first(disk: Disk, superblock: Superblock, have_segments: int) -> None:
    """The superblock comes last: until it is there, nothing of the rest counts."""
    writes = first_writes(superblock, have_segments)
    left = superblock.segments - have_segments
    while left > 0:
        async with trio.open_nursery() as nursery:
            for position, content in islice(writes, min(left, REQUESTS_AT_ONCE)):
                nursery.start_soon(disk.write_from, position, [content])
        left -= REQUESTS_AT_ONCE
    await disk.sync()
    for position, content in writes:
        await disk.write_from(position, [content])
    await disk.sync()


async def read_log(disk: Disk, superblock: Superblock) -> list[FoundSegment]:
    """Read all segments. Unreadable parts are missing."""
    found: dict[int, FoundSegment] = {}
    numbers = iter(range(superblock.segments))
    async with trio.open_nursery() as nursery:
        for _ in range(REQUESTS_AT_ONCE):
            nursery.start_soon(_read_some, disk, superblock, numbers, found)
    return [found[number] for number in range(superblock.segments)]


async def _read_some(
    disk: Disk, superblock: Superblock, numbers: Iterator[int], found: dict[int, FoundSegment]
) -> None:
    """Segment after segment, as long as there are any."""
    memory = aligned_buffer(WINDOW_BYTES)
    for number in numbers:
        reading = read_segment(superblock, number)
        content: bytes | None = None
        try:
            wanted = next(reading)
            while True:
                if wanted.length > len(memory):
                    memory = aligned_buffer(wanted.length)
                window = memory[: wanted.length]
                try:
                    await disk.read_into(wanted.position, [window])
                    content = bytes(window)
                except OSError:
                    content = None
                wanted = reading.send(content)
        except StopIteration as stop:
            found[number] = stop.value


def restore(
    superblock: Superblock,
    found: list[FoundSegment],
    max_records: int,
    namespaces: Sequence[str] = (),
) -> tuple[SegmentTable, ColdIndex]:
    """Table and index of a log that was read. Works through all records: not for the event loop's thread."""
    index = ColdIndex(superblock.segments, max_records, secrets.randbits(63), namespaces)
    for each in found:
        if each.state is FoundState.UNSEALED and len(each.footer.rows):
            _mark_unknown(each)
    refilled = refill(index, found)
    table = SegmentTable(
        superblock.segments, superblock.segment_bytes, footer_pages, refilled.next_sequence
    )
    for each in found:
        _restore_segment(table, each)
    return table, index


def unsafe_segments(found: list[FoundSegment]) -> list[int]:
    """Segments in which nothing was found, although something may be there: it could be found after the next start,
    when it was long discarded. To be given a new generation before anything else."""
    return [
        each.segment
        for each in found
        if each.state is FoundState.DAMAGED
        or (each.state is FoundState.UNSEALED and not len(each.footer.rows))
    ]


def _mark_unknown(found: FoundSegment) -> None:
    """Of a segment without a footer, what was not found now may be found after the next start: as above."""
    known = set(found.footer.rows["number"].tolist())
    for number in range(MAX_RECORDS_PER_SEGMENT):
        if number not in known:
            found.marks.mark(number)


def _restore_segment(table: SegmentTable, found: FoundSegment) -> None:
    rows = found.footer.rows
    generation, state = found.generation, SegmentState.EMPTY
    if found.state is FoundState.DAMAGED:
        # Above all that was ever there, even where that could not be read.
        generation += 1 + secrets.randbits(_UNKNOWN_GENERATIONS_BITS)
    elif found.state is FoundState.SEALED:
        state = SegmentState.SEALED
    elif len(rows):
        state = SegmentState.SEALING
    table.restore(
        found.segment,
        generation,
        state=state,
        first_sequence=int(rows["sequence"].min()) if len(rows) else 0,
    )
