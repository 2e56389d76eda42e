"""Objects for tests of the SSD tier: facts made of a few numbers, with sums and roots that fit."""

from __future__ import annotations

from p2pstore.objects import Version, chunk_count, chunk_sums, key_digest, root_checksum
from p2pstore.ssd_tier.layout import ColdFacts

STORE_ID = bytes(range(16))


def facts_of(
    key: str,
    length: int,
    clock: int = 1,
    namespace: str = "default",
    value: bytes | None = None,
    seed: int = 0,
) -> ColdFacts:
    """The facts of `value`, or of one of that length of which only the sums exist."""
    if value is not None:
        packed = chunk_sums(value)
    else:
        packed = b"".join(
            (seed * 1000 + chunk).to_bytes(8, "little") for chunk in range(chunk_count(length))
        )
    sums = tuple(
        int.from_bytes(packed[start : start + 8], "little") for start in range(0, len(packed), 8)
    )
    version = Version(clock, 7, root_checksum(length, packed))
    return ColdFacts(key_digest(key, namespace), version, length, namespace, key, sums)
