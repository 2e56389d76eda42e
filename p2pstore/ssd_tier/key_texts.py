"""The keys of all records as text, a piece of memory per segment, and the names of namespaces. Pure.

When a segment goes, its text goes with it; text of records that died before is cut out when it is the larger half.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.objects import namespace_digest

_WORTH_CUTTING_BYTES: Final = 64 * 1024


class KeyTexts:
    """Text by segment and offset."""

    def __init__(self) -> None:
        self._texts: dict[int, bytes | bytearray] = {}
        self._dead_bytes: dict[int, int] = {}

    def add(self, segment: int, key: bytes) -> int:
        """Append a key; its offset."""
        text = self._texts.get(segment, b"")
        if not isinstance(text, bytearray):
            text = self._texts[segment] = bytearray(text)
        text += key
        return len(text) - len(key)

    def get(self, segment: int, offset: int, length: int) -> bytes:
        """The bytes of a key."""
        return bytes(self._texts[segment][offset : offset + length])

    def set(self, segment: int, text: bytes, dead_bytes: int) -> None:
        """The whole text of a segment, so much of which no record uses."""
        self._texts[segment] = text
        self._dead_bytes[segment] = dead_bytes

    def drop(self, segment: int) -> None:
        """The segment has no records any more."""
        self._texts.pop(segment, None)
        self._dead_bytes.pop(segment, None)

    def discard(self, segment: int, length: int) -> bool:
        """A key of this length is not used any more; whether the text should be gathered anew."""
        dead = self._dead_bytes.get(segment, 0) + length
        self._dead_bytes[segment] = dead
        return dead > _WORTH_CUTTING_BYTES and 2 * dead > len(self._texts[segment])

    def gather(
        self, segment: int, offsets: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint16]
    ) -> tuple[bytes, npt.NDArray[np.uint32]]:
        """The text of these keys alone, one after the other, and their offsets in it."""
        text = np.frombuffer(bytes(self._texts.get(segment, b"")), np.uint8)
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = ends - lengths
        places = np.repeat(offsets.astype(np.int64) - starts, lengths)
        places += np.arange(len(places))
        return text[places].tobytes(), starts.astype(np.uint32)


class Namespaces:
    """Namespaces by a small number, as long as records use them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._uses: list[int] = []
        self._numbers: dict[str, int] = {}
        self._digests: dict[bytes, int] = {}
        self._free: list[int] = []

    def use(self, name: str, times: int = 1) -> int:
        """The number of a namespace that so many more records are in."""
        number = self._numbers.get(name)
        if number is None:
            number = self._take(name)
        self._uses[number] += times
        return number

    def leave(self, number: int, times: int = 1) -> None:
        """So many records fewer are in it; after the last one the number belongs to nobody."""
        self._uses[number] -= times
        if not self._uses[number]:
            name = self._names[number]
            del self._numbers[name], self._digests[namespace_digest(name)]
            self._free.append(number)

    def is_used(self, number: int) -> bool:
        """Whether any record is in the namespace of this number."""
        return self._uses[number] > 0

    def name(self, number: int) -> str:
        """The name of a namespace that records are in."""
        return self._names[number]

    def number(self, name: str) -> int | None:
        """The number of a namespace, None when no record is in it."""
        return self._numbers.get(name)

    def number_of_digest(self, digest: bytes) -> int | None:
        """The same, by the namespace's digest."""
        return self._digests.get(digest)

    def _take(self, name: str) -> int:
        if self._free:
            number = self._free.pop()
            self._names[number] = name
        else:
            number = len(self._names)
            self._names.append(name)
            self._uses.append(0)
        self._numbers[name] = self._digests[namespace_digest(name)] = number
        return number
