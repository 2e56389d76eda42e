"""lz4 where it pays, and payloads checked against their headers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.objects import CHUNK_BYTES, KIB, MIB
from p2pstore.ssd_tier.log_layout import Codec, DamagedRecord, RecordPlace
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
