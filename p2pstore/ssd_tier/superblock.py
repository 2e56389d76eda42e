"""The first page of the log, and the first two of a segment: which store, how large, which generation. Pure.

A segment's life on the disk:

1. Its start is written and synced with a generation that is one higher than the last one: it is free. From then
   on no record and no footer of an earlier generation counts.
2. Before the first record is written to it, its start is `opened`, and synced: with the first step, or later. So a
   segment that is not opened is known to hold nothing of its generation, and need not be searched.
3. Its footer is written: it is sealed (`footer`).

What is checked fits into one sector of 512 bytes, so a write that is torn leaves the old or the new.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from p2pstore.errors import ConfigError
from p2pstore.objects import MIB
from p2pstore.ssd_tier.dead_marks import DeadMarks
from p2pstore.ssd_tier.log_layout import (
    LOG_START_BYTES,
    PAGE_BYTES,
    SEGMENT_BYTES,
    STORE_ID_BYTES,
    DamagedRecord,
    segment_position,
)

SUPERBLOCK_MAGIC: Final = b"P2PSLOG\0"
SUPERBLOCK_FORMAT: Final = 1
SEGMENT_MAGIC: Final = b"P2PSLSG\0"
SEGMENT_FORMAT: Final = 1
SEGMENT_START_BYTES: Final = 2 * PAGE_BYTES
MAX_SEGMENTS: Final = 1 << 20

_SUPERBLOCK: Final = struct.Struct("<8sII16sQQ")
"""magic, format, mark of the cluster, store id, segment bytes, segments; its xxh3-64 follows."""
_SEGMENT: Final = struct.Struct("<8sII16sQII")
"""magic, format, segment, store id, generation, flags, 0; its xxh3-64 follows."""
_FLAG_OPENED: Final = 1


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the log is: `store_id` are 16 random bytes, drawn when it was made."""

    store_id: bytes
    segments: int
    segment_bytes: int = SEGMENT_BYTES
    cluster_mark: int = 0
    """Whose objects these are (`cluster_mark`); 0 in logs of versions that did not say."""

    @property
    def total_bytes(self) -> int:
        """What the log occupies on its disk."""
        return segment_position(self.segments, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Which generation of the segment this is, and whether records may have been written to it."""

    segment: int
    generation: int
    opened: bool


def cluster_mark(cluster: str) -> int:
    """What a log has of its cluster's name: 32 bits of a hash, never 0."""
    return xxhash.xxh3_64_intdigest(cluster.encode()) % 0xFFFF_FFFF + 1


def segments_that_fit(disk_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
    """How many whole segments a disk of that size has room for."""
    return max(0, min(MAX_SEGMENTS, (disk_bytes - LOG_START_BYTES) // segment_bytes))


def encode_superblock(superblock: Superblock) -> bytes:
    """Page 0 of the log. Raises `ValueError` for sizes that no log has."""
    _check_sizes(superblock)
    packed = _SUPERBLOCK.pack(
        SUPERBLOCK_MAGIC,
        SUPERBLOCK_FORMAT,
        superblock.cluster_mark,
        superblock.store_id,
        superblock.segment_bytes,
        superblock.segments,
    )
    return _page(packed)


def decode_superblock(page: bytes | memoryview) -> Superblock:
    """The superblock on page 0.

    Raises `DamagedRecord` when there is none or it is damaged, `ConfigError` when a newer version wrote it.
    """
    packed = bytes(page[: _SUPERBLOCK.size])
    if not packed.startswith(SUPERBLOCK_MAGIC) or not _page_is_good(page, _SUPERBLOCK.size):
        raise DamagedRecord("no log of p2pstore begins here, or its first page is damaged")
    _, version, mark, store_id, segment_bytes, segments = _SUPERBLOCK.unpack(packed)
    if version != SUPERBLOCK_FORMAT:
        raise ConfigError(
            f"the log of cold objects has format {version}, this version reads {SUPERBLOCK_FORMAT}: upgrade, "
            "or name another directory"
        )
    superblock = Superblock(store_id, segments, segment_bytes, mark)
    try:
        _check_sizes(superblock)
    except ValueError as error:
        raise DamagedRecord(f"the log's first page makes no sense: {error}") from error
    return superblock


def _check_sizes(superblock: Superblock) -> None:
    size = superblock.segment_bytes
    if len(superblock.store_id) != STORE_ID_BYTES:
        raise ValueError(f"a store id has {STORE_ID_BYTES} bytes, not {len(superblock.store_id)}")
    if size < MIB or size % MIB or not 0 < superblock.segments <= MAX_SEGMENTS:
        raise ValueError(f"{superblock.segments:,} segments of {size:,} bytes")


def encode_segment_start(
    store_id: bytes, segment: int, generation: int, opened: bool = False
) -> bytes:
    """The first two pages of a segment without any record: its header and clean dead marks."""
    flags = _FLAG_OPENED if opened else 0
    packed = _SEGMENT.pack(SEGMENT_MAGIC, SEGMENT_FORMAT, segment, store_id, generation, flags, 0)
    return _page(packed) + DeadMarks(store_id, segment, generation).encode()


def decode_segment_header(page: bytes | memoryview, store_id: bytes, segment: int) -> SegmentHeader:
    """The header on a segment's page 0. Raises `DamagedRecord` when it is none that was written there."""
    if not _page_is_good(page, _SEGMENT.size):
        raise DamagedRecord(f"the header of segment {segment} is damaged")
    magic, version, number, store, generation, flags, _ = _SEGMENT.unpack_from(page)
    if (magic, version, number, store) != (SEGMENT_MAGIC, SEGMENT_FORMAT, segment, store_id):
        raise DamagedRecord(f"the page where segment {segment} begins is not its header")
    return SegmentHeader(segment, generation, bool(flags & _FLAG_OPENED))


def first_writes(superblock: Superblock, have_segments: int = 0) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) that make a log, or that make one of `have_segments` longer. The last one is the
    superblock: sync before it, and after it."""
    for segment in range(have_segments, superblock.segments):
        start = encode_segment_start(superblock.store_id, segment, generation=1)
        yield segment_position(segment, superblock.segment_bytes), start
    yield 0, encode_superblock(superblock)


def _page(packed: bytes) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")
    return (packed + checksum).ljust(PAGE_BYTES, b"\0")


def _page_is_good(page: bytes | memoryview, size: int) -> bool:
    """Whether the page is what `_page` makes of its first `size` bytes; the rest of it must be zeros."""
    return bytes(page) == _page(bytes(page[:size]))
