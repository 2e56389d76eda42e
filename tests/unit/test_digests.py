"""Digests as columns, and operations that name their members by place."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.digests import (
    MAX_PACKED_SEQUENCE,
    Digest,
    Run,
    check_runs,
    pack_digest,
    pack_positions,
    pack_runs,
    read_runs,
    unpack_digest,
    unpack_positions,
)
from p2pstore.gossip.gossip_messages import LogChunk
from p2pstore.gossip.locations.log import SignedRun
from p2pstore.gossip.records import LOCATION_BYTES
from tests.unit.digest_rows import digest_from

u64 = st.integers(0, (1 << 64) - 1)
rows = st.lists(st.tuples(u64, u64, st.integers(0, (1 << 32) - 1), u64), max_size=8)


def rows_of(digest: Digest) -> list[tuple[int, int, int, int]]:
    columns = (digest.of.members, digest.of.incarnations, digest.record_sequences, digest.log_sequences)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(rows)
def test_a_digest_in_full_comes_back_in_order_of_members(
    given_rows: list[tuple[int, int, int, int]],
) -> None:
    expected = sorted({row[0]: row for row in given_rows}.values())
    packed = b"".join(struct.pack("<QQIQ", *row) for row in given_rows)
    assert rows_of(unpack_digest(packed)) == expected
    assert rows_of(digest_from(given_rows)) == expected
    assert rows_of(unpack_digest(pack_digest(digest_from(given_rows)))) == expected


@given(rows, rows)
def test_one_digest_along_the_members_of_another(
    ours: list[tuple[int, int, int, int]], others: list[tuple[int, int, int, int]]
) -> None:
    mine, theirs = digest_from(ours), digest_from([*others, *ours[:3]])
    table = {row[0]: row for row in rows_of(theirs)}
    named, *columns = theirs.along(mine.of.members)
    for place, member in enumerate(mine.of.members.tolist()):
        assert bool(named[place]) == (member in table)
        found = tuple(int(column[place]) for column in columns)
        assert found == table.get(member, (0, 0, 0, 0))[1:]
    assert sorted(theirs.beside(mine.of.members)) == sorted(table.keys() - set(mine.of.members.tolist()))


def test_the_hash_tells_members_and_incarnations_apart() -> None:
    digest = digest_from([(1, 5, 0, 0), (2, 6, 0, 0)])
    assert digest.of.hash == digest_from([(2, 6, 7, 8), (1, 5, 9, 9)]).of.hash
    others = [[(1, 5, 0, 0)], [(1, 6, 0, 0), (2, 5, 0, 0)], [(1, 5, 0, 0), (3, 6, 0, 0)], []]
    assert digest.of.hash not in {digest_from(other).of.hash for other in others}


def test_positions_are_of_all_members_or_none() -> None:
    digest = digest_from([(1, 5, 6, MAX_PACKED_SEQUENCE), (2, 6, (1 << 32) - 1, 0)])
    packed = pack_positions(digest)
    assert packed is not None
    assert rows_of(unpack_positions(packed, digest.of)) == rows_of(digest)
    for wrong in (packed[:9], packed + packed, packed[:-1], b""):
        with pytest.raises(ProtocolError):
            unpack_positions(wrong, digest.of)
    assert pack_positions(digest_from([(1, 5, 6, MAX_PACKED_SEQUENCE + 1)])) is None


def test_runs_name_members_by_place() -> None:
    members = digest_from([(70, 5, 0, 0), (80, 6, 0, 0), (90, 7, 0, 0)]).of
    sent = [
        Run(2, SignedRun(MAX_PACKED_SEQUENCE, b"a" * LOCATION_BYTES, b"A" * 64)),
        Run(0, SignedRun(1, b"b" * 2 * LOCATION_BYTES, b"B" * 64)),
        Run(2, SignedRun(9, b"c" * LOCATION_BYTES, b"C" * 64)),
    ]
    packed = pack_runs(sent)
    rows, operations = check_runs(*packed)
    assert list(read_runs(rows, operations, packed[2], members)) == [
        LogChunk(90, 7, MAX_PACKED_SEQUENCE, b"a" * LOCATION_BYTES, b"A" * 64),
        LogChunk(70, 5, 1, b"b" * 2 * LOCATION_BYTES, b"B" * 64),
        LogChunk(90, 7, 9, b"c" * LOCATION_BYTES, b"C" * 64),
    ]
    with pytest.raises(ProtocolError, match="member 3 of 3"):
        packed = pack_runs([Run(3, SignedRun(1, b"a" * LOCATION_BYTES, bytes(64)))])
        rows, operations = check_runs(*packed)
        list(read_runs(rows, operations, packed[2], members))


@pytest.mark.parametrize(
    ("runs", "operations"),
    [
        (b"x", b""),
        (struct.pack("<HHIB", 0, 1, 1, 0), b""),
        (struct.pack("<HHIB", 0, 1, 1, 0), bytes(33)),
        (struct.pack("<HHIB", 0, 1, 1, 0), bytes(84)),
        (struct.pack("<HHIB", 0, 0, 1, 0) + struct.pack("<HHIB", 0, 1, 1, 0), bytes(42)),
        (struct.pack("<HHIB", 0, 1, 0, 0), bytes(42)),
        (struct.pack("<HHIB", 0, 1, 1, 0) * 16_385, bytes(42) * 16_385),
        (b"", bytes(42)),
    ],
)
def test_runs_that_make_no_sense(runs: bytes, operations: bytes) -> None:
    with pytest.raises(ProtocolError):
        check_runs(runs, operations, bytes(64 * (len(runs) // 9)))


def test_each_run_has_a_signature() -> None:
    packed = pack_runs([Run(0, SignedRun(1, bytes(LOCATION_BYTES), bytes(64)))])
    for signatures in (b"1", bytes(63), bytes(128)):
        with pytest.raises(ProtocolError, match="signatures"):
            check_runs(packed[0], packed[1], signatures)


def test_a_digest_is_bounded_before_it_is_sorted() -> None:
    with pytest.raises(ProtocolError, match="16,385 entries"):
        unpack_digest(bytes(28 * 16_385))
    assert len(unpack_digest(bytes(28 * 16_384)).of) == 1  # all the same member
    assert np.array_equal(unpack_digest(b"").of.members, [])
