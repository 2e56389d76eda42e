"""The statistics document of this peer, and of the cluster as this peer sees it. Fields are only added.

`p2pstore.status` renders it: the status page, the metrics, the problems of `stats` and `doctor`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

import p2pstore
from p2pstore.access.crowding import PlaceOwner, crowd
from p2pstore.access.keyring import rights_of
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.partition_homes import kept_name
from p2pstore.gossip.links.host import MAX_ADMITTED
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import PeerRecord, TakesPart, format_peer_id
from p2pstore.runtime.stepping import Steps
from p2pstore.status.checkup import Checkup
from p2pstore.status.doctor.finding import MAX_KEY_LETTERS, shown
from p2pstore.status.operation_watch import PeerWatch

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

SHOWN_COUNTERS: Final = (
    "client_puts",
    "client_put_bytes",
    "client_puts_failed",
    "client_reads",
    "client_leases",
    "client_reads_elsewhere",
    "client_reads_from_ssd",
    "client_misses",
    "last_copies_dropped",
    "copies_offered",
    "offers_taken",
    "offers_refused",
    "offered_bytes",
    "transport_fallbacks",
    "objects_spoilt",
    "repairs",
    "repaired_bytes",
)
MEMBERS_PER_STEP: Final = 64
"""Members per step. Reading one record takes about 6 us."""
JSON_PARTS_PER_STEP: Final = 1_024
"""Names, numbers and separators."""
MAX_REASONS: Final = 3
"""Bootstrap addresses whose failure is told."""
MAX_HOTTEST: Final = 10
MAX_LOOKED_UP: Final = 40
"""Candidates for the hottest objects: some have left memory since."""
_STALL_BUCKET: Final = 18
"""First bucket of `histograms` for an event loop that was late by more than 131 ms."""


class Statistics:
    """Statistics of one running peer. Satisfies `p2pstore.status.checkup.ObservedPeer`."""

    def __init__(self, node: Node, watch: PeerWatch) -> None:
        self._node = node
        self.core = node.core
        self.watch = watch
        self.checkup = Checkup(self)

    def state(self) -> str:
        node = self._node
        if node.leave_requested.is_set() or self.core.closing:
            return "leaving"
        if node.config.bootstrap and not node.control.settled.is_set():
            return "joining"
        return "ready"

    def totals(self) -> dict[str, int]:
        node, watch, counters = self._node, self.watch, self.core.counters
        received, lag = watch.traffic.totals.values(), watch.measures.loop_lag
        gets = ("client_reads", "client_leases", "client_reads_elsewhere")
        return {
            **{name: counters[name] for name in SHOWN_COUNTERS},
            "gets": sum(counters[name] for name in gets),
            "misses": counters["client_misses"],
            "puts": counters["client_puts"],
            "in_bytes": sum(use.bytes for use in received),
            "in_objects": sum(use.objects for use in received),
            "in_failures": sum(use.failures for use in received),
            "out_bytes": node.served.bytes,
            "stalls": sum(lag.counts[_STALL_BUCKET:]),
            "looks": lag.count,
            "refused_by_members": watch.measures.refused_by_members,
            "slow": watch.slow.total,
            "control_refused": node.host.keeper.counts.refused_full,
            "data_refused": node.data_places.refused,
            "hoarders_ended": node.budget.ended,
        }

    def document(self, *, private: bool = True) -> dict[str, Any]:
        """Content and activity of this peer. `private` adds keys and addresses, for clients of this machine only."""
        node, core = self._node, self.core
        document = {
            "name": node.config.name,
            "peer_id": format_peer_id(core.peer_id),
            "software": p2pstore.__version__,
            "incarnation": core.incarnation,
            "state": self.state(),
            "uptime_seconds": round(node.uptime_seconds, 3),
            "python_blocks": sys.getallocatedblocks(),
            "operations": core.operations_under_way,
            "counters": dict(sorted(core.counters.items())),
            "unix": round(time.time(), 3),
            "joined": node.control.contacted.is_set(),
            "local_clients": node.local_clients,
            "load_permille": node.load.told_permille,
            "role": rights_of(node.credentials.ring),
            "cluster_keys": len(node.credentials.ring.keys),
            "bootstrap_addresses": len(node.config.bootstrap),
            "bootstrap_silent": self._bootstrap_silent(),
            **self._memory(),
            **self._gossip(),
            **self._clock(),
            **self._traffic(private=private),
            **self._state_directory(),
            "checkpoints": _checkpoints(core),
            "follows": _follows(core, core.unix(node.now)),
            "repair": {
                "copies": core.counters["repairs"],
                "bytes": core.counters["repaired_bytes"],
                "lacking": core.repair.lacking,
                "limited": core.repair.limited,
            },
        }
        if node.rdma is not None:
            engines = node.rdma.engines
            document["rdma"] = {
                "devices": len(engines),
                "lost_devices": sum(bool(engine.lost) for engine in engines),
                "readers": node.rdma.server.readers,
            }
        if node.ssd is not None:
            document["ssd"] = node.ssd.tier.statistics() | {"hit_rate": _ssd_hit_rate(core)}
        if private:
            document |= self._private()
        return document

    def hottest(self, *, with_keys: bool) -> list[dict[str, Any]]:
        """The objects in memory that are read most. Keys may be secret: only with `with_keys` are they told."""
        now = self._node.now
        segment, unix = self.core.segment, self.core.unix(now)
        read = segment.objects.most_read.most(MAX_LOOKED_UP, unix)
        found = [
            (entry, rate) for digest, rate in read if (entry := segment.find(digest, unix)) is not None
        ]
        return [
            {
                "namespace": shown(entry.namespace),
                "key": shown(entry.key, MAX_KEY_LETTERS) if with_keys else None,
                "bytes": entry.length,
                "reads_per_second": round(rate, 3),
            }
            for entry, rate in found[:MAX_HOTTEST]
        ]

    def _bootstrap_silent(self) -> bool:
        """Whether no bootstrap address has led to a peer within the time for it."""
        node, control = self._node, self._node.control
        overdue = node.uptime_seconds >= node.config.join_timeout
        return overdue and not control.contacted.is_set() and not control.settled.is_set()

    def _memory(self) -> dict[str, Any]:
        segment, ssd = self.core.segment, self._node.ssd
        return {
            "memory_capacity_bytes": segment.data_bytes,
            "memory_used_bytes": segment.used_bytes,
            "leased_bytes": segment.leased_bytes,
            "quotas": {
                namespace: asdict(use)
                | {"ssd_bytes": 0 if ssd is None else ssd.tier.bytes_of(namespace)}
                for namespace, use in segment.quotas.items()
            },
            "objects": segment.object_count,
            "objects_returning": len(segment.returned),
        }

    def _gossip(self) -> dict[str, Any]:
        """Members by state, the dead ones included; `local_health`: trust in the own probes, 0 is best and 8 worst."""
        host, core = self._node.host, self.core
        gossip, removals = core.gossip, core.floors
        membership, records = gossip.membership, gossip.cluster_records
        floors = records.floors
        states = Counter(member.status for member in membership.states())
        return {
            "known_locations": gossip.directory.record_count,
            "directory": gossip.partitions.document(),
            "members_refused": membership.refused_count,
            "floors": floors.count,
            "floors_permille": round(1000 * floors.crowding),
            "floors_refused": records.floors_refused,
            "floors_wait_for": removals.waits_for(),
            "floors_disbelieved": removals.disbelieved(self._node.now),
            "log_sequence": gossip.log.sequence,
            "connections": {
                "open": len(host.connections.each()),
                "neighbours": len(gossip.view.neighbours()),
                **asdict(host.keeper.counts),
            },
            "gossip": {
                "members": {status.name.lower(): states[status] for status in Status},
                "local_health": membership.health.score,
                "sent_bytes": host.connections.carried.sent,
                "received_bytes": host.connections.carried.received,
            },
        }

    def _clock(self) -> dict[str, Any]:
        """`clock_ahead_seconds`: this machine's clock against the median of the other members'."""
        clocks, now = self.core.timekeeping, self._node.now
        ahead = self.core.gossip.time.view(now).middle
        return {
            "clock_ahead_seconds": None if ahead is None else round(ahead, 6),
            "stamps_ahead_seconds": round(clocks.stamps_ahead_seconds(now), 3),
            "clock_problem": clocks.problem(now),
            "wrong_clocks": [
                f"{shown(self.core.name_of(peer_id))} ({-wrong:+,.0f} s)"
                for peer_id, wrong in clocks.wrong_peers(now)
            ],
        }

    def _traffic(self, *, private: bool) -> dict[str, Any]:
        """Objects sent and received, and the memory and connections that serving others takes."""
        node = self._node
        keeper, data, budget, served = node.host.keeper, node.data_places, node.budget, node.served
        counts = keeper.counts

        def places(
            holders: Sequence[PlaceOwner], limit: int, yielded: int, refused: int
        ) -> dict[str, Any]:
            most = crowd(holders)
            largest: dict[str, Any] = {
                "name": self.core.name_of(most.member) if most.member else "",
                "places": most.member_places,
                "host_places": most.host_places,
            }
            if private:
                largest["host"] = most.host
            return {
                "taken": len(holders),
                "limit": limit,
                "yielded": yielded,
                "refused": refused,
                "largest": largest,
            }

        return {
            "served": {"tcp": {"objects": served.objects, "bytes": served.bytes, "busy": served.busy}},
            "received": self.watch.traffic.document(),
            "places": {
                "control": places(keeper.holders(), MAX_ADMITTED, counts.yielded, counts.refused_full),
                "data": places(data.holders(), data.limit, data.yielded, data.refused),
                "held_bytes": budget.held_bytes,
                "held_limit_bytes": budget.limit_bytes,
                "hoarders_ended": budget.ended,
            },
        }

    def _state_directory(self) -> dict[str, Any]:
        saver = self._node.saver
        return {
            "state_problem": saver.problem if saver is not None else "",
            "state_damage": list(saver.state.damage) if saver is not None else [],
        }

    def _private(self) -> dict[str, Any]:
        node, watch = self._node, self.watch
        membership = self.core.gossip.membership
        record = membership.own.record
        leaving = node.leaving.document()
        return {
            **({} if leaving is None else {"leaving": leaving}),
            "bootstrap": list(node.config.bootstrap),
            "unreached": list(islice(node.control.joining.unreached.values(), MAX_REASONS)),
            "cluster_key_file": node.config.cluster_key_file,
            "control": list(record.control) if record is not None else [],
            "data": list(record.data) if record is not None else [],
            "slow": watch.slow.document(),
            "latencies": watch.measures.document(),
            "settings": msgspec.to_builtins(node.config),
            "hottest": self.hottest(with_keys=True),
        }


def _ssd_hit_rate(core: PeerCore) -> float | None:
    """The share of gets beyond memory that the SSD answered; None without any."""
    hits = core.counters["client_reads_from_ssd"]
    others = core.counters["client_reads_elsewhere"] + core.counters["client_misses"]
    return round(hits / (hits + others), 4) if hits + others else None


def _checkpoints(core: PeerCore) -> list[dict[str, Any]]:
    """The versions of checkpoints that this peer has or fetches; at most 16."""
    found = []
    for part in core.participations.own:
        head = core.checkpoints.head(part.name)
        state = next((each for each in TakesPart if each == part.state), None)
        if head is not None and state is not None:
            found.append(
                {
                    "namespace": head.namespace,
                    "name": head.name,
                    "version": part.version.hex(),
                    "state": state.name.lower(),
                    "done": part.done_permille / 1000,
                    "total_bytes": head.body.total_bytes,
                    "why": part.why,
                }
            )
    return found


def _follows(core: PeerCore, unix_now: float) -> list[dict[str, Any]]:
    return [
        {
            "namespace": each.head.namespace,
            "name": each.head.name,
            "ready": each.ready,
            "current": each.current,
            "behind_seconds": 0.0
            if each.behind_since is None
            else round(max(0.0, unix_now - each.behind_since), 3),
        }
        for each in core.participations.followed
    ]


def _seconds_ago(then: float, now: float) -> float | None:
    """None for minus infinity, which JSON cannot say: nothing came from the member itself yet."""
    return round(max(0.0, now - then), 3) if math.isfinite(then) else None


def cluster_document(core: PeerCore, now: float) -> Steps[dict[str, Any]]:
    """The live members, as gossip knows them."""
    members = []
    for number, state in enumerate(core.gossip.membership.live()):
        if number % MEMBERS_PER_STEP == 0:
            yield
        if (record := state.record) is not None:
            members.append(_member_document(core, state, record, now))
    sums = ("memory_capacity", "memory_used", "ssd_capacity", "ssd_used")
    return {
        "name": core.gossip.config.cluster,
        "peers": len(members),
        **{f"{name}_bytes": sum(each[f"{name}_bytes"] for each in members) for name in sums},
        "copies": sum(each["objects"] for each in members),
        "members": members,
    }


def _member_document(
    core: PeerCore, state: MemberState, record: PeerRecord, now: float
) -> dict[str, Any]:
    heard_at = now if record.peer_id == core.peer_id else state.heard_at
    return {
        "name": record.name,
        "peer_id": format_peer_id(record.peer_id),
        "memory_capacity_bytes": record.memory_capacity,
        "memory_used_bytes": record.memory_used,
        "ssd_capacity_bytes": record.ssd_capacity,
        "ssd_used_bytes": record.ssd_used,
        "objects": record.head.count,
        "status": Status(state.status).name.lower(),
        "heard_seconds_ago": _seconds_ago(heard_at, now),
        "software": record.software,
        "directory": kept_name(record.directory),
    }


def json_in_steps(document: Mapping[str, Any]) -> Steps[bytes]:
    """The document as JSON. Of thousands of members it is megabytes."""
    parts: list[str] = []
    for part in json.JSONEncoder().iterencode(document):
        parts.append(part)
        if len(parts) % JSON_PARTS_PER_STEP == 0:
            yield
    return "".join(parts).encode()
