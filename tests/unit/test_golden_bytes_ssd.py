"""The bytes of the SSD tier's log, as in the first release: other versions of this project read them after an upgrade.

When one of these fails, the format has changed: it needs a new format number and a reader for both.
"""

from dataclasses import replace

from p2pstore.objects import Version, chunk_sums, key_digest, root_checksum
from p2pstore.ssd_tier.footer import (
    decode_footer,
    decode_footer_tail,
    encode_footer,
    footer_from_headers,
)
from p2pstore.ssd_tier.log_layout import (
    Codec,
    ColdFacts,
    DeadMarks,
    RecordPlace,
    SegmentHeader,
    Superblock,
    cluster_mark,
    decode_segment_header,
    decode_superblock,
    encode_segment_start,
    encode_superblock,
)
from p2pstore.ssd_tier.record_format import RecordHeader, decode_record_header, encode_record_header

STORE_ID = bytes(range(16))
STORE = "000102030405060708090a0b0c0d0e0f"
GENERATION = 0x0102030405060708
PLACE = RecordPlace(3, GENERATION, 0x1234, 0x56, 0x1122334455667788)
VALUE = b"golden value"
SUMS = chunk_sums(VALUE)
FACTS = ColdFacts(
    key_digest("golden key", "golden"),
    Version(0x0011223344556677, 0x8899, root_checksum(len(VALUE), SUMS)),
    len(VALUE),
    "golden",
    "golden key",
    SUMS,
    expires_unix_ms=1_700_000_000_123,
    replicas=2,
    pin=1,
    soft=True,
    dtype="float16",
    shape=(2, 3),
)

SUPERBLOCK_BYTES = bytes.fromhex(
    "503250534c4f4700 01000000 00000000"  # magic, format, 0
    f"{STORE} 0000001000000000 0010000000000000"  # store id, segment bytes, segments
    "0843d740b9631533"  # checksum
)
SEGMENT_HEADER_BYTES = bytes.fromhex(
    "503250534c534700 01000000 03000000"  # magic, format, segment
    f"{STORE} 0807060504030201"  # store id, generation
    "01000000 00000000"  # opened, 0
    "5143d906da409f1c"  # checksum
)
SECTOR_CHECKSUMS = [
    bytes.fromhex(checksum)
    for checksum in (
        *("7d64c161ed085022", "c9d478c6da1627a2", "078ad30ec093dc07", "16cd73d1c1b644b1"),
        *("6dd2bcb1bf9f7e3a", "6ab87bad26f84012", "d0113d0a20a2652d", "9a926adb1e98b2b8"),
    )
]
RECORD_BYTES = bytes.fromhex(
    "5032505352454300 01000000 69000000"  # magic, format, body length
    "03000000 34120000 0807060504030201"  # segment, page, generation
    f"56000000 00000000 8877665544332211 {STORE}"  # number, 0, sequence, store id
    "dc0013 c41011c9aa846c7fe8d82fb1371798fe0fd3"  # 19 fields: digest
    "cf0011223344556677 cd8899 cf73cc4c7728cf4a46"  # clock, writer, root
    "0c 00 07 01 c40407000000"  # length, part, stored bytes, LZ4, sizes of chunks
    "c408fcc9d27a7f55c753"  # sums
    "a6676f6c64656e aa676f6c64656e206b6579"  # namespace, key
    "cf0000018bcfe5687b 02 01 c3"  # expires, replicas, pin, soft
    "a7666c6f61743136 920203 c400"  # dtype, shape, proof
)
RECORD_CHECKSUM = bytes.fromhex("85c92772a25adf66")
FOOTER_BODY_BYTES = bytes.fromhex(
    "11c9aa846c7fe8d82fb1371798fe0fd3"  # digest
    "7766554433221100 464acf28774ccc73"  # clock, root
    "0c00000000000000 8877665544332211 7b68e5cf8b010000"  # length, sequence, expires
    "34120000 07000000 00000000"  # page, stored bytes, where the key begins
    "9988 5600 0a00 0200 0000 00 0d"  # writer, number, bytes of the key, replicas, namespace, part, flags
    "0600 676f6c64656e"  # namespaces
    "676f6c64656e206b6579"  # keys
)
FOOTER_TAIL_BYTES = bytes.fromhex(
    "5032505346545200 01000000 03000000"  # magic, format, segment
    f"{STORE} 0807060504030201"  # store id, generation
    "01000000 50000000 01000000 08000000 0a000000 00000000"  # rows, bytes each, namespaces, bytes of both
    "e22b3041f675e8fe"  # checksum of the body
)
FOOTER_CHECKSUM = bytes.fromhex("0fec77d7e3d67347")


def page(content: bytes, checksum: bytes = b"") -> bytes:
    return content.ljust(4096 - len(checksum), b"\0") + checksum


def test_superblock() -> None:
    superblock = Superblock(STORE_ID, 4096)
    assert encode_superblock(superblock) == page(SUPERBLOCK_BYTES)
    assert decode_superblock(page(SUPERBLOCK_BYTES)) == superblock
    assert cluster_mark("golden") == 0x7125F1CD
    assert encode_superblock(replace(superblock, cluster_mark=0x01020304))[12:16].hex() == "04030201"


def test_start_of_a_segment() -> None:
    start = encode_segment_start(STORE_ID, 3, GENERATION, opened=True)
    assert start[:4096] == page(SEGMENT_HEADER_BYTES)
    header = decode_segment_header(page(SEGMENT_HEADER_BYTES), STORE_ID, 3)
    assert header == SegmentHeader(3, GENERATION, True)


def test_dead_marks() -> None:
    marks = DeadMarks(STORE_ID, 3, GENERATION)
    marks.mark(0)
    marks.mark(4033)  # the second bit of the second sector
    bits = [b"\x01", b"\x02", *[b""] * 6]
    expected = b"".join(
        each.ljust(504, b"\0") + checksum for each, checksum in zip(bits, SECTOR_CHECKSUMS, strict=True)
    )
    assert marks.encode() == expected
    again = DeadMarks.decode(expected, STORE_ID, 3, GENERATION)
    assert [number for number in range(32_256) if again.is_dead(number)] == [0, 4033]


def test_record_header() -> None:
    expected = page(RECORD_BYTES, RECORD_CHECKSUM)
    assert encode_record_header(STORE_ID, PLACE, FACTS, 0, 7, Codec.LZ4, (7,)) == expected
    header = decode_record_header(expected, STORE_ID, 3, GENERATION, 0x1234)
    assert header == RecordHeader(PLACE, FACTS, 0, 7, Codec.LZ4, (7,))


def test_footer() -> None:
    header = RecordHeader(PLACE, FACTS, 0, 7, Codec.LZ4, (7,))
    body, tail = page(FOOTER_BODY_BYTES), page(FOOTER_TAIL_BYTES, FOOTER_CHECKSUM)
    footer = footer_from_headers([header])
    assert encode_footer(STORE_ID, 3, GENERATION, footer) == body + tail
    again = decode_footer(decode_footer_tail(tail, STORE_ID, 3, GENERATION), body)
    assert again.rows.tobytes() == footer.rows.tobytes()
    assert (again.namespaces, again.keys) == (["golden"], b"golden key")
