"""The bytes of a segment's parts, as in the first release: other versions map and copy them.

When one of these fails, the format has changed: it needs a new format number and a reader for both.
"""

from p2pstore.memory.entries import Written
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    SLOT_FLAG_SOFT,
    SLOT_FLAG_TENSOR,
    Geometry,
    SegmentHeader,
    SegmentState,
    Slot,
    SlotState,
    TrailerBody,
    decode_index_entry,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    encode_index_entry,
    encode_segment_header,
    encode_slot,
    encode_trailer,
    index_home,
    plan_geometry,
    trailer_matches,
)
from p2pstore.objects import MIB, Version, chunk_sums, key_digest, root_checksum

DIGEST = bytes.fromhex("11c9aa846c7fe8d82fb1371798fe0fd3")
VALUE = b"golden value"
SUMS = bytes.fromhex("fcc9d27a7f55c753")
ROOT = 0x73CC4C7728CF4A46

HEADER_BYTES = bytes.fromhex(
    "5032505353454700"  # magic
    "01000000 01000000"  # format, state OPEN
    "000102030405060708090a0b0c0d0e0f"  # segment id
    "0090100000000000"  # total bytes
    "0010000000000000 0002000000000000"  # index: offset, entries
    "0050000000000000 0001000000000000"  # slots: offset, number
    "0090000000000000 0000100000000000"  # data: offset, bytes
    "0807060504030201"  # incarnation
    "acf643626b6cded0"  # checksum
)
HEADER = SegmentHeader(
    bytes(range(16)),
    0x0102030405060708,
    Geometry(1_085_440, 4096, 512, 20_480, 256, 36_864, 1_048_576),
    SegmentState.OPEN,
)

INDEX_ENTRY_BYTES = DIGEST + bytes.fromhex("04030201 01000000 0000000000000000")

TRAILER_BYTES = bytes.fromhex(
    "0100 0000 35000000 da96360f3c0a5018"  # format, reserved, body length, checksum
    "99 a6676f6c64656e aa676f6c64656e206b6579"  # 9 fields: namespace, key
    "c408fcc9d27a7f55c753"  # sums
    "cf0000018bcfe5687b 02 01"  # expires, replicas, pin
    "a7666c6f61743136 920203 c400"  # dtype, shape, proof
)
TRAILER = TrailerBody("golden", "golden key", SUMS, 1_700_000_000_123, 2, 1, "float16", (2, 3))

SLOT_BYTES = bytes.fromhex(
    "01 02 9988 4500 0300"  # format, LIVE, writer, trailer length, flags
    "11c9aa846c7fe8d82fb1371798fe0fd3"  # digest
    "7766554433221100 0030120000000000 0c00000000000000"  # clock, offset, length
    "464acf28774ccc73 f1957a876a5a3f36"  # root, checksum
)
SLOT = Slot(
    SlotState.LIVE,
    DIGEST,
    Version(0x0011223344556677, 0x8899, ROOT),
    0x123000,
    len(VALUE),
    len(TRAILER_BYTES),
    SLOT_FLAG_SOFT | SLOT_FLAG_TENSOR,
)


def test_header() -> None:
    assert encode_segment_header(HEADER) == HEADER_BYTES
    assert decode_segment_header(HEADER_BYTES) == HEADER
    assert plan_geometry(MIB) == HEADER.geometry


def test_index_entry() -> None:
    assert encode_index_entry(DIGEST, 0x01020304) == INDEX_ENTRY_BYTES
    assert decode_index_entry(INDEX_ENTRY_BYTES) == (DIGEST, 0x01020304, True)
    assert index_home(DIGEST, 4096) == 0x911


def test_slot() -> None:
    assert encode_slot(SLOT) == SLOT_BYTES
    assert decode_slot(SLOT_BYTES) == SLOT


def test_trailer() -> None:
    assert encode_trailer(TRAILER) == TRAILER_BYTES
    assert decode_trailer(TRAILER_BYTES) == TRAILER
    assert trailer_matches(TRAILER, SLOT)


def test_a_trailer_of_a_newer_version_is_read() -> None:
    """It has one more field at the end, which this version does not know."""
    newer = bytes.fromhex("0100 0000 36000000 44b681e1e21288d3 9a") + TRAILER_BYTES[17:] + b"\x07"
    assert decode_trailer(newer) == TRAILER


def test_a_trailer_of_an_older_version_is_read() -> None:
    """It ends before the proof."""
    older = bytes.fromhex("0100 0000 33000000 736b6bedd1056e7f 98") + TRAILER_BYTES[17:-2]
    assert decode_trailer(older) == TRAILER


def test_digest_and_sums() -> None:
    assert key_digest("golden key", "golden") == DIGEST
    assert chunk_sums(VALUE) == SUMS
    assert root_checksum(len(VALUE), SUMS) == ROOT


def test_a_whole_segment() -> None:
    """The owner's bytes for one object are those of the format, at its places."""
    geometry = plan_geometry(MIB)
    buffer = bytearray(geometry.total_bytes)
    segment = Segment(
        memoryview(buffer),
        segment_id=HEADER.segment_id,
        incarnation=HEADER.incarnation,
        geometry=geometry,
    )
    reservation = segment.reserve(len(VALUE), len(TRAILER_BYTES), session=0, now=1.0)
    segment.reservation_view(reservation.number, 0)[:] = VALUE
    segment.commit(
        Written(reservation.number, DIGEST, SLOT.version, TRAILER, len(VALUE)),
        session=0,
        soft=True,
        now=1.0,
    )
    slot = Slot(SlotState.LIVE, DIGEST, SLOT.version, 36_864, 12, len(TRAILER_BYTES), SLOT.flags)
    expected = bytearray(geometry.total_bytes)
    home = 4096 + 32 * 0x111
    for offset, part in (
        (0, HEADER_BYTES),
        (home, DIGEST + bytes.fromhex("00000000 01000000 0000000000000000")),
        (20_480, encode_slot(slot)),
        (36_864, VALUE + bytes(4) + TRAILER_BYTES),
    ):
        expected[offset : offset + len(part)] = part
    assert buffer == expected
