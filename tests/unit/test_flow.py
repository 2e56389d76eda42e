"""Progress as a rate: the rate that is fast enough, and the rate expected of another holder."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import GIB, KIB, MIB
from p2pstore.runtime.flow import (
    ASSUMED_RATE,
    MAX_HOLDERS,
    MAX_LEAST_RATE,
    MIN_RATE,
    MIN_SOON_SECONDS,
    PATIENCE,
    REMEMBERED_SECONDS,
    TIMES_USUAL,
    Flow,
    HolderRates,
    Outrun,
    is_outrun,
)

ONE, OTHER, THIRD = b"one", b"other", b"third"


def seconds_until_too_slow(
    flow: Flow, count: int, every_seconds: float, most_seconds: float = 1000.0
) -> float:
    """Seconds that a reader waits for a sender of `count` bytes every `every_seconds`."""
    seconds = 0.0
    while seconds < most_seconds:
        seconds += every_seconds
        if not flow.moved(count, every_seconds):
            return seconds
    return seconds


@pytest.mark.parametrize(
    ("patience_seconds", "count", "every_seconds"),
    [(1.5, 1, 0.5), (1.5, 1460, 0.5), (1.5, 1, 1.4), (5.0, 1, 0.5), (5.0, 1, 4.0), (5.0, 1460, 0.5)],
)
def test_a_byte_now_and_then_is_no_progress(
    patience_seconds: float, count: int, every_seconds: float
) -> None:
    for begun in (0, GIB):  # a fast start gives no credit
        flow = Flow(patience_seconds)
        assert flow.moved(begun, 0.1)
        waited = seconds_until_too_slow(flow, count, every_seconds)
        assert waited <= 1.3 * patience_seconds + every_seconds
        assert type(flow.too_slow()) is DeadlineExceeded


@pytest.mark.slow
@pytest.mark.parametrize("rate", [100_000, 1_000_000, 10_000_000])
@pytest.mark.parametrize("piece", [1460, 64 * KIB, 256 * KIB])
def test_a_slow_link_is_fast_enough_where_there_is_no_other_way(rate: int, piece: int) -> None:
    assert seconds_until_too_slow(Flow(5.0), piece, piece / rate) >= 1000.0


def test_less_than_half_of_what_another_one_brings_is_too_slow() -> None:
    flow = Flow()
    for rate, is_enough in ((0.6, True), (0.4, False)):
        flow.begin(1.5, ASSUMED_RATE / PATIENCE)
        piece = 64 * KIB
        waited = seconds_until_too_slow(flow, piece, piece / (rate * ASSUMED_RATE), 100.0)
        assert (waited >= 100.0) is is_enough
        if not is_enough:
            assert waited < 8.0
            assert type(flow.too_slow()) is Outrun


def test_an_outage_of_less_than_the_patience_is_forgiven_again_and_again() -> None:
    flow = Flow(1.5)
    for _ in range(100):
        assert flow.moved(1, 1.4)
        assert flow.moved(MIB, 0.01)


def test_a_wait_that_no_stream_allows_was_this_process_standing_still() -> None:
    flow = Flow(1.5)
    assert flow.moved(1, 60.0)
    assert flow.waited_seconds == 0.0


def test_answers_make_up_for_round_trips() -> None:
    """Small objects over 300 ms: no other holder would be faster there."""
    flow = Flow()
    flow.begin(1.5, MAX_LEAST_RATE)
    for _ in range(100):
        assert flow.moved(1000, 0.29)
        flow.answered()
    flow.begin(1.5, MAX_LEAST_RATE)
    answers = 0
    while flow.moved(1000, 1.0):
        flow.answered()
        answers += 1
    assert answers < 4
    flow.begin(5.0)
    for _ in range(100):  # from an SSD that is all there is
        assert flow.moved(1000, 4.9)
        flow.answered()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.0, 2.0)), max_size=60))
def test_the_lag_of_any_stretch_is_bounded(moves: list[tuple[int, float]]) -> None:
    """As long as it is fast enough, every stretch has brought what it owes, but for the patience."""
    flow, kept = Flow(2.0), list[tuple[int, float]]()
    for count, seconds in moves:
        if not flow.moved(count, seconds):
            break
        kept.append((count, seconds))
    for first in range(len(kept)):
        count = sum(each for each, _ in kept[first:])
        seconds = sum(each for _, each in kept[first:])
        assert seconds <= 2.0 + count / MIN_RATE + 1e-6


# --- what others bring -----------------------------------------------------------------------


def brought(count: int, seconds: float) -> Flow:
    flow = Flow()
    flow.moved(count, seconds)
    return flow


def test_who_was_not_measured_is_assumed_to_be_usual() -> None:
    rates = HolderRates()
    assert rates.least([], 0.0) == MIN_RATE
    assert rates.least([ONE], 0.0) == ASSUMED_RATE / PATIENCE
    assert rates.least([ONE], 0.0, readers=4) == ASSUMED_RATE / PATIENCE / 4
    rates.measured(ONE, brought(1000, 0.01), 0.0)  # too little to say
    assert rates.expected(ONE, 0.0) == ASSUMED_RATE


def test_the_best_of_the_others_counts() -> None:
    rates = HolderRates()
    rates.measured(ONE, brought(MIB, 1.0), 0.0)
    rates.measured(OTHER, brought(4 * MIB, 1.0), 0.0)
    assert rates.least([ONE, OTHER], 1.0) == 4 * MIB / PATIENCE
    assert rates.least([ONE], 1.0) == MIB / PATIENCE
    assert rates.least([ONE, OTHER, THIRD], 1.0) == ASSUMED_RATE / PATIENCE
    rates.measured(THIRD, brought(GIB, 1.0), 1.0)
    assert rates.least([THIRD], 1.0) == MAX_LEAST_RATE


def test_who_brought_next_to_nothing_is_no_alternative_for_a_while() -> None:
    rates = HolderRates()
    rates.measured(ONE, brought(3, 1.5), 0.0)
    assert rates.least([ONE], REMEMBERED_SECONDS - 1) == MIN_RATE
    assert rates.least([ONE], REMEMBERED_SECONDS) == ASSUMED_RATE / PATIENCE


def test_two_slow_holders_are_not_changed_for_each_other() -> None:
    """A read that was too slow at one goes on at the other, which is as slow, and stays there; so does the next."""
    rates, rate = HolderRates(), 1_000_000
    changes = 0
    for number in range(10):
        at, other = (ONE, OTHER) if number % 2 else (OTHER, ONE)
        for _ in range(2):
            flow = Flow()
            flow.begin(1.5, rates.least([other], number))
            waited = seconds_until_too_slow(flow, 10_000, 10_000 / rate, 20.0)
            rates.measured(at, flow, number)
            if waited >= 20.0:
                break
            changes += 1
            at, other = other, at
    assert changes == 1


def test_holders_that_are_remembered_are_few() -> None:
    rates = HolderRates()
    for number in range(2 * MAX_HOLDERS):
        rates.measured(number.to_bytes(4), brought(MIB, 1.0), 0.0)
    assert len(rates._rates) == MAX_HOLDERS


def test_a_reader_is_outrun_by_one_that_is_twice_as_fast() -> None:
    assert is_outrun(2.1, 1.0)
    assert not is_outrun(1.9, 1.0)


def test_a_holder_is_to_begin_within_a_few_times_what_is_usual() -> None:
    rates, flow = HolderRates(), Flow()
    assert rates.begin_seconds(ONE) == math.inf
    for seconds in (0.001, 0.5, 0.0):
        flow.answer_seconds = seconds
        rates.answered(ONE, flow)
        assert rates.begin_seconds(ONE) == max(MIN_SOON_SECONDS, TIMES_USUAL * (seconds or 0.5))
    flow.answer_seconds = 0.001
    for _ in range(100):
        rates.answered(ONE, flow)
    assert rates.begin_seconds(ONE) == MIN_SOON_SECONDS
    for number in range(2 * MAX_HOLDERS):
        rates.answered(number.to_bytes(4), flow)
    assert len(rates._answers) == MAX_HOLDERS
    flow.begin(1.5)
    flow.moved(1, 0.1)
    flow.answered()
    flow.moved(1, 0.1)
    flow.answered()
    assert flow.answer_seconds == 0.1
