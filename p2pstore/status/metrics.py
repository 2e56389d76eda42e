"""A peer's metrics, named by Prometheus' conventions, from the statistics document and the measures. Pure.

Labels are few and bounded: transports, kinds of requests, states, reasons, 32 namespaces, 16 checkpoints; never keys or
other peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from p2pstore.core.copies.cold_copies import Gone
from p2pstore.core.copies.earlier_life import FATES
from p2pstore.runtime.histograms import Histogram
from p2pstore.runtime.stepping import Steps
from p2pstore.ssd_tier.write_admission import WriteRefusal
from p2pstore.status.measures import Measures

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FINE_SECONDS: Final = tuple(range(6, 25))
"""Exponents of the buckets of durations, in microseconds: 64 us to 16.8 s, each twice the one before."""
COARSE_SECONDS: Final = FINE_SECONDS[::2]
"""Where there are many labels."""
SIZES: Final = tuple(range(12, 31, 2))
"""Of sizes, in bytes: 4 KiB to 1 GiB, each four times the one before."""
MICROSECONDS: Final = 1e-6

PREFIX: Final = "p2pstore_"

Document = Mapping[str, Any]
Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the value that they have."""


def family(kind: str, name: str, text: str, values: Labelled, *labels: str) -> Metric:
    """A metric with a value for each combination of labels; a `counter` only grows, a `gauge` need not."""
    made = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
        PREFIX + name, text, labels=labels
    )
    for each, value in values:
        made.add_metric(list(each), value)
    return made


def values_at(document: Document, path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values at a path of names joined by dots, each with its labels: of a step * or of names joined by |, the one
    that was taken. A missing value is 0."""
    step, _, rest = path.partition(".")
    choices = list(document) if step == "*" else step.split("|")
    for name in choices:
        label = (name,) if step == "*" or len(choices) > 1 else ()
        value = document.get(name, {} if rest else 0)
        for labels, found in values_at(value, rest) if rest else [((), value)]:
            yield (*label, *labels), found


def histograms(
    name: str, text: str, label: str, values: Mapping[str, Histogram], buckets: Sequence[int]
) -> Metric:
    """A histogram for each value of a label; without a label, the one of "". `buckets` are exponents of two. Values
    told in seconds are counted in microseconds."""
    made = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    unit = MICROSECONDS if name.endswith("_seconds") else 1
    ends = [str(round((1 << exponent) * unit, 6)) for exponent in buckets]
    for value, histogram in sorted(values.items()):
        sums = map(float, histogram.cumulative(buckets))
        counted = list(zip([*ends, "+Inf"], sums, strict=True))
        made.add_metric([value] if label else [], counted, round(histogram.total * unit, 6))
    return made


FAMILIES: Final = """\
gauge uptime_seconds: Since the peer started.
gauge memory_capacity_bytes: Memory for objects.
gauge memory_used_bytes: Occupied by objects and reservations.
gauge leased_bytes: Under leases, or being sent.
gauge objects: Objects in this peer's memory.
gauge operations: Operations under way.
gauge known_locations: Copies of others that this peer knows of.
gauge floors: Removals that are remembered.
gauge floors_permille: Of the room for them: removals are slowed from 800 on.
gauge floors_refused: Removals by others that had to wait, as there was no room.
gauge local_clients: Clients on this machine that are connected.
gauge cluster_keys: Keys that this peer accepts: more than one while a key is being replaced.
gauge bootstrap_addresses: Addresses at which this peer is to find others.
gauge members_refused: Members that there was no room for.
gauge joined: 1 once another peer has answered.
gauge lacking_objects = repair.lacking: Objects here with fewer copies than wanted and than peers offer memory.
counter repaired_copies = repair.copies: Copies made again after a loss.
counter repaired_bytes = repair.bytes: Their bytes.
gauge gossip_local_health = gossip.local_health: Distrust of this peer's own probes: 0 is best, 8 worst.
gauge gossip_neighbours = connections.neighbours: Members that gossip talks to now.
gauge control_connections = connections.open: Open control connections.
gauge held_for_others_bytes = places.held_bytes: Incomplete or unanswered requests, and unread answers.
counter hoarders_ended = places.hoarders_ended: Connections cut for the memory held for them.
gauge stamps_ahead_seconds: Lead of this peer's next stamp over its own wall clock.
gauge kept_objects_unchecked = objects_returning: Objects of kept memory that were not looked at yet.
gauge members{status} = gossip.members.*: Members by state, this peer included. Dead ones are remembered for a day.
gauge connection_places_taken{kind} = places.control|data.taken: Taken places for other members' connections.
gauge connection_places{kind} = places.control|data.limit: Places for other members' connections.
gauge connection_places_largest{kind} = places.control|data.largest.places: Of the member that has most.
counter connections_yielded{kind} = places.control|data.yielded: Connections closed for a wanted one.
counter connections_refused{kind} = places.control|data.refused: Connections refused as all places were taken.
counter client_puts: Puts of this machine's clients.
counter client_put_bytes: Bytes that they put.
counter client_puts_failed: Puts that failed.
counter client_puts_kept_existing: Puts that left another value as it was.
counter client_puts_short_of_copies: Puts that made fewer copies than were asked for.
counter client_reads: Gets that read in place, in this peer's memory.
counter client_read_bytes: Bytes that they got.
counter client_leases: Gets that were given a view of this peer's memory.
counter client_misses: Gets that found nothing, or no reachable holder.
counter transport_fallbacks: Reads for which a transport gave way to another one.
counter last_copies_dropped: Objects given up without another known copy.
counter copies_offered: Last copies offered to other peers before they would be evicted.
counter offers_taken: Of these, taken.
counter offers_refused: Of these, refused or failed.
counter offered_bytes: Bytes of those that were taken.
counter holder_failures: Reads at a holder that did not deliver.
counter holders_too_slow: Of these, silent or slow holders.
counter version_signatures: Signatures under what this peer wrote, for copies elsewhere.
counter contradicting_copies: Copies announced with other bytes than their writers'.
counter objects_spoilt: Objects in this peer's memory whose bytes were found spoilt.
counter memory_restored: Repairs of what clients wrote into memory of the peer alone.
counter served_objects{transport} = served.*.objects: Objects sent to other peers and their clients.
counter served_bytes{transport} = served.*.bytes: Bytes sent to other peers and their clients.
counter served_busy{transport} = served.*.busy: Reads of others that were told to try another holder first.
counter received_objects{transport} = received.*.objects: Objects from other peers, for this one and its clients.
counter received_bytes{transport} = received.*.bytes: Bytes from other peers, for this one and its clients.
counter received_failures{transport} = received.*.failures: Reads from other peers that failed.
gauge namespace_quota_bytes{namespace} = quotas.*.quota_bytes: Memory kept for the namespace.
gauge namespace_used_bytes{namespace} = quotas.*.used_bytes: Memory that it has, within its quota and above.
gauge namespace_kept_bytes{namespace} = quotas.*.kept_bytes: Of that, what is evicted for no other namespace.
gauge namespace_ssd_bytes{namespace} = quotas.*.ssd_bytes: Its bytes on the SSD.
gauge namespace_cap_bytes{namespace} = quotas.*.cap_bytes: Limit of its memory and SSD together, if any.
gauge rdma_devices = rdma.devices: RDMA devices that know this peer's memory.
gauge rdma_lost_devices = rdma.lost_devices: Of these, failed since the start.
gauge rdma_readers = rdma.readers: Queue pairs by which others read this peer.
gauge ssd_capacity_bytes = ssd.capacity_bytes: Capacity of its segments.
gauge ssd_live_bytes = ssd.live_bytes: Occupied by objects that can be read.
gauge ssd_objects = ssd.objects: Objects on the SSD.
gauge ssd_queued_bytes = ssd.queued_bytes: On their way to the SSD.
gauge ssd_retired_segments = ssd.retired_segments: Given up after an error.
gauge ssd_write_amplification = ssd.write_amplification: Bytes written for each byte stored.
counter ssd_hits = ssd.hits: Objects read.
counter ssd_misses = ssd.misses: Objects asked for that were not there, or not readable.
counter ssd_damaged = ssd.damaged: Objects found damaged.
counter ssd_expired = ssd.expired: Objects whose time to live was over when they were asked for.
counter ssd_unanswered = ssd.unanswered: Reads abandoned because the disk did not answer.
counter ssd_stored_objects = ssd.stored_objects: Objects written.
counter ssd_stored_bytes = ssd.stored_bytes: Their bytes.
counter ssd_compressed_parts = ssd.compressed_parts: Parts that were compressed.
counter ssd_kept_records = ssd.kept_records: Records written again when their segment was reclaimed.
counter ssd_evicted_objects = ssd.evicted_objects: Objects given up for others.
counter ssd_reclaimed_segments = ssd.reclaimed_segments: Segments reclaimed.
counter ssd_read_bytes = ssd.bytes_read: Bytes read from the device.
counter ssd_written_bytes = ssd.bytes_written: Bytes written to the device.
counter ssd_syncs = ssd.syncs: Syncs of the device.
gauge ssd_segments{state} = ssd.segments.*: Segments by state.
gauge ssd_state{state} = ssd_states.*: 1 for the state it is in.
counter ssd_errors{operation} = ssd_errors.*: Failures of the device.
counter ssd_refused{reason} = ssd_refused.*: Objects not written.
counter client_gets{answer} = answers.*: Gets of this machine's clients, by where the value was.
counter objects_gone{reason} = gone.*: Objects that this peer gave up, by why, and what that costs.
counter kept_objects{fate} = kept.objects.*: Objects of an earlier life in kept memory, by what became of them.
counter kept_bytes{fate} = kept.bytes.*: Bytes of an earlier life in kept memory, by what became of them.
counter events{event} = others.*: Other counters, by name.
counter namespace_puts{namespace} = namespaces.*.puts: Puts of clients here; the first 32 namespaces, then 'other'.
counter namespace_put_bytes{namespace} = namespaces.*.put_bytes: Bytes that they put.
counter namespace_reads{namespace} = namespaces.*.reads: Gets that found the value.
counter namespace_read_bytes{namespace} = namespaces.*.read_bytes: Bytes that they got.
counter namespace_misses{namespace} = namespaces.*.misses: Gets that found nothing.
counter peer_request_failures{request} = request_failures.*: Requests to other peers refused, or not answered in time.
counter gossip_bytes{direction} = gossip_bytes.*: Bytes on control connections.
counter gossip_messages{kind,direction} = messages.*.*: Requests of gossip, sent and received; each has an answer.
counter gossip_message_failures{kind} = message_failures.*: Requests of gossip not answered in time, or refused.
counter member_changes{status} = member_changes.*: Changes of members to this state.
counter strangers_refused: Control connections dropped for wrong keys, or garbage.
counter refused_by_members: Answers of members that do not admit this one.
gauge clock_ahead_seconds: Lead of this machine's clock over the other members', by their median.
gauge clock_is_wrong: 1 where others would refuse this peer's writes.
gauge checkpoint_done_ratio{namespace,checkpoint,version,state} = versions.*.*.*.*.done: Share of it that is here, of 1.
gauge checkpoint_size_bytes{namespace,checkpoint,version,state} = versions.*.*.*.*.total_bytes: Size of the whole.
gauge checkpoint_follower_ready{namespace,checkpoint} = followed.*.*.ready: 1 with its newest version verified.
gauge checkpoint_follower_current{namespace,checkpoint} = followed.*.*.current: 1 with the version to be used in use.
gauge checkpoint_follower_behind_seconds{namespace,checkpoint} = followed.*.*.behind_seconds: Time since it is not.
"""
"""Kind, name, labels and text of metrics, with the path in the statistics document where that is not the name. Counters
of the document's `counters` stand in it like any others, and so does what `_counted` and `_beside` make. Metrics of the
SSD are there only where there is one."""

HISTOGRAMS: Final = """\
histogram client_request_seconds{request} = requests: Duration of requests of clients here; reads in place send none.
histogram read_seconds{transport} = reads: Time to bring an object, not in a batch, by the peer or a client itself.
histogram read_size_bytes{transport} = read_bytes: Length of objects that were read; those of a batch count as its mean.
histogram put_size_bytes = put_bytes: Length of objects that were put.
histogram peer_request_seconds{request} = asked: Time until other peers answered requests that are no reads.
histogram event_loop_lag_seconds = loop_lag: Delay of the event loop in waking a task, looked at 20 times a second.
histogram gossip_ping_seconds = pings: Duration of pings of other members.
"""
"""The same, with fields of `Measures`."""


class _Row(NamedTuple):
    kind: str
    name: str
    label: str
    path: str
    text: str

    @staticmethod
    def parse(line: str) -> _Row:
        head, _, text = line.partition(": ")
        kind, _, called = head.partition(" ")
        called, _, path = called.partition(" = ")
        name, _, label = called.rstrip("}").partition("{")
        return _Row(kind, name, label, path or name, text)

    def family(self, document: Document) -> Metric:
        values = [each for each in values_at(document, self.path) if each[1] is not None]
        return family(self.kind, self.name, self.text, values, *filter(None, self.label.split(",")))


_ROWS: Final = [_Row.parse(line) for line in FAMILIES.splitlines()]
_HISTOGRAMS: Final = [_Row.parse(line) for line in HISTOGRAMS.splitlines()]
_GONE: Final = "gone_"
SSD_STATES: Final = ("ok", "read_only", "off")
SSD_OPERATIONS: Final = ("read", "write", "sync", "discard")
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
    about = (peer["name"], cluster, peer["software"])
    yield family("gauge", "build_info", "This peer.", [(about, 1)], "name", "cluster", "software")
    document = {**peer["counters"], **peer, **_counted(peer["counters"]), **_beside(peer, measures)}
    for row in _ROWS:
        if "ssd" in peer or not row.name.startswith("ssd_"):
            yield row.family(document)
    for row in _HISTOGRAMS:
        value = getattr(measures, row.path)
        coarse = COARSE_SECONDS if row.label == "request" else FINE_SECONDS
        buckets = SIZES if row.name.endswith("_bytes") else coarse
        yield histograms(row.name, row.text, row.label, value if row.label else {"": value}, buckets)
    if "ssd" in peer:
        durations = {each: Histogram(**peer["ssd"][f"{each}_durations"]) for each in ("read", "write")}
        text = "How long it took to read and to write objects."
        yield histograms("ssd_operation_seconds", text, "operation", durations, FINE_SECONDS)


def _counted(counted: Document) -> Document:
    """Counters by what distinguishes them, and those without a metric of their own."""
    kept = {unit: {f"kept_{unit}_{fate}": fate for fate in FATES} for unit in ("objects", "bytes")}
    known = {row.path for row in _ROWS}.union(*ANSWERS.values(), *kept.values())
    return {
        "answers": {
            answer: sum(counted.get(each, 0) for each in names) for answer, names in ANSWERS.items()
        },
        "gone": {why.value: counted.get(_GONE + why, 0) for why in Gone},
        "kept": {
            unit: {fate: counted.get(name, 0) for name, fate in names.items()}
            for unit, names in kept.items()
        },
        "others": {
            name: count
            for name, count in counted.items()
            if name not in known and not name.startswith(_GONE)
        },
    }


def _beside(peer: Document, measures: Measures) -> Document:
    """The measures, and parts of the document by the labels of their metrics."""
    messages: dict[str, dict[str, int]] = {}
    for (kind, direction), count in sorted(measures.messages.items()):
        messages.setdefault(kind, {})[direction] = count
    asked = sorted({*measures.asked, *measures.asked_in_vain})
    gossip, ssd = peer["gossip"], peer.get("ssd")
    found = {
        "namespaces": {name: asdict(use) for name, use in measures.namespaces().items()},
        "messages": messages,
        "message_failures": {kind: measures.message_failures[kind] for kind in messages},
        "request_failures": {what: measures.asked_in_vain[what] for what in asked},
        "member_changes": {each: measures.member_changes[each] for each in gossip["members"]},
        "strangers_refused": measures.strangers_refused,
        "refused_by_members": measures.refused_by_members,
        "gossip_bytes": {way: gossip[f"{way}_bytes"] for way in ("sent", "received")},
        "clock_is_wrong": bool(peer["clock_problem"]),
        "versions": _by(peer["checkpoints"], "namespace", "name", "version", "state"),
        "followed": _by(peer["follows"], "namespace", "name"),
    }
    if ssd is not None:
        found["ssd_states"] = {state: ssd["state"] == state for state in SSD_STATES}
        found["ssd_errors"] = {each: ssd[f"{each}_errors"] for each in SSD_OPERATIONS}
        found["ssd_refused"] = {why.value: ssd["refused"].get(why.value, 0) for why in WriteRefusal}
    return found


def _by(items: Iterable[Document], *names: str) -> Document:
    """Items by the values of these fields, one below the other."""
    found: dict[str, Any] = {}
    for each in items:
        place = found
        for name in names[:-1]:
            place = place.setdefault(each[name], {})
        place[each[names[-1]]] = each
    return found
