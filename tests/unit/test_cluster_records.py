"""Floors and other records that the whole cluster keeps."""

from __future__ import annotations

from functools import reduce
from operator import xor
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.gossip.checkpoints import HeadBody, checkpoint_digest
from p2pstore.gossip.floors.cluster_records import ClusterRecords, cell_of
from p2pstore.gossip.records import (
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    SignedRecord,
    member_of,
    read_cluster_record,
    sign_cluster_record,
)
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.objects import clock_from_unix_seconds as clock_at
from p2pstore.wire import encode_body
from tests.unit.gossip_network import FakeSigner, digest_of, peer_id_of

SIGNER = FakeSigner(peer_id_of(1))


def floor(
    key: int,
    clock: int,
    writer: int = 1,
    scope: int = 0,
    body: bytes = b"",
    signer: FakeSigner = SIGNER,
) -> tuple[ClusterRecord, SignedRecord]:
    record = ClusterRecord(
        1, int(ClusterRecordKind.FLOOR), digest_of(key), clock, writer, signer.peer_id, scope, body
    )
    return record, sign_cluster_record(record, signer)


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


def test_cells_hold_all_records_and_add_up_to_their_buckets() -> None:
    records = ClusterRecords()
    pairs = [floor(key, key + 1) for key in range(200)]
    for pair in pairs:
        records.offer(*pair)
    for key in range(0, 200, 3):
        records.offer(*floor(key, key + 500))  # in the place of the one before
    listed: dict[bytes, tuple[int, int]] = {}
    for bucket in range(64):
        hashes = records.cell_hashes(bucket)
        assert reduce(xor, hashes) == records.bucket_hashes[bucket]
        cells = [records.cell(bucket, cell) for cell in range(64)]
        assert [hash_ != 0 for hash_ in hashes] == [bool(cell) for cell in cells]
        assert sum(map(len, cells)) == records.bucket_size(bucket)
        listed |= {s.body: (bucket, number) for number, cell in enumerate(cells) for s in cell}
    assert listed.keys() == {signed.body for signed in records.dump()}
    assert len(listed) == 200
    name = records.dump()[7]
    assert listed[name.body] == cell_of(read_cluster_record(name).name)


def test_rumours_ride_a_bounded_number_of_times() -> None:
    records = ClusterRecords()
    for key in range(3):
        records.offer(*floor(key, 1))
    assert [len(records.rumors(2, 10_000, 2)) for _ in range(4)] == [2, 2, 2, 0]
    assert not records.has_rumors
    records.offer(*floor(9, 1))
    assert records.rumors(2, 10, 2) == []
    assert records.has_rumors


# --- bounds ----------------------------------------------------------------------------------

NOW = clock_at(10_000.0)
ME = member_of(SIGNER.peer_id)
ALL_SEEN = {ME: NOW}


def at(seconds: float) -> int:
    """A clock so many seconds before the test's present."""
    return NOW - clock_at(seconds)


def compacted(records: ClusterRecords, seen: dict[int, int] = ALL_SEEN) -> None:
    records.compact(seen, NOW)
    while records.purging:
        records.purge()


def test_above_the_limit_the_oldest_floors_go_and_do_not_come_back() -> None:
    records = ClusterRecords(limit=20)
    pairs = [floor(key, at(2000.0 - key)) for key in range(21)]
    for pair in pairs:
        records.offer(*pair)
    assert len(records) == 21
    compacted(records)
    assert len(records) == 18
    assert records.horizon == {ME: records.compacted_before}
    assert pairs[2][0].clock <= records.compacted_before < pairs[3][0].clock
    assert records.floor_for(digest_of(2)) == ZERO_VERSION
    assert records.floor_for(digest_of(3)) == pairs[3][0].version
    assert not records.offer(*pairs[0])
    assert records.offer(*floor(0, at(1000.0)))
    fresh = ClusterRecords()
    for pair in [*pairs[3:], floor(0, at(1000.0))]:
        fresh.offer(*pair)
    assert state(fresh) == state(records)


def test_at_the_limit_nothing_goes() -> None:
    records = ClusterRecords(limit=20)
    for key in range(20):
        records.offer(*floor(key, at(2000.0)))
    compacted(records)
    assert len(records) == 20
    assert not records.horizon


def test_young_floors_stay_until_there_are_far_too_many() -> None:
    records = ClusterRecords(limit=20, kept_seconds=600.0)
    for key in range(30):
        records.offer(*floor(key, at(500.0 - key)))
    compacted(records)
    assert len(records) == 30
    records.offer(*floor(30, at(400.0)))
    compacted(records)
    assert len(records) == 18


def test_floors_that_others_may_not_have_seen_stay_longer_still() -> None:
    records = ClusterRecords(limit=20)
    for key in range(40):
        records.offer(*floor(key, at(2000.0 - key)))
    compacted(records, {ME: at(1990.0)})
    assert len(records) == 40
    assert records.compacted_before <= at(1990.0 + 120.0)
    records.offer(*floor(40, at(1000.0)))
    compacted(records, {ME: at(1990.0)})
    assert len(records) == 18, "memory is bounded, whoever has seen them"


def test_the_floors_of_a_writer_that_was_cut_off_stay() -> None:
    other = FakeSigner(peer_id_of(2))
    records = ClusterRecords(limit=20)
    late = floor(100, at(5000.0), signer=other)
    records.offer(*late)
    for key in range(21):
        records.offer(*floor(key, at(2000.0 - key)))
    compacted(records, {ME: NOW, member_of(other.peer_id): at(6000.0)})
    assert records.floor_for(digest_of(100)) == late[0].version
    assert records.compacted_before > late[0].clock
    again = ClusterRecords(limit=20)
    again.raise_horizon(records.horizon)
    assert again.offer(*late), "it is not below the horizon of its writer"
    while again.purging:
        again.purge()
    assert len(again) == 1
    again.raise_horizon({member_of(other.peer_id): at(4000.0)})
    while again.purging:
        again.purge()
    assert len(again) == 0


def test_horizons_meet_whatever_the_order() -> None:
    """Two peers of which one compacted agree as soon as the other has its horizon."""
    pairs = [floor(key, at(2000.0 - key)) for key in range(50)]
    one, other = ClusterRecords(limit=20), ClusterRecords(limit=1000)
    for pair in pairs:
        one.offer(*pair)
        other.offer(*pair)
    compacted(one)
    assert one.hash != other.hash
    assert other.raise_horizon(one.horizon)
    assert not other.raise_horizon(one.horizon)
    while other.purging:
        other.purge()
    assert state(one) == state(other)
    assert one.horizon_hash == other.horizon_hash != 0
    for signed in other.dump():
        assert signed in one.dump()


def test_purging_takes_steps() -> None:
    records = ClusterRecords()
    for key in range(50):
        records.offer(*floor(key, at(100.0)))
    records.raise_horizon({ME: at(50.0)})
    records.purge(limit=20)
    assert len(records) == 30
    assert records.purging
    assert not records.wants(floor(99, at(60.0))[0]), "at once, though there is work left"
    records.purge(limit=31)
    assert (len(records), records.purging) == (0, False)


def test_bytes_are_bounded_too() -> None:
    records = ClusterRecords(limit_bytes=100_000)
    for key in range(20):
        records.offer(*floor(key, at(2000.0 - key), body=bytes(10_000)))
    compacted(records)
    assert sum(len(signed.body) for signed in records.dump()) < 100_000


def test_of_records_that_are_no_floors_the_oldest_go() -> None:
    records = ClusterRecords()
    big = bytes(16_000)
    for number in range(1100):
        record = ClusterRecord(1, 77, digest_of(number), number + 1, 1, SIGNER.peer_id, 0, big)
        records.offer(record, sign_cluster_record(record, SIGNER))
    assert len(records) < 1100
    assert records.get(77, 0, digest_of(0)) is None
    assert records.get(77, 0, digest_of(1099)) is not None
    assert not records.horizon


def test_heads_of_a_name_are_found_as_long_as_they_are_kept() -> None:
    records = ClusterRecords()

    def publish(number: int, clock: int) -> None:
        signer = FakeSigner(peer_id_of(number))
        body = encode_body(HeadBody("n", "model", bytes(16), clock, 2, 3, 4))
        name = checkpoint_digest("n", "model", signer.peer_id)
        kind = int(ClusterRecordKind.CHECKPOINT_HEAD)
        record = ClusterRecord(1, kind, name, clock, 1, signer.peer_id, 0, body)
        assert records.offer(record, sign_cluster_record(record, signer))

    def known() -> set[tuple[bytes, int]]:
        return {(each.signer, each.clock) for each in records.heads_of("n", "model")}

    publish(1, 5)
    publish(2, 6)
    publish(1, 7)
    assert known() == {(peer_id_of(1), 7), (peer_id_of(2), 6)}
    assert records.heads_of("n", "other") == records.heads_of("m", "model") == []
    for number in range(1100):  # what is dropped to make room is found no more
        big = bytes(16_000)
        record = ClusterRecord(1, 77, digest_of(number), number + 7, 1, SIGNER.peer_id, 0, big)
        records.offer(record, sign_cluster_record(record, SIGNER))
    assert known() == set()


# --- namespaces ------------------------------------------------------------------------------


def in_namespace(space: int) -> bytes:
    return encode_body(FloorBody(digest_of(space)))


def test_a_namespace_s_floor_takes_the_place_of_its_keys_floors() -> None:
    records = ClusterRecords()
    below = [floor(key, 5 + key, body=in_namespace(1000)) for key in range(3)]
    above = floor(10, 20, body=in_namespace(1000))
    elsewhere = floor(11, 5, body=in_namespace(1001))
    unnamed = floor(12, 5)
    for pair in (*below, above, elsewhere, unnamed):
        records.offer(*pair)
    whole = floor(1000, 10, scope=1)
    records.offer(*whole)
    while records.purging:
        records.purge()
    kept = {signed.body for signed in records.dump()}
    assert kept == {signed.body for _, signed in (above, elsewhere, unnamed, whole)}
    assert not records.offer(*below[0])
    assert not records.wants(floor(77, 10, body=in_namespace(1000))[0])
    assert records.offer(*floor(77, 11, body=in_namespace(1000)))
    fresh = ClusterRecords()
    for pair in (whole, *below, above, elsewhere, unnamed, floor(77, 11, body=in_namespace(1000))):
        fresh.offer(*pair)
    assert state(fresh) == state(records)


def test_a_floor_with_a_body_that_means_nothing_here_forbids_all_the_same() -> None:
    records = ClusterRecords()
    assert records.offer(*floor(1, 5, body=b"\xff\xff"))
    assert records.forbids(digest_of(1), None, Version(5, 0))


# --- epochs ----------------------------------------------------------------------------------


def test_epochs_agree_about_the_past_while_new_floors_come_in() -> None:
    one, other = ClusterRecords(), ClusterRecords()
    old = [floor(key, at(300.0 + key)) for key in range(5)]
    for records in (one, other):
        for pair in old:
            records.offer(*pair)
        records.roll_epochs(NOW)
    end, epoch_hash = one.settled_epoch(NOW)
    assert at(66.0) <= end <= at(32.0)
    assert other.agrees(end, epoch_hash)
    one.offer(*floor(0, at(1.0)))  # takes the place of one that counts
    one.offer(*floor(50, at(1.0)))
    assert other.agrees(*one.settled_epoch(NOW))
    assert one.agrees(*other.settled_epoch(NOW))
    one.offer(*floor(51, at(200.0)))  # was late
    assert not other.agrees(*one.settled_epoch(NOW))
    other.offer(*floor(51, at(200.0)))
    assert other.agrees(*one.settled_epoch(NOW))


def test_epochs_begun_later_are_the_same() -> None:
    one, other = ClusterRecords(), ClusterRecords()
    pairs = [floor(key, at(3.0 * key)) for key in range(100)]
    one.roll_epochs(NOW)
    for pair in pairs:
        one.offer(*pair)
    for pair in pairs:
        other.offer(*pair)
    other.roll_epochs(NOW)
    assert other.agrees(*one.settled_epoch(NOW))
    for records in (one, other):
        records.raise_horizon({ME: at(150.0)})
    one.purge()
    other.purge(20)
    assert not other.agrees(*one.settled_epoch(NOW))
    other.purge()
    assert other.agrees(*one.settled_epoch(NOW))


def test_an_epoch_that_is_not_kept_agrees_with_nothing() -> None:
    records = ClusterRecords()
    assert records.settled_epoch(NOW) == (0, 0)
    records.roll_epochs(NOW)
    end, epoch_hash = records.settled_epoch(NOW)
    assert records.agrees(end, epoch_hash)
    assert not records.agrees(end + 1, epoch_hash)
    records.roll_epochs(NOW + clock_at(200.0))
    assert not records.agrees(end, epoch_hash)


# --- persisting ------------------------------------------------------------------------------


def test_what_was_saved_comes_back_and_is_no_rumour() -> None:
    records = ClusterRecords()
    pairs = [floor(key, 5) for key in range(4)]
    for pair in pairs:
        records.offer(*pair)
    loaded = ClusterRecords()
    loaded.load(pairs, {ME: 3})
    assert state(loaded) == state(records)
    assert not loaded.has_rumors
    assert not loaded.offer(*floor(77, 3))
    assert loaded.compacted_before == 3


events = st.lists(
    st.one_of(
        st.tuples(st.just("floor"), st.integers(0, 9), st.integers(1, 30), st.integers(0, 2)),
        st.tuples(st.just("flush"), st.integers(1000, 1001), st.integers(1, 30), st.just(0)),
        st.tuples(st.just("horizon"), st.integers(0, 1), st.integers(1, 30), st.just(0)),
    ),
    max_size=40,
)


@given(events, st.randoms(use_true_random=False))
def test_floors_flushes_and_horizons_commute(
    given_events: list[tuple[str, int, int, int]], rng: Random
) -> None:
    """Whatever order peers hear of things in, and however often: they keep the same in the end, as long as
    what one has dropped by a writer's horizon is dropped by all."""
    signers = [SIGNER, FakeSigner(peer_id_of(2))]

    def happen(records: ClusterRecords, event: tuple[str, int, int, int]) -> None:
        kind, subject, clock, space = event
        signer = signers[(subject + clock) % 2]
        if kind == "horizon":
            records.raise_horizon({member_of(signers[subject].peer_id): clock << 26})
        elif kind == "flush":
            records.offer(*floor(subject, clock << 26, scope=1, signer=signer))
        else:
            body = in_namespace(999 + space) if space else b""
            records.offer(*floor(subject, clock << 26, body=body, signer=signer))

    one, other = ClusterRecords(), ClusterRecords()
    shuffled = list(given_events) * 2
    rng.shuffle(shuffled)
    for records, order in ((one, given_events), (other, shuffled)):
        for event in order:
            happen(records, event)
            if rng.random() < 0.5:
                records.purge(rng.randint(1, 5))
    for first, second in ((one, other), (other, one), (one, other)):
        for signed in first.dump():
            second.offer(read_cluster_record(signed), signed)
        for records in (one, other):
            records.purge()
            records.purge()
    assert state(one) == state(other)
    assert one.floor_count == len(one)
