"""References to the bytes of a segment's objects, counted: I/O, loans to other threads, hazards of clients. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

from p2pstore.memory.entries import ObjectEntry, Reservation
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.hazards import Hazards
from p2pstore.memory.loans import Loans
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

    def acquire(self, entry: ObjectEntry) -> None:
        """Begin I/O on the object's bytes (a send, a thread's copy): they stay until `let_go`."""
        if entry.state is SlotState.FREE:
            raise ValueError(f"the bytes of {entry.key!r} were freed: look it up again")
        if not entry.references:
            self._order.discard(entry)
            self.referenced_bytes += entry.extent_bytes
            if self.marks is not None:
                self.marks[entry.slot] = 1
        entry.references += 1

    def acquire_unused(self, entry: ObjectEntry) -> None:
        """`acquire` of an unreferenced object that keeps its place in the order of eviction. Ends with `let_go`."""
        if entry not in self._order:
            raise ValueError(f"{entry.key!r} is in use, or is not to be evicted")
        self._order.hold(entry)
        self.referenced_bytes += entry.extent_bytes
        if self.marks is not None:
            self.marks[entry.slot] = 1
        entry.references += 1

    def let_go(self, entry: ObjectEntry, *, was_used: bool = True) -> None:
        """End `acquire`. The last reference frees an object that was withdrawn meanwhile. Without `was_used` the object
        keeps its place in the order of eviction."""
        if not entry.references:
            raise ValueError(f"nothing refers to {entry.key!r}")
        entry.references -= 1
        if entry.references:
            return
        self.referenced_bytes -= entry.extent_bytes
        if self.marks is not None:
            self.marks[entry.slot] = 0
        if entry.state is SlotState.DOOMED:
            self.on_unused(entry)
        elif was_used:
            self._order.update(entry)
        else:
            self._order.put_back(entry)

    def settle(self) -> None:
        """Count a reference for each loan and hazard that began, and one less for each that ended."""
        if self.loans.any_known:
            for entry in self.loans.begun():
                self.acquire(entry)
            for entry in self.loans.ended():
                self.let_go(entry)
        if self.hazards:
            self.settle_hazards()

    def settle_hazards(self, holder: Hashable = None) -> None:
        """`settle` for the hazards of one holder, or of all holders."""
        begun, ended = self.hazards.settle(self._held, holder)
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
        elif any(self.loans.has(entry) for entry in entries):
            self.settle()
