"""What the page shows, as JSON: asked of the peer once a second at most, however many look."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from p2pstore.status.checkpoint_status import MAX_SHOWN as MAX_CHECKPOINTS
from p2pstore.status.checkpoint_status import Progress, progress_document
from p2pstore.status.hottest import hottest
from p2pstore.status.member_list import Survey, member_document
from p2pstore.status.slow_list import slow_document
from p2pstore.status.statistics import peer_document
from p2pstore.status.text import shown

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

FORMAT: Final = 1
"""Of the document. It only grows."""
KEPT_SECONDS: Final = 1.0
"""How long a document is good enough for who asks next."""
MOST_OF_A_CORE: Final = 0.01
"""That making documents may take: longer ones, of very large clusters, are kept for longer."""
MAX_NAMESPACES: Final = 32

_CURVES: Final = ("gets", "misses", "puts", "in_bytes", "out_bytes")


class StatusSource:
    """Of one peer. `with_keys`: the texts of keys are shown, to anybody who asks."""

    def __init__(
        self, node: Node, *, with_keys: bool, cpu_seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self._node = node
        self._cpu_seconds = cpu_seconds
        self._with_keys = with_keys
        self._keep_until = -math.inf
        self._made = b""

    def document_bytes(self) -> bytes:
        """The document, mostly not older than `KEPT_SECONDS`."""
        now = self._node.now
        if now >= self._keep_until:
            began = self._cpu_seconds()
            self._made = json.dumps(self.document(), separators=(",", ":")).encode()
            took = self._cpu_seconds() - began
            self._keep_until = now + max(KEPT_SECONDS, took / MOST_OF_A_CORE)
        return self._made

    def document(self) -> dict[str, Any]:
        """What the page shows. Sizes in bytes."""
        node, core, now = self._node, self._node.core, self._node.now
        peer = peer_document(node, private=False)
        look = node.checkup.look(peer, private=False)
        members, checkpoints = look.members, look.checkpoints
        return {
            "format": FORMAT,
            "unix": round(time.time(), 3),
            "peer": {
                "name": shown(peer["name"]),
                "id": peer["peer_id"],
                "software": peer["software"],
                "incarnation": peer["incarnation"],
                "uptime_seconds": peer["uptime_seconds"],
                "state": node.checkup.state(),
            },
            "problems": look.documents(),
            "problems_left_out": look.left_out,
            "cluster": _cluster(shown(core.gossip.config.cluster), members),
            "members": [
                member_document(
                    member, state, now, node.watch.traffic.round_trip_seconds(member.peer_id)
                )
                | ({"me": True} if member.peer_id == core.peer_id else {})
                for state, member in members.shown
            ],
            "memory": _memory(peer),
            "ssd": _ssd(peer.get("ssd")),
            "repair": peer["repair"],
            "totals": node.checkup.totals(),
            "lately": {"seconds": round(look.seconds, 1), **look.lately},
            "recent": node.checkup.recent.document(_CURVES),
            "received": peer["received"],
            "served": peer["served"],
            "reads": node.watch.measures.document()["reads"],
            "slow": slow_document(node.watch.slow, with_keys=self._with_keys),
            "checkpoints": [self._checkpoint(each) for each in checkpoints[:MAX_CHECKPOINTS]],
            "checkpoints_left_out": max(0, len(checkpoints) - MAX_CHECKPOINTS),
            "hottest": hottest(core, now, with_keys=self._with_keys),
            "with_keys": self._with_keys,
        }

    def _checkpoint(self, each: Progress) -> dict[str, Any]:
        core = self._node.core
        switch = core.checkpoints.switched(each.head.digest)
        return progress_document(
            each,
            shown(core.name_of(each.head.publisher)),
            is_switched_to=switch is not None and switch.version == each.head.version,
        )


def _cluster(name: str, members: Survey) -> dict[str, Any]:
    return {
        "name": name,
        "live": members.live,
        "counts": members.counts,
        "members_left_out": max(
            0, sum(members.counts.values()) - members.counts["left"] - len(members.shown)
        ),
        "memory_capacity_bytes": members.memory_capacity,
        "memory_used_bytes": members.memory_used,
        "ssd_capacity_bytes": members.ssd_capacity,
        "ssd_used_bytes": members.ssd_used,
        "copies": members.copies,
    }


def _memory(peer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "capacity_bytes": peer["memory_capacity_bytes"],
        "used_bytes": peer["memory_used_bytes"],
        "leased_bytes": peer["leased_bytes"],
        "objects": peer["objects"],
        "quotas": [
            {"namespace": shown(namespace), **use}
            for namespace, use in islice(peer["quotas"].items(), MAX_NAMESPACES)
        ],
    }


def _ssd(ssd: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of the tier's statistics is shown."""
    if ssd is None:
        return None
    names = ("state", "capacity_bytes", "live_bytes", "objects", "hits", "misses", "damaged")
    more = ("hit_rate", "queued_bytes", "write_amplification", "read_latency", "write_latency")
    errors = sum(ssd[f"{each}_errors"] for each in ("read", "write", "sync", "discard"))
    return {name: ssd[name] for name in (*names, *more)} | {"errors": errors}
