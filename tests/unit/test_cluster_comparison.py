"""Finding the cluster records that two peers do not share."""

from random import Random

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.floors.cluster_records import (
    ClusterRecords,
    TheirRecords,
    differing_buckets,
    pack_buckets,
    pack_cells,
    read_buckets,
    read_cells,
    records_for,
)
from p2pstore.gossip.records import ClusterRecord, ClusterRecordKind, SignedRecord, read_cluster_record
from p2pstore.wire import encode_body
from simulation.signer import peer_id_of
from tests.unit.gossip_network import digest_of

MANY = 6000


def filled(keys: range) -> ClusterRecords:
    records = ClusterRecords()
    for key in keys:
        record = ClusterRecord(
            1, int(ClusterRecordKind.FLOOR), digest_of(key), key + 1, 1, peer_id_of(1)
        )
        records.offer(record, SignedRecord(encode_body(record), b"s" * 64))
    return records


def said_by(other: ClusterRecords, buckets: list[int] | None = None) -> TheirRecords:
    """The summary of a peer with these records, as it travels; with the cells of some buckets."""
    return TheirRecords(
        read_buckets(pack_buckets(other.bucket_hashes)), read_cells(pack_cells(other, buckets or []))
    )


def take(into: ClusterRecords, signed: list[SignedRecord]) -> int:
    return sum(into.offer(read_cluster_record(each), each) for each in signed)


def test_one_missing_record_among_many_costs_a_cell() -> None:
    mine, theirs = filled(range(MANY)), filled(range(MANY - 1))
    assert records_for(mine, said_by(theirs), 40, 1 << 20, Random(1)) == []  # cells come first
    (bucket,) = differing_buckets(mine, theirs.bucket_hashes)
    sent = records_for(mine, said_by(theirs, [bucket]), 40, 1 << 20, Random(1))
    assert len(sent) <= 8
    assert take(theirs, sent) == 1
    assert theirs.hash == mine.hash


def test_who_has_none_is_sent_each_record_once() -> None:
    mine, theirs, rng = filled(range(1000)), ClusterRecords(), Random(2)
    sent = 0
    while theirs.hash != mine.hash:
        buckets = rng.sample(differing := differing_buckets(mine, theirs.bucket_hashes), 1)
        assert len(differing) <= 64
        records = records_for(mine, said_by(theirs, buckets), 40, 1 << 20, rng)
        assert take(theirs, records) == len(records)
        sent += len(records)
    assert sent == 1000


def test_few_are_sent_at_once() -> None:
    mine, theirs = filled(range(20)), filled(range(3))
    assert take(theirs, records_for(mine, said_by(theirs), 40, 1 << 20, Random(1))) == 17


def test_more_than_may_go_of_one_cell_go_in_the_end() -> None:
    mine, theirs, rng = filled(range(MANY)), ClusterRecords(), Random(3)
    bucket = 5
    for _ in range(400):
        take(theirs, records_for(mine, said_by(theirs, [bucket]), 1, 1 << 20, rng))
    assert theirs.bucket_hashes[bucket] == mine.bucket_hashes[bucket]


def test_bytes_are_bounded_and_nobody_is_sent_what_was_not_asked() -> None:
    mine = filled(range(100))
    size = len(mine.dump()[0].body) + 64
    sent = records_for(mine, said_by(ClusterRecords(), [1, 2]), 40, 2 * size + 50, Random(1))
    assert len(sent) == 2
    assert records_for(mine, TheirRecords(), 40, 1 << 20, Random(1)) == []


@pytest.mark.parametrize("packed", [b"x", bytes(512), bytes(514), bytes(5 * 513), b"\x40" + bytes(512)])
def test_cells_that_make_no_sense(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_cells(packed)
