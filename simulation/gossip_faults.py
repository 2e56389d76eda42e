"""The faults of a simulated gossip cluster, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.network import Faults

LOSSY: Final = Faults(loss=0.05, duplication=0.02, slow=0.05, slow_latency=0.4)
HARD: Final = Faults(loss=0.2, duplication=0.05, slow=0.1, slow_latency=1.0)
LEVELS: Final = ("none", "lossy", "hard", "stalls", "random")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How much of what goes wrong while the work lasts; times in virtual seconds."""

    network: Faults = field(default_factory=Faults)
    crashes: int = 0
    """Processes that end; most come back, some without their state directory."""
    leaves: int = 0
    joins: int = 0
    """Peers that start only later."""
    splits: int = 0
    one_way_cuts: int = 0
    stalls: int = 0
    longest_seconds: float = 6.0
    """Of a split, a cut, a stall or an absence."""
    skew_seconds: float = 0.0
    drift: float = 0.0

    @property
    def stalls_only(self) -> bool:
        """Whether nothing but standing still could make a peer seem dead."""
        return (
            self.stalls > 0
            and not (self.crashes or self.leaves or self.splits or self.one_way_cuts)
            and self.network.loss <= 0.05
        )


def plan_of(level: str, rng: Random) -> FaultPlan:
    """The plan of that name; `random` is another one for each seed. Raises `ValueError`."""
    if level == "none":
        return FaultPlan()
    if level == "lossy":
        return FaultPlan(LOSSY, crashes=2, splits=1, stalls=1, joins=1, skew_seconds=1.0)
    if level == "hard":
        return FaultPlan(
            HARD,
            crashes=4,
            leaves=1,
            joins=2,
            splits=2,
            one_way_cuts=2,
            stalls=2,
            longest_seconds=8.0,
            skew_seconds=60.0,
            drift=0.01,
        )
    if level == "stalls":
        return _stalls(rng)
    if level == "random":
        return _random_plan(rng)
    raise ValueError(f"faults are {', '.join(LEVELS)}, not {level!r}")


def _stalls(rng: Random) -> FaultPlan:
    return FaultPlan(LOSSY, stalls=rng.randint(2, 6), longest_seconds=10.0)


def _random_plan(rng: Random) -> FaultPlan:
    """Each kind of fault is absent in many plans, so that a seed shows what one of them does alone."""

    def some(most: int) -> int:
        return rng.randint(1, most) if rng.random() < 0.5 else 0

    network = rng.choice((Faults(), LOSSY, LOSSY, HARD))
    if rng.random() < 0.2:
        return _stalls(rng)
    return FaultPlan(
        network,
        crashes=some(4),
        leaves=some(2),
        joins=some(2),
        splits=some(3),
        one_way_cuts=some(3),
        stalls=some(3),
        longest_seconds=rng.choice((2.0, 6.0, 12.0)),
        skew_seconds=rng.choice((0.0, 1.0, 3600.0)),
        drift=rng.choice((0.0, 0.001, 0.05)),
    )


class Misfortune:
    """Carries a plan out on a cluster; `heal` ends all of it."""

    def __init__(
        self, cluster: GossipCluster, plan: FaultPlan, rng: Random, bootstrap: list[str]
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._rng = rng
        self._bootstrap = bootstrap
        self._healed = False

    def set_clocks(self) -> None:
        """Give every host its wrong clock; before it boots."""
        for peer in self._cluster.peers:
            peer.clock_skew_seconds = self._rng.uniform(-1.0, 1.0) * self._plan.skew_seconds
            peer.clock_rate = 1.0 + self._rng.uniform(-1.0, 1.0) * self._plan.drift

    def schedule(self, begin: float, end: float) -> None:
        """Place everything in the time between."""
        plan, cluster = self._plan, self._cluster
        cluster.kernel.at(begin, self._spoil_network)
        kinds: list[tuple[int, Callable[[], None]]] = [
            (plan.crashes, self._crash),
            (plan.leaves, self._leave),
            (plan.splits, self._split),
            (plan.one_way_cuts, self._cut_one_way),
            (plan.stalls, self._stall),
        ]
        for count, action in kinds:
            for _ in range(count):
                cluster.kernel.at(self._rng.uniform(begin, end), partial(self._do, action))

    def heal(self) -> None:
        """From now on nothing goes wrong. The bootstrap peer is there; others may stay away."""
        cluster = self._cluster
        self._healed = True
        cluster.network.heal()
        cluster.network.faults = Faults()
        for peer in cluster.peers:
            if not peer.running and (peer is cluster.peers[0] or self._rng.random() < 0.5):
                self._start(peer)
            peer.resume()

    def _do(self, action: Callable[[], None]) -> None:
        if not self._healed:
            action()

    def _spoil_network(self) -> None:
        self._cluster.network.faults = self._plan.network

    def _while(self) -> float:
        return self._rng.uniform(0.1, self._plan.longest_seconds)

    def _running(self) -> GossipPeer | None:
        running = self._cluster.running
        return self._rng.choice(running) if len(running) > 1 else None

    def _crash(self) -> None:
        peer = self._running()
        if peer is None:
            return
        peer.crash(silent=self._rng.random() < 0.5)
        if self._rng.random() < 0.75:
            self._cluster.kernel.after(self._while(), lambda: self._do(lambda: self._start(peer)))

    def _start(self, peer: GossipPeer) -> None:
        if not peer.running:
            peer.boot(self._bootstrap, keep_state=self._rng.random() < 0.7)

    def _leave(self) -> None:
        peer = self._running()
        if peer is None:
            return
        peer.leave()
        if self._rng.random() < 0.5:
            self._cluster.kernel.after(self._while(), lambda: self._do(lambda: self._start(peer)))

    def _split(self) -> None:
        hosts = list(range(len(self._cluster.peers)))
        self._rng.shuffle(hosts)
        cut = self._rng.randint(1, max(1, len(hosts) - 1))
        self._cluster.network.partition(set(hosts[:cut]), set(hosts[cut:]))
        self._cluster.kernel.after(self._while(), self._cluster.network.heal)

    def _cut_one_way(self) -> None:
        """Some hosts are not heard, or do not hear."""
        cluster = self._cluster
        hosts = list(range(len(cluster.peers)))
        chosen = set(self._rng.sample(hosts, self._rng.randint(1, max(1, len(hosts) // 3))))
        others = [host for host in hosts if host not in chosen]
        deaf = self._rng.random() < 0.5
        pairs = {(b, a) if deaf else (a, b) for a in chosen for b in others}
        cluster.network.blocked |= pairs
        cluster.kernel.after(self._while(), lambda: cluster.network.blocked.difference_update(pairs))

    def _stall(self) -> None:
        peer = self._running()
        if peer is not None:
            peer.stall(self._while())
