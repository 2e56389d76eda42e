"""Pulling copies that their writer wants kept here, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.core.copies.copy_destination import Room, RoomDestination
from p2pstore.core.core_effects import KnownCopy, PullOutcome, PullTogether
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import LocationRecord, PeerId, member_of
from p2pstore.memory.segment_layout import GRANULE_BYTES, round_up
from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.transfer.reading.arriving import Announced
from p2pstore.transfer.reading.small_reads import MOST_ITEMS, Part, Parts, part_slices
from p2pstore.transfer.transport import RemotePeer, pull_with_failover

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

PULLED_AT_ONCE: Final = 4
"""Requests of up to 16 MiB, or of one larger object, for which there is room at the same time."""
MAPPED_BYTES: Final = 32 * KIB
"""Up to here a value takes less time over a connection, together with others, than out of mapped memory, alone."""
NO_WRITER: Final = -1
"""Nobody's hash: only the announced version will do."""


class TakenCopies:
    """Carries out `PullTogether`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limiter = trio.CapacityLimiter(PULLED_AT_ONCE)

    async def take(self, effect: PullTogether) -> None:
        """Bring what is wanted of these objects to memory."""
        node, copies = self._node, effect.copies
        async with self._limiter:
            try:
                await take_turns(copies.reserve(node.now))
                begin = node.now
                brought = await self._pull(effect.holder, copies.rooms)
                lengths = [room.slot.length for room in copies.rooms if room.place in brought]
                failures = len(copies.rooms) - len(brought)
                node.watch.pulled_together(effect.holder, lengths, failures, node.now - begin)
                copies.publish(brought, node.now)
            finally:
                copies.abort()
        node.core.operations.pulled(effect.operation, PullOutcome(delivered=True), node.now)
        node.process()

    async def _pull(self, holder: PeerId, rooms: Sequence[Room]) -> set[int]:
        """The places of what came whole, verified. Those of one chunk come together; one by one the others, what the
        holder was too busy for, and what is copied out of the memory of a holder on the same host."""
        brought = {room.place for room in rooms if not room.slot.length}
        most_bytes = self._most_bytes_together(holder)
        small = [room for room in rooms if 0 < room.slot.length <= most_bytes]
        if small:
            brought |= await self._pull_small(holder, small)
        for room in rooms:
            if room.place not in brought and await self._pull_one(holder, room):
                brought.add(room.place)
        return brought

    def _most_bytes_together(self, holder: PeerId) -> int:
        node, record = self._node, self._node.record_of(holder)
        if node.config.transport not in ("auto", "tcp"):
            return 0
        is_near = record is not None and record.host_id == node.host_id
        return MAPPED_BYTES if is_near and node.config.transport == "auto" else CHUNK_BYTES

    async def _pull_small(self, holder: PeerId, rooms: Sequence[Room]) -> set[int]:
        slots = [room.slot for room in rooms]
        parts = _parts(
            Part(
                [slot.digest for slot in slots],
                [room.view for room in rooms],
                max(slot.length for slot in slots),
                [slot.version for slot in slots],
            )
        )
        data = self._node.remote_peer(holder).data
        peer = RemotePeer(holder, data, announced=Announced(NO_WRITER))
        lengths, _ = await self._node.pool.pull_small_parts(peer, parts)
        return {
            room.place
            for room, length in zip(rooms, lengths, strict=False)
            if length == room.slot.length
        }

    async def _pull_one(self, holder: PeerId, room: Room) -> bool:
        slot = room.slot
        units = min(round_up(slot.length, GRANULE_BYTES) // GRANULE_BYTES, 0xFFFFFF)
        record = LocationRecord(slot.digest, slot.version, 0, units)
        copy = KnownCopy(member_of(holder), holder, record, reachable=True)
        try:
            report = await pull_with_failover(
                [self._node.remote_copy(copy)],
                self._node.transports,
                slot.digest,
                RoomDestination(room),
            )
        except (P2PStoreError, ValueError):
            return False
        return report.pulled is not None


def _parts(everything: Part) -> Parts:
    """As few requests as it takes: the holder answers other requests at the same time."""
    digests, views, most_bytes, versions = everything
    slices = part_slices(views, most_bytes, MOST_ITEMS)
    parts = [Part(digests[some], views[some], most_bytes, versions[some]) for some in slices]
    return lambda: iter([[part] for part in parts])
