"""Which keys that matter here others have said something about. Pure.

Two live sets are watched: the keys that are held here, and those that are awaited. A whole slot of the
index can be gone through as well, in steps.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import islice
from typing import Final

from p2pstore.gossip.locations.location_index import LocationIndex

STEP_RECORDS: Final = 2_048
"""A step of what takes long: one or two milliseconds."""

MAX_AHEAD: Final = 8 * STEP_RECORDS
"""Touched digests that are waited for to be taken, before more of whole slots are. (A set of half a million
takes 10 ms to grow.)"""


class WatchedKeys:
    """See the module's docstring."""

    def __init__(self, index: LocationIndex) -> None:
        self._index = index
        self._held: Set[bytes] = frozenset()
        self._awaited: Set[bytes] = frozenset()
        self._touched: set[bytes] = set()
        self._left: dict[int, int] = {}
        """Slots that are gone through: how many records are left, from the first on."""

    def watch(self, held: Set[bytes], awaited: Set[bytes]) -> None:
        """Live views of the sets to watch."""
        self._held, self._awaited = held, awaited

    @property
    def any_touched(self) -> bool:
        """Whether `take` would give some."""
        return bool(self._touched)

    def take(self, limit: int) -> list[bytes]:
        """Some of the touched digests, each once. Awaited ones come first."""
        taken = list(islice(self._awaited & self._touched, limit))
        self._touched.difference_update(taken)
        while self._touched and len(taken) < limit:
            taken.append(self._touched.pop())
        return taken

    def touch(self, digest: bytes) -> None:
        """Have a digest looked at, watched or not."""
        self._touched.add(digest)

    def heard_of(self, digests: set[bytes]) -> None:
        """Touch those of the digests that are watched."""
        self._touched |= self._held & digests
        self._touched |= self._awaited & digests

    # --- whole slots ---------------------------------------------------------------------------

    @property
    def work_pending(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._left)

    def heard_of_all(self, slot: int) -> None:
        """`heard_of` all digests of a slot: now, or when `work` has gone through a large one."""
        self._left[slot] = self._index.count(slot)
        if self._left[slot] <= STEP_RECORDS:
            self._go_through(slot, STEP_RECORDS)

    def forget(self, slot: int) -> None:
        """The slot is about to be discarded."""
        self._left.pop(slot, None)

    def work(self, limit: int) -> None:
        """Go through about `limit` records; not while there are many to `take`."""
        while self._left and limit > 0 and len(self._touched) < MAX_AHEAD:
            limit -= self._go_through(next(iter(self._left)), limit)

    def _go_through(self, slot: int, limit: int) -> int:
        """From the last record to the first: one that takes the place of another comes from behind, so none
        is left out."""
        left = min(self._left.pop(slot), self._index.count(slot))
        start = max(0, left - limit)
        self.heard_of(set(self._index.digests(slot, start, left)))
        if start:
            self._left[slot] = start
        return max(1, left - start)
