"""The statistics document as metrics, named by Prometheus' conventions. Pure.

What people read in `stats`, dashboards read here: nothing is counted for this alone. Labels are few and bounded:
transports, states, reasons, namespaces with a quota; never keys, and no other peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Document = Mapping[str, Any]

_GAUGES: Final = (
    ("uptime_seconds", "uptime_seconds", "Since the peer started."),
    ("memory_capacity_bytes", "memory_capacity_bytes", "What objects can occupy."),
    ("memory_used_bytes", "memory_used_bytes", "Occupied by objects and reservations."),
    ("leased_bytes", "leased_bytes", "Under leases, or being sent."),
    ("objects", "objects", "Objects in this peer's memory."),
    ("operations", "operations", "Operations under way."),
    ("known_locations", "known_locations", "Copies of others that this peer knows of."),
    ("floors", "floors", "Removals that are remembered."),
)
_CLIENTS: Final = (
    ("client_puts", "client_puts", "Puts of this machine's clients."),
    ("client_put_bytes", "client_put_bytes", "Bytes that they put."),
    ("client_reads", "client_reads", "Gets of this machine's clients that delivered."),
    ("client_read_bytes", "client_read_bytes", "Bytes that they got."),
    ("client_misses", "client_misses", "Gets that found nothing."),
)
_SSD_GAUGES: Final = (
    ("capacity_bytes", "What its segments hold."),
    ("live_bytes", "Occupied by objects that can be read."),
    ("objects", "Objects on the SSD."),
    ("queued_bytes", "On their way to the SSD."),
    ("retired_segments", "Given up after an error."),
    ("write_amplification", "Bytes written for each byte stored."),
)
_SSD_COUNTERS: Final = (
    ("hits", "Objects read."),
    ("misses", "Objects asked for that were not there, or not readable."),
    ("damaged", "Objects found damaged."),
    ("expired", "Objects whose time to live was over when they were asked for."),
    ("stored_objects", "Objects written."),
    ("stored_bytes", "Their bytes."),
    ("compressed_parts", "Parts that were compressed."),
    ("kept_records", "Records written again when their segment was reclaimed."),
    ("evicted_objects", "Objects given up for others."),
    ("reclaimed_segments", "Segments reclaimed."),
    ("bytes_read", "Bytes read from the device."),
    ("bytes_written", "Bytes written to the device."),
    ("syncs", "Syncs of the device."),
)
_SSD_STATES: Final = ("ok", "read_only", "off")


def exposition(peer: Document, cluster: Document) -> bytes:
    """Both parts of the statistics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(peer, cluster))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, peer: Document, cluster: Document) -> None:
        self._peer = peer
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        peer, counters = self._peer, self._peer["counters"]
        yield _labelled(
            GaugeMetricFamily("p2pstore_build_info", "This peer.", labels=["name", "software"]),
            [((peer["name"], peer["software"]), 1)],
        )
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(f"p2pstore_{name}", text, peer[field])
        for name, field, text in _CLIENTS:
            yield CounterMetricFamily(f"p2pstore_{name}", text, counters.get(field, 0))
        yield from _quotas(peer["quotas"])
        yield from _transfers(peer)
        yield from _repair(peer)
        yield _members(self._cluster)
        yield _labelled(
            CounterMetricFamily("p2pstore_events", "Other counters, by name.", labels=["event"]),
            [
                ((name,), count)
                for name, count in counters.items()
                if name not in {field for _, field, _ in _CLIENTS}
            ],
        )
        if "ssd" in peer:
            yield from _ssd(peer["ssd"])


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Sequence[tuple[Sequence[str], float]]
) -> Metric:
    for labels, value in values:
        family.add_metric(list(labels), value)
    return family


def _quotas(quotas: Mapping[str, Document]) -> Iterator[Metric]:
    """Only of namespaces that have one: what all others use is the rest of `memory_used_bytes`."""
    for field, text in (
        ("quota_bytes", "Memory kept for the namespace."),
        ("used_bytes", "Memory that it has, within its quota and above."),
        ("kept_bytes", "Of that, what is evicted for no other namespace."),
    ):
        family = GaugeMetricFamily(f"p2pstore_namespace_{field}", text, labels=["namespace"])
        yield _labelled(family, [((name,), use[field]) for name, use in quotas.items()])


def _transfers(peer: Document) -> Iterator[Metric]:
    ways = (
        ("served", "sent to other peers and their clients", ("objects", "bytes", "busy")),
        (
            "received",
            "that came from other peers, for this one and its clients",
            ("objects", "bytes", "failures"),
        ),
    )
    for way, text, what in ways:
        for each in what:
            family = CounterMetricFamily(
                f"p2pstore_{way}_{each}", f"{each.capitalize()} {text}.", labels=["transport"]
            )
            yield _labelled(
                family, [((transport,), use[each]) for transport, use in peer[way].items()]
            )


def _repair(peer: Document) -> Iterator[Metric]:
    repair = peer["repair"]
    yield CounterMetricFamily(
        "p2pstore_repaired_copies", "Copies made again after a loss.", repair["copies"]
    )
    yield CounterMetricFamily("p2pstore_repaired_bytes", "Their bytes.", repair["bytes"])
    yield GaugeMetricFamily(
        "p2pstore_lacking_objects", "Objects here with fewer copies than wanted.", repair["lacking"]
    )


def _members(cluster: Document) -> Metric:
    counts: dict[str, int] = {}
    for member in cluster["members"]:
        counts[member["status"]] = counts.get(member["status"], 0) + 1
    return _labelled(
        GaugeMetricFamily(
            "p2pstore_members", "Members that are believed alive.", labels=["status"]
        ),
        [((status,), count) for status, count in sorted(counts.items())],
    )


def _ssd(ssd: Document) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily("p2pstore_ssd_state", "1 for the state it is in.", labels=["state"]),
        [((state,), ssd["state"] == state) for state in _SSD_STATES],
    )
    for field, text in _SSD_GAUGES:
        yield GaugeMetricFamily(f"p2pstore_ssd_{field}", text, ssd[field])
    for field, text in _SSD_COUNTERS:
        yield CounterMetricFamily(f"p2pstore_ssd_{field}", text, ssd[field])
    yield _labelled(
        GaugeMetricFamily("p2pstore_ssd_segments", "Segments by state.", labels=["state"]),
        [((state,), count) for state, count in ssd["segments"].items()],
    )
    yield _labelled(
        CounterMetricFamily("p2pstore_ssd_errors", "Failures of the device.", labels=["operation"]),
        [((each,), ssd[f"{each}_errors"]) for each in ("read", "write", "sync", "discard")],
    )
    yield _labelled(
        CounterMetricFamily("p2pstore_ssd_refused", "Objects not written.", labels=["reason"]),
        [((reason,), count) for reason, count in ssd["refused"].items()],
    )
    latency = GaugeMetricFamily(
        "p2pstore_ssd_latency_seconds",
        "Of the latest objects read and written.",
        labels=["operation", "quantile"],
    )
    values = [
        ((operation, quantile), ssd[f"{operation}_latency"][field] / 1e3)
        for operation in ("read", "write")
        for quantile, field in (("0.5", "p50_ms"), ("0.9", "p90_ms"), ("0.99", "p99_ms"))
    ]
    yield _labelled(latency, values)
