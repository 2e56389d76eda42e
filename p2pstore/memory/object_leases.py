"""References of readers that keep objects in place: leases, hazards, and loans to threads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Final

import numpy as np

from p2pstore.memory.entries import ObjectEntry, SmallObjectsLent, small_entries
from p2pstore.memory.references import Loan
from p2pstore.memory.segment_layout import SLOT_BYTES
from p2pstore.memory.segment_objects import SegmentObjects
from p2pstore.objects import DIGEST_BYTES
from p2pstore.runtime.stepping import Steps

DROPPED_PER_STEP: Final = 128
"""Leases, hazards or reservations ended in one step, at 2 us each."""

_DIGEST: Final = np.dtype(f"V{DIGEST_BYTES}")


class Leases:
    """Leases by number, the numbers of each session, and the bytes they keep in place."""

    def __init__(self) -> None:
        self._by_number: dict[int, tuple[ObjectEntry, Hashable]] = {}
        self._of: dict[Hashable, set[int]] = {}
        self._bytes_of: dict[Hashable, int] = {}
        self._numbers = count(1)

    def entries(self) -> Iterator[ObjectEntry]:
        """The leased entry of each lease."""
        return (entry for entry, _ in self._by_number.values())

    def add(self, entry: ObjectEntry, session: Hashable) -> int:
        """The number of a new lease."""
        number = next(self._numbers)
        self._by_number[number] = (entry, session)
        self._of.setdefault(session, set()).add(number)
        self._bytes_of[session] = self.bytes_of(session) + entry.length
        return number

    def end(self, number: int, session: Hashable) -> ObjectEntry:
        """The entry that was leased. Raises `ValueError` when the session has no such lease."""
        entry, owner = self._by_number.get(number, (None, None))
        if entry is None or owner != session:
            raise ValueError(f"lease {number} has ended, or belongs to another session")
        del self._by_number[number]
        self._bytes_of[session] -= entry.length
        numbers = self._of[session]
        numbers.remove(number)
        if not numbers:
            del self._of[session], self._bytes_of[session]
        return entry

    def of(self, session: Hashable) -> tuple[int, ...]:
        """The session's lease numbers."""
        return tuple(self._of.get(session, ()))

    def bytes_of(self, session: Hashable) -> int:
        """Payload bytes of the session's leases, each lease counted."""
        return self._bytes_of.get(session, 0)


class ObjectLeases:
    """Keeps objects in place for readers. `session` is a connection, or the peer itself. Times are Unix seconds."""

    def __init__(self, buffer: memoryview, objects: SegmentObjects) -> None:
        self.leases = Leases()
        self._buffer = buffer
        self._objects = objects
        self._entries = objects.live
        self._table = objects.table
        self._references = objects.references
        self._loans = objects.references.loans
        self._hazards = objects.references.hazards

    def lease(self, entry: ObjectEntry, *, session: Hashable, now: float) -> int:
        """Keep the entry's bytes in place until `release` of this number, or `drop_in_steps`."""
        self._objects.check_open()
        self._references.acquire(entry)
        self._objects.used(entry, 1, now)
        return self.leases.add(entry, session)

    def release(self, lease: int, *, session: Hashable) -> None:
        """End a lease. Raises `ValueError` when the session has no such lease."""
        self._references.let_go(self.leases.end(lease, session))

    def leased_bytes_of(self, session: Hashable) -> int:
        """Payload bytes of the session's leases and hazards, each counted."""
        if self._hazards:
            self._references.settle_hazards(session)
        return self.leases.bytes_of(session) + self._hazards.bytes_of(session)

    def watch_hazards(self, session: Hashable, page: memoryview) -> None:
        """Count the hazards that the session writes into `page` (`p2pstore.memory.hazards`) as leases, until
        `drop_in_steps`. Raises `ValueError` for a segment with marks, which outlives its pages."""
        if self._references.marks is not None:
            raise ValueError("hazards do not outlive this process, as marks do")
        self._hazards.add(session, page)

    def drop_in_steps(self, session: Hashable) -> Steps[None]:
        """End all leases and hazards of a session that is gone."""
        for place, entry in enumerate(list(self._hazards.drop(session)), 1):
            self._references.let_go(entry)
            if place % DROPPED_PER_STEP == 0:
                yield
        for place, lease in enumerate(self.leases.of(session), 1):
            self.release(lease, session=session)
            if place % DROPPED_PER_STEP == 0:
                yield

    def lend(self, digest: bytes, now: float) -> tuple[Loan, ObjectEntry] | None:
        """The live entry under `digest`, whose bytes stay until `end_loan`. For any thread of the process."""
        entry = self._entries.get(digest)
        if entry is None or entry.expired(now) or (loan := self._loans.begin(entry)) is None:
            return None
        return loan, entry

    def lend_small(
        self,
        digests: bytes,
        most_bytes: int,
        most_bytes_in_all: int,
        now: float,
        declines: Callable[[ObjectEntry], bool] | None = None,
    ) -> SmallObjectsLent | None:
        """The live entries of 1 to `most_bytes` bytes under packed digests, without those that `declines` names; their
        bytes stay until `end_loan`. For any thread of the process. None when one is withdrawn in this moment."""
        alone = len(digests) == DIGEST_BYTES  # numpy takes 2 us for any number
        wanted: list[bytes] = [digests] if alone else np.frombuffer(digests, _DIGEST).tolist()
        found = list(map(self._entries.get, wanted))
        places, entries = small_entries(found, most_bytes, most_bytes_in_all, now, declines)
        if not entries:
            return SmallObjectsLent(bytes(len(wanted) * SLOT_BYTES), [], [], 0, None)
        loan = self._loans.begin(*entries)
        if loan is None:
            return None
        if alone:
            slots = self._table.slot_bytes(entries[0])
        else:
            rows = self._table.slot_rows([entry.slot for entry in entries])
            if len(entries) < len(wanted):
                found_rows, rows = rows, np.zeros((len(wanted), SLOT_BYTES), np.uint8)
                rows[places] = found_rows
                wanted = [wanted[place] for place in places]
            slots = rows.tobytes()
        buffer = self._buffer
        payloads = [buffer[entry.offset : entry.offset + entry.length] for entry in entries]
        total = sum(map(len, payloads))
        return SmallObjectsLent(slots, wanted, payloads, total, loan)

    def end_loan(self, loan: Loan) -> None:
        """End `lend` or `lend_small`, by the same thread."""
        self._loans.end(loan)

    def detach(self) -> None:
        """Let go of the buffer and all hazard pages."""
        self._buffer = memoryview(b"")
        self._hazards.drop_all()
