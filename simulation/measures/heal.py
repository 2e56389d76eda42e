"""How long after a long split all see all again, without any bootstrap address."""

from __future__ import annotations

from typing import Final

from simulation.gossip_cluster import GossipCluster
from simulation.measures.figures import Case, Figure, Measured, no_problems, settled_cluster

SIZES: Final = (10, 100, 1000)
LIMITS: Final = {10: 5.0, 100: 5.0, 1000: 10.0}
HALVES: Final = "halves"
PARTS: Final = (HALVES, "one alone")
SPLIT_SECONDS: Final = 600.0
QUICK_SPLIT_SECONDS: Final = 120.0
"""Longer than all timers but those of minutes."""
PATIENCE_SECONDS: Final = 60.0


def measure(case: Case) -> Measured:
    """Half against half, or one peer against all others."""
    split_seconds = QUICK_SPLIT_SECONDS if case.quick else SPLIT_SECONDS
    portion = case.peers // 2 if case.part == HALVES else 1
    cluster = settled_cluster(case)
    some, others = set(range(portion)), set(range(portion, case.peers))
    cluster.network.partition(some, others)
    cluster.run(split_seconds)
    given_up = _portion_given_up(cluster, portion)
    cluster.network.heal()
    took = cluster.run_until(cluster.complete, PATIENCE_SECONDS, 0.1)
    calm = cluster.run_until(cluster.agreed, PATIENCE_SECONDS, 0.5)
    label = f"{case.peers} peers, {case.part}, split for {split_seconds:g} s"
    return Measured(
        [
            Figure(f"{label}: given up before", given_up, ""),
            Figure(f"{label}: full membership", _seconds(took), "s", LIMITS.get(case.peers)),
            Figure(f"{label}: and no suspicion left, s more", _seconds(calm), "s"),
            no_problems(cluster),
        ]
    )


def _seconds(took: float | None) -> float:
    return PATIENCE_SECONDS if took is None else took


def _portion_given_up(cluster: GossipCluster, portion: int) -> float:
    """Of all pairs across the split."""
    left = 0
    for peer in cluster.peers:
        mine = portion if peer.number < portion else len(cluster.peers) - portion
        left += len(peer.gossip.membership.live()) - mine
    return 1.0 - left / (2 * portion * (len(cluster.peers) - portion))
