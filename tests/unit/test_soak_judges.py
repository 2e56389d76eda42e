"""The judges of a soak: each kind of broken promise is seen, and nothing beyond the promises is reported."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.soak.events import Events
from tests.soak.flatness import GrowthLimit, growth_of
from tests.soak.last_look import unexcused
from tests.soak.ledger import (
    CAUSE,
    CLEAR,
    DURABLE,
    ENDS,
    EXPIRED,
    KEPT,
    OWN_CHANGES,
    PINS,
    REFUSED,
    REMOVED,
    RIGHT_BYTES,
    SPREAD_SECONDS,
    Ledger,
    Limits,
)
from tests.soak.peers import ROLES, error_lines, left_over
from tests.soak.plan import MAX_PEERS_AT_ONCE, plan_faults, plan_load
from tests.soak.timeline import Timeline
from tests.soak.values import length_of, number_in, number_of, value_of

WRITER, READER, THIRD = 0, 1, 2
KEY = "cycle 0 0001"
LATER = 10.0 + SPREAD_SECONDS + 1.0
ON_NETWORK = ("split", "link down", "bad link", "new key")


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline(3)
    for peer in range(3):
        timeline.begin_life(peer, 0.0)
    return timeline


@pytest.fixture
def ledger(timeline: Timeline) -> Ledger:
    """A ledger in which the writer has put number 1."""
    ledger = Ledger(timeline, Limits(operation=20.0, reach=10.0))
    put(ledger, 1)
    return ledger


def put(ledger: Ledger, number: int, at: float = 5.0, *, overwrite: bool = False) -> None:
    ledger.issued(WRITER, KEY, number, at - 0.1)
    ledger.stored(KEY, number, at, overwrite=overwrite)


def broken(ledger: Ledger) -> set[str]:
    return {complaint.invariant for complaint in ledger.complaints}


def restart(timeline: Timeline, peer: int, at: float) -> None:
    timeline.end_life(peer, at)
    timeline.begin_life(peer, at + 1.0)


def test_a_value_is_known_to_the_last_byte() -> None:
    for count in range(1, 200):
        number = number_of(count % 3, count)
        value = value_of(KEY, number)
        assert (len(value), number_in(KEY, value)) == (length_of(KEY, number), number)
    number = next(n for n in range(1, 100) if length_of(KEY, n) > 100_000)
    value = value_of(KEY, number)
    for place in (0, 7, 8, 4095, 65_536, len(value) - 1):
        other = value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
        assert number_in(KEY, other) is None
    moved = value[:8] + value[16:24] + value[8:16] + value[24:]
    assert [number_in(KEY, each) for each in (value[:-1], value + b"x", b"", moved)] == [None] * 4
    assert number_in("cycle 0 0002", value) is None


def test_promises_that_hold_are_no_complaint(ledger: Ledger, timeline: Timeline) -> None:
    put(ledger, 2, 6.0, overwrite=True)
    ledger.read(READER, KEY, 2, 7.0, 7.1)
    ledger.read(READER, KEY, 1, 7.0, 7.1)  # there is no promise that it knows already
    ledger.read(WRITER, KEY, 1, 5.5, 7.1)  # it began before
    ledger.read(READER, KEY, None, 7.0, 7.1)  # it may be evicted
    ledger.failed(READER, KEY, "Unavailable", 7.0, 7.1)
    assert ledger.checked[RIGHT_BYTES] == 3
    ledger.issued(WRITER, KEY, 3, 7.2)
    ledger.read(READER, KEY, 3, 7.3, 7.4)  # a put that failed may be done all the same
    ledger.removed([KEY], 10.0)
    ledger.read(READER, KEY, 2, LATER - 2, LATER)
    restart(timeline, WRITER, 10.1)
    ledger.read(WRITER, KEY, 2, 12.0, 12.1)  # it forgot the removal when it was killed
    put(ledger, 4, 13.0)
    ledger.read(WRITER, KEY, 4, LATER, LATER)
    assert not ledger.complaints


def refused(ledger: Ledger, timeline: Timeline) -> None:
    ledger.issued(WRITER, KEY, 2, 6.0)
    ledger.refused(KEY, 2)
    ledger.read(READER, KEY, 2, 7.0, 7.1)


def expired(ledger: Ledger, timeline: Timeline) -> None:
    ledger.issued(WRITER, KEY, 2, 5.9)
    ledger.stored(KEY, 2, 6.0, overwrite=True, expires=10.0)
    ledger.read(READER, KEY, 2, 11.9, 12.5)
    assert not ledger.complaints
    ledger.read(READER, KEY, 2, 12.1, 12.5)


def overwritten(ledger: Ledger, timeline: Timeline) -> None:
    put(ledger, 2, 6.0, overwrite=True)
    ledger.read(WRITER, KEY, 1, 6.01, 6.1)


def removed(ledger: Ledger, timeline: Timeline) -> None:
    ledger.removed([KEY], 6.0)
    ledger.read(WRITER, KEY, 1, 6.01, 6.1)


def overwritten_elsewhere(ledger: Ledger, timeline: Timeline) -> None:
    put(ledger, 2, 10.0, overwrite=True)
    ledger.read(READER, KEY, 2, LATER, LATER)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, LATER, LATER)


def removed_while_apart(ledger: Ledger, timeline: Timeline) -> None:
    ledger.removed([KEY], 10.0)
    timeline.begin_trouble([READER], 20.0, apart=True).ended = 40.0
    ledger.read(READER, KEY, 1, 40.0 + SPREAD_SECONDS - 1, 101.0)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, 40.0 + SPREAD_SECONDS + 1, 103.0)


def kept_and_absent(ledger: Ledger, timeline: Timeline) -> None:
    ledger.kept(KEY, 1, 5.0)
    restart(timeline, WRITER, 8.0)
    ledger.read(READER, KEY, None, 9.5, 9.6)
    assert not ledger.complaints, "its holder was killed"
    ledger.kept(KEY, 1, 20.0)
    ledger.failed(READER, KEY, "StoreClosed", 40.0, 40.1)
    assert not ledger.complaints, "that is not about the holder"
    ledger.failed(READER, KEY, "Unavailable", 40.0, 40.1)


def listed_copy_absent(ledger: Ledger, timeline: Timeline) -> None:
    ledger.kept(KEY, 1, 5.0)
    ledger.listed(THIRD, [KEY], 6.0, 6.1)
    timeline.end_life(WRITER, 7.0)
    ledger.read(READER, KEY, None, 15.0, 15.1)
    assert not ledger.complaints, "it was not in reach for long enough"
    ledger.read(READER, KEY, None, 17.0, 17.1)


def pin_vanished(ledger: Ledger, timeline: Timeline) -> None:
    ledger.kept(KEY, 1, 5.0)
    ledger.listed(WRITER, [KEY], 6.0, 6.1)
    ledger.listed(READER, [KEY], 6.0, 6.1)
    restart(timeline, READER, 6.2)
    ledger.listed(READER, [], 7.4, 7.5)
    assert not ledger.complaints, "its life was another one"
    ledger.listed(WRITER, [], 7.0, 7.1)


def durable_lost(ledger: Ledger, timeline: Timeline) -> None:
    ledger.kept(KEY, 1, 5.0, durable=True)
    restart(timeline, WRITER, 19.0)
    ledger.read(READER, KEY, None, 29.0, 29.1)
    assert not ledger.complaints
    ledger.read(READER, KEY, None, 31.0, 31.1)


def too_long(ledger: Ledger, timeline: Timeline) -> None:
    timeline.stood_still(30.0, 40.0)
    ledger.ended(READER, "get", [], 25.0, 50.0)
    assert not ledger.hangs(READER, "get", 25.0, 50.0)
    assert not ledger.complaints, "the machine stood still meanwhile"
    ledger.ended(READER, "get", [], 25.0, 56.0)


def failed_without_cause(ledger: Ledger, timeline: Timeline) -> None:
    ledger.ended(READER, "get", ["Unavailable"], 0.0, 1.0)
    ledger.calm_begins(2.0)
    ledger.ended(READER, "put", ["CapacityExceeded"], 3.0, 4.0)
    assert not ledger.complaints
    ledger.ended(READER, "get", ["Unavailable"], 8.0, 9.0, said=["no holder can be reached"])


@pytest.mark.parametrize(
    ("invariant", "story"),
    [
        (RIGHT_BYTES, lambda ledger, _: ledger.wrong(READER, KEY, "17 bytes", 6.0)),
        (RIGHT_BYTES, lambda ledger, _: ledger.read(READER, KEY, 2, 6.0, 6.1)),
        (RIGHT_BYTES, lambda ledger, _: ledger.read(READER, "another", 1, 6.0, 6.1)),
        (REFUSED, refused),
        (EXPIRED, expired),
        (OWN_CHANGES, overwritten),
        (OWN_CHANGES, removed),
        (REMOVED, overwritten_elsewhere),
        (REMOVED, removed_while_apart),
        (KEPT, kept_and_absent),
        (KEPT, listed_copy_absent),
        (PINS, pin_vanished),
        (DURABLE, durable_lost),
        (ENDS, too_long),
        (ENDS, lambda ledger, _: ledger.hangs(READER, "get", 0.0, 21.0)),
        (CLEAR, lambda ledger, _: ledger.ended(READER, "get", [], 0.0, 1.0, unclear="KeyError(1)")),
        (CAUSE, failed_without_cause),
    ],
)
def test_a_broken_promise_is_seen(
    ledger: Ledger, timeline: Timeline, invariant: str, story: Callable[[Ledger, Timeline], object]
) -> None:
    story(ledger, timeline)
    assert broken(ledger) == {invariant}


def test_copies_that_are_lacking(ledger: Ledger) -> None:
    ledger.kept(KEY, 1, 5.0, wanted=3)
    assert ledger.lacking({KEY: 3}) == ledger.lacking({}) == []
    assert ledger.lacking({KEY: 2, "of nobody": 0}) == [KEY]
    ledger.removal_begins([KEY], 6.0)
    assert ledger.lacking({KEY: 2}) == []


def test_what_clients_write_is_judged_in_the_order_of_its_times(
    ledger: Ledger, timeline: Timeline, tmp_path: Path
) -> None:
    events = Events(ledger, timeline)
    writer, reader = tmp_path / "writer", tmp_path / "reader"
    events.add(READER, reader)
    events.add(WRITER, writer)
    for path, event in [
        (writer, {"at": 1.0, "begin": 1, "do": "put", "keys": {KEY: 1}}),
        (writer, {"at": 1.1, "end": 1, "results": [(KEY, "created", 1, None)]}),
        (writer, {"at": 2.0, "begin": 2, "do": "remove", "keys": {KEY: 0}}),
        (writer, {"at": 2.1, "end": 2, "results": [(KEY, "removed")]}),
        (writer, {"at": 2.9, "begin": 3, "do": "get"}),
        (writer, {"at": 3.0, "end": 3, "results": [(KEY, "value", 1)]}),
        (reader, {"at": 1.2, "begin": 1, "do": "get"}),
        (reader, {"at": 1.3, "end": 1, "results": [(KEY, "value", 1)]}),
        (reader, {"at": 1.4, "begin": 2, "do": "get"}),
    ]:
        line = {"errors": [], "said": [], "unclear": "", "keys": {}, **event}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    events.take(2.5)
    assert not ledger.complaints
    events.take(3.5)
    assert broken(ledger) == {OWN_CHANGES}
    assert [each.number for each in events.look_for_hangs(30.0)] == [READER]
    assert broken(ledger) == {OWN_CHANGES, ENDS}


def test_what_is_read_from_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"level": "info"}\nTraceback (most recent call last):\n{"level": "error"}\n{"l')
    seen, read, count = error_lines(log, 0)
    assert seen == ["Traceback (most recent call last):", '{"level": "error"}']
    assert (read, count) == (log.stat().st_size - 3, 3)
    log.write_text('{"event": "handed_over", "left_objects": 3}\n{"event": "stopped"}\n')
    assert (left_over(log, 0), left_over(log, log.stat().st_size)) == (3, 0)


@pytest.mark.parametrize(("rise", "allowed"), [(300, False), (0, True), (-300, True)])
def test_growth_is_seen_through_noise_and_outliers(rise: float, allowed: bool) -> None:
    series = []
    for second in range(0, 3600, 5):
        value = 1000 + min(second, 600) + second % 15 + max(0.0, (second - 1800) / 1800 * rise)
        series.append((float(second), value + (5000 if second % 50 == 0 else 0)))
    growth = growth_of(series)
    assert growth is not None
    assert GrowthLimit(100, 0.05, 9000).allows(growth) is allowed
    assert growth_of(series[:3]) is None, "of too little nothing is said"


ONE, OTHER = ("soak", "cycle 0 0001"), ("soak", "cycle 0 0002")


@pytest.mark.parametrize(
    ("still_held", "given_up", "complaints"),
    [
        ({}, {"a": 2, "b": 1}, 0),
        ({}, {"a": 1, "b": 1}, 1),  # two are gone from a peer that evicted one
        ({}, {"a": 2}, 1),  # a peer lost its copy, and says nothing of it
        ({ONE: {"c"}}, {"a": 2, "b": 1}, 1),  # a peer has it, and it was not found
        ({ONE: {"a"}, OTHER: {"a"}}, {}, 2),
    ],
)
def test_an_object_that_is_not_found_was_evicted_by_all_its_holders(
    still_held: dict[tuple[str, str], set[str]], given_up: dict[str, int], complaints: int
) -> None:
    not_found = {ONE: ["peer c"], OTHER: ["peer c", "peer d"]}
    held = {ONE: {"a", "b"}, OTHER: {"a"}}
    told = list(unexcused(not_found, held, still_held, Counter(given_up)))
    assert len(told) == complaints, told


def test_the_plan_is_a_function_of_the_seed_and_leaves_most_peers_alone() -> None:
    hosts = [role.host for role in ROLES]
    steady = [number for number, role in enumerate(ROLES) if role.steady]
    plan = plan_faults(1, 3600.0, hosts, steady)
    assert plan == plan_faults(1, 3600.0, hosts, steady) != plan_faults(2, 3600.0, hosts, steady)
    kinds = {fault.kind for fault in plan.faults}
    assert kinds >= {*ON_NETWORK, "kill", "stall", "restart", "leave", "full disk", "kill client"}
    for number, fault in enumerate(plan.faults):
        assert 0 < fault.at < fault.until < plan.seconds
        assert all(fault.until <= begin or fault.at >= end for begin, end in plan.calms)
        others = [each for each in plan.faults[:number] if each.until > fault.at]
        network = [each for each in others if each.kind in ON_NETWORK]
        assert not (network if fault.kind in ON_NETWORK else [])
        assert len(others) - len(network) <= MAX_PEERS_AT_ONCE
        if fault.kind in ("kill", "restart", "leave", "full disk", "kill client"):
            assert not set(fault.targets) & set(steady)
    loads = [list(islice(plan_load(*each, 8, 5.0), 50)) for each in ((1, 2, 0), (2, 2, 0))]
    assert loads[0] == list(islice(plan_load(1, 2, 0, 8, 5.0), 50)) != loads[1]
