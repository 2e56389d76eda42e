"""The footer of a sealed segment: a row of 80 bytes for each record, so that a start reads no headers. Pure.

    rows           80 bytes each (ROW; the index has the same rows in memory), in the order of their numbers
    namespaces     u16 length and UTF-8, one after the other; rows count them from 0
    keys           UTF-8, one after the other; rows say where theirs begins
    zeros          up to a whole page
    tail page      the last page of the segment: sizes of the above, their checksum, its own

Both checksums are bound to store, segment and generation. A newer version may append fields to rows and tail.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from p2pstore.objects import PART_BYTES
from p2pstore.ssd_tier.log_layout import (
    PAGE_BYTES,
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    page_is_sealed,
    place_seed,
    round_up_to_page,
    sealed_page,
)
from p2pstore.ssd_tier.record_format import RecordHeader

Rows = npt.NDArray[Any]
"""Rows of ROW."""

ROW: Final = np.dtype(
    [
        ("digest", "<u8", (2,)),
        ("clock", "<u8"),
        ("root", "<u8"),
        ("length", "<u8"),  # of the object
        ("sequence", "<u8"),
        ("expires_unix_ms", "<u8"),
        ("page", "<u4"),
        ("stored_bytes", "<u4"),
        ("key_offset", "<u4"),  # in the text of its segment
        ("writer", "<u2"),
        ("number", "<u2"),
        ("key_bytes", "<u2"),
        ("replicas", "<u2"),
        ("namespace", "<u2"),  # in a footer: which of its namespaces; in the index: see there
        ("part", "u1"),
        ("flags", "u1"),  # bits 0-1 pin, 2 soft, 3 described
    ]
)
ROW_BYTES: Final = ROW.itemsize
ROW_STRUCT: Final = struct.Struct("<16s5QIIIHHHHHBB")
assert ROW_STRUCT.size == ROW_BYTES == 80

(
    DIGEST,
    CLOCK,
    ROOT,
    LENGTH,
    SEQUENCE,
    EXPIRES,
    PAGE,
    STORED_BYTES,
    KEY_OFFSET,
    WRITER,
    NUMBER,
    KEY_BYTES,
    REPLICAS,
    _,
    PART,
    FLAGS,
) = range(16)
"""Places of the fields in an unpacked row."""

FLAG_PIN: Final = 3
FLAG_SOFT: Final = 4
FLAG_DESCRIBED: Final = 8
"""The object has a dtype and a shape. Records of older versions never say so."""
MAX_REPLICAS: Final = 0xFFFF
FOOTER_MAGIC: Final = b"P2PSFTR\0"
FOOTER_FORMAT: Final = 1
_TAIL: Final = struct.Struct("<8sII16sQIIIIIIQ")
"""magic, format, segment, store id, generation, rows, bytes of a row, namespaces, bytes of namespaces, bytes of
keys, 0, checksum of the body."""
_TAIL_PAGE: Final = 0xFFFF_FFFF
_BODY: Final = 0xFFFF_FFFE
"""Stand for pages in seeds: no record is there."""
_LENGTH: Final = struct.Struct("<H")


def flags_of(pin: int, soft: bool, *, described: bool) -> int:
    """The flags of a row; a pin that is not known counts as hard."""
    return min(pin, 2) | (FLAG_SOFT if soft else 0) | (FLAG_DESCRIBED if described else 0)


def pack_row(
    facts: ColdFacts,
    place: RecordPlace,
    part: int,
    stored_bytes: int,
    *,
    key_offset: int,
    key_bytes: int,
    namespace: int,
) -> bytes:
    return ROW_STRUCT.pack(
        facts.digest,
        facts.version.clock,
        facts.version.root,
        facts.length,
        place.sequence,
        facts.expires_unix_ms,
        place.page,
        stored_bytes,
        key_offset,
        facts.version.writer,
        place.number,
        key_bytes,
        min(facts.replicas, MAX_REPLICAS),
        namespace,
        part,
        flags_of(facts.pin, facts.soft, described=bool(facts.dtype)),
    )


def disk_bytes(rows: Rows) -> npt.NDArray[np.int64]:
    """The bytes of each record on the disk, with its header page."""
    stored = rows["stored_bytes"].astype(np.int64)
    return (stored + (2 * PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES


def parts_of(rows: Rows) -> npt.NDArray[np.int64]:
    """How many records each row's object has."""
    length = rows["length"].astype(np.int64)
    return np.maximum((length + PART_BYTES - 1) // PART_BYTES, 1)


@dataclass(frozen=True, slots=True)
class FooterTail:
    """The decoded tail page: sizes of the body that ends before it. All in bytes but `rows` and `namespaces`."""

    rows: int
    row_bytes: int
    namespaces: int
    namespaces_bytes: int
    keys_bytes: int
    body_seed: int
    body_checksum: int

    @property
    def content_bytes(self) -> int:
        """The body without its padding."""
        return self.rows * self.row_bytes + self.namespaces_bytes + self.keys_bytes

    @property
    def body_bytes(self) -> int:
        """The body, in whole pages."""
        return round_up_to_page(self.content_bytes)


@dataclass(frozen=True, slots=True)
class Footer:
    """`rows` say by number which of `namespaces` they are in, and where in `keys` theirs begins."""

    rows: Rows
    namespaces: list[str]
    keys: bytes


def footer_from_headers(headers: Sequence[RecordHeader]) -> Footer:
    rows, namespaces, keys = bytearray(), dict[str, int](), bytearray()
    for header in headers:
        facts, key = header.facts, header.facts.key.encode()
        rows += pack_row(
            facts,
            header.place,
            header.part,
            header.stored_bytes,
            key_offset=len(keys),
            key_bytes=len(key),
            namespace=namespaces.setdefault(facts.namespace, len(namespaces)),
        )
        keys += key
    return Footer(np.frombuffer(rows, ROW), list(namespaces), bytes(keys))


def footer_pages(records: int, text_bytes: int) -> int:
    """Pages that a footer needs at most, its tail included; `text_bytes` are those of the keys and, each time
    again, of the namespaces of its records. A segment must keep that much room."""
    return round_up_to_page(records * (ROW_BYTES + _LENGTH.size) + text_bytes) // PAGE_BYTES + 1


def encode_footer(store_id: bytes, segment: int, generation: int, footer: Footer) -> bytes:
    """The last pages of the segment: write them so that they end where it ends."""
    encoded = [name.encode() for name in footer.namespaces]
    namespaces = b"".join(_LENGTH.pack(len(name)) + name for name in encoded)
    content = footer.rows.tobytes() + namespaces + footer.keys
    body = content.ljust(round_up_to_page(len(content)), b"\0")
    tail = _TAIL.pack(
        FOOTER_MAGIC,
        FOOTER_FORMAT,
        segment,
        store_id,
        generation,
        len(footer.rows),
        ROW_BYTES,
        len(encoded),
        len(namespaces),
        len(footer.keys),
        0,
        xxhash.xxh3_64_intdigest(body, place_seed(store_id, segment, generation, _BODY)),
    )
    return body + sealed_page(tail, place_seed(store_id, segment, generation, _TAIL_PAGE))


def decode_footer_tail(
    page: bytes | memoryview, store_id: bytes, segment: int, generation: int
) -> FooterTail:
    """The tail on a segment's last page. Raises `DamagedRecord` when none of this generation is there."""
    if not page_is_sealed(page, place_seed(store_id, segment, generation, _TAIL_PAGE)):
        raise DamagedRecord(f"segment {segment} has no footer of generation {generation}")
    magic, version, *_, rows, row_bytes, namespaces, names_bytes, keys_bytes, _, checksum = (
        _TAIL.unpack_from(page)
    )
    if magic != FOOTER_MAGIC or version != FOOTER_FORMAT or row_bytes < ROW_BYTES:
        raise DamagedRecord(f"segment {segment} has no footer of format {FOOTER_FORMAT}")
    seed = place_seed(store_id, segment, generation, _BODY)
    return FooterTail(rows, row_bytes, namespaces, names_bytes, keys_bytes, seed, checksum)


def footer_generation(page: bytes | memoryview, store_id: bytes, segment: int) -> int | None:
    """The generation of the segment of which this page is the footer's tail, None if it is none."""
    magic, _, _, _, generation, *_ = _TAIL.unpack_from(page)
    seed = place_seed(store_id, segment, generation, _TAIL_PAGE)
    return generation if magic == FOOTER_MAGIC and page_is_sealed(page, seed) else None


def decode_footer(tail: FooterTail, body: bytes | memoryview) -> Footer:
    """The footer whose body was read. Raises `DamagedRecord` when it is not what the tail tells of."""
    if (
        len(body) != tail.body_bytes
        or xxhash.xxh3_64_intdigest(body, tail.body_seed) != tail.body_checksum
    ):
        raise DamagedRecord("the footer is damaged")
    rows_bytes = tail.rows * tail.row_bytes
    each = np.frombuffer(body[:rows_bytes], np.uint8).reshape(tail.rows, tail.row_bytes)
    rows = each[:, :ROW_BYTES].copy().reshape(-1).view(ROW)
    names, position = [], rows_bytes
    for _ in range(tail.namespaces):
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(body, position)[0]
        names.append(bytes(body[start:position]).decode())
    return Footer(rows, names, bytes(body[position : tail.content_bytes]))
