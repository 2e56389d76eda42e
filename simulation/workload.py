"""A random workload on a simulated cluster under faults, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from p2pstore.core.operation import PutEnd
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.objects import key_digest
from p2pstore.put_facts import PutStatus
from simulation.cluster import NAMESPACE, SimulatedPeer
from simulation.network import Faults
from simulation.scenario import BOOTED_SECONDS, ScenarioOutcome, ScenarioRun
from simulation.segment_checks import check_segment

SETTLE_SECONDS: Final = 180.0
FINAL_GET_SECONDS: Final = 30.0
LAST_OPERATION_SECONDS: Final = 120.0
"""No operation takes longer."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a run is made of. Rates are per virtual second for the whole cluster."""

    peers: int = 5
    seconds: float = 20.0
    keys: int = 40
    operations_per_second: float = 40.0
    largest_value_bytes: int = 256 * 1024
    memory_bytes: int = 2 * 1024 * 1024
    crashes: int = 2
    partitions: int = 2
    pull_seconds: float = 0.002
    """How long a pull reads the holder's memory."""
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class Outcome(ScenarioOutcome):
    puts: int = 0
    gets: int = 0
    delivered: int = 0
    removes: int = 0
    refused_copies: int = 0
    settled_after_seconds: float = 0.0


class Workload(ScenarioRun):
    """Runs one scenario from one seed."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.outcome = Outcome(seed)
        super().__init__(self.outcome, scenario.peers, salt=0x5EED, memory_bytes=scenario.memory_bytes)
        self.cluster.pull_seconds = scenario.pull_seconds
        self._written: dict[str, set[bytes]] = {}
        self._values = 0

    def run(self) -> Outcome:
        """The whole course: boot, work under faults, heal, settle, check."""
        self.boot(self.scenario.faults)
        self._schedule()
        self.run_for(self.scenario.seconds)
        self.end_faults()
        self._settle()
        self._finish_operations()
        if not self.outcome.problems:
            self._check_final_reads()
        self._finish_operations()
        self._check_nothing_leaks()
        self.close_books()
        self.outcome.refused_copies = self.cluster.refused_copies
        return self.outcome

    # --- the work ----------------------------------------------------------------------------

    def _schedule(self) -> None:
        scenario, rng = self.scenario, self.rng
        begin, end = BOOTED_SECONDS, BOOTED_SECONDS + scenario.seconds
        for _ in range(int(scenario.operations_per_second * scenario.seconds)):
            self.kernel.at(rng.uniform(begin, end), self._operate)
        for _ in range(scenario.partitions):
            at = rng.uniform(begin, end)
            self.kernel.at(at, self.split)
            self.kernel.at(min(end, at + rng.uniform(0.5, 6.0)), self.network.heal)
        for _ in range(scenario.crashes):
            at = rng.uniform(begin, end)
            peer = rng.choice(self.cluster.peers)
            self.kernel.at(at, peer.crash)
            self.kernel.at(at + rng.uniform(0.1, 8.0), partial(self.restart, peer))

    def _operate(self) -> None:
        running = self.cluster.running
        if not running:
            return
        peer = self.rng.choice(running)
        key = f"key-{self.rng.randrange(self.scenario.keys)}"
        choice = self.rng.random()
        if choice < 0.40:
            self._put(peer, key)
        elif choice < 0.90:
            self._get(peer, key)
        else:
            self.outcome.removes += 1
            peer.remove(key)

    def _put(self, peer: SimulatedPeer, key: str) -> None:
        self.outcome.puts += 1
        self._values += 1
        length = int(self.scenario.largest_value_bytes * self.rng.random() ** 3)
        value = Random(self._values).randbytes(length)
        self._written.setdefault(key, set()).add(value)
        operation = peer.put(
            key, value, replicas=self.rng.choice((1, 1, 2, 3)), overwrite=self.rng.random() < 0.3
        )
        if operation is not None:
            peer.when_done(operation, lambda: self._check_put(key, operation.result))

    def _check_put(self, key: str, result: object) -> None:
        if isinstance(result, PutEnd):
            if not result.copies >= 1:
                self.problem(f"a put of {key} ended with {result.copies} copies")
            if result.status == PutStatus.CREATED and not result.version.clock:
                self.problem(f"a put of {key} has no version")
        elif not isinstance(result, (P2PStoreError, ValueError)):
            self.problem(f"a put of {key} ended as {result!r}")

    def _get(self, peer: SimulatedPeer, key: str) -> None:
        self.outcome.gets += 1

        def done(result: bytes | Exception) -> None:
            if isinstance(result, bytes):
                self.outcome.delivered += 1
                if result not in self._written.get(key, set()):
                    self.problem(f"a get of {key} returned bytes that nobody wrote")
            elif not isinstance(result, P2PStoreError):
                self.problem(f"a get of {key} ended as {result!r}")

        peer.get(key_digest(key, NAMESPACE), done)

    def _finish_operations(self) -> None:
        """Replication to peers that do not answer goes on for a while; it holds what it copies."""
        self.kernel.run_until(
            self.kernel.now + LAST_OPERATION_SECONDS,
            stop=lambda: (
                not any(peer.core.operations_under_way for peer in self.cluster.running if peer.core)
            ),
        )

    def _check_nothing_leaks(self) -> None:
        if self.cluster.protocol_errors:
            self.problem(f"peers took {self.cluster.protocol_errors} messages of others for nonsense")
        for peer in self.cluster.running:
            assert peer.core is not None
            check_segment(peer.core.segment)
            if peer.core.segment.leased_bytes or peer.core.operations_under_way:
                self.problem(
                    f"{peer.address} still has {peer.core.segment.leased_bytes} bytes in use and "
                    f"{peer.core.operations_under_way} operations under way"
                )

    # --- afterwards --------------------------------------------------------------------------

    def _settle(self) -> None:
        healed_at = self.kernel.now
        problems: list[str] = []
        while self.kernel.now < healed_at + SETTLE_SECONDS:
            self.kernel.run_until(self.kernel.now + 1.0)
            problems = self.cluster.disagreements()
            if not problems:
                self.outcome.settled_after_seconds = self.kernel.now - healed_at
                return
        self.outcome.problems += [f"not settled: {problem}" for problem in problems[:5]]

    def _check_final_reads(self) -> None:
        """Every peer gives the newest living version of every key, or says that there is none."""
        for key in sorted(self._written):
            self._check_key(key, key_digest(key, NAMESPACE))

    def _check_key(self, key: str, digest: bytes) -> None:
        held: dict[tuple[int, int], bytes] = {}
        for peer in self.cluster.running:
            core = peer.core
            assert core is not None
            entry = core.segment.find(digest, core.unix(self.kernel.now))
            if entry is None:
                continue
            if core.gossip.cluster_records.floors.forbids(digest, None, entry.version):
                self.problem(f"{peer.address} holds a version of {key} that a floor forbids")
            version = (entry.version.clock, entry.version.writer)
            value = bytes(core.segment.payload(entry))
            if held.setdefault(version, value) != value:
                self.problem(f"two peers hold different bytes as one version of {key}")
        newest = held[max(held)] if held else None
        for peer in self.cluster.running:
            result = self.read_now(peer, digest, FINAL_GET_SECONDS)
            if newest is None:
                if not isinstance(result, NoSuchKey):
                    self.problem(f"{peer.address}: {key} has no copy, but a get gave {_short(result)}")
            elif result != newest:
                self.problem(f"{peer.address}: a get of {key} gave {_short(result)}")


def _short(result: bytes | Exception | Callable[[], None]) -> str:
    return f"{len(result)} bytes" if isinstance(result, bytes) else repr(result)


def run_seed(seed: int, scenario: Scenario | None = None) -> Outcome:
    """One run; the same seed and scenario give the same trace hash."""
    return Workload(seed, scenario or Scenario()).run()
