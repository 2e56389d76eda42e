"""How long after a long split all see all again, without any bootstrap address."""

from __future__ import annotations

from typing import Final

from p2pstore.simulation.gossip_cluster import GossipCluster
from p2pstore.simulation.measures.figures import (
    Case,
    Figure,
    Measured,
    no_problems,
    settled_cluster,
)

SIZES: Final = (10, 100, 1000)
LIMITS: Final = {10: 5.0, 100: 5.0, 1000: 10.0}
SPLIT_SECONDS: Final = {10: 600.0, 100: 600.0, 1000: 180.0}
"""Longer than all timers; a split of 1000 peers is shorter for the sake of those who wait."""
QUICK_SPLIT_SECONDS: Final = {10: 120.0, 100: 200.0, 1000: 60.0}
PATIENCE_SECONDS: Final = 60.0


def measure(case: Case) -> Measured:
    """Half against half, and one peer against all others."""
    figures = []
    split_seconds = (QUICK_SPLIT_SECONDS if case.quick else SPLIT_SECONDS).get(case.peers, 120.0)
    for name, portion in (("halves", case.peers // 2), ("one alone", 1)):
        cluster = settled_cluster(case)
        some, others = set(range(portion)), set(range(portion, case.peers))
        cluster.network.partition(some, others)
        cluster.run(split_seconds)
        given_up = _portion_given_up(cluster, portion)
        cluster.network.heal()
        took = cluster.run_until(cluster.complete, PATIENCE_SECONDS, 0.1)
        calm = cluster.run_until(cluster.agreed, PATIENCE_SECONDS, 0.5)
        label = f"{case.peers} peers, {name}, split for {split_seconds:g} s"
        figures += [
            Figure(f"{label}: given up before", given_up, ""),
            Figure(f"{label}: full membership", _seconds(took), "s", LIMITS.get(case.peers)),
            Figure(f"{label}: and no suspicion left, s more", _seconds(calm), "s"),
            no_problems(cluster),
        ]
    return Measured(figures)


def _seconds(took: float | None) -> float:
    return PATIENCE_SECONDS if took is None else took


def _portion_given_up(cluster: GossipCluster, portion: int) -> float:
    """Of all pairs across the split."""
    left = 0
    for peer in cluster.peers:
        mine = portion if peer.number < portion else len(cluster.peers) - portion
        left += len(peer.gossip.membership.live()) - mine
    return 1.0 - left / (2 * portion * (len(cluster.peers) - portion))
