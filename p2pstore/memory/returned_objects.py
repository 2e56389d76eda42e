"""What an earlier life of the peer left in its memory: objects, and room that its clients may still use. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from p2pstore.memory.entries import ObjectEntry, Reservations
from p2pstore.memory.kept_memory import Kept, KeptObject
from p2pstore.memory.segment_layout import SLOT_FLAG_SOFT, Geometry, Pin, extent_bytes, pin_of
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS, SegmentObjects
from p2pstore.memory.views import Leases

EARLIER_CLIENTS: Final = "clients of earlier lives"
"""The holder of what clients of earlier lives may still look at or write to."""


class ReturnedObjects:
    """Objects in state RETURNED: they have their room, and readers do not find them until they are published one by
    one. They may be evicted like others."""

    def __init__(self, objects: SegmentObjects, leases: Leases, reservations: Reservations) -> None:
        self._objects = objects
        self._leases = leases
        self._reservations = reservations
        self._entries = objects.returned
        self.publish = objects.publish_returned

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[ObjectEntry]:
        """Returned objects, the oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.version)

    def find(self, digest: bytes) -> ObjectEntry | None:
        """The returned object with that digest."""
        return self._entries.get(digest)

    def drop(self, entry: ObjectEntry) -> None:
        """Give a returned object up, if it is still one."""
        if self._entries.get(entry.digest) is entry:
            self._objects.withdraw(entry)

    def end_earlier_clients(self) -> None:
        """Free what was kept for clients of earlier lives: none has this memory mapped any more."""
        references = self._objects.references
        for lease in self._leases.of(EARLIER_CLIENTS):
            references.let_go(self._leases.end(lease, EARLIER_CLIENTS))
        for number in self._reservations.of(EARLIER_CLIENTS):
            reservation = self._reservations.get(number, EARLIER_CLIENTS)
            self._reservations.end(reservation)
            self._objects.free(reservation)

    @property
    def has_earlier_clients(self) -> bool:
        """Whether something is kept in place for clients of earlier lives."""
        return bool(self._leases.of(EARLIER_CLIENTS) or self._reservations.count_of(EARLIER_CLIENTS))

    def begin_with(self, kept: Kept, geometry: Geometry, now: float) -> None:
        """Take in what is kept, into a segment that is empty."""
        base, marks = geometry.data_offset, self._objects.references.marks
        if marks is not None:
            viewed = {each.number for each in kept.objects if each.is_viewed}
            for number in np.flatnonzero(np.frombuffer(marks, np.uint8)).tolist():
                if number not in viewed:
                    marks[number] = 0
        entries = [_entry_of(each, now) for each in kept.objects]
        extents = [(entry.offset - base, entry.extent_bytes) for entry in entries]
        extents += [(room.offset - base, room.size_bytes) for room in kept.rooms]
        self._objects.areas.take_at(sorted(extents))
        for room in kept.rooms:
            [reservation] = self._reservations.add(
                EARLIER_CLIENTS, [room.offset], room.size_bytes, room.size_bytes, [room.number]
            )
            self._objects.held[room.number] = reservation
            self._objects.table.write_reservation(reservation)
        returning = zip(entries, kept.objects, strict=True)
        for entry, found in sorted(returning, key=lambda pair: pair[0].version):
            self._objects.return_object(entry, now)
            if found.is_viewed:
                self._objects.references.acquire(entry)
                self._leases.add(entry, EARLIER_CLIENTS)


def _entry_of(found: KeptObject, now: float) -> ObjectEntry:
    slot, trailer = found.slot, found.trailer
    pin = pin_of(trailer)
    return ObjectEntry(
        digest=slot.digest,
        version=slot.version,
        slot=found.number,
        offset=slot.offset,
        length=slot.length,
        trailer_length=slot.trailer_length,
        extent_bytes=extent_bytes(slot.length, slot.trailer_length),
        namespace=trailer.namespace,
        key=trailer.key,
        expires_unix_ms=trailer.expires_unix_ms,
        replicas=trailer.replicas,
        pin=pin,
        pin_until=now + SOFT_PIN_SECONDS if pin is Pin.SOFT else 0.0,
        soft=bool(slot.flags & SLOT_FLAG_SOFT),
        dtype=trailer.dtype,
        shape=trailer.shape,
        last_access=now,
    )
