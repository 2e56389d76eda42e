"""The index of cold objects, against dictionaries."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pstore.errors import CapacityExceeded
from p2pstore.objects import PART_BYTES, Version, key_digest, namespace_digest
from p2pstore.ssd_tier import index_walks
from p2pstore.ssd_tier import index_walks as digest_walk
from p2pstore.ssd_tier.index import MAX_HITS, NOT_FOUND, ColdIndex, DigestSlots
from p2pstore.ssd_tier.log_layout import ColdFacts, RecordPlace, part_bytes, part_count, record_bytes
from tests.present import present
from tests.unit.cold_objects import facts_of

KEYS = ("a", "ab", "abc", "b", "ü", "z\0", "z")
NAMESPACES = ("n", "other")
LENGTHS = (0, 10, PART_BYTES, 2 * PART_BYTES + 1)
SEGMENTS = 4
ROOM = 40

FACTS = {
    (namespace, key, clock): facts_of(key, LENGTHS[(at + clock) % 4], clock, namespace)
    for namespace in NAMESPACES
    for at, key in enumerate(KEYS)
    for clock in (1, 2, 3)
}


class IndexMachine(RuleBasedStateMachine):
    """`alive` is what the index must have: for each digest its facts, and its parts by number."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ColdIndex(SEGMENTS, ROOM, salt=random.Random(1).getrandbits(64))
        self.alive: dict[bytes, tuple[ColdFacts, dict[int, RecordPlace]]] = {}
        self.hits: dict[bytes, int] = {}
        self.generations = [1] * SEGMENTS
        self.numbers = [0] * SEGMENTS
        self.sequences = count(1)
        self.walks: list[tuple[Iterator[list[bytes]], set[bytes], list[bytes]]] = []
        """Walks over digests: what each has still to give, what it is to give in all, and what it gave."""

    def places(self) -> dict[RecordPlace, tuple[ColdFacts, int]]:
        return {
            place: (facts, part) for facts, parts in self.alive.values() for part, place in parts.items()
        }

    def is_visible(self, digest: bytes) -> bool:
        if digest not in self.alive:
            return False
        facts, parts = self.alive[digest]
        return len(parts) == part_count(facts.length)

    @rule(which=st.sampled_from(sorted(FACTS)), part=st.integers(0, 2), segment=st.integers(0, 3))
    def add_one(self, which: tuple[str, str, int], part: int, segment: int) -> None:
        self.add(which, part, segment)

    def add(self, which: tuple[str, str, int], part: int, segment: int) -> None:
        facts = FACTS[which]
        part %= part_count(facts.length)
        stored = part_bytes(facts.length, part)
        place = RecordPlace(
            segment,
            self.generations[segment],
            2 + 17_000 * self.numbers[segment],
            self.numbers[segment],
            next(self.sequences),
        )
        if len(self.places()) == ROOM:
            with pytest.raises(CapacityExceeded):
                self.index.add(place, facts, part, stored)
            return
        self.numbers[segment] += 1
        superseded = self.index.add(place, facts, part, stored)
        known, parts = self.alive.get(facts.digest, (facts, {}))
        if known.version > facts.version:
            assert superseded == (place,)
            return
        if known.version < facts.version:
            assert set(superseded) == set(parts.values())
            del self.alive[facts.digest]
            parts = {}
        else:
            assert superseded == tuple(parts[part] for part in {part} & set(parts))
        self.alive[facts.digest] = (facts, {**parts, part: place})
        self.hits[facts.digest] = 0

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 20))
    def add_many(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.add(rng.choice(sorted(FACTS)), rng.randrange(3), rng.randrange(4))

    @rule(which=st.sampled_from(sorted(FACTS)))
    def touch(self, which: tuple[str, str, int]) -> None:
        digest = FACTS[which].digest
        expected = self.hits.get(digest, 0) if digest in self.alive else 0
        assert self.index.touch(digest) == expected
        self.hits[digest] = expected + 1

    @rule(which=st.sampled_from(sorted(FACTS)))
    def drop(self, which: tuple[str, str, int]) -> None:
        digest = FACTS[which].digest
        _, parts = self.alive.pop(digest, (None, {}))
        assert set(self.index.drop(digest)) == set(parts.values())

    @rule(segment=st.integers(0, 3))
    def drop_segment(self, segment: int) -> None:
        gone = {
            digest
            for digest, (_, parts) in self.alive.items()
            if any(place.segment == segment for place in parts.values())
        }
        visible = {digest for digest in gone if self.is_visible(digest)}
        assert {digest for digest in gone if self.index.find(digest) is not None} == visible
        elsewhere = [
            place
            for record in self.index.records_of(segment)
            for place in self.index.drop(record.digest)
            if place.segment != segment
        ]
        others = {place for digest in gone for place in self.alive.pop(digest)[1].values()}
        assert set(elsewhere) == {place for place in others if place.segment != segment}
        self.generations[segment] += 1
        self.numbers[segment] = 0

    @rule(
        namespace=st.sampled_from((*NAMESPACES, "none")),
        prefix=st.sampled_from(("", "a", "ab", "z", "ü", "y")),
        after=st.sampled_from(("", "a", "aa", "ab", "z", "~")),
        limit=st.integers(1, 8),
    )
    def page(self, namespace: str, prefix: str, after: str, limit: int) -> None:
        keys = sorted(
            facts.key
            for digest, (facts, _) in self.alive.items()
            if facts.namespace == namespace
            and facts.key.startswith(prefix)
            and facts.key > after
            and self.is_visible(digest)
        )
        entries, more = self.index.page(namespace, prefix, after, limit)
        assert [entry.key for entry in entries] == keys[:limit]
        assert more == (len(keys) > limit)

    @rule(namespace=st.sampled_from((*NAMESPACES, "none")))
    def prepare_page(self, namespace: str) -> None:
        self.index.prepare_page(namespace)

    @rule(namespace=st.sampled_from((*NAMESPACES, "none", None)))
    def begin_walk(self, namespace: str | None) -> None:
        wanted = {
            digest
            for digest, (facts, parts) in self.alive.items()
            if 0 in parts and namespace in (None, facts.namespace)
        }
        of = None if namespace is None else namespace_digest(namespace)
        self.walks.append((self.index.digests(of), wanted, []))

    @precondition(lambda self: self.walks)
    @rule(steps=st.integers(1, 4), which=st.integers(0, 9))
    def walk(self, steps: int, which: int) -> None:
        walk, wanted, found = self.walks[which % len(self.walks)]
        for _ in range(steps):
            some = next(walk, None)
            if some is None:
                assert sorted(found) == sorted(wanted)
                self.walks.remove((walk, wanted, found))
                return
            assert len(some) <= 2
            found += some

    @rule(segment=st.integers(0, 3))
    def footer(self, segment: int) -> None:
        footer = self.index.rows.footer(segment)
        mine = {place: each for place, each in self.places().items() if place.segment == segment}
        assert footer.rows["number"].tolist() == sorted(place.number for place in mine)
        by_number = {place.number: (place, *each) for place, each in mine.items()}
        for row in footer.rows:
            place, facts, part = by_number[int(row["number"])]
            key = footer.keys[row["key_offset"] : row["key_offset"] + row["key_bytes"]].decode()
            assert (key, footer.namespaces[row["namespace"]]) == (facts.key, facts.namespace)
            assert row["digest"].tobytes() == facts.digest
            assert (row["part"], row["page"], row["sequence"]) == (part, place.page, place.sequence)
        records = list(self.index.records_of(segment))
        assert {record.place: record.part for record in records} == {
            place: part for place, (_, part) in mine.items()
        }
        assert [record.place.number for record in records] == sorted(by_number)

    @invariant()
    def all_is_found(self) -> None:
        for facts in FACTS.values():
            entry = self.index.find(facts.digest)
            assert (entry is not None) == self.is_visible(facts.digest)
            if entry is not None:
                known, parts = self.alive[facts.digest]
                assert entry.version == known.version
                assert (entry.key, entry.namespace) == (known.key, known.namespace)
                assert entry.places == tuple(parts[part] for part in sorted(parts))
                assert entry.hits == self.hits[facts.digest]
                assert entry.disk_bytes == self.size(known, list(parts))

    @invariant()
    def totals_are_right(self) -> None:
        alive = self.places()
        assert self.index.rows.records == len(alive)
        assert self.index.objects == sum(
            len(parts) == part_count(facts.length) for facts, parts in self.alive.values()
        )
        assert self.index.rows.live_bytes == sum(
            self.size(facts, [part]) for facts, part in alive.values()
        )
        for segment in range(SEGMENTS):
            mine = [each for place, each in alive.items() if place.segment == segment]
            assert len(list(self.index.records_of(segment))) == len(mine)
            assert self.index.segment_live_bytes(segment) == sum(
                self.size(facts, [part]) for facts, part in mine
            )

    @staticmethod
    def size(facts: ColdFacts, parts: list[int]) -> int:
        return sum(record_bytes(part_bytes(facts.length, part)) for part in parts)


@pytest.fixture(autouse=True)
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_walk, "WALKED_ROWS", 4)
    monkeypatch.setattr(digest_walk, "WALKED_DIGESTS", 2)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def place(number: int, segment: int = 0, generation: int = 1) -> RecordPlace:
    return RecordPlace(segment, generation, 2 + 2 * number, number, 100 + number)


def test_all_parts_of_an_object_are_kept_as_firmly() -> None:
    index = ColdIndex(SEGMENTS, ROOM, salt=1)
    facts = replace(facts_of("k", 2 * PART_BYTES + 1, 5, "n"), dtype="uint8")
    for part in range(3):
        place = RecordPlace(0, 1, 2 + 17_000 * part, part, part + 1)
        index.add(place, facts, part, part_bytes(facts.length, part))
    older = Version(4, facts.version.writer, facts.version.root)
    assert not index.set_care(facts.digest, older, pin=2, replicas=7, soft=True)
    assert index.set_care(facts.digest, facts.version, pin=2, replicas=7, soft=True)
    entry = present(index.find(facts.digest))
    assert (entry.pin, entry.replicas, entry.soft, entry.length) == (2, 7, True, facts.length)
    assert entry.described
    rows = index.rows.footer(0).rows
    assert rows["replicas"].tolist() == [7] * 3
    assert rows["flags"].tolist() == [2 | 4 | 8] * 3
    assert rows["part"].tolist() == [0, 1, 2]


def test_an_entry_has_all_facts_but_sums_and_tensor() -> None:
    index = ColdIndex(1, 10, salt=1)
    version = Version(2**64 - 1, 65_535, 2**64 - 2)
    facts = ColdFacts(
        key_digest("k" * 1024), version, 4096, "n" * 255, "k" * 1024, bytes(8), 2**50, 70_000, 2, True
    )
    assert index.add(place(3), facts, 0, 100) == ()
    entry = present(index.find(facts.digest))
    assert (entry.version, entry.length, entry.key) == (version, 4096, "k" * 1024)
    assert (entry.namespace, entry.expires_unix_ms) == ("n" * 255, 2**50)
    assert (entry.replicas, entry.pin, entry.soft) == (65_535, 2, True)
    assert (entry.places, entry.disk_bytes) == ((place(3),), 8192)


def test_hits_stop_at_their_highest_number() -> None:
    index = ColdIndex(1, 10, salt=1)
    facts = facts_of("k", 1)
    index.add(place(0), facts, 0, 1)
    for _ in range(MAX_HITS + 5):
        index.touch(facts.digest)
    assert index.touch(facts.digest) == MAX_HITS


def test_a_segment_has_records_of_one_generation() -> None:
    index = ColdIndex(2, 10, salt=1)
    index.add(place(0), facts_of("a", 1), 0, 1)
    with pytest.raises(ValueError, match="another generation"):
        index.add(place(0, generation=2), facts_of("b", 1), 0, 1)
    assert index.find(facts_of("b", 1).digest) is None
    index.drop(facts_of("a", 1).digest)
    assert not index.rows._texts._texts
    index.add(place(0, generation=2), facts_of("b", 1), 0, 1)
    entry = present(index.find(facts_of("b", 1).digest))
    assert entry.places[0].generation == 2


def test_records_dropped_while_a_segment_is_gone_through_are_left_out() -> None:
    index = ColdIndex(2, 10, salt=1)
    for number in range(4):
        index.add(place(number), facts_of(f"{number}", 1), 0, 1)
    records = index.records_of(0)
    assert next(records).place == place(0)
    index.drop(facts_of("1", 1).digest)
    index.drop(facts_of("2", 1).digest)
    index.add(place(7, segment=1), facts_of("7", 1), 0, 1)  # in the row of one of these
    index.add(place(8), facts_of("8", 1), 0, 1)  # in that of the other
    assert [record.place for record in records] == [place(3)]


def test_text_of_dropped_keys_is_cut_out() -> None:
    """Keys of 1,000 bytes in one segment: never more than twice the text of those that are there."""
    index = ColdIndex(1, 4000, salt=1)
    kept = {}
    for number in range(3000):
        facts = facts_of(f"{number:01000}", 1)
        index.add(RecordPlace(0, 1, 2 + 2 * number, number, number + 1), facts, 0, 1)
        if number % 10:
            index.drop(facts.digest)
        else:
            kept[facts.digest] = facts.key
    text = index.rows._texts._texts[0]
    assert len(text) < 2 * 1000 * len(kept) + 66_000
    for digest, key in kept.items():
        entry = present(index.find(digest))
        assert entry.key == key
    assert len(index.rows.footer(0).keys) == 1000 * len(kept)


def test_namespaces_without_records_are_forgotten() -> None:
    index = ColdIndex(1, 10, salt=1)
    for number in range(100):
        facts = facts_of("k", 1, namespace=f"{number}")
        index.add(place(number), facts, 0, 1)
        assert [*index.digests(namespace_digest(f"{number}"))] == [[facts.digest]]
        assert index.page(f"{number}", "", "", 5)[0] != []
        index.drop(facts.digest)
        assert not any(index.digests(namespace_digest(f"{number}")))
    assert len(index.rows.names._names) == 1
    assert not index._orders._orders


def test_a_listing_follows_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than are put in one by one, and with rows used again."""
    monkeypatch.setattr(index_walks, "_STALE_BESIDE", 10)
    monkeypatch.setattr(index_walks, "RUN_KEYS", 16)
    monkeypatch.setattr(index_walks, "_SEARCHED_ROWS", 20)
    index, rng = ColdIndex(1, 500, salt=1), random.Random(3)
    here: set[str] = set()
    numbers = iter(range(100_000))
    for _ in range(60):
        for _ in range(rng.choice((1, 3, 100))):
            key = f"{rng.randrange(300):03}"
            if key in here:
                index.drop(key_digest(key))
                here.remove(key)
            else:
                number = next(numbers)
                where = RecordPlace(0, 1, 2, number % 30_000, number + 1)
                index.add(where, facts_of(key, 1), 0, 1)
                here.add(key)
        listed, after = [], ""
        while True:
            entries, more = index.page("default", "", after, 37)
            listed += [entry.key for entry in entries]
            if not more:
                break
            after = listed[-1]
        assert listed == sorted(here)
        for order in index._orders._orders.values():  # what went is left out before long
            assert sum(map(len, order._runs)) <= (len(here) + 10) * 8 / 7 + 1


def test_a_listing_is_prepared_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_walks, "RUN_KEYS", 16)
    monkeypatch.setattr(index_walks, "_SEARCHED_ROWS", 8)
    index = ColdIndex(1, 500, salt=1)
    keys = [f"{number * 37 % 101:03}" for number in range(101)]
    for number, key in enumerate(keys):
        index.add(place(number), facts_of(key, 1), 0, 1)
    steps = 1
    while not index.prepare_page("default"):
        steps += 1
    assert steps == 13
    [order] = index._orders._orders.values()
    assert all(8 <= len(run) <= 16 for run in order._runs[:-1])
    index.add(place(200), facts_of("0505", 1), 0, 1)
    entries, more = index.page("default", "05", "", 3)
    assert ([entry.key for entry in entries], more) == (["050", "0505", "051"], True)
    assert len(order._runs) == 13
    assert len(order._runs[-1]) == 6
    assert index.prepare_page("none")


def test_slots_hold_many_digests_that_begin_alike() -> None:
    """A client may find keys whose digests agree in many bits: the salt spreads them."""
    rng = np.random.default_rng(1)
    digests = rng.integers(0, 2**63, (4000, 2), dtype=np.uint64)
    digests[:, 0] &= np.uint64(0xFFFF_FFFF_FF00_0000)
    memory = memoryview(bytearray(digests.tobytes()))
    slots = DigestSlots(4000, memory, 16, salt=random.Random(2).getrandbits(64))
    rows = np.arange(4000, dtype=np.uint32)
    slots.insert_all(digests[:2000], rows[:2000])
    for row in range(2000, 4000):
        slots.insert(digests[row].tobytes(), row)
    for row in range(0, 4000, 3):
        slots.remove(digests[row].tobytes(), row)
    for row in range(4000):
        expected = NOT_FOUND if row % 3 == 0 else row
        assert slots.find(digests[row].tobytes()) == expected
    with pytest.raises(KeyError):
        slots.remove(digests[0].tobytes(), 0)
    runs = np.diff(np.flatnonzero(slots._numbers == 0)).max()
    assert runs < 100, "they gather in one place"
