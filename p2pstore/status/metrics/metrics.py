"""What a peer counts, as metrics named by Prometheus' conventions. Pure.

Most of it is the statistics document: what people read in `stats`, dashboards read here. Labels are few and bounded:
transports, kinds of requests, states, reasons, 32 namespaces, 16 checkpoints; never keys, and no other peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from p2pstore.core.copies.cold_copies import Gone
from p2pstore.core.copies.memory_return import FATES
from p2pstore.runtime.stepping import Steps
from p2pstore.status.measures import MAX_NAMESPACES, OTHERS, Measures
from p2pstore.status.metrics.metric_families import (
    COARSE_SECONDS,
    FINE_SECONDS,
    MICROSECONDS,
    SIZES,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    histograms,
)
from p2pstore.status.metrics.metrics_ssd import ssd_families

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Document = Mapping[str, Any]

_GAUGES: Final = (
    ("uptime_seconds", "Since the peer started."),
    ("memory_capacity_bytes", "What objects can occupy."),
    ("memory_used_bytes", "Occupied by objects and reservations."),
    ("leased_bytes", "Under leases, or being sent."),
    ("objects", "Objects in this peer's memory."),
    ("operations", "Operations under way."),
    ("known_locations", "Copies of others that this peer knows of."),
    ("floors", "Removals that are remembered."),
    ("floors_permille", "Of what there is room for: removals are slowed from 800 on."),
    ("floors_refused", "Removals by others that had to wait, as there was no room."),
    ("local_clients", "Clients on this machine that are connected."),
    ("cluster_keys", "Keys that this peer accepts: more than one while a key is being replaced."),
    ("bootstrap_addresses", "Addresses at which this peer is to find others."),
    ("members_refused", "Members that there was no room for."),
)
_CLIENTS: Final = (
    ("client_puts", "Puts of this machine's clients."),
    ("client_put_bytes", "Bytes that they put."),
    ("client_puts_failed", "Puts that failed."),
    ("client_puts_kept_existing", "Puts that left another value as it was."),
    ("client_puts_short_of_copies", "Puts that made fewer copies than were asked for."),
    ("client_reads", "Gets that read in place, in this peer's memory."),
    ("client_read_bytes", "Bytes that they got."),
    ("client_leases", "Gets that were given a view of this peer's memory."),
    ("client_misses", "Gets that found nothing, or nobody who could be reached."),
    ("transport_fallbacks", "Reads for which a transport gave way to another one."),
    ("last_copies_dropped", "Objects given up that nobody else is known to have."),
    ("holder_failures", "Reads at a holder that did not deliver."),
    (
        "holders_too_slow",
        "Of these, the holder was silent, or slower than another one is expected to be.",
    ),
    ("version_signatures", "Signatures under what this peer wrote, for copies elsewhere."),
    (
        "contradicting_copies",
        "Copies that members announced with other bytes than their writers did.",
    ),
    ("objects_spoilt", "Objects in this peer's memory whose bytes were found spoilt."),
    (
        "memory_restored",
        "What clients changed in memory that only the peer may write, and it restored.",
    ),
)
_GONE: Final = "gone_"
ANSWERS: Final = {
    "memory": ("client_reads", "client_leases"),
    "ssd": ("client_reads_from_ssd",),
    "peers": ("client_reads_elsewhere",),
    "nobody": ("client_misses",),
}
"""Who has what clients get, and the counters that say so."""


def exposition(peer: Document, cluster: str, measures: Measures) -> Steps[bytes]:
    """All metrics in Prometheus' text format; `cluster` is its name."""
    parts: list[bytes] = []
    for metric in _Collected(peer, cluster, measures).collect():
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_One(metric))
        parts.append(generate_latest(registry))
        yield
    return b"".join(parts)


class _One(Collector):
    """A single metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _Collected(Collector):
    def __init__(self, peer: Document, cluster: str, measures: Measures) -> None:
        self._peer = peer
        self._cluster = cluster
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        peer, measures = self._peer, self._measures
        yield gauges(
            "build_info",
            "This peer.",
            ["name", "cluster", "software"],
            [((peer["name"], self._cluster, peer["software"]), 1)],
        )
        for field, text in _GAUGES:
            yield gauge(field, text, peer[field])
        yield from _clients(peer["counters"])
        yield from _latencies(measures)
        yield from _namespaces(measures)
        yield from _kept(peer)
        yield from _quotas(peer["quotas"])
        yield from _transfers(peer)
        yield from _repair(peer)
        yield from _gossip(peer, measures)
        yield from _checkpoints(peer["checkpoints"])
        yield from _follows(peer["follows"])
        yield from _rdma(peer.get("rdma", {}))
        if "ssd" in peer:
            yield from ssd_families(peer["ssd"])


def _clients(counted: Document) -> Iterator[Metric]:
    for field, text in _CLIENTS:
        yield counter(field, text, counted.get(field, 0))
    yield counters(
        "client_gets",
        "Gets of this machine's clients, by where the value was.",
        ["answer"],
        [
            ((answer,), sum(counted.get(field, 0) for field in fields))
            for answer, fields in ANSWERS.items()
        ],
    )
    yield counters(
        "objects_gone",
        "Objects that this peer gave up, by why, and what that costs.",
        ["reason"],
        [((why.value,), counted.get(_GONE + why, 0)) for why in Gone],
    )
    known = {field for field, _ in _CLIENTS}.union(*ANSWERS.values())
    known |= {f"kept_{unit}_{fate}" for unit in ("objects", "bytes") for fate in FATES}
    yield counters(
        "events",
        "Other counters, by name.",
        ["event"],
        [
            ((name,), count)
            for name, count in counted.items()
            if name not in known and not name.startswith(_GONE)
        ],
    )


def _kept(peer: Document) -> Iterator[Metric]:
    """What memory that outlives its peer had when this life began."""
    counted = peer["counters"]
    yield gauge("kept_objects_unchecked", "Not looked at yet.", peer["objects_returning"])
    for unit, text in (("objects", "Objects"), ("bytes", "Bytes")):
        yield counters(
            f"kept_{unit}",
            f"{text} of an earlier life in kept memory: shown again, damaged, or perhaps removed meanwhile.",
            ["fate"],
            [((fate,), counted.get(f"kept_{unit}_{fate}", 0)) for fate in FATES],
        )


def _latencies(measures: Measures) -> Iterator[Metric]:
    yield histograms(
        "client_request_seconds",
        "How long requests of this machine's clients took the peer. Reads in place ask nobody.",
        "request",
        measures.requests,
        buckets=COARSE_SECONDS,
        unit=MICROSECONDS,
    )
    yield histograms(
        "read_seconds",
        "How long it took to bring an object, by what brought it: by the peer or by a client itself, not in a batch.",
        "transport",
        measures.reads,
        buckets=FINE_SECONDS,
        unit=MICROSECONDS,
    )
    yield histograms(
        "read_size_bytes",
        "How long the objects were that were read; those of a batch count as its mean.",
        "transport",
        measures.read_bytes,
        buckets=SIZES,
    )
    yield histogram(
        "put_size_bytes",
        "How long the objects were that were put.",
        measures.put_bytes,
        buckets=SIZES,
    )
    yield histograms(
        "peer_request_seconds",
        "How long other peers took to answer requests that are no reads.",
        "request",
        measures.asked,
        buckets=COARSE_SECONDS,
        unit=MICROSECONDS,
    )
    yield counters(
        "peer_request_failures",
        "Requests to other peers that were refused, or not answered in time.",
        ["request"],
        [
            ((what,), measures.asked_in_vain[what])
            for what in sorted({*measures.asked, *measures.asked_in_vain})
        ],
    )
    yield histogram(
        "event_loop_lag_seconds",
        "How much too late the event loop woke up a task, looked at 20 times a second.",
        measures.loop_lag,
        buckets=FINE_SECONDS,
        unit=MICROSECONDS,
    )


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
        yield counters(
            f"namespace_{field}",
            text + which,
            ["namespace"],
            [((name,), getattr(use, field)) for name, use in uses.items()],
        )


def _quotas(quotas: Mapping[str, Document]) -> Iterator[Metric]:
    """Only of namespaces that have one: what all others use is the rest of `memory_used_bytes`."""
    for field, text in (
        ("quota_bytes", "Memory kept for the namespace."),
        ("used_bytes", "Memory that it has, within its quota and above."),
        ("kept_bytes", "Of that, what is evicted for no other namespace."),
        ("ssd_bytes", "What it has on the SSD."),
        ("cap_bytes", "The most that it may have in memory and on the SSD, where there is a cap."),
    ):
        yield gauges(
            f"namespace_{field}",
            text,
            ["namespace"],
            [((name,), use[field]) for name, use in quotas.items() if use[field] is not None],
        )


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
            yield counters(
                f"{way}_{each}",
                f"{each.capitalize()} {text}.",
                ["transport"],
                [((transport,), use[each]) for transport, use in peer[way].items()],
            )


def _repair(peer: Document) -> Iterator[Metric]:
    repair = peer["repair"]
    yield counter("repaired_copies", "Copies made again after a loss.", repair["copies"])
    yield counter("repaired_bytes", "Their bytes.", repair["bytes"])
    yield gauge(
        "lacking_objects",
        "Objects here with fewer copies than wanted and than peers offer memory.",
        repair["lacking"],
    )


def _gossip(peer: Document, measures: Measures) -> Iterator[Metric]:
    gossip = peer["gossip"]
    yield gauges(
        "members",
        "Members of the cluster by state, this peer included. Dead ones are remembered for a day.",
        ["status"],
        [((status,), count) for status, count in gossip["members"].items()],
    )
    yield counters(
        "member_changes",
        "How often a member was found to be in this state.",
        ["status"],
        [((status,), measures.member_changes[status]) for status in gossip["members"]],
    )
    yield gauge("joined", "1 once another peer has answered.", peer["joined"])
    yield gauge(
        "gossip_local_health",
        "How little this peer trusts its own probes: 0 is best, 8 worst.",
        gossip["local_health"],
    )
    yield counters(
        "gossip_messages",
        "Requests of gossip, sent and received; each has an answer.",
        ["kind", "direction"],
        sorted(measures.messages.items()),
    )
    yield counters(
        "gossip_message_failures",
        "Requests of gossip that were not answered in time, or refused.",
        ["kind"],
        [
            ((kind,), measures.message_failures[kind])
            for kind in sorted({kind for kind, _ in measures.messages})
        ],
    )
    yield counters(
        "gossip_bytes",
        "What control connections carried.",
        ["direction"],
        [(("sent",), gossip["sent_bytes"]), (("received",), gossip["received_bytes"])],
    )
    yield histogram(
        "gossip_ping_seconds",
        "How long pings of other members took.",
        measures.pings,
        buckets=FINE_SECONDS,
        unit=MICROSECONDS,
    )
    connections = peer["connections"]
    yield gauge("control_connections", "Control connections that are open.", connections["open"])
    places = peer["places"]
    kinds = ("control", "data")
    yield gauges(
        "connection_places_taken",
        "Places for other members' connections that are taken.",
        ["kind"],
        [((kind,), places[kind]["taken"]) for kind in kinds],
    )
    yield gauges(
        "connection_places",
        "Places for other members' connections.",
        ["kind"],
        [((kind,), places[kind]["limit"]) for kind in kinds],
    )
    yield gauges(
        "connection_places_largest",
        "Of these, those of the member that has most.",
        ["kind"],
        [((kind,), places[kind]["largest"]["places"]) for kind in kinds],
    )
    yield counters(
        "connections_yielded",
        "Connections closed for one that was wanted when all places were taken.",
        ["kind"],
        [((kind,), places[kind]["yielded"]) for kind in kinds],
    )
    yield counters(
        "connections_refused",
        "Members' connections refused because all places were in use.",
        ["kind"],
        [((kind,), places[kind]["refused"]) for kind in kinds],
    )
    yield gauge(
        "held_for_others_bytes",
        "Requests that are not whole or answered, and answers that are not read.",
        places["held_bytes"],
    )
    yield counter(
        "hoarders_ended",
        "Connections cut for the memory held for them.",
        places["hoarders_ended"],
    )
    yield gauge("gossip_neighbours", "Members that gossip talks to now.", connections["neighbours"])
    yield counter(
        "strangers_refused",
        "Control connections dropped for what the other side did: wrong keys, or garbage.",
        measures.strangers_refused,
    )
    yield counter(
        "refused_by_members",
        "Answers of members that do not admit this one.",
        measures.refused_by_members,
    )
    if peer["clock_ahead_seconds"] is not None:
        yield gauge(
            "clock_ahead_seconds",
            "How far this machine's clock is ahead of the other members', by their median.",
            peer["clock_ahead_seconds"],
        )
    yield gauge(
        "stamps_ahead_seconds",
        "How far what this peer stamps next is ahead of its own wall clock.",
        peer["stamps_ahead_seconds"],
    )
    yield gauge(
        "clock_is_wrong",
        "1 where others would refuse what this peer writes, so that it writes nothing.",
        int(bool(peer["clock_problem"])),
    )


def _checkpoints(checkpoints: list[Document]) -> Iterator[Metric]:
    labels = ["namespace", "checkpoint", "version", "state"]
    found: dict[tuple[str, ...], Document] = {}
    for each in checkpoints:
        key = (each["namespace"], each["name"], each["version"], each["state"])
        found[key] = each
    yield gauges(
        "checkpoint_done_ratio",
        "How much of a version of a checkpoint this peer has, of 1; at most 16 versions.",
        labels,
        [(key, each["done"]) for key, each in found.items()],
    )
    yield gauges(
        "checkpoint_size_bytes",
        "How large it is.",
        labels,
        [(key, each["total_bytes"]) for key, each in found.items()],
    )


def _follows(follows: list[Document]) -> Iterator[Metric]:
    for field, text in (
        ("ready", "Whether this peer, which follows the name, has its newest version verified."),
        ("current", "Whether it uses the version that followers are to use."),
        ("behind_seconds", "For how long they have been to use another version than it does."),
    ):
        yield gauges(
            f"checkpoint_follower_{field}",
            text,
            ["namespace", "checkpoint"],
            [((each["namespace"], each["name"]), float(each[field])) for each in follows],
        )


def _rdma(rdma: Document) -> Iterator[Metric]:
    for field, text in (
        ("devices", "RDMA devices that know this peer's memory."),
        ("lost_devices", "Of these, what failed since the start."),
        ("readers", "Queue pairs by which others read this peer."),
    ):
        yield gauge(f"rdma_{field}", text, rdma.get(field, 0))
