"""Signatures for the simulator."""

from __future__ import annotations

import hashlib

from p2pstore.gossip.records import PeerId, peer_id_from_public_key


def peer_id_of(number: int) -> PeerId:
    """The identity of a numbered host."""
    return peer_id_from_public_key(number.to_bytes(32, "little"))


class SimulatedSigner:
    """Signatures that are cheap to make and check: a keyed hash with a public key."""

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.signed = 0

    def sign(self, message: bytes) -> bytes:
        self.signed += 1
        return simulated_signature(self.peer_id, message)


def simulated_signature(peer_id: PeerId, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=peer_id, digest_size=64).digest()


class SimulatedVerifier:
    """Checks what `SimulatedSigner` signed."""

    def verify(self, peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == simulated_signature(peer_id, message)
