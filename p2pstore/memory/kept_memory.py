"""Memory that an earlier life of a peer left, and what the next life begins with: its objects, and room that its
clients may still use. Pure.

A segment in a file outlives its process, with everything in it that readers check: slots, trailers, chunk sums. Behind
the segment lie the data for its owner's next life alone:

    a page       the note: which boot of the machine, which cluster, how many lives so far
    marks        a byte for each slot: whether its bytes were in use

An earlier life's clients may still look at leased objects, and write into reservations, as long as they have the file
mapped. So the extents of both stay what they are for as long as there are such clients.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from p2pstore.errors import ProtocolError
from p2pstore.memory.areas import Areas
from p2pstore.memory.entries import ObjectEntry, Reservations, pin_of
from p2pstore.memory.object_leases import Leases
from p2pstore.memory.segment_layout import (
    GRANULE_BYTES,
    MAX_TRAILER_BYTES,
    SEGMENT_FORMAT,
    SLOT_BYTES,
    SLOT_FLAG_SOFT,
    Geometry,
    Pin,
    Slot,
    SlotState,
    TrailerBody,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    extent_bytes,
    round_up,
    segment_format_of,
    trailer_matches,
    trailer_offset,
)
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS, SegmentObjects

KEPT_MAGIC: Final = b"P2PSKPT\0"
KEPT_FORMAT: Final = 1

# magic, format, slots, boot id, checksums of the cluster's name and of the quotas, lives, checksum of all before it
_NOTE: Final = struct.Struct("<8sII16sQQQQ")
_STATE_BYTE: Final = 1
"""Where a slot has its state."""


@dataclass(frozen=True, slots=True)
class Note:
    """Of the life that wrote it. `boot` is the kernel's boot id, 16 bytes; `lives` counts from 1."""

    slots: int
    boot: bytes
    cluster: int
    quotas: int
    lives: int


def encode_note(note: Note) -> bytes:
    """The first bytes behind a segment that is kept."""
    fields = (KEPT_MAGIC, KEPT_FORMAT, note.slots, note.boot, note.cluster, note.quotas, note.lives)
    packed = _NOTE.pack(*fields, 0)[:-8]
    return packed + xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")


def decode_note(data: bytes | memoryview) -> Note | None:
    """None when it is torn, or none at all. Raises `ProtocolError` for a newer format."""
    packed = bytes(data[: _NOTE.size])
    if len(packed) < _NOTE.size:
        return None
    magic, fmt, slots, boot, cluster, quotas, lives, checksum = _NOTE.unpack(packed)
    if magic != KEPT_MAGIC or checksum != xxhash.xxh3_64_intdigest(packed[:-8]):
        return None
    if fmt != KEPT_FORMAT:
        raise ProtocolError(f"it has format {fmt}, this version knows {KEPT_FORMAT}")
    return Note(slots, boot, cluster, quotas, lives)


def checksum_of(name: str) -> int:
    """The checksum of a cluster's name, as a note has it."""
    return xxhash.xxh3_64_intdigest(name.encode())


def checksum_of_quotas(quotas: Mapping[str, int]) -> int:
    """The checksum of quotas, as a note has it: their values, in this order, decide the places of their areas."""
    return xxhash.xxh3_64_intdigest(repr(list(quotas.items())).encode())


def tail_bytes(geometry: Geometry) -> int:
    """How much lies behind the segment, from the next granule on."""
    return GRANULE_BYTES + round_up(geometry.slots, GRANULE_BYTES)


def tail_offset(geometry: Geometry) -> int:
    """Where it begins, from the segment's start."""
    return round_up(geometry.total_bytes, GRANULE_BYTES)


@dataclass(frozen=True, slots=True)
class KeptObject:
    """An object that was there, and whether an earlier life's client may still look at it."""

    number: int
    slot: Slot
    trailer: TrailerBody
    is_viewed: bool


@dataclass(frozen=True, slots=True)
class KeptRoom:
    """Room that an earlier life's client may still write to, or look at, and that holds no object."""

    number: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Objects and taken rooms that a life begins with. No extents overlap, and each digest is unique."""

    lives: int = 0
    objects: list[KeptObject] = field(default_factory=list)
    rooms: list[KeptRoom] = field(default_factory=list)

    @property
    def numbers(self) -> set[int]:
        """The slots that are taken."""
        return {each.number for each in self.objects} | {each.number for each in self.rooms}

    def within(self, areas: Areas, geometry: Geometry) -> Kept:
        """Without the objects that lie across the bounds of quotas, which have changed."""
        fitting = [
            each
            for each in self.objects
            if areas.holds(
                each.slot.offset - geometry.data_offset,
                extent_bytes(each.slot.length, each.slot.trailer_length),
            )
        ]
        return Kept(self.lives, fitting, self.rooms)


@dataclass(frozen=True, slots=True)
class Expected:
    """The properties a segment must have for this life to keep its contents. `segment_id` is that of the last life of
    the same peer; empty when that kept nothing."""

    geometry: Geometry
    segment_id: bytes
    boot: bytes
    cluster: int
    quotas: int


class KeptElsewhere(Exception):
    """The memory is not this peer's to begin anew, and says why."""


def read_kept(view: memoryview, expected: Expected, *, has_users: bool) -> Kept | str:
    """Find the objects to keep in the memory of an earlier life: `view` is the segment and the pages behind it.
    `has_users`: whether a client of an earlier life has it mapped. Returns the reason as text when nothing can be kept.

    Raises `KeptElsewhere` when it belongs to another cluster, or to a newer version of this program.
    Takes some 15 us an object.
    """
    newer = segment_format_of(view)
    if newer is not None and newer > SEGMENT_FORMAT:
        raise KeptElsewhere(f"it has format {newer}, this version knows {SEGMENT_FORMAT}")
    try:
        header = decode_segment_header(view)
    except ProtocolError:
        return "its header is damaged"
    geometry = header.geometry
    begin = tail_offset(geometry)
    try:
        note = decode_note(view[begin:])
    except ProtocolError as error:
        raise KeptElsewhere(str(error)) from None
    if note is None:
        return "it was not made to be kept, or is damaged"
    if note.cluster != expected.cluster:
        raise KeptElsewhere("it is of a peer of another cluster")
    if geometry != expected.geometry or len(view) < begin + tail_bytes(geometry):
        return "memory has another size now"
    if note.boot != expected.boot:
        return "it is from before this machine was started"
    if header.segment_id != expected.segment_id or not expected.segment_id:
        return "it is not what this peer's last life had"
    if has_users and note.quotas != expected.quotas:
        return "quotas have changed, while clients of earlier still have it mapped"
    marks = view[begin + GRANULE_BYTES : begin + GRANULE_BYTES + geometry.slots]
    return _Scan(view, geometry, marks if has_users else None).kept(note.lives)


class _Scan:
    """Going over all slots once. `marks` only when a client of an earlier life may have memory in use."""

    def __init__(self, view: memoryview, geometry: Geometry, marks: memoryview | None) -> None:
        self._view = view
        self._geometry = geometry
        self._marks = marks
        self._objects: dict[bytes, KeptObject] = {}
        self._rooms: list[KeptRoom] = []
        self._unclear = False

    def kept(self, lives: int) -> Kept | str:
        for number in self._numbers():
            self._look_at(number)
        objects = self._apart(list(self._objects.values()))
        if self._unclear:
            return "memory in use by clients of earlier lives cannot be told from the rest"
        return Kept(lives, objects, self._rooms)

    def _numbers(self) -> list[int]:
        """Slots that say anything, or that are marked."""
        slots = self._geometry.slots
        begin = self._geometry.slots_offset
        table = np.frombuffer(self._view, np.uint8, slots * SLOT_BYTES, begin)
        wanted = table[_STATE_BYTE::SLOT_BYTES] != SlotState.FREE
        if self._marks is not None:
            wanted |= np.frombuffer(self._marks, np.uint8) != 0
        numbers: list[int] = np.flatnonzero(wanted).tolist()
        return numbers

    def _look_at(self, number: int) -> None:
        begin = self._geometry.slots_offset + number * SLOT_BYTES
        slot = decode_slot(bytes(self._view[begin : begin + SLOT_BYTES]))
        marked = self._marks is not None and self._marks[number] != 0
        if slot is None or not self._lies_inside(slot):
            # A peer killed while it writes a slot leaves half of it.
            self._unclear |= marked
            return
        if slot.state in (SlotState.LIVE, SlotState.RETURNED):
            trailer = self._trailer_of(slot)
            if trailer is not None:
                self._keep(KeptObject(number, slot, trailer, marked))
                return
        if marked or (self._marks is not None and slot.state is SlotState.FILLING):
            self._keep_room(number, slot)

    def _lies_inside(self, slot: Slot) -> bool:
        geometry = self._geometry
        offset = slot.offset - geometry.data_offset
        size = extent_bytes(slot.length, slot.trailer_length)
        return 0 <= offset <= geometry.data_bytes - size and size > 0 == offset % GRANULE_BYTES

    def _trailer_of(self, slot: Slot) -> TrailerBody | None:
        begin = slot.offset + trailer_offset(slot.length)
        if not 0 < slot.trailer_length <= MAX_TRAILER_BYTES:
            return None
        trailer = decode_trailer(self._view[begin : begin + slot.trailer_length])
        return trailer if trailer is not None and trailer_matches(trailer, slot) else None

    def _keep(self, found: KeptObject) -> None:
        """Of two versions, which there are for the moment in which one takes the place of the other, the newer."""
        other = self._objects.get(found.slot.digest)
        if other is not None and other.slot.version >= found.slot.version:
            found, other = other, found
        self._objects[found.slot.digest] = found
        if other is not None and other.is_viewed:
            self._keep_room(other.number, other.slot)

    def _keep_room(self, number: int, slot: Slot) -> None:
        size = extent_bytes(slot.length, slot.trailer_length)
        self._rooms.append(KeptRoom(number, slot.offset, size))

    def _apart(self, objects: list[KeptObject]) -> list[KeptObject]:
        """Those that overlap nothing. A peer writes no slots that do: then something is wrong with both."""
        extents = [
            (each.slot.offset, extent_bytes(each.slot.length, each.slot.trailer_length), each)
            for each in objects
        ]
        everything: list[tuple[int, int, KeptObject | None]] = [*extents]
        everything += [(room.offset, room.size_bytes, None) for room in self._rooms]
        everything.sort(key=lambda extent: extent[0])
        bad: set[int] = set()
        end, last = 0, -1
        for position, (offset, size, _) in enumerate(everything):
            if offset < end:
                bad |= {last, position}
            if offset + size > end:
                end, last = offset + size, position
        for position in bad:
            found = everything[position][2]
            self._unclear |= found is None or found.is_viewed
        return [
            found
            for position, (_, _, found) in enumerate(everything)
            if found is not None and position not in bad
        ]


EARLIER_CLIENTS: Final = "clients of earlier lives"
"""The session of what clients of earlier lives may still look at or write to."""


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
        ended = self._reservations.of(EARLIER_CLIENTS).values()
        self._objects.free(*ended)
        self._reservations.end(EARLIER_CLIENTS, *ended)

    @property
    def has_earlier_clients(self) -> bool:
        """Whether something is kept in place for clients of earlier lives."""
        return bool(self._leases.of(EARLIER_CLIENTS) or self._reservations.of(EARLIER_CLIENTS))

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
