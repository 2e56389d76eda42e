"""Runs of operations as they travel: smaller, and whole again at the other end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.delta_checks import chunk_of, plain_chunk
from p2pstore.gossip.gossip_messages import LogChunk
from p2pstore.gossip.locations.log import (
    LEAST_PACKED,
    MASK_BYTES,
    MAX_SIGNED_OPERATIONS,
    SignedRun,
    pack_operations,
    unpack_operations,
)
from p2pstore.gossip.records import LOCATION_BYTES
from tests.unit.gossip_network import location

RUNS = st.one_of(
    st.lists(st.binary(min_size=LOCATION_BYTES, max_size=LOCATION_BYTES), max_size=9),
    st.lists(st.integers(1, 1 << 40).map(lambda n: location(n, n).encode()), min_size=1, max_size=40),
).map(b"".join)


@given(RUNS, st.binary(max_size=9), st.binary(max_size=9))
def test_operations_come_out_as_they_went_in(run: bytes, before: bytes, after: bytes) -> None:
    packed = before + pack_operations(run) + after
    count = len(run) // LOCATION_BYTES
    assert unpack_operations(packed, len(before), count) == (run, len(packed) - len(after))


def test_what_records_have_in_common_goes_once() -> None:
    run = b"".join(location(number, number).encode() for number in range(1, 1_001))
    assert len(pack_operations(run)) < 0.8 * len(run)
    same = location(1).encode() * 1_000
    assert len(pack_operations(same)) == MASK_BYTES + LOCATION_BYTES


@given(RUNS, st.data())
def test_whatever_is_cut_short_is_refused(run: bytes, data: st.DataObject) -> None:
    packed = pack_operations(run)
    if packed:
        short = packed[: data.draw(st.integers(0, len(packed) - 1))]
        with pytest.raises(ProtocolError):
            unpack_operations(short, 0, len(run) // LOCATION_BYTES)


@given(st.binary(max_size=200), st.integers(0, 70_000))
def test_any_bytes_are_operations_or_an_error(packed: bytes, count: int) -> None:
    try:
        operations, end = unpack_operations(packed, 0, count)
    except ProtocolError:
        return
    assert len(operations) == count * LOCATION_BYTES
    assert end <= len(packed)


def test_a_mask_of_more_bytes_than_a_record_has_is_refused() -> None:
    with pytest.raises(ProtocolError, match="mask"):
        unpack_operations(b"\xff" * 60, 0, LEAST_PACKED)


def test_a_chunk_says_how_many_it_has_and_no_more() -> None:
    run = SignedRun(5, b"".join(location(n).encode() for n in range(1, 9)), b"s" * 64)
    chunk = chunk_of(1, 2, run)
    assert plain_chunk(chunk) == LogChunk(1, 2, 5, run.operations, run.signature)
    for count, operations in ((9, chunk.operations), (8, chunk.operations + b"x")):
        with pytest.raises(ProtocolError):
            plain_chunk(LogChunk(1, 2, 5, operations, run.signature, count))
    with pytest.raises(ProtocolError, match="run of"):
        plain_chunk(LogChunk(1, 2, 5, bytes(100), b"", MAX_SIGNED_OPERATIONS + 1))
