"""How objects lie on the disk. Pure.

    0                 superblock, padded to 1 MiB
    1 MiB + n * size  segment n:
      page 0          segment header: which generation of the segment this is
      page 1          dead marks: which of its records were discarded
      page 2 and on   records: a header page (`record_format`) and the payload, padded to whole pages
      at the end      footer: a row for each record (`footer`)

An object is parts of at most 64 MiB, each a record; an object without one of its parts is a miss. A record never
spans segments. A header is bound to its place (store, segment, generation, page) by the seed of its checksum, and
holds the sums of its payload: so stale, misdirected and torn data fails. All integers are little-endian.

A segment's life on the disk:

1. Its start (header and clean marks) is written and synced with a generation one higher than the last: it is free. From
   then on no record and no footer of an earlier generation counts.
2. Before its first record is written, its start is `opened` and synced: with the first step, or later. A segment that
   is not opened holds nothing of its generation, and need not be searched.
3. Its footer is written: it is sealed.

The checked part of superblock and header fits into one sector of 512 bytes, so a torn write leaves the old or the new.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from p2pstore.errors import ConfigError, P2PStoreError
from p2pstore.objects import MIB, PART_BYTES, Version

PAGE_BYTES: Final = 4096
SEGMENT_BYTES: Final = 256 * MIB
LOG_START_BYTES: Final = MIB
STORE_ID_BYTES: Final = 16
FIRST_RECORD_PAGE: Final = 2

PAGE_CONTENT_BYTES: Final = PAGE_BYTES - 8
"""A page that says what it is ends with its checksum."""
SECTOR_BYTES: Final = 512
_SECTOR_BITS_BYTES: Final = SECTOR_BYTES - 8
_SECTORS: Final = PAGE_BYTES // SECTOR_BYTES
_BITS_BYTES: Final = _SECTORS * _SECTOR_BITS_BYTES
MAX_RECORDS_PER_SEGMENT: Final = _BITS_BYTES * 8
"""32,256: no more records are placed in a segment."""
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
FILE_NAME: Final = "cold.log"


class DamagedRecord(P2PStoreError):
    """The disk returned other bytes than were written there: torn, stale, misdirected or rotten."""


class Codec(IntEnum):
    """How a payload is stored."""

    RAW = 0
    LZ4 = 1
    """Each chunk for itself (lz4's block format); one that lz4 would not shrink lies there as it is."""


class RecordPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a record is. `page` counts from the segment's start; `number` from 0 within the segment;
    `sequence` from the log's first record on, so that it tells which of two records is older."""

    segment: int
    generation: int
    page: int
    number: int
    sequence: int


@dataclass(frozen=True, slots=True)
class ColdFacts:
    """The facts of an object besides its bytes. `sums` are those of all its chunks, as a trailer
    has them."""

    digest: bytes
    version: Version
    length: int
    namespace: str
    key: str
    sums: bytes
    expires_unix_ms: int = 0
    replicas: int = 1
    pin: int = 0
    soft: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    proof: bytes = b""


def round_up_to_page(length: int) -> int:
    return (length + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def part_count(length: int) -> int:
    """Records of a value of `length` bytes; an empty one has one."""
    return max(1, (length + PART_BYTES - 1) // PART_BYTES)


def part_bytes(length: int, part: int) -> int:
    return min(PART_BYTES, length - part * PART_BYTES)


def record_bytes(stored_bytes: int) -> int:
    """Bytes of a record with that payload: its header page and whole pages of payload."""
    return PAGE_BYTES + round_up_to_page(stored_bytes)


def segment_position(segment: int, segment_bytes: int) -> int:
    return LOG_START_BYTES + segment * segment_bytes


def record_position(place: RecordPlace, segment_bytes: int) -> int:
    """Where on the disk a record's header is; its payload is the page after."""
    return segment_position(place.segment, segment_bytes) + place.page * PAGE_BYTES


def place_seed(store_id: bytes, segment: int, generation: int, page: int) -> int:
    """The seed of the checksum of what lies there."""
    return xxhash.xxh3_64_intdigest(struct.pack("<16sIIQ", store_id, segment, page, generation))


def sealed_page(content: bytes, seed: int) -> bytes:
    """A page with this content, zeros, and a checksum in its last 8 bytes."""
    if len(content) > PAGE_CONTENT_BYTES:
        raise ValueError(f"{len(content):,} bytes do not fit into a page and its checksum")
    filled = content.ljust(PAGE_CONTENT_BYTES, b"\0")
    return filled + xxhash.xxh3_64_intdigest(filled, seed).to_bytes(8, "little")


def page_is_sealed(page: bytes | memoryview, seed: int) -> bool:
    """Whether this is a page as `sealed_page` made it with that seed, unchanged."""
    checksum = int.from_bytes(page[PAGE_CONTENT_BYTES:], "little")
    return (
        len(page) == PAGE_BYTES and xxhash.xxh3_64_intdigest(page[:PAGE_CONTENT_BYTES], seed) == checksum
    )


class DeadMarks:
    """The dead marks of one generation of a segment: which of its records were discarded, as a page of bits in eight
    sectors, each with its own checksum.

    A discard is durable when its mark is. A record that leaves the index, or was written and never entered it, is
    marked dead, unless the whole segment goes. A damaged sector marks all its records dead. `dirty` says that there are
    marks that `encode` has not given out yet; set it when writing them failed."""

    def __init__(self, store_id: bytes, segment: int, generation: int) -> None:
        self.dirty = False
        self._bits = bytearray()  # grows with the highest number marked: most segments have no marks
        self._seeds = [
            xxhash.xxh3_64_intdigest(struct.pack("<16sIIQ", store_id, segment, sector, generation))
            for sector in range(_SECTORS)
        ]

    def mark(self, number: int) -> None:
        """The record of this number is dead. Raises `ValueError` for a number that no record has."""
        if not 0 <= number < MAX_RECORDS_PER_SEGMENT:
            raise ValueError(f"a segment has no record number {number}")
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        if not self._bits[byte] & bit:
            self._bits[byte] |= bit
            self.dirty = True

    def is_dead(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & 1 << (number & 7))

    def dead_of(self, numbers: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
        if not self._bits:
            return np.zeros(len(numbers), bool)
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little")
        dead = np.zeros(MAX_RECORDS_PER_SEGMENT, bool)
        dead[: len(bits)] = bits
        found: npt.NDArray[np.bool_] = dead[numbers]
        return found

    def encode(self) -> bytes:
        """The page to write; nothing is dirty then, until the next mark."""
        self.dirty = False
        bits = bytes(self._bits).ljust(_BITS_BYTES, b"\0")
        sectors = []
        for sector, seed in enumerate(self._seeds):
            part = bits[sector * _SECTOR_BITS_BYTES : (sector + 1) * _SECTOR_BITS_BYTES]
            sectors += [part, xxhash.xxh3_64_intdigest(part, seed).to_bytes(8, "little")]
        return b"".join(sectors)

    @classmethod
    def decode(
        cls, page: bytes | memoryview, store_id: bytes, segment: int, generation: int
    ) -> DeadMarks:
        """The marks that a page holds. Where a sector is damaged, all its records are dead, and `dirty` is set, so that
        the next write makes that durable."""
        marks = cls(store_id, segment, generation)
        bits = bytearray()
        for sector, seed in enumerate(marks._seeds):
            start = sector * SECTOR_BYTES
            part = bytes(page[start : start + _SECTOR_BITS_BYTES])
            checksum = bytes(page[start + _SECTOR_BITS_BYTES : start + SECTOR_BYTES])
            if xxhash.xxh3_64_intdigest(part, seed).to_bytes(8, "little") != checksum:
                part, marks.dirty = b"\xff" * _SECTOR_BITS_BYTES, True
            bits += part
        marks._bits = bits.rstrip(b"\0")
        return marks


@dataclass(frozen=True, slots=True)
class Superblock:
    """The superblock: `store_id` are 16 random bytes, drawn when it was made."""

    store_id: bytes
    segments: int
    segment_bytes: int = SEGMENT_BYTES
    cluster_mark: int = 0
    """The cluster of these objects (`cluster_mark`); 0 in logs of older versions."""

    @property
    def total_bytes(self) -> int:
        return segment_position(self.segments, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Which generation of the segment this is, and whether records may have been written to it."""

    segment: int
    generation: int
    opened: bool


def cluster_mark(cluster: str) -> int:
    """The mark of a cluster's name in its logs: 32 bits of a hash, never 0."""
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


def encode_segment_start(store_id: bytes, segment: int, generation: int, opened: bool = False) -> bytes:
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
