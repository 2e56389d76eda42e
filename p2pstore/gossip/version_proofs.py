"""Proofs that a member wrote versions of keys: one signature for up to 64 of them. Pure.

Each proof stands by itself, so that it can lie beside its object wherever that goes. The writer signs the root of a
Merkle tree whose leaves are the versions; a proof is

    public key 32 | signature 64 | u8 place of the leaf | u8 leaves | hashes up to the root, 16 bytes each

which is 98 bytes for a version alone, and at most 194. Of an odd number of nodes, the last one goes up as it is.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from p2pstore.gossip.records import PeerId, peer_id_from_public_key, public_key_from_peer_id, writer_of
from p2pstore.objects import Signer, Version

MAX_LEAVES: Final = 64
_HASH_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
_SIGNATURE: Final = slice(32, 32 + SIGNATURE_BYTES)
_FIXED_BYTES: Final = 32 + SIGNATURE_BYTES + 2
MAX_PROOF_BYTES: Final = _FIXED_BYTES + 6 * _HASH_BYTES
_LEAF: Final = struct.Struct("<16sQHQ")
_LEAF_PERSON: Final = b"p2pstore.vleaf.1"
_NODE_PERSON: Final = b"p2pstore.vnode.1"
_CONTEXT: Final = b"p2pstore versions 1\0"


class SignedTree(NamedTuple):
    """The statement of a proof, if its signature is good: `signer` signed `message`."""

    signer: PeerId
    message: bytes
    signature: bytes


def sign_versions(versions: Sequence[tuple[bytes, Version]], signer: Signer) -> list[bytes]:
    """A proof for each of 1 to 64 versions, by the digests of their keys."""
    levels = _levels(versions)
    return _proofs(levels, signer.peer_id, signer.sign(_message(len(versions), levels[-1][0])))


def signed_proofs(
    versions: Sequence[tuple[bytes, Version]], signer: PeerId, signature: bytes
) -> list[bytes]:
    """Proofs of all these versions, from the signature of `sign_versions`. They are good if that is."""
    return _proofs(_levels(versions), signer, signature)


def signature_of(proof: bytes) -> bytes:
    """The signature in a proof."""
    return proof[_SIGNATURE]


def read_proof(proof: bytes, digest: bytes, version: Version) -> SignedTree | None:
    """The statement of a proof of this version, its signature unchecked; None when it is of another version."""
    if not _FIXED_BYTES <= len(proof) <= MAX_PROOF_BYTES:
        return None
    key, signature, place, count = proof[:32], proof[_SIGNATURE], proof[96], proof[97]
    hashes = [proof[at : at + _HASH_BYTES] for at in range(_FIXED_BYTES, len(proof), _HASH_BYTES)]
    signer = peer_id_from_public_key(key)
    if place >= count or count > MAX_LEAVES or writer_of(signer) != version.writer:
        return None
    node, width, hashes = _leaf(digest, version), count, hashes[::-1]
    while width > 1:
        if place ^ 1 < width:
            if not hashes:
                return None
            other = hashes.pop()
            node = _node(other, node) if place & 1 else _node(node, other)
        place, width = place >> 1, (width + 1) >> 1
    if hashes:
        return None
    return SignedTree(signer, _message(count, node), signature)


def _levels(versions: Sequence[tuple[bytes, Version]]) -> list[list[bytes]]:
    """The tree's hashes, from the leaves up to the root."""
    levels = [[_leaf(digest, version) for digest, version in versions]]
    while len(levels[-1]) > 1:
        levels.append(_above(levels[-1]))
    return levels


def _proofs(levels: list[list[bytes]], signer: PeerId, signature: bytes) -> list[bytes]:
    count = len(levels[0])
    begin = public_key_from_peer_id(signer) + signature
    return [begin + bytes((place, count)) + b"".join(_path(levels, place)) for place in range(count)]


def _message(count: int, root: bytes) -> bytes:
    return _CONTEXT + bytes((count,)) + root


def _leaf(digest: bytes, version: Version) -> bytes:
    return hashlib.blake2b(
        _LEAF.pack(digest, *version), digest_size=_HASH_BYTES, person=_LEAF_PERSON
    ).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.blake2b(left + right, digest_size=_HASH_BYTES, person=_NODE_PERSON).digest()


def _above(nodes: list[bytes]) -> list[bytes]:
    pairs = zip(nodes[::2], nodes[1::2], strict=False)
    return [_node(left, right) for left, right in pairs] + nodes[len(nodes) & ~1 :]


def _path(levels: list[list[bytes]], place: int) -> list[bytes]:
    path = []
    for nodes in levels[:-1]:
        if place ^ 1 < len(nodes):
            path.append(nodes[place ^ 1])
        place >>= 1
    return path
