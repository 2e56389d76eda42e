"""Where a copy pulled from another peer goes: into this peer's memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from p2pstore.core.copies.proofs import MAX_PROOF_BYTES, read_proof, signed_proofs
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.operation import Operation, PullOutcome
from p2pstore.core.puts.publishing import announce_new, new_here, reserve_many
from p2pstore.errors import NoSuchKey, ProtocolError
from p2pstore.gossip.records import PeerId, member_of, writer_of
from p2pstore.memory.entries import ObjectEntry, Reservation, Written
from p2pstore.memory.segment_layout import (
    EXPIRY_BYTES,
    MAX_TRAILER_BYTES,
    SLOT_BYTES,
    Slot,
    TrailerBody,
    digests_in_slots,
    encode_trailer,
)
from p2pstore.objects import ZERO_VERSION, key_digest, namespace_digest
from p2pstore.put_facts import MAX_REPLICAS
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.peer_messages import ReplicatedMany, ReplicateMany
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import check_object
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PROOF_BYTES: Final = MAX_PROOF_BYTES + 8
"""Bytes by which a trailer may grow when the proof arrives after the copy."""


class CopyDestination:
    """Receives a copy into the peer's memory. Satisfies `p2pstore.transfer.transport.Destination`: after a holder
    failed, `prepare` for the same version gives the same room, with what is in it."""

    def __init__(self, core: PeerCore, operation: FetchOperation, now: float) -> None:
        self._core = core
        self._operation = operation
        self._now = now
        self._session = ("fetch", operation.number)
        self._reservation: int | None = None
        self._slot: Slot | None = None
        self._trailer: TrailerBody | None = None
        self._trailer_length = 0
        self.watch: ReadWatch | None = None
        """Is told where the time of a read goes."""

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """Room for the payload. Raises `CapacityExceeded`, or `NoSuchKey` for a version that is too old."""
        try:
            trailer_length = self._check(slot, trailer)
        except BaseException:
            self.abort()
            raise
        if not self._has_room_for(slot, trailer_length):
            self.abort()
            reservation = self._core.segment.reserve(
                slot.length,
                trailer_length,
                session=self._session,
                now=self._core.unix(self._now),
                namespace=trailer.namespace,
            )
            self._reservation, self._trailer_length = reservation.number, trailer_length
            self._core.objects.announce_withdrawn(self._now)
        self._slot, self._trailer = slot, trailer
        assert self._reservation is not None
        return self._core.segment.reservation_view(self._reservation, session=self._session)

    def describe(self, trailer: TrailerBody) -> None:
        """Have the trailer say this, which `prepare` did not know. Raises `ValueError` where it does not fit."""
        needed = len(encode_trailer(trailer))
        if needed > self._trailer_length:
            raise ValueError(f"a trailer of {needed:,} bytes, where {self._trailer_length:,} fit")
        self._trailer = trailer

    @property
    def pages(self) -> memoryview:
        """The memory reserved by `prepare`, up to the end of its last page: SSD reads fill whole pages."""
        assert self._reservation is not None
        return self._core.segment.reservation_room(self._reservation, session=self._session)

    def _has_room_for(self, slot: Slot, trailer_length: int) -> bool:
        """Whether what is reserved is for that very version."""
        mine = self._slot
        return (
            self._reservation is not None
            and mine is not None
            and (mine.version, mine.length) == (slot.version, slot.length)
            and self._trailer_length == trailer_length
        )

    def _check(self, slot: Slot, trailer: TrailerBody) -> int:
        """The bytes that its trailer will need here. Raises `NoSuchKey` for what is not wanted."""
        wanted = self._operation.minimum
        if not slot.version.covers(wanted):
            raise NoSuchKey("the holder has only an older version")
        try:
            digest = key_digest(trailer.key, trailer.namespace)
            # Written anew here, the trailer has fields that an older holder's version did not know.
            trailer_length = max(slot.trailer_length, len(encode_trailer(trailer)))
            trailer_length += EXPIRY_BYTES + (0 if trailer.proof else PROOF_BYTES)
            trailer_length = min(trailer_length, MAX_TRAILER_BYTES)
        except ValueError as error:
            raise NoSuchKey(f"the holder's object makes no sense: {error}") from error
        if digest != slot.digest:
            raise NoSuchKey("the holder has another key's object under this digest")
        core = self._core
        if not core.clock.observe(slot.version.clock, core.believed_unix(self._now)):
            raise NoSuchKey("the holder's version is from over 10 s in the future: check the clocks")
        forbidden = core.gossip.cluster_records.floors.forbids(
            slot.digest, namespace_digest(trailer.namespace), slot.version
        )
        if forbidden:
            raise NoSuchKey("the object was removed, or replaced by a newer version")
        return trailer_length

    def commit(self, now: float) -> ObjectEntry | None:
        """Publish what was received and verified. None when it was removed meanwhile."""
        number, slot, trailer = self._reservation, self._slot, self._trailer
        if number is None or slot is None or trailer is None:
            raise RuntimeError("commit without prepare")
        self._reservation = None
        core = self._core
        existing = core.segment.find(slot.digest, core.unix(now))
        if existing is not None and existing.version.covers(slot.version):
            core.segment.abort(number, session=self._session)
            return existing
        if core.earlier_life.distrusts(self._operation, slot.version):
            core.segment.abort(number, session=self._session)
            return None
        trailer = replace(trailer, proof=self._good_proof(slot, trailer))
        core.gossip.directory.watched.touch(slot.digest)  # a newer version may be known by now
        try:
            entry = core.objects.publish(
                Written(number, slot.digest, slot.version, trailer, slot.length),
                session=self._session,
                soft=self._operation.soft,
                now=now,
            )
        except NoSuchKey:
            core.segment.abort(number, session=self._session)
            return None
        entry.verified |= entry.version == slot.version
        return entry

    def _good_proof(self, slot: Slot, trailer: TrailerBody) -> bytes:
        """The proof that stays beside the copy, of those that came along; empty where none is good."""
        given = self._operation.proof  # its writer's, or checked
        promised = slot.version == self._operation.minimum  # else that is of what this replaced
        if promised and given and read_proof(given, slot.digest, slot.version) is not None:
            return given
        if trailer.proof and self._core.proofs.accept(slot.digest, slot.version, trailer.proof):
            return trailer.proof
        return b""

    def abort(self) -> None:
        if self._reservation is not None:
            self._core.segment.abort(self._reservation, session=self._session)
            self._reservation = None


HELD: Final = 0
"""In place of a code: the object is here."""


class WantedCopy(NamedTuple):
    """An object of which a copy is wanted: its slot at its writer, and its trailer, with the writer's proof."""

    slot: Slot
    trailer: TrailerBody


class ReservedCopy(NamedTuple):
    """Where the bytes of an object go, which are to be those of this slot. `place`: in the message. `sums`: of its
    chunks, packed."""

    place: int
    slot: Slot
    view: memoryview
    sums: bytes


class RoomDestination:
    """Takes the one version of an object for which there is room."""

    def __init__(self, room: ReservedCopy) -> None:
        self._room = room

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """The room. Raises `NoSuchKey` for another version."""
        wanted = self._room.slot
        if (slot.version, slot.length) != (wanted.version, wanted.length):
            raise NoSuchKey("the holder has another version than the one to be copied")
        return self._room.view


def read_copies(core: PeerCore, sender: PeerId, request: ReplicateMany) -> list[WantedCopy]:
    """The objects that the sender wants copied. Raises `ProtocolError` for a request that no correct writer sends."""
    count = len(request.trailers)
    if not count or len(request.slots) != count * SLOT_BYTES:
        raise ProtocolError("a request to replicate with slots of another size")
    writer = writer_of(sender)
    found: list[tuple[Slot, TrailerBody]] = []
    rows = [request.slots[at : at + SLOT_BYTES] for at in range(0, count * SLOT_BYTES, SLOT_BYTES)]
    for row, packed, digest in zip(rows, request.trailers, digests_in_slots(request.slots), strict=True):
        try:
            found.append(check_object(row, packed, digest))
        except PullFailed as error:
            raise ProtocolError(f"a request to replicate: {error}") from error
    namespace = found[0][1].namespace
    try:
        digests = core.digests_of(namespace, [trailer.key for _, trailer in found])
    except ValueError as error:
        raise ProtocolError(f"a request to replicate: {error}") from error
    if len(set(digests)) < count:
        raise ProtocolError("a request to replicate that names an object twice")
    for (slot, trailer), digest in zip(found, digests, strict=True):
        if slot.digest != digest or trailer.namespace != namespace:
            raise ProtocolError("a request to replicate objects under other keys' digests")
        if slot.version.writer != writer:
            raise ProtocolError("a request to replicate what the sender did not write")
    versions = [(slot.digest, slot.version) for slot, _ in found]
    try:
        proofs = signed_proofs(versions, sender, request.signatures)
    except ValueError as error:
        raise ProtocolError(f"a request to replicate: {error}") from error
    return [
        WantedCopy(slot, replace(trailer, proof=proof))
        for (slot, trailer), proof in zip(found, proofs, strict=True)
    ]


class CopiesDestination:
    """Takes copies into the peer's memory; `codes` says of each whether it is here, or why not. The shell goes through
    `reserve`, brings what `rooms` names, goes through `publish`, and calls `abort` in any case."""

    def __init__(
        self, core: PeerCore, operation: Operation, sender: PeerId, wanted_copies: Sequence[WantedCopy]
    ) -> None:
        self._core = core
        self._operation = operation
        self._sender = sender
        self._wanted_copies = wanted_copies
        self._session = operation
        self._reservations: dict[int, Reservation] = {}
        self.codes = [int(Code.UNAVAILABLE)] * len(wanted_copies)
        self.rooms: list[ReservedCopy] = []

    def reserve(self, now: float) -> Steps[None]:
        """Decide which of them are to be pulled, and reserve room for these."""
        core = self._core
        doubted = core.gossip.doubted_up_to(member_of(self._sender), now)
        wanted: list[int] = []
        new = self._wanted_for_certain(doubted, now)
        for place, copy in enumerate(self._wanted_copies):
            code = None if copy.slot.digest in new else self._code_of(copy, doubted, now)
            if code is None:
                wanted.append(place)
            else:
                self.codes[place] = code
        namespace, sizes = self._wanted_copies[0].trailer.namespace, map(self._size_of, wanted)
        rooms = [(*size, sum(1 for _ in alike)) for size, alike in groupby(sizes)]
        yield
        made = yield from reserve_many(core, rooms, session=self._session, namespace=namespace, now=now)
        for place, reserved in zip(wanted, made, strict=True):
            if isinstance(reserved, Exception):
                self.codes[place] = int(Code.CAPACITY_EXCEEDED)
            else:
                self._reserved(place, reserved)

    def _wanted_for_certain(self, doubted: int, now: float) -> set[bytes]:
        """Digests of which nothing is here and nothing is in the way: nearly all, found in one look."""
        core, slots = self._core, [copy.slot for copy in self._wanted_copies]
        versions = [slot.version for slot in slots]
        oldest, newest = min(versions), max(versions)
        fit = max(slot.length for slot in slots) <= core.segment.data_bytes > 0
        if oldest.clock <= doubted or not fit:
            return set()
        if not core.clock.observe(newest.clock, core.believed_unix(now)):
            return set()
        new = new_here(core, [slot.digest for slot in slots])
        namespace = core.namespace_digest(self._wanted_copies[0].trailer.namespace)
        return new - core.gossip.cluster_records.floors.forbidden(new, namespace, oldest)

    def _code_of(self, copy: WantedCopy, doubted: int, now: float) -> int | None:
        """The answer where nothing is to be pulled. Cases:

        1. The sender may not have heard that it was removed, or its clock is ahead of all others'.
        2. It was removed, or replaced by a newer version.
        3. That version or a newer one is here, in memory or on the SSD.
        4. It could never fit.
        """
        core, version, slot = self._core, copy.slot.version, copy.slot
        digest, trailer = slot.digest, copy.trailer
        if version.clock <= doubted or not core.clock.observe(version.clock, core.believed_unix(now)):
            return int(Code.UNAVAILABLE)
        namespace = core.namespace_digest(trailer.namespace)
        if core.gossip.cluster_records.floors.forbids(digest, namespace, version):
            return int(Code.NO_SUCH_KEY)
        entry = core.objects.find(digest, now)
        if entry is not None and entry.version.covers(version):
            if version.covers(entry.version):
                wanted = max(entry.replicas, min(trailer.replicas, MAX_REPLICAS))
                core.objects.strengthen(entry, entry.pin, wanted, now)
            return HELD
        cold = core.cold.find(digest, now) if entry is None else None
        if cold is not None and cold.version.covers(version) and not cold.soft:
            return HELD
        if slot.length > core.segment.data_bytes or not core.segment.data_bytes:
            return int(Code.CAPACITY_EXCEEDED)
        return None

    def _size_of(self, place: int) -> tuple[int, int]:
        slot = self._wanted_copies[place].slot
        trailer_bytes = slot.trailer_length + EXPIRY_BYTES + PROOF_BYTES
        return slot.length, min(trailer_bytes, MAX_TRAILER_BYTES)

    def _reserved(self, place: int, reservation: Reservation) -> None:
        self._reservations[place] = reservation
        slot, trailer = self._wanted_copies[place]
        view = self._core.segment.reservation_view(reservation.number, session=self._session)
        self.rooms.append(ReservedCopy(place, slot, view, trailer.sums))

    def publish(self, brought: Collection[int], now: float) -> None:
        """Publish those, by their places, whose bytes are in their rooms and were verified. Raises nothing."""
        core, floors = self._core, self._core.gossip.cluster_records.floors
        namespace = core.namespace_digest(self._wanted_copies[0].trailer.namespace)
        new: list[tuple[int, Written]] = []
        places = sorted(self._reservations.keys() & set(brought))
        slots = [self._wanted_copies[place].slot for place in places]
        unknown = new_here(core, [slot.digest for slot in slots])
        oldest = min((slot.version for slot in slots), default=ZERO_VERSION)
        doubtful = floors.forbidden(unknown, namespace, oldest)
        for place in places:
            slot, trailer = self._wanted_copies[place]
            if core.earlier_life.distrusts(self._operation, slot.version):
                continue
            number = self._reservations[place].number
            row = Written(number, slot.digest, slot.version, trailer, slot.length)
            if slot.digest not in unknown:  # an older version, or one that came meanwhile
                self._publish_one(place, row, now)
            elif slot.digest not in doubtful or not floors.forbids(slot.digest, namespace, slot.version):
                new.append((place, row))
        self._publish_new(new, now)

    def _publish_one(self, place: int, row: Written, now: float) -> None:
        existing = self._core.objects.find(row.digest, now)
        if existing is not None and existing.version.covers(row.version):
            self.codes[place] = HELD
            return
        self._core.gossip.directory.watched.touch(row.digest)
        try:
            entry = self._core.objects.publish(row, session=self._session, soft=False, now=now)
        except (NoSuchKey, ValueError):
            return
        del self._reservations[place]
        self.codes[place] = HELD
        entry.verified |= entry.version == row.version

    def _publish_new(self, rows: Sequence[tuple[int, Written]], now: float) -> None:
        core = self._core
        known = core.gossip.directory.mentioned({row.digest for _, row in rows})
        written = [row for _, row in rows]
        entries = core.segment.commit_new(
            written, session=self._session, now=core.unix(now), keep=core.books.keep
        )
        for (place, _), entry in zip(rows, entries, strict=True):
            if entry is None:
                continue
            del self._reservations[place]
            self.codes[place] = HELD
            entry.verified = True
            if entry.digest in known:  # a newer version may be, by now
                core.gossip.directory.watched.touch(entry.digest)
        published = [entry for entry in entries if entry is not None]
        core.books.keep(partial(announce_new, core, published, now))

    def abort(self) -> None:
        """Give back all room that holds no object."""
        if self._reservations:
            self._core.books.settle()
        for reservation in self._reservations.values():
            self._core.segment.abort(reservation.number, session=self._session)
        self._reservations.clear()
        self.rooms.clear()


class TakeCopiesOperation(Operation):
    """Take copies that their writer asks for. The task that serves the request goes through `copies`, and then calls
    `pulled`, or cancels the operation. The result is `ReplicatedMany`."""

    def __init__(self, core: PeerCore, sender: PeerId, wanted_copies: Sequence[WantedCopy]) -> None:
        super().__init__(core)
        self.sender = sender
        self.copies = CopiesDestination(core, self, sender, wanted_copies)

    def start(self, now: float) -> None:
        """The task begins."""

    def pulled(self, outcome: PullOutcome, now: float) -> None:
        self.finish(ReplicatedMany(bytes(self.copies.codes)), now)
