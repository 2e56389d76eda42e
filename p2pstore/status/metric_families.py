"""Builders of metric families in prometheus-client's classes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from p2pstore.runtime.histograms import Histogram

FINE_SECONDS: Final = tuple(range(6, 25))
"""Exponents of the buckets of durations, in microseconds: 64 us to 16.8 s, each twice the one before."""
COARSE_SECONDS: Final = FINE_SECONDS[::2]
"""Where there are many labels."""
SIZES: Final = tuple(range(12, 31, 2))
"""Of sizes, in bytes: 4 KiB to 1 GiB, each four times the one before."""
MICROSECONDS: Final = 1e-6


PREFIX: Final = "p2pstore_"


Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the value that they have."""


def gauge(name: str, text: str, value: float) -> Metric:
    """One value."""
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> Metric:
    """One value that only grows."""
    return CounterMetricFamily(PREFIX + name, text, value)


def gauges(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """A value for each combination of labels."""
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)


def counters(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """As `gauges`, of values that only grow."""
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Labelled) -> Metric:
    for labels, value in values:
        family.add_metric(list(labels), value)
    return family


def histograms(
    name: str,
    text: str,
    label: str,
    values: Mapping[str, Histogram],
    *,
    buckets: Sequence[int],
    unit: float = 1,
) -> Metric:
    """A histogram for each value of a label. `buckets` are exponents of two, in what was counted; `unit` is what one of
    that is in the unit of the metric."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    ends = [str(round((1 << exponent) * unit, 6)) for exponent in buckets]
    for value, histogram in sorted(values.items()):
        sums = map(float, histogram.cumulative(buckets))
        family.add_metric(
            [value] if label else [],
            list(zip([*ends, "+Inf"], sums, strict=True)),
            round(histogram.total * unit, 6),
        )
    return family


def histogram(
    name: str, text: str, value: Histogram, *, buckets: Sequence[int], unit: float = 1
) -> Metric:
    """One histogram."""
    return histograms(name, text, "", {"": value}, buckets=buckets, unit=unit)
