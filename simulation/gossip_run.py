"""One seed of a gossip cluster under faults: work, misfortune, healing, agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.member_table import MembershipConfig
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    SCOPE_KEY,
    ClusterRecord,
    ClusterRecordKind,
    LocationRecord,
)
from p2pstore.objects import Version, clock_from_unix_seconds
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_faults import FaultPlan, Misfortune, plan_of
from simulation.gossip_invariants import Watch
from simulation.gossip_peer import GossipPeer
from simulation.scenario import ScenarioOutcome

SETTLE_SECONDS: Final = 120.0
"""All must agree this long after everything healed."""
START_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 0.1
KEYS: Final = 48


@dataclass(frozen=True, slots=True)
class GossipScenario:
    """The parameters of a run. The number of peers is drawn from the seed, small numbers preferred."""

    fewest_peers: int = 3
    most_peers: int = 32
    seconds: float = 6.0
    operations_per_second: float = 15.0
    faults: str = "random"


@dataclass(slots=True)
class GossipOutcome(ScenarioOutcome):
    peers: int = 0
    operations: int = 0
    connections: int = 0
    snapshots: int = 0
    checks: int = 0
    denials: int = 0
    deaths: int = 0
    false_deaths: int = 0
    settled_after_seconds: float = 0.0


def run_gossip_seed(
    seed: int,
    scenario: GossipScenario,
    *,
    make_gossip: Callable[..., Gossip] = Gossip,
    make_peer: Callable[[GossipCluster, int], GossipPeer] = GossipPeer,
) -> GossipOutcome:
    """The same seed and scenario give the same run. The makers are for tests that break the protocol."""
    return GossipRun(seed, scenario, make_gossip, make_peer).run()


class GossipRun:
    """See `run_gossip_seed`."""

    def __init__(
        self,
        seed: int,
        scenario: GossipScenario,
        make_gossip: Callable[..., Gossip],
        make_peer: Callable[[GossipCluster, int], GossipPeer],
    ) -> None:
        self.scenario = scenario
        self.rng = Random(seed ^ 0x60551)
        self.plan: FaultPlan = plan_of(scenario.faults, self.rng)
        spread = scenario.most_peers - scenario.fewest_peers
        peers = scenario.fewest_peers + round(spread * self.rng.random() ** 4)
        self.cluster = GossipCluster(
            seed, peers, config=random_config(self.rng), make_gossip=make_gossip, make_peer=make_peer
        )
        self.outcome = GossipOutcome(seed, self.cluster.problems, peers=peers)
        self.bootstrap = [self.cluster.peers[0].address]
        self.misfortune = Misfortune(self.cluster, self.plan, self.rng, self.bootstrap)
        self.watch = Watch(self.cluster, judges_stalls=self.plan.stalls_only)
        self._clock = 0

    def run(self) -> GossipOutcome:
        cluster, kernel = self.cluster, self.cluster.kernel
        self.misfortune.set_clocks()
        end = START_SECONDS + self.scenario.seconds
        late = set(self.rng.sample(range(1, len(cluster.peers)), min(self.plan.joins, 1)))
        for peer in cluster.peers:
            at = self.rng.uniform(START_SECONDS, end) if peer.number in late else 0.0
            kernel.at(at, partial(self._boot, peer))
        for _ in range(int(self.scenario.operations_per_second * self.scenario.seconds)):
            kernel.at(self.rng.uniform(START_SECONDS, end), self._operate)
        self.misfortune.schedule(START_SECONDS, end)
        self._watch_until(end)
        self.misfortune.heal()
        self._settle()
        return self._close()

    def _watch_until(self, end: float) -> None:
        kernel = self.cluster.kernel
        while kernel.now < end:
            kernel.run_until(min(end, kernel.now + CHECK_SECONDS))
            if self.cluster.running:
                self.watch.check(self.rng.choice(self.cluster.running), [self._digest()])

    def _settle(self) -> None:
        cluster = self.cluster
        took = cluster.run_until(cluster.agreed, SETTLE_SECONDS)
        self.watch.check_all([key_of(number) for number in range(KEYS)])
        if took is None:
            cluster.problem(f"no agreement {SETTLE_SECONDS:g} s after healing")
        else:
            self.outcome.settled_after_seconds = took
        for text in cluster.disagreements():
            cluster.problem(text)

    def _close(self) -> GossipOutcome:
        outcome, cluster = self.outcome, self.cluster
        outcome.trace_hash = str(cluster.network.trace)
        outcome.messages = cluster.network.messages
        outcome.connections = cluster.network.opened
        outcome.snapshots = cluster.snapshots
        outcome.checks, outcome.denials = self.watch.checks, self.watch.denials
        outcome.deaths, outcome.false_deaths = self.watch.deaths, self.watch.false_deaths
        return outcome

    # --- the work ----------------------------------------------------------------------------

    def _boot(self, peer: GossipPeer) -> None:
        if not peer.running:
            peer.boot(self.bootstrap)

    def _digest(self) -> bytes:
        return key_of(self.rng.randrange(KEYS))

    def _operate(self) -> None:
        if not self.cluster.running:
            return
        peer = self.rng.choice(self.cluster.running)
        if peer.stalled:
            return
        self.outcome.operations += 1
        choice = self.rng.random()
        if choice < 0.55 or not peer.held:
            self._hold(peer, self._digest())
        elif choice < 0.9:
            peer.release(self.rng.choice(list(peer.held)))
        elif choice < 0.95:
            for _ in range(self.rng.randint(4, 40)):  # more than a ring holds
                self._hold(peer, self._digest())
        else:
            self._forbid(peer)

    def _hold(self, peer: GossipPeer, digest: bytes) -> None:
        self._clock += 1
        peer.hold(LocationRecord(digest, Version(self._clock, peer.number), self._clock, 1))

    def _forbid(self, peer: GossipPeer) -> None:
        clock = clock_from_unix_seconds(peer.unix(peer.now))
        peer.offer(
            ClusterRecord(
                CLUSTER_RECORD_FORMAT,
                ClusterRecordKind.FLOOR,
                self._digest(),
                clock,
                peer.number,
                peer.peer_id,
                SCOPE_KEY,
            )
        )


def random_config(rng: Random) -> GossipConfig:
    """Small bounds and short times: everything that takes a rare moment happens often."""
    ring_limit = rng.choice((4, 8, 32, 1024))
    interval = rng.choice((0.2, 0.5, 1.0))
    membership = replace(
        MembershipConfig(),
        probe_interval_seconds=interval,
        probe_timeout_seconds=interval / 2,
        recontact_interval_seconds=interval,
        claims_per_message=rng.choice((2, 32)),
    )
    return GossipConfig(
        cluster="sim",
        membership=membership,
        directory=DirectoryConfig(relay_limit=ring_limit),
        ring_limit=ring_limit,
        exchange_seconds=rng.choice((0.067, 0.2, 0.4)),
        delta_bytes=rng.choice((1024, 160 * 1024)),
        forget_seconds=rng.choice((5.0, 60.0)),
        behind_seconds=rng.choice((0.3, 1.0)),
        snapshot_timeout_seconds=5.0,
    )


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"key %d" % number, digest_size=16).digest()
