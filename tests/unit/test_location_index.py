"""Many sets of locations in one table, against sets said as plainly as can be."""

from collections import Counter
from collections.abc import Iterable
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex, digests_of, hash_of
from p2pstore.gossip.locations.location_slots import RowChains
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.records import LOCATION_BYTES
from p2pstore.location_table import Rows, Words, block_count, format_table, table_bytes
from tests.unit.gossip_network import digest_of, location
from tests.unit.location_set import LocationSet

REMOVED = 0x80


def random_records(rng: Random, count: int) -> bytes:
    return b"".join(rng.randbytes(LOCATION_BYTES - 1) + b"\0" for _ in range(count))


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + LOCATION_BYTES] for i in range(0, len(packed), LOCATION_BYTES)]


def withdrawn(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] | REMOVED])


class Model:
    """An index beside plain sets that are told the same."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.index = LocationIndex(20_000, self.rng.getrandbits(128))
        self.sets: dict[int, LocationSet] = {}
        # Some keys have the same beginning; there are few of them, or enough for several splits.
        self.keys = [
            bytes(8) + self.rng.randbytes(8) if self.rng.random() < 0.2 else self.rng.randbytes(16)
            for _ in range(self.rng.choice([4, 200, 2_000]))
        ]

    def open(self) -> int:
        slot = self.index.open()
        assert slot not in self.sets
        self.sets[slot] = LocationSet()
        return slot

    def any_slot(self) -> int:
        return self.rng.choice(list(self.sets)) if self.sets else self.open()

    def discard(self) -> None:
        slot = self.any_slot()
        del self.sets[slot]
        self.index.discard(slot)

    def load(self, count: int) -> None:
        slot = self.open()
        keys = self.rng.sample(self.keys, min(count, len(self.keys)))
        records = b"".join(key + self.rng.randbytes(LOCATION_BYTES - 17) + b"\0" for key in keys)
        self.index.load(slot, records)
        self.sets[slot].apply(records)

    def apply(self, count: int) -> None:
        slot = self.any_slot()
        adds = self.rng.choice([0.1, 0.5, 0.9])
        operations = b"".join(self.operation(self.sets[slot], adds) for _ in range(count))
        self.index.apply(slot, operations)
        self.sets[slot].apply(operations)

    def operation(self, held: LocationSet, adds: float) -> bytes:
        rng, key = self.rng, self.rng.choice(self.keys)
        if rng.random() < adds:
            return key + bytes([rng.randrange(2)]) * (LOCATION_BYTES - 17) + bytes([rng.randrange(3)])
        record = held.records.get(key)
        if record is None or rng.random() < 0.2:  # a version that is not held
            record = key + bytes([rng.randrange(2)]) * (LOCATION_BYTES - 17) + b"\0"
        return withdrawn(record)

    def check(self) -> None:
        index = self.index
        for slot, model in self.sets.items():
            packed = split(index.pack(slot))
            assert sorted(packed) == sorted(model.records.values())
            assert (index.count(slot), index.hash(slot)) == (len(model), model.hash)
            middle = len(packed) // 2
            positions = index.digests(slot, 0, middle) + index.digests(slot, middle, len(packed))
            assert positions == [record[:16] for record in packed]
        assert index.record_count == sum(map(len, self.sets.values()))
        keys = self.rng.sample(self.keys, min(40, len(self.keys)))
        expected = {
            key: sorted((slot, m.records[key]) for slot, m in self.sets.items() if key in m.records)
            for key in keys
        }
        assert {key: sorted(index.table.find(key)) for key in keys} == expected
        assert self.find_many(keys) == expected
        for slot, model in self.sets.items():
            assert [index.get(slot, key) for key in keys] == [model.records.get(k) for k in keys]

    def find_many(self, keys: list[bytes]) -> dict[bytes, list[tuple[int, bytes]]]:
        matches = self.index.table.find_many(b"".join(keys))
        found: dict[bytes, list[tuple[int, bytes]]] = {key: [] for key in keys}
        clocks = self.index.table.clocks(matches.rows).tolist()
        for query, slot, clock in zip(
            matches.queries.tolist(), matches.slots.tolist(), clocks, strict=True
        ):
            record = self.index.get(slot, keys[query])
            assert record is not None
            assert int.from_bytes(record[16:24], "little") == clock
            found[keys[query]].append((slot, record))
        return {key: sorted(each) for key, each in found.items()}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from([1, 3, 20, 63, 64, 100, 400])),
        st.tuples(st.just("load"), st.sampled_from([1, 10, 40, 500])),
        st.tuples(st.just("discard"), st.just(0)),
        st.tuples(st.just("sweep"), st.sampled_from([1, 50, 5_000])),
    ),
    max_size=30,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 30), steps)
def test_it_holds_what_plain_sets_hold(seed: int, steps: Iterable[tuple[str, int]]) -> None:
    model = Model(seed)
    for step, count in steps:
        if step == "apply":
            model.apply(count)
        elif step == "load":
            model.load(count)
        elif step == "discard":
            model.discard()
        else:
            model.index.sweep(count)
    model.check()


def test_many_rounds_of_everything() -> None:
    model = Model(3)
    for _ in range(300):
        step = model.rng.randrange(10)
        if step == 0:
            model.discard()
        elif step == 1:
            model.load(model.rng.randrange(1_500))
        elif step == 2:
            model.index.sweep(1_000)
        else:
            model.apply(model.rng.choice([1, 10, 100, 300]))
    model.check()


def test_the_order_of_operations_on_one_key_counts_in_a_long_run() -> None:
    index, rng = LocationIndex(1_000), Random(1)
    record = location(1).encode()
    others = random_records(rng, 200)
    for last, kept in ((record, True), (withdrawn(record), False)):
        slot = index.open()
        run = others + (record + withdrawn(record)) * 100 + last
        index.apply(slot, run)
        assert (index.get(slot, digest_of(1)) == record) is kept
        assert index.count(slot) == 200 + kept


def test_a_key_that_is_put_again_and_again_is_carried_out_once() -> None:
    index, rng = LocationIndex(1_000), Random(1)
    slot, others = index.open(), random_records(rng, 100)
    puts = [location(1, clock).encode() for clock in range(1, 3_000)]
    index._apply_one = None  # type: ignore[assignment, method-assign] # not even one by one
    index.apply(slot, others + b"".join(puts))
    assert index.get(slot, digest_of(1)) == puts[-1]
    assert index.hash(slot) == hash_of([*split(others), puts[-1]])


def test_nobody_can_choose_digests_that_share_a_bucket() -> None:
    multiples = [first << 56 | second << 120 for first in range(64) for second in range(64)]
    chosen = [number.to_bytes(16, "little") for number in multiples]
    for salt in range(5):
        blocks = block_count(len(chosen) + 1)
        table = format_table(bytearray(table_bytes(blocks)), blocks, Random(salt).getrandbits(128))
        rows = np.arange(1, len(chosen) + 1)
        for row, digest in enumerate(chosen, 1):
            table.write(row, digest)
        RowChains(table).add_many(rows)
        heads = [table.head_of(digest) for digest in chosen]
        # About one row a bucket: of random digests, some 6 share the fullest.
        assert max(Counter(heads).values()) < 20
        mixed = table.mix(table.first[rows], table.second[rows])
        assert table.heads_of(mixed).tolist() == heads


def test_many_rows_at_once_find_as_many_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows for one chain, one goes in a round: many for the chains of a small table would take minutes."""
    put, most = RowChains._put, []

    def watch(chains: RowChains, rows: Rows, mixed: Words) -> None:
        most.append(int(np.unique(chains._table.heads_of(mixed), return_counts=True)[1].max()))
        put(chains, rows, mixed)

    monkeypatch.setattr(RowChains, "_put", watch)
    count = 20_000
    blocks, rng = block_count(count + 1), Random(7)
    table = format_table(bytearray(table_bytes(blocks)), blocks, rng.getrandbits(128))
    for row in range(1, count + 1):
        table.write(row, rng.randbytes(16))
    RowChains(table).add_many(np.arange(1, count + 1))
    assert max(most) < 20


def test_a_discarded_slot_is_not_found_before_it_is_swept() -> None:
    index, rng = LocationIndex(10_000), Random(2)
    small, large = random_records(rng, 3), random_records(rng, 3_000)
    slots = []
    for records in (small, large):
        slots.append(index.open())
        index.apply(slots[-1], records)
    for slot in slots:
        index.discard(slot)
    everything = digests_of(small + large)
    assert [digest for digest in everything if index.table.find(digest)] == []
    assert index.table.find_many(b"".join(everything)).rows.size == 0
    assert index.record_count == 0
    again = index.open()
    assert again in slots  # a number is used again, and nothing of the old set comes back with it
    index.apply(again, location(1).encode())
    assert [digest for digest in everything if index.table.find(digest)] == []
    steps = 1
    while index.sweep(500):
        steps += 1
    assert 5 <= steps <= 7
    assert index.table.find(digest_of(1)) == [(again, location(1).encode())]


def test_room_comes_back() -> None:
    index, rng = LocationIndex(4_000), Random(3)
    for _ in range(20):
        assert index.has_room(3_900)
        slot = index.open()
        index.load(slot, random_records(rng, 3_900))
        assert not index.has_room(200)
        index.discard(slot)
        while index.sweep(500):
            pass
    with pytest.raises(MemoryError, match="full"):
        index.load(index.open(), random_records(rng, 5_000))


def test_a_set_that_grows_and_shrinks_takes_no_more_room() -> None:
    index, rng = LocationIndex(2_000), Random(7)
    slot = index.open()
    for count in (3, 40, 100, 17, 33) * 40:
        records = split(random_records(rng, count))
        for start in range(0, count, 9):
            index.apply(slot, b"".join(records[start : start + 9]))
        assert sorted(split(index.pack(slot))) == sorted(records)
        rng.shuffle(records)
        for record in records:
            index.apply(slot, withdrawn(record))
        assert (index.count(slot), index.hash(slot), index.pack(slot)) == (0, 0, b"")


def test_very_many_slots_may_hold_next_to_nothing() -> None:
    index, rng = LocationIndex(4_000), Random(4)
    slots = {index.open(): random_records(rng, 1 + number % 2) for number in range(2_000)}
    for _ in range(3):  # freed rows are used again
        for slot, records in slots.items():
            index.apply(slot, records)  # a block of 32 rows for each would be ten times what there is
        assert all(sorted(split(index.pack(s))) == sorted(split(r)) for s, r in slots.items())
        for slot, records in slots.items():
            index.apply(slot, b"".join(map(withdrawn, split(records))))
        assert index.record_count == 0


def test_a_long_chain_of_one_key_in_many_slots() -> None:
    index = LocationIndex(20_000)
    slots = [index.open() for _ in range(100)]
    run = b"".join(location(number).encode() for number in range(100))
    for slot in slots:
        index.apply(slot, run)
    assert sorted(slot for slot, _ in index.table.find(digest_of(7))) == slots
    for slot in slots[::2]:
        index.discard(slot)
    while index.sweep(300):
        pass
    assert sorted(slot for slot, _ in index.table.find(digest_of(7))) == slots[1::2]


def test_what_is_no_digest_is_nowhere() -> None:
    index = LocationIndex(100)
    slot = index.open()
    index.apply(slot, location(1).encode())
    assert index.table.find(digest_of(1)[:15]) == []
    assert index.get(slot, digest_of(1) + b"x") is None
    assert index.table.find_many(b"").rows.size == 0


@pytest.mark.parametrize("others", [0, 500])
def test_a_snapshot_is_checked_whole(others: int) -> None:
    rng = Random(5)
    packed, record = random_records(rng, others), location(1).encode()
    twin = record[:8] + rng.randbytes(LOCATION_BYTES - 9) + b"\0"  # half a digest in common
    checked = check_snapshot(packed + record + twin)
    assert (checked.count, checked.set_hash) == (others + 2, LocationSet(packed + record + twin).hash)
    newer = record[:20] + b"\7" + record[21:]
    for wrong in (record + packed + newer, record + packed + twin[:-1], packed + withdrawn(record)):
        with pytest.raises(ProtocolError):
            check_snapshot(wrong)
