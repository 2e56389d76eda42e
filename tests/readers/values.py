"""Values that a reader can work out by itself: all bytes follow from the key and a number at the value's start."""

from typing import Final

import numpy as np

from p2pstore.objects import CHUNK_BYTES, KIB, MIB

KEYS_PER_PEER: Final = 24
_SMALL: Final = (64, 100, 4 * KIB, 4 * KIB + 8, 8 * KIB, 12_345, 20_000, 64 * KIB, 64 * KIB + 1)
LENGTHS: Final = (*(10 * _SMALL), 100_000, 300_000, CHUNK_BYTES + 4096, 3 * MIB + 5)
"""Bytes; the last two have several chunks, most are small enough to be copied at once."""
LONGEST_BYTES: Final = max(LENGTHS)
_WORD_BYTES: Final = 8
_MIX: Final = 0x9E37_79B9_7F4A_7C15
_MASK: Final = (1 << 64) - 1

_words = np.random.default_rng(1).integers(0, 1 << 64, LONGEST_BYTES // _WORD_BYTES + 1, dtype=np.uint64)
"""No word is where another one would do: bytes that moved are seen as well."""
_scratch = np.empty_like(_words)


def key_name(peer: int, number: int) -> str:
    """One of the keys that are put on that peer."""
    return f"peer {peer} key {number}"


def value_of(key: str, number: int) -> bytes:
    """Value `number` (below 2^64) of a key: the number, then words that no other value has in their places."""
    length = _length(number)
    words = _words[: -(-length // _WORD_BYTES)] ^ np.uint64(_secret(key, number))
    words[0] = number
    return words.tobytes()[:length]


def is_right(key: str, value: memoryview) -> bool:
    """Whether these are, to the last byte, one of the values of the key."""
    if len(value) < _WORD_BYTES:
        return False
    number = int.from_bytes(value[:_WORD_BYTES], "little")
    if len(value) != _length(number):
        return False
    count, rest = divmod(len(value), _WORD_BYTES)
    secret = np.uint64(_secret(key, number))
    words = np.bitwise_xor(np.frombuffer(value, np.uint64, count), secret, out=_scratch[:count])
    end = (_words[count : count + 1] ^ secret).tobytes()[:rest]
    return np.array_equal(words[1:], _words[1:count]) and value[len(value) - rest :] == end


def _length(number: int) -> int:
    return LENGTHS[number * _MIX % (1 << 64) % len(LENGTHS)]


def _secret(key: str, number: int) -> int:
    return (int.from_bytes(key.encode()[-8:], "little") * _MIX ^ number * _MIX) & _MASK
