"""Slots of another peer's segment, as they were when they were read last: hints, which spare a round trip. Pure.

A READ of sixteen slots takes as long as one of a single slot, and objects that are put one after the other have slots
side by side: so who reads a sequence knows of nearly all where they lie before it asks for them, and asks for slot,
trailer and payload at once. What the slot says then is what counts.
"""

from __future__ import annotations

from typing import Final

from p2pstore.memory.segment_layout import SLOT_BYTES, Geometry

SLOTS_TOGETHER: Final = 16
"""Read at once: 1 KiB, which is one packet on most paths."""
MOST_KEPT: Final = 256
"""Of what was read at once."""


class SeenSlots:
    """Those of one segment; the oldest are forgotten first."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._rows: dict[int, bytes] = {}

    def extent(self, number: int) -> tuple[int, int]:
        """Where the slots that are read with this one lie in the segment, and how long they are together."""
        first = number - number % SLOTS_TOGETHER
        count = min(SLOTS_TOGETHER, self._geometry.slots - first)
        return self.offset(first), count * SLOT_BYTES

    def offset(self, number: int) -> int:
        """Where a slot lies in the segment."""
        return self._geometry.slots_offset + number * SLOT_BYTES

    def take_in(self, number: int, packed: bytes) -> None:
        """The slots of `extent(number)` were read."""
        row = number // SLOTS_TOGETHER
        self._rows.pop(row, None)
        self._rows[row] = packed
        if len(self._rows) > MOST_KEPT:
            del self._rows[next(iter(self._rows))]

    def find(self, number: int) -> bytes:
        """A slot as it was seen last, empty when it was not."""
        row, at = divmod(number, SLOTS_TOGETHER)
        return self._rows.get(row, b"")[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]
