"""Clients' reads of a peer's table of locations, against the peer's answers; walks over the views that moved."""

import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from p2pstore.client.known_holders import KnownRecord, MappedLocations, _known_record
from p2pstore.errors import ProtocolError, ProtocolMismatch
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_set import FloorSet
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.locations import directory as directory_module
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_slots import ApartKeys, PublishedLocations
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OwnLog, Position
from p2pstore.gossip.locations.snapshots import CatchUp, check_snapshot
from p2pstore.gossip.locations.views import Applied, DirectoryConfig, Outcome
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import LOCATION_BYTES, LogHead, Member
from p2pstore.location_table import (
    APART_COUNTERS,
    FEW_DIGESTS,
    MAX_COUNTED_SLOTS,
    Word,
    apart_counter,
    block_count,
    floor_clock,
    format_table,
    table_bytes,
)
from p2pstore.memory.mapped.mapped_memory import (
    SharedMemory,
    create_table_memory,
    map_read_only,
    map_table,
)
from p2pstore.objects import Version
from simulation.signer import peer_id_of
from tests.unit.gossip_network import digest_of, location, operations_after, run_at
from tests.unit.test_cluster_records import floor

KEYS = [digest_of(number) for number in range(60)]
CONFIG = DirectoryConfig(max_records=20_000)
NEWEST = 1_000


def published_table() -> tuple[bytearray, PublishedLocations]:
    blocks = block_count(CONFIG.max_rows)
    memory = bytearray(table_bytes(blocks))
    return memory, PublishedLocations(format_table(memory, blocks, 7))


class Cluster:
    """A directory that is told random things of random members, and a client of its peer."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        memory, self.published = published_table()
        self.directory = Directory(CONFIG, published=self.published)
        self.logs: dict[int, OwnLog] = {}
        self.forbidden = 0
        self.floors: dict[bytes, int] = {}
        self.client = MappedLocations(memory)
        self.published.vouch(time.monotonic(), NEWEST)

    def step(self) -> None:
        self.rng.choice(
            [
                *[self.put] * 6,
                *(self.remove, self.read, self.read, self.push, self.deny, self.snapshot),
                *(self.die, self.come_back, self.forget, self.drop, self.expire, self.forbid),
                *[self.forbid_one] * 2,
            ]
        )()

    def log(self) -> tuple[int, OwnLog]:
        member = self.rng.randrange(8)
        if member not in self.logs:
            self.logs[member] = OwnLog(1)
            self.directory.observe_head(member, 1, LogHead())
        return member, self.logs[member]

    def put(self) -> None:
        member, log = self.log()
        clock = NEWEST + 1 if self.rng.random() < 0.03 else self.rng.randrange(1, 20)
        record = location(self.rng.randrange(60), clock)
        if self.rng.random() < 0.5:  # the member wrote it
            record = replace(record, version=Version(clock, member, 77))
        log.add(record)

    def remove(self) -> None:
        member, log = self.log()
        number, clock = self.rng.randrange(60), self.rng.randrange(1, 20)
        for writer in (member, location(number, clock).version.writer):
            log.remove_many([(digest_of(number), Version(clock, writer))])

    def read(self) -> None:
        member, log = self.log()
        known = self.directory.position(member)[1]
        operations = operations_after(log, known, LOCATION_BYTES * self.rng.randrange(1, 200))
        if operations:
            self.directory.apply(member, log.incarnation, run_at(known + 1, operations))

    def push(self) -> None:
        member, log = self.log()
        operation = operations_after(log, log.sequence - 1) if log.sequence else None
        if operation:
            self.directory.heard(member, log.incarnation, [log.sequence], operation, 0.0)

    def deny(self) -> None:
        member, log = self.log()
        position = self.directory.position(member)[1] + self.rng.randrange(-3, 3)
        self.directory.mark_stale(member, self.rng.choice(KEYS), log.incarnation, position)

    def snapshot(self) -> None:
        member, log = self.log()
        head = log.head
        self.directory.install_snapshot(
            member, log.incarnation, head.sequence, head.set_hash, check_snapshot(log.snapshot())
        )
        while self.directory.work_pending:
            self.directory.work(16)

    def die(self) -> None:
        self.directory.hide(self.log()[0])

    def come_back(self) -> None:
        self.directory.show(self.log()[0])

    def forget(self) -> None:
        self.directory.forget(self.log()[0])

    def drop(self) -> None:
        member, log = self.log()
        self.directory.drop(member)
        self.logs[member] = OwnLog(log.incarnation + 1)
        self.directory.observe_head(member, log.incarnation + 1, LogHead())

    def expire(self) -> None:
        self.directory.expire_words(100.0 * self.rng.randrange(2))

    def forbid(self) -> None:
        if self.rng.random() < 0.1:
            self.forbidden = max(self.forbidden, self.rng.randrange(10))
            self.published.forbid_up_to(self.forbidden)

    def forbid_one(self) -> None:
        digest, clock = self.rng.choice(KEYS), self.rng.randrange(10)
        self.floors[digest] = max(self.floors.get(digest, 0), clock)
        self.published.forbid_key_up_to(digest, clock)

    def is_held(self, digest: bytes) -> bool:
        believed = range(max(self.forbidden, self.floors.get(digest, 0)) + 1, NEWEST + 1)
        return bool(self.directory.held({digest}, lambda _: believed))

    def check(self) -> int:
        """Whatever the client says is what the peer would say. How often it said something."""
        known = {digest for digest in KEYS if self.is_held(digest)}
        answers = [self.client.contains(digest) for digest in KEYS]
        for digest, answer in zip(KEYS, answers, strict=True):
            assert answer is None or answer == (digest in known)
        held, asked = self.client.contains_many(b"".join(KEYS))
        for answer, is_held, is_asked in zip(answers, held.tolist(), asked.tolist(), strict=True):
            assert (is_held, is_asked) == (answer is True, answer is None)
        only = [
            each[0].member if len(each) == 1 and each[0].is_by_member else 0
            for each in map(self._held, KEYS)
        ]
        assert len(KEYS) > FEW_DIGESTS
        assert self.client.only_members(b"".join(KEYS)) == only
        for start in range(0, len(KEYS), FEW_DIGESTS):
            few = slice(start, start + FEW_DIGESTS)
            assert self.client.only_members(b"".join(KEYS[few])) == only[few]
        for digest, held_by in zip(KEYS, map(self._held, KEYS), strict=True):
            record = self.client.only_record(digest)
            if len(held_by) != 1 or not held_by[0].is_by_member:
                assert record is None
            else:
                assert record is not None
                assert _known_record(*record) == held_by[0]
        return sum(answer is not None for answer in answers)

    def _held(self, digest: bytes) -> list[KnownRecord]:
        return self.client.holders(digest) or []


@pytest.mark.parametrize("seed", range(12))
def test_a_client_says_what_the_peer_would_or_asks(seed: int) -> None:
    cluster = Cluster(seed)
    said = 0
    for number in range(400):
        cluster.step()
        if number % 8 == 7:
            said += cluster.check()
    assert said > 400  # of 3,000


def known_table() -> tuple[PublishedLocations, Directory, MappedLocations]:
    """A table in which one member holds the first ten keys."""
    memory, published = published_table()
    directory, log = Directory(CONFIG, published=published), OwnLog(1)
    for number in range(10):
        log.add(location(number, 5))
    directory.observe_head(1, 1, log.head)
    directory.apply(1, 1, run_at(1, operations_after(log, 0)))
    published.vouch(time.monotonic(), NEWEST)
    return published, directory, MappedLocations(memory)


def test_what_is_plain_needs_no_question() -> None:
    _, directory, client = known_table()
    assert [client.contains(digest) for digest in KEYS[8:12]] == [True, True, False, False]
    directory.hide(1)
    assert client.contains(KEYS[0]) is False
    directory.show(1)
    assert client.contains(KEYS[0]) is True


def asks(client: MappedLocations, digest: bytes) -> bool:
    held, asked = client.contains_many(digest)
    assert (client.contains(digest) is None) == asked.tolist()[0]
    assert not (held & asked).any()
    return bool(asked[0])


@pytest.mark.parametrize(
    "unclear",
    [
        lambda published, _: published.withdraw(),
        lambda published, _: published.vouch(time.monotonic() - 2.5, NEWEST),  # it may be stopped
        lambda published, _: published.begin(),
        lambda published, _: published.forbid_up_to(5),
        lambda published, _: published.vouch(time.monotonic(), 4),
        lambda _, directory: directory.mark_stale(1, KEYS[0], 1, 10),
        lambda _, directory: directory.heard(2, 1, [9], location(0).encode(), 0.0),
    ],
)
def test_what_is_not_plain_is_asked(unclear: Callable[[PublishedLocations, Directory], None]) -> None:
    published, directory, client = known_table()
    assert not asks(client, KEYS[0])
    unclear(published, directory)
    assert asks(client, KEYS[0])


def test_links_that_lead_anywhere_end() -> None:
    published, _, client = known_table()
    table = published.table
    for link in range(64):
        table.link[table.heads + link] = 1
    for row in range(1, 40):
        table.link[row] = row % 39 + 1
    assert asks(client, KEYS[59])
    assert client.holders(KEYS[59]) is None
    table.link[1] = 0xFFFFFFFF
    assert asks(client, KEYS[59])


def test_keys_that_very_many_hold_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstore.client.known_holders._MAX_ROWS", 5)
    published, directory, client = known_table()
    assert client.contains(KEYS[0])
    for member in range(2, 12):
        log = OwnLog(1)
        log.add(location(0, 5))
        directory.observe_head(member, 1, log.head)
        directory.apply(member, 1, run_at(1, operations_after(log, 0)))
    assert asks(client, KEYS[0])
    same_chain = [
        digest
        for digest in KEYS[10:]
        if published.table.head_of(digest) == published.table.head_of(KEYS[0])
    ]
    assert all(asks(client, digest) for digest in same_chain)
    assert client.holders(KEYS[0]) is None


def test_a_mapping_may_be_longer_than_the_table() -> None:
    memory, published = published_table()
    published.vouch(time.monotonic(), NEWEST)
    client = MappedLocations(memory + bytes(60_000))  # pages of 64 KiB
    assert client.contains(KEYS[0]) is False


def test_an_old_count_of_changes_voids_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    published, _, client = known_table()
    find, reads = client._table.find_few, 0

    def changed_meanwhile(digest: bytes, most_rows: int) -> list[tuple[int, int, bytes]]:
        nonlocal reads
        reads += 1
        if reads < 3:
            published.begin()
            published.end()
            return []
        return find(digest, most_rows)

    monkeypatch.setattr(client._table, "find_few", changed_meanwhile)
    assert client.contains(KEYS[0]) is True
    assert reads == 3


def test_the_limit_of_rows_is_each_digests_own() -> None:
    """Else what many hold would keep other keys of a batch from being found."""
    _, _, client = known_table()
    table, together = client._table, b"".join(KEYS)

    def is_enough(limit: int) -> bool:
        try:
            for digest in KEYS:
                table.find_few(digest, limit)
        except IndexError:
            return False
        return True

    longest = next(filter(is_enough, range(100)))
    assert 0 < longest < len(KEYS)
    assert table.find_few(together, longest) == table.find_few(together)
    with pytest.raises(IndexError):
        table.find_few(together, longest - 1)


def test_what_does_not_look_like_a_table_is_refused() -> None:
    memory, _ = published_table()
    with pytest.raises(ProtocolError):
        MappedLocations(memory[:-1])
    with pytest.raises(ProtocolError):
        MappedLocations(bytearray(100))
    memory[8 * Word.MAGIC] ^= 1
    with pytest.raises(ProtocolMismatch):  # of another version
        MappedLocations(memory)


def test_a_counter_that_is_full_stays_so() -> None:
    counters = memoryview(bytearray(APART_COUNTERS))
    apart = ApartKeys(counters)
    for _ in range(300):
        apart.add(KEYS[0])
    for _ in range(300):
        apart.remove(KEYS[0])
    assert counters[apart_counter(KEYS[0])] == 255
    apart.add(KEYS[1])
    apart.remove(KEYS[1])
    assert counters[apart_counter(KEYS[1])] == 0


def test_of_slots_beyond_the_table_clients_ask() -> None:
    published, directory, client = known_table()
    published.count(MAX_COUNTED_SLOTS, 1, True)
    view = directory._views[1]
    rows = directory.index._slots.rows(view.slot, 0, 1)
    published.table.row_owner[int(rows[0])] = MAX_COUNTED_SLOTS
    digest = bytes(published.table.whole[rows[0]])[:16]
    assert asks(client, digest)


def test_floors_are_seen_at_once_and_newer_versions_count() -> None:
    published, directory, client = known_table()
    records = ClusterRecords(FloorSet(published=published))
    assert client.contains(KEYS[0]) is True
    record, signed = floor(0, 5)
    assert records.offer(record, signed)
    assert asks(client, KEYS[0])
    assert client.holders(KEYS[0]) is None
    assert client.only_members(KEYS[0]) == [0]
    assert client.contains(KEYS[1]) is True
    newer = location(0, 6).encode()
    directory.apply(1, 1, run_at(directory.position(1)[1] + 1, newer))
    assert not asks(client, KEYS[0])
    assert client.contains(KEYS[0]) is True
    assert client.only_members(KEYS[0]) == [1]
    older, signed = floor(0, 4)
    assert records.offer(older, signed)
    assert client.contains(KEYS[0]) is True
    assert published.table.floors[floor_clock(KEYS[0])] == 5


@pytest.mark.parametrize("name", [b"", b"a", b"ab", bytes(17)])
def test_floors_with_names_that_are_no_digests_do_no_harm(name: bytes) -> None:
    _, published = published_table()
    records = ClusterRecords(FloorSet(published=published))
    for clock in (5, 6):
        record, signed = floor(0, clock)
        assert records.offer(replace(record, name=name), signed)
    assert records.floors.count == 2
    assert not any(published.table.apart)
    assert not published.table.floor_clocks.any()


# --- between processes ------------------------------------------------------------------------

_CHANGER = """
import sys, time
from random import Random
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.location_slots import PublishedLocations
from p2pstore.gossip.records import LogHead
from p2pstore.location_table import block_count, format_table, table_bytes
from p2pstore.memory.mapped.mapped_memory import SharedMemory
from tests.unit.gossip_network import digest_of, location, operations_after, run_at
import mmap, os

config = DirectoryConfig(max_records=20_000)
descriptor = int(sys.argv[1])
blocks = block_count(config.max_rows)
published = PublishedLocations(format_table(mmap.mmap(descriptor, 0), blocks, 7))
directory, rng = Directory(config, published=published), Random(1)
for member, numbers in ((1, range(0, 400)), (2, range(0))):
    log = OwnLog(1)
    for number in numbers:
        log.add(location(number, 5))
    directory.observe_head(member, 1, LogHead())
    directory.apply(member, 1, run_at(1, operations_after(log, 0)))
published.vouch(time.monotonic(), 1000)
print("ready", flush=True)
sequence, end = 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    count = rng.choice([1, 5, 200])
    run = b""
    for _ in range(count):
        packed = location(rng.randrange(1000, 3000), 5).encode()
        run += packed[:-1] + bytes([packed[-1] | (0x80 if rng.random() < 0.5 else 0)])
    directory.apply(2, 1, run_at(sequence + 1, run))
    sequence += count
    published.vouch(time.monotonic(), 1000)
    time.sleep(0.0002)
"""


def test_a_table_that_another_process_changes_is_read_right() -> None:
    blocks = block_count(CONFIG.max_rows)
    descriptor = os.memfd_create("table", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, table_bytes(blocks))
        changer = subprocess.Popen(
            [sys.executable, "-c", _CHANGER, str(descriptor), "2"],
            pass_fds=[descriptor],
            stdout=subprocess.PIPE,
        )
        with changer:
            assert changer.stdout is not None
            assert changer.stdout.readline() == b"ready\n"
            client = MappedLocations(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
            steady = [digest_of(number) for number in range(400)]
            never = [digest_of(number) for number in range(400, 800)]
            packed = b"".join(steady + never)
            answered = 0
            while changer.poll() is None:
                wrong = [digest for digest in steady if client.contains(digest) is False]
                wrong += [digest for digest in never if client.contains(digest)]
                held, asked = client.contains_many(packed)
                assert wrong == []
                assert (held | asked)[:400].all()
                assert not held[400:].any()
                answered += int(np.count_nonzero(~asked))
            assert changer.returncode == 0
            assert answered > 0
    finally:
        os.close(descriptor)


@pytest.fixture
def table_memory() -> Iterator[SharedMemory]:
    memory = create_table_memory(1 << 20, "test")
    yield memory
    memory.close()


def test_only_its_maker_can_write_a_table(table_memory: SharedMemory) -> None:
    passed = table_memory.read_only_descriptor()
    reopened = os.open(f"/proc/self/fd/{passed}", os.O_RDWR)
    try:
        for descriptor in (passed, reopened, table_memory.descriptor):
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 0)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(reopened, b"x", 0)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(reopened, 0)
        view, table = map_read_only(passed, 1 << 20), map_table(passed, 1 << 20)
        table_memory.view[:3] = b"abc"  # the maker goes on
        assert bytes(view[:3]) == table[:3] == b"abc"
        with pytest.raises(TypeError):
            view[0] = 1
    finally:
        os.close(passed)
        os.close(reopened)


def resident_bytes() -> int:
    return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[1])


def test_a_table_costs_what_is_written_to_it() -> None:
    before = resident_bytes()
    memory = create_table_memory(1 << 36, "test")  # 64 GiB: more than there is
    memory.view[1 << 35] = 1
    after = resident_bytes()
    memory.close()
    assert after - before < 4 << 20


MEMBERS = range(1, 5)

Standing = tuple[Position, LogHead, bool]


def standings(directory: Directory) -> dict[Member, Standing]:
    return {
        member: (directory.position(member), directory.head(member), directory.diverged(member))
        for member in MEMBERS
    }


class Story:
    """Random things happen to a small directory of four logs, one a call of `step`."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.directory = Directory(DirectoryConfig(max_records=40))
        self.logs = {member: OwnLog(1) for member in MEMBERS}
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        member = self.rng.choice(MEMBERS)
        log = self.logs[member]
        what = self.rng.choices(
            (
                *("write", "head", "relay", "lie", "snapshot"),
                *("work", "restart", "forget", "drop", "boast"),
            ),
            (6, 6, 8, 2, 3, 4, 1, 1, 1, 1),
        )[0]
        match what:
            case "write":
                for _ in range(self.rng.randrange(1, 12)):
                    log.add(location(self.rng.randrange(25), log.sequence + 1))
            case "head":
                self.directory.observe_head(member, log.incarnation, log.head)
            case "relay":
                self._relay(member, lies=False)
            case "lie":
                self._relay(member, lies=True)
            case "snapshot":
                self._snapshot(member)
            case "work":
                self.seen["replaced"] += self.directory.work(3)
            case "restart":
                self.logs[member] = OwnLog(log.incarnation + 1)
            case "forget":
                self.directory.forget(member)
            case "drop":
                self.directory.drop(member)
            case "boast":
                boast = LogHead(log.sequence + 1, MAX_OWN_RECORDS + 1, 1)
                self.directory.observe_head(member, log.incarnation, boast)
                self.seen["boast"] += member in self.directory.shares.refused

    def _relay(self, member: Member, *, lies: bool) -> None:
        incarnation, known = self.directory.position(member)
        operations = bytes(LOCATION_BYTES * 3)
        if not lies:
            count = self.rng.randrange(1, 9)
            operations = operations_after(self.logs[member], known, count * LOCATION_BYTES)
            incarnation = self.logs[member].incarnation
        applied: Applied = self.directory.apply(member, incarnation, run_at(known + 1, operations))
        self.seen[applied.outcome.value] += 1

    def _snapshot(self, member: Member) -> None:
        log = self.logs[member]
        head, snapshot = log.head, check_snapshot(log.snapshot())
        self.seen["staged"] += self.directory.install_snapshot(
            member, log.incarnation, head.sequence, head.set_hash, snapshot
        )


def test_every_change_is_noted_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "STEP_RECORDS", 4)
    seen: Counter[str] = Counter()
    for seed in range(20):
        story = Story(seed)
        directory, before = story.directory, standings(story.directory)
        for _ in range(200):
            story.step()
            after = standings(directory)
            changed = {member for member in MEMBERS if after[member] != before[member]}
            assert changed <= directory.take_moved()
            assert directory.take_moved() == set()
            assert directory.unsettled == {
                member
                for member, (position, head, diverged) in after.items()
                if diverged or position[1] != head.sequence
            }
            before = after
        seen += story.seen
    for outcome in Outcome:
        assert seen[outcome.value] > 5, f"the story has hardly any {outcome}"
    assert min(seen["staged"], seen["replaced"], seen["boast"]) > 5


class CountingDirectory(Directory):
    """Counts how often it is asked where a view stands."""

    looks = 0

    def position(self, member: Member) -> Position:
        self.looks += 1
        return super().position(member)


def test_views_that_are_where_their_heads_are_cost_nothing_to_watch() -> None:
    log, directory = OwnLog(1), CountingDirectory()
    log.add(location(1))
    operations = operations_after(log, 0, LOCATION_BYTES)
    owners = [MemberState(peer_id_of(number), number, Status.ALIVE, 1, 0.0) for number in range(1, 301)]
    for owner in owners:
        directory.observe_head(owner.member, 1, log.head)
        directory.apply(owner.member, 1, run_at(1, operations))
    log.add(location(2))
    directory.observe_head(7, 1, log.head)
    catch_up = CatchUp(directory, 1000, 1.0)
    directory.looks = 0
    assert catch_up.due(owners, set(), 0.0) == []
    assert 0 < directory.looks < 5
    assert catch_up.due(owners, set(), 1.0) == [owners[6]]
