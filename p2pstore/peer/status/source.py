"""What the page shows, as JSON: asked of the peer once a second at most, however many look."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.doctor.network_rules import SsdReading
from p2pstore.gossip.members.membership import MemberState
from p2pstore.peer.statistics import peer_document
from p2pstore.peer.status.checkpoints import MAX_SHOWN as MAX_CHECKPOINTS
from p2pstore.peer.status.checkpoints import Progress, failures, progress, progress_document
from p2pstore.peer.status.hottest import hottest
from p2pstore.peer.status.members import Survey, member_document, name_of, survey, versions_of
from p2pstore.peer.status.problems import MAX_PROBLEMS, Facts, problem_document, problems
from p2pstore.peer.status.recent import INTERVAL_SECONDS, RecentCounts
from p2pstore.peer.status.slow import slow_document
from p2pstore.peer.status.text import shown

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

FORMAT: Final = 1
"""Of the document. It only grows."""
KEPT_SECONDS: Final = 1.0
"""How long a document is good enough for who asks next."""
MOST_OF_A_CORE: Final = 0.01
"""That making documents may take: longer ones, of very large clusters, are kept for longer."""
MAX_NAMES_LOOKED_AT: Final = 1000
"""Of living members, for whether one that is dead was replaced by another of its name."""
MAX_NAMESPACES: Final = 32

_SHOWN_COUNTERS: Final = (
    *("client_puts", "client_put_bytes", "client_puts_failed", "client_reads", "client_leases"),
    *("client_reads_elsewhere", "client_reads_from_ssd", "client_misses", "last_copies_dropped"),
    *("transport_fallbacks", "objects_spoilt", "repairs", "repaired_bytes"),
)
_ADDED_UP: Final = (
    *("gets", "misses", "puts", "in_bytes", "in_objects", "in_failures", "out_bytes"),
    *("stalls", "looks", "refused_by_members", "slow"),
)
_CURVES: Final = ("gets", "misses", "puts", "in_bytes", "out_bytes")
_STALL_BUCKET: Final = 18
"""From here on the event loop was late by more than 131 ms (`histograms`)."""


class StatusSource:
    """Of one peer. `with_keys`: the texts of keys are shown, to anybody who asks."""

    def __init__(
        self, node: Node, *, with_keys: bool, cpu_seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self._node = node
        self._cpu_seconds = cpu_seconds
        self._with_keys = with_keys
        self._recent = RecentCounts((*_ADDED_UP, *_SHOWN_COUNTERS))
        self._keep_until = -math.inf
        self._made = b""
        self._checkpoints_version: tuple[int, int, int] | None = None
        self._checkpoints: list[Progress] = []

    async def watch(self) -> None:
        """Note what is counted, also while nobody looks; until cancelled."""
        while True:
            self._recent.sample(self._totals(), self._node.now)
            await trio.sleep(INTERVAL_SECONDS)

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
        membership = core.gossip.membership
        peer = peer_document(node, private=False)
        members = survey(membership.states(), core.peer_id)
        dead = _without_replaced(members, membership.live())
        checkpoints = self._look_at_checkpoints()
        seconds, lately = self._recent.since(self._totals(), now)
        found = problems(self._facts(peer, members, dead, checkpoints, seconds, lately))
        return {
            "format": FORMAT,
            "unix": round(time.time(), 3),
            "peer": {
                "name": shown(peer["name"]),
                "id": peer["peer_id"],
                "software": peer["software"],
                "incarnation": peer["incarnation"],
                "uptime_seconds": peer["uptime_seconds"],
                "state": self._state(),
            },
            "problems": [problem_document(finding) for finding in found[:MAX_PROBLEMS]],
            "problems_left_out": max(0, len(found) - MAX_PROBLEMS),
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
            "totals": self._totals(),
            "lately": {"seconds": round(seconds, 1), **lately},
            "recent": self._recent.document(_CURVES),
            "received": peer["received"],
            "served": peer["served"],
            "reads": node.watch.measures.document()["reads"],
            "slow": slow_document(node.watch.slow, with_keys=self._with_keys),
            "checkpoints": [self._checkpoint(each) for each in checkpoints[:MAX_CHECKPOINTS]],
            "checkpoints_left_out": max(0, len(checkpoints) - MAX_CHECKPOINTS),
            "hottest": hottest(core, now, with_keys=self._with_keys),
            "with_keys": self._with_keys,
        }

    def _look_at_checkpoints(self) -> list[Progress]:
        """Anew when there is news of them: there may be thousands."""
        core = self._node.core
        if self._checkpoints_version != core.checkpoints.version:
            self._checkpoints_version = core.checkpoints.version
            self._checkpoints = progress(core.checkpoints.heads(), core.gossip.membership.live())
        return self._checkpoints

    def _state(self) -> str:
        node = self._node
        if node.leave_requested.is_set() or node.core.closing:
            return "leaving"
        if node.config.bootstrap and not node.settled.is_set():
            return "joining"
        return "ready"

    def _totals(self) -> dict[str, int]:
        node = self._node
        counters: Mapping[str, int] = node.core.counters
        totals = {name: counters.get(name, 0) for name in _SHOWN_COUNTERS}
        gets = ("client_reads", "client_leases", "client_reads_elsewhere")
        came = node.watch.traffic.totals.values()
        measures = node.watch.measures
        return {
            "gets": sum(totals[name] for name in gets),
            "misses": totals["client_misses"],
            "puts": totals["client_puts"],
            "in_bytes": sum(use.bytes for use in came),
            "in_objects": sum(use.objects for use in came),
            "in_failures": sum(use.failures for use in came),
            "out_bytes": node.served.bytes,
            "stalls": sum(measures.loop_lag.counts[_STALL_BUCKET:]),
            "looks": measures.loop_lag.count,
            "refused_by_members": measures.refused_by_members,
            "slow": node.watch.slow.total,
            **totals,
        }

    def _facts(
        self,
        peer: Mapping[str, Any],
        members: Survey,
        dead: Sequence[MemberState],
        checkpoints: Sequence[Progress],
        seconds: float,
        lately: Mapping[str, int],
    ) -> Facts:
        node = self._node
        suspect = members.by_state["suspect"]
        replaced = len(members.by_state["dead"]) - len(dead)
        return Facts(
            seconds=seconds,
            leaving=self._state() == "leaving",
            bootstrap_count=len(node.config.bootstrap),
            joined=node.contacted.is_set() or node.uptime_seconds < node.config.join_timeout,
            live=members.live,
            dead=[name_of(member) for member in dead],
            dead_count=members.counts["dead"] - replaced,
            suspect=[name_of(member) for member in suspect],
            suspect_count=members.counts["suspect"],
            versions=versions_of([member for _, member in members.shown if member.alive]),
            load_permille=node.load.told_permille,
            local_health=peer["gossip"]["local_health"],
            clock_ahead_seconds=peer["clock_ahead_seconds"],
            members_refused=peer["members_refused"],
            memory_share=_share(peer["memory_used_bytes"], peer["memory_capacity_bytes"]),
            lost_rdma_devices=peer.get("rdma", {}).get("lost_devices", 0),
            lacking=peer["repair"]["lacking"],
            ssd=_ssd_reading(peer.get("ssd")),
            lately=lately,
            failed_checkpoints=failures(checkpoints, name_of),
        )

    def _checkpoint(self, each: Progress) -> dict[str, Any]:
        core = self._node.core
        switch = core.checkpoints.switched(each.head.digest)
        return progress_document(
            each,
            shown(core.name_of(each.head.publisher)),
            is_switched_to=switch is not None and switch.version == each.head.version,
        )


def _without_replaced(members: Survey, live: Sequence[MemberState]) -> list[MemberState]:
    """The dead, but for those whose name another member has by now: a peer without a state directory comes back as
    somebody else."""
    dead = members.by_state["dead"]
    if not dead:
        return []
    names = {name_of(member) for member in islice(live, MAX_NAMES_LOOKED_AT)}
    return [member for member in dead if name_of(member) not in names]


def _share(used: int, capacity: int) -> float:
    return used / capacity if capacity else 0.0


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


def _ssd_reading(ssd: Mapping[str, Any] | None) -> SsdReading | None:
    if ssd is None:
        return None
    return SsdReading(
        state=ssd["state"],
        why=ssd["why"],
        capacity_bytes=ssd["capacity_bytes"],
        live_bytes=ssd["live_bytes"],
        objects=ssd["objects"],
        damaged=ssd["damaged"],
        read_p99_ms=ssd["read_latency"].get("p99_ms") or 0.0,
        cure=ssd["cure"],
    )
