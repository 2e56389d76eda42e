"""Leases that clients of this host take without asking, said in memory that they share with the owner. Pure.

Each connection has a page of its own. A client writes there the number of an object's slot, and then looks whether the
slot still says what it said before: from then on the object stays in place, until the client takes the number back. The
owner of the segment changes a slot first, then has a memory barrier pass through all clients, and only then looks at
their pages. So one of both sees what the other did: no bytes are used anew under a view.

These are hazard pointers (Michael, "Hazard Pointers: Safe Memory Reclamation for Lock-Free Objects", 2004) with the
barrier on the owner's side alone. A client that is killed holds nothing any more when its connection is gone; one that
writes nonsense keeps objects in place that it could have leased as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Final

from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.layout import SlotState

HAZARD_PAGE_BYTES: Final = 4096
MAX_HAZARDS: Final = HAZARD_PAGE_BYTES // 4 - 1
"""Of one connection. Cells are words of 32 bits: a slot's number and one, or 0. Before them, how many were used so far.
"""


class HazardPage:
    """The client's side of its page, which is writable. Not for several threads at once."""

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("I")
        self._free = dict.fromkeys(reversed(range(MAX_HAZARDS)))
        """Cells that say nothing, the next one last. A cell may be given back twice when that was interrupted."""

    def write(self, slot: int) -> int | None:
        """Say in the next free cell that the slot's object is looked at; `keep` it, or `clear` it. The cell, None when
        all are in use."""
        cell = next(reversed(self._free), None)
        if cell is not None:
            self._words[1 + cell] = slot + 1
            if self._words[0] <= cell:
                self._words[0] = cell + 1
        return cell

    def keep(self, cell: int) -> None:
        """The cell is in use, until `clear`."""
        self._free.pop(cell, None)

    def clear(self, cell: int) -> None:
        """The object is not looked at any more."""
        self._words[1 + cell] = 0
        self._free[cell] = None


class Hazards:
    """The owner's side: the pages of all clients. `barrier` has their earlier stores be seen here, and this owner's be
    seen by them."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.pass_barrier = barrier
        self._pages: dict[Hashable, memoryview] = {}
        self._known: dict[Hashable, dict[int, ObjectEntry]] = {}
        """What each holder was seen to look at, by the word that says so: their owner counts a reference for each."""

    def __bool__(self) -> bool:
        """Whether there are any pages."""
        return bool(self._pages)

    def add(self, holder: Hashable, page: memoryview) -> None:
        """A client's page, which may be read-only."""
        self._pages[holder] = page.cast("I")
        self._known[holder] = {}

    def drop(self, holder: Hashable) -> Collection[ObjectEntry]:
        """The client is gone; the entries for which a reference was counted."""
        self._pages.pop(holder, None)
        return self._known.pop(holder, {}).values()

    def drop_all(self) -> None:
        """Let go of all pages."""
        self._pages.clear()
        self._known.clear()

    @property
    def any_known(self) -> bool:
        """Whether any reference is counted."""
        return any(self._known.values())

    def bytes_of(self, holder: Hashable) -> int:
        """Payload bytes of what the holder was last seen to look at."""
        return sum(entry.length for entry in self._known.get(holder, {}).values())

    def settle(
        self, held: Mapping[int, object]
    ) -> tuple[Collection[ObjectEntry], Collection[ObjectEntry]]:
        """Look at all pages: the entries for which a reference is to be counted, and for which one is over. `held` says
        what is in each slot; what is free by now, the client is about to see."""
        begun: list[ObjectEntry] = []
        ended: list[ObjectEntry] = []
        for holder, words in self._pages.items():
            used = min(words[0], MAX_HAZARDS)
            known = self._known[holder]
            if not used:
                continue
            said = set(words[1 : 1 + used].tolist())
            said.discard(0)
            if said == known.keys():
                continue
            for word in known.keys() - said:
                ended.append(known.pop(word))
            for word in said - known.keys():
                entry = held.get(word - 1)
                if isinstance(entry, ObjectEntry) and entry.state is not SlotState.FREE:
                    known[word] = entry
                    begun.append(entry)
        return begun, ended
