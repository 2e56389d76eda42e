"""How long until 99 % of the peers know that one of them is gone, without a word and without a reset, and none of its
objects is in their indexes any more.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberChange
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import (
    LOSSES,
    Case,
    Curve,
    Figure,
    Measured,
    in_index,
    no_problems,
    record_of,
    settled_cluster,
)

SIZES: Final = (10, 100, 1000)
LIMITS: Final = {10: 9.0, 100: 15.0, 1000: 18.0}
PARTS: Final = LOSSES
CRASHES: Final = {10: 100, 100: 100, 1000: 100}
QUICK_CRASHES: Final = {10: 12, 100: 10, 1000: 5}
AT_ONCE: Final = {10: 1, 100: 5, 1000: 20}
"""Victims of one round, a little apart from each other; at most a twentieth of a large cluster."""
APART_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 30.0
BACK_SECONDS: Final = 10.0


def measure(case: Case) -> Measured:
    """Figures with or without loss, the worst of all crashes."""
    crashes = (QUICK_CRASHES if case.quick else CRASHES).get(case.peers, 10)
    at_once = min(AT_ONCE.get(case.peers, max(1, case.peers // 20)), crashes)
    cluster = settled_cluster(case, loss=LOSSES[case.part])
    known: list[dict[int, float]] = []
    while len(known) < crashes:
        known += _Round(cluster, at_once).run(again=len(known) + at_once < crashes)
    others = case.peers - 1
    times = [_until(each, 0.99, others) for each in known]
    label = f"{case.peers} peers, {case.part}: crash known by 99 %"
    worst = max(known, key=lambda each: _until(each, 0.99, others))
    limit = LIMITS.get(case.peers)
    return Measured(
        [
            Figure(f"{label}, worst of {len(times)}", max(times), "s", limit),
            Figure(f"{label}, median", statistics.median(times), "s"),
            no_problems(cluster),
        ],
        {"crash known by": {f"{case.peers} peers, {case.part}": _curve(worst, others)}},
    )


def _until(known: dict[int, float], fraction: float, others: int) -> float:
    ordered = sorted(known.values())
    needed = math.ceil(fraction * others)
    return ordered[needed - 1] if len(ordered) >= needed else math.inf


def _curve(known: dict[int, float], others: int) -> Curve:
    return [(0.0, 0.0)] + [(at, (i + 1) / others) for i, at in enumerate(sorted(known.values()))]


class _Round:
    """Some peers go; the others find out; the victims come back."""

    def __init__(self, cluster: GossipCluster, victims: int) -> None:
        self._cluster = cluster
        self._victims = cluster.kernel.rng.sample(cluster.peers, victims)
        self._gone_at: dict[bytes, float] = {}
        self._known: dict[bytes, dict[int, float]] = {each.peer_id: {} for each in self._victims}

    def run(self, *, again: bool) -> list[dict[int, float]]:
        cluster = self._cluster
        cluster.on_change = self._changed
        for victim in self._victims:
            victim.hold(record_of(victim.number))
        for victim in self._victims:
            cluster.run(APART_SECONDS * cluster.kernel.rng.random())
            self._gone_at[victim.peer_id] = cluster.kernel.now
            victim.crash(silent=True)
        running = len(cluster.running)
        cluster.kernel.run_until(
            cluster.kernel.now + PATIENCE_SECONDS,
            lambda: all(len(known) >= running for known in self._known.values()),
        )
        cluster.on_change = lambda peer, change: None
        for known in self._known.values():
            # The other victims do not count as peers that should know.
            for victim in self._victims:
                if len(known) < len(cluster.peers) - 1:
                    known.setdefault(victim.number, 0.0)
        if again:
            for victim in self._victims:
                victim.boot([cluster.peers[0].address, cluster.peers[1].address])
            cluster.run_until(cluster.agreed, 6 * BACK_SECONDS, 1.0)
        return list(self._known.values())

    def _changed(self, peer: GossipPeer, change: MemberChange) -> None:
        known = self._known.get(change.peer_id)
        if known is None or change.peer_id not in self._gone_at:
            return
        digest = record_of(self._cluster.by_peer_id[change.peer_id].number).digest
        if change.new == Status.DEAD and not in_index(peer, digest):
            known.setdefault(peer.number, self._cluster.kernel.now - self._gone_at[change.peer_id])
        else:
            known.pop(peer.number, None)
