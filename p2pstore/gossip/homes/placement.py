"""In which order members are asked to hold a key: rendezvous hashing (Thaler and Ravishankar 1998). Pure.

Everybody who knows the same live members ranks them alike, and a member that joins or leaves moves
only the keys that it wins or gave. Which members answer for a key is another thing: `partition_homes`.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from p2pstore.gossip.records import Member


def weight(member: Member, digest: bytes) -> int:
    """Its weight for a key: xxh3-64 of the short name (8 bytes, little-endian) and the digest."""
    return xxhash.xxh3_64_intdigest(member.to_bytes(8, "little") + digest)


def rank(digest: bytes, members: Iterable[Member]) -> list[Member]:
    """All members, highest weight first."""
    return sorted(members, key=lambda member: weight(member, digest), reverse=True)
