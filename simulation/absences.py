"""A long random life of a small cluster: peers that are away for longer than floors are kept, splits,
whole-cluster shutdowns, kills, skewed clocks; with removes, overwrites and flushes all the time.

Every read is judged by `oracle`. At the end, when all are back and have settled, nothing that any
peer knows to be removed may be read anywhere; sets, horizons and logs agree; floors were bounded all along.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from p2pstore.core.operation import PutEnd
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.objects import Version, key_digest, namespace_digest
from p2pstore.put_facts import PutStatus
from simulation.cluster import SimulatedPeer
from simulation.network import Faults
from simulation.oracle import FloorOracle
from simulation.scenario import BOOTED_SECONDS, ScenarioOutcome, ScenarioRun

NAMESPACES: Final = ("a", "b")
SETTLE_SECONDS: Final = 300.0
WRITE_SECONDS: Final = 1.0
"""How long a floor may take to be counted as written down: more than it does take."""
FLOOR_SLACK: Final = 40


@dataclass(frozen=True, slots=True)
class AbsenceScenario:
    """What a run is made of. Times in virtual seconds."""

    peers: int = 4
    seconds: float = 900.0
    keys: int = 100
    """In each namespace."""
    operations_per_second: float = 1.0
    floor_limit: int = 80
    floor_kept_seconds: float = 30.0
    absences: int = 5
    longest_absence_seconds: float = 500.0
    splits: int = 1
    shutdowns: int = 1
    skew_seconds: float = 8.0
    """Clocks are ahead by up to that much."""
    keeps_memory: bool = False
    """Whether it is the memory that outlives a process; otherwise what was there is on an SSD."""
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class AbsenceOutcome(ScenarioOutcome):
    reads: int = 0
    delivered: int = 0
    horizons_missed: int = 0
    """How often a peer had to distrust what it held."""
    cold_discarded: int = 0
    cold_returned: int = 0
    settled_after_seconds: float = 0.0


class Absences(ScenarioRun):
    """Runs one scenario from one seed."""

    def __init__(self, seed: int, scenario: AbsenceScenario) -> None:
        self.scenario = scenario
        self.outcome = AbsenceOutcome(seed)
        super().__init__(self.outcome, scenario.peers, salt=0xAB5)
        self.cluster.gossip_config = GossipConfig(
            cluster="sim",
            cluster_record_limit=scenario.floor_limit,
            floor_kept_seconds=scenario.floor_kept_seconds,
        )
        self.oracle = FloorOracle(self.cluster.peers)
        self._healed_at = 0.0
        self._values = 0
        self._recent: deque[str] = deque(maxlen=30)
        self._version_of: dict[bytes, Version] = {}

    def run(self) -> AbsenceOutcome:
        """The whole course: boot, live, come together, settle, check."""
        for peer in self.cluster.peers:
            peer.keeps_cold = not self.scenario.keeps_memory
            peer.keeps_memory = self.scenario.keeps_memory
            peer.clock_skew_seconds = self.rng.uniform(0.0, self.scenario.skew_seconds)
        self.boot(self.scenario.faults)
        self._schedule()
        end = BOOTED_SECONDS + self.scenario.seconds
        while self.kernel.now < end:
            self.kernel.run_until(min(end, self.kernel.now + 5.0))
            self._check_bounds()
        self._come_together()
        self._settle()
        if not self.outcome.problems:
            self._check_final_reads()
        self._count()
        return self.outcome

    # --- what happens ------------------------------------------------------------------------

    def _schedule(self) -> None:
        scenario, rng = self.scenario, self.rng
        begin, end = BOOTED_SECONDS, BOOTED_SECONDS + scenario.seconds
        for _ in range(int(scenario.operations_per_second * scenario.seconds)):
            self.kernel.at(rng.uniform(begin, end), self._operate)
        for _ in range(scenario.absences):
            peer, at = rng.choice(self.cluster.peers), rng.uniform(begin, end)
            away = rng.uniform(10.0, scenario.longest_absence_seconds)
            self._be_away(peer, at, at + away)
        for _ in range(scenario.splits):
            at = rng.uniform(begin, end)
            self.kernel.at(at, self.split)
            self.kernel.at(at + rng.uniform(60.0, scenario.longest_absence_seconds), self._heal)
        for _ in range(scenario.shutdowns):
            at = rng.uniform(begin, end)
            for peer in self.cluster.peers:
                back = at + 5.0 + rng.uniform(0.0, 60.0)
                self._be_away(peer, at + rng.uniform(0.0, 2.0), back)

    def _be_away(self, peer: SimulatedPeer, at: float, until: float) -> None:
        killed = self.rng.random() < 0.5
        self.kernel.at(at, partial(self._end, peer, killed))
        self.kernel.at(until, partial(self.restart, peer))

    def _end(self, peer: SimulatedPeer, killed: bool) -> None:
        if peer.core is None:
            return
        self.outcome.horizons_missed += peer.core.counters["horizons_missed"]
        self._count_returned(peer)
        if killed:
            self.oracle.wrote(peer, self.kernel.now - WRITE_SECONDS)
            peer.crash()
            self.oracle.killed(peer)
        else:
            self.oracle.wrote(peer, self.kernel.now)
            peer.stop()

    def _heal(self) -> None:
        self.network.heal()
        self._healed_at = self.kernel.now

    def _operate(self) -> None:
        running = self.cluster.running
        if not running:
            return
        rng = self.rng
        peer, namespace = rng.choice(running), rng.choice(NAMESPACES)
        key, choice = self._some_key(), rng.random()
        if choice < 0.3:
            self._put(peer, key, namespace, overwrite=rng.random() < 0.4)
        elif choice < 0.75:
            self._read(peer, key, namespace)
        elif choice < 0.995:
            peer.remove(key, namespace)
        else:
            peer.flush(namespace)

    def _some_key(self) -> str:
        """One of those touched lately, or any: removed ones must be asked for, and new ones be removed."""
        if self._recent and self.rng.random() < 0.6:
            return self.rng.choice(self._recent)
        key = f"key-{self.rng.randrange(self.scenario.keys)}"
        self._recent.append(key)
        return key

    def _put(self, peer: SimulatedPeer, key: str, namespace: str, *, overwrite: bool) -> None:
        self._values += 1
        value = f"{namespace}/{key} {self._values}".encode()
        operation = peer.put(
            key, value, namespace=namespace, overwrite=overwrite, replicas=self.rng.choice((1, 1, 2))
        )
        if operation is None:
            return

        def done() -> None:
            end = operation.result
            if isinstance(end, PutEnd) and end.status == PutStatus.CREATED:
                self._version_of[value] = Version(end.version.clock, end.version.writer)

        peer.when_done(operation, done)

    def _read(self, peer: SimulatedPeer, key: str, namespace: str) -> None:
        began = self.kernel.now
        forbidden = self._forbidden(peer, key, namespace)
        self.outcome.reads += 1

        def done(result: bytes | Exception) -> None:
            if isinstance(result, bytes):
                self.outcome.delivered += 1
                self._judge(result, forbidden, f"{peer.address}, a read of {namespace}/{key}", began)
            elif not isinstance(result, P2PStoreError):
                self.problem(f"a read of {namespace}/{key} ended as {result!r}")

        peer.get(key_digest(key, namespace), done)

    def _judge(self, value: bytes, forbidden: Version, what: str, began: float) -> None:
        version = self._version_of.get(value)  # unknown: its put was interrupted
        if version is not None and forbidden.covers(version):
            self.problem(
                f"{what}, begun at {began:.1f} s: {value!r} of {version} is below the floor {forbidden}"
            )

    def _forbidden(self, peer: SimulatedPeer, key: str, namespace: str) -> Version:
        blocked = self.network.blocked
        others = [
            (other, max(peer.running_since, other.running_since, self._healed_at))
            for other in self.cluster.running
            if other is not peer
            and not blocked & {(peer.number, other.number), (other.number, peer.number)}
        ]
        digest, space = key_digest(key, namespace), namespace_digest(namespace)
        return self.oracle.forbidden(peer, others, digest, space, self.kernel.now)

    # --- what must hold ----------------------------------------------------------------------

    def _check_bounds(self) -> None:
        most = self.scenario.floor_limit + FLOOR_SLACK
        for peer in self.cluster.running:
            assert peer.core is not None
            records = peer.core.gossip.cluster_records
            if len(records) > most or len(records.floors.horizon) > self.scenario.peers:
                self.problem(
                    f"{peer.address} keeps {len(records)} floors and {len(records.floors.horizon)} stamps"
                )

    def _come_together(self) -> None:
        self._healed_at = self.kernel.now
        self.end_faults()

    def _settle(self) -> None:
        begin = self.kernel.now
        until = begin + SETTLE_SECONDS
        problems: list[str] = ["it did not begin"]
        while problems and self.kernel.now < until:
            self.kernel.run_until(self.kernel.now + 5.0)
            problems = self.cluster.disagreements()
            cores = [peer.core for peer in self.cluster.running if peer.core is not None]
            if len({core.gossip.cluster_records.floors.horizon_hash for core in cores}) > 1:
                problems.append("horizons differ")
            if not all(core.gossip.floors.synchronised for core in cores):
                problems.append("somebody does not know whether it heard of all floors")
        self.outcome.settled_after_seconds = self.kernel.now - begin
        self.outcome.problems += [f"not settled: {problem}" for problem in problems[:5]]
        self.kernel.run_until(self.kernel.now + 2.0)

    def _check_final_reads(self) -> None:
        """No peer may serve a key that any peer knows to be removed."""
        everybody = [(peer, -float("inf")) for peer in self.cluster.running]
        for namespace in NAMESPACES:
            for number in range(self.scenario.keys):
                key = f"key-{number}"
                digest = key_digest(key, namespace)
                forbidden = self.oracle.forbidden(
                    self.cluster.peers[0],
                    everybody,
                    digest,
                    namespace_digest(namespace),
                    self.kernel.now,
                )
                for peer in self.cluster.running:
                    result = self.read_now(peer, digest)
                    if isinstance(result, bytes):
                        what = f"{peer.address} at the end, {namespace}/{key}"
                        self._judge(result, forbidden, what, self.kernel.now)

    def _count(self) -> None:
        for peer in self.cluster.running:
            assert peer.core is not None
            self.outcome.horizons_missed += peer.core.counters["horizons_missed"]
        self.close_books()
        for peer in self.cluster.peers:
            self._count_returned(peer)
        self.outcome.cold_discarded += sum(p.disk.discarded for p in self.cluster.peers)
        self.outcome.cold_returned += sum(p.disk.returned for p in self.cluster.peers)

    def _count_returned(self, peer: SimulatedPeer) -> None:
        """Objects that came back of a memory that outlived its process, in the life that is over now."""
        if peer.core is not None:
            self.outcome.cold_discarded += peer.core.counters["kept_objects_discarded"]
            self.outcome.cold_returned += peer.core.counters["kept_objects_returned"]


def run_absences(seed: int, scenario: AbsenceScenario | None = None) -> AbsenceOutcome:
    return Absences(seed, scenario or AbsenceScenario()).run()
