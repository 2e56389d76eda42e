"""Requests to other peers over data connections: questions, pulls of objects, snapshots of logs. Shell."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.core.copies.copy_destination import ReservedCopy, RoomDestination, TakeCopiesOperation
from p2pstore.core.copies.replicate import WINDOW_BYTES
from p2pstore.core.operation import AskPeer, KnownCopy, PullObject, PullOutcome, Reply
from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    NoSuchKey,
    P2PStoreError,
    ProtocolError,
    Unavailable,
)
from p2pstore.gossip.gossip_messages import FetchSnapshot, SnapshotHead
from p2pstore.gossip.locations.snapshots import CheckedSnapshot, check_snapshot
from p2pstore.gossip.records import LocationRecord, PeerId, member_of
from p2pstore.memory.segment_layout import Slot
from p2pstore.objects import CHUNK_BYTES, MAX_OBJECT_BYTES, SIZE_UNIT_BYTES, Announced, size_units
from p2pstore.runtime.side_by_side import threads_for
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.transfer.data_messages import DataKind, Keeps
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.peer_messages import Snapshot, SnapshotReply
from p2pstore.transfer.reading.shm_transport import copy_spots
from p2pstore.transfer.reading.small_reads import MAX_ITEMS, Part
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import PullReport, RemoteCopy, RemotePeer, pull_with_failover
from p2pstore.wire import Code, Failure, code_of

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

MAX_REQUESTS_UNDER_WAY: Final = 512
PULLED_AT_ONCE: Final = 4
"""Requests of up to 32 MiB, or of one larger object, for which there is room at the same time."""
MAX_IN_TURNS: Final = 2
"""Threads that gain less than the wait for the interpreter costs."""
NO_WRITER: Final = -1
"""The hash of no writer: only the announced version will do."""
_SILENT: Final = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)


class TakenCopies:
    """Carries out `TakeCopiesOperation`, in the task that serves the request."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limiter = trio.CapacityLimiter(PULLED_AT_ONCE)

    async def take(self, operation: TakeCopiesOperation) -> None:
        """Bring what is wanted of these objects to memory. Cancelled, or after an error, nothing of it stays. Leaves
        books, and effects, for when the answer was sent."""
        node, copies, sender = self._node, operation.copies, operation.sender
        try:
            if not self._limiter.available_tokens:  # else it would cost a turn of the event loop
                await self._limiter.acquire()
            else:
                self._limiter.acquire_nowait()
            try:
                await take_turns(copies.reserve(node.now))
                begin = node.now
                brought = await self._pull(sender, copies.rooms)
                came = Counter(
                    (by, room.slot.length) for room in copies.rooms if (by := brought.get(room.place))
                )
                failures = len(copies.rooms) - len(brought)
                node.watch.pulled_together(sender, came, failures, node.now - begin)
                node.core.books.late = True
                copies.publish(brought, node.now)
            finally:
                node.core.books.late = False
                copies.abort()
                self._limiter.release()
            node.core.operations.pulled(operation.number, PullOutcome(delivered=True), node.now)
        finally:
            operation.cancel(node.now)

    async def _pull(self, holder: PeerId, rooms: Sequence[ReservedCopy]) -> dict[int, str]:
        """The places of what came whole, verified, and the transport. The ways, each for what the ones before did not
        bring:

        1. Memory of a holder on the same host, mapped: all of them together.
        2. GET_SMALL: objects of one chunk, together.
        3. One by one, by the transport that any read would take.
        """
        brought = {room.place: "tcp" for room in rooms if not room.slot.length}
        for transport, pull, most_bytes in (
            ("shm", self._copy_mapped, MAX_OBJECT_BYTES),
            ("tcp", self._pull_small, CHUNK_BYTES),
        ):
            left = [room for room in rooms if room.place not in brought]
            some = [room for room in left if room.slot.length <= most_bytes]
            if some:
                lengths = await pull(holder, some)
                for room, length in zip(some, lengths, strict=False):
                    if length == room.slot.length:
                        brought[room.place] = transport
        left = [room for room in rooms if room.place not in brought]
        return brought | await self._pull_each(holder, left)

    async def _copy_mapped(self, holder: PeerId, rooms: Sequence[ReservedCopy]) -> list[int]:
        """The lengths of what the memory of a holder on the same host gave, -1 for what it did not; none where it is
        not mapped. A window is copied in turns of the event loop, unless many cores share it: a thread would wait for
        the interpreter of a busy one, up to 5 ms."""
        shm, copy = self._node.shm, self._copy_of(holder, rooms[0].slot)
        if shm is None or shm.why_not(copy):
            return []
        try:
            mapped = await shm.open(copy)
        except PullFailed:
            return []
        lengths = [-1] * len(rooms)
        for reader in mapped.readers:
            left = [place for place, length in enumerate(lengths) if length < 0]
            spots = reader.spots_told((rooms[place].slot, rooms[place].sums) for place in left)
            places = [left[place] for place in spots.places]
            views = [rooms[place].view for place in places]
            length_bytes = sum(spots.lengths)
            if length_bytes > WINDOW_BYTES or threads_for(length_bytes) > MAX_IN_TURNS:
                good = await copy_spots(self._node.pool.driver, reader, spots, views)
            else:
                good = await take_turns(reader.copy_steps(spots, views, most_threads=1))
            for place, length, fine in zip(places, spots.lengths, good, strict=True):
                if fine:
                    lengths[place] = length
        return lengths

    async def _pull_small(self, holder: PeerId, rooms: Sequence[ReservedCopy]) -> list[int]:
        """The lengths of what GET_SMALL brought, up to where the connection broke."""
        if self._node.config.transport not in ("auto", "tcp"):
            return []
        slots = [room.slot for room in rooms]
        wanted = Part(
            [slot.digest for slot in slots],
            [room.view for room in rooms],
            max(slot.length for slot in slots),
            [slot.version for slot in slots],
        )
        data = self._node.routes.remote_peer(holder).data
        peer = RemotePeer(holder, data, announced=Announced(NO_WRITER))
        # As few requests as it takes: the holder answers other requests at the same time.
        lengths, _ = await self._node.pool.pull_small_parts(peer, wanted, MAX_ITEMS)
        return lengths

    async def _pull_each(self, holder: PeerId, rooms: Sequence[ReservedCopy]) -> dict[int, str]:
        """One object after the other, until the holder does not answer: each of the others would wait as long."""
        brought: dict[int, str] = {}
        for room in rooms:
            copies, digest = [self._copy_of(holder, room.slot)], room.slot.digest
            try:
                report = await pull_with_failover(
                    copies, self._node.routes.transports, digest, RoomDestination(room)
                )
            except (P2PStoreError, ValueError):
                continue
            if report.pulled is not None:
                brought[room.place] = report.pulled.transport
            elif any(failure.code in _SILENT for failure in report.failures):
                break
        return brought

    def _copy_of(self, holder: PeerId, slot: Slot) -> RemoteCopy:
        record = LocationRecord(slot.digest, slot.version, 0, size_units(slot.length))
        copy = KnownCopy(member_of(holder), holder, record, reachable=True)
        return self._node.routes.remote_copy(copy)


class DataRequests:
    """Carries out `AskPeer`, `PullObject`, `TakeCopiesOperation` and `FetchSnapshot` over data connections."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._routes = node.routes
        self._limiter = trio.CapacityLimiter(MAX_REQUESTS_UNDER_WAY)
        self.copies = TakenCopies(node)

    async def ask(self, effect: AskPeer) -> None:
        reply: Reply = None
        begin = self._node.now
        if effect.kind == DataKind.PUSH:  # what a client waits for leaves first
            await trio.lowlevel.checkpoint()
        async with self._limiter:
            with trio.move_on_after(effect.timeout_seconds):
                try:
                    reply = await self._node.pool.request(
                        self._routes.remote_peer(effect.peer_id), DataKind(effect.kind), effect.request
                    )
                except (P2PStoreError, OSError, ValueError) as error:
                    reply = refusal(error)
                    logger.debug("request %s to a peer failed: %s", effect.kind, error)
        self._node.watch.asked(effect, reply, self._node.now - begin)
        if effect.operation:
            self._node.core.answered(effect.operation, effect.tag, reply, self._node.now)
        elif reply is None:
            self._node.core.holders.peer_failed(effect.peer_id, self._node.now)
        self._node.process()

    async def pull(self, effect: PullObject) -> None:
        try:
            destination = self._node.core.operations.copy_destination(effect.operation, self._node.now)
        except NoSuchKey:
            return  # its requester has gone
        destination.watch = ReadWatch(time.monotonic)
        report: PullReport | None = None
        error: Exception | None = None
        delivered = False
        begin = self._node.now
        try:
            if not self._node.core.segment.quotas and effect.copies:
                await self._node.make_room(effect.copies[0].record.size_units * SIZE_UNIT_BYTES)
            keeps = Keeps.NO if effect.insist else Keeps.YES
            copies = [
                replace(self._routes.remote_copy(copy), keeps=keeps)
                for copy in self._routes.reading_order(effect.copies)
            ]
            report = await pull_with_failover(
                copies, self._routes.transports, effect.digest, destination
            )
            if report.pulled is not None:
                delivered = True
                destination.commit(self._node.now)
        except (P2PStoreError, ValueError) as problem:
            error = problem
        finally:
            destination.abort()
        trace = destination.watch.trace
        self._node.watch.pulled(effect, report, error, self._node.now - begin, trace)
        self._node.core.counters[f"pulls_{'delivered' if delivered else 'failed'}"] += 1
        delivered_by = (0, "")
        if delivered and report is not None and report.pulled is not None and report.copy is not None:
            delivered_by = report.copy.member, report.pulled.transport
        failures = () if report is None else report.failures
        outcome = PullOutcome(delivered, failures, error, *delivered_by)
        self._node.core.operations.pulled(effect.operation, outcome, self._node.now)
        self._node.process()

    async def fetch_snapshot(self, effect: FetchSnapshot) -> None:
        head: SnapshotHead | None = None
        checked: bytes | CheckedSnapshot = b""
        with trio.move_on_after(effect.timeout_seconds):
            try:
                reply, bulk = await self._node.pool.request_bulk(
                    self._routes.remote_peer(effect.peer_id),
                    DataKind.SNAPSHOT,
                    Snapshot(effect.member),
                    effect.most_bytes,
                )
                if isinstance(reply, SnapshotReply):
                    checked = await trio.to_thread.run_sync(check_snapshot, bulk, abandon_on_cancel=True)
                    head = SnapshotHead(reply.incarnation, reply.sequence, reply.set_hash)
            except ProtocolError as error:
                logger.warning("dropped what a peer sent: %s", error)
            except (P2PStoreError, OSError, ValueError) as error:
                logger.debug("snapshot failed: %s", error)
        try:
            self._node.core.gossip.snapshot_fetched(effect.token, head, checked, self._node.now)
        except ProtocolError as error:
            logger.warning("dropped what a peer sent: %s", error)
        self._node.process()


_LINK_ERRORS: Final = (OSError, DeadlineExceeded, ProtocolError, AuthenticationFailed, Unavailable)


def refusal(error: Exception) -> Failure | None:
    """The failure that the other side answered with; None when it was the way there that failed."""
    if isinstance(error, _LINK_ERRORS):
        return None
    return Failure(int(code_of(error)), str(error))
