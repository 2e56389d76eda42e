"""Signatures for the simulator."""

from __future__ import annotations

import hashlib

from p2pstore.gossip.records import PeerId, peer_id_from_public_key


class SimulatedSigner:
    """Signatures that are cheap to make and check: a keyed hash with a public key."""

    def __init__(self, number: int) -> None:
        self.peer_id: PeerId = peer_id_from_public_key(number.to_bytes(32, "little"))

    def sign(self, message: bytes) -> bytes:
        return simulated_signature(self.peer_id, message)


def simulated_signature(peer_id: PeerId, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=peer_id, digest_size=64).digest()


class SimulatedVerifier:
    """Checks what `SimulatedSigner` signed."""

    def verify(self, peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == simulated_signature(peer_id, message)
