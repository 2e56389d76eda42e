"""Histograms by powers of two."""

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.runtime.histograms import BUCKETS, Histogram


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
