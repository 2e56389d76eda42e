"""The judges of a soak: each kind of broken promise is seen, and nothing beyond the promises is reported."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

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
    NOT_BROUGHT,
    OWN_CHANGES,
    PINS,
    REFUSED,
    REMOVED,
    RIGHT_BYTES,
    SPREAD_SECONDS,
    Ledger,
    Limits,
)
from tests.soak.peers import error_lines, left_over
from tests.soak.timeline import Timeline
from tests.soak.values import LENGTHS, length_of, number_in, number_of, value_of

WRITER, READER, THIRD = 0, 1, 2
KEY = "cycle 0 0001"
LATER = 10.0 + SPREAD_SECONDS + 1.0


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline(3)
    for peer in range(3):
        timeline.begin_life(peer, 0.0)
    return timeline


@pytest.fixture
def ledger(timeline: Timeline) -> Ledger:
    return Ledger(timeline, Limits(operation=20.0, reach=10.0))


def put(ledger: Ledger, number: int, at: float = 5.0, key: str = KEY, **options: Any) -> None:
    ledger.issued(WRITER, key, number, at - 0.1)
    ledger.stored(key, number, at, **options)


def broken(ledger: Ledger) -> set[str]:
    return {complaint.invariant for complaint in ledger.complaints}


# --- values ---------------------------------------------------------------------------------------


def test_a_value_is_known_to_the_last_byte() -> None:
    lengths = set()
    for count in range(1, 200):
        number = number_of(count % 3, count)
        value = value_of(KEY, number)
        lengths.add(len(value))
        assert len(value) == length_of(KEY, number)
        assert number_in(KEY, value) == number
    assert lengths == set(LENGTHS)


@pytest.mark.parametrize("place", [0, 7, 8, 4095, 65_536, -1])
def test_one_wrong_byte_is_seen(place: int) -> None:
    number = next(n for n in range(1, 100) if length_of(KEY, n) > 100_000)
    value = bytearray(value_of(KEY, number))
    value[place] ^= 1
    assert number_in(KEY, memoryview(value)) is None


def test_a_value_that_is_short_moved_or_of_another_key_is_seen() -> None:
    number = next(n for n in range(1, 100) if length_of(KEY, n) > 100_000)
    value = value_of(KEY, number)
    assert number_in(KEY, value[:-1]) is None
    assert number_in(KEY, value + b"x") is None
    assert number_in(KEY, b"") is None
    assert number_in(KEY, value[:8] + value[16:24] + value[8:16] + value[24:]) is None
    assert number_in("cycle 0 0002", value) is None


# --- reads ----------------------------------------------------------------------------------------


def test_right_reads_are_no_complaint(ledger: Ledger) -> None:
    put(ledger, 1)
    put(ledger, 2, 6.0, overwrite=True)
    ledger.read(READER, KEY, 2, 7.0, 7.1)
    ledger.read(READER, KEY, 1, 7.0, 7.1)  # there is no promise that it knows already
    ledger.read(WRITER, KEY, 1, 5.5, 7.1)  # it began before
    ledger.read(READER, KEY, None, 7.0, 7.1)  # it may be evicted
    ledger.failed(READER, KEY, "Unavailable", 7.0, 7.1)
    assert not ledger.complaints
    assert ledger.checked[RIGHT_BYTES] == 3


def test_wrong_bytes(ledger: Ledger) -> None:
    ledger.wrong(READER, KEY, "17 bytes", 6.0)
    assert broken(ledger) == {RIGHT_BYTES}


@pytest.mark.parametrize("key", [KEY, "another"])
def test_a_value_that_nobody_put(ledger: Ledger, key: str) -> None:
    put(ledger, 1)
    ledger.read(READER, key, 2, 6.0, 6.1)
    assert broken(ledger) == {RIGHT_BYTES}


def test_a_value_that_a_put_kept_out(ledger: Ledger) -> None:
    put(ledger, 1)
    ledger.issued(WRITER, KEY, 2, 6.0)
    ledger.read(READER, KEY, 2, 6.1, 6.2)  # not yet known
    ledger.refused(KEY, 2)
    assert not ledger.complaints
    ledger.read(READER, KEY, 2, 7.0, 7.1)
    assert broken(ledger) == {REFUSED}


def test_a_value_after_its_time_to_live(ledger: Ledger) -> None:
    put(ledger, 1, expires=10.0)
    ledger.read(READER, KEY, 1, 11.9, 12.5)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, 12.1, 12.5)
    assert broken(ledger) == {EXPIRED}


def test_an_older_value_on_the_peer_of_the_overwrite(ledger: Ledger) -> None:
    put(ledger, 1)
    put(ledger, 2, 6.0, overwrite=True)
    ledger.read(WRITER, KEY, 1, 6.01, 6.1)
    assert broken(ledger) == {OWN_CHANGES}


def test_a_removed_value_on_the_peer_of_the_removal(ledger: Ledger) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 6.0)
    ledger.read(WRITER, KEY, 1, 6.01, 6.1)
    assert broken(ledger) == {OWN_CHANGES}


def test_after_the_peer_was_killed_its_own_memory_of_the_removal_is_not_relied_on(
    ledger: Ledger, timeline: Timeline
) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 6.0)
    timeline.end_life(WRITER, 6.1)
    timeline.begin_life(WRITER, 8.0)
    ledger.read(WRITER, KEY, 1, 9.0, 9.1)
    assert not ledger.complaints


def test_a_removed_value_elsewhere_after_a_while(ledger: Ledger) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 10.0)
    ledger.read(READER, KEY, 1, LATER - 2, LATER)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, LATER, LATER)
    assert broken(ledger) == {REMOVED}


def test_an_overwritten_value_elsewhere_after_a_while(ledger: Ledger) -> None:
    put(ledger, 1)
    put(ledger, 2, 10.0, overwrite=True)
    ledger.read(READER, KEY, 2, LATER, LATER)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, LATER, LATER)
    assert broken(ledger) == {REMOVED}


def test_what_was_put_after_the_removal_may_be_read(ledger: Ledger) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 10.0)
    put(ledger, 2, 11.0)
    ledger.read(WRITER, KEY, 2, LATER, LATER)
    assert not ledger.complaints


def test_a_put_that_failed_may_still_be_done(ledger: Ledger) -> None:
    ledger.issued(WRITER, KEY, 1, 5.0)
    put(ledger, 2, 10.0, overwrite=True)
    ledger.read(WRITER, KEY, 1, LATER, LATER)
    assert not ledger.complaints


@pytest.mark.parametrize("apart", [True, False])
def test_time_apart_does_not_count(ledger: Ledger, timeline: Timeline, apart: bool) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 10.0)
    trouble = timeline.begin_trouble([READER], 20.0, apart=apart)
    trouble.ended = 40.0
    ledger.read(READER, KEY, 1, 40.0 + SPREAD_SECONDS - 1, 101.0)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, 40.0 + SPREAD_SECONDS + 1, 103.0)
    assert broken(ledger) == {REMOVED}


def test_a_life_that_began_later_counts_from_its_begin(ledger: Ledger, timeline: Timeline) -> None:
    put(ledger, 1)
    ledger.removed([KEY], 10.0)
    timeline.end_life(READER, 30.0)
    timeline.begin_life(READER, 50.0)
    ledger.read(READER, KEY, 1, 50.0 + SPREAD_SECONDS - 1, 130.0)
    assert not ledger.complaints
    ledger.read(READER, KEY, 1, 50.0 + SPREAD_SECONDS + 1, 130.0)
    assert broken(ledger) == {REMOVED}


# --- what is kept ---------------------------------------------------------------------------------


def keep(ledger: Ledger, *, durable: bool = False) -> None:
    put(ledger, 1)
    ledger.kept(KEY, 1, 5.0, durable=durable)


@pytest.mark.parametrize("number_or_error", [None, "Unavailable", "DeadlineExceeded"])
def test_what_is_kept_is_not_read(ledger: Ledger, number_or_error: str | None) -> None:
    keep(ledger)
    if number_or_error is None:
        ledger.read(READER, KEY, None, 16.0, 16.1)
    else:
        ledger.failed(READER, KEY, number_or_error, 16.0, 16.1)
    assert broken(ledger) == {KEPT}


def test_a_copy_that_was_listed_is_relied_on(ledger: Ledger, timeline: Timeline) -> None:
    keep(ledger)
    ledger.listed(THIRD, [KEY], 6.0, 6.1)
    timeline.end_life(WRITER, 7.0)
    ledger.read(READER, KEY, None, 15.0, 15.1)
    assert not ledger.complaints, "it was not in reach for long enough"
    ledger.read(READER, KEY, None, 17.0, 17.1)
    assert broken(ledger) == {KEPT}


@pytest.mark.parametrize(
    ("reader", "away", "error", "complains"),
    [
        (0, 3, "Unavailable", False),
        (0, 3, None, True),  # without an answer of any home, "absent" is wrong
        (0, 2, "Unavailable", True),  # one of three homes was there
        (0, 3, "IntegrityError", True),
        (1, 3, "Unavailable", True),  # it knows all itself
    ],
)
def test_who_asks_others_where_a_key_is_may_find_none_of_them(
    reader: int, away: int, error: str | None, *, complains: bool
) -> None:
    timeline = Timeline(7)
    for peer in range(7):
        timeline.begin_life(peer, 0.0)
    ledger = Ledger(timeline, Limits(operation=20.0, reach=10.0), askers=frozenset({0}))
    ledger.issued(6, "kept 6 1", 1, 4.9)
    ledger.stored("kept 6 1", 1, 5.0)
    ledger.kept("kept 6 1", 1, 5.0)
    timeline.begin_trouble(range(2, 2 + away), 12.0)
    if error is None:
        ledger.read(reader, "kept 6 1", None, 16.0, 16.1)
    else:
        ledger.failed(reader, "kept 6 1", error, 16.0, 16.1)
    assert broken(ledger) == ({KEPT} if complains else set())


@pytest.mark.parametrize("error", ["StoreClosed", "NoLocalPeer", "CapacityExceeded"])
def test_errors_that_are_not_about_the_holder(ledger: Ledger, error: str) -> None:
    keep(ledger)
    ledger.failed(READER, KEY, error, 16.0, 16.1)
    assert not ledger.complaints


def test_nobody_relies_on_a_holder_that_was_killed_or_could_not_be_reached(
    ledger: Ledger, timeline: Timeline
) -> None:
    keep(ledger)
    trouble = timeline.begin_trouble([WRITER], 18.0, apart=True)
    trouble.ended = 19.0
    ledger.read(READER, KEY, None, 28.0, 28.1)
    timeline.end_life(WRITER, 40.0)
    timeline.begin_life(WRITER, 41.0)
    ledger.read(READER, KEY, None, 60.0, 60.1)
    assert not ledger.complaints


def test_what_is_being_removed_need_not_be_read(ledger: Ledger) -> None:
    keep(ledger)
    assert ledger.is_kept(KEY)
    ledger.removal_begins([KEY], 16.0)
    assert not ledger.is_kept(KEY)
    ledger.read(READER, KEY, None, 15.9, 16.1)
    assert not ledger.complaints


def test_a_pinned_copy_that_vanished(ledger: Ledger) -> None:
    keep(ledger)
    ledger.listed(WRITER, [KEY], 6.0, 6.1)
    assert ledger.checked[PINS] == 1
    ledger.listed(WRITER, [], 7.0, 7.1)
    assert broken(ledger) == {PINS}


def test_a_pinned_copy_that_another_peer_took(ledger: Ledger) -> None:
    """Where there is no room for it at its writer."""
    put(ledger, 1)
    ledger.kept(KEY, 1, 5.0, here=False, durable=True)
    ledger.listed(WRITER, [], 7.0, 7.1)
    assert not ledger.complaints
    ledger.listed(THIRD, [KEY], 8.0, 8.1)
    ledger.listed(THIRD, [], 9.0, 9.1)
    assert broken(ledger) == {PINS}


def test_a_pinned_copy_ends_with_its_peer_or_its_removal(
    ledger: Ledger, timeline: Timeline
) -> None:
    keep(ledger)
    ledger.listed(READER, [KEY], 6.0, 6.1)
    timeline.end_life(READER, 7.0)
    timeline.begin_life(READER, 8.0)
    ledger.listed(READER, [], 9.0, 9.1)
    ledger.removal_begins([KEY], 10.0)
    ledger.listed(WRITER, [], 10.1, 10.2)
    assert not ledger.complaints


def test_what_was_durable_is_lost(ledger: Ledger, timeline: Timeline) -> None:
    keep(ledger, durable=True)
    timeline.end_life(WRITER, 10.0)
    timeline.begin_life(WRITER, 20.0)
    ledger.read(READER, KEY, None, 29.0, 29.1)
    assert not ledger.complaints
    ledger.read(READER, KEY, None, 31.0, 31.1)
    assert broken(ledger) == {DURABLE}


def test_what_was_durable_may_be_reclaimed(ledger: Ledger, timeline: Timeline) -> None:
    keep(ledger, durable=True)
    ledger.reclaimed(WRITER, 8.0)
    timeline.end_life(WRITER, 10.0)
    timeline.begin_life(WRITER, 20.0)
    ledger.read(READER, KEY, None, 31.0, 31.1)
    assert not ledger.complaints


def test_copies_that_are_lacking(ledger: Ledger) -> None:
    put(ledger, 1)
    ledger.kept(KEY, 1, 5.0, wanted=3)
    assert ledger.lacking({KEY: 3}) == []
    assert ledger.lacking({KEY: 2, "of nobody": 0}) == [KEY]
    assert ledger.lacking({}) == [], "all were lost"
    ledger.removal_begins([KEY], 6.0)
    assert ledger.lacking({KEY: 2}) == []


# --- operations -----------------------------------------------------------------------------------


def test_operations_that_take_too_long(ledger: Ledger, timeline: Timeline) -> None:
    ledger.ended(READER, "get", [], 0.0, 19.0)
    timeline.stood_still(30.0, 40.0)
    ledger.ended(READER, "get", [], 25.0, 50.0)
    assert not ledger.hangs(READER, "get", 25.0, 50.0)
    assert not ledger.complaints, "the machine stood still meanwhile"
    ledger.ended(READER, "get", [], 25.0, 56.0)
    assert broken(ledger) == {ENDS}


def test_an_operation_that_hangs(ledger: Ledger) -> None:
    assert ledger.hangs(READER, "get", 0.0, 21.0)
    assert broken(ledger) == {ENDS}


def test_an_error_of_another_kind(ledger: Ledger) -> None:
    ledger.ended(READER, "get", [], 0.0, 1.0, unclear="KeyError(1)")
    assert broken(ledger) == {CLEAR}


def test_failures_without_a_cause(ledger: Ledger, timeline: Timeline) -> None:
    ledger.ended(READER, "get", ["Unavailable"], 0.0, 1.0)
    ledger.calm_begins(2.0)
    ledger.ended(READER, "put", ["CapacityExceeded"], 3.0, 4.0)
    ledger.calm_ends(10.0)
    ledger.ended(READER, "get", ["Unavailable"], 9.0, 11.0)
    ledger.ended(READER, "get", ["Unavailable"], 1.0, 4.0)
    timeline.stood_still(5.0, 7.0)
    ledger.ended(READER, "update", ["DeadlineExceeded"], 4.0, 7.1)
    full = f"none of 1 known copies could be read: {NOT_BROUGHT} (tcp)"
    ledger.ended(READER, "get", ["Unavailable"], 8.0, 9.0, said=[full])
    assert not ledger.complaints
    ledger.ended(READER, "get", ["Unavailable"], 8.0, 9.0, said=["no holder can be reached"])
    assert broken(ledger) == {CAUSE}
    ledger.complaints.clear()
    ledger.ended(READER, "get", ["Unavailable"], 8.0, 9.0)  # heard of only now
    assert broken(ledger) == {CAUSE}


# --- events ---------------------------------------------------------------------------------------


def test_what_clients_write_is_judged_in_the_order_of_its_times(
    ledger: Ledger, timeline: Timeline, tmp_path: Path
) -> None:
    events = Events(ledger, timeline)
    writer, reader = tmp_path / "writer", tmp_path / "reader"
    events.add(READER, reader)
    events.add(WRITER, writer)
    lines: list[tuple[Path, dict[str, Any]]] = [
        (writer, {"at": 1.0, "begin": 1, "do": "put", "keys": {KEY: 1}}),
        (writer, {"at": 1.1, "end": 1, "results": [(KEY, "created", 1, None)]}),
        (writer, {"at": 2.0, "begin": 2, "do": "remove", "keys": {KEY: 0}}),
        (writer, {"at": 2.1, "end": 2, "results": [(KEY, "removed")]}),
        (writer, {"at": 2.9, "begin": 3, "do": "get"}),
        (writer, {"at": 3.0, "end": 3, "results": [(KEY, "value", 1)]}),
        (reader, {"at": 1.2, "begin": 1, "do": "get"}),
        (reader, {"at": 1.3, "end": 1, "results": [(KEY, "value", 1)]}),
        (reader, {"at": 1.4, "begin": 2, "do": "get"}),
    ]
    for path, event in lines:
        with path.open("a") as file:
            file.write(
                json.dumps({"errors": [], "said": [], "unclear": "", "keys": {}} | event) + "\n"
            )
    events.take(2.5)
    assert not ledger.complaints
    events.take(3.5)
    assert broken(ledger) == {OWN_CHANGES}
    assert events.traffic.operations == {"put": 1, "remove": 1, "get": 2}
    assert [each.number for each in events.look_for_hangs(30.0)] == [READER]
    assert broken(ledger) == {OWN_CHANGES, ENDS}
    assert not events.look_for_hangs(40.0), "it was told of"


def test_errors_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        '{"level": "info"}\nTraceback (most recent call last):\n{"level": "error"}\n{"le'
    )
    lines, read, count = error_lines(log, 0)
    assert lines == ["Traceback (most recent call last):", '{"level": "error"}']
    assert (read, count) == (log.stat().st_size - 4, 3)
    with log.open("a") as file:
        file.write('vel": "critical"}\n')
    assert error_lines(log, read)[0] == ['{"level": "critical"}']


def test_what_a_leaving_peer_left_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"event": "leaving"}\n')
    assert left_over(log, 0) == 0
    log.write_text('{"event": "handed_over", "left_objects": 3}\n{"event": "stopped"}\n')
    assert left_over(log, 0) == 3
    assert left_over(log, log.stat().st_size) == 0


# --- growth ---------------------------------------------------------------------------------------


def series(rise: float, *, outliers: bool = False) -> list[tuple[float, float]]:
    """An hour that begins with warming up; `rise` in its second half."""
    made = []
    for second in range(0, 3600, 5):
        value = 1000 + min(second, 600) + (second % 15) + max(0.0, (second - 1800) / 1800 * rise)
        made.append((float(second), value + (5000 if outliers and second % 50 == 0 else 0)))
    return made


def test_growth_is_seen_through_noise_and_outliers() -> None:
    for outliers in (False, True):
        growth = growth_of(series(300, outliers=outliers))
        assert growth is not None
        assert growth.rise == pytest.approx(300, abs=20)
        assert growth.settled
        assert not GrowthLimit(100, 0.05, 9000).allows(growth)
        assert GrowthLimit(100, 0.25, 9000).allows(growth)


def test_what_warms_up_or_falls_is_flat() -> None:
    for rise in (0.0, -300.0):
        growth = growth_of(series(rise, outliers=True))
        assert growth is not None
        assert GrowthLimit(20, 0.0, 9000).allows(growth)


def test_of_a_short_life_its_height_is_judged() -> None:
    growth = growth_of([each for each in series(0) if each[0] < 800])
    assert growth is not None
    assert not growth.settled
    assert growth.rise > 150
    assert GrowthLimit(20, 0.0, 1700).allows(growth)
    assert not GrowthLimit(20, 0.0, 1500).allows(growth)


def test_of_too_little_nothing_is_said() -> None:
    assert growth_of([]) is None
    assert growth_of([(float(second), 1.0) for second in range(15)]) is None


def test_infinity_is_no_time_of_a_standstill(timeline: Timeline) -> None:
    timeline.begin_trouble([READER], 5.0)
    assert timeline.standstill(0.0, 100.0) == 0
    assert not timeline.undisturbed(READER, WRITER, 6.0, 7.0)
    assert timeline.undisturbed(THIRD, WRITER, 6.0, 7.0)
    assert timeline.life_at(READER, math.inf) is None


# --- the last look: an object held anywhere is read, unless it was evicted -------------------


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
def test_what_is_not_found_was_evicted_by_all_who_had_it(
    still_held: dict[tuple[str, str], set[str]], given_up: dict[str, int], complaints: int
) -> None:
    not_found = {ONE: ["peer c"], OTHER: ["peer c", "peer d"]}
    held = {ONE: {"a", "b"}, OTHER: {"a"}}
    told = list(unexcused(not_found, held, still_held, Counter(given_up)))
    assert len(told) == complaints, told
