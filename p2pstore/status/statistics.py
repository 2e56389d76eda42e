"""The statistics document: this peer, and the cluster as it sees it. It only grows."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

import p2pstore
from p2pstore.access.member_places import Holder, crowd
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.homes.directory_mode import kept_name
from p2pstore.gossip.links.host import MAX_ADMITTED
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import PeerRecord, TakesPart, format_peer_id
from p2pstore.peer.credentials import rights_of
from p2pstore.runtime.stepping import Steps
from p2pstore.status.hottest import hottest

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

MEMBERS_PER_STEP: Final = 64
"""The record of each is read: some 6 us."""
JSON_PARTS_PER_STEP: Final = 1_024
"""Names, numbers and what stands between them."""


def peer_document(node: Node, *, private: bool = True) -> dict[str, Any]:
    """What this peer holds and has done. `private`: with keys and bootstrap addresses, for clients on this
    machine; other peers are not told."""
    core = node.core
    segment = core.segment
    document = {
        "name": node.config.name,
        "peer_id": format_peer_id(core.peer_id),
        "software": p2pstore.__version__,
        "incarnation": core.incarnation,
        "uptime_seconds": round(node.uptime_seconds, 3),
        "memory_capacity_bytes": segment.data_bytes,
        "memory_used_bytes": segment.used_bytes,
        "leased_bytes": segment.leased_bytes,
        "quotas": {
            namespace: asdict(use) | {"ssd_bytes": _bytes_on_ssd(node, namespace)}
            for namespace, use in segment.quotas.items()
        },
        "objects": segment.object_count,
        "objects_returning": len(segment.returned),
        "operations": core.operations_under_way,
        "known_locations": core.gossip.locations.record_count,
        "directory": core.gossip.partitions.document(),
        "members_refused": core.gossip.membership.refused_count,
        "floors": core.gossip.floor_set.count,
        "floors_permille": round(1000 * core.gossip.floor_set.crowding),
        "floors_refused": core.gossip.cluster_records.floors_refused,
        "log_sequence": core.gossip.log.sequence,
        "counters": dict(sorted(core.counters.items())),
        "unix": round(time.time(), 3),
        "joined": node.contacted.is_set(),
        "served": {
            "tcp": {
                "objects": node.served.objects,
                "bytes": node.served.bytes,
                "busy": node.served.busy,
            }
        },
        "received": node.watch.traffic.document(),
        "connections": _connections(node),
        "places": _places(node, private=private),
        "gossip": _gossip(node),
        "clock_ahead_seconds": _clock_ahead(node),
        "stamps_ahead_seconds": round(core.timekeeping.stamps_ahead_seconds(node.now), 3),
        "clock_problem": core.timekeeping.problem(node.now),
        "local_clients": node.local_clients,
        "role": rights_of(node.credentials.ring),
        "cluster_keys": len(node.credentials.ring.keys),
        "bootstrap_addresses": len(node.config.bootstrap),
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
        document["rdma"] = {
            "devices": len(node.rdma.engines),
            "lost_devices": sum(bool(engine.lost) for engine in node.rdma.engines),
            "readers": node.rdma.server.readers,
        }
    leaving = node.tell_how_it_left() if private else None
    if leaving is not None:
        document["leaving"] = leaving
    if node.ssd is not None:
        document["ssd"] = node.ssd.tier.statistics() | {"hit_rate": _ssd_hit_rate(core)}
    if private:
        record = core.gossip.membership.own.record
        document["bootstrap"] = list(node.config.bootstrap)
        document["cluster_key_file"] = node.config.cluster_key_file
        document["control"] = list(record.control) if record is not None else []
        document["data"] = list(record.data) if record is not None else []
        document["slow"] = node.watch.slow.document()
        document["latencies"] = node.watch.measures.document()
        document["settings"] = msgspec.to_builtins(node.config)
        document["hottest"] = hottest(core, node.now, with_keys=True)
    return document


def _bytes_on_ssd(node: Node, namespace: str) -> int:
    return 0 if node.ssd is None else node.ssd.tier.bytes_of(namespace)


def _ssd_hit_rate(core: PeerCore) -> float | None:
    """Of the clients' gets that memory could not answer, the share that the SSD did; None without any."""
    hits = core.counters["client_reads_from_ssd"]
    others = core.counters["client_reads_elsewhere"] + core.counters["client_misses"]
    return round(hits / (hits + others), 4) if hits + others else None


def _gossip(node: Node) -> dict[str, Any]:
    """Members by state, those included that are gone; what gossip carried; how far this peer trusts its own probes (0
    is best, 8 worst)."""
    membership = node.core.gossip.membership
    states = Counter(state.status for state in membership.states())
    carried = node.host.connections.carried
    return {
        "members": {status.name.lower(): states[status] for status in Status},
        "local_health": membership.health.score,
        "sent_bytes": carried.sent,
        "received_bytes": carried.received,
    }


def _clock_ahead(node: Node) -> float | None:
    """How far this machine's clock is ahead of those of other members."""
    ahead = node.core.timekeeping.view(node.now).middle
    return None if ahead is None else round(ahead, 6)


def _checkpoints(core: PeerCore) -> list[dict[str, Any]]:
    """What this peer has of versions of checkpoints; at most 16."""
    found = []
    for part in core.checkpoints.parts:
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
    """The checkpoints that this peer follows, and how far it is with them."""
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
        for each in core.checkpoints.followed
    ]


def _connections(node: Node) -> dict[str, int]:
    """Control connections: how many are open, how many neighbours they are kept for, and what became of others."""
    return {
        "open": len(node.host.connections.each()),
        "neighbours": len(node.core.gossip.view.neighbours()),
        **asdict(node.host.keeper.counts),
    }


def _places(node: Node, *, private: bool) -> dict[str, Any]:
    """The places for other members' connections, and who has most of them; and what is held in memory for them."""
    keeper, data, budget = node.host.keeper, node.data_places, node.budget

    def document(
        holders: Sequence[Holder], limit: int, yielded: int, refused: int
    ) -> dict[str, Any]:
        most = crowd(holders)
        largest: dict[str, Any] = {
            "name": node.core.name_of(most.member) if most.member else "",
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

    counts = keeper.counts
    return {
        "control": document(keeper.holders(), MAX_ADMITTED, counts.yielded, counts.refused_full),
        "data": document(data.holders(), data.limit, data.yielded, data.refused),
        "held_bytes": budget.held_bytes,
        "held_limit_bytes": budget.limit_bytes,
        "hoarders_ended": budget.ended,
    }


def _seconds_ago(then: float, now: float) -> float | None:
    """None for minus infinity, which JSON cannot say: nothing came from the member itself yet."""
    return round(max(0.0, now - then), 3) if math.isfinite(then) else None


def cluster_document(core: PeerCore, now: float) -> Steps[dict[str, Any]]:
    """What gossip says of the members that are believed alive."""
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
