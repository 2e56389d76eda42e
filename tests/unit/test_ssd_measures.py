"""Percentiles, bandwidth and the rest of what the tier counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.ssd_tier.health import Bandwidth, LatencyHistogram, Measures


@given(st.lists(st.floats(2e-6, 1000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_right_to_within_a_bucket(durations: list[float], share: float) -> None:
    histogram = LatencyHistogram()
    for each in durations:
        histogram.add(each)
    exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert exact <= histogram.percentile(share) * (1 + 1e-9)
    assert histogram.percentile(share) <= exact * 2**0.25 * (1 + 1e-9)


def test_a_histogram_is_told_by_powers_of_two() -> None:
    histogram = LatencyHistogram()
    assert histogram.octaves() == {"counts": [0], "total": 0}
    for microseconds in (1.5, 3.0, 3.9, 5000.0):
        histogram.add(microseconds / 1e6)
    told = histogram.octaves()
    assert told["counts"][:3] == [0, 1, 2]
    assert told["counts"][13:] == [1]  # at most 8,192 us
    assert told["total"] == 5008


def test_no_durations_no_percentiles() -> None:
    assert LatencyHistogram().percentile(0.5) == 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9])
def test_durations_out_of_range_are_counted(seconds: float) -> None:
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert histogram.count == 1
    assert histogram.percentile(0.5) > 0


def test_bandwidth_is_that_of_the_last_ten_seconds() -> None:
    bandwidth = Bandwidth()
    for second in range(20):
        bandwidth.add(100, now=second + 0.5)
    assert bandwidth.bytes_per_second(20.0) == 100
    assert bandwidth.bytes_per_second(25.0) == 50
    assert bandwidth.bytes_per_second(40.0) == 0
    assert bandwidth.total_bytes == 2000


def test_a_second_under_way_does_not_count_yet() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(1000, now=3.2)
    assert bandwidth.bytes_per_second(3.9) == 0
    assert bandwidth.bytes_per_second(4.0) == 100


def test_write_amplification() -> None:
    measures = Measures()
    assert measures.write_amplification == 0
    measures.stored_bytes = 1000
    measures.written.add(1250, now=0)
    measures.hits, measures.misses = 3, 1
    document = measures.document(now=0)
    assert document["write_amplification"] == 1.25
