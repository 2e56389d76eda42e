"""Digests as columns and as a table that keeps up; operations that name their members by place, packed and whole."""

import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.delta_checks import chunk_of, plain_chunk
from p2pstore.gossip.exchange.digests import (
    MAX_PACKED_SEQUENCE,
    REMEMBERED_SETS,
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
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import LogChunk
from p2pstore.gossip.locations.log import (
    MASK_BYTES,
    MAX_SIGNED_OPERATIONS,
    MIN_PACKED,
    SignedRun,
    pack_operations,
    unpack_operations,
)
from p2pstore.gossip.records import LOCATION_BYTES
from tests.unit.digest_rows import digest_from
from tests.unit.gossip_network import Network, Node, location

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


def truth(node: Node) -> bytes:
    """The digest made from nothing but what the machine knows."""
    gossip, rows = node.gossip, []
    for state in gossip.membership.live():
        record = state.record
        assert record is not None
        incarnation, sequence = gossip.directory.position(state.member)
        if state is gossip.membership.own:
            incarnation, sequence = record.incarnation, gossip.log.sequence
        if incarnation != record.incarnation:
            sequence = 0
        rows.append((state.member, record.incarnation, record.sequence, sequence))
    return pack_digest(digest_from(rows))


def test_it_keeps_up_with_operations_joins_deaths_and_restarts() -> None:
    net, rng = Network(5, GossipConfig()), Random(5)
    net.start_all(5)
    for step in range(60):
        what, number = rng.choice(("hold", "hold", "hold", "restart", "stop")), rng.randrange(5)
        node = net.nodes.get(number)
        if what == "hold" and node is not None:
            node.hold(location(step, step + 1))
        elif what == "stop" and len(net.nodes) > 2 and node is not None:
            net.stop(number)
        elif what == "restart":
            if node is not None:
                net.stop(number)
            net.start(number, bootstrap=min(set(net.nodes) - {number}))
        if node is not None and number in net.nodes:
            net.nodes[number].rest()
        net.run(rng.choice((0.05, 0.5, 3.0)))
        for each in net.nodes.values():
            assert pack_digest(each.gossip.knowledge.table.current()) == truth(each)


def test_a_view_that_was_taken_back_is_found_within_a_quarter_of_a_second() -> None:
    net = Network(1, GossipConfig())
    one, other = net.start_all(2)
    other.hold(location(1))
    assert net.run(10, net.converged)
    assert pack_digest(one.gossip.knowledge.table.current()) == truth(one)
    one.gossip.directory.forget(other.gossip.member)
    assert pack_digest(one.gossip.knowledge.table.current()) != truth(one)
    one.gossip.knowledge.table.read_anew()
    assert pack_digest(one.gossip.knowledge.table.current()) == truth(one)


def test_sets_of_members_are_understood_for_a_while() -> None:
    net = Network(1, GossipConfig())
    (node,) = net.start_all(1)
    net.run(1)
    table = node.gossip.knowledge.table
    first = table.current().of
    assert table.known_set(first.hash) is first
    assert table.known_set(first.hash + 1) is None
    for number in range(1, REMEMBERED_SETS + 1):
        assert table.known_set(first.hash) is first
        net.start(number)
        assert net.run(20, net.converged)
        table.current()
    assert table.known_set(first.hash) is None


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
        unpack_operations(b"\xff" * 60, 0, MIN_PACKED)


def test_a_chunk_says_how_many_it_has_and_no_more() -> None:
    run = SignedRun(5, b"".join(location(n).encode() for n in range(1, 9)), b"s" * 64)
    chunk = chunk_of(1, 2, run)
    assert plain_chunk(chunk) == LogChunk(1, 2, 5, run.operations, run.signature)
    for count, operations in ((9, chunk.operations), (8, chunk.operations + b"x")):
        with pytest.raises(ProtocolError):
            plain_chunk(LogChunk(1, 2, 5, operations, run.signature, count))
    with pytest.raises(ProtocolError, match="run of"):
        plain_chunk(LogChunk(1, 2, 5, bytes(100), b"", MAX_SIGNED_OPERATIONS + 1))
