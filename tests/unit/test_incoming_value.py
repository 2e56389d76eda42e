"""A value that arrives in parts is complete only when every chunk is the announced one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.objects import CHUNK_BYTES, chunk_sums
from p2pstore.transfer.serving.other_requests import IncomingValue

LONG = Random(1).randbytes(5 * CHUNK_BYTES + 77)


def feed(incoming: IncomingValue, value: bytes, start: int, end: int) -> None:
    position = start
    for chunk in incoming.part(start, end - start):
        chunk[:] = value[position : position + len(chunk)]
        position += len(chunk)
    assert position == end


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(LONG)), st.lists(st.integers(1, 6), max_size=6))
def test_parts_of_any_number_of_chunks_make_the_value(length: int, counts: list[int]) -> None:
    value, target, position = LONG[:length], bytearray(length), 0
    incoming = IncomingValue(memoryview(target), chunk_sums(value))
    for count in [*counts, 6]:
        if position < length:
            assert not incoming.complete
            end = min(length, position + count * CHUNK_BYTES)
            feed(incoming, value, position, end)
            position = end
    if not length:
        feed(incoming, value, 0, 0)
    assert incoming.complete
    assert target == value


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [
        (CHUNK_BYTES, CHUNK_BYTES, "from byte 1,048,576"),
        (-CHUNK_BYTES, 2 * CHUNK_BYTES, "from byte -1,048,576"),
        (0, len(LONG) + 1, "to 5,242,958"),
        (0, 0, "ends within a chunk"),
        (0, CHUNK_BYTES + 1, "ends within a chunk"),
        (0, 77, "ends within a chunk"),
    ],
)
def test_parts_that_cannot_be(offset: int, length: int, words: str) -> None:
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    with pytest.raises(ProtocolError, match=words):
        incoming.part(offset, length)


def test_nothing_comes_after_the_end() -> None:
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    feed(incoming, LONG, 0, len(LONG))
    with pytest.raises(ProtocolError, match="have arrived"):
        incoming.part(0, CHUNK_BYTES)


@pytest.mark.parametrize("position", [0, 2 * CHUNK_BYTES + 5, len(LONG) - 1])
def test_one_wrong_byte_is_found_in_its_chunk(position: int) -> None:
    spoilt = bytearray(LONG)
    spoilt[position] ^= 1
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    with pytest.raises(ValueError, match=f"chunk {position // CHUNK_BYTES} is not"):
        feed(incoming, bytes(spoilt), 0, len(LONG))
    assert not incoming.complete


@pytest.mark.parametrize("sums", [b"", chunk_sums(LONG)[:-8], chunk_sums(LONG) + bytes(8), b"x"])
def test_one_sum_per_chunk(sums: bytes) -> None:
    with pytest.raises(ProtocolError, match="chunk sums"):
        IncomingValue(memoryview(bytearray(len(LONG))), sums)
