"""Views of other members' logs: contiguous or whole, checked against the owner's head."""

import sys
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations import views as watched_keys
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import REMOVED, OwnLog
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.locations.views import STEP_RECORDS, Applied, DirectoryConfig, Outcome
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord, LogHead, partition_of
from p2pstore.objects import Version
from simulation.gossip_data import view_snapshot
from tests.unit.gossip_network import digest_of, location, operations_after, run_at

A, B = 111, 222


def log_of(count: int, incarnation: int = 1) -> OwnLog:
    log = OwnLog(incarnation)
    for number in range(count):
        log.add(location(number))
    return log


def feed(directory: Directory, log: OwnLog, first: int = 1, member: int = A) -> Applied:
    operations = operations_after(log, first - 1)
    return directory.apply(member, log.incarnation, run_at(first, operations))


def reading(log: OwnLog, member: int = A, **config: float) -> Directory:
    """A directory that follows the log and has read all of it."""
    directory = Directory(DirectoryConfig(**config))  # type: ignore[arg-type]
    directory.observe_head(member, log.incarnation, log.head)
    if log.sequence:
        assert feed(directory, log, member=member).outcome is Outcome.APPLIED
    return directory


def install(directory: Directory, log: OwnLog, member: int = A) -> bool:
    head, snapshot = log.head, check_snapshot(log.snapshot())
    return directory.install_snapshot(member, log.incarnation, head.sequence, head.set_hash, snapshot)


def held(directory: Directory, number: int) -> list[int]:
    return [found.member for found in directory.holders(digest_of(number))]


def records_in(packed: bytes) -> set[bytes]:
    return {packed[start : start + LOCATION_BYTES] for start in range(0, len(packed), LOCATION_BYTES)}


def known_set(directory: Directory) -> tuple[int, int, int, set[bytes]]:
    """The view of A's log, and where it stands."""
    snapshot = view_snapshot(directory, A)
    assert snapshot is not None
    return *snapshot[:3], records_in(snapshot[3])


def test_operations_apply_once_in_order_and_not_across_a_gap() -> None:
    log = log_of(10)
    directory = Directory()
    operations = operations_after(log, 0)
    assert directory.apply(A, 1, run_at(1, operations)) == Applied(Outcome.GAP)  # whose log is that?
    directory.observe_head(A, 1, LogHead())
    assert directory.apply(A, 1, run_at(4, operations)) == Applied(Outcome.GAP)
    assert directory.apply(A, 1, run_at(1, operations[: 4 * LOCATION_BYTES])) == Applied(
        Outcome.APPLIED, 4
    )
    assert directory.apply(A, 1, run_at(1, operations)) == Applied(Outcome.APPLIED, 6)
    assert directory.apply(A, 1, run_at(1, operations)) == Applied(Outcome.STALE)
    assert directory.position(A) == (1, 10)
    assert known_set(directory) == (1, 10, log.head.set_hash, records_in(log.snapshot()))
    assert directory.record_count == 10


def test_broken_records_change_nothing() -> None:
    directory = reading(log_of(2))
    with pytest.raises(ProtocolError):
        directory.apply(A, 1, run_at(3, location(9).encode() + b"x"))
    assert directory.position(A) == (1, 2)


def test_a_new_incarnation_voids_the_old_one() -> None:
    directory = reading(log_of(3))
    directory.observe_head(A, 2, LogHead())
    assert directory.position(A) == (2, 0)
    assert held(directory, 1) == []
    assert feed(directory, log_of(3)).outcome is Outcome.STALE
    assert directory.record_count == 0


@given(st.integers(1, 20), st.integers(0, 19), st.integers(1, 20))
def test_wrong_operations_are_found_at_the_head(count: int, wrong: int, step: int) -> None:
    wrong %= count
    log = log_of(count)
    directory = Directory()
    directory.observe_head(A, 1, log.head)
    forged = bytearray(operations_after(log, 0) + location(500).encode())
    forged[wrong * LOCATION_BYTES + 20] ^= 1
    outcomes = []
    for start in range(0, count + 1, step):
        run = bytes(forged[start * LOCATION_BYTES : (start + step) * LOCATION_BYTES])
        outcomes.append(directory.apply(A, 1, run_at(start + 1, run)).outcome)
    assert Outcome.DIVERGED in outcomes
    assert directory.diverged(A)
    assert directory.record_count == 0
    # Only the owner is believed now.
    assert feed(directory, log).outcome is Outcome.STALE
    assert install(directory, log)
    assert not directory.diverged(A)
    assert directory.position(A) == (1, count)


def test_a_head_that_comes_later_is_checked_too() -> None:
    log = log_of(3)
    directory = Directory()
    directory.observe_head(A, 1, LogHead())
    feed(directory, log)
    directory.observe_head(A, 1, log.head)
    assert not directory.diverged(A)
    directory.observe_head(A, 1, LogHead(3, 3, log.head.set_hash ^ 1))
    assert directory.diverged(A)


def test_a_snapshot_is_all_or_nothing() -> None:
    log, old = log_of(50), log_of(2)
    directory = reading(old)
    directory.observe_head(A, 1, log.head)
    packed, head = log.snapshot(), log.head
    checked = check_snapshot(packed)
    broken = bytearray(packed)
    broken[5] ^= 1
    for wrong in (bytes(broken), packed[:-42], packed[:-1], packed + packed[:42]):
        with pytest.raises(ProtocolError):
            directory.install_snapshot(A, 1, 50, head.set_hash, check_snapshot(wrong))
    with pytest.raises(ProtocolError, match="signed"):  # consistent, but not what was signed
        other = log_of(49)
        directory.install_snapshot(A, 1, 50, other.head.set_hash, check_snapshot(other.snapshot()))
    assert directory.position(A) == (1, 2)
    assert known_set(directory) == (1, 2, old.head.set_hash, records_in(old.snapshot()))
    assert not directory.install_snapshot(A, 2, 50, head.set_hash, checked)
    assert directory.install_snapshot(A, 1, 50, head.set_hash, checked)
    assert not directory.install_snapshot(A, 1, 50, head.set_hash, checked)  # no news
    assert directory.record_count == 50
    assert directory.since(A, 0, 1 << 20) == []  # nothing to relay from before the snapshot


def test_a_snapshot_may_be_of_nothing() -> None:
    log, directory = log_of(1), Directory()
    log.remove_many([(digest_of(0), Version(1, 1))])
    directory.observe_head(A, 1, log.head)
    assert install(directory, log)
    assert (directory.position(A), directory.record_count) == ((1, 2), 0)
    assert view_snapshot(directory, A) == (1, 2, 0, b"")


def test_keys_of_which_another_version_is_named() -> None:
    """In the log or pushed ahead of it, whatever differs: clock, writer or root."""
    versions = {bytes([number]) * 16: Version(5, 6, number) for number in range(12)}
    digests = list(versions)
    log = OwnLog(1)
    for number, digest in enumerate(digests[:6]):
        clock, writer, root = versions[digest]
        named = [(clock, writer, root), (clock + 1, writer, root), (clock, 7, root), (clock, 6, 99)]
        log.add(LocationRecord(digest, Version(*named[number % 4]), 0, 1))
    directory = reading(log)
    for place, digest in enumerate(digests[6:10]):
        version = versions[digest] if place % 2 else Version(4, 6, 1)
        operation = LocationRecord(digest, version, 0, 1).encode()
        directory.heard(A, 1, [log.sequence + 1 + place], operation, 0.0)
    others = directory.of_other_versions(versions)
    assert others == {digests[place] for place in (1, 2, 3, 5, 6, 8)}
    assert directory.of_other_versions({}) == set()


def test_newest_first_and_the_dead_last() -> None:
    directory = Directory()
    for member, clock in ((1, 5), (2, 9), (3, 7)):
        log = OwnLog(1)
        log.add(location(1, clock))
        directory.observe_head(member, 1, log.head)
        feed(directory, log, member=member)
    assert held(directory, 1) == [2, 3, 1]
    directory.hide(2)
    assert held(directory, 1) == [3, 1, 2]
    assert [found.hidden for found in directory.holders(digest_of(1))] == [False, False, True]
    directory.show(2)
    assert held(directory, 1) == [2, 3, 1]
    directory.forget(2)
    assert held(directory, 1) == [3, 1]
    assert directory.holders(digest_of(2)) == []


# --- views of partitions beside views of logs -------------------------------------------------


def part_of(directory: Directory, sequence: int, *records: LocationRecord) -> None:
    """A has these records of the first key's partition, as of this place of its log."""
    with directory.changing_rows():
        view = directory.open_part(partition_of(digest_of(1)), A, 1, hidden=False)
        view.sequence = sequence
        directory.index.load(view.slot, b"".join(record.encode() for record in records))


def clocks(directory: Directory) -> list[int]:
    return [found.record.version.clock for found in directory.holders(digest_of(1))]


def test_of_two_views_of_a_member_the_one_at_the_later_place_counts() -> None:
    log = log_of(3)
    directory = reading(log)
    part_of(directory, 3, location(1, 9))
    assert clocks(directory) == [1], "at one place the log counts, and the member comes once"
    part_of(directory, 4, location(1, 9))
    assert clocks(directory) == [9]
    part_of(directory, 5)
    assert clocks(directory) == [], "it was withdrawn, which the log will tell of"
    log.remove_many([(digest_of(1), location(1).version)])
    log.add(location(5))
    log.add(location(1, 7))
    assert feed(directory, log, first=4).outcome is Outcome.APPLIED
    assert clocks(directory) == [7]
    with directory.changing_rows():
        directory.close_part(partition_of(digest_of(1)), A)
    assert (clocks(directory), directory.parts) == ([7], {})


def test_a_word_counts_before_a_view_of_an_earlier_place_and_hearsay_where_no_log_is_followed() -> None:
    directory = Directory()
    directory.follows_logs = False
    part_of(directory, 4, location(1))
    directory.heard(A, 1, [9], location(1, 9).encode(), 0.0, hearsay=True)
    found = directory.holders(digest_of(1))
    assert {each.hearsay: each.record.version.clock for each in found} == {False: 1, True: 9}
    gone = location(1).encode()
    directory.heard(A, 1, [5], gone[:-1] + bytes((gone[-1] | REMOVED,)), 0.0)
    assert clocks(directory) == [9]
    assert directory.held({digest_of(1)}, lambda _: range(20)) == {digest_of(1)}
    part_of(directory, 9, location(1, 3))
    assert clocks(directory) == [3], "it is later than every word"
    directory.follows_logs = True
    directory.heard(B, 1, [9], location(1, 9).encode(), 0.0, hearsay=True)
    assert clocks(directory) == [3]


def test_early_operations_count_until_the_log_has_caught_up() -> None:
    log = log_of(3)
    directory = reading(log)
    log.add(location(7))
    log.remove_many([(digest_of(1), Version(1, 1))])
    operations = operations_after(log, 3)
    assert directory.heard(A, 1, [4, 5], operations, 0.0) == 2
    assert directory.heard(A, 1, [4, 5], operations, 0.0) == 0
    assert held(directory, 7) == [A]
    assert held(directory, 1) == []
    found = directory.holders(digest_of(7))[0]
    assert (found.incarnation, found.sequence) == (1, 4)
    log.remove_many([(digest_of(7), Version(1, 1))])
    feed(directory, log, 4)
    assert held(directory, 7) == []


def test_early_operations_of_a_past_life_are_ignored() -> None:
    directory = Directory()
    directory.heard(A, 1, [1], location(1).encode(), 0.0)
    assert held(directory, 1) == [A]
    directory.observe_head(A, 2, LogHead())
    assert held(directory, 1) == []


def test_early_operations_expire_and_are_bounded() -> None:
    directory = Directory(DirectoryConfig(max_words=10))
    for number in range(20):
        directory.heard(A, 1, [number + 1], location(number).encode(), float(number))
    assert [n for n in range(20) if held(directory, n)] == list(range(10, 20))
    directory.heard(A, 1, [100], location(15, 2).encode(), 70.0)  # said again, newer
    directory.expire_words(100.0)
    assert [n for n in range(20) if held(directory, n)] == [15]


def test_a_push_must_pair_up() -> None:
    directory = Directory()
    for sequences, operations in (([1, 2], location(1).encode()), ([1], b"x" * 33)):
        with pytest.raises(ProtocolError):
            directory.heard(A, 1, sequences, operations, 0.0)
    assert held(directory, 1) == []


def test_a_denied_location_is_hidden_until_the_view_is_past_the_denial() -> None:
    log = log_of(3)
    directory = reading(log)
    directory.mark_stale(A, digest_of(1), 1, 4)
    assert held(directory, 1) == []
    assert held(directory, 2) == [A]
    log.add(location(8))
    feed(directory, log, 4)
    assert held(directory, 1) == []  # as far as the denial: the owner was right
    log.add(location(9))
    feed(directory, log, 5)
    assert held(directory, 1) == [A]
    directory.mark_stale(A, digest_of(1), 1, 2)  # an old denial
    assert held(directory, 1) == [A]


def test_denials_are_bounded() -> None:
    directory = reading(log_of(20), max_denials=5)
    for number in range(20):
        directory.mark_stale(A, digest_of(number), 1, 99)
    assert sum(bool(held(directory, number)) for number in range(20)) == 15


def test_records_are_bounded() -> None:
    directory = reading(log_of(4), max_records=10)
    other = log_of(8)
    directory.observe_head(B, 1, other.head)
    assert feed(directory, other, member=B).outcome is Outcome.FULL
    assert not install(directory, other, B)
    assert directory.record_count == 4
    directory.forget(A)
    assert feed(directory, other, member=B).outcome is Outcome.APPLIED


def test_lag_is_measured_against_the_signed_head() -> None:
    log = log_of(5)
    directory = Directory()
    assert directory.lag(A) == 0
    directory.observe_head(A, 1, log.head)
    assert directory.lag(A) == 5
    feed(directory, log)
    assert directory.lag(A) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 2)), max_size=40))
def test_a_reader_by_steps_equals_a_reader_by_snapshot(choices: list[tuple[bool, int, int]]) -> None:
    log = OwnLog(1)
    by_steps, by_snapshot = Directory(), Directory()
    by_steps.observe_head(A, 1, LogHead())
    for add, key, clock in choices:
        before = log.sequence
        if add:
            log.add(location(key, clock))
        else:
            log.remove_many([(digest_of(key), Version(clock, 1))])
        if log.sequence > before:
            assert feed(by_steps, log, log.sequence).outcome is Outcome.APPLIED
    by_steps.observe_head(A, 1, log.head)
    assert not by_steps.diverged(A)
    if log.sequence:
        by_snapshot.observe_head(A, 1, log.head)
        assert install(by_snapshot, log)
        for number in range(4):
            assert by_steps.holders(digest_of(number)) == by_snapshot.holders(digest_of(number))
    assert by_steps.record_count == log.head.count


# --- snapshots in steps -----------------------------------------------------------------------

LARGE = 3 * STEP_RECORDS + 10


def large_log(incarnation: int = 1) -> OwnLog:
    return log_of(LARGE, incarnation)


def staging(log: OwnLog, old: OwnLog) -> Directory:
    """A directory that knows the log as it was, and has begun to put in a snapshot of what it is."""
    directory = reading(old)
    directory.observe_head(A, log.incarnation, log.head)
    assert install(directory, log)
    assert directory.staging(A)
    return directory


def finish(directory: Directory) -> int:
    """How many steps it takes until there is nothing to do."""
    steps = 0
    while directory.work_pending:
        directory.work()
        steps += 1
        assert steps < 1_000
    return steps


def test_nothing_of_a_large_snapshot_is_seen_before_all_of_it_is() -> None:
    old, log = OwnLog(1), large_log()
    old.add(location(-1))
    directory = staging(log, old)
    everything = {digest_of(number) for number in range(LARGE)}
    directory.watched.watch(everything, frozenset())
    for _ in range(LARGE // STEP_RECORDS):
        assert not directory.work()
        assert not any(directory.holders(digest) for digest in everything)
        assert directory.held(everything, lambda _: range(100)) == set()
        assert held(directory, -1) == [A]  # known records stay
        assert (directory.position(A), directory.record_count) == ((1, 1), 1)
        assert view_snapshot(directory, A) == (1, 1, old.head.set_hash, old.snapshot())
        assert not directory.watched.any_touched
    assert directory.work()
    assert directory.position(A) == (1, LARGE)
    assert directory.held(everything, lambda _: range(100)) == everything
    assert (held(directory, -1), directory.record_count) == ([], LARGE)
    finish(directory)
    assert set(directory.watched.take(2 * LARGE)) == everything


def test_a_view_goes_on_by_operations_while_its_snapshot_is_put_in() -> None:
    log, old = large_log(), log_of(2)
    directory = staging(log, old)
    directory.work()
    third = operations_after(log, 2, LOCATION_BYTES)
    assert directory.apply(A, 1, run_at(3, third)).outcome is Outcome.APPLIED
    assert held(directory, 2) == [A]
    assert directory.apply(A, 1, run_at(LARGE + 1, third)).outcome is Outcome.GAP
    finish(directory)
    assert directory.position(A) == (1, LARGE)
    assert directory.record_count == LARGE


def test_a_snapshot_that_operations_overtook_is_dropped() -> None:
    log, old = large_log(), log_of(2)
    directory = staging(log, old)
    log.add(location(LARGE))
    operations = operations_after(log, 2)
    assert directory.apply(A, 1, run_at(3, operations)).outcome is Outcome.APPLIED
    finish(directory)
    assert not directory.staging(A)
    assert directory.position(A) == (1, LARGE + 1)
    assert directory.record_count == LARGE + 1
    assert held(directory, LARGE) == [A]


def test_a_head_that_comes_while_a_snapshot_is_put_in_decides_over_it() -> None:
    log = large_log()
    directory = reading(log_of(2))
    assert install(directory, log)  # ahead of all heads
    head = log.head
    directory.observe_head(A, 1, LogHead(head.sequence, head.count, head.set_hash ^ 1))
    finish(directory)
    assert directory.diverged(A)
    assert directory.record_count == 0
    directory.observe_head(A, 1, head)
    assert install(directory, log)
    finish(directory)
    assert directory.position(A) == (1, LARGE)


@pytest.mark.parametrize(
    "end",
    [
        lambda directory: directory.forget(A),
        lambda directory: directory.drop(A),
        lambda directory: directory.observe_head(A, 2, LogHead()),
    ],
)
def test_a_snapshot_of_somebody_who_is_forgotten_goes(end: Callable[[Directory], None]) -> None:
    directory = staging(large_log(), log_of(2))
    directory.work()
    end(directory)
    assert not directory.staging(A)
    finish(directory)
    assert (directory.record_count, directory.position(A)[1]) == (0, 0)
    assert held(directory, 1) == []
    assert directory.has_room(DirectoryConfig().max_records)


def test_a_snapshot_on_its_way_counts_for_the_room_that_is_left() -> None:
    log = large_log()
    directory = Directory(DirectoryConfig(max_records=LARGE + 5))
    for member in (A, B):
        directory.observe_head(member, 1, log.head)
    assert install(directory, log, A)
    assert not install(directory, log, A)  # it is coming already
    assert not install(directory, log, B)
    other = log_of(6)
    directory.observe_head(222, 1, other.head)
    finish(directory)
    directory.forget(A)
    assert install(directory, log, B)
    finish(directory)
    assert held(directory, 1) == [B]


def test_replacing_a_large_view_again_and_again_takes_no_more_room() -> None:
    log = large_log()
    directory = Directory(DirectoryConfig(max_records=LARGE + 5))
    for clock in range(2, 25):
        directory.observe_head(A, 1, log.head)
        assert install(directory, log)
        finish(directory)
        assert directory.record_count == LARGE
        log.add(location(7, clock))


def test_a_member_that_is_back_touches_all_that_is_watched_in_steps() -> None:
    log = large_log()
    directory = Directory()
    directory.observe_head(A, 1, log.head)
    install(directory, log)
    finish(directory)
    directory.hide(A)
    watched = {digest_of(number) for number in range(0, LARGE + 100, 3)}
    directory.watched.watch(watched, {digest_of(LARGE - 1)})
    directory.show(A)
    assert not directory.watched.any_touched  # nothing is done at once
    while directory.work_pending:  # records change their places meanwhile
        directory.work()
        before = log.sequence
        for number in (before % 90, LARGE - before % 90):
            log.remove_many([(digest_of(number), Version(1, 1))])
        assert feed(directory, log, before + 1).outcome is Outcome.APPLIED
    expected = {d for d in watched | {digest_of(LARGE - 1)} if directory.holders(d)}
    assert len(expected) > LARGE // 4
    assert expected <= set(directory.watched.take(2 * LARGE))


def test_no_more_is_touched_than_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_keys, "MAX_AHEAD", 500)
    log, everything = large_log(), {digest_of(number) for number in range(LARGE)}
    directory = Directory()
    directory.observe_head(A, 1, log.head)
    install(directory, log)
    finish(directory)
    directory.watched.watch(everything, frozenset())
    directory.show(A)
    taken: list[bytes] = []
    while directory.work_pending:
        for _ in range(3):
            directory.work(100)
        found = directory.watched.take(200)
        assert found
        taken += found
        assert len(taken) < LARGE + 1
    assert set(taken + directory.watched.take(1_000)) == everything
    assert not directory.watched.any_touched


def test_who_is_back_and_goes_again_touches_nothing_more() -> None:
    log = large_log()
    directory = Directory()
    directory.observe_head(A, 1, log.head)
    install(directory, log)
    finish(directory)
    directory.show(A)
    directory.drop(A)
    directory.observe_head(B, 1, log.head)  # its view may be where that of the other was
    feed(directory, log, member=B)
    directory.watched.watch({digest_of(number) for number in range(LARGE)}, frozenset())
    finish(directory)
    assert not directory.watched.any_touched


# --- many keys at once ------------------------------------------------------------------------


def random_directory(rng: Random, members: int) -> Directory:
    """Views of many members, some of them dead, with pushes ahead of their logs and denials."""
    directory = Directory(DirectoryConfig(), rng.getrandbits(128))
    for member in range(members):
        log = OwnLog(1)
        for _ in range(rng.randrange(60)):
            log.add(location(rng.randrange(40), rng.randrange(1, 9)))
        directory.observe_head(member, 1, LogHead())
        known = rng.randrange(log.sequence + 1)
        if known:
            told = operations_after(log, 0, known * LOCATION_BYTES)
            directory.apply(member, 1, run_at(1, told))
        for _ in range(rng.randrange(4)):
            operation = location(rng.randrange(40), rng.randrange(1, 9))
            log.remove_many([(operation.digest, Version(operation.version.clock, 1))])
            early = rng.choice([operation.encode(), operations_after(log, max(0, log.sequence - 1))])
            if early:
                directory.heard(member, 1, [known + rng.randrange(5)], early, 0.0)
            directory.mark_stale(member, digest_of(rng.randrange(40)), 1, known + rng.randrange(-3, 3))
        if rng.random() < 0.3:
            directory.hide(member)
    return directory


@pytest.mark.parametrize("seed", range(20))
def test_many_keys_at_once_are_answered_as_one_by_one(seed: int) -> None:
    rng = Random(seed)
    directory = random_directory(rng, rng.choice([0, 1, 5, 20]))
    believed = {member: range(rng.randrange(5), rng.randrange(10)) for member in range(20)}
    digests = {digest_of(number) for number in range(50)} | {b"no digest"}
    expected = {
        digest
        for digest in digests
        if any(
            not found.hidden and found.record.version.clock in believed[found.member]
            for found in directory.holders(digest)
        )
    }
    assert directory.held(digests, lambda member: believed[member]) == expected


def test_clocks_may_be_any_number() -> None:
    log = OwnLog(1)
    log.add(location(1, (1 << 64) - 1))
    directory = reading(log)
    assert directory.held({digest_of(1)}, lambda _: range(-5, 1 << 70)) == {digest_of(1)}
    assert directory.held({digest_of(1)}, lambda _: range(0, (1 << 64) - 1)) == set()


# --- bounds and threads -----------------------------------------------------------------------


def test_what_is_kept_to_pass_on_is_bounded_over_all_owners() -> None:
    directory = Directory(DirectoryConfig(relay_limit=64, relay_total=256, relay_least=16))
    log = log_of(200)

    def read(member: int, first: int) -> None:
        """In runs of one operation."""
        for sequence in range(first, log.sequence + 1):
            operation = operations_after(log, sequence - 1, LOCATION_BYTES)
            directory.apply(member, 1, run_at(sequence, operation))

    def kept(member: int) -> int:
        return next(n for n in range(200) if not directory.since(member, 200 - n - 1, 1 << 20))

    for member in range(1, 41):
        directory.observe_head(member, 1, log.head)
        read(member, 1)
        if member in (4, 8, 16, 40):
            expected = {4: 64, 8: 32, 16: 16, 40: 16}[member]
            counts = [kept(each) for each in range(1, member + 1)]
            assert expected <= min(counts) <= max(counts) <= expected * 5 // 4
    for member in range(5, 41):
        directory.drop(member)
    log.add(location(200))
    read(1, 201)
    assert directory.since(1, 200 - 16, 1 << 20)  # nothing is lost that was kept


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_another_thread_finds_what_is_there_while_all_of_it_moves() -> None:
    directory, rng = Directory(), Random(6)
    directory.share(threading.Lock())
    steady = log_of(400)
    directory.observe_head(A, 1, steady.head)
    feed(directory, steady)
    directory.observe_head(B, 1, LogHead())
    missed: list[bytes] = []
    done = threading.Event()
    digests = [digest_of(number) for number in range(400)]

    def look() -> None:
        while not done.is_set():
            missed.extend(digest for digest in digests if not directory.holders(digest))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(8):
            run = b"".join(rng.randbytes(LOCATION_BYTES - 1) + b"\0" for _ in range(3_000))
            directory.apply(B, 1, run_at(3_000 * number + 1, run))
            if number == 5:
                directory.forget(B)
                directory.observe_head(B, 2, LogHead())
            directory.work()
    finally:
        done.set()
        reader.join()
    assert missed == []


class CountingLock:
    """How often it was taken; it may not be taken twice."""

    def __init__(self) -> None:
        self.taken, self.held = 0, False

    def __enter__(self) -> None:
        assert not self.held
        self.taken, self.held = self.taken + 1, True

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_whatever_moves_records_is_kept_apart_from_readers() -> None:
    log, directory, lock = log_of(3), Directory(), CountingLock()
    directory.share(lock)
    steps: list[Callable[[], object]] = [
        lambda: directory.observe_head(A, 1, log.head),
        lambda: feed(directory, log),
        lambda: directory.heard(A, 1, [9], location(9).encode(), 0.0),
        lambda: directory.mark_stale(A, digest_of(1), 1, 9),
        lambda: directory.holders(digest_of(1)),
        lambda: directory.held({digest_of(1)}, lambda _: range(9)),
        lambda: directory.expire_words(99.0),
        lambda: install(directory, log),
        lambda: directory.work(),
        lambda: directory.forget(A),
        lambda: directory.drop(A),
    ]
    for number, step in enumerate(steps, 1):
        step()
        assert lock.taken == number
