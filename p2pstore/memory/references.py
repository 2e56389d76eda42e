"""References to the bytes of a segment's objects, counted: I/O, loans to other threads, hazards of clients. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Final, NewType

from p2pstore.memory.entries import ObjectEntry, Reservation
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.hazards import Hazards
from p2pstore.memory.segment_layout import SlotState


class References:
    """Counts `ObjectEntry.references`. A referenced object is in no order of eviction, and its bytes stay in place.

    `held`: slot number -> its object or reservation. `marks`: a byte for each slot that outlives this process, 1 while
    the slot's object is referenced. `barrier` passes through all clients that write hazards. `on_unused` is called at
    the end of the last reference to an object that was withdrawn.
    """

    def __init__(
        self,
        order: EvictionOrder,
        held: Mapping[int, ObjectEntry | Reservation],
        marks: memoryview | None,
        barrier: Callable[[], None],
    ) -> None:
        self.loans = Loans()
        self.hazards = Hazards(barrier)
        self.referenced_bytes = 0
        """Bytes of the referenced objects' extents, each counted once."""
        self.marks = marks
        self.on_unused: Callable[[ObjectEntry], None] = lambda entry: None
        self._order = order
        self._held = held

    def acquire(self, *entries: ObjectEntry) -> None:
        """Begin I/O on the objects' bytes (a send, a thread's copy): they stay until `let_go`."""
        for entry in entries:
            if entry.state is SlotState.FREE:
                raise ValueError(f"the bytes of {entry.key!r} were freed: look it up again")
        unreferenced: list[ObjectEntry] = []
        for entry in entries:
            if not entry.references:
                unreferenced.append(entry)
                self.referenced_bytes += entry.extent_bytes
                if self.marks is not None:
                    self.marks[entry.slot] = 1
            entry.references += 1
        self._order.discard(*unreferenced)

    def acquire_unused(self, entry: ObjectEntry) -> None:
        """`acquire` of an unreferenced object that keeps its place in the order of eviction. Ends with `let_go`."""
        if entry not in self._order:
            raise ValueError(f"{entry.key!r} is in use, or is not to be evicted")
        self._order.hold(entry)
        self.referenced_bytes += entry.extent_bytes
        if self.marks is not None:
            self.marks[entry.slot] = 1
        entry.references += 1

    def let_go(self, *entries: ObjectEntry, was_used: bool = True) -> None:
        """End `acquire`. The last reference frees an object that was withdrawn meanwhile. Without `was_used` objects
        keep their places in the order of eviction."""
        used: list[ObjectEntry] = []
        for entry in entries:
            if not entry.references:
                raise ValueError(f"nothing refers to {entry.key!r}")
            entry.references -= 1
            if entry.references:
                continue
            self.referenced_bytes -= entry.extent_bytes
            if self.marks is not None:
                self.marks[entry.slot] = 0
            if entry.state is SlotState.DOOMED:
                self.on_unused(entry)
            elif was_used:
                used.append(entry)
            else:
                self._order.put_back(entry)
        self._order.update(*used)

    def settle(self) -> None:
        """Count a reference for each loan and hazard that began, and one less for each that ended."""
        if self.loans.any_known:
            for entry in self.loans.begun():
                self.acquire(entry)
            for entry in self.loans.ended():
                self.let_go(entry)
        if self.hazards:
            self.settle_hazards()

    def settle_hazards(self, session: Hashable = None) -> None:
        """`settle` for the hazards of one session, or of all sessions."""
        begun, ended = self.hazards.settle(self._held, session)
        for entry in begun:
            self.acquire(entry)
        for entry in ended:
            self.let_go(entry)

    def settle_withdrawn(self, entries: Iterable[ObjectEntry]) -> None:
        """`settle` after these objects were withdrawn: a client or thread that began to use one either sees that, or is
        counted here."""
        if self.hazards:
            self.hazards.pass_barrier()
            self.settle()
        elif self.loans and any(self.loans.has(entry) for entry in entries):
            self.settle()


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
        """End a loan: its entries are no longer used for it."""
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
        them. Entries freed before the loan began are not among them: the borrower is about to see that."""
        # Not a list of the items: making their pairs may run the collector of garbage, and that any other thread.
        for loan, entries in self._under_way.copy().items():
            if loan not in self._kept:
                self._kept[loan] = [each for each in entries if each.state is not SlotState.FREE]
                yield from self._kept[loan]

    def ended(self) -> Iterator[ObjectEntry]:
        """The entries of each that was begun and is over."""
        for loan in [each for each in self._kept if each not in self._under_way]:
            yield from self._kept.pop(loan)
