"""Simulated peers together, and what may be asked of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.gossip_config import GossipConfig
from simulation.kernel import Kernel
from simulation.network import FaultyNetwork
from simulation.peer import MEMORY_BYTES
from simulation.peer import NAMESPACE as NAMESPACE
from simulation.peer import SimulatedPeer as SimulatedPeer

PULL_SECONDS: Final = 0.002


class SimulatedCluster:
    """Peers, their network, and what may be asked of the whole."""

    def __init__(
        self,
        kernel: Kernel,
        network: FaultyNetwork,
        peers: int,
        memory_bytes: int = MEMORY_BYTES,
        make_peer: Callable[[SimulatedCluster, int, int], SimulatedPeer] = SimulatedPeer,
    ) -> None:
        self.gossip_config = GossipConfig(cluster="sim")
        self.kernel = kernel
        self.network = network
        self.pull_seconds = PULL_SECONDS
        self.protocol_errors = 0
        self.refused_copies = 0
        self.peers = [make_peer(self, number, memory_bytes) for number in range(peers)]
        self.by_peer_id = {peer.signer.peer_id: peer for peer in self.peers}
        self.by_address = {peer.address: peer for peer in self.peers}

    def boot_all(self) -> None:
        """Start every peer; all know the first one's address."""
        for peer in self.peers:
            peer.boot([] if peer.number == 0 else [self.peers[0].address])

    @property
    def running(self) -> list[SimulatedPeer]:
        return [peer for peer in self.peers if peer.core is not None]

    def disagreements(self) -> list[str]:
        """The differences between the running peers: members, locations, floors. Empty when they do."""
        problems = []
        for peer in self.running:
            assert peer.core is not None
            for other in self.running:
                assert other.core is not None
                if other is peer:
                    continue
                problems += _disagreements_about(peer.core, other.core, peer.address, other.address)
        hashes = {peer.core.gossip.cluster_records.hash for peer in self.running if peer.core}
        if len(hashes) > 1:
            problems.append("floors differ")
        return problems


def _disagreements_about(mine: PeerCore, theirs: PeerCore, me: str, them: str) -> list[str]:
    problems = []
    live = set(mine.live_peers())
    if theirs.peer_id not in live:
        problems.append(f"{me} does not see {them} alive")
    seen, real = mine.gossip.directory.head(theirs.member), theirs.gossip.log.head
    if seen != real:
        problems.append(f"{me} knows the log of {them} as {seen}, which is {real}")
    return problems
