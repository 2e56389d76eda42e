"""Objects for tests of the SSD tier: facts made of a few numbers, with sums and roots that fit."""

from p2pstore.objects import CHUNK_BYTES, Version, chunk_sums, key_digest, root_checksum
from p2pstore.ssd_tier.log_layout import ColdFacts

STORE_ID = bytes(range(16))
_SUM_OF_ZEROS = chunk_sums(bytes(CHUNK_BYTES))


def _sums_of_zeros(length: int) -> bytes:
    whole, rest = divmod(length, CHUNK_BYTES)
    return _SUM_OF_ZEROS * whole + chunk_sums(bytes(rest))


def facts_of(
    key: str, length: int, clock: int = 1, namespace: str = "default", value: bytes | None = None
) -> ColdFacts:
    """The facts of `value`, or of that number of zeros."""
    sums = chunk_sums(value) if value is not None else _sums_of_zeros(length)
    version = Version(clock, 7, root_checksum(length, sums))
    return ColdFacts(key_digest(key, namespace), version, length, namespace, key, sums)
