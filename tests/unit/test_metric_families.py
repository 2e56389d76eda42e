"""Families of metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from p2pstore.runtime.histograms import Histogram
from p2pstore.status.metrics import histograms


def written(*families: Metric) -> list[str]:
    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry).decode().splitlines()


def test_a_histogram_has_its_buckets_in_the_metrics_unit() -> None:
    counted = Histogram()
    for seconds in (0.00005, 0.001, 0.001025, 90.0):
        counted.add_seconds(seconds)
    lines = written(histograms("x_seconds", "X.", "by", {"tcp": counted}, (6, 10)))
    assert lines[2:] == [
        'p2pstore_x_seconds_bucket{by="tcp",le="6.4e-05"} 1.0',
        'p2pstore_x_seconds_bucket{by="tcp",le="0.001024"} 2.0',
        'p2pstore_x_seconds_bucket{by="tcp",le="+Inf"} 4.0',
        'p2pstore_x_seconds_count{by="tcp"} 4.0',
        'p2pstore_x_seconds_sum{by="tcp"} 90.002075',
    ]


def test_a_histogram_without_labels() -> None:
    counted = Histogram()
    counted.add(5000, 2)
    lines = written(histograms("x_bytes", "X.", "", {"": counted}, (12, 30)))
    assert lines[2:5] == [
        'p2pstore_x_bytes_bucket{le="4096"} 0.0',
        'p2pstore_x_bytes_bucket{le="1073741824"} 2.0',
        'p2pstore_x_bytes_bucket{le="+Inf"} 2.0',
    ]
