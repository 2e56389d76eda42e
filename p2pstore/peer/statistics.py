"""The statistics document: this peer, and the cluster as it sees it. It only grows."""

from __future__ import annotations

from typing import Any

import p2pstore
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.records import format_peer_id


def peer_document(core: PeerCore, name: str, now: float, uptime_seconds: float) -> dict[str, Any]:
    """What this peer holds and has done."""
    segment = core.segment
    return {
        "name": name,
        "peer_id": format_peer_id(core.peer_id),
        "software": p2pstore.__version__,
        "incarnation": core.incarnation,
        "uptime_seconds": round(uptime_seconds, 3),
        "memory_capacity_bytes": segment.data_bytes,
        "memory_used_bytes": segment.used_bytes,
        "leased_bytes": segment.leased_bytes,
        "objects": segment.object_count,
        "known_locations": core.gossip.directory.record_count,
        "floors": len(core.gossip.cluster_records),
        "log_sequence": core.gossip.log.sequence,
        "counters": dict(sorted(core.counters.items())),
    }


def cluster_document(core: PeerCore) -> dict[str, Any]:
    """What gossip says of the members that are believed alive."""
    members = [
        {
            "name": entry.name,
            "peer_id": format_peer_id(entry.peer_id),
            "memory_capacity_bytes": entry.memory_capacity,
            "memory_used_bytes": entry.memory_used,
            "objects": entry.head.count,
        }
        for entry in [
            state.record for state in core.gossip.membership.live() if state.record is not None
        ]
    ]
    return {
        "name": core.gossip.config.cluster,
        "peers": len(members),
        "memory_capacity_bytes": sum(member["memory_capacity_bytes"] for member in members),
        "memory_used_bytes": sum(member["memory_used_bytes"] for member in members),
        "copies": sum(member["objects"] for member in members),
        "members": members,
    }
