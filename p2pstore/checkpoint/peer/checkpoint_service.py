"""All checkpoint services of one peer, wired together."""

from __future__ import annotations

from random import Random

from p2pstore.checkpoint.content.manifest import Signer, Verifier
from p2pstore.checkpoint.peer.fetching import Fetching, Finder
from p2pstore.checkpoint.peer.publishing import Publications, Publishing
from p2pstore.checkpoint.peer.running import SwarmParts
from p2pstore.checkpoint.peer.stores import Memories
from p2pstore.checkpoint.peer.surroundings import PeerInterface
from p2pstore.state.state_directory import StateDirectory


class PeerCheckpoints:
    """The services of one peer: `publishing`, `fetching`, and its `parts` in swarms."""

    def __init__(
        self,
        peer: PeerInterface,
        signer: Signer,
        verifier: Verifier,
        rng: Random,
        memory_limit_bytes: int | None = None,
        state: StateDirectory | None = None,
    ) -> None:
        """`memory_limit_bytes`: see `Memories`. `state` keeps what is published for the next run."""
        publications = Publications(state)
        self.peer = peer
        self.memories = Memories(memory_limit_bytes)
        self.parts = SwarmParts(peer, rng, publications.forget)
        self.publishing = Publishing(peer, self.parts, self.memories, publications, signer)
        finder = Finder(peer, self.parts, verifier, rng)
        self.fetching = Fetching(peer, self.parts, self.memories, finder)

    def close(self) -> None:
        """Free all memory when the peer ends and no swarm runs any more."""
        self.memories.close()
