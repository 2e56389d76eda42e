"""Metrics of an SSD, from the statistics document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import (
    Metric,
)

from p2pstore.runtime.histograms import Histogram
from p2pstore.ssd_tier.write_admission import Refusal
from p2pstore.status.metric_families import (
    FINE_SECONDS,
    MICROSECONDS,
    counter,
    counters,
    gauge,
    gauges,
    histograms,
)

_SSD_GAUGES: Final = (
    ("capacity_bytes", "Capacity of its segments."),
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
    ("unanswered", "Reads abandoned because the disk did not answer."),
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
SSD_STATES: Final = ("ok", "read_only", "off")
_SSD_NAMES: Final = {"bytes_read": "read_bytes", "bytes_written": "written_bytes"}
"""Where the document has them otherwise than Prometheus' conventions, the unit at the end."""


def ssd_families(ssd: Mapping[str, Any]) -> Iterator[Metric]:
    """All of one SSD."""
    yield gauges(
        "ssd_state",
        "1 for the state it is in.",
        ["state"],
        [((state,), ssd["state"] == state) for state in SSD_STATES],
    )
    for field, text in _SSD_GAUGES:
        yield gauge(f"ssd_{field}", text, ssd[field])
    for field, text in _SSD_COUNTERS:
        yield counter(f"ssd_{_SSD_NAMES.get(field, field)}", text, ssd[field])
    yield gauges(
        "ssd_segments",
        "Segments by state.",
        ["state"],
        [((state,), count) for state, count in ssd["segments"].items()],
    )
    yield counters(
        "ssd_errors",
        "Failures of the device.",
        ["operation"],
        [((each,), ssd[f"{each}_errors"]) for each in ("read", "write", "sync", "discard")],
    )
    yield counters(
        "ssd_refused",
        "Objects not written.",
        ["reason"],
        [((reason.value,), ssd["refused"].get(reason.value, 0)) for reason in Refusal],
    )
    durations = {
        operation: Histogram(**ssd[f"{operation}_durations"]) for operation in ("read", "write")
    }
    yield histograms(
        "ssd_operation_seconds",
        "How long it took to read and to write objects.",
        "operation",
        durations,
        buckets=FINE_SECONDS,
        unit=MICROSECONDS,
    )
