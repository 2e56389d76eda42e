"""Which operations count as slow, and where their time is said to have gone."""

from typing import Any

import pytest

from p2pstore.status.measures import (
    LOG_INTERVAL_SECONDS,
    MAX_DIGESTS,
    MAX_STAGES,
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
