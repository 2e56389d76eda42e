"""Memory that pieces pass through on their way in and out, used again and again. Pure.

A fresh buffer costs a page fault for each 4 KiB of it, which takes longer than to read the piece into it.
"""

from __future__ import annotations

from typing import Final

from p2pstore.objects import MIB

MOST_KEPT_BYTES: Final = 256 * MIB


class PieceBuffers:
    """All of one size. Those that nobody uses are kept while somebody uses another one, up to `MOST_KEPT_BYTES`."""

    def __init__(self, length_bytes: int) -> None:
        """`length_bytes`: of each of them."""
        self._length_bytes = length_bytes
        self._most_kept = MOST_KEPT_BYTES // max(length_bytes, 1)
        self._kept: list[bytearray] = []
        self._used = 0

    @property
    def kept(self) -> int:
        """How many nobody uses."""
        return len(self._kept)

    def take(self) -> bytearray:
        """A buffer, with whatever is in it. `give_back` follows."""
        self._used += 1
        return self._kept.pop() if self._kept else bytearray(self._length_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Nobody reads or writes it any more."""
        self._used -= 1
        if not self._used:
            self._kept.clear()
        elif len(self._kept) < self._most_kept:
            self._kept.append(buffer)
