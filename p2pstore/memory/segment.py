"""A memory segment, from its owner's side: the entry to everything in it. Pure.

Works on any writable buffer. Only the owner changes index, slots, allocator and reference counts, and an extent is
reused only when nothing refers to it. Readers that merely map the segment need no cooperation
(`p2pstore.transfer.reading.segment_reader`). All `now` are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Final

from p2pstore.errors import CapacityExceeded, ObjectTooLarge
from p2pstore.memory.areas import NO_QUOTAS, Areas
from p2pstore.memory.entries import (
    MAX_RESERVATIONS_PER_SESSION,
    ObjectEntry,
    Reservation,
    Reservations,
    Written,
    pin_of,
)
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.kept_memory import Kept, ReturnedObjects
from p2pstore.memory.object_leases import DROPPED_PER_STEP, ObjectLeases
from p2pstore.memory.object_table import ObjectTable
from p2pstore.memory.policies import make_policy
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.references import References
from p2pstore.memory.room import RoomMaker
from p2pstore.memory.segment_layout import (
    EXPIRY_BYTES,
    GRANULE_BYTES,
    MAX_TRAILER_BYTES,
    Geometry,
    Pin,
    SlotState,
    decode_trailer,
    extent_bytes,
    pack_trailers,
    round_up,
)
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS, SegmentObjects
from p2pstore.objects import MAX_OBJECT_BYTES, are_sums_of
from p2pstore.runtime.stepping import Steps, call_now, run_through

_NO_PIN: Final = Pin.NONE
_SOFT_PIN: Final = Pin.SOFT


class Segment:
    """One segment and everything in it. For one thread.

    Reservations, commits and lookups are here. `objects` changes and withdraws objects, `references` and `leases` keep
    their bytes in place, `room` evicts, `returned` has what an earlier life left, `restoring` repairs what clients
    spoilt, `listing` has keys in order.

    A `session` is a connection or the peer itself; its reservations and leases end with `drop_session`. The constructor
    writes header and an empty table into `buffer`, which has `geometry.total_bytes`. `policy` belongs to this segment
    alone; None for a new one of the default kind. `quotas`: bytes kept for each of some namespaces (`areas`); more than
    there is raises `ValueError`. `caps`: the most bytes that some of these may have.

    `marks`, a byte for each slot, outlives this process as `buffer` does, so that the next life can begin with the
    objects here. `kept` is what this life begins with (`kept_memory`): objects that have their room, and that readers
    do not find until they are published one by one. `barrier` passes through all clients that write hazards.
    """

    def __init__(
        self,
        buffer: memoryview,
        *,
        segment_id: bytes,
        incarnation: int,
        geometry: Geometry,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] = NO_QUOTAS,
        caps: Mapping[str, int] = NO_QUOTAS,
        marks: memoryview | None = None,
        kept: Kept | None = None,
        now: float = 0.0,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self.geometry = geometry
        self.segment_id = segment_id
        self.incarnation = incarnation
        self.data_bytes = geometry.data_bytes
        self.policy = policy or make_policy()
        self._buffer = buffer
        self.areas = Areas(geometry.data_bytes, GRANULE_BYTES, quotas, caps)
        self.quotas = self.areas.uses
        """Each namespace's use of its quota, always up to date."""
        kept = (kept or Kept()).within(self.areas, geometry)
        self.table = ObjectTable(buffer, segment_id, incarnation, geometry, kept.numbers)
        order = EvictionOrder(self.policy, self.areas.group_count)
        held: dict[int, ObjectEntry | Reservation] = {}
        self.references = References(order, held, marks, barrier)
        self.objects = SegmentObjects(geometry, self.areas, self.table, order, held, self.references)
        self.listing = self.objects.listing
        self.leases = ObjectLeases(buffer, self.objects)
        self.reservations = Reservations()
        self.room = RoomMaker(geometry, self.objects, self.reservations)
        self.returned = ReturnedObjects(self.objects, self.leases.leases, self.reservations)
        self.restoring = Restoring(geometry, self.objects)
        self._live = self.objects.live
        self.returned.begin_with(kept, geometry, now)

    # --- figures -----------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents that are taken: objects and reservations, whole granules."""
        return self.areas.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing occupies."""
        return self.areas.free_bytes

    @property
    def object_count(self) -> int:
        """The number of live objects."""
        return len(self._live)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the extents that are leased or have I/O in flight, each counted once."""
        if not self.objects.is_closed:
            self.references.settle()
        return self.references.referenced_bytes

    # --- writing -----------------------------------------------------------------------------

    def reserve(
        self, length: int, trailer_length: int, *, session: Hashable, now: float, namespace: str = ""
    ) -> Reservation:
        """`reserve_in_steps` in one go: milliseconds where little may go, or very many objects have to."""
        return run_through(
            self.reserve_in_steps(length, trailer_length, session=session, now=now, namespace=namespace)
        )

    def reserve_in_steps(
        self,
        length: int,
        trailer_length: int,
        *,
        session: Hashable,
        now: float,
        namespace: str = "",
        alike: int = 1,
    ) -> Steps[Reservation]:
        """Room for a value of at most `length` bytes and its trailer; evicts what may be evicted, for `alike` values of
        which this is the first where that is easy. Between two steps anything may be done to the segment.

        `namespace` is the value's: where it has a quota, that room is for it, and no room of other quotas. Raises
        `ObjectTooLarge` when it could never fit, and `CapacityExceeded` when what is leased, pinned, kept for other
        namespaces or being written leaves no room, or the session has too many reservations.
        """
        self.objects.check_open()
        if length < 0 or not 0 <= trailer_length <= MAX_TRAILER_BYTES:
            raise ValueError(f"cannot reserve {length:,} bytes and a trailer of {trailer_length:,}")
        capacity = extent_bytes(length, max(1, trailer_length))
        if not self.data_bytes:
            raise CapacityExceeded("this peer offers no memory: it was started with memory 0")
        if capacity > self.areas.largest_bytes:
            largest = f"memory has {self.data_bytes:,}"
            if self.areas.uses:
                largest += f", in parts (--quota) of {self.areas.largest_bytes:,} at most"
            raise ObjectTooLarge(
                f"the value has {length:,} bytes, takes {capacity:,} with its trailer, and this peer's "
                f"{largest}: give it more --memory, or split the value over several keys"
            )
        if self.reservations.left_of(session) <= 0:
            raise CapacityExceeded(
                f"{MAX_RESERVATIONS_PER_SESSION:,} puts are in progress on one connection: let some "
                "of them finish first"
            )
        extent, slot = yield from self.room.take(capacity, namespace, now, alike)
        return self._reserved(session, [extent], length, capacity, [slot])[0]

    def reserve_free(
        self, length: int, trailer_length: int, count: int = 1, *, session: Hashable, namespace: str = ""
    ) -> list[Reservation]:
        """Room for up to `count` such values: for as many as find some where it is looked for first, without anything
        that has to go."""
        self.objects.check_open()
        if not (0 <= length <= MAX_OBJECT_BYTES and 0 <= trailer_length <= MAX_TRAILER_BYTES):
            return []
        count = min(count, self.reservations.left_of(session))
        capacity = extent_bytes(length, max(1, trailer_length))
        above = self.areas.above_cap(namespace, count * capacity)
        slots = self.table.take_slots(count - max(0, -(-above // capacity)))
        extents = self.areas.take_many(capacity, len(slots), self.areas.searches(namespace)[0])
        self.table.free_slots(slots[len(extents) :][::-1])
        return self._reserved(session, extents, length, capacity, slots[: len(extents)])

    def _reserved(
        self, session: Hashable, extents: Sequence[int], length: int, capacity: int, slots: Sequence[int]
    ) -> list[Reservation]:
        base = self.geometry.data_offset
        offsets = [base + extent for extent in extents]
        made = self.reservations.add(session, offsets, length, capacity, slots)
        self.objects.held.update(zip(slots, made, strict=True))
        if self.references.marks is not None:
            for reservation in made:
                self.table.write_reservation(reservation)
        return made

    def reservation_view(self, number: int, session: Hashable) -> memoryview:
        """Where to write the value. Nothing may write there after commit or abort."""
        reservation = self.reservations.get(number, session)
        return self._buffer[reservation.offset : reservation.offset + reservation.length]

    def reservation_room(self, number: int, session: Hashable) -> memoryview:
        """`reservation_view` up to the end of the last page: SSD reads fill whole pages."""
        reservation = self.reservations.get(number, session)
        end = reservation.offset + round_up(reservation.length, GRANULE_BYTES)
        return self._buffer[reservation.offset : end]

    def commit(self, written: Written, *, session: Hashable, soft: bool, now: float) -> ObjectEntry:
        """Publish the value written into a reservation; granules beyond its length are given back.

        An older version of the same digest is withdrawn. Against a version that is not older the
        commit loses: the reservation ends and the existing entry is returned (which stops being a
        soft replica if the loser was none). Raises `ValueError`, and the reservation stays, when
        the chunk sums do not give the version's root, or when length or trailer exceed what was
        reserved. Whether the digest is that of the trailer's key is for the caller to know.
        """
        version = written.version
        if not are_sums_of(written.trailer.sums, written.length, version.root):
            raise ValueError("the chunk sums do not give the version's root checksum")
        self.objects.check_open()
        reservation = self.reservations.get(written.reservation, session)
        existing = self._live.get(written.digest)
        if existing is not None and existing.version >= version and not existing.expired(now):
            self.abort(written.reservation, session=session)
            if existing.soft and not soft:
                self.objects.set_soft(existing, False)
            return existing
        [entry] = self.commit_new([written], session=session, now=now, soft=soft)
        if entry is None:
            raise ValueError(
                f"{written.length:,} bytes and their trailer exceed reservation {reservation.number}"
            )
        return entry

    def commit_new(
        self,
        written: Sequence[Written],
        *,
        session: Hashable,
        now: float,
        soft: bool = False,
        keep: Callable[[Callable[[], None]], None] = call_now,
    ) -> list[ObjectEntry | None]:
        """`commit` of many objects whose sums give their roots, each newer than what is here of its key. None in place
        of one that does not fit its reservation, which stays (`commit` says why), or of a key or number again. `keep`
        may put listing and order of eviction off, until anything else than `reserve_free` is called."""
        self.objects.check_open()
        reservations = self.reservations.of(session)
        entries: list[ObjectEntry | None] = [None] * len(written)
        ended, new = dict[int, Reservation](), dict[bytes, ObjectEntry]()
        fitting, follows = list[bytes](), dict[bytes, bytes]()
        trailers = pack_trailers([each.trailer for each in written])
        for place, (each, packed) in enumerate(zip(written, trailers, strict=True)):
            number, digest, length, trailer = each.reservation, each.digest, each.length, each.trailer
            room = reservations.get(number)
            if room is None or number in ended or digest in new:
                continue
            capacity, trailer_bytes = room.capacity, len(packed)
            end = (length + 7 & ~7) + trailer_bytes  # `trailer_offset`, without its call
            if not 0 <= length <= room.length or end > capacity or trailer_bytes > MAX_TRAILER_BYTES:
                continue
            size = capacity  # with room for a time to live that a later put may give the object
            if (spare := capacity - end - EXPIRY_BYTES) >= GRANULE_BYTES:
                size -= spare // GRANULE_BYTES * GRANULE_BYTES
                self.areas.shrink(room.offset - self.geometry.data_offset, size)
            pin = pin_of(trailer) if trailer.pin else _NO_PIN
            entries[place] = new[digest] = ObjectEntry(
                digest,
                each.version,
                room.slot,
                room.offset,
                length,
                trailer_bytes,
                size,
                trailer.namespace,
                trailer.key,
                trailer.expires_unix_ms,
                trailer.replicas,
                pin,
                now + SOFT_PIN_SECONDS if pin is _SOFT_PIN else 0.0,
                soft,
                trailer.dtype,
                trailer.shape,
                now,
            )
            if each.follows:
                follows[digest] = each.follows
            fitting.append(packed)
            ended[number] = room
        self.reservations.end(session, *ended.values())
        self.objects.publish(new, fitting, follows, now, keep)
        return entries

    def abort(self, number: int, *, session: Hashable) -> None:
        """Give a reservation back, after the last write into it has ended."""
        reservation = self.reservations.get(number, session)
        self.reservations.end(session, reservation)
        self.objects.free(reservation)

    # --- reading -----------------------------------------------------------------------------

    def find(self, digest: bytes, now: float) -> ObjectEntry | None:
        """The live entry under `digest`; None when there is none or its time to live is over."""
        entry = self._live.get(digest)
        return None if entry is None or entry.expired(now) else entry

    def payload(self, entry: ObjectEntry) -> memoryview:
        """The value in place, read-only. Stable between `acquire` (or `lease`) and its end."""
        return self._buffer[entry.offset : entry.offset + entry.length].toreadonly()

    def payload_pages(self, entry: ObjectEntry) -> memoryview:
        """`payload` up to the end of its last page, whatever else is there."""
        end = entry.offset + round_up(entry.length, GRANULE_BYTES)
        return self._buffer[entry.offset : end].toreadonly()

    def digests(self) -> Set[bytes]:
        """A live view of the digests of all objects."""
        return self._live.keys()

    def entries(self) -> list[ObjectEntry]:
        """All live objects, in no order."""
        return list(self._live.values())

    # --- going -------------------------------------------------------------------------------

    def remove(self, digest: bytes) -> ObjectEntry | None:
        """Withdraw the object; its bytes are freed when nothing refers to them. None if absent."""
        entry = self._live.get(digest)
        if entry is not None:
            self.objects.withdraw(entry)
        return entry

    def drop_session(self, session: Hashable) -> None:
        """`drop_session_in_steps` in one go."""
        run_through(self.drop_session_in_steps(session))

    def drop_session_in_steps(self, session: Hashable) -> Steps[None]:
        """End all leases and reservations of a session that is gone. The segment may change between two steps."""
        yield from self.leases.drop_in_steps(session)
        for place, number in enumerate([*self.reservations.of(session)], 1):
            self.abort(number, session=session)
            if place % DROPPED_PER_STEP == 0:
                yield

    def close(self) -> None:
        """Mark the segment for readers as one without an owner. References may still end later."""
        if not self.objects.is_closed:
            self.objects.is_closed = True
            self.table.close()

    def detach(self) -> None:
        """Let go of the buffer, so that references to this segment do not keep the memory. Only figures may be asked
        afterwards."""
        self._buffer = memoryview(b"")
        self.references.marks = None
        self.leases.detach()
        self.table.detach()


class Restoring:
    """Writes anew what clients, which map the whole segment, wrote where only its owner may."""

    def __init__(self, geometry: Geometry, objects: SegmentObjects) -> None:
        self._geometry = geometry
        self._objects = objects
        self._table = objects.table
        self._next_index = self._next_slot = 0

    def header(self) -> bool:
        """Repair the header, so that clients can map this segment. Whether it was spoilt."""
        return not self._objects.is_closed and self._table.restore_header()

    def some(self, count: int) -> tuple[int, list[ObjectEntry]]:
        """Repair the header, and the next `count` index entries and slots, at 3 us each. The number of those that were
        spoilt, and the objects whose trailers are (`object` repairs them)."""
        if self._objects.is_closed:
            return 0, []
        restored = int(self._table.restore_header())
        restored += self._table.restore_index(self._next_index, count)
        self._next_index = (self._next_index + count) % self._geometry.index_entries
        damaged = []
        last = min(self._next_slot + count, self._geometry.slots)
        for number in range(self._next_slot, last):
            held = self._objects.held.get(number)
            restored += self._table.restore_slot(number, held)
            if (
                isinstance(held, ObjectEntry)
                and held.state is SlotState.LIVE
                and not self._trailer_is_good(held)
            ):
                damaged.append(held)
        self._next_slot = last % self._geometry.slots
        return restored, damaged

    def object(self, entry: ObjectEntry, sums: bytes) -> bool:
        """Repair index entry, slot and trailer of a live object whose payload has these chunk sums. Whether readers
        accept it now."""
        if self._objects.is_closed or entry.state is not SlotState.LIVE:
            return False
        self._table.restore_trailer(entry, sums)
        self._table.publish([entry])
        return self._trailer_is_good(entry)

    def _trailer_is_good(self, entry: ObjectEntry) -> bool:
        trailer = decode_trailer(self._table.trailer_bytes(entry))
        return trailer is not None and are_sums_of(trailer.sums, entry.length, entry.version.root)
