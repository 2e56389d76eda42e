"""Identities: the same peer id as libp2p's, signatures, and what the verifier refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import format_peer_id, member_of

SEED = bytes(range(32))


@given(st.binary(min_size=32, max_size=32))
def test_the_peer_id_is_libp2ps(seed: bytes) -> None:
    identity = Identity(seed)
    theirs = ID.from_pubkey(create_new_key_pair(seed).public_key)
    assert identity.peer_id == theirs.to_bytes()
    assert format_peer_id(identity.peer_id) == theirs.to_string()
    assert identity.member == member_of(identity.peer_id)


def test_libp2p_accepts_the_signature() -> None:
    public_key = create_new_key_pair(SEED).public_key
    assert public_key.verify(b"message", Identity(SEED).sign(b"message"))


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=511))
def test_one_flipped_bit_is_noticed(message: bytes, bit: int) -> None:
    identity, verifier = Identity(SEED), Ed25519Verifier()
    signature = identity.sign(message)
    assert len(signature) == 64
    assert verifier.verify(identity.peer_id, message, signature)
    assert not verifier.verify(identity.peer_id, message + b"x", signature)
    wrong = bytearray(signature)
    wrong[bit // 8] ^= 1 << bit % 8
    assert not verifier.verify(identity.peer_id, message, bytes(wrong))
    assert not verifier.verify(Identity(bytes(32)).peer_id, message, signature)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_the_verifier_never_raises(peer_id: bytes, signature: bytes) -> None:
    assert not Ed25519Verifier().verify(peer_id, b"message", signature)
    assert not Ed25519Verifier().verify(Identity(SEED).peer_id, b"message", signature)


def test_the_verifier_forgets_the_least_recently_used_key() -> None:
    identities = [Identity(bytes([number]) * 32) for number in range(4)]
    verifier = Ed25519Verifier(max_cached_keys=2)
    for _ in range(2):
        for identity in identities:
            assert verifier.verify(identity.peer_id, b"m", identity.sign(b"m"))
            assert len(verifier._keys) <= 2
    assert list(verifier._keys) == [identity.peer_id for identity in identities[2:]]


def test_a_seed_has_32_bytes_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        Identity(bytes(31))
    assert SEED.hex() not in repr(Identity(SEED))
    assert format_peer_id(Identity(SEED).peer_id) in repr(Identity(SEED))
