"""Floors and other records of the whole cluster, versions by digest, records from the future, rumors."""

import tracemalloc
from functools import reduce
from itertools import islice
from operator import xor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.gossip.checkpoint_records import HeadBody, checkpoint_digest
from p2pstore.gossip.exchange.delta_checks import MAX_FLOORS, FutureRecords
from p2pstore.gossip.exchange.rumors import Rumors
from p2pstore.gossip.floors import floor_set as key_versions
from p2pstore.gossip.floors.cluster_records import ClusterRecords, cell_of
from p2pstore.gossip.floors.floor_set import FloorSet, KeyVersions
from p2pstore.gossip.records import (
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    SignedRecord,
    floor_of_keys,
    member_of,
    read_cluster_record,
    sign_cluster_record,
)
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.objects import clock_from_unix_seconds as clock_at
from p2pstore.wire import encode_body
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.gossip_network import digest_of

SIGNER = SimulatedSigner(peer_id_of(1))


def floor(
    key: int,
    clock: int,
    writer: int = 1,
    scope: int = 0,
    body: bytes = b"",
    signer: SimulatedSigner = SIGNER,
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
        assert one.floors.floor_for(digest_of(key)) == max(versions, default=ZERO_VERSION)


def test_of_equal_versions_of_other_records_the_body_decides() -> None:
    def other(body: bytes) -> tuple[ClusterRecord, SignedRecord]:
        record = ClusterRecord(1, 77, digest_of(1), 5, 1, SIGNER.peer_id, 0, body)
        return record, sign_cluster_record(record, SIGNER)

    one, another = ClusterRecords(), ClusterRecords()
    low, high = other(b"a"), other(b"b")
    assert one.offer(*low)
    assert one.offer(*high)
    assert another.offer(*high)
    assert not another.offer(*low)
    assert state(one) == state(another)
    assert len(one) == 1


def test_a_floor_forbids_what_it_covers() -> None:
    records = ClusterRecords()
    key, space = digest_of(1), digest_of(2)
    assert not records.floors.forbids(key, space, Version(1, 1))
    records.offer(*floor(1, 5))
    records.offer(*floor(2, 8, scope=1))
    assert records.floors.forbids(key, None, Version(5, 1, 99))
    assert not records.floors.forbids(key, None, Version(5, 2))
    assert records.floors.forbids(key, space, Version(8, 1))
    assert not records.floors.forbids(key, space, Version(9, 0))
    assert not records.floors.forbids(space, None, Version(1, 1))  # a namespace is not a key
    assert records.floors.floor_for(key, space) == Version(8, 1)


def test_only_what_is_new_is_new() -> None:
    records = ClusterRecords()
    assert records.offer(*floor(1, 5))
    assert not records.offer(*floor(1, 5))
    assert records.offer(*floor(1, 4)), "its peer has said so: whoever has it not is another set"
    assert records.floors.floor_for(digest_of(1)).clock == 5
    assert records.offer(*floor(1, 6))
    assert records.floors.floor_for(digest_of(1)).clock == 6
    assert len(records) == records.floors.count == 3


def test_one_record_forbids_many_keys() -> None:
    records = ClusterRecords()
    record = floor_of_keys([digest_of(key) for key in range(64)], b"n" * 16, Version(9, 1), PEER)
    assert records.offer(record, sign_cluster_record(record, SIGNER))
    assert (len(records), records.floors.count) == (1, 64)
    assert all(
        records.floors.forbids(digest_of(key), None, Version(9, 1)) is (key < 64) for key in range(70)
    )
    records.offer(*floor(7, 20))
    records.floors.raise_horizon({ME: 9})
    purged(records)
    assert (len(records), records.floors.count) == (1, 1)
    assert records.floors.floor_for(digest_of(7)).clock == 20
    assert records.floors.floor_for(digest_of(8)) == ZERO_VERSION
    assert records.floors.crowding < 1e-4


FLOOR_KEYS = 16_000


@pytest.mark.parametrize(("size", "most_bytes"), [(1, 720), (8, 180), (64, 80)])
def test_keys_of_a_floor_are_known_to_cost_what_they_do(size: int, most_bytes: int) -> None:
    """The counted bytes are within a third of the allocated ones, for records of one key, eight and 64, a second or
    more apart from each other. Of the bytes of a single record, its signature and body are 160."""
    pairs = []
    for number in range(0, FLOOR_KEYS, size):
        keys = [digest_of(key) for key in range(number, number + size)]
        record = floor_of_keys(keys, b"n" * 16, Version(number + 1 << 27, 1), PEER)
        pairs.append((record.clock, sign_cluster_record(record, SIGNER)))
    tracemalloc.start()
    try:
        records = ClusterRecords(FloorSet(limit=1 << 40, limit_bytes=1 << 30))
        for _, signed in pairs:
            again = SignedRecord(bytes(bytearray(signed.body)), bytes(bytearray(signed.signature)))
            records.offer(read_cluster_record(again), again)
        records.load([])  # rumours end
        used = tracemalloc.get_traced_memory()[0] / FLOOR_KEYS
    finally:
        tracemalloc.stop()
    estimate = records.floors.crowding * (1 << 30) / FLOOR_KEYS
    assert 0.66 < used / estimate < 1.5, (used, estimate)
    assert used < most_bytes


def test_cells_hold_all_records_and_add_up_to_their_buckets() -> None:
    records = ClusterRecords()
    pairs = [floor(key, key + 1) for key in range(200)]
    for pair in pairs:
        records.offer(*pair)
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
PEER = SIGNER.peer_id
ME = member_of(PEER)
ALL_SEEN = {ME: NOW}


def at(seconds: float) -> int:
    """A clock `seconds` before the test's present."""
    return NOW - clock_at(seconds)


def purged(records: ClusterRecords) -> None:
    while records.floors.purging:
        records.purge()


def compacted(records: ClusterRecords, agreed: int = NOW, seen: dict[int, int] = ALL_SEEN) -> None:
    records.floors.raise_horizon(records.floors.compaction(agreed, seen, NOW))
    purged(records)


def test_above_half_of_the_limit_the_oldest_floors_go_and_do_not_come_back() -> None:
    records = ClusterRecords(FloorSet(limit=20))
    pairs = [floor(key, at(2000.0 - 2 * key)) for key in range(11)]
    for pair in pairs:
        records.offer(*pair)
    compacted(records)
    assert len(records) == 8
    assert records.floors.horizon == {ME: records.floors.compacted_before}
    assert pairs[2][0].clock <= records.floors.compacted_before < pairs[3][0].clock
    assert records.floors.floor_for(digest_of(2)) == ZERO_VERSION
    assert records.floors.floor_for(digest_of(3)) == pairs[3][0].version
    assert not records.offer(*pairs[0])
    assert records.offer(*floor(0, at(1000.0)))
    fresh = ClusterRecords()
    for pair in [*pairs[3:], floor(0, at(1000.0))]:
        fresh.offer(*pair)
    assert state(fresh) == state(records)


def test_at_half_of_the_limit_nothing_goes() -> None:
    records = ClusterRecords(FloorSet(limit=20))
    for key in range(10):
        records.offer(*floor(key, at(2000.0)))
    compacted(records)
    assert len(records) == 10
    assert not records.floors.horizon


def test_young_floors_stay_until_there_are_many() -> None:
    records = ClusterRecords(FloorSet(limit=20, kept_seconds=600.0))
    for key in range(14):
        records.offer(*floor(key, at(500.0 - 2 * key)))
    compacted(records)
    assert len(records) == 14
    records.offer(*floor(30, at(400.0)))
    compacted(records)
    assert len(records) == 8


def test_many_floors_of_a_writer_that_is_gone_do_not_keep_those_of_others() -> None:
    """For a while no peer can confirm the last floors of a dead writer: they are older than all that can go."""
    dead = SimulatedSigner(peer_id_of(2))
    records = ClusterRecords(FloorSet(limit=6_000))
    for key in range(2_500):
        records.offer(*floor(key, at(2000.0) + key, signer=dead))
    for key in range(2_500, 5_000):
        records.offer(*floor(key, at(1900.0 - key / 10)))
    compacted(records)
    assert records.floors.horizon[ME] > at(1900.0)
    assert records.floors.count < 5_000


def test_floors_that_others_may_not_have_stay_however_many_there_are() -> None:
    records = ClusterRecords(FloorSet(limit=20))
    for key in range(40):
        records.offer(*floor(key, at(2000.0 - 2 * key)))
    compacted(records, agreed=at(1990.0))
    assert len(records) == 35
    assert records.floors.compacted_before < at(1990.0)
    compacted(records, seen={ME: at(1980.0)})
    assert len(records) == 29, "nor those that this peer may not have"
    compacted(records)
    assert len(records) == 8


def test_far_above_the_limit_floors_of_others_wait() -> None:
    records = ClusterRecords(FloorSet(limit=20))
    for key in range(41):
        assert records.offer(*floor(key, at(2000.0 - 2 * key)))
    waiting = floor(99, at(10.0))
    assert not records.wants(*waiting)
    assert not records.offer(*waiting)
    assert records.floors_refused == 2
    compacted(records)
    assert records.offer(*waiting)


def test_the_floors_of_a_writer_that_was_cut_off_stay() -> None:
    other = SimulatedSigner(peer_id_of(2))
    records = ClusterRecords(FloorSet(limit=20))
    late = floor(100, at(5000.0), signer=other)
    records.offer(*late)
    for key in range(21):
        records.offer(*floor(key, at(2000.0 - 2 * key)))
    compacted(records, seen={ME: NOW, member_of(other.peer_id): at(6000.0)})
    assert records.floors.floor_for(digest_of(100)) == late[0].version
    assert records.floors.compacted_before > late[0].clock
    again = ClusterRecords(FloorSet(limit=20))
    again.floors.raise_horizon(records.floors.horizon)
    assert again.offer(*late), "it is not below the horizon of its writer"
    purged(again)
    assert len(again) == 1
    again.floors.raise_horizon({member_of(other.peer_id): at(4000.0)})
    purged(again)
    assert len(again) == 0


def test_horizons_meet_whatever_the_order() -> None:
    """Two peers of which one compacted agree as soon as the other has its horizon."""
    pairs = [floor(key, at(2000.0 - key)) for key in range(50)]
    one, other = ClusterRecords(FloorSet(limit=60)), ClusterRecords(FloorSet(limit=1000))
    for pair in pairs:
        one.offer(*pair)
        other.offer(*pair)
    compacted(one)
    assert one.hash != other.hash
    other.floors.raise_horizon(one.floors.horizon)
    assert other.floors.horizon == one.floors.horizon
    while other.floors.purging:
        other.purge()
    assert state(one) == state(other)
    assert one.floors.horizon_hash == other.floors.horizon_hash != 0
    for signed in other.dump():
        assert signed in one.dump()


def test_purging_takes_steps() -> None:
    records = ClusterRecords()
    for key in range(50):
        records.offer(*floor(key, at(200.0 - 2 * key)))
    records.floors.raise_horizon({ME: at(50.0)})
    records.purge(limit_keys=20)
    assert len(records) == 30
    assert records.floors.purging
    assert not records.wants(*floor(99, at(60.0))), "at once, though there is work left"
    records.purge(limit_keys=100)
    assert (len(records), records.floors.purging) == (0, False)


def test_bytes_are_bounded_too() -> None:
    records = ClusterRecords(FloorSet(limit_bytes=100_000))
    for key in range(20):
        records.offer(*floor(key, at(2000.0 - 2 * key), body=bytes(10_000)))
    compacted(records)
    assert sum(len(signed.body) for signed in records.dump()) < 50_000


def test_of_records_that_are_no_floors_the_oldest_go() -> None:
    records = ClusterRecords()
    big = bytes(16_000)
    for number in range(1100):
        record = ClusterRecord(1, 77, digest_of(number), number + 1, 1, SIGNER.peer_id, 0, big)
        records.offer(record, sign_cluster_record(record, SIGNER))
    assert len(records) < 1100
    assert records.get(77, 0, digest_of(0)) is None
    assert records.get(77, 0, digest_of(1099)) is not None
    assert not records.floors.horizon


def test_heads_of_a_name_are_found_as_long_as_they_are_kept() -> None:
    records = ClusterRecords()

    def publish(number: int, clock: int) -> None:
        signer = SimulatedSigner(peer_id_of(number))
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
    for number in range(1100):  # a record dropped to make room is found no more
        big = bytes(16_000)
        record = ClusterRecord(1, 77, digest_of(number), number + 7, 1, SIGNER.peer_id, 0, big)
        records.offer(record, sign_cluster_record(record, SIGNER))
    assert known() == set()


# --- namespaces ------------------------------------------------------------------------------


def in_namespace(space: int) -> bytes:
    return encode_body(FloorBody(digest_of(space)))


def test_a_floor_with_a_body_that_means_nothing_here_forbids_all_the_same() -> None:
    records = ClusterRecords()
    assert records.offer(*floor(1, 5, body=b"\xff\xff"))
    assert records.floors.forbids(digest_of(1), None, Version(5, 0))


# --- what two peers have known ---------------------------------------------------------------


def test_peers_agree_about_the_past_while_new_floors_come_in() -> None:
    one, other = ClusterRecords(), ClusterRecords()
    end = NOW >> 26 << 26
    for records, order in ((one, range(100)), (other, reversed(range(100)))):
        for key in order:
            records.offer(*floor(key, at(300.0 - 3 * key + 3)))
    one.offer(*floor(0, NOW))  # of a key that has one
    assert one.floors.hash_below(end) == other.floors.hash_below(end)
    assert one.floors.hash_below(end + (1 << 26)) != other.floors.hash_below(end + (1 << 26))
    one.offer(*floor(51, at(200.0)))  # was late
    assert one.floors.hash_below(end) != other.floors.hash_below(end)
    other.offer(*floor(51, at(200.0)))
    assert one.floors.hash_below(end) == other.floors.hash_below(end)
    for records in (one, other):
        records.floors.raise_horizon({ME: at(150.0)})
    purged(one)
    assert one.floors.hash_below(end) != other.floors.hash_below(end)
    purged(other)
    assert one.floors.hash_below(end) == other.floors.hash_below(end)


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
    assert loaded.floors.compacted_before == 3


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
    signers = [SIGNER, SimulatedSigner(peer_id_of(2))]

    def happen(records: ClusterRecords, event: tuple[str, int, int, int]) -> None:
        kind, subject, clock, space = event
        signer = signers[(subject + clock) % 2]
        if kind == "horizon":
            records.floors.raise_horizon({member_of(signers[subject].peer_id): clock << 26})
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
    assert one.floors.count == len(one)


def record(
    name: bytes, clock: int, kind: int = ClusterRecordKind.FLOOR, scope: int = 0
) -> ClusterRecord:
    return ClusterRecord(1, int(kind), name, clock, 1, b"", scope)


def test_floors_are_known_by_their_names() -> None:
    future = FutureRecords()
    future.note_record(record(b"key", 50, scope=SCOPE_KEY))
    future.note_record(record(b"key", 40, scope=SCOPE_KEY))
    future.note_record(record(b"space", 60, scope=SCOPE_NAMESPACE))
    future.note_record(record(b"head", 70, ClusterRecordKind.CHECKPOINT_HEAD))
    assert future.newest == 70
    assert future.has_floor_of(b"key", b"", 49)
    assert not future.has_floor_of(b"key", b"", 50), "the clock has reached it"
    assert not future.has_floor_of(b"head", b"", 0)
    assert future.has_floor_of(b"other", b"space", 59)
    assert not future.has_floor_of(b"space", b"key", 0)


def test_of_too_many_floors_every_key_may_be_one() -> None:
    future = FutureRecords()
    for number in range(MAX_FLOORS + 1):
        future.note_record(record(b"%d" % number, 100 + number))
    assert future.has_floor_of(b"another", b"", 100)
    assert not future.has_floor_of(b"another", b"", 100 + MAX_FLOORS)


def take(rumors: Rumors[str], count: int, times: int) -> list[str]:
    taken = list(islice(rumors.least_sent(), count))
    for name in taken:
        rumors.sent(name, times)
    return taken


def test_the_least_sent_go_first_and_each_so_many_times() -> None:
    rumors: Rumors[str] = Rumors()
    for name in "abc":
        rumors.add(name)
    assert take(rumors, 2, 2) == ["a", "b"]
    rumors.add("d")
    assert take(rumors, 3, 2) == ["c", "d", "a"]
    assert take(rumors, 9, 2) == ["b", "c", "d"]
    assert len(rumors) == 0
    assert take(rumors, 9, 2) == []


def test_a_rumour_that_is_told_anew_starts_from_the_beginning_and_one_may_end_early() -> None:
    rumors: Rumors[str] = Rumors()
    for name in "ab":
        rumors.add(name)
    take(rumors, 2, 3)
    take(rumors, 1, 3)
    rumors.add("a")
    rumors.discard("b")
    rumors.discard("never")
    assert [take(rumors, 5, 3) for _ in range(4)] == [["a"], ["a"], ["a"], []]
    rumors.add("c")
    rumors.clear()
    assert not list(rumors.least_sent())


SIMILAR = st.binary(min_size=16, max_size=16) | st.sampled_from(
    [bytes(16), bytes(15) + b"\1", b"\1" * 16, b"\1" + bytes(15), b"\1\0" * 8, b"\0\1" * 8]
)
"""Found within each other's entries as well."""
VERSIONS = st.builds(Version, st.sampled_from([0, 1, 2, 257, 1 << 63]), st.integers(0, 257), st.just(0))


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_versions, "PLACES", 2)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(SIMILAR, max_size=4), VERSIONS), max_size=30),
    st.lists(SIMILAR),
)
@settings(deadline=None)
def test_as_a_dictionary(changes: list[tuple[bool, list[bytes], Version]], asked: list[bytes]) -> None:
    versions, model = KeyVersions(), dict[bytes, Version]()
    for raises, digests, version in changes:
        if raises:
            versions.raise_all(digests, version)
            model |= {digest: max(version, model.get(digest, version)) for digest in digests}
        else:
            versions.drop_all(digests, version)
            model = {d: v for d, v in model.items() if v != version or d not in digests}
        for digest in [*model, *digests, *asked]:
            assert versions.get(digest) == model.get(digest, ZERO_VERSION)


def test_what_is_no_digest_has_no_version() -> None:
    versions, version = KeyVersions(), Version(5, 1)
    versions.raise_all([b"", bytes(15), bytes(16), bytes(17)], version)
    assert [versions.get(bytes(size)) for size in (0, 1, 15, 17)] == [ZERO_VERSION] * 4
    assert versions.get(bytes(16)) == version


@pytest.mark.parametrize("number", [-1, 1 << 16, 1 << 64, 1 << 70])
def test_a_version_that_no_object_has_comes_and_goes(number: int) -> None:
    versions = KeyVersions()
    for version in (Version(7, number), Version(number, 7)):
        versions.raise_all([bytes(16)], version)
        assert versions.get(bytes(16)) != ZERO_VERSION
        versions.drop_all([bytes(16)], version)
        assert versions.get(bytes(16)) is ZERO_VERSION
