"""The owner's side of a memory segment: reservations, objects, leases, eviction. Pure.

Works on any writable buffer. Only the owner changes index, slots, allocator and reference counts,
and an extent is reused only when nothing refers to it. Readers that merely map the segment need no
cooperation (`p2pstore.transfer.reading.segment_reader`). All `now` are Unix seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import closing, suppress
from functools import partial
from itertools import groupby, islice
from types import MappingProxyType
from typing import Final

import numpy as np

from p2pstore.errors import CapacityExceeded, ObjectTooLarge, StoreClosed
from p2pstore.memory.areas import NO_CAPS, Areas, Places, QuotaUse
from p2pstore.memory.entries import (
    ObjectEntry,
    Reservation,
    SmallObjectsLent,
    Written,
    small_entries,
)
from p2pstore.memory.eviction import EvictionOrder, WhoKeeps, rank_of
from p2pstore.memory.eviction_policies import make_policy
from p2pstore.memory.expiry import ExpiryTimers
from p2pstore.memory.hazards import Hazards
from p2pstore.memory.holdings import Leases, Reservations
from p2pstore.memory.kept_memory import Kept
from p2pstore.memory.key_listing import KeyListing
from p2pstore.memory.loans import Loan, Loans
from p2pstore.memory.most_read import MostRead
from p2pstore.memory.object_table import ObjectTable, slot_of
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.segment_layout import (
    EXPIRY_BYTES,
    GRANULE_BYTES,
    MAX_TRAILER_BYTES,
    PINS,
    SLOT_BYTES,
    SLOT_FLAG_SOFT,
    Geometry,
    Pin,
    SlotState,
    TrailerBody,
    decode_slot,
    decode_trailer,
    encode_trailer,
    extent_bytes,
    round_up,
    trailer_matches,
)
from p2pstore.memory.victims import EVICTED_PER_STEP, Victims
from p2pstore.objects import DIGEST_BYTES, MAX_OBJECT_BYTES, Version, are_sums_of, format_bytes
from p2pstore.runtime.stepping import Steps, run_through

__all__ = [
    "MAX_RESERVATIONS_PER_HOLDER",
    "SOFT_PIN_SECONDS",
    "ObjectEntry",
    "Reservation",
    "Segment",
]

SOFT_PIN_SECONDS: Final = 30 * 60.0
MAX_RESERVATIONS_PER_HOLDER: Final = 4096
AHEAD_LEFT: Final = 16
"""Nothing is evicted ahead of need but while so many times as much may go: else what was put a moment ago would, and
for nobody."""

MOST_TRIES: Final = 4
"""To make room, while threads begin to send from what was chosen to go."""
MOST_LISTED: Final = 4_096
"""Objects outside of its own part that a namespace at its cap is searched for those that may go."""

MOST_STEPS_AHEAD: Final = 4
"""Of making room ahead of need: what takes longer is left to the put."""

SET_ASIDE_PER_STEP: Final = 512
"""Entries, at a microsecond each."""

DROPPED_PER_STEP: Final = 128
"""Leases and reservations that end at once, at 2 us each."""

EXPIRED_PER_STEP: Final = 32
"""Objects that are withdrawn at once, at 20 us each."""

NO_QUOTAS: Final[Mapping[str, int]] = MappingProxyType({})

_DIGEST: Final = np.dtype(f"V{DIGEST_BYTES}")

NOBODY: Final = "nobody"
"""The holder of room that is made and given back at once."""

EARLIER_CLIENTS: Final = "clients of earlier lives"
"""The holder of what they may still look at or write to."""


class Segment:
    """One segment and everything in it. For one thread.

    A `holder` stands for whoever reserves and leases (a connection, the peer itself); what it holds
    ends with `drop_holder`. Writes the header and an empty table into `buffer`, which must have
    `geometry.total_bytes`. `policy` is this segment's own; None for a new one of the default kind. `quotas`: bytes that
    are kept for each of some namespaces (`areas`); more than there is raises `ValueError`. `caps`: the most of some.

    With `marks`, a byte a slot that outlives this process as `buffer` does, the next life can begin with what is here;
    `kept` is what this one begins with (`transfer.kept`). Its objects are `returned`: they have their room, and
    nobody finds them, until they are published one by one, dropped, or evicted. At `now`.

    `barrier` is one that passes through all clients that write to pages of hazards (`watch_hazards`).
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
        caps: Mapping[str, int] = NO_CAPS,
        marks: memoryview | None = None,
        kept: Kept | None = None,
        now: float = 0.0,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self.geometry = geometry
        self.segment_id = segment_id
        self.incarnation = incarnation
        self._buffer = buffer
        self._marks = marks
        self._areas = Areas(geometry.data_bytes, GRANULE_BYTES, quotas, caps)
        kept = self._that_fits(kept or Kept())
        self._table = ObjectTable(buffer, segment_id, incarnation, geometry, kept.numbers)
        self._order = EvictionOrder(policy or make_policy(), self._areas.group_count)
        self._victims = Victims(geometry, self._order)
        self._listing = KeyListing()
        self.most_read = MostRead()
        """By whomever, in whatever way the owner hears of it."""
        self._reservations = Reservations()
        self._leases = Leases()
        self._loans = Loans()
        self._hazards = Hazards(barrier)
        self._entries: dict[bytes, ObjectEntry] = {}
        self._held: dict[int, ObjectEntry | Reservation] = {}  # slot number -> what is in it
        self._referenced_bytes = 0
        self._timers = ExpiryTimers()
        self._withdrawn: list[ObjectEntry] = []
        self._in_making: set[int] = set()
        """Extents that are taken for reservations which are not made yet."""
        self._aside: dict[ObjectEntry, None] = {}
        """Entries that are to go for a large value, and are not offered to others."""
        self._to_put_back: deque[ObjectEntry] = deque()
        self._returned: dict[bytes, ObjectEntry] = {}
        self._closed = False
        self._next_index = self._next_slot = 0
        """Where `restore_some` goes on."""
        self._begin_with(kept, now)

    # --- figures -----------------------------------------------------------------------------

    @property
    def policy(self) -> EvictionPolicy:
        """What says which objects go first."""
        return self._order.policy

    @property
    def data_bytes(self) -> int:
        """Bytes that objects can occupy."""
        return self.geometry.data_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents that are taken: objects and reservations, whole granules."""
        return self._areas.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing occupies."""
        return self._areas.free_bytes

    @property
    def quotas(self) -> Mapping[str, QuotaUse]:
        """What namespaces with a quota have of it."""
        return self._areas.uses

    @property
    def object_count(self) -> int:
        """How many objects can be found."""
        return len(self._entries)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the extents that are leased or have I/O in flight, each counted once."""
        if not self._closed:
            self._settle()
        return self._referenced_bytes

    def leased_bytes_of(self, holder: Hashable) -> int:
        """Payload bytes that the holder's leases keep, each lease counted, and what it looks at without one."""
        if self._hazards:
            self._count_hazards(holder)
        return self._leases.bytes_of(holder) + self._hazards.bytes_of(holder)

    def ask_who_keeps(self, are_kept_elsewhere: WhoKeeps) -> None:
        """What another peer keeps is evicted before what is here alone; called while something is evicted, and may
        change nothing here."""
        self._order.are_kept_elsewhere = are_kept_elsewhere

    # --- putting -----------------------------------------------------------------------------

    def reserve(
        self,
        length: int,
        trailer_length: int,
        *,
        holder: Hashable,
        now: float,
        namespace: str = "",
    ) -> Reservation:
        """`reserve_in_steps` in one go: milliseconds where little may go, or very many objects have to."""
        return run_through(
            self.reserve_in_steps(
                length, trailer_length, holder=holder, now=now, namespace=namespace
            )
        )

    def reserve_in_steps(
        self,
        length: int,
        trailer_length: int,
        *,
        holder: Hashable,
        now: float,
        namespace: str = "",
        alike: int = 1,
    ) -> Steps[Reservation]:
        """Room for a value of at most `length` bytes and its trailer; evicts what may be evicted, for `alike` values of
        which this is the first where that is easy. Between two steps anything may be done to the segment.

        `namespace` is the value's: where it has a quota, that room is for it, and no room of other quotas. Raises
        `ObjectTooLarge` when it could never fit, and `CapacityExceeded` when what is leased, pinned, kept for other
        namespaces or being written leaves no room, or the holder has too many reservations.
        """
        self._check_open()
        if length < 0 or not 0 <= trailer_length <= MAX_TRAILER_BYTES:
            raise ValueError(f"cannot reserve {length:,} bytes and a trailer of {trailer_length:,}")
        capacity = extent_bytes(length, max(1, trailer_length))
        if not self.data_bytes:
            raise CapacityExceeded("this peer offers no memory: it was started with memory 0")
        if capacity > self._areas.largest_bytes:
            largest = f"memory has {self.data_bytes:,}"
            if self._areas.uses:
                largest += f", in parts (--quota) of {self._areas.largest_bytes:,} at most"
            raise ObjectTooLarge(
                f"the value has {length:,} bytes, takes {capacity:,} with its trailer, and this peer's "
                f"{largest}: give it more --memory, or split the value over several keys"
            )
        if self._reservations_left(holder) <= 0:
            raise CapacityExceeded(
                f"{MAX_RESERVATIONS_PER_HOLDER:,} puts are in progress on one connection: let some "
                "of them finish first"
            )
        yield from self._keep_within_cap(capacity, namespace)
        extent = yield from self._take_extent(capacity, namespace, now, alike)
        self._in_making.add(extent)
        try:
            slot = yield from self._take_slot(extent, namespace, now, alike)
        except BaseException:
            self._areas.free(extent)
            raise
        finally:
            self._in_making.discard(extent)
        return self._reserved(holder, [extent], length, capacity, [slot])[0]

    def reserve_free(
        self, sizes: Sequence[tuple[int, int]], *, holder: Hashable, namespace: str = ""
    ) -> list[Reservation]:
        """Room for the first ones of these values, by length and trailer length: for as many as find some where it is
        looked for first, without anything that has to go."""
        self._check_open()
        places = self._areas.searches(namespace)[0]
        made: list[Reservation] = []
        taken = 0
        for (length, trailer_length), alike in groupby(sizes[: self._reservations_left(holder)]):
            if not (0 <= length <= MAX_OBJECT_BYTES and 0 <= trailer_length <= MAX_TRAILER_BYTES):
                break
            wanted = sum(1 for _ in alike)
            capacity = extent_bytes(length, max(1, trailer_length))
            above = self._areas.above_cap(namespace, taken + wanted * capacity)
            fitting = wanted - max(0, -(-above // capacity))
            slots = self._table.take_slots(fitting)
            extents = self._areas.take_many(capacity, len(slots), places)
            self._table.give_back(slots[len(extents) :])
            made += self._reserved(holder, extents, length, capacity, slots[: len(extents)])
            taken += len(extents) * capacity
            if len(extents) < wanted:
                break
        return made

    def _reservations_left(self, holder: Hashable) -> int:
        return MAX_RESERVATIONS_PER_HOLDER - self._reservations.count_of(holder)

    def _reserved(
        self,
        holder: Hashable,
        extents: Sequence[int],
        length: int,
        capacity: int,
        slots: Sequence[int],
    ) -> list[Reservation]:
        base = self.geometry.data_offset
        offsets = [base + extent for extent in extents]
        made = self._reservations.add(holder, offsets, length, capacity, slots)
        self._held.update(zip(slots, made, strict=True))
        if self._marks is not None:
            for reservation in made:
                self._table.write_reservation(reservation)
        return made

    def can_spare(self, length: int, trailer_length: int, *, namespace: str = "") -> bool:
        """Whether room for such a value may be reserved for what is not there yet: some is free, or so much may be
        evicted that this is little beside it."""
        size = extent_bytes(length, max(1, trailer_length))
        places = self._areas.searches(namespace)[-1]
        if self._has_room(size, places):
            return True
        self._settle()
        if self._has_room(size, places):
            return True
        return self._order.evictable_bytes(_groups_of(places)) >= AHEAD_LEFT * size

    def has_room(self, length: int, trailer_length: int, *, namespace: str = "") -> bool:
        """Whether nothing has to go for such a value."""
        size = extent_bytes(length, max(1, trailer_length))
        return self._has_room(size, self._areas.searches(namespace)[-1])

    def make_room_ahead(
        self, length: int, trailer_length: int, *, now: float, namespace: str = ""
    ) -> None:
        """Evict what `reserve` of such a value would evict, if there is no room for it and `can_spare`. Nothing is kept
        for anybody: whoever reserves next may take it."""
        size = extent_bytes(length, max(1, trailer_length))
        places = self._areas.searches(namespace)[-1]
        if self._has_room(size, places):
            return
        if not self.can_spare(length, trailer_length, namespace=namespace) or self._has_room(
            size, places
        ):
            return
        steps = self.reserve_in_steps(
            length, trailer_length, holder=NOBODY, now=now, namespace=namespace
        )
        with suppress(CapacityExceeded, ObjectTooLarge), closing(steps):
            for _ in range(MOST_STEPS_AHEAD):
                next(steps, None)
        for number in self._reservations.of(NOBODY):
            self.abort(number, holder=NOBODY)

    def _has_room(self, size: int, places: Places) -> bool:
        return self._areas.has_room(size, places) and self._table.has_free_slot

    def reservation_view(self, number: int, holder: Hashable) -> memoryview:
        """Where to write the value. Nothing may write there after commit or abort."""
        reservation = self._reservations.get(number, holder)
        return self._buffer[reservation.offset : reservation.offset + reservation.length]

    def reservation_room(self, number: int, holder: Hashable) -> memoryview:
        """`reservation_view` up to the end of the last page: what reads the SSD writes whole pages."""
        reservation = self._reservations.get(number, holder)
        end = reservation.offset + round_up(reservation.length, GRANULE_BYTES)
        return self._buffer[reservation.offset : end]

    def commit(self, written: Written, *, holder: Hashable, soft: bool, now: float) -> ObjectEntry:
        """Publish what was written into a reservation; what its length leaves over is given back.

        An older version of the same digest is withdrawn. Against a version that is not older the
        commit loses: the reservation ends and the existing entry is returned (which stops being a
        soft replica if the loser was none). Raises `ValueError`, and the reservation stays, when
        the chunk sums do not give the version's root, or when length or trailer exceed what was
        reserved. Whether the digest is that of the trailer's key is for the caller to know.
        """
        number, digest, version, trailer, length, follows = written
        if not are_sums_of(trailer.sums, length, version.root):
            raise ValueError("the chunk sums do not give the version's root checksum")
        self._check_open()
        reservation = self._reservations.get(number, holder)
        entry, packed = _filled(reservation, written, soft, now)
        existing = self._entries.get(digest)
        if existing is not None and existing.version >= version and not existing.expired(now):
            self.abort(number, holder=holder)
            if existing.soft and not soft:
                existing.soft = False
                self._table.write_slot(existing)
                self._order.update(existing)
            return existing
        self._publish([(reservation, entry, packed, follows)], now)
        return entry

    def commit_new(
        self, written: Iterable[Written], *, holder: Hashable, now: float
    ) -> list[ObjectEntry | None]:
        """`commit` of many objects whose sums give their roots, each of a key of which nothing is here. None in place
        of one that does not fit its reservation, which stays: `commit` says why."""
        self._check_open()
        published: list[ObjectEntry | None] = []
        filled: list[_Filled] = []
        for each in written:
            entry = None
            with suppress(ValueError):
                reservation = self._reservations.get(each.reservation, holder)
                entry, packed = _filled(reservation, each, False, now)
                filled.append((reservation, entry, packed, each.follows))
            published.append(entry)
        self._publish(filled, now)
        return published

    def _publish(self, filled: Sequence[_Filled], now: float) -> None:
        """Make filled reservations the objects of their keys, which differ, in place of older ones."""
        base, held, live = self.geometry.data_offset, self._held, self._entries
        self._reservations.end([reservation for reservation, _, _, _ in filled])
        entries = [entry for _, entry, _, _ in filled]
        replaced = [live[entry.digest] for entry in entries if entry.digest in live]
        for reservation, entry, _, _ in filled:
            if entry.extent_bytes < reservation.capacity:
                self._areas.shrink(entry.offset - base, entry.extent_bytes)
        self._table.publish(entries, [packed for _, _, packed, _ in filled])
        if self._areas.uses:
            for entry in entries:
                entry.group = self._areas.at(entry.offset - base).group_of(entry.namespace)
        for entry in entries:
            held[entry.slot] = live[entry.digest] = entry
        if replaced:
            for existing in replaced:
                self._listing.remove(existing)
            self._doom(*replaced)
            self._withdrawn += replaced
        for _, entry, _, follows in filled:
            self._listing.add(entry)
            before = live.get(follows) if follows else None
            self._order.admit(entry, now, None if before is entry else before)
            if entry.expires_unix_ms or entry.pin_until:
                self._timers.set(entry)
        if self._areas.uses:
            for entry in entries:
                self._areas.count(entry, 1)

    def abort(self, number: int, *, holder: Hashable) -> None:
        """Give a reservation back, after the last write into it has ended."""
        reservation = self._reservations.get(number, holder)
        self._reservations.end([reservation])
        self._free(reservation)

    # --- getting -----------------------------------------------------------------------------

    def find(self, digest: bytes, now: float) -> ObjectEntry | None:
        """The live entry under `digest`; None when there is none or its time to live is over."""
        entry = self._entries.get(digest)
        return None if entry is None or entry.expired(now) else entry

    def lease(self, entry: ObjectEntry, *, holder: Hashable, now: float) -> int:
        """Keep the entry's bytes in place until `release` of this number, or `drop_holder`."""
        self._check_open()
        self.acquire(entry)
        self.used(entry, 1, now)
        return self._leases.add(entry, holder)

    def release(self, lease: int, *, holder: Hashable) -> None:
        """End a lease. Raises `ValueError` when the holder has no such lease."""
        self.let_go(self._leases.end(lease, holder))

    def watch_hazards(self, holder: Hashable, page: memoryview) -> None:
        """From now on the holder leases objects by saying so in `page` (`transfer.hazards`), too, until `drop_holder`.
        Not where `marks` are to outlive this process: pages do not."""
        if self._marks is not None:
            raise ValueError("hazards do not outlive this process, as marks do")
        self._hazards.add(holder, page)

    def acquire(self, entry: ObjectEntry) -> None:
        """I/O from the entry's bytes begins (a send, a thread's copy): they stay until `let_go`."""
        if entry.state is SlotState.FREE:
            raise ValueError(f"the bytes of {entry.key!r} were freed: look it up again")
        if not entry.references:
            self._order.discard(entry)
            self._referenced_bytes += entry.extent_bytes
            self._mark(entry, 1)
        entry.references += 1

    def acquire_unused(self, entry: ObjectEntry) -> None:
        """`acquire` an entry that nobody refers to, without using it: it is as cold as before. Ends with `let_go`."""
        if entry not in self._order:
            raise ValueError(f"{entry.key!r} is in use, or is not to be evicted")
        self._order.hold(entry)
        self._referenced_bytes += entry.extent_bytes
        self._mark(entry, 1)
        entry.references += 1

    def let_go(self, entry: ObjectEntry, *, was_used: bool = True) -> None:
        """The end of `acquire`. The last one frees what was withdrawn meanwhile. Without `was_used`, the entry is as
        cold as before."""
        if not entry.references:
            raise ValueError(f"nothing refers to {entry.key!r}")
        entry.references -= 1
        if entry.references:
            return
        self._referenced_bytes -= entry.extent_bytes
        self._mark(entry, 0)
        if entry.state is SlotState.DOOMED:
            self._free(entry)
        elif was_used:
            self._order.update(entry)
        else:
            self._order.put_back(entry)

    def touch(self, digest: bytes, count: int, now: float) -> None:
        """Take in that an object was read `count` times; whoever serves or copies it says so."""
        entry = self._entries.get(digest)
        if entry is not None:
            self.used(entry, count, now)

    def used(self, entry: ObjectEntry, count: int, now: float) -> None:
        """`touch` for an entry at hand."""
        self._order.read(entry, count, now)
        if count:  # a read that goes on is none
            self.most_read.read(entry.digest, count, now)

    def payload(self, entry: ObjectEntry) -> memoryview:
        """The value in place, read-only. Stable between `acquire` (or `lease`) and its end."""
        return self._buffer[entry.offset : entry.offset + entry.length].toreadonly()

    def payload_pages(self, entry: ObjectEntry) -> memoryview:
        """`payload` up to the end of its last page, whatever else is there."""
        end = entry.offset + round_up(entry.length, GRANULE_BYTES)
        return self._buffer[entry.offset : end].toreadonly()

    def trailer_bytes(self, entry: ObjectEntry) -> bytes:
        """A copy of the entry's trailer."""
        return self._table.trailer_bytes(entry)

    def slot_bytes(self, entry: ObjectEntry) -> bytes:
        """A copy of the entry's 64-byte slot."""
        return self._table.slot_bytes(entry)

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
        """The live entries under packed digests that have 1 to `most_bytes` bytes each, but for those that `declines`
        names; their bytes stay until `end_loan`. For any thread of the process. None when one is given up in this
        moment."""
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
        """The end of `lend` or `lend_small`, by the same thread."""
        self._loans.end(loan)

    @property
    def has_loans(self) -> bool:
        """Whether some bytes are lent, or were and that is not taken in yet."""
        return self._loans.any_known

    def digests(self) -> Set[bytes]:
        """A live view of the digests of all objects."""
        return self._entries.keys()

    def entries(self) -> list[ObjectEntry]:
        """All objects, in no order."""
        return list(self._entries.values())

    def entries_in(self, first_slot: int, count: int) -> list[ObjectEntry]:
        """The objects in a range of slots, in order. Slot by slot all objects can be passed in steps, while
        others come and go."""
        found = map(self._held.get, range(first_slot, first_slot + count))
        return [
            held for held in found if isinstance(held, ObjectEntry) and held.state is SlotState.LIVE
        ]

    def prepare_keys(self, namespace: str) -> bool:
        """A step towards `keys`, of a millisecond: many have to be put in order first. Whether it was the last one."""
        return self._listing.prepare(namespace)

    def keys(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[list[ObjectEntry], bool]:
        """Up to `limit` entries in key order, and whether there are more. Entries that expired, but
        were not collected by `expire` yet, are among them."""
        return self._listing.page(namespace, prefix, after, limit)

    # --- going -------------------------------------------------------------------------------

    def remove(self, digest: bytes) -> ObjectEntry | None:
        """Withdraw the object; its bytes are freed when nothing refers to them. None if absent."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._withdraw(entry)
        return entry

    def set_pin(self, entry: ObjectEntry, pin: Pin, until: float) -> None:
        """Change a live entry's pin, in its trailer too. `until` is when it ends; 0 for never."""
        if entry.state is not SlotState.LIVE:
            raise ValueError(f"{entry.key!r} was withdrawn: look it up again")
        entry.pin = pin
        entry.pin_until = until if pin is not Pin.NONE else 0.0
        self._table.write_care(entry)
        self._order.update(entry)
        self._timers.set(entry)

    def set_expiry(self, entry: ObjectEntry, expires_unix_ms: int) -> None:
        """Change when a live entry's time to live ends, in its trailer too. 0: it has no end."""
        if entry.state is not SlotState.LIVE:
            raise ValueError(f"{entry.key!r} was withdrawn: look it up again")
        entry.expires_unix_ms = expires_unix_ms
        self._table.write_care(entry)
        self._timers.set(entry)

    def strengthen(self, entry: ObjectEntry, *, pin: Pin, replicas: int, now: float) -> None:
        """Care more for a live entry: it is no longer a soft copy, and has this pin and replica count."""
        entry.soft = False
        entry.replicas = replicas
        self._table.write_slot(entry)
        self.set_pin(entry, pin, now + SOFT_PIN_SECONDS if pin is Pin.SOFT else 0.0)

    def renew_version(self, entry: ObjectEntry, version: Version) -> None:
        """Give a live entry another version of the same bytes. The SSD, if it has the entry, has the old one."""
        if entry.state is not SlotState.LIVE or version.root != entry.version.root:
            raise ValueError(f"{entry.key!r} was withdrawn, or the version is of other bytes")
        entry.version = version
        self._table.write_slot(entry)
        self.set_on_ssd(entry, False)

    def set_proof(self, entry: ObjectEntry, proof: bytes) -> None:
        """Put the proof of who wrote a live entry into its trailer, where the extent has room for it."""
        if entry.state is SlotState.LIVE:
            self._table.write_proof(entry, proof)

    def set_on_ssd(self, entry: ObjectEntry, on_ssd: bool) -> None:
        """The SSD has a live entry's version as well, or has it no longer."""
        if entry.on_ssd != on_ssd and entry.state is SlotState.LIVE:
            entry.on_ssd = on_ssd
            if entry in self._order:
                self._order.update(entry)

    @property
    def cheap_bytes(self) -> int:
        """Memory of soft copies, and of objects that the SSD has and that are hardly read: it goes first."""
        return self._order.cheap_bytes

    def coldest(self, *, cheap: bool = True) -> Iterator[ObjectEntry]:
        """What would be evicted first, or next when what is `cheap` has gone. Nothing may be done to the segment until
        the last one was taken."""
        found = self._order.coldest(cheap=cheap)
        if not self._returned:
            return found
        return (entry for entry in found if entry.state is SlotState.LIVE)

    def expire(self, now: float) -> list[ObjectEntry]:
        """Withdraw some of what is past its time to live and return it (`take_withdrawn` has it, too); end
        some of the pins that have run out. `expires_on` says whether there are more."""
        self._settle()
        self._put_back()
        gone: list[ObjectEntry] = []
        for entry in islice(self._timers.due(now), EXPIRED_PER_STEP):
            if entry.state is not SlotState.LIVE:
                continue
            if entry.expired(now):
                self._withdraw(entry)
                gone.append(entry)
            elif 0 < entry.pin_until <= now:
                self.set_pin(entry, Pin.NONE, 0.0)
            else:
                self._timers.set(entry)
        self._withdrawn += gone
        return gone

    def expires_on(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        return self._timers.any_due(now) or bool(self._to_put_back)

    def take_withdrawn(self) -> list[ObjectEntry]:
        """What was evicted, expired or replaced since the last call: announce that it is gone."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def drop_holder(self, holder: Hashable) -> None:
        """`drop_holder_in_steps` in one go."""
        run_through(self.drop_holder_in_steps(holder))

    def drop_holder_in_steps(self, holder: Hashable) -> Steps[None]:
        """End all leases and reservations of a holder that is gone. Between two steps anything may be done to the
        segment."""
        hazards = list(self._hazards.drop(holder))
        for place, entry in enumerate(hazards, 1):
            self.let_go(entry)
            if place % DROPPED_PER_STEP == 0:
                yield
        for place, lease in enumerate(self._leases.of(holder), 1):
            self.release(lease, holder=holder)
            if place % DROPPED_PER_STEP == 0:
                yield
        for place, number in enumerate(self._reservations.of(holder), 1):
            self.abort(number, holder=holder)
            if place % DROPPED_PER_STEP == 0:
                yield

    def close(self) -> None:
        """Tell readers that nobody keeps this segment any more. What is held can be let go later."""
        if not self._closed:
            self._closed = True
            self._table.close()

    def detach(self) -> None:
        """Let go of the buffer, after which nothing but figures may be asked. What refers to this segment
        then no longer keeps the memory."""
        self._buffer = memoryview(b"")
        self._marks = None
        self._hazards.drop_all()
        self._table.detach()

    # --- what others wrote where only the owner may ------------------------------------------

    def restore_header(self) -> bool:
        """Write the header anew if a client wrote there, so that others can map this segment. Whether one had."""
        return not self._closed and self._table.restore_header()

    def restore_some(self, count: int) -> tuple[int, list[ObjectEntry]]:
        """Look at the header, and at the next `count` index entries and slots: what a client changed there is written
        anew. How many there were, and the objects whose trailers are damaged (`restore_object`). About 3 us each."""
        if self._closed:
            return 0, []
        restored = int(self._table.restore_header())
        restored += self._table.restore_index(self._next_index, count)
        self._next_index = (self._next_index + count) % self.geometry.index_entries
        damaged = []
        last = min(self._next_slot + count, self.geometry.slots)
        for number in range(self._next_slot, last):
            held = self._held.get(number)
            restored += self._table.restore_slot(number, held)
            if isinstance(held, ObjectEntry) and held.state is SlotState.LIVE:
                trailer = decode_trailer(self._table.trailer_bytes(held))
                if trailer is None or not trailer_matches(trailer, slot_of(held)):
                    damaged.append(held)
        self._next_slot = last % self.geometry.slots
        return restored, damaged

    def restore_object(self, entry: ObjectEntry, sums: bytes) -> bool:
        """Write anew what says that a live object is there, whose payload has these chunk sums. Whether readers find
        and accept it now."""
        if self._closed or entry.state is not SlotState.LIVE:
            return False
        self._table.restore_trailer(entry, sums)
        self._table.publish_returned(entry)
        trailer = decode_trailer(self._table.trailer_bytes(entry))
        return trailer is not None and trailer_matches(trailer, slot_of(entry))

    # --- what an earlier life left -----------------------------------------------------------

    def returned(self) -> list[ObjectEntry]:
        """Objects of an earlier life that are neither published nor gone yet, the oldest first."""
        return sorted(self._returned.values(), key=lambda entry: entry.version)

    @property
    def returned_count(self) -> int:
        """How many of them there are."""
        return len(self._returned)

    def find_returned(self, digest: bytes) -> ObjectEntry | None:
        """The one of them with that digest."""
        return self._returned.get(digest)

    def publish_returned(self, entry: ObjectEntry, now: float) -> bool:
        """Have a returned object be one like all others, found by everybody: it is known to be good. Whether it is one
        now; not when it is gone meanwhile, its time to live is over, or a version is here that is not older."""
        if entry.state is not SlotState.RETURNED:
            return False
        existing = self._entries.get(entry.digest)
        if entry.expired(now) or (
            existing is not None and existing.version >= entry.version and not existing.expired(now)
        ):
            self._withdraw(entry)
            return False
        del self._returned[entry.digest]
        entry.state = SlotState.LIVE
        self._table.publish_returned(entry)
        self._entries[entry.digest] = entry
        if existing is not None:
            self._listing.remove(existing)
            self._doom(existing)
            self._withdrawn.append(existing)
        self._listing.add(entry)
        self._timers.set(entry)
        return True

    def drop_returned(self, entry: ObjectEntry) -> None:
        """Give a returned object up, if it is still one."""
        if entry.state is SlotState.RETURNED:
            self._withdraw(entry)

    def release_earlier(self) -> None:
        """No client of an earlier life has this memory mapped any more."""
        self.drop_holder(EARLIER_CLIENTS)

    @property
    def is_used_by_earlier(self) -> bool:
        """Whether something is kept in place for clients of earlier lives."""
        return bool(
            self._leases.of(EARLIER_CLIENTS) or self._reservations.count_of(EARLIER_CLIENTS)
        )

    def _that_fits(self, kept: Kept) -> Kept:
        """Without the objects that lie across the bounds of quotas, which have changed."""
        fitting = [
            each
            for each in kept.objects
            if self._areas.holds(
                each.slot.offset - self.geometry.data_offset,
                extent_bytes(each.slot.length, each.slot.trailer_length),
            )
        ]
        return Kept(kept.lives, fitting, kept.rooms)

    def _begin_with(self, kept: Kept, now: float) -> None:
        base = self.geometry.data_offset
        if self._marks is not None:
            viewed = {each.number for each in kept.objects if each.is_viewed}
            for number in np.flatnonzero(np.frombuffer(self._marks, np.uint8)).tolist():
                if number not in viewed:
                    self._marks[number] = 0
        entries = [
            _new_entry(
                each.number,
                each.slot.offset,
                each.slot.digest,
                each.slot.version,
                each.trailer,
                each.slot.length,
                each.slot.trailer_length,
                extent_bytes(each.slot.length, each.slot.trailer_length),
                bool(each.slot.flags & SLOT_FLAG_SOFT),
                now,
            )
            for each in kept.objects
        ]
        extents = [(entry.offset - base, entry.extent_bytes) for entry in entries]
        extents += [(room.offset - base, room.size_bytes) for room in kept.rooms]
        self._areas.take_at(sorted(extents))
        for room in kept.rooms:
            place, size = room.offset - base, room.size_bytes
            [made] = self._reserved(EARLIER_CLIENTS, [place], size, size, [room.number])
            self._table.write_reservation(made)
        returning = zip(entries, kept.objects, strict=True)
        for entry, found in sorted(returning, key=lambda pair: pair[0].version):
            entry.state = SlotState.RETURNED
            entry.group = self._areas.at(entry.offset - base).group_of(entry.namespace)
            self._table.write_slot(entry)
            self._held[entry.slot] = entry
            self._returned[entry.digest] = entry
            self._areas.count(entry, 1)
            self._order.admit(entry, now)
            if found.is_viewed:
                self.acquire(entry)
                self._leases.add(entry, EARLIER_CLIENTS)

    # --- making room -------------------------------------------------------------------------

    def _take_slot(self, extent: int, namespace: str, now: float, alike: int) -> Steps[int]:
        """A slot for what goes to that extent, and place for others `alike`. What a namespace has of its quota makes
        place for more of it last."""
        slot = self._table.take_slot()
        if slot is None:
            slot = yield from self._when_expired(self._table.take_slot, now)
        if slot is None:
            groups = _groups_of(self._areas.searches(namespace)[-1])
            area = self._areas.at(extent)
            kept = area.owned if area.owner == namespace else None
            others = tuple(group for group in groups if group != kept)
            self._settle()
            for _ in range(MOST_TRIES):  # as for room
                victims = self._victims.for_slots(others, now, alike) or self._victims.for_slots(
                    groups, now, alike
                )
                if not victims:
                    break
                self._evict(self._chosen(victims))
                slot = self._table.take_slot()
                if slot is not None:
                    break
        if slot is None:
            what = f"none of the {self.geometry.slots:,} object slots is free"
            raise self._no_room(what, namespace)
        return slot

    def _keep_within_cap(self, size: int, namespace: str) -> Steps[None]:
        """Evict what a namespace has until an extent of this size keeps it within its cap: of its own part the coldest
        first, then what it has elsewhere, in the order of the puts. Values on their way count once they are there.
        Raises `CapacityExceeded` when too little may go."""
        areas = self._areas
        while (above := areas.above_cap(namespace, size)) > 0:
            self._settle()
            use = areas.uses[namespace]
            victims: list[ObjectEntry] = []
            for entry in self._victims_of(namespace) if above <= use.used_bytes else ():
                victims.append(entry)
                above -= entry.extent_bytes
                if above <= 0 or len(victims) == EVICTED_PER_STEP:
                    break
            if not victims:
                raise CapacityExceeded(
                    f"namespace {namespace!r} has {format_bytes(use.used_bytes)} of the "
                    f"{format_bytes(use.cap_bytes or 0)} that it may have (--cap), and too little of that may go from "
                    f"memory for {format_bytes(size)} more: release views, unpin, or raise the cap"
                )
            self._evict(victims)
            if areas.above_cap(namespace, size) > 0:
                yield

    def _victims_of(self, namespace: str) -> Iterator[ObjectEntry]:
        own = self._areas.own_group(namespace)
        for entry in self._order.coldest_of(own):
            if self._order.can_go(entry.offset):
                yield entry
        for entry in islice(self._listing.entries_of(namespace), MOST_LISTED):
            if entry.group != own and self._order.can_go(entry.offset):
                yield entry

    def _take_extent(self, size: int, namespace: str, now: float, alike: int) -> Steps[int]:
        searches = self._areas.searches(namespace)
        for places in searches:
            extent = self._areas.take(size, places)
            if extent is None:
                take = partial(self._areas.take, size, places)
                extent = yield from self._when_expired(take, now)
            last = places is searches[-1]
            if extent is None:
                extent = yield from self._take_made_room(size, places, now, alike, thoroughly=last)
            if extent is not None:
                return extent
        raise self._no_room(f"{format_bytes(size)} do not fit", namespace)

    def _when_expired(self, take: Callable[[], int | None], now: float) -> Steps[int | None]:
        """What `take` gives when what has expired is gone, and what views and loans kept is free."""
        self.expire(now)
        while (taken := take()) is None and self.expires_on(now):
            yield
            self.expire(now)
        return taken

    def _take_made_room(
        self, size: int, places: Places, now: float, alike: int, *, thoroughly: bool
    ) -> Steps[int | None]:
        """Room that is made by evicting. Just then a thread may begin to send from what is chosen, or a client look at
        it, or others, between two steps, may do anything to it: others go too."""
        for _ in range(MOST_TRIES):
            self._settle()
            victims = yield from self._victims.for_room(
                size, places, now, alike, thoroughly=thoroughly
            )
            if not victims:
                return None
            if len(victims) > EVICTED_PER_STEP:
                extent = yield from self._clear(victims, size)
            else:
                self._evict(self._chosen(victims))
                extent = self._areas.take(size, places)
            while self._to_put_back:
                self._put_back()
                yield
            if extent is not None:
                return extent
        return None

    def _chosen(self, offsets: list[int]) -> list[ObjectEntry]:
        """The entries there that may still go."""
        return [self._order.at(offset) for offset in offsets if self._order.can_go(offset)]

    def _clear(self, victims: list[int], size: int) -> Steps[int | None]:
        """An extent of `size` bytes in place of these entries, which are neighbours but for free extents; None when one
        of them has to stay by now. First all are set aside, so that no others choose them; then they go, some at a
        time, and what is cleared is taken at once."""
        base = self.geometry.data_offset
        entries: list[ObjectEntry] = []
        at, gone, whole = -1, 0, False
        try:
            for offset in sorted(victims):
                if not self._order.can_go(offset):
                    return None
                entries.append(self._set_aside(offset))
                if len(entries) % SET_ASIDE_PER_STEP == 0:
                    yield
            first = entries[0].offset - base
            hole = self._areas.at(first).allocator.hole_before(first)
            for begin in range(0, len(entries), EVICTED_PER_STEP):
                some = entries[begin : begin + EVICTED_PER_STEP]
                if any(rank_of(entry) is None for entry in some):
                    return None
                self._evict(some)
                gone += len(some)
                if not begin and self._areas.claim(hole) is not None:
                    at = hole
                    self._in_making.add(at)
                if at < 0 or at + self._areas.grow(at) <= some[-1].offset - base:
                    return None
                yield
            whole = self._areas.grow(at) >= size
            if whole:
                self._areas.shrink(at, size)
            return at if whole else None
        finally:
            self._to_put_back.extend(entries[gone:])
            self._in_making.discard(at)
            if at >= 0 and not whole:
                self._areas.free(at)

    def _set_aside(self, offset: int) -> ObjectEntry:
        """Nobody else chooses the entry from now on."""
        entry = self._order.at(offset)
        self._order.discard(entry)
        self._aside[entry] = None
        return entry

    def _put_back(self) -> None:
        """Some of what was set aside for nothing may be evicted again."""
        for _ in range(min(SET_ASIDE_PER_STEP, len(self._to_put_back))):
            entry = self._to_put_back.popleft()
            self._aside.pop(entry, None)
            if entry not in self._order:
                self._order.update(entry)

    def _evict(self, entries: Sequence[ObjectEntry]) -> None:
        self._withdrawn += [entry for entry in entries if entry.state is SlotState.LIVE]
        self._withdraw(*entries, evicted=True)

    def _no_room(self, what: str, namespace: str) -> CapacityExceeded:
        leased, reserved = self._referenced_bytes, self._reservations.reserved_bytes
        all_evictable = self._order.evictable_bytes()
        evictable = self._order.evictable_bytes(_groups_of(self._areas.searches(namespace)[-1]))
        pinned = self.used_bytes - leased - reserved - all_evictable
        kept = ""
        if self._areas.uses:
            kept = (
                f", {format_bytes(all_evictable - evictable)} kept for other namespaces (--quota)"
            )
        return CapacityExceeded(
            f"{what}: of {format_bytes(self.data_bytes)}, {format_bytes(leased)} are leased or "
            f"being sent, {format_bytes(pinned)} hard-pinned, {format_bytes(reserved)} being written"
            f"{kept} and {format_bytes(evictable)} evictable; release views, unpin, or give the peer more "
            "--memory"
        )

    # --- small steps -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this peer's memory was closed: the peer is shutting down")

    def _withdraw(self, *entries: ObjectEntry, evicted: bool = False) -> None:
        """Nobody finds the entries any more."""
        for entry in entries:
            if entry.state is SlotState.RETURNED:
                del self._returned[entry.digest]
            else:
                del self._entries[entry.digest]
                self._table.withdraw(entry)
                self._listing.remove(entry)
        self._doom(*entries, evicted=evicted)

    def _mark(self, entry: ObjectEntry, in_use: int) -> None:
        """For the next life of this peer: whether somebody has the entry's bytes in use."""
        if self._marks is not None:
            self._marks[entry.slot] = in_use

    def _doom(self, *entries: ObjectEntry, evicted: bool = False) -> None:
        """LIVE -> DOOMED, and on to FREE when nothing refers to it."""
        for entry in entries:
            self._order.gone(entry, evicted=evicted)
            self._timers.drop(entry)
            self._aside.pop(entry, None)
            self._areas.count(entry, -1)
            entry.state = SlotState.DOOMED
            if self._hazards:
                self._table.write_slot(entry)
        if self._hazards and entries:  # clients that look at these see that, or are seen here
            self._hazards.pass_barrier()
            self._settle()
        elif any(self._loans.has(entry) for entry in entries):
            self._settle()
        for entry in entries:
            if entry.state is SlotState.FREE:  # the last one that used it ended in this moment
                continue
            if entry.references:
                self._table.write_slot(entry)
            else:
                self._free(entry)

    def _settle(self) -> None:
        """Count a reference for each loan and hazard that began, and one less for each that is over."""
        if self._loans.any_known:
            for entry in self._loans.begun():
                self.acquire(entry)
            for entry in self._loans.ended():
                self.let_go(entry)
        if self._hazards:
            self._count_hazards()

    def _count_hazards(self, holder: Hashable = None) -> None:
        """Those of one holder, or of all."""
        begun, ended = self._hazards.settle(self._held, holder)
        for entry in begun:
            self.acquire(entry)
        for entry in ended:
            self.let_go(entry)

    def _free(self, held: ObjectEntry | Reservation) -> None:
        if isinstance(held, ObjectEntry):
            held.state = SlotState.FREE
        del self._held[held.slot]
        self._table.free_slot(held.slot)
        self._areas.free(held.offset - self.geometry.data_offset)

    # --- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `AssertionError` unless everything agrees with everything; linear, for tests."""
        self._check_extents()
        leases = Counter(map(id, self._leases.entries()))
        for number, held in self._held.items():
            assert held.slot == number
            if isinstance(held, ObjectEntry):
                assert held.references >= leases[id(held)]
                self._check_entry(held)
        entries = [held for held in self._held.values() if isinstance(held, ObjectEntry)]
        live = {entry.digest: entry.slot for entry in entries if entry.state is SlotState.LIVE}
        returned = [entry for entry in entries if entry.state is SlotState.RETURNED]
        assert {entry.digest: entry for entry in returned} == self._returned
        assert live == {digest: entry.slot for digest, entry in self._entries.items()}
        assert live == self._table.published()

    def _check_extents(self) -> None:
        """Extents cover the data area once, each belongs to something, and the sums are right."""
        position = 0
        taken: list[tuple[int, int]] = []
        for area in self._areas:
            assert position == area.allocator.begin
            extents = area.allocator.extents()
            for start, size in sorted(extents + area.allocator.free_extents()):
                assert start == position, "extents overlap or leave a hole"
                position += size
            taken += extents
        assert position == self.data_bytes
        base = self.geometry.data_offset
        entries = [held for held in self._held.values() if isinstance(held, ObjectEntry)]
        expected = [(entry.offset - base, entry.extent_bytes) for entry in entries]
        expected += [(held.offset - base, held.capacity) for held in self._reservations]
        for extent in self._in_making:
            expected.append((extent, self._areas.at(extent).allocator.size_of(extent)))
        assert sorted(expected) == sorted(taken)
        reserved = sum(held.capacity for held in self._reservations)
        referenced = sum(entry.extent_bytes for entry in entries if entry.references)
        evictable = sum(entry.extent_bytes for entry in entries if entry in self._order)
        queued = sorted(entry.offset for entry in entries if entry.rank is not None)
        assert queued == sorted(entry.offset for entry in self._order.coldest())
        if self._marks is not None:
            marked = {number for number, mark in enumerate(self._marks) if mark}
            assert marked == {entry.slot for entry in entries if entry.references}
        assert reserved == self._reservations.reserved_bytes
        assert referenced == self._referenced_bytes
        assert evictable == self._order.evictable_bytes()
        firm = sum(
            entry.extent_bytes for entry in self._order.coldest(cheap=False) if entry in self._order
        )
        assert evictable == firm + self._order.cheap_bytes
        assert sum(size for _, size in taken) == self.used_bytes

    def _check_entry(self, entry: ObjectEntry) -> None:
        """What is published of an entry says the same as the entry."""
        assert entry.state in (SlotState.LIVE, SlotState.RETURNED) or entry.references
        if entry not in self._aside:
            assert (entry in self._order) == (rank_of(entry) is not None)
        area = self._areas.at(entry.offset - self.geometry.data_offset)
        assert entry.group == area.group_of(entry.namespace)
        assert decode_slot(self.slot_bytes(entry)) == slot_of(entry)
        trailer = decode_trailer(self.trailer_bytes(entry))
        assert trailer is not None
        assert trailer_matches(trailer, slot_of(entry))
        assert (trailer.key, trailer.pin) == (entry.key, entry.pin)


def _groups_of(places: Places) -> tuple[int, ...]:
    """All that may be evicted in these places."""
    return tuple(group for place in places for group in place.groups)


_Filled = tuple[Reservation, ObjectEntry, bytes, bytes]
"""A reservation, the object in it, its packed trailer, and the digest of the block that it follows."""


def _filled(
    reservation: Reservation, written: Written, soft: bool, now: float
) -> tuple[ObjectEntry, bytes]:
    """The object in a reservation, and its packed trailer. Raises `ValueError` when they exceed what was reserved."""
    number, digest, version, trailer, length, _ = written
    packed = encode_trailer(trailer)
    end = (length + 7 & ~7) + len(packed)
    if not 0 <= length <= reservation.length or end > reservation.capacity:
        raise ValueError(
            f"{length:,} bytes and a trailer of {len(packed):,} exceed reservation {number}"
        )
    # Room for a time to live that a later put may give the object.
    size = min(-(-(end + EXPIRY_BYTES) // GRANULE_BYTES) * GRANULE_BYTES, reservation.capacity)
    place = reservation.slot, reservation.offset
    entry = _new_entry(*place, digest, version, trailer, length, len(packed), size, soft, now)
    return entry, packed


def _new_entry(
    slot: int,
    offset: int,
    digest: bytes,
    version: Version,
    trailer: TrailerBody,
    length: int,
    trailer_length: int,
    size: int,
    soft: bool,
    now: float,
) -> ObjectEntry:
    pin = PINS[max(Pin.NONE, min(trailer.pin, Pin.HARD))]  # a newer version's counts as hard
    return ObjectEntry(
        digest,
        version,
        slot,
        offset,
        length,
        trailer_length,
        size,
        trailer.namespace,
        trailer.key,
        trailer.expires_unix_ms,
        trailer.replicas,
        pin,
        now + SOFT_PIN_SECONDS if pin is Pin.SOFT else 0.0,
        soft,
        trailer.dtype,
        trailer.shape,
        now,
    )
