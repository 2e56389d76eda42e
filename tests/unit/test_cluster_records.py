"""Floors and other records that the whole cluster keeps."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.gossip.cluster_records import ClusterRecords, bucket_of
from p2pstore.gossip.records import (
    ClusterRecord,
    ClusterRecordKind,
    SignedRecord,
    sign_cluster_record,
)
from p2pstore.objects import ZERO_VERSION, Version
from tests.unit.gossip_network import FakeSigner, digest_of, peer_id_of

SIGNER = FakeSigner(peer_id_of(1))


def floor(
    key: int, clock: int, writer: int = 1, scope: int = 0, body: bytes = b""
) -> tuple[ClusterRecord, SignedRecord]:
    record = ClusterRecord(
        1, int(ClusterRecordKind.FLOOR), digest_of(key), clock, writer, SIGNER.peer_id, scope, body
    )
    return record, sign_cluster_record(record, SIGNER)


floors = st.lists(
    st.builds(floor, st.integers(0, 5), st.integers(1, 9), st.integers(1, 2), st.integers(0, 1)),
    max_size=30,
)


def state(records: ClusterRecords) -> tuple[object, ...]:
    return {signed.body for signed in records.dump()}, records.bucket_hashes, records.hash


@given(floors, st.randoms(use_true_random=False))
def test_any_order_gives_the_same_set(
    given_floors: list[tuple[ClusterRecord, SignedRecord]], rng: Random
) -> None:
    one, other = ClusterRecords(), ClusterRecords()
    for pair in given_floors:
        one.offer(*pair)
    shuffled = list(given_floors) * 2
    rng.shuffle(shuffled)
    for pair in shuffled:
        other.offer(*pair)
    assert state(one) == state(other)
    for key in range(6):
        versions = [r.version for r, _ in given_floors if r.name == digest_of(key) and not r.scope]
        assert one.floor_for(digest_of(key)) == max(versions, default=ZERO_VERSION)


def test_equal_versions_are_ordered_by_their_body() -> None:
    one, other = ClusterRecords(), ClusterRecords()
    low, high = floor(1, 5, body=b"a"), floor(1, 5, body=b"b")
    assert one.offer(*low)
    assert one.offer(*high)
    assert other.offer(*high)
    assert not other.offer(*low)
    assert state(one) == state(other)


def test_a_floor_forbids_what_it_covers() -> None:
    records = ClusterRecords()
    key, space = digest_of(1), digest_of(2)
    assert not records.forbids(key, space, Version(1, 1))
    records.offer(*floor(1, 5))
    records.offer(*floor(2, 8, scope=1))
    assert records.forbids(key, None, Version(5, 1, 99))
    assert not records.forbids(key, None, Version(5, 2))
    assert records.forbids(key, space, Version(8, 1))
    assert not records.forbids(key, space, Version(9, 0))
    assert not records.forbids(space, None, Version(1, 1))  # a namespace is not a key
    assert records.floor_for(key, space) == Version(8, 1)


def test_only_what_is_new_is_new() -> None:
    records = ClusterRecords()
    assert records.offer(*floor(1, 5))
    assert not records.offer(*floor(1, 5))
    assert not records.offer(*floor(1, 4))
    assert records.offer(*floor(1, 6))
    assert len(records) == 1


def test_buckets_hold_all_records_newest_first() -> None:
    records = ClusterRecords()
    pairs = [floor(key, key + 1) for key in range(200)]
    for pair in pairs:
        records.offer(*pair)
    listed = [signed for number in range(64) for signed in records.bucket(number)]
    assert {s.body for s in listed} == {signed.body for _, signed in pairs}
    assert len(listed) == 200
    full = max(range(64), key=lambda number: len(records.bucket(number)))
    clocks = [record.clock for record, _ in reversed(pairs) if bucket_of(record.name) == full]
    assert [signed.body for signed in records.bucket(full)] == [
        signed.body for clock in clocks for record, signed in pairs if record.clock == clock
    ]


def test_rumours_ride_a_bounded_number_of_times() -> None:
    records = ClusterRecords()
    for key in range(3):
        records.offer(*floor(key, 1))
    assert [len(records.rumors(2, 10_000, 2)) for _ in range(4)] == [2, 2, 2, 0]
    assert not records.has_rumors
    records.offer(*floor(9, 1))
    assert records.rumors(2, 10, 2) == []
    assert records.has_rumors


def test_above_the_limit_the_oldest_key_floors_go_and_do_not_come_back() -> None:
    records = ClusterRecords(limit=20)
    records.offer(*floor(1000, 1, scope=1))
    for key in range(20):
        records.offer(*floor(key, key + 10))
    assert len(records) == 19
    assert records.compacted_before == 11
    assert records.get(int(ClusterRecordKind.FLOOR), 1, digest_of(1000)) is not None
    assert records.floor_for(digest_of(0)) == ZERO_VERSION
    assert not records.offer(*floor(0, 10))
    assert records.offer(*floor(0, 40))
    total = 0
    for bucket in records.bucket_hashes:
        total ^= bucket
    fresh = ClusterRecords()
    for signed in records.dump():
        fresh.offer(
            *next(
                p
                for p in [floor(0, 40), floor(1000, 1, scope=1)]
                + [floor(k, k + 10) for k in range(20)]
                if p[1] == signed
            )
        )
    assert fresh.hash == records.hash == total


def test_without_floors_of_keys_the_oldest_record_goes() -> None:
    records = ClusterRecords(limit=5)
    for key in range(8):
        records.offer(*floor(key, key + 1, scope=1))
    assert len(records) == 5
    assert records.compacted_before == 0
    assert records.floor_for(b"", digest_of(7)) == Version(8, 1)


def test_what_was_saved_comes_back_and_is_no_rumour() -> None:
    records = ClusterRecords()
    pairs = [floor(key, 5) for key in range(4)]
    for pair in pairs:
        records.offer(*pair)
    loaded = ClusterRecords()
    loaded.load(pairs, compacted_before=3)
    assert state(loaded) == state(records)
    assert not loaded.has_rumors
    assert not loaded.offer(*floor(77, 3))
