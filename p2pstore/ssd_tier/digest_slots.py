"""Which row belongs to a digest: open addressing over row numbers, the digests being in the rows. Pure.

Linear probing with backward-shift deletion, at most half full, so that a search looks at two rows or fewer. Homes
are salted: who chooses keys cannot choose where they gather.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

NOT_FOUND: Final = -1
_MASK64: Final = (1 << 64) - 1


class DigestSlots:
    """Row numbers by digest. `rows` is the memory of the rows, each of `row_bytes`, which begin with their digest."""

    def __init__(self, max_rows: int, rows: memoryview, row_bytes: int, salt: int) -> None:
        bits = max(1, (2 * max_rows - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = 64 - bits
        self._salt = salt & _MASK64 | 1  # odd: no two digests become equal
        self._rows = rows
        self._row_bytes = row_bytes
        # Row number + 1, so that 0 is an entry that is free.
        self._numbers = np.zeros(1 << bits, np.uint32)
        self._entries = self._numbers.data

    def find(self, digest: bytes) -> int:
        """The row of the digest, or NOT_FOUND."""
        entries, rows, size, mask = self._entries, self._rows, self._row_bytes, self._mask
        at = self._home(digest)
        while number := entries[at]:
            start = (number - 1) * size
            if rows[start : start + 16] == digest:
                return number - 1
            at = (at + 1) & mask
        return NOT_FOUND

    def insert(self, digest: bytes, row: int) -> None:
        """Add a digest that is not there."""
        entries, at = self._entries, self._home(digest)
        while entries[at]:
            at = (at + 1) & self._mask
        entries[at] = row + 1

    def replace(self, digest: bytes, row: int, by: int) -> None:
        """The digest, so far in `row`, is now in the row `by`."""
        self._entries[self._entry_of(digest, row)] = by + 1

    def remove(self, digest: bytes, row: int) -> None:
        """Take out a digest that is in `row`."""
        entries, mask = self._entries, self._mask
        hole = at = self._entry_of(digest, row)
        while number := entries[at := (at + 1) & mask]:
            start = (number - 1) * self._row_bytes
            home = self._home(self._rows[start : start + 16])
            if (at - home) & mask >= (at - hole) & mask:
                entries[hole] = number
                hole = at
        entries[hole] = 0

    def insert_all(self, digests: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint32]) -> None:
        """Add many digests (rows of two u64) that are not there, at some 0.2 us each."""
        with np.errstate(over="ignore"):
            at = (digests[:, 0] * np.uint64(self._salt)) >> np.uint64(self._shift)
        at, numbers = at.astype(np.int64), rows.astype(np.uint32) + np.uint32(1)
        while len(at):
            # Of those that meet at one free entry the last one gets it; the others go on.
            free = self._numbers[at] == 0
            self._numbers[at[free]] = numbers[free]
            left = self._numbers[at] != numbers
            at, numbers = (at[left] + 1) & self._mask, numbers[left]

    def _home(self, digest: bytes | memoryview) -> int:
        return (int.from_bytes(digest[:8], "little") * self._salt & _MASK64) >> self._shift

    def _entry_of(self, digest: bytes, row: int) -> int:
        at = self._home(digest)
        while self._entries[at] != row + 1:
            if not self._entries[at]:
                raise KeyError(digest)
            at = (at + 1) & self._mask
        return at
