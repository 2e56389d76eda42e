"""How long one put takes until 99 % of the peers know of it."""

from __future__ import annotations

import math
import statistics
from typing import Final

from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import (
    LOSSES,
    Case,
    Curve,
    Figure,
    Measured,
    no_problems,
    percentile,
    record_of,
    settled_cluster,
)

SIZES: Final = (10, 100, 1000)
LIMITS: Final = {10: (0.6, 0.060), 100: (0.8, 0.150), 1000: (1.2, 0.250)}
"""Seconds: p99 and median of the time until 99 % know."""
PARTS: Final = LOSSES
PUTS: Final = {10: 300, 100: 300, 1000: 12}
QUICK_PUTS: Final = {10: 40, 100: 12, 1000: 3}
LONGEST_SECONDS: Final = 10.0
PAUSE_SECONDS: Final = 0.3


def measure(case: Case) -> Measured:
    """Figures with or without loss."""
    puts = (QUICK_PUTS if case.quick else PUTS).get(case.peers, 10)
    p99_limit, median_limit = LIMITS.get(case.peers, (None, None))
    cluster = settled_cluster(case, loss=LOSSES[case.part])
    spreads = [_Spread(cluster, number).run() for number in range(puts)]
    times = [spread.until(0.99) for spread in spreads]
    label = f"{case.peers} peers, {case.part}"
    middle = sorted(spreads, key=lambda spread: spread.until(0.99))[len(spreads) // 2]
    return Measured(
        [
            Figure(f"{label}: 99 % know, p99 of puts", percentile(times, 0.99), "s", p99_limit),
            Figure(f"{label}: 99 % know, median", statistics.median(times), "s", median_limit),
            no_problems(cluster),
        ],
        {"known by": {label: middle.curve()}},
    )


class _Spread:
    """One put, and who knows of it when."""

    def __init__(self, cluster: GossipCluster, number: int) -> None:
        self._cluster = cluster
        self._number = number
        self._others = len(cluster.peers) - 1
        self._seconds: dict[int, float] = {}

    def run(self) -> _Spread:
        cluster = self._cluster
        cluster.run(PAUSE_SECONDS + cluster.kernel.rng.random())
        owner = cluster.kernel.rng.choice(cluster.peers)
        begin = cluster.kernel.now
        sequence = owner.gossip.log.sequence + 1

        def look(peer: GossipPeer) -> None:
            if peer.number not in self._seconds and peer is not owner:
                position = peer.gossip.directory.position(owner.member)
                if position >= (owner.gossip.incarnation, sequence):
                    self._seconds[peer.number] = cluster.kernel.now - begin

        cluster.after_turn = look
        owner.hold(record_of(self._number))
        cluster.kernel.run_until(begin + LONGEST_SECONDS, lambda: len(self._seconds) >= self._others)
        cluster.after_turn = None
        return self

    def until(self, fraction: float) -> float:
        """When that fraction of the other peers knew; infinity when they never did."""
        known = sorted(self._seconds.values())
        needed = math.ceil(fraction * self._others)
        return known[needed - 1] if len(known) >= needed else math.inf

    def curve(self) -> Curve:
        """Fraction known over seconds."""
        known = sorted(self._seconds.values())
        return [(0.0, 0.0)] + [(at, (i + 1) / self._others) for i, at in enumerate(known)]
