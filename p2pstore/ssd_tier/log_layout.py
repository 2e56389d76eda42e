"""How objects lie on the disk. Pure.

    0                 superblock, padded to 1 MiB (`superblock`)
    1 MiB + n * size  segment n:
      page 0          segment header: which generation of the segment this is (`superblock`)
      page 1          dead marks: which of its records were discarded (`dead_marks`)
      page 2 and on   records: a header page (`record_header`) and the payload, padded to whole pages
      at the end      footer: a row for each record (`footer`)

An object is parts of at most 64 MiB, each a record; an object without one of its parts is a miss. A record never
spans segments. A header is bound to its place (store, segment, generation, page) by the seed of its checksum, and
holds the sums of its payload: so stale, misdirected and torn data fails. All integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec
import xxhash

from p2pstore.errors import P2PStoreError
from p2pstore.objects import MIB, PART_BYTES, Version

PAGE_BYTES: Final = 4096
SEGMENT_BYTES: Final = 256 * MIB
LOG_START_BYTES: Final = MIB
STORE_ID_BYTES: Final = 16
FIRST_RECORD_PAGE: Final = 2

PAGE_CONTENT_BYTES: Final = PAGE_BYTES - 8
"""A page that says what it is ends with its checksum."""


class DamagedRecord(P2PStoreError):
    """What was read from the disk is not what was written there: torn, stale, misdirected or rotten."""


class Codec(IntEnum):
    """How a payload is stored."""

    RAW = 0
    LZ4 = 1
    """Each chunk for itself (`lz4.block`); one that lz4 would not shrink lies there as it is."""


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
    """What belongs to an object besides its bytes. `chunk_sums` are those of the whole object."""

    digest: bytes
    version: Version
    length: int
    namespace: str
    key: str
    chunk_sums: tuple[int, ...]
    expires_unix_ms: int = 0
    replicas: int = 1
    pin: int = 0
    soft: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    proof: bytes = b""


def round_up_to_page(length: int) -> int:
    """The next multiple of 4 KiB."""
    return (length + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def part_count(length: int) -> int:
    """Records of a value of `length` bytes; an empty one has one."""
    return max(1, (length + PART_BYTES - 1) // PART_BYTES)


def part_bytes(length: int, part: int) -> int:
    """Bytes of the value that its part number `part` has."""
    return min(PART_BYTES, length - part * PART_BYTES)


def record_bytes(stored_bytes: int) -> int:
    """What a record with that payload occupies: its header page and whole pages of payload."""
    return PAGE_BYTES + round_up_to_page(stored_bytes)


def segment_position(segment: int, segment_bytes: int) -> int:
    """Where on the disk a segment begins."""
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
        len(page) == PAGE_BYTES
        and xxhash.xxh3_64_intdigest(page[:PAGE_CONTENT_BYTES], seed) == checksum
    )
