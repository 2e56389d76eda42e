"""Views of other members' logs: contiguous or whole, checked against the owner's head."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.gossip.directory import Applied, Directory, DirectoryConfig, Outcome
from p2pstore.gossip.log import OwnLog
from p2pstore.gossip.records import LOCATION_BYTES, LogHead
from p2pstore.objects import Version
from tests.unit.gossip_network import digest_of, location

A, B = 111, 222


def log_of(count: int, incarnation: int = 1) -> OwnLog:
    log = OwnLog(incarnation)
    for number in range(count):
        log.add(location(number))
    return log


def feed(directory: Directory, log: OwnLog, first: int = 1, member: int = A) -> Applied:
    operations = log.since(first - 1, 1 << 20)
    assert operations is not None
    return directory.apply(member, log.incarnation, first, operations)


def reading(log: OwnLog, member: int = A, **config: float) -> Directory:
    """A directory that follows the log and has read all of it."""
    directory = Directory(DirectoryConfig(**config))  # type: ignore[arg-type]
    directory.observe_head(member, log.incarnation, log.head)
    if log.sequence:
        assert feed(directory, log, member=member).outcome is Outcome.APPLIED
    return directory


def held(directory: Directory, number: int) -> list[int]:
    return [found.member for found in directory.holders(digest_of(number))]


def test_operations_apply_once_in_order_and_not_across_a_gap() -> None:
    log = log_of(10)
    directory = Directory()
    operations = log.since(0, 1000) or b""
    assert directory.apply(A, 1, 1, operations) == Applied(Outcome.GAP)  # whose log is that?
    directory.observe_head(A, 1, LogHead())
    assert directory.apply(A, 1, 4, operations) == Applied(Outcome.GAP)
    assert directory.apply(A, 1, 1, operations[: 4 * 34]) == Applied(Outcome.APPLIED, 4)
    assert directory.apply(A, 1, 1, operations) == Applied(Outcome.APPLIED, 6)
    assert directory.apply(A, 1, 1, operations) == Applied(Outcome.STALE)
    assert directory.position(A) == (1, 10)
    assert directory.snapshot(A) == (1, 10, log.head.set_hash, log.snapshot())
    assert directory.record_count == 10


def test_broken_records_change_nothing() -> None:
    directory = reading(log_of(2))
    with pytest.raises(ProtocolError):
        directory.apply(A, 1, 3, location(9).encode() + b"x")
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
    forged = bytearray((log.since(0, 1 << 20) or b"") + location(500).encode())
    forged[wrong * LOCATION_BYTES + 20] ^= 1
    outcomes = []
    for start in range(0, count + 1, step):
        run = bytes(forged[start * LOCATION_BYTES : (start + step) * LOCATION_BYTES])
        outcomes.append(directory.apply(A, 1, start + 1, run).outcome)
    assert Outcome.DIVERGED in outcomes
    assert directory.diverged(A)
    assert directory.record_count == 0
    # Nobody but the owner is believed now.
    assert feed(directory, log).outcome is Outcome.STALE
    assert directory.install_snapshot(A, 1, log.sequence, log.head.set_hash, log.snapshot())
    assert not directory.diverged(A)
    assert directory.position(A) == (1, count)


def test_a_head_that_comes_later_is_checked_too() -> None:
    log = log_of(3)
    directory = Directory()
    directory.observe_head(A, 1, LogHead())
    feed(directory, log)
    assert directory.observe_head(A, 1, log.head)
    assert not directory.observe_head(A, 1, LogHead(3, 3, log.head.set_hash ^ 1))
    assert directory.diverged(A)


def test_a_snapshot_is_all_or_nothing() -> None:
    log, old = log_of(50), log_of(2)
    directory = reading(old)
    directory.observe_head(A, 1, log.head)
    packed, head = log.snapshot(), log.head
    broken = bytearray(packed)
    broken[5] ^= 1
    for wrong in (bytes(broken), packed[:-34], packed[:-1], packed + packed[:34]):
        with pytest.raises(ProtocolError):
            directory.install_snapshot(A, 1, 50, head.set_hash, wrong)
    with pytest.raises(ProtocolError, match="signed"):  # consistent, but not what was signed
        directory.install_snapshot(A, 1, 50, log_of(49).head.set_hash, log_of(49).snapshot())
    assert directory.position(A) == (1, 2)
    assert directory.snapshot(A) == (1, 2, old.head.set_hash, old.snapshot())
    assert not directory.install_snapshot(A, 2, 50, head.set_hash, packed)
    assert directory.install_snapshot(A, 1, 50, head.set_hash, packed)
    assert not directory.install_snapshot(A, 1, 50, head.set_hash, packed)  # no news
    assert directory.record_count == 50
    assert directory.since(A, 49, 100) is None  # nothing to relay from before the snapshot
    assert directory.since(A, 50, 100) == b""


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


def test_early_operations_count_until_the_log_has_caught_up() -> None:
    log = log_of(3)
    directory = reading(log)
    log.add(location(7))
    log.remove(digest_of(1), Version(1, 1))
    operations = log.since(3, 1000) or b""
    assert directory.early(A, 1, [4, 5], operations, 0.0) == 2
    assert directory.early(A, 1, [4, 5], operations, 0.0) == 0
    assert held(directory, 7) == [A]
    assert held(directory, 1) == []
    found = directory.holders(digest_of(7))[0]
    assert (found.incarnation, found.sequence) == (1, 4)
    log.remove(digest_of(7), Version(1, 1))
    feed(directory, log, 4)
    assert held(directory, 7) == []


def test_early_operations_of_a_past_life_are_ignored() -> None:
    directory = Directory()
    directory.early(A, 1, [1], location(1).encode(), 0.0)
    assert held(directory, 1) == [A]
    directory.observe_head(A, 2, LogHead())
    assert held(directory, 1) == []


def test_early_operations_expire_and_are_bounded() -> None:
    directory = Directory(DirectoryConfig(max_early=10))
    for number in range(20):
        directory.early(A, 1, [number + 1], location(number).encode(), float(number))
    assert [n for n in range(20) if held(directory, n)] == list(range(10, 20))
    directory.early(A, 1, [100], location(15, 2).encode(), 70.0)  # said again, newer
    directory.expire_early(100.0)
    assert [n for n in range(20) if held(directory, n)] == [15]


def test_a_push_must_pair_up() -> None:
    directory = Directory()
    for sequences, operations in (([1, 2], location(1).encode()), ([1], b"x" * 33)):
        with pytest.raises(ProtocolError):
            directory.early(A, 1, sequences, operations, 0.0)
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
    directory = reading(log_of(20), max_stale=5)
    for number in range(20):
        directory.mark_stale(A, digest_of(number), 1, 99)
    assert sum(bool(held(directory, number)) for number in range(20)) == 15


def test_records_are_bounded() -> None:
    directory = reading(log_of(8), max_records=10)
    other = log_of(4)
    directory.observe_head(B, 1, other.head)
    assert feed(directory, other, member=B).outcome is Outcome.FULL
    assert not directory.install_snapshot(B, 1, 4, other.head.set_hash, other.snapshot())
    assert directory.record_count == 8
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
def test_a_reader_by_steps_equals_a_reader_by_snapshot(
    choices: list[tuple[bool, int, int]],
) -> None:
    log = OwnLog(1)
    by_steps, by_snapshot = Directory(), Directory()
    by_steps.observe_head(A, 1, LogHead())
    for add, key, clock in choices:
        before = log.sequence
        if add:
            log.add(location(key, clock))
        else:
            log.remove(digest_of(key), Version(clock, 1))
        if log.sequence > before:
            assert feed(by_steps, log, log.sequence).outcome is Outcome.APPLIED
    assert by_steps.observe_head(A, 1, log.head)
    if log.sequence:
        by_snapshot.observe_head(A, 1, log.head)
        assert by_snapshot.install_snapshot(A, 1, log.sequence, log.head.set_hash, log.snapshot())
        for number in range(4):
            assert by_steps.holders(digest_of(number)) == by_snapshot.holders(digest_of(number))
    assert by_steps.record_count == log.head.count
