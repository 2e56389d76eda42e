"""Identity of a peer: an ed25519 key, whose public half is the libp2p peer id."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from p2pstore.errors import PeerNotInstalled, ProtocolError
from p2pstore.gossip.records import (
    Member,
    PeerId,
    format_peer_id,
    member_of,
    peer_id_from_public_key,
    public_key_from_peer_id,
)

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ModuleNotFoundError as error:  # commands that make keys or read states import this, too
    raise PeerNotInstalled(error.name) from error

SEED_BYTES: Final = 32
MAX_CACHED_KEYS: Final = 4096
"""Parsed public keys that a verifier remembers: parsing costs about as much as looking up a thousand."""


class Identity:
    """This peer's key. Satisfies `p2pstore.wire.Signer`."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 secret bytes; the same seed gives the same peer. Raises `ValueError`."""
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an identity's seed is {SEED_BYTES} bytes, not {len(seed)}")
        self.seed = seed
        self._private_key = Ed25519PrivateKey.from_private_bytes(seed)
        self._peer_id = peer_id_from_public_key(self._private_key.public_key().public_bytes_raw())

    @property
    def peer_id(self) -> PeerId:
        """The libp2p peer id as raw bytes."""
        return self._peer_id

    @property
    def member(self) -> Member:
        """The 64-bit short name."""
        return member_of(self._peer_id)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte ed25519 signature of `message`."""
        return self._private_key.sign(message)

    def __repr__(self) -> str:  # the seed must not reach a log
        return f"Identity({format_peer_id(self._peer_id)})"


class Ed25519Verifier:
    """Checks other peers' signatures; keeps the most recently used public keys parsed."""

    def __init__(self, max_cached_keys: int = MAX_CACHED_KEYS) -> None:
        self._key = lru_cache(max_cached_keys)(_parsed_key)

    def verify(self, peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether `peer_id` signed `message`. False, never an error, for whatever a stranger may send."""
        try:
            self._key(peer_id).verify(signature, message)
        except (InvalidSignature, ProtocolError, ValueError):
            return False
        return True


def _parsed_key(peer_id: PeerId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_from_peer_id(peer_id))
