"""Which members answer for a key: rendezvous hashing (Thaler and Ravishankar 1998). Pure.

Everybody who knows the same live members ranks them alike, and a member that joins or leaves moves
only the keys that it wins or gave.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

import xxhash

from p2pstore.gossip.records import Member
from p2pstore.objects import DIGEST_BYTES

HOME_COUNT: Final = 3


def weight(member: Member, digest: bytes) -> int:
    """Its weight for a key: xxh3-64 of the short name (8 bytes, little-endian) and the digest."""
    return xxhash.xxh3_64_intdigest(member.to_bytes(8, "little") + digest)


def homes(digest: bytes, members: Iterable[Member], count: int = HOME_COUNT) -> list[Member]:
    """The `count` members with the highest weights, highest first."""
    return heapq.nlargest(count, members, key=lambda member: weight(member, digest))


def rank(digest: bytes, members: Iterable[Member]) -> list[Member]:
    """All members, highest weight first."""
    return sorted(members, key=lambda member: weight(member, digest), reverse=True)


def batch_by_home(
    operations: Iterable[tuple[int, bytes]], members: Iterable[Member]
) -> dict[Member, tuple[list[int], bytes]]:
    """Numbered operations of one log, grouped by the home members of their keys."""
    candidates = list(members)
    batches: dict[Member, tuple[list[int], bytearray]] = {}
    for sequence, operation in operations:
        for member in homes(operation[:DIGEST_BYTES], candidates):
            sequences, packed = batches.setdefault(member, ([], bytearray()))
            sequences.append(sequence)
            packed += operation
    return {member: (sequences, bytes(packed)) for member, (sequences, packed) in batches.items()}
