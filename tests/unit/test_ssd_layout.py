"""The pages of the log of cold objects: a page is read where it was written; other pages and other places are
refused."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ConfigError
from p2pstore.objects import MAX_OBJECT_BYTES, MIB, PART_BYTES
from p2pstore.ssd_tier.log_layout import (
    PAGE_BYTES,
    SEGMENT_START_BYTES,
    Codec,
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    SegmentHeader,
    Superblock,
    decode_segment_header,
    decode_superblock,
    encode_segment_start,
    encode_superblock,
    first_writes,
    part_bytes,
    part_count,
    place_seed,
    record_bytes,
    record_position,
    sealed_page,
    segments_that_fit,
)
from p2pstore.ssd_tier.record_format import (
    RecordHeader,
    decode_record_header,
    encode_record_header,
    joined_facts,
    moved_record_header,
)
from tests.unit.cold_objects import STORE_ID, facts_of

PLACE = RecordPlace(segment=3, generation=9, page=70, number=5, sequence=1 << 40)
SUPERBLOCK = Superblock(STORE_ID, segments=7, segment_bytes=2 * MIB)


def flips(page: bytes) -> list[bytes]:
    """The page with each of its bytes changed, one at a time."""
    found = []
    for position in range(len(page)):
        changed = bytearray(page)
        changed[position] ^= 1 << position % 8
        found.append(bytes(changed))
    return found


def read(page: bytes, place: RecordPlace = PLACE, store_id: bytes = STORE_ID) -> RecordHeader:
    return decode_record_header(page, store_id, place.segment, place.generation, place.page)


@given(
    length=st.integers(0, 3 * PART_BYTES),
    key=st.text(min_size=1, max_size=300),
    namespace=st.text(min_size=1, max_size=60),
    rest=st.tuples(
        st.integers(0, 2**63), st.integers(1, 100), st.integers(0, 2), st.booleans(), st.text(max_size=9)
    ),
    shape=st.lists(st.integers(0, 2**40), max_size=5),
)
def test_headers_of_all_parts_give_the_facts_back(
    length: int, key: str, namespace: str, rest: tuple[int, int, int, bool, str], shape: list[int]
) -> None:
    expires, replicas, pin, soft, dtype = rest
    facts = replace(
        facts_of(key, length, namespace=namespace),
        expires_unix_ms=expires,
        replicas=replicas,
        pin=pin,
        soft=soft,
        dtype=dtype,
        shape=tuple(shape),
    )
    headers = []
    for part in range(part_count(length)):
        size = part_bytes(length, part)
        headers.append(read(encode_record_header(STORE_ID, PLACE, facts, part, size)))
        assert (headers[-1].part, headers[-1].stored_bytes, headers[-1].place) == (part, size, PLACE)
    assert joined_facts(headers) == facts


def test_a_compressed_part_has_the_sizes_of_its_chunks() -> None:
    facts = facts_of("k", 2 * MIB + 5)
    page = encode_record_header(STORE_ID, PLACE, facts, 0, 1505, Codec.LZ4, (1000, 500, 5))
    header = read(page)
    assert (header.codec, header.chunk_sizes) == (Codec.LZ4, (1000, 500, 5))


def test_a_header_can_be_moved_with_its_payload() -> None:
    header = read(encode_record_header(STORE_ID, PLACE, facts_of("k", 100 * MIB), 1, 36 * MIB))
    elsewhere = RecordPlace(1, 2, 3, 4, 5)
    moved = read(moved_record_header(STORE_ID, header, elsewhere), elsewhere)
    assert moved == replace(header, place=elsewhere)


def test_no_byte_of_a_header_can_change() -> None:
    page = encode_record_header(STORE_ID, PLACE, facts_of("k", 3 * MIB), 0, 3 * MIB)
    for changed in flips(page):
        with pytest.raises(DamagedRecord):
            read(changed)


@pytest.mark.parametrize(
    "place", [RecordPlace(4, 9, 70, 5, 0), RecordPlace(3, 10, 70, 5, 0), RecordPlace(3, 9, 71, 5, 0)]
)
def test_a_header_counts_only_where_it_was_written(place: RecordPlace) -> None:
    page = encode_record_header(STORE_ID, PLACE, facts_of("k", 1), 0, 1)
    with pytest.raises(DamagedRecord):
        read(page, place)
    with pytest.raises(DamagedRecord):
        read(page, PLACE, bytes(16))


@pytest.mark.parametrize(
    ("part", "stored", "codec", "sizes"),
    [
        (1, 5, Codec.RAW, ()),  # a value of 5 bytes has one part
        (0, 4, Codec.RAW, ()),
        (0, 4, Codec.RAW, (4,)),
        (0, 4, Codec.LZ4, ()),
        (0, 4, Codec.LZ4, (5,)),
        (0, 6, Codec.LZ4, (6,)),
    ],
)
def test_a_header_that_contradicts_itself_is_damaged(
    part: int, stored: int, codec: Codec, sizes: tuple[int, ...]
) -> None:
    page = encode_record_header(STORE_ID, PLACE, facts_of("k", 5), part, stored, codec, sizes)
    with pytest.raises(DamagedRecord, match="makes no sense"):
        read(page)


def with_body(page: bytes, change: Callable[[list[object]], list[object]]) -> bytes:
    """A header page with other fields in its body, as another version would write it."""
    length = int.from_bytes(page[12:16], "little")
    body = msgspec.msgpack.encode(change(msgspec.msgpack.decode(page[64 : 64 + length])))
    prefix = page[:12] + len(body).to_bytes(4, "little") + page[16:64]
    return sealed_page(prefix + body, place_seed(STORE_ID, 3, 9, 70))


def test_headers_of_newer_and_older_versions_are_read() -> None:
    facts = facts_of("k", 5)
    page = encode_record_header(STORE_ID, PLACE, facts, 0, 5)
    assert with_body(page, lambda fields: fields) == page
    newer = with_body(page, lambda fields: [*fields, "new", {"more": 1}])
    older = with_body(page, lambda fields: fields[:12])
    assert read(newer) == read(older) == read(page)
    for change in (lambda fields: fields[:11], lambda fields: ["x", *fields[1:]]):
        with pytest.raises(DamagedRecord, match="makes no sense"):
            read(with_body(page, change))


def test_parts_of_different_versions_are_no_object() -> None:
    older, newer = facts_of("k", 65 * MIB, 1), facts_of("k", 65 * MIB, 2)

    def header(facts: ColdFacts, part: int) -> RecordHeader:
        size = part_bytes(facts.length, part)
        return read(encode_record_header(STORE_ID, PLACE, facts, part, size))

    assert joined_facts([header(older, 0), header(older, 1)]) == older
    false_root = replace(older, version=older.version._replace(root=1))
    for headers in (
        [header(older, 0), header(newer, 1)],
        [header(older, 0)],
        [header(older, 1), header(older, 0)],
        [header(false_root, 0), header(false_root, 1)],
    ):
        with pytest.raises(DamagedRecord, match="not the parts"):
            joined_facts(headers)


def test_what_does_not_fit_into_a_page_is_refused() -> None:
    largest = replace(
        facts_of("é" * 512, PART_BYTES, namespace="n" * 255), dtype="float8_e4m3fn", shape=(9,) * 32
    )
    encode_record_header(STORE_ID, PLACE, largest, 0, PART_BYTES, Codec.LZ4, range(64))
    with pytest.raises(ValueError, match="a header page has room for"):
        encode_record_header(STORE_ID, PLACE, replace(largest, dtype="x" * 4096), 0, PART_BYTES)


def test_sizes_and_places() -> None:
    assert [part_count(length) for length in (0, 1, PART_BYTES, PART_BYTES + 1)] == [1, 1, 1, 2]
    assert part_count(MAX_OBJECT_BYTES) == 64
    assert [part_bytes(PART_BYTES + 1, part) for part in (0, 1)] == [PART_BYTES, 1]
    assert [record_bytes(size) for size in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12288]
    assert record_position(PLACE, 2 * MIB) == 7 * MIB + 70 * PAGE_BYTES


def test_the_superblock_comes_back_and_no_byte_of_it_can_change() -> None:
    page = encode_superblock(SUPERBLOCK)
    assert decode_superblock(page) == SUPERBLOCK
    assert SUPERBLOCK.total_bytes == 15 * MIB
    for changed in flips(page):
        with pytest.raises(DamagedRecord):
            decode_superblock(changed)


@pytest.mark.parametrize("size", [0, 4096, MIB + 4096])
def test_segments_are_whole_mebibytes(size: int) -> None:
    with pytest.raises(ValueError, match="segments of"):
        encode_superblock(Superblock(STORE_ID, 1, size))


def test_a_newer_format_is_kept_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstore.ssd_tier.log_layout.SUPERBLOCK_FORMAT", 2)
    page = encode_superblock(SUPERBLOCK)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 2, this version reads 1"):
        decode_superblock(page)


@pytest.mark.parametrize("opened", [False, True])
def test_the_start_of_a_segment_comes_back_and_no_byte_of_its_header_can_change(opened: bool) -> None:
    start = encode_segment_start(STORE_ID, 3, 9, opened)
    assert len(start) == SEGMENT_START_BYTES
    page = start[:PAGE_BYTES]
    assert decode_segment_header(page, STORE_ID, 3) == SegmentHeader(3, 9, opened)
    for changed in flips(page):
        with pytest.raises(DamagedRecord):
            decode_segment_header(changed, STORE_ID, 3)
    for store_id, segment in ((STORE_ID, 4), (bytes(16), 3)):
        with pytest.raises(DamagedRecord):
            decode_segment_header(page, store_id, segment)


def test_a_log_is_made_and_made_longer_with_its_superblock_last() -> None:
    made = list(first_writes(SUPERBLOCK))
    assert made[-1] == (0, encode_superblock(SUPERBLOCK))
    assert [position for position, _ in made[:-1]] == [MIB + n * 2 * MIB for n in range(7)]
    assert made[3][1] == encode_segment_start(STORE_ID, 3, 1)
    assert list(first_writes(SUPERBLOCK, 5)) == made[5:]


def test_how_many_segments_fit() -> None:
    assert [segments_that_fit(size, 2 * MIB) for size in (0, 3 * MIB - 1, 3 * MIB, 8 * MIB)] == [
        0,
        0,
        1,
        3,
    ]
