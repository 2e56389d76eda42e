"""Footers: rows of a segment's records, all or nothing; lz4 where it pays; payloads checked against their headers."""

import struct
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.objects import CHUNK_BYTES, KIB, MIB, PART_BYTES, Version
from p2pstore.ssd_tier.footer import (
    ROW_BYTES,
    Footer,
    decode_footer,
    decode_footer_tail,
    encode_footer,
    footer_from_headers,
    footer_generation,
    footer_pages,
)
from p2pstore.ssd_tier.log_layout import (
    PAGE_BYTES,
    Codec,
    DamagedRecord,
    RecordPlace,
    page_is_sealed,
    place_seed,
    sealed_page,
)
from p2pstore.ssd_tier.record_format import (
    RecordHeader,
    check_part,
    compress_part,
    decode_record_header,
    decompress_chunk,
    decompress_part,
    encode_record_header,
    is_worth_it,
    sample_ratio,
    unpack_part,
)
from tests.unit.cold_objects import STORE_ID, facts_of


def header(number: int, key: str, namespace: str = "default", length: int = 100) -> RecordHeader:
    facts = replace(
        facts_of(key, length, number + 5, namespace),
        version=Version(2**63 + number, 65_535, 2**64 - 1),
        expires_unix_ms=2**42,
        replicas=3,
        pin=2,
        soft=True,
    )
    place = RecordPlace(3, 9, 2 + 2 * number, number, 2**40 + number)
    return RecordHeader(place, facts, 0, min(length, PART_BYTES), Codec.RAW)


def read(content: bytes) -> Footer:
    tail = decode_footer_tail(content[-PAGE_BYTES:], STORE_ID, 3, 9)
    return decode_footer(tail, content[:-PAGE_BYTES])


@given(st.lists(st.tuples(st.text(min_size=1, max_size=40), st.sampled_from(["a", "b" * 255, "ü"]))))
def test_a_footer_comes_back(keys: list[tuple[str, str]]) -> None:
    headers = [header(number, key, namespace) for number, (key, namespace) in enumerate(keys)]
    footer = footer_from_headers(headers)
    content = encode_footer(STORE_ID, 3, 9, footer)
    again = read(content)
    assert again.rows.tobytes() == footer.rows.tobytes()
    assert again.namespaces == footer.namespaces
    texts = [
        again.keys[row["key_offset"] : row["key_offset"] + row["key_bytes"]].decode()
        for row in again.rows
    ]
    spaces = [again.namespaces[row["namespace"]] for row in again.rows]
    assert list(zip(texts, spaces, strict=True)) == keys
    text_bytes = sum(len((key + namespace).encode()) for key, namespace in keys)
    assert len(content) // PAGE_BYTES <= footer_pages(len(keys), text_bytes)
    assert footer_generation(content[-PAGE_BYTES:], STORE_ID, 3) == 9


def test_a_row_has_what_the_index_needs() -> None:
    each = header(7, "key", length=PART_BYTES + 5)
    row = footer_from_headers([each]).rows[0]
    assert row["digest"].tobytes() == each.facts.digest
    version = Version(int(row["clock"]), int(row["writer"]), int(row["root"]))
    assert version == each.facts.version
    assert (row["length"], row["stored_bytes"], row["part"]) == (PART_BYTES + 5, PART_BYTES, 0)
    assert (row["page"], row["number"], row["sequence"]) == (16, 7, 2**40 + 7)
    assert (row["expires_unix_ms"], row["replicas"], row["flags"]) == (2**42, 3, 2 | 4)


def test_no_byte_of_a_footer_can_change() -> None:
    content = encode_footer(
        STORE_ID, 3, 9, footer_from_headers([header(number, f"{number}") for number in range(99)])
    )
    assert len(content) == 3 * PAGE_BYTES
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        with pytest.raises(DamagedRecord):
            read(bytes(changed))


def test_a_footer_counts_only_in_its_segment_and_generation() -> None:
    content = encode_footer(STORE_ID, 3, 9, footer_from_headers([header(1, "k")]))
    for store_id, segment, generation in ((STORE_ID, 3, 8), (STORE_ID, 2, 9), (bytes(16), 3, 9)):
        with pytest.raises(DamagedRecord):
            decode_footer_tail(content[-PAGE_BYTES:], store_id, segment, generation)
    assert footer_generation(content[-PAGE_BYTES:], STORE_ID, 4) is None
    assert footer_generation(bytes(PAGE_BYTES), STORE_ID, 3) is None
    # The body of one generation under the tail of another:
    later = encode_footer(STORE_ID, 3, 10, footer_from_headers([header(1, "k")]))
    tail = decode_footer_tail(content[-PAGE_BYTES:], STORE_ID, 3, 9)
    assert later[:-PAGE_BYTES] == content[:-PAGE_BYTES]
    assert decode_footer_tail(later[-PAGE_BYTES:], STORE_ID, 3, 10).body_checksum != tail.body_checksum


def test_rows_of_a_newer_version_are_longer() -> None:
    """As an appended field would make them: this version reads the fields it knows."""
    footer = footer_from_headers([header(number, f"key {number}") for number in range(3)])
    rows = footer.rows.view(np.uint8).reshape(3, ROW_BYTES)
    longer = np.hstack([rows, np.full((3, 8), 0xEE, np.uint8)])
    content = longer.tobytes() + struct.pack("<H", 7) + b"default" + footer.keys
    content = content.ljust(PAGE_BYTES, b"\0")
    page = bytearray(encode_footer(STORE_ID, 3, 9, footer)[-PAGE_BYTES:])
    seed = decode_footer_tail(bytes(page), STORE_ID, 3, 9).body_seed
    page[44:48] = (ROW_BYTES + 8).to_bytes(4, "little")
    page[64:72] = xxhash.xxh3_64_intdigest(content, seed).to_bytes(8, "little")
    sealed = sealed_page(bytes(page[:72]), place_seed(STORE_ID, 3, 9, 0xFFFF_FFFF))
    newer = decode_footer_tail(sealed, STORE_ID, 3, 9)
    again = decode_footer(newer, content)
    assert again.rows.tobytes() == footer.rows.tobytes()
    assert (again.namespaces, again.keys) == (["default"], footer.keys)


def test_a_page_has_room_for_its_checksum_alone() -> None:
    seed = place_seed(STORE_ID, 1, 2, 3)
    assert page_is_sealed(sealed_page(b"x" * 4088, seed), seed)
    with pytest.raises(ValueError, match="do not fit"):
        sealed_page(b"x" * 4089, seed)
    assert not page_is_sealed(b"", seed)


NOISE = Random(1).randbytes(2 * MIB)
TEXT = b"all work and no play makes Jack a dull boy. " * 60_000
PLACE = RecordPlace(1, 1, 2, 0, 1)


def packed(value: bytes) -> tuple[RecordHeader, bytes]:
    """The header and the stored bytes of a value that is compressed."""
    found = compress_part(memoryview(value))
    assert found is not None
    stored, sizes = b"".join(found[0]), found[1]
    facts = facts_of("k", len(value), value=value)
    page = encode_record_header(STORE_ID, PLACE, facts, 0, len(stored), Codec.LZ4, sizes)
    return decode_record_header(page, STORE_ID, 1, 1, 2), stored


def test_noise_is_stored_as_it_is() -> None:
    assert sample_ratio(memoryview(NOISE)) > 1.0
    assert compress_part(memoryview(NOISE)) is None
    assert compress_part(memoryview(b"")) is None
    assert sample_ratio(memoryview(b"")) == 1.0


def test_what_shrinks_comes_back() -> None:
    assert sample_ratio(memoryview(TEXT)) < 0.1
    header, stored = packed(TEXT)
    assert len(stored) < len(TEXT) // 10
    into = bytearray(len(TEXT))
    unpack_part(header, memoryview(stored), memoryview(into))
    assert into == TEXT


def test_a_sample_looks_all_over_the_value() -> None:
    """The first quarter compresses, the rest does not: neither does the whole."""
    mixed = TEXT[: 512 * KIB] + NOISE[: 1536 * KIB]
    assert 0.7 < sample_ratio(memoryview(mixed)) < 0.8
    small = memoryview(TEXT[:1000])
    assert sample_ratio(small) < 0.2


def test_a_chunk_that_does_not_shrink_lies_there_as_it_is() -> None:
    value = TEXT[:CHUNK_BYTES] + NOISE[:CHUNK_BYTES] + b"x" * 100
    header, stored = packed(value)
    assert header.chunk_sizes[1] == CHUNK_BYTES
    into = bytearray(len(value))
    unpack_part(header, memoryview(stored), memoryview(into))
    assert into == value


def test_only_whole_pages_are_saved() -> None:
    assert not is_worth_it(100, 4096)
    assert is_worth_it(4096, 8192)
    assert not is_worth_it(86, 100)
    assert is_worth_it(85 * 4096, 100 * 4096)
    assert not is_worth_it(85 * 4096 + 1, 100 * 4096)


@given(st.binary(max_size=3000), st.integers(1, 2000))
@settings(max_examples=50)
def test_any_part_that_is_compressed_comes_back(pattern: bytes, times: int) -> None:
    value = pattern * times
    found = compress_part(memoryview(value))
    if found is not None:
        into = bytearray(len(value))
        decompress_part(memoryview(b"".join(found[0])), found[1], memoryview(into))
        assert into == value


def test_damaged_compressed_bytes_are_refused() -> None:
    header, stored = packed(TEXT)
    rng = Random(2)
    for _ in range(300):
        changed = bytearray(stored)
        changed[rng.randrange(len(stored))] ^= 1 << rng.randrange(8)
        with pytest.raises(DamagedRecord):
            unpack_part(header, memoryview(changed), memoryview(bytearray(len(TEXT))))
    with pytest.raises(DamagedRecord, match="not the compressed payload"):
        unpack_part(header, memoryview(stored)[:-1], memoryview(bytearray(len(TEXT))))


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_any_bytes_at_all_unpack_to_their_size_or_are_refused(stored: bytes, size: int) -> None:
    into = bytearray(size)
    try:
        decompress_chunk(memoryview(stored), memoryview(into))
    except DamagedRecord:
        return
    assert len(into) == size


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * MIB - 1])
def test_a_raw_payload_is_checked_chunk_by_chunk(position: int) -> None:
    facts = facts_of("k", len(NOISE), value=NOISE)
    page = encode_record_header(STORE_ID, PLACE, facts, 0, len(NOISE))
    header = decode_record_header(page, STORE_ID, 1, 1, 2)
    payload = bytearray(NOISE)
    check_part(header, memoryview(payload))
    payload[position] ^= 1
    with pytest.raises(DamagedRecord, match=f"in chunk {position // MIB} of part 0"):
        check_part(header, memoryview(payload))
    with pytest.raises(DamagedRecord, match="a part of"):
        check_part(header, memoryview(NOISE)[:-1])
    with pytest.raises(DamagedRecord, match="not the compressed payload"):
        unpack_part(header, memoryview(NOISE), memoryview(payload))
