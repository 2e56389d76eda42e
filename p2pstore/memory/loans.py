"""Entries of a segment whose bytes other threads are sending. Pure, but for the interpreter's lock.

Only the segment's own thread may count references. Another thread says here that it uses an entry, and then looks
whether the entry is still alive. The owner changes the entry's state before it looks here whether somebody uses it.
Both hold the interpreter's lock, so at least one of them sees what the other did: no bytes are used anew under a reader
(Dekker's mutual exclusion, as in hazard pointers: Michael, 2004).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Final, NewType

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import SlotState

Loan = NewType("Loan", object)

_STATE: Final = operator.attrgetter("state")


class Loans:
    """`begin` and `end` are for any thread, the rest for the owner of the segment."""

    def __init__(self) -> None:
        self._under_way: dict[Loan, Collection[ObjectEntry]] = {}
        self._kept: dict[Loan, Collection[ObjectEntry]] = {}

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def begin(self, *entries: ObjectEntry) -> Loan | None:
        """The entries' bytes stay until `end`. None when one of them is given up already."""
        loan = Loan(object())
        self._under_way[loan] = entries if len(entries) == 1 else frozenset(entries)
        # Hundreds at once, as a batch asks for: one pass without a step of the interpreter for each.
        if list(map(_STATE, entries)).count(SlotState.LIVE) < len(entries):
            del self._under_way[loan]
            return None
        return loan

    def end(self, loan: Loan) -> None:
        """Nobody uses them for this any more."""
        del self._under_way[loan]

    def has(self, entry: ObjectEntry) -> bool:
        """Whether some thread uses the entry. To be asked after its state was changed."""
        if not self._under_way:
            return False
        return any(entry in some for some in list(self._under_way.values()))

    @property
    def any_known(self) -> bool:
        """Whether there is one, or one that the owner has not seen the end of."""
        return bool(self._under_way or self._kept)

    def begun(self) -> Iterator[ObjectEntry]:
        """The entries of each loan that was not among these yet: their owner counts a reference, until `ended` has
        them. What was freed before the loan began is none of them: who asked for it is about to see that."""
        # Not a list of the items: making their pairs may run the collector of garbage, and that any other thread.
        for loan, entries in self._under_way.copy().items():
            if loan not in self._kept:
                self._kept[loan] = [each for each in entries if each.state is not SlotState.FREE]
                yield from self._kept[loan]

    def ended(self) -> Iterator[ObjectEntry]:
        """The entries of each that was begun and is over."""
        for loan in [each for each in self._kept if each not in self._under_way]:
            yield from self._kept.pop(loan)
