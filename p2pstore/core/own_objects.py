"""The objects that this peer holds: published, changed and withdrawn with what is announced of them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.own_copies import are_kept_elsewhere
from p2pstore.errors import CapacityExceeded, NoSuchKey, ObjectTooLarge
from p2pstore.gossip.records import LocationRecord, Tier, care_flags
from p2pstore.memory.entries import ObjectEntry, Reservation, SmallObjectsLent, Written
from p2pstore.memory.references import Loan
from p2pstore.memory.segment_layout import GRANULE_BYTES, MAX_TRAILER_BYTES, Pin
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS
from p2pstore.objects import CHUNK_BYTES, Version, chunk_count, size_units
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.data_messages import MAX_SMALL_BULK_BYTES
from p2pstore.transfer.peer_messages import KeyInfo

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.ssd_tier.index import ColdEntry

_PACK_LOCATION: Final = struct.Struct("<16sQHQII").pack
"""`LOCATION`, with size and flags as one number."""
SUM_BYTES: Final = 8
USUAL_TRAILER_BYTES: Final = 2_048
"""Upper bound of a usual trailer without its chunk sums."""


class OwnObjects:
    """Changes the segment and tells gossip and the SSD tier of each change. `now` is monotonic seconds."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._gossip = core.gossip
        self._segment = core.segment
        core.segment.room.ask_who_keeps(lambda entries, _: are_kept_elsewhere(core, entries))

    def reserve(
        self,
        length: int,
        trailer_length: int,
        *,
        session: Hashable,
        namespace: str,
        now: float,
        alike: int = 1,
    ) -> Steps[Reservation]:
        """`Segment.reserve_in_steps`, which announces with each step what went for it."""
        self._core.books.settle()
        steps = self._segment.reserve_in_steps(
            length,
            trailer_length,
            session=session,
            now=self._core.unix(now),
            namespace=namespace,
            alike=alike,
        )
        with closing(steps):
            try:
                while True:
                    next(steps)
                    self.announce_withdrawn(now)
                    yield
            except StopIteration as end:
                reservation: Reservation = end.value
                return reservation
            finally:
                self.announce_withdrawn(now)

    def make_room(self, length: int, namespace: str, now: float) -> Steps[None]:
        """Evict for a value of about `length` bytes, if needed and enough may be evicted. The room is not reserved."""
        trailer_length = min(MAX_TRAILER_BYTES, SUM_BYTES * chunk_count(length) + USUAL_TRAILER_BYTES)
        if self._segment.room.has_room(length, trailer_length, namespace=namespace):
            return
        session = object()
        with suppress(CapacityExceeded, ObjectTooLarge):
            room = yield from self.reserve(
                length, trailer_length, session=session, namespace=namespace, now=now
            )
            self._segment.abort(room.number, session=session)

    def publish(self, written: Written, *, session: Hashable, soft: bool, now: float) -> ObjectEntry:
        """Make a filled reservation an object, and announce it. Raises `NoSuchKey` when a floor forbids the version."""
        digest, version, trailer = written.digest, written.version, written.trailer
        namespace = self._core.namespace_digest(trailer.namespace)
        if self._gossip.cluster_records.floors.forbids(digest, namespace, version):
            raise NoSuchKey("the object was removed, or replaced by a newer version, meanwhile")
        entry = self._segment.commit(written, session=session, soft=soft, now=self._core.unix(now))
        self._core.cold.came_to_memory(entry)
        self.announce_withdrawn(now)
        self.announce(entry, now)
        if self._core.is_own(version):
            self._core.proofs.wrote([digest])
        elif not trailer.proof:
            self._core.proofs.lacks(digest, now)
        self._core.counters["objects_published"] += 1
        return entry

    def announce_withdrawn(self, now: float) -> None:
        """Say where that is now which the segment evicted, expired or replaced."""
        withdrawn = self._segment.objects.take_withdrawn()
        if withdrawn:
            self._core.books.keep(partial(self._core.cold.left_memory, withdrawn, now))
        if self._core.cold.store is not None:
            self._core.write_back.memory_taken(now)

    def announce(self, entry: ObjectEntry, now: float) -> None:
        """Tell the others what this peer now says of an object it holds."""
        self._gossip.hold(location_of(entry), now)
        self._core.operations.tell_waiting([entry.digest], now)

    def strengthen(self, entry: ObjectEntry, pin: int, replicas: int, now: float) -> None:
        """A second put of the same bytes may pin more firmly and ask for more copies, never less."""
        if pin > entry.pin or replicas > entry.replicas or entry.soft:
            self._segment.objects.strengthen(
                entry,
                pin=Pin(max(pin, entry.pin)),
                replicas=max(replicas, entry.replicas),
                now=self._core.unix(now),
            )
            self.announce(entry, now)

    def set_pin(
        self, entry: ObjectEntry, pin: Pin, soft_seconds: float, now: float, *, firm: bool = False
    ) -> None:
        """Pin or unpin a copy that is here. With `firm`, one that is pinned is no soft copy any more: those are kept
        for speed alone, pinned or not."""
        if firm and pin is not Pin.NONE and entry.soft:
            self._segment.objects.strengthen(
                entry, pin=pin, replicas=entry.replicas, now=self._core.unix(now)
            )
        ends = self._core.unix(now) + (soft_seconds or SOFT_PIN_SECONDS)
        self._segment.objects.set_pin(entry, pin, ends if pin is Pin.SOFT else 0.0)
        self.announce(entry, now)

    def set_expiry(self, digest: bytes, version: Version, expires_unix_ms: int, now: float) -> bool:
        """Change when the copies of that version that are here end, in memory and on the SSD. Whether there is one."""
        entry = self.find(digest, now)
        here = entry is not None and entry.version[:2] == version[:2]
        if entry is not None and here:
            self._segment.objects.set_expiry(entry, expires_unix_ms)
            version = entry.version
        elif (cold := self._core.cold.find(digest, now)) is not None and cold.version[:2] == version[:2]:
            version = cold.version
        return self._core.cold.set_expiry(digest, version, expires_unix_ms, now) or here

    def withdraw(self, entry: ObjectEntry, now: float) -> None:
        """This peer no longer holds the object: it was removed, replaced, or is not to be trusted."""
        self._gossip.release(entry.digest, entry.version, now)  # the location first, then the bytes
        self._segment.remove(entry.digest)
        self._core.cold.discard(entry.digest, entry.version, now)
        self._core.counters["objects_removed"] += 1

    def forbids(self, entry: ObjectEntry) -> bool:
        """Whether a floor forbids an object that is here (and will be withdrawn in a moment)."""
        namespace = self._core.namespace_digest(entry.namespace)
        return self._gossip.cluster_records.floors.forbids(entry.digest, namespace, entry.version)

    def find(self, digest: bytes, now: float) -> ObjectEntry | None:
        """The object here that may be served: while a sweep is under way, some may not."""
        entry = self._segment.find(digest, self._core.unix(now))
        if entry is not None and self._core.floors.sweep.forbids(entry):
            return None
        return entry

    def lend(self, digest: bytes, now: float, *, decides: bool) -> tuple[Loan, ObjectEntry] | None:
        """`ObjectLeases.lend` of an object that may be served, for any thread. None when this takes more than a look,
        for a thread that is not the one that `decides`."""
        if self._core.floors.sweep.pending and not (decides and self.find(digest, now)):
            return None
        return self._segment.leases.lend(digest, self._core.unix(now))

    def lend_small(
        self,
        digests: bytes,
        most_bytes: int,
        now: float,
        declines: Callable[[ObjectEntry], bool] | None = None,
    ) -> SmallObjectsLent | None:
        """`ObjectLeases.lend_small` of the objects that a GET_SMALL asks for, for any thread. None when this takes
        more than a look."""
        if self._core.floors.sweep.pending:
            return None
        most_bytes = min(most_bytes, CHUNK_BYTES)
        return self._segment.leases.lend_small(
            digests, most_bytes, MAX_SMALL_BULK_BYTES, self._core.unix(now), declines
        )

    def drop_spoilt(self, entry: ObjectEntry, now: float) -> None:
        """Give up an object in memory whose bytes no longer give its root. Other holders serve it, or the SSD."""
        self._core.counters["objects_spoilt"] += 1
        if self._segment.find(entry.digest, self._core.unix(now)) is entry:
            self._segment.remove(entry.digest)
            self._core.cold.left_memory([entry], now)

    def renew_version(self, entry: ObjectEntry, clock: int, now: float) -> None:
        """Stamp an object anew whose stamp other peers refuse, and announce it: see `Timekeeping`. The object goes if
        the new stamp is forbidden, or if others have a newer version by now."""
        self._restamp(entry, Version(clock, entry.version.writer, entry.version.root), now)

    def adopt(self, entry: ObjectEntry, now: float) -> None:
        """Stand in as the writer of a copy that no peer can prove any more. It keeps its stamp, so that floors still
        forbid it and newer versions stay newer."""
        self._core.counters["copies_adopted"] += 1
        version = entry.version
        self._restamp(entry, Version(version.clock, self._core.writer, version.root), now)
        self._core.proofs.wrote([entry.digest])

    def _restamp(self, entry: ObjectEntry, version: Version, now: float) -> None:
        old = entry.version
        self._gossip.release(entry.digest, old, now)
        self._segment.objects.renew_version(entry, version)
        if self._core.cold.store is not None:
            self._core.cold.store.discard(entry.digest, old)
        if self.forbids(entry):
            self.withdraw(entry, now)
            return
        self.announce(entry, now)
        self._gossip.directory.watched.touch(entry.digest)


def location_of(held: ObjectEntry | ColdEntry) -> LocationRecord:
    """The location record of an object in memory, or on the SSD alone."""
    return LocationRecord(
        held.digest,
        held.version,
        held.slot if isinstance(held, ObjectEntry) else 0,
        size_units(held.length),
        tier=_tier_of(held),
        soft=held.soft,
        replicas=held.replicas,
        pin=held.pin,
    )


def packed_locations(entries: Sequence[ObjectEntry]) -> list[bytes]:
    """`location_of` each, packed: of new objects, which are firm and in memory alone."""
    pack = _PACK_LOCATION
    return [
        pack(
            entry.digest,
            clock,
            writer,
            root,
            entry.slot,
            -(-entry.length // GRANULE_BYTES)
            | (care_flags(entry.replicas, entry.pin) << 24 if entry.replicas != 1 or entry.pin else 0),
        )
        for entry in entries
        for clock, writer, root in [entry.version]
    ]


def key_info(entry: ObjectEntry | ColdEntry) -> KeyInfo:
    """An object as `ls` shows it."""
    return KeyInfo(
        entry.key,
        entry.length,
        entry.version.clock,
        entry.version.writer,
        int(_tier_of(entry)),
        entry.pin,
        entry.soft,
        entry.expires_unix_ms,
        isinstance(entry, ObjectEntry) and entry.references > 0,
    )


def _tier_of(entry: ObjectEntry | ColdEntry) -> Tier:
    if not isinstance(entry, ObjectEntry):
        return Tier.SSD
    return Tier.BOTH if entry.on_ssd else Tier.DRAM
