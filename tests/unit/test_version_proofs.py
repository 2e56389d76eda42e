"""Proofs of who wrote a version: they hold for it, and for nothing else."""

from __future__ import annotations

from random import Random

import pytest

from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import writer_of
from p2pstore.gossip.version_proofs import MAX_LEAVES, MAX_PROOF_BYTES, read_proof, sign_versions
from p2pstore.objects import Version

WRITER = Identity(bytes(range(32)))
OTHER = Identity(bytes(32))


def holds(proof: bytes, digest: bytes, version: Version) -> bool:
    claim = read_proof(proof, digest, version)
    return claim is not None and Ed25519Verifier().verify(*claim)


def versions(count: int, seed: int = 1) -> list[tuple[bytes, Version]]:
    rng = Random(seed)
    return [
        (rng.randbytes(16), Version(rng.getrandbits(64), writer_of(WRITER.peer_id), rng.getrandbits(64)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33, 63, MAX_LEAVES])
def test_each_version_is_proved_and_no_other(count: int) -> None:
    signed = versions(count)
    proofs = sign_versions(signed, WRITER)
    assert len(proofs) == count
    for place, ((digest, version), proof) in enumerate(zip(signed, proofs, strict=True)):
        assert len(proof) <= MAX_PROOF_BYTES
        assert holds(proof, digest, version)
        clock, writer, root = version
        assert not holds(proof, digest, Version(clock, writer, root ^ 1))
        assert not holds(proof, digest, Version(clock ^ 1, writer, root))
        assert not holds(proof, bytes(16), version)
        if count > 1:
            assert not holds(proof, *signed[place - 1])


def test_a_proof_is_good_whole_only() -> None:
    ((digest, version),) = versions(1)
    proof = sign_versions(versions(7), WRITER)[0]
    for length in range(len(proof)):
        assert not holds(proof[:length], digest, version)
    for place in range(len(proof)):
        broken = bytearray(proof)
        broken[place] ^= 1
        assert not holds(bytes(broken), digest, version)
    assert not holds(proof + bytes(16), digest, version)


def test_nobody_proves_what_another_wrote() -> None:
    signed = versions(4)
    for (digest, version), proof in zip(signed, sign_versions(signed, OTHER), strict=True):
        assert not holds(proof, digest, version)
