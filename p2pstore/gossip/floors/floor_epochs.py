"""What floors there were at the end of each of the last epochs, as one hash. Pure.

Two peers whose hashes of an epoch agree have known the same floors up to its end. The hash of an epoch
stays as it is when a later floor takes the place of one that counted: so two peers can agree about the
past while new floors come in every moment, and their present sets are hardly ever the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

EPOCH_BITS: Final = 31
"""An epoch is 32.8 s: 2^31 of the hybrid clock, which counts 65,536 a millisecond."""
EPOCHS_KEPT: Final = 4


class FloorEpochs:
    """Hashes at the ends of the last epochs. An end is a clock; floors below it count."""

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}

    def roll(self, clock_now: int, hash_below: Callable[[int], int]) -> None:
        """Begin the hashes of the epochs that have ended by now. `hash_below(end)` is the XOR of the
        floors below `end` that are known."""
        last = clock_now >> EPOCH_BITS
        ends = [number << EPOCH_BITS for number in range(last - EPOCHS_KEPT + 1, last + 1)]
        self._hashes = {
            end: self._hashes[end] if end in self._hashes else hash_below(end) for end in ends
        }

    def settled_end(self, clock_now: int) -> int:
        """The end that ought to have been heard of everywhere: 33 to 66 s ago."""
        return ((clock_now >> EPOCH_BITS) - 1) << EPOCH_BITS

    def hash_at(self, end: int) -> int | None:
        """The hash at this end of an epoch; None when it is not kept."""
        return self._hashes.get(end)

    def added(self, clock: int, record_hash: int) -> None:
        """A floor was taken in."""
        self._toggle(clock, record_hash)

    def replaced(self, clock: int, record_hash: int, by_clock: int) -> None:
        """A floor gave way to one of `by_clock`: it still counts where that one does not."""
        for end in self._hashes:
            if clock < end and by_clock < end:
                self._hashes[end] ^= record_hash

    def dropped(self, clock: int, record_hash: int) -> None:
        """A floor was dropped without another in its place."""
        self._toggle(clock, record_hash)

    def _toggle(self, clock: int, record_hash: int) -> None:
        for end in self._hashes:
            if clock < end:
                self._hashes[end] ^= record_hash
