"""A peer's metrics, named by Prometheus' conventions, from the statistics document and the measures. Pure.

Labels are few and bounded: transports, kinds of requests, states, reasons, 32 namespaces, 16 checkpoints; never keys or
other peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from p2pstore.core.copies.cold_copies import Gone
from p2pstore.core.copies.earlier_life import FATES
from p2pstore.runtime.histograms import Histogram
from p2pstore.runtime.stepping import Steps
from p2pstore.ssd_tier.write_admission import WriteRefusal
from p2pstore.status.measures import MAX_NAMESPACES, OTHERS, Measures

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

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
    name: str, text: str, label: str, values: Mapping[str, Histogram], buckets: Sequence[int]
) -> Metric:
    """A histogram for each value of a label; without a label, the one of "". `buckets` are exponents of two. Values
    told in seconds are counted in microseconds."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    unit = MICROSECONDS if name.endswith("_seconds") else 1
    ends = [str(round((1 << exponent) * unit, 6)) for exponent in buckets]
    for value, histogram in sorted(values.items()):
        sums = map(float, histogram.cumulative(buckets))
        counted = list(zip([*ends, "+Inf"], sums, strict=True))
        family.add_metric([value] if label else [], counted, round(histogram.total * unit, 6))
    return family


Document = Mapping[str, Any]
_SINGLE: Final = {
    "uptime_seconds": "Since the peer started.",
    "memory_capacity_bytes": "Memory for objects.",
    "memory_used_bytes": "Occupied by objects and reservations.",
    "leased_bytes": "Under leases, or being sent.",
    "objects": "Objects in this peer's memory.",
    "operations": "Operations under way.",
    "known_locations": "Copies of others that this peer knows of.",
    "floors": "Removals that are remembered.",
    "floors_permille": "Of what there is room for: removals are slowed from 800 on.",
    "floors_refused": "Removals by others that had to wait, as there was no room.",
    "local_clients": "Clients on this machine that are connected.",
    "cluster_keys": "Keys that this peer accepts: more than one while a key is being replaced.",
    "bootstrap_addresses": "Addresses at which this peer is to find others.",
    "members_refused": "Members that there was no room for.",
    "joined": "1 once another peer has answered.",
    "lacking_objects": "Objects here with fewer copies than wanted and than peers offer memory.",
    "repaired_copies": "Copies made again after a loss.",
    "repaired_bytes": "Their bytes.",
    "gossip_local_health": "How little this peer trusts its own probes: 0 is best, 8 worst.",
    "gossip_neighbours": "Members that gossip talks to now.",
    "control_connections": "Open control connections.",
    "held_for_others_bytes": "Incomplete or unanswered requests, and unread answers.",
    "hoarders_ended": "Connections cut for the memory held for them.",
    "stamps_ahead_seconds": "How far this peer's next stamp is ahead of its own wall clock.",
}
"""Metrics with one value. It stands in the statistics document under the same name, or:"""
_ELSEWHERE: Final = {
    "lacking_objects": "repair.lacking",
    "repaired_copies": "repair.copies",
    "repaired_bytes": "repair.bytes",
    "gossip_local_health": "gossip.local_health",
    "gossip_neighbours": "connections.neighbours",
    "control_connections": "connections.open",
    "held_for_others_bytes": "places.held_bytes",
    "hoarders_ended": "places.hoarders_ended",
}
_ONLY_GROW: Final = ("repaired_copies", "repaired_bytes", "hoarders_ended")
_PLACES: Final = (
    (gauges, "connection_places_taken", "Taken places for other members' connections.", "taken"),
    (gauges, "connection_places", "Places for other members' connections.", "limit"),
    (gauges, "connection_places_largest", "Of the member that has most.", "largest.places"),
    (
        *(counters, "connections_yielded"),
        *("Connections closed for a wanted one when all places were taken.", "yielded"),
    ),
    (
        *(counters, "connections_refused"),
        *("Members' connections refused because all places were in use.", "refused"),
    ),
)
"""By kind: the path of each value below `places`, of control and of data connections."""
_CLIENTS: Final = (
    ("client_puts", "Puts of this machine's clients."),
    ("client_put_bytes", "Bytes that they put."),
    ("client_puts_failed", "Puts that failed."),
    ("client_puts_kept_existing", "Puts that left another value as it was."),
    ("client_puts_short_of_copies", "Puts that made fewer copies than were asked for."),
    ("client_reads", "Gets that read in place, in this peer's memory."),
    ("client_read_bytes", "Bytes that they got."),
    ("client_leases", "Gets that were given a view of this peer's memory."),
    ("client_misses", "Gets that found nothing, or no reachable holder."),
    ("transport_fallbacks", "Reads for which a transport gave way to another one."),
    ("last_copies_dropped", "Objects given up without another known copy."),
    ("copies_offered", "Last copies offered to other peers before they would be evicted."),
    ("offers_taken", "Of these, taken."),
    ("offers_refused", "Of these, refused or failed."),
    ("offered_bytes", "Bytes of those that were taken."),
    ("holder_failures", "Reads at a holder that did not deliver."),
    ("holders_too_slow", "Of these, silent or slow holders."),
    ("version_signatures", "Signatures under what this peer wrote, for copies elsewhere."),
    ("contradicting_copies", "Copies announced with other bytes than their writers'."),
    ("objects_spoilt", "Objects in this peer's memory whose bytes were found spoilt."),
    ("memory_restored", "Repairs of what clients wrote into memory of the peer alone."),
)
_GONE: Final = "gone_"
_RDMA: Final = (
    ("devices", "RDMA devices that know this peer's memory."),
    ("lost_devices", "Of these, failed since the start."),
    ("readers", "Queue pairs by which others read this peer."),
)
ANSWERS: Final = {
    "memory": ("client_reads", "client_leases"),
    "ssd": ("client_reads_from_ssd",),
    "peers": ("client_reads_elsewhere",),
    "nobody": ("client_misses",),
}
"""Sources of clients' gets, and their counters."""


def exposition(peer: Document, cluster: str, measures: Measures) -> Steps[bytes]:
    """All metrics in Prometheus' text format; `cluster` is its name."""
    parts: list[bytes] = []
    for metric in _families(peer, cluster, measures):
        parts.append(generate_latest(_One(metric)))
        yield
    return b"".join(parts)


class _One(Collector):
    """A single metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _families(peer: Document, cluster: str, measures: Measures) -> Iterator[Metric]:
    labels = (peer["name"], cluster, peer["software"])
    yield gauges("build_info", "This peer.", ["name", "cluster", "software"], [(labels, 1)])
    for name, text in _SINGLE.items():
        kind = counter if name in _ONLY_GROW else gauge
        yield kind(name, text, _at(peer, _ELSEWHERE.get(name, name)))
    yield from _clients(peer["counters"])
    yield from _latencies(measures)
    yield from _namespaces(measures)
    yield from _kept(peer)
    yield from _quotas(peer["quotas"])
    yield from _transfers(peer)
    yield from _gossip(peer, measures)
    yield from _checkpoints(peer["checkpoints"])
    yield from _follows(peer["follows"])
    for field, text in _RDMA:
        yield gauge(f"rdma_{field}", text, peer.get("rdma", {}).get(field, 0))
    if "ssd" in peer:
        yield from ssd_families(peer["ssd"])


def _at(document: Document, path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value[name]
    return value


def _labelled(peer: Document) -> Iterator[Metric]:
    yield gauges(
        "members",
        "Members of the cluster by state, this peer included. Dead ones are remembered for a day.",
        ["status"],
        [((status,), count) for status, count in peer["gossip"]["members"].items()],
    )
    bytes_of = [((way,), peer["gossip"][f"{way}_bytes"]) for way in ("sent", "received")]
    yield counters("gossip_bytes", "Bytes on control connections.", ["direction"], bytes_of)
    for kind, name, text, path in _PLACES:
        values = [((each,), _at(peer["places"][each], path)) for each in ("control", "data")]
        yield kind(name, text, ["kind"], values)


def _clients(counted: Document) -> Iterator[Metric]:
    for field, text in _CLIENTS:
        yield counter(field, text, counted.get(field, 0))
    text = "Gets of this machine's clients, by where the value was."
    gets = [
        ((answer,), sum(counted.get(each, 0) for each in fields)) for answer, fields in ANSWERS.items()
    ]
    yield counters("client_gets", text, ["answer"], gets)
    text = "Objects that this peer gave up, by why, and what that costs."
    gone = [((why.value,), counted.get(_GONE + why, 0)) for why in Gone]
    yield counters("objects_gone", text, ["reason"], gone)
    known = {field for field, _ in _CLIENTS}.union(*ANSWERS.values())
    known |= {f"kept_{unit}_{fate}" for unit in ("objects", "bytes") for fate in FATES}
    others = [((name,), count) for name, count in counted.items() if name not in known]
    others = [each for each in others if not each[0][0].startswith(_GONE)]
    yield counters("events", "Other counters, by name.", ["event"], others)


def _kept(peer: Document) -> Iterator[Metric]:
    counted = peer["counters"]
    yield gauge("kept_objects_unchecked", "Not looked at yet.", peer["objects_returning"])
    for unit, text in (("objects", "Objects"), ("bytes", "Bytes")):
        yield counters(
            f"kept_{unit}",
            f"{text} of an earlier life in kept memory: shown again, damaged, or perhaps removed meanwhile.",
            ["fate"],
            [((fate,), counted.get(f"kept_{unit}_{fate}", 0)) for fate in FATES],
        )


_HISTOGRAMS: Final[Sequence[tuple[str, str, str, Sequence[int], str]]] = (
    (
        *("client_request_seconds", "request", "requests", COARSE_SECONDS),
        "How long requests of this machine's clients took the peer. Reads in place send no request.",
    ),
    (
        *("read_seconds", "transport", "reads", FINE_SECONDS),
        "How long it took to bring an object, by what brought it: by the peer or by a client itself, not in a batch.",
    ),
    (
        *("read_size_bytes", "transport", "read_bytes", SIZES),
        "How long the objects were that were read; those of a batch count as its mean.",
    ),
    ("put_size_bytes", "", "put_bytes", SIZES, "How long the objects were that were put."),
    (
        *("peer_request_seconds", "request", "asked", COARSE_SECONDS),
        "How long other peers took to answer requests that are no reads.",
    ),
    (
        *("event_loop_lag_seconds", "", "loop_lag", FINE_SECONDS),
        "How much too late the event loop woke up a task, looked at 20 times a second.",
    ),
    ("gossip_ping_seconds", "", "pings", FINE_SECONDS, "Duration of pings of other members."),
)
"""Name, label if any, field of `Measures`, buckets and text."""


def _latencies(measures: Measures) -> Iterator[Metric]:
    for name, label, field, buckets, text in _HISTOGRAMS:
        value = getattr(measures, field)
        yield histograms(name, text, label, value if label else {"": value}, buckets)
    text = "Requests to other peers that were refused, or not answered in time."
    what = sorted({*measures.asked, *measures.asked_in_vain})
    failures = [((each,), measures.asked_in_vain[each]) for each in what]
    yield counters("peer_request_failures", text, ["request"], failures)


def _namespaces(measures: Measures) -> Iterator[Metric]:
    """Of all namespaces, those that were used first have labels of their own."""
    which = f"; the first {MAX_NAMESPACES} namespaces, then {OTHERS!r}."
    uses = measures.namespaces()
    for field, text in (
        ("puts", "Puts of this machine's clients"),
        ("put_bytes", "Bytes that they put"),
        ("reads", "Gets that found the value"),
        ("read_bytes", "Bytes that they got"),
        ("misses", "Gets that found nothing"),
    ):
        values = [((name,), getattr(use, field)) for name, use in uses.items()]
        yield counters(f"namespace_{field}", text + which, ["namespace"], values)


def _quotas(quotas: Mapping[str, Document]) -> Iterator[Metric]:
    """Only of namespaces that have one: what all others use is the rest of `memory_used_bytes`."""
    for field, text in (
        ("quota_bytes", "Memory kept for the namespace."),
        ("used_bytes", "Memory that it has, within its quota and above."),
        ("kept_bytes", "Of that, what is evicted for no other namespace."),
        ("ssd_bytes", "What it has on the SSD."),
        ("cap_bytes", "The most that it may have in memory and on the SSD, where there is a cap."),
    ):
        values = [((name,), use[field]) for name, use in quotas.items() if use[field] is not None]
        yield gauges(f"namespace_{field}", text, ["namespace"], values)


def _transfers(peer: Document) -> Iterator[Metric]:
    for way, text, last in (
        ("served", "sent to other peers and their clients", "busy"),
        ("received", "that came from other peers, for this one and its clients", "failures"),
    ):
        for each in ("objects", "bytes", last):
            values = [((transport,), use[each]) for transport, use in peer[way].items()]
            yield counters(f"{way}_{each}", f"{each.capitalize()} {text}.", ["transport"], values)


def _gossip(peer: Document, measures: Measures) -> Iterator[Metric]:
    yield from _labelled(peer)
    changes = [((each,), measures.member_changes[each]) for each in peer["gossip"]["members"]]
    text = "How often a member was found to be in this state."
    yield counters("member_changes", text, ["status"], changes)
    text = "Requests of gossip, sent and received; each has an answer."
    messages = sorted(measures.messages.items())
    yield counters("gossip_messages", text, ["kind", "direction"], messages)
    text = "Requests of gossip that were not answered in time, or refused."
    sent = sorted({kind for kind, _ in measures.messages})
    failures = [((kind,), measures.message_failures[kind]) for kind in sent]
    yield counters("gossip_message_failures", text, ["kind"], failures)
    for name, text in (
        ("strangers_refused", "Control connections dropped for wrong keys, or garbage."),
        ("refused_by_members", "Answers of members that do not admit this one."),
    ):
        yield counter(name, text, getattr(measures, name))
    if peer["clock_ahead_seconds"] is not None:
        yield gauge(
            "clock_ahead_seconds",
            "How far this machine's clock is ahead of the other members', by their median.",
            peer["clock_ahead_seconds"],
        )
    wrong = int(bool(peer["clock_problem"]))
    yield gauge("clock_is_wrong", "1 where others would refuse this peer's writes.", wrong)


def _checkpoints(checkpoints: list[Document]) -> Iterator[Metric]:
    labels = ["namespace", "checkpoint", "version", "state"]
    found = {
        (each["namespace"], each["name"], each["version"], each["state"]): each for each in checkpoints
    }
    text = "How much of a version of a checkpoint this peer has, of 1; at most 16 versions."
    done = [(key, each["done"]) for key, each in found.items()]
    yield gauges("checkpoint_done_ratio", text, labels, done)
    sizes = [(key, each["total_bytes"]) for key, each in found.items()]
    yield gauges("checkpoint_size_bytes", "How large it is.", labels, sizes)


def _follows(follows: list[Document]) -> Iterator[Metric]:
    for field, text in (
        ("ready", "Whether this peer, which follows the name, has its newest version verified."),
        ("current", "Whether it uses the version that followers are to use."),
        ("behind_seconds", "For how long they have been to use another version than it does."),
    ):
        values = [((each["namespace"], each["name"]), float(each[field])) for each in follows]
        yield gauges(f"checkpoint_follower_{field}", text, ["namespace", "checkpoint"], values)


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
    states = [((state,), ssd["state"] == state) for state in SSD_STATES]
    yield gauges("ssd_state", "1 for the state it is in.", ["state"], states)
    for field, text in _SSD_GAUGES:
        yield gauge(f"ssd_{field}", text, ssd[field])
    for field, text in _SSD_COUNTERS:
        yield counter(f"ssd_{_SSD_NAMES.get(field, field)}", text, ssd[field])
    segments = [((state,), count) for state, count in ssd["segments"].items()]
    yield gauges("ssd_segments", "Segments by state.", ["state"], segments)
    failed = [((each,), ssd[f"{each}_errors"]) for each in ("read", "write", "sync", "discard")]
    yield counters("ssd_errors", "Failures of the device.", ["operation"], failed)
    refused = [((reason.value,), ssd["refused"].get(reason.value, 0)) for reason in WriteRefusal]
    yield counters("ssd_refused", "Objects not written.", ["reason"], refused)
    durations = {each: Histogram(**ssd[f"{each}_durations"]) for each in ("read", "write")}
    text = "How long it took to read and to write objects."
    yield histograms("ssd_operation_seconds", text, "operation", durations, FINE_SECONDS)
