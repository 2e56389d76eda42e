"""How long one put, and its removal, take until 99 % of the peers know of it, and until any one does."""

from __future__ import annotations

import math
import statistics
from itertools import repeat
from typing import Final

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
    percentile,
    record_of,
    settled_cluster,
)

SIZES: Final = (10, 100, 1000)
LIMITS: Final = {10: (0.6, 0.060), 100: (0.8, 0.150), 1000: (1.2, 0.250)}
"""Seconds: p99 and median of the time until 99 % know."""
SEEN_LIMIT, UNSEEN_LIMIT = 0.5, 1.0
"""Seconds: p99, of all puts and all peers, until a peer's answer about a prefix counts the block; until it does not."""
PARTS: Final = LOSSES
PUTS: Final = {10: 300, 100: 100, 1000: 12}
QUICK_PUTS: Final = {10: 40, 100: 12, 1000: 3}
LONGEST_SECONDS: Final = 10.0
PAUSE_SECONDS: Final = 0.3


def measure(case: Case) -> Measured:
    """Figures with or without loss."""
    puts = (QUICK_PUTS if case.quick else PUTS).get(case.peers, 10)
    p99_limit, median_limit = LIMITS.get(case.peers, (None, None))
    cluster = settled_cluster(case, loss=LOSSES[case.part])
    spreads, removals = [], []
    for number in range(puts):
        spreads.append(_Spread(cluster, number).run())
        removals.append(spreads[-1].removed().run())
    times = [spread.until(0.99) for spread in spreads]
    label = f"{case.peers} peers, {case.part}"
    seen, unseen = ([at for each in some for at in each.seconds()] for some in (spreads, removals))
    middle = sorted(spreads, key=lambda spread: spread.until(0.99))[len(spreads) // 2]
    return Measured(
        [
            Figure(f"{label}: 99 % know, p99 of puts", percentile(times, 0.99), "s", p99_limit),
            Figure(f"{label}: 99 % know, median", statistics.median(times), "s", median_limit),
            Figure(f"{label}: in a peer's index, p99", percentile(seen, 0.99), "s", SEEN_LIMIT),
            Figure(f"{label}: in a peer's index, worst", max(seen), "s"),
            Figure(f"{label}: removed from it, p99", percentile(unseen, 0.99), "s", UNSEEN_LIMIT),
            Figure(f"{label}: removed from it, worst", max(unseen), "s"),
            no_problems(cluster),
        ],
        {"known by": {label: middle.curve()}},
    )


class _Spread:
    """One put, or one removal, and whose index shows it when."""

    def __init__(self, cluster: GossipCluster, number: int, owner: GossipPeer | None = None) -> None:
        self._cluster = cluster
        self._number = number
        self._owner = owner
        """The holder of what is removed; None for a put."""
        self._others = len(cluster.peers) - 1
        self._seconds: dict[int, float] = {}

    def removed(self) -> _Spread:
        return _Spread(self._cluster, self._number, self._owner)

    def run(self) -> _Spread:
        cluster = self._cluster
        cluster.run(PAUSE_SECONDS + cluster.kernel.rng.random())
        begin, record, removes = cluster.kernel.now, record_of(self._number), self._owner is not None
        owner = self._owner = self._owner or cluster.kernel.rng.choice(cluster.peers)

        def look(peer: GossipPeer) -> None:
            if peer.number in self._seconds or peer is owner:
                return
            if in_index(peer, record.digest) is not removes:
                self._seconds[peer.number] = cluster.kernel.now - begin

        cluster.after_turn = look
        if removes:
            owner.release(record.digest)
        else:
            owner.hold(record)
        cluster.kernel.run_until(begin + LONGEST_SECONDS, lambda: len(self._seconds) >= self._others)
        cluster.after_turn = None
        return self

    def seconds(self) -> list[float]:
        """Of every other peer; infinity where its index never showed it."""
        return [*self._seconds.values(), *repeat(math.inf, self._others - len(self._seconds))]

    def until(self, fraction: float) -> float:
        """When that fraction of the other peers knew; infinity when they never did."""
        known = sorted(self._seconds.values())
        needed = math.ceil(fraction * self._others)
        return known[needed - 1] if len(known) >= needed else math.inf

    def curve(self) -> Curve:
        """Fraction known over seconds."""
        known = sorted(self._seconds.values())
        return [(0.0, 0.0)] + [(at, (i + 1) / self._others) for i, at in enumerate(known)]
