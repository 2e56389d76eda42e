"""A peer's own log: numbers, ring, set hash; and copies of it while it changes."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations import log as log_copy
from p2pstore.gossip.locations.log import LogCopy, OperationRing, OwnLog, SignedRun, newest_clock
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.records import LOCATION_BYTES, LogHead, decode_location, location_hash
from p2pstore.objects import Version
from p2pstore.runtime.stepping import Steps, run_through
from tests.present import present
from tests.unit.gossip_network import digest_of, location, operations_after
from tests.unit.location_set import LocationSet, iterate_locations

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 3)), max_size=60)


def play(log: OwnLog, choices: list[tuple[bool, int, int]]) -> None:
    for add, key, clock in choices:
        if add:
            log.add(location(key, clock))
        else:
            log.remove_many([(digest_of(key), Version(clock, 1))])


@given(steps)
def test_operations_are_contiguous_and_add_up_to_the_head(choices: list[tuple[bool, int, int]]) -> None:
    log = OwnLog(1)
    play(log, choices)
    operations = operations_after(log, 0)
    assert len(operations) == log.sequence * LOCATION_BYTES
    reader = LocationSet()
    for start in range(0, len(operations), LOCATION_BYTES):
        reader.apply(operations[start : start + LOCATION_BYTES])
    assert LogHead(log.sequence, len(reader), reader.hash) == log.head
    assert check_snapshot(log.snapshot()).set_hash == log.head.set_hash


@given(steps)
def test_the_set_holds_the_last_version_of_each_key(choices: list[tuple[bool, int, int]]) -> None:
    log, model = OwnLog(1), {}
    play(log, choices)
    for add, key, clock in choices:
        if add:
            model[key] = location(key, clock)
        elif key in model and model[key].version.clock == clock:
            del model[key]
    assert set(iterate_locations(log.snapshot())) == set(model.values())
    expected = 0
    for record in model.values():
        expected ^= location_hash(record.encode())
    assert log.head.set_hash == expected


def test_what_changes_nothing_takes_no_number() -> None:
    log = OwnLog(1)
    assert log.add(location(1)) == location(1).encode()
    assert log.add(location(1)) is None
    assert not log.holds(digest_of(1), Version(9, 9))
    assert not log.holds(digest_of(2), Version(1, 1))
    assert log.holds(digest_of(1), Version(1, 1, 77))  # the root does not count
    before = log.head
    log.remove_many([(digest_of(1), Version(9, 9)), (digest_of(2), Version(1, 1))])
    assert log.head == LogHead(3, before.count, before.set_hash)
    log.remove_many([(digest_of(1), Version(1, 1, 77))])
    assert (log.sequence, log.head) == (4, LogHead(4, 0, 0))


def test_behind_the_ring_there_is_nothing_to_have() -> None:
    log = OwnLog(1, ring_limit=10)
    for number in range(100):
        log.add(location(number))
    assert operations_after(log, 0) == b""
    recent = operations_after(log, 90)
    assert [r.digest for r in iterate_locations(recent)] == [digest_of(n) for n in range(90, 100)]
    assert log.since(100, 1 << 20) == log.since(101, 1 << 20) == []


@given(st.integers(1, 8), st.lists(st.integers(0, 30), max_size=30))
def test_the_ring_keeps_at_least_its_limit_and_at_most_twice(limit: int, runs: list[int]) -> None:
    ring, total = OperationRing(limit), 0
    for run in runs:
        ring.extend(bytes(LOCATION_BYTES * run))
        total += run
        kept = ring.last - ring.first + 1
        assert ring.last == total
        assert min(total, limit) <= kept <= 2 * limit


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=60),
    st.integers(0, 300),
)
def test_runs_are_told_whole_and_signed(
    limit: int, steps: list[tuple[int, int]], limit_bytes: int
) -> None:
    """Operations are written and signed in any order, and the log is cut all the while."""
    ring, written = OperationRing(limit), b""
    for extended, signed in steps:
        operations = b"".join(
            (ring.last + number + 1).to_bytes(LOCATION_BYTES, "little") for number in range(extended)
        )
        ring.extend(operations)
        written += operations
        count = len(ring.unsigned(signed)) // LOCATION_BYTES
        if count:
            ring.sign(count, ring.signed.to_bytes(64, "little"))
        assert ring.first - 1 <= ring.signed <= ring.last
        for known in {0, ring.first - 2, ring.first - 1, ring.first, ring.signed - 1, ring.last + 1}:
            runs = ring.since(known, limit_bytes)
            assert sum(len(run.operations) for run in runs) <= limit_bytes
            sequence = known
            for run in runs:
                assert run.first_sequence <= sequence + 1 <= run.last_sequence
                assert run.signature == (run.first_sequence - 1).to_bytes(64, "little")
                place = (run.first_sequence - 1) * LOCATION_BYTES
                assert run.operations == written[place : place + len(run.operations)]
                sequence = run.last_sequence
            if limit_bytes > 20 * LOCATION_BYTES and ring.first - 1 <= known < ring.signed:
                assert runs


def test_a_run_that_does_not_follow_takes_the_place_of_those_before() -> None:
    ring = OperationRing(100, 5)
    ring.append(SignedRun(4, bytes(4 * LOCATION_BYTES), b"a" * 64))  # the view came in its middle
    assert (ring.first, ring.last, ring.signed) == (4, 7, 7)
    ring.append(SignedRun(8, bytes(LOCATION_BYTES), b"b" * 64))
    assert [run.signature for run in ring.since(5, 1 << 20)] == [b"a" * 64, b"b" * 64]
    ring.append(SignedRun(6, bytes(5 * LOCATION_BYTES), b"c" * 64))
    assert [(run.first_sequence, run.last_sequence) for run in ring.since(6, 1 << 20)] == [(6, 10)]
    assert ring.since(4, 1 << 20) == []


@given(st.integers(1, 8), st.lists(st.integers(1, 30), max_size=40))
def test_runs_of_others_are_kept_whole_however_long(limit: int, counts: list[int]) -> None:
    ring = OperationRing(limit)
    sent: list[SignedRun] = []
    for count in counts:
        operations = bytes([len(sent)]) * LOCATION_BYTES * count
        sent.append(SignedRun(ring.last + 1, operations, bytes([len(sent)]) * 64))
        ring.append(sent[-1])
        assert ring.signed == ring.last
        told = ring.since(ring.first - 1, 1 << 20)
        assert told == sent[-len(told) :]
        assert sum(len(run.operations) for run in told) == (ring.last + 1 - ring.first) * (
            LOCATION_BYTES
        )
        assert ring.last + 1 - ring.first >= min(limit, ring.last)


def test_many_little_runs_take_no_more_room_than_operations_do() -> None:
    ring = OperationRing(1_000)
    for number in range(2_000):
        ring.append(SignedRun(number + 1, bytes(LOCATION_BYTES), bytes(64)))
    assert 250 <= ring.last - ring.first + 1 <= 313


def test_a_restarted_log_holds_the_same_from_one() -> None:
    log = OwnLog(1)
    play(log, [(True, 1, 1), (True, 2, 1), (False, 1, 1), (True, 3, 1)])
    before = set(iterate_locations(log.snapshot()))
    log.restart(5)
    assert (log.incarnation, log.sequence, log.head.count) == (5, 2, 2)
    assert set(iterate_locations(operations_after(log, 0))) == before


@pytest.mark.parametrize(
    "packed", [location(1).encode()[:-1], location(1).encode() * 2, location(1).encode()[:-1] + b"\x80"]
)
def test_a_malformed_set_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        check_snapshot(packed)


def test_a_withdrawal_of_another_version_takes_nothing_from_a_reader() -> None:
    reader = LocationSet()
    reader.apply(location(1, 2).encode())
    reader.apply(replace(location(1, 1), removed=True).encode())
    assert len(reader) == 1
    reader.apply(replace(location(1, 2), removed=True).encode())
    assert (len(reader), reader.hash) == (0, 0)


@pytest.mark.parametrize("count", [0, 1, 60, 70, 500])
def test_the_newest_clock_that_is_not_too_far_ahead(count: int) -> None:
    clocks = [number * 7919 % 1009 for number in range(1, count + 1)]
    packed = b"".join(location(1, clock).encode() for clock in clocks)
    for limit in (0, 500, 1 << 63):
        expected = max([clock for clock in clocks if clock <= limit], default=0)
        assert newest_clock(packed, limit) == newest_clock(bytearray(packed), limit) == expected


def change(log: OwnLog, rng: Random, keys: int) -> None:
    number = rng.randrange(keys)
    held = log.held(digest_of(number))
    if held is not None and rng.random() < 0.6:
        log.remove_many([(digest_of(number), decode_location(held).version)])
    else:
        log.add(location(number, log.sequence + 1))


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_is_what_the_log_held_at_its_head(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(log_copy, "COPIED_PER_STEP", 16)
    rng, log = Random(seed), OwnLog(5)
    for _ in range(300):
        change(log, rng, 150)
    changes = rng.choice((0, 1, 3, 30))
    at_head: dict[int, bytes] = {log.sequence: log.snapshot()}
    copying, other = log.copy_in_steps(), log.copy_in_steps()
    next(other, None)

    def changing() -> Steps[LogCopy]:
        while True:
            try:
                next(copying)
            except StopIteration as end:
                copied: LogCopy = end.value
                return copied
            for _ in range(changes):
                change(log, rng, rng.choice((20, 150, 300)))
            at_head[log.sequence] = log.snapshot()
            yield

    for each in (run_through(changing()), run_through(other)):
        checked = check_snapshot(b"".join(each.parts))  # no key is there twice
        assert (checked.count, checked.set_hash) == (each.head.count, each.head.set_hash)
        assert each.incarnation == 5
        assert records_of(b"".join(each.parts)) == records_of(at_head[each.head.sequence])


@pytest.mark.parametrize("seed", range(20))
def test_windows_that_come_and_go_add_up_to_the_head(seed: int) -> None:
    rng, log, reader, numbers = Random(seed), OwnLog(1), LocationSet(), itertools.count()
    for _ in range(60):
        before = log.sequence
        count = rng.choice((1, 23, 24, 100, 600))
        if rng.random() < 0.5:
            log.add_many([location(next(numbers), 7).encode() for _ in range(count)])
        else:
            held = rng.sample([*reader.records.values()], min(count, len(reader)))
            going = [(record[:16], decode_location(record).version) for record in held]
            log.remove_many([*going, (digest_of(-1), Version(7, 1))])
        if rng.random() < 0.2 and reader.records:
            log.remove_many([(next(iter(reader.records)), Version(7, 1))])
        reader.apply(present(log.after(before)))
        if rng.random() < 0.3:  # else the index takes in many windows at once
            assert log.head == LogHead(log.sequence, len(reader), reader.hash)
    assert records_of(log.snapshot()) == set(reader.records.values())


def records_of(packed: bytes) -> set[bytes]:
    return {packed[at : at + LOCATION_BYTES] for at in range(0, len(packed), LOCATION_BYTES)}


def test_a_log_that_begins_anew_meanwhile_is_copied_as_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_copy, "COPIED_PER_STEP", 1)
    log = OwnLog(5)
    log.add(location(1))
    log.add(location(1, 2))
    log.add(location(2))
    copying = log.copy_in_steps()
    next(copying)
    log.restart(6)
    copy = run_through(copying)
    assert (copy.incarnation, copy.head) == (6, log.head)
    assert records_of(b"".join(copy.parts)) == records_of(log.snapshot())
    assert copy.head.sequence == 2


def test_an_empty_log_is_copied_at_once() -> None:
    log = OwnLog(5)
    copy = run_through(log.copy_in_steps())
    assert (copy.head, b"".join(copy.parts)) == (log.head, b"")


def test_a_copy_that_nobody_wants_any_more_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "COPIED_PER_STEP", 1)
    log = OwnLog(5)
    log.add_many([location(number).encode() for number in range(3)])
    copying = log.copy_in_steps()
    next(copying)
    log.add(location(4))
    assert log._touched == [{digest_of(4)}]
    copying.close()
    assert not log._touched
