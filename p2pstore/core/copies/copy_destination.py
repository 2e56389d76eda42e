"""Where a copy pulled from another peer goes: into this peer's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.version_proofs import MAX_PROOF_BYTES, read_proof
from p2pstore.memory.entries import Written
from p2pstore.memory.segment import ObjectEntry
from p2pstore.memory.segment_layout import (
    EXPIRY_BYTES,
    MAX_TRAILER_BYTES,
    Slot,
    TrailerBody,
    encode_trailer,
)
from p2pstore.objects import key_digest, namespace_digest
from p2pstore.transfer.transfer_trace import ReadWatch

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


PROOF_BYTES: Final = MAX_PROOF_BYTES + 8
"""A trailer grows by up to so many when a proof comes after the copy."""


class CopyDestination:
    """Receives a copy into the peer's memory: a reservation that becomes an object, or nothing.

    Satisfies `p2pstore.transfer.transport.Destination`. A holder may be tried after another failed: for the same
    version `prepare` gives the same room, with what is in it.
    """

    def __init__(self, core: PeerCore, operation: FetchOperation, now: float) -> None:
        self._core = core
        self._operation = operation
        self._now = now
        self._holder = ("fetch", operation.number)
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
                holder=self._holder,
                now=self._core.unix(self._now),
                namespace=trailer.namespace,
            )
            self._reservation, self._trailer_length = reservation.number, trailer_length
            self._core.objects.announce_withdrawn(self._now)
        self._slot, self._trailer = slot, trailer
        assert self._reservation is not None
        return self._core.segment.reservation_view(self._reservation, holder=self._holder)

    def describe(self, trailer: TrailerBody) -> None:
        """Have the object's trailer say this, when `prepare` could not know all of it. Raises `ValueError` when there
        is no room for that much."""
        needed = len(encode_trailer(trailer))
        if needed > self._trailer_length:
            raise ValueError(f"a trailer of {needed:,} bytes, where {self._trailer_length:,} fit")
        self._trailer = trailer

    @property
    def pages(self) -> memoryview:
        """What `prepare` gave, up to the end of its last page: what reads the SSD writes whole pages."""
        assert self._reservation is not None
        return self._core.segment.reservation_room(self._reservation, holder=self._holder)

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
            raise NoSuchKey(
                "the holder's version is from over 10 s in the future: check the clocks"
            )
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
            core.segment.abort(number, holder=self._holder)
            return existing
        if core.floors.distrusts(self._operation, slot.version):
            core.segment.abort(number, holder=self._holder)
            return None
        trailer = replace(trailer, proof=self._good_proof(slot, trailer))
        core.gossip.directory.touch(slot.digest)  # a newer version may be known by now
        try:
            entry = core.objects.publish(
                Written(number, slot.digest, slot.version, trailer, slot.length),
                holder=self._holder,
                soft=self._operation.soft,
                now=now,
            )
        except NoSuchKey:
            core.segment.abort(number, holder=self._holder)
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
        """Give the room back."""
        if self._reservation is not None:
            self._core.segment.abort(self._reservation, holder=self._holder)
            self._reservation = None
