"""Leases that clients of this host take without asking, said in memory that they share with the owner. Pure.

Each connection has a page of its own. A client writes there the number of an object's slot, and then looks whether the
slot still says what it said before: from then on the object stays in place, until the client takes the number back. The
owner of the segment changes a slot first, then has a memory barrier pass through all clients, and only then looks at
their pages. So one of both sees what the other did: no bytes are used anew under a view.

These are hazard pointers (Michael, "Hazard Pointers: Safe Memory Reclamation for Lock-Free Objects", 2004) with the
barrier on the owner's side alone. A client that is killed holds nothing any more when its connection is gone; one that
writes nonsense keeps some objects in place, for as long. How much one may hold, it sees to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Final

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import SlotState

HAZARD_PAGE_BYTES: Final = 4096
MAX_HAZARDS: Final = HAZARD_PAGE_BYTES // 4 - 1
"""Of one connection. Cells are words of 32 bits: a slot's number and one, or 0. Before them, how many of them to look
at."""


class HazardPage:
    """The client's side of its page, which is writable. Not for several threads at once. Each step may be interrupted
    anywhere, and repeated."""

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("I")
        self._free = dict.fromkeys(reversed(range(MAX_HAZARDS)))
        """Cells that say nothing, the next one last."""

    def write(self, slot: int) -> int | None:
        """Say in the next free cell that the slot's object is looked at; `keep` it, or `undo` that. The cell, None when
        all are in use."""
        cell = next(reversed(self._free), None)
        if cell is not None:
            self._words[1 + cell] = slot + 1
            if self._words[0] <= cell:
                self._words[0] = cell + 1
        return cell

    def undo(self) -> None:
        """Take back what was written last, unless it is kept."""
        cell = next(reversed(self._free), None)
        if cell is not None:
            self._words[1 + cell] = 0

    def keep(self, cell: int) -> None:
        """The cell is in use, until `clear`."""
        self._free.pop(cell, None)

    def clear(self, cell: int) -> None:
        """The object is not looked at any more."""
        words = self._words
        words[1 + cell] = 0
        self._free[cell] = None
        used = words[0]
        while used and not words[used]:  # so that the owner has the less to look at
            used -= 1
        words[0] = used


class _Client:
    """One client's hazards, as the owner saw them last."""

    def __init__(self, page: memoryview) -> None:
        self.words = page.cast("I")
        self.known: dict[int, ObjectEntry] = {}
        """The objects that its hazards name, by word: the owner counts a reference for each."""
        self.known_bytes = 0
        self.seen = b""
        """The page as it was then, if each word named an entry: these stay where they are, so that as long as the page
        says the same it means the same."""


class Hazards:
    """The owner's side: the pages of all clients. `barrier` has their earlier stores be seen here, and this owner's be
    seen by them."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.pass_barrier = barrier
        self._clients: dict[Hashable, _Client] = {}

    def __bool__(self) -> bool:
        """Whether there are any pages."""
        return bool(self._clients)

    def add(self, session: Hashable, page: memoryview) -> None:
        """A client's page, which may be read-only."""
        self._clients[session] = _Client(page)

    def drop(self, session: Hashable) -> Collection[ObjectEntry]:
        """The client is gone; the entries for which a reference was counted."""
        client = self._clients.pop(session, None)
        return client.known.values() if client is not None else ()

    def drop_all(self) -> None:
        """Let go of all pages."""
        self._clients.clear()

    @property
    def any_known(self) -> bool:
        """Whether any reference is counted."""
        return any(client.known for client in self._clients.values())

    def bytes_of(self, session: Hashable) -> int:
        """Payload bytes of what the session was last seen to look at."""
        client = self._clients.get(session)
        return client.known_bytes if client is not None else 0

    def settle(
        self, held: Mapping[int, object], session: Hashable = None
    ) -> tuple[Collection[ObjectEntry], Collection[ObjectEntry]]:
        """Look at all pages, or that of one session: the entries for which a reference is to be counted, and for which
        one is over. `held` is the entry of each slot; the client is about to see that a freed slot is free."""
        begun: list[ObjectEntry] = []
        ended: list[ObjectEntry] = []
        clients = self._clients.values() if session is None else [self._clients.get(session)]
        for client in clients:
            if client is not None and (client.words[0] or client.known):
                _look(client, held, begun, ended)
        return begun, ended


def _look(
    client: _Client, held: Mapping[int, object], begun: list[ObjectEntry], ended: list[ObjectEntry]
) -> None:
    words = client.words[1 : 1 + min(client.words[0], MAX_HAZARDS)]
    seen = words.tobytes()
    if seen == client.seen:
        return
    said = set(memoryview(seen).cast("I"))
    said.discard(0)
    known = client.known
    for word in known.keys() - said:
        over = known.pop(word)
        client.known_bytes -= over.length
        ended.append(over)
    for word in said - known.keys():
        entry = held.get(word - 1)
        if isinstance(entry, ObjectEntry) and entry.state is not SlotState.FREE:
            known[word] = entry
            client.known_bytes += entry.length
            begun.append(entry)
    client.seen = seen if len(known) == len(said) else b""
