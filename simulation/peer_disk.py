"""A simulated peer's disk: its state directory, and what its SSD would hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pstore.core.operation import ColdObject, ColdSorted
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.memory.entries import Written
from p2pstore.memory.segment_layout import TrailerBody, decode_trailer, encode_trailer
from p2pstore.objects import Version, namespace_digest

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


@dataclass(slots=True)
class Persistent:
    """What a peer's state directory would hold."""

    incarnation: int = 0
    clock: int = 0
    floors_seen: Stamps = field(default_factory=dict)
    floors_horizon: Stamps = field(default_factory=dict)
    cluster_records: list[SignedRecord] = field(default_factory=list)
    addresses: list[tuple[PeerId, list[str]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ColdValue:
    """One object on the SSD."""

    version: Version
    trailer: TrailerBody
    value: bytes


class Disk:
    """Survives a crash. Floors are written some time after they are heard of, the rest now and then; the
    SSD holds what the memory held (as if everything were written through, and discarded at once)."""

    def __init__(self) -> None:
        self.state = Persistent()
        self.unwritten: list[SignedRecord] = []
        self.cold: dict[bytes, ColdValue] = {}
        self.returned = 0
        self.discarded = 0
        """Cold objects that turned out good, or not, so far."""

    def write_floors(self) -> None:
        """Records heard of since the last time."""
        self.state.cluster_records += self.unwritten
        self.unwritten = []

    def write_all(self, core: PeerCore) -> None:
        """Floors, then up to where they were seen and dropped, then the floors that are left: in the order
        in which a real peer writes."""
        self.write_floors()
        kept = core.gossip.cluster_records
        state = self.state
        state.clock, state.incarnation = core.clock.latest, core.incarnation
        state.floors_seen, state.floors_horizon = (
            core.earlier_life.seen_to_save,
            dict(kept.floors.horizon),
        )
        state.addresses = [(peer_id, list(book)) for peer_id, book in core.gossip.addresses.entries()]
        state.cluster_records = kept.dump()

    def write_memory(self, core: PeerCore) -> None:
        """The process ends: what it held is still on the SSD."""
        for entry in core.segment.entries():
            trailer = decode_trailer(core.segment.table.trailer_bytes(entry))
            if trailer is not None and not core.floors.sweep.forbids(entry):
                value = bytes(core.segment.payload(entry))
                self.cold[entry.digest] = ColdValue(entry.version, trailer, value)

    def cold_objects(self) -> list[ColdObject]:
        """What the SSD holds, as the core is told of it."""
        return [
            ColdObject(digest, namespace_digest(cold.trailer.namespace), cold.version)
            for digest, cold in self.cold.items()
        ]

    def bring_back(self, core: PeerCore, sorted_ones: ColdSorted, now: float) -> None:
        """Carry out what the core decided on cold objects: the good ones go to memory as far as there is
        room, and are announced."""
        self.returned += len(sorted_ones.good)
        self.discarded += len(sorted_ones.discarded)
        for cold in sorted_ones.discarded:
            self.cold.pop(cold.digest, None)
        for cold in sorted_ones.good:
            kept = self.cold.pop(cold.digest, None)
            newer = core.segment.find(cold.digest, core.unix(now))
            if kept is not None and newer is None:
                self._to_memory(core, cold.digest, kept, now)
        if sorted_ones.last:
            core.earlier_life.cold_settled()

    def _to_memory(self, core: PeerCore, digest: bytes, cold: ColdValue, now: float) -> None:
        trailer_bytes = len(encode_trailer(cold.trailer))
        try:
            reservation = core.segment.reserve(
                len(cold.value),
                trailer_bytes,
                session="ssd",
                now=core.unix(now),
                namespace=cold.trailer.namespace,
            )
        except P2PStoreError:
            return
        core.objects.announce_withdrawn(now)
        view = core.segment.reservation_view(reservation.number, session="ssd")
        view[: len(cold.value)] = cold.value
        try:
            core.objects.publish(
                Written(reservation.number, digest, cold.version, cold.trailer, len(cold.value)),
                session="ssd",
                soft=False,
                now=now,
            )
        except P2PStoreError:  # a floor that came in this very moment
            core.segment.abort(reservation.number, session="ssd")
