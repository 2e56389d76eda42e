"""What the scenarios of whole peers have in common: time, network, cluster, faults, reads that are waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from simulation.cluster import SimulatedCluster, SimulatedPeer
from simulation.kernel import Kernel
from simulation.network import Faults, FaultyNetwork
from simulation.peer import MEMORY_BYTES

MAX_PROBLEMS: Final = 20
"""Of one run: the first ones tell what went wrong."""
BOOTED_SECONDS: Final = 5.0
"""Peers that all started at once know each other by then."""


@dataclass(slots=True)
class ScenarioOutcome:
    """What every run says in the end. `problems` is empty when everything held."""

    seed: int
    problems: list[str] = field(default_factory=list)
    messages: int = 0
    trace_hash: str = ""


class ScenarioRun:
    """A cluster of whole peers in virtual time, from one seed. `salt` gives each kind of scenario its own course."""

    def __init__(
        self,
        outcome: ScenarioOutcome,
        peers: int,
        *,
        salt: int = 0,
        memory_bytes: int = MEMORY_BYTES,
        make_peer: Callable[[SimulatedCluster, int, int], SimulatedPeer] = SimulatedPeer,
    ) -> None:
        self.kernel = Kernel(outcome.seed)
        self.rng = Random(outcome.seed ^ salt)
        self.network = FaultyNetwork(self.kernel, Faults())
        self.cluster = SimulatedCluster(self.kernel, self.network, peers, memory_bytes, make_peer)
        self._reported = outcome

    def boot(self, faults: Faults) -> None:
        """Start all peers on a sound network, which has faults once they know each other."""
        self.cluster.boot_all()
        self.run_for(BOOTED_SECONDS)
        self.network.faults = faults

    def run_for(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass, until `stop()`."""
        self.kernel.run_until(self.kernel.now + seconds, stop)

    def restart(self, peer: SimulatedPeer) -> None:
        """Start a peer that does not run; it knows the address of one other."""
        if peer.core is None:
            others = [other.address for other in self.cluster.peers if other is not peer]
            peer.boot(others[:1])

    def split(self) -> None:
        """Cut the network into two parts, at random."""
        hosts = list(range(len(self.cluster.peers)))
        self.rng.shuffle(hosts)
        cut = self.rng.randint(1, max(1, len(hosts) - 1))
        self.network.partition(set(hosts[:cut]), set(hosts[cut:]))

    def end_faults(self) -> None:
        """Heal the network, and start all peers that do not run."""
        self.network.heal()
        self.network.faults = Faults()
        for peer in self.cluster.peers:
            self.restart(peer)

    def read_now(self, peer: SimulatedPeer, digest: bytes, seconds: float = 10.0) -> bytes | Exception:
        """The bytes of an object, or why there are none; `TimeoutError` after that many virtual seconds."""
        results: list[bytes | Exception] = []
        peer.get(digest, results.append)
        self.run_for(seconds, stop=lambda: bool(results))
        return results[0] if results else TimeoutError("no answer")

    def problem(self, text: str) -> None:
        if len(self._reported.problems) < MAX_PROBLEMS:
            self._reported.problems.append(f"{self.kernel.now:.3f} s: {text}")

    def close_books(self) -> None:
        """Note the figures that every outcome has."""
        self._reported.messages = self.network.messages
        self._reported.trace_hash = self.kernel.trace_hash
