"""Keys, and values of which every byte follows from the key and a number at the value's start. Pure."""

from hashlib import blake2b
from typing import Final

import numpy as np

from p2pstore.objects import KIB, MIB
from tests.soak.plan import Family

LENGTHS: Final = (
    *(8, 100, 4 * KIB, 4 * KIB + 8, 12_345, 20_000, 64 * KIB, 64 * KIB + 1) * 3,
    *(100_000, 300_000, 300_000, MIB + 4096, 3 * MIB + 5),
)
LONGEST_BYTES: Final = max(LENGTHS)
EPOCH_BITS: Final = 32
_WORD_BYTES: Final = 8
_words = np.random.default_rng(1).integers(0, 1 << 64, LONGEST_BYTES // _WORD_BYTES + 1, np.uint64)
"""No word is where another one would do: bytes that moved are seen as well."""


def namespace_of(writer: int, family: Family) -> str:
    """The namespace of a family's keys; the flushed family has one for each writer."""
    return f"flushed-{writer}" if family == "flush" else "soak"


def key_name(writer: int, family: Family, number: int) -> str:
    """A key; of no two namespaces the same."""
    return f"{family} {writer} {number:04}"


def number_of(epoch: int, count: int) -> int:
    """Of a value: later lives of its writer have higher ones. A count from 1 on."""
    return epoch << EPOCH_BITS | count


def length_of(key: str, number: int) -> int:
    """Bytes of that value."""
    return LENGTHS[_secret(key, number) % len(LENGTHS)]


def value_of(key: str, number: int) -> bytes:
    """Value `number` of a key: the number, then words that no other value has in their places."""
    length = length_of(key, number)
    words = _words[: -(-length // _WORD_BYTES)] ^ np.uint64(_secret(key, number))
    words[0] = number
    return words.tobytes()[:length]


def number_in(key: str, value: memoryview | bytes) -> int | None:
    """Which value of the key these bytes are, compared to the last one; None when they are none."""
    if len(value) < _WORD_BYTES:
        return None
    number = int.from_bytes(value[:_WORD_BYTES], "little")
    return number if bytes(value) == value_of(key, number) else None


def _secret(key: str, number: int) -> int:
    return int.from_bytes(blake2b(f"{key} {number}".encode(), digest_size=8).digest(), "little")
