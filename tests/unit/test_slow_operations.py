"""Which operations count as slow, and where their time is said to have gone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.runtime.histograms import BUCKETS, Histogram
from p2pstore.status.measures import (
    INTERVAL_SECONDS,
    LOG_INTERVAL_SECONDS,
    MAX_DIGESTS,
    MAX_STAGES,
    LoadMeter,
    Request,
    SlowOperation,
    SlowOperations,
    Stage,
    Watched,
    describe,
)
from tests.present import present

ONE, TWO = b"1" * 16, b"2" * 16


def end(slow: SlowOperations, watched: Watched, now: float, **changes: Any) -> SlowOperation | None:
    facts: dict[str, Any] = {
        "what": "plan",
        "key": "k",
        "keys": 1,
        "client": "c",
        "unix": 1000.0 + now,
        "outcome": "ok",
    }
    return slow.end(watched, Request(**{**facts, **changes}), now)


@pytest.mark.parametrize(
    ("threshold", "seconds", "kept"), [(0.1, 0.1, True), (0.1, 0.0999, False), (0.0, 60.0, False)]
)
def test_an_operation_at_the_threshold_is_slow(threshold: float, seconds: float, kept: bool) -> None:
    slow = SlowOperations(threshold)
    assert (end(slow, slow.begin([ONE], 0.0), seconds) is not None) is kept
    assert slow.total == kept
    assert len(slow.document()["operations"]) == kept


def test_a_stage_says_what_its_time_went_to() -> None:
    stage = Stage("pull", 1.5, "b", "tcp", parts=(("queue", 0.25), ("transfer", 1.25)))
    assert stage.document()["parts"] == {"queue": 0.25, "transfer": 1.25}
    assert "parts" not in Stage("lookup", 1.5).document()
    slow = SlowOperations(0.1)
    watched = slow.begin([ONE], 0.0)
    slow.stage([ONE], stage, 1.5)
    operation = present(end(slow, watched, 1.5))
    assert "pull from b by tcp 1.500 s (queue 0.250 s, transfer 1.250 s); ok" in describe(operation)


def test_stages_go_to_those_under_way_for_their_digests() -> None:
    slow = SlowOperations(0.1)
    first, second = slow.begin([ONE], 0.0), slow.begin([ONE, TWO], 0.0)
    lookup = Stage("lookup", 0.2, "b", "tcp")
    slow.stage([ONE, TWO], lookup, 0.3)
    slow.stage([TWO], Stage("pull", 0.5, "b", "shm"), 0.9)
    one, two = end(slow, first, 1.0), end(slow, second, 1.0)
    assert one is not None
    assert two is not None
    assert one.stages == (lookup,)
    assert [stage.what for stage in two.stages] == ["lookup", "pull"]
    assert one.waiting_seconds == pytest.approx(0.8)
    assert two.waiting_seconds == pytest.approx(0.3)
    slow.stage([ONE], lookup, 1.5)  # no operation is left that it belongs to
    assert slow.document()["operations"][-1]["stages"] == [
        {"what": "lookup", "seconds": 0.2, "peer": "b", "transport": "tcp", "outcome": "ok"}
    ]


def test_stages_at_the_same_time_are_not_counted_twice() -> None:
    slow = SlowOperations(0.1)
    watched = slow.begin([ONE], 10.0)
    for _ in range(3):
        slow.stage([ONE], Stage("lookup", 0.4), 10.5)
    slow.stage([ONE], Stage("lookup", 99.0), 10.2)  # began before the operation did
    done = present(end(slow, watched, 11.0))
    assert done.waiting_seconds == pytest.approx(0.5)


def test_a_wait_that_was_asked_for_is_not_slow() -> None:
    slow = SlowOperations(0.1)
    assert end(slow, slow.begin([ONE], 0.0, may_wait_seconds=30.0), 20.0) is None
    asked = slow.begin([ONE], 0.0, may_wait_seconds=30.0)
    slow.stage([ONE], Stage("pull", 0.5), 20.0)  # the pull after the wait is
    assert end(slow, asked, 20.0) is not None
    overlong = slow.begin([ONE], 0.0, may_wait_seconds=1.0)
    assert end(slow, overlong, 1.2) is not None


def test_the_ring_keeps_the_latest_and_all_are_bounded() -> None:
    slow = SlowOperations(0.1, entries=4)
    for number in range(10):
        watched = slow.begin([ONE] + [TWO] * 1000, 0.0)
        assert len(watched.digests) == MAX_DIGESTS
        for _ in range(2 * MAX_STAGES):
            slow.stage([ONE], Stage("lookup", 0.1), 0.5)
        assert len(watched.stages) == MAX_STAGES
        end(slow, watched, 1.0, key=str(number))
    document = slow.document()
    assert [each["key"] for each in document["operations"]] == ["9", "8", "7", "6"]
    assert document["total"] == 10
    assert document["threshold_seconds"] == 0.1


def test_lines_in_the_log_are_few_and_say_how_many_were_left_out() -> None:
    slow = SlowOperations(0.1)
    assert slow.may_log(0.0) == 0
    assert [slow.may_log(float(now)) for now in range(1, 4)] == [None, None, None]
    assert slow.may_log(LOG_INTERVAL_SECONDS) == 3
    assert slow.may_log(2 * LOG_INTERVAL_SECONDS) == 0


def test_a_line_says_where_the_time_went() -> None:
    stages = (Stage("lookup", 0.1, "b", "tcp", "no answer"), Stage("pull", 1.0, "c", "shm"))
    operation = SlowOperation(Request("lease", "k", 3, "c", 0.0), 1.5, 0.4, stages)
    assert describe(operation) == (
        "slow lease of k and 2 more: 1.500 s, waiting 0.400 s, lookup from b by tcp 0.100 s "
        "(no answer), pull from c by shm 1.000 s; ok"
    )


def test_the_share_of_a_core_is_told_after_an_interval() -> None:
    meter = LoadMeter(10.0, 1.0, 16)
    assert not meter.sample(10.5, 1.5, 0.0)
    assert meter.sample(10.0 + INTERVAL_SECONDS, 1.0 + INTERVAL_SECONDS / 2, 0.0)
    assert meter.told_permille == 500


def test_small_changes_are_not_told() -> None:
    meter = LoadMeter(0.0, 0.0, 16)
    assert meter.sample(10.0, 8.0, 0.0)
    assert not meter.sample(20.0, 15.0, 0.0)
    assert meter.told_permille == 800
    assert meter.sample(30.0, 15.0, 0.0)
    assert meter.told_permille == 0


def test_upload_slots_that_are_taken_are_load_too() -> None:
    """A peer that sends large answers in threads, or waits for slow readers, takes little of a core."""
    meter = LoadMeter(0.0, 0.0, 16)
    assert meter.sample(10.0, 1.0, 80.0)
    assert meter.told_permille == 500
    assert meter.sample(20.0, 2.0, 240.0)
    assert meter.told_permille == 1000
    assert meter.sample(30.0, 8.0, 240.0)
    assert meter.told_permille == 600


@given(st.lists(st.integers(0, 1 << 50)))
def test_a_value_is_in_the_bucket_that_ends_at_it_or_next_above_it(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert histogram.total == sum(values)
    for exponent, below in enumerate(histogram.cumulative(range(BUCKETS - 1))[:-1]):
        assert below == sum(value <= 1 << exponent for value in values)


@given(st.lists(st.integers(0, 1 << 40), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_end_of_the_bucket_it_lies_in(values: list[int], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    end = histogram.quantile(share)
    assert sum(value <= end for value in values) >= len(values) * share
    assert sum(value <= end // 2 for value in values) < len(values) * share or end == 1


def test_durations_are_microseconds_rounded_up() -> None:
    histogram = Histogram()
    for seconds in (0.0, 1e-9, 64e-6, 64.1e-6, 1e9):
        histogram.add_seconds(seconds)
    assert histogram.cumulative([5, 6, 7]) == [2, 3, 4, 5]
    assert histogram.counts[BUCKETS - 1] == 1


def test_what_others_counted_is_added_and_nonsense_is_not() -> None:
    one, other = Histogram(), Histogram()
    one.add(100, 3)
    other.add(5000)
    one.merge(other.trimmed(), other.total)
    assert (one.count, one.total) == (4, 5300)
    one.merge([-1, 1 << 60, *[0] * 100, 7], -5)
    assert (one.count, one.total) == (4, 5300)
    assert Histogram().trimmed() == []
    assert Histogram().quantile(0.5) == 0
