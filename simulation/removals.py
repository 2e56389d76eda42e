"""Whole peers that remove keys all day: nothing else may be lost, and memory stays within its bound.

Engines evict and remove thousands of keys a second. What they removed is remembered as floors until all living peers
have heard of it. A run writes floors at a steady rate at every peer, as removals do, and checks that no peer distrusts
or loses an object that was not removed, that floors stay below their limit, and that removals keep their rate.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from p2pstore.core.operation import PutEnd
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.records import MAX_KEYS_OF_FLOOR
from p2pstore.objects import Version, key_digest, namespace_digest
from simulation.cluster import NAMESPACE, SimulatedPeer
from simulation.network import Faults
from simulation.scenario import ScenarioOutcome, ScenarioRun

STEP_SECONDS: Final = 0.25
BACK_SECONDS: Final = 120.0
"""A peer that was killed shows again what it had within this time."""
KEPT_OBJECTS: Final = 20
"""At every peer: keys that are not removed."""


@dataclass(frozen=True, slots=True)
class RemovalScenario:
    """Times in virtual seconds. A tenth of rate and limit is the same course in a tenth of the time: the limit is
    a number of seconds of removals."""

    peers: int = 4
    seconds: float = 600.0
    removals_per_second: float = 2_000.0
    limit: int = 500_000
    skew_seconds: float = 5.0
    """The peers' clocks are that far apart."""
    crash_every_seconds: float = 0.0
    """One peer after the other is killed and is back after 20 s; 0 for never."""
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class RemovalOutcome(ScenarioOutcome):
    removed: int = 0
    slowed: int = 0
    """How often a peer could not remove all it wanted at once."""
    most_floors: int = 0
    longest_wait_seconds: float = 0.0


class Removals(ScenarioRun):
    """Runs one scenario from one seed."""

    def __init__(self, seed: int, scenario: RemovalScenario) -> None:
        self.scenario = scenario
        self.outcome = RemovalOutcome(seed)
        super().__init__(self.outcome, scenario.peers)
        self.cluster.gossip_config = GossipConfig(cluster="sim", cluster_record_limit=scenario.limit)
        self._numbers = 0
        self._due = [0.0] * scenario.peers
        self._wrote_at = [0.0] * scenario.peers

    def run(self) -> RemovalOutcome:
        """Boot, put what is kept, remove for as long as wanted, read what is kept everywhere."""
        scenario = self.scenario
        for peer in self.cluster.peers:
            peer.keeps_memory = True
            peer.clock_skew_seconds = scenario.skew_seconds * peer.number / scenario.peers
        self.boot(Faults())
        self._put_kept()
        self.network.faults = scenario.faults
        crash_at = self.kernel.now + (scenario.crash_every_seconds or float("inf"))
        end = self.kernel.now + scenario.seconds
        while self.kernel.now < end:
            for peer in self.cluster.running:
                self._remove_some(peer)
            self.kernel.run_until(self.kernel.now + STEP_SECONDS)
            self._check_bounds()
            if self.kernel.now >= crash_at:
                crash_at += scenario.crash_every_seconds
                self._crash_one()
        self.network.faults = Faults()
        self._come_back()
        self._check_kept()
        self.close_books()
        return self.outcome

    def _put_kept(self) -> None:
        for peer in self.cluster.peers:
            for number in range(KEPT_OBJECTS):
                operation = peer.put(f"kept {peer.number} {number}", b"%d" % number)
                self.kernel.run_until(self.kernel.now + 0.05)
                assert operation is not None
                assert isinstance(operation.result, PutEnd)

    def _remove_some(self, peer: SimulatedPeer) -> None:
        core, number = peer.core, peer.number
        assert core is not None
        now = self.kernel.now
        self._due[number] += STEP_SECONDS * self.scenario.removals_per_second / self.scenario.peers
        while self._due[number] >= 1.0:
            wanted = min(MAX_KEYS_OF_FLOOR, int(self._due[number]))
            allowed = core.floor_budget.may_write(wanted, now)
            if allowed:
                self._write(core, allowed, now)
                self._due[number] -= allowed
                self._wrote_at[number] = now
            if allowed < wanted:
                self.outcome.slowed += 1
                break
        else:
            self._wrote_at[number] = now
        wait = now - self._wrote_at[number]
        self.outcome.longest_wait_seconds = max(self.outcome.longest_wait_seconds, wait)
        peer.settle()

    def _write(self, core: PeerCore, count: int, now: float) -> None:
        digests = [
            hashlib.blake2b(b"%d" % (self._numbers + index), digest_size=16).digest()
            for index in range(count)
        ]
        self._numbers += count
        version = core.version_above(Version(0, 0), now)
        core.floors.write_keys(digests, namespace_digest(NAMESPACE), version, now)
        self.outcome.removed += count

    def _crash_one(self) -> None:
        victim = self.cluster.running[int(self.kernel.now) % len(self.cluster.running)]
        other = next(peer for peer in self.cluster.running if peer is not victim)
        victim.crash()
        self.kernel.after(20.0, lambda: victim.boot([other.address]))

    def _come_back(self) -> None:
        """Wait until the one killed last is back, and shows what it had."""
        until = self.kernel.now + BACK_SECONDS
        self.kernel.run_until(self.kernel.now + 40.0)
        while not self._all_are_back() and self.kernel.now < until:
            self.kernel.run_until(self.kernel.now + 1.0)

    def _all_are_back(self) -> bool:
        cores = [peer.core for peer in self.cluster.running if peer.core is not None]
        return len(cores) == len(self.cluster.peers) and not any(
            core.earlier_life.returning for core in cores
        )

    def _check_bounds(self) -> None:
        for peer in self.cluster.running:
            assert peer.core is not None
            records = peer.core.gossip.cluster_records
            count = records.floors.count
            self.outcome.most_floors = max(self.outcome.most_floors, count)
            if count > 1.1 * self.scenario.limit + 200 or records.floors_refused:
                self.problem(f"{peer.address} has {count:,} floors, refused {records.floors_refused:,}")
            if peer.core.counters["horizons_missed"]:
                self.problem(f"{peer.address} distrusted its objects")
            if not self.scenario.crash_every_seconds:
                self._check_doubts(peer)

    def _check_doubts(self, reader: SimulatedPeer) -> None:
        """No peer was away: all objects must be readable, even while floors are compacted."""
        assert reader.core is not None
        for holder in self.cluster.running:
            assert holder.core is not None
            if reader.core.gossip.doubted_up_to(holder.core.member, self.kernel.now) > 0:
                self.problem(f"{reader.address} believes nothing of {holder.address}")

    def _check_kept(self) -> None:
        for owner in self.cluster.peers:
            for number in range(KEPT_OBJECTS):
                digest = key_digest(f"kept {owner.number} {number}", NAMESPACE)
                for reader in self.cluster.running:
                    result = self.read_now(reader, digest)
                    if result != b"%d" % number:
                        self.problem(f"{reader.address} read {result!r} for {owner.number}'s {number}")


def run_removals(seed: int, scenario: RemovalScenario | None = None) -> RemovalOutcome:
    return Removals(seed, scenario or RemovalScenario()).run()
