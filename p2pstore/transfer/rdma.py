"""Reading other peers' segments by RDMA: slot, trailer and payload by one-sided reads, verified on the copy.

The connection is set up over a data connection of its own (RDMA_CONNECT), on which it lives: each end that closes it,
or dies, takes the queue pairs with it. What the slot hint does not show (the object moved, expired, is
gone), the holder is asked for over the pool, so that its answer says how far its log was.

Destinations inside of registered memory are read into directly; others through registered blocks, from which only
verified bytes are copied on.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from p2pstore.errors import DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.nursery import open_background_nursery
from p2pstore.objects import MAX_OBJECT_BYTES
from p2pstore.streams import DEFAULT_PROGRESS_SECONDS
from p2pstore.transfer.data_connection import DataConnection
from p2pstore.transfer.data_pool import DataPool
from p2pstore.transfer.layout import (
    SEGMENT_HEADER_BYTES,
    SLOT_BYTES,
    Geometry,
    Slot,
    TrailerBody,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    slot_matches,
    trailer_matches,
    trailer_offset,
)
from p2pstore.transfer.messages import DataKind, Ping, RdmaConnect, RdmaConnected
from p2pstore.transfer.rdma_addresses import wake_neighbour
from p2pstore.transfer.rdma_payload import (
    Payload,
    read_directly,
    read_for,
    read_staged,
    tell,
    verify_chunk,
)
from p2pstore.transfer.rdma_reads import Line, ReadEngine, ReadFailed
from p2pstore.transfer.rdma_rules import (
    MAX_PACKET_NUMBER,
    NAME,
    Endpoint,
    Meaning,
    Path,
    RemoteMemory,
    agree,
)
from p2pstore.transfer.rdma_staging import (
    SMALL_BLOCK_BYTES,
    Staging,
    address_of,
)
from p2pstore.transfer.rdma_verbs import Device, QueuePair, Region
from p2pstore.transfer.shm import expired
from p2pstore.transfer.trace import ReadWatch
from p2pstore.transfer.transport import (
    Destination,
    Pulled,
    PullFailed,
    RemoteCopy,
    checked_view,
    unpack_sums,
    watch_of,
)
from p2pstore.wire import Code

REQUESTS_PER_LINE: Final = 64
RETRY_CONNECT_SECONDS: Final = 10.0
PING_SECONDS: Final = 60.0
"""Between signs of life on the connection that a queue pair in use lives on; the holder ends a silent one."""
IDLE_SECONDS: Final = 300.0
NO_GEOMETRY: Final = Geometry(0, 0, 0, 0, 0, 0, 0)
_CODES: Final = {Meaning.STALE: Code.STALE, Meaning.GONE: Code.UNAVAILABLE}


@dataclass(slots=True)
class _Peer:
    """What is known of one holder: a line to it, or when to try again."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    line: Line | None = None
    geometry: Geometry = NO_GEOMETRY
    retry_at: float = 0.0
    reason: str = ""

    def usable(self) -> Line | None:
        """The line, unless it failed and is about to be closed."""
        return self.line if self.line is not None and self.line.failure is None else None


@dataclass(frozen=True, slots=True)
class _Found:
    """An object's slot and trailer, verified; its payload as well when it came along, not verified."""

    slot: Slot
    trailer: TrailerBody
    payload: bytes | None = None


class RdmaTransport:
    """The `Transport` through one RDMA device; `nursery` and `engine` are those of `open_rdma_reading`.

    `registered` is memory of this peer that the device may write to: its own segment.
    """

    name = NAME

    def __init__(
        self,
        device: Device,
        pool: DataPool,
        nursery: trio.Nursery,
        engine: ReadEngine,
        *,
        staging: Staging,
        registered: Sequence[Region] = (),
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self._device = device
        self._pool = pool
        self._nursery = nursery
        self._engine = engine
        self._staging = staging
        self._registered = registered
        self._progress_seconds = progress_seconds
        self._peers: dict[bytes, _Peer] = {}

    def offers(self, copy: RemoteCopy) -> bool:
        """Whether the copy's holder offers RDMA, and that did not fail a moment ago."""
        return not self.why_not(copy)

    def why_not(self, copy: RemoteCopy) -> str:
        if not copy.rdma:
            return "the holder does not let others read it by RDMA"
        if not copy.data:
            return "the holder advertises no data address"
        if self._engine.lost:
            return self._engine.lost
        peer = self._peers.get(copy.peer_id)
        if peer is None or peer.usable() is not None or trio.current_time() >= peer.retry_at:
            return ""
        return peer.reason

    def cost(self, copy: RemoteCopy) -> float:
        """Less than a TCP connection, more than shared memory."""
        return 0.3

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        """Read one object. Raises `PullFailed`, retriable when RDMA failed rather than the holder, or what
        `destination.prepare` raises."""
        watch = watch_of(destination)
        try:
            line, geometry = await self._connected(copy)
            if watch is not None:
                watch.connected()
            found = await self._look(line, geometry, copy, digest)
            view = checked_view(destination, found.slot, found.trailer)
            await self._deliver(line, found, view, watch)
        except ReadFailed as failure:
            code = _CODES.get(failure.meaning, Code.UNAVAILABLE)
            raise PullFailed(code, failure.text, retriable=True) from failure
        except DeadlineExceeded as error:
            raise PullFailed(Code.DEADLINE_EXCEEDED, str(error), retriable=True) from error
        except ProtocolError as error:  # a slot or header that leads outside of the segment
            raise PullFailed(Code.MALFORMED, str(error), retriable=True) from error
        return Pulled(found.slot, found.trailer, found.slot.length, self.name)

    async def measure(self, copy: RemoteCopy, seconds: float) -> tuple[int, float]:
        """Read the beginning of the holder's segment again and again, for so long: (bytes, seconds). Nothing is
        verified. Raises `PullFailed`."""
        try:
            line, _ = await self._connected(copy)
            return await read_for(self._engine, line, self._staging.large, seconds)
        except (ReadFailed, DeadlineExceeded) as failure:
            raise PullFailed(Code.UNAVAILABLE, str(failure)) from failure

    # --- connecting --------------------------------------------------------------------------

    async def _connected(self, copy: RemoteCopy) -> tuple[Line, Geometry]:
        peer = self._peers.setdefault(copy.peer_id, _Peer())
        if peer.usable() is None:
            async with peer.lock:
                if peer.usable() is None:
                    if reason := self.why_not(copy):  # found out by whoever had the lock before
                        raise PullFailed(Code.UNAVAILABLE, reason, retriable=True)
                    await self._connect(peer, copy)
        assert peer.line is not None
        return peer.line, peer.geometry

    async def _connect(self, peer: _Peer, copy: RemoteCopy) -> None:
        seconds = min(self._progress_seconds, copy.answer_seconds)
        try:
            with trio.fail_after(seconds):
                line, geometry, connection = await self._open(copy)
        except trio.TooSlowError as error:
            self._demote(peer, f"the holder did not connect over RDMA within {seconds:g} s")
            raise PullFailed(Code.DEADLINE_EXCEEDED, peer.reason, retriable=True) from error
        except (P2PStoreError, OSError, ReadFailed) as error:
            self._demote(peer, str(error) or type(error).__name__)
            code = (
                Code.DEADLINE_EXCEEDED if isinstance(error, DeadlineExceeded) else Code.UNAVAILABLE
            )
            raise PullFailed(code, peer.reason, retriable=True) from error
        peer.line, peer.geometry = line, geometry
        self._nursery.start_soon(self._keep, peer, line, connection)

    def _demote(self, peer: _Peer, reason: str) -> None:
        peer.reason = f"connecting over RDMA failed: {reason}"
        peer.retry_at = trio.current_time() + RETRY_CONNECT_SECONDS

    async def _open(self, copy: RemoteCopy) -> tuple[Line, Geometry, DataConnection]:
        """Connect, and read the segment's header to see that it works."""
        connection = await self._pool.dial(copy)
        line = None
        try:
            requests = min(REQUESTS_PER_LINE, self._device.limits.max_work_requests)
            pair = self._device.queue_pair(
                self._engine.completions,
                secrets.randbelow(MAX_PACKET_NUMBER),
                requests=requests,
                may_be_read=False,
            )
            line = Line(pair, RemoteMemory(0, 0, 0), requests)
            line.memory = await self._introduce(pair, connection)
            header = decode_segment_header(await self._read_bytes(line, 0, SEGMENT_HEADER_BYTES))
            if header.geometry.total_bytes > line.memory.length_bytes:
                raise ProtocolError("the holder's segment is longer than what it lets others read")
        except BaseException:
            connection.close()
            if line is not None:
                await self._engine.retire(line)
            raise
        return line, header.geometry, connection

    async def _introduce(self, pair: QueuePair, connection: DataConnection) -> RemoteMemory:
        """Connect both queue pairs; what may be read at the other end."""
        own = pair.endpoint
        request = RdmaConnect(
            *(own.queue_pair, own.packet_number, own.gid, own.path_mtu_bytes, own.reads)
        )
        reply = await connection.request(DataKind.RDMA_CONNECT, request)
        assert isinstance(reply, RdmaConnected)
        other = Endpoint(
            *(reply.queue_pair, reply.packet_number, reply.gid),
            *(reply.path_mtu_bytes, reply.reads),
        )
        path: Path = agree(own, other)
        await wake_neighbour(self._device.interface, other.gid, trio.sleep)
        pair.connect(other, path)
        return RemoteMemory(reply.address, reply.length_bytes, reply.key)

    async def _keep(self, peer: _Peer, line: Line, connection: DataConnection) -> None:
        """Watch over a line until one of its ends has enough of it."""
        try:
            with trio.CancelScope() as scope:
                line.when_broken = scope.cancel
                if line.failure is None:
                    await self._watch(line, connection)
        except (P2PStoreError, OSError) as error:
            line.stop(Meaning.GONE, f"the connection to the holder broke: {error}")
        finally:
            line.when_broken = lambda: None
            if peer.line is line:
                peer.line = None
            line.stop(Meaning.GONE, "the holder ended the RDMA connection")
            await self._engine.retire(line)
            connection.close()

    async def _watch(self, line: Line, connection: DataConnection) -> None:
        """Return when the holder closes, or nothing was read for long."""
        while True:
            with trio.move_on_after(PING_SECONDS):
                await trio.lowlevel.wait_readable(connection.stream.fileno())
                return
            idle_seconds = trio.current_time() - line.used_at
            if idle_seconds > IDLE_SECONDS:
                return
            if idle_seconds < PING_SECONDS:
                await connection.request(DataKind.PING, Ping())

    # --- slot and trailer --------------------------------------------------------------------

    async def _look(
        self, line: Line, geometry: Geometry, copy: RemoteCopy, digest: bytes
    ) -> _Found:
        """The object where the hint says, else what the holder says to that. Raises `PullFailed`."""
        found = await self._look_at_hint(line, geometry, copy.slot, digest)
        if found is None:
            slot, trailer = await self._pool.look(copy, digest)
            found = _Found(slot, trailer)
        if found.slot.length > MAX_OBJECT_BYTES:
            raise PullFailed(Code.OBJECT_TOO_LARGE, "the holder claims an object above 4 GiB")
        return found

    async def _look_at_hint(
        self, line: Line, geometry: Geometry, number: int, digest: bytes
    ) -> _Found | None:
        if not 0 <= number < geometry.slots:
            return None
        at = geometry.slots_offset + number * SLOT_BYTES
        slot = decode_slot(await self._read_bytes(line, at, SLOT_BYTES))
        if slot is None or not slot_matches(slot, digest, geometry):
            return None
        start = trailer_offset(slot.length)
        whole = start + slot.trailer_length <= SMALL_BLOCK_BYTES
        first = 0 if whole else start
        if slot.trailer_length == 0:
            return None
        read = await self._read_bytes(
            line, slot.offset + first, start - first + slot.trailer_length
        )
        trailer = decode_trailer(read[start - first :])
        if trailer is None or not trailer_matches(trailer, slot) or expired(trailer):
            return None
        return _Found(slot, trailer, read[: slot.length] if whole else None)

    async def _read_bytes(self, line: Line, offset: int, length_bytes: int) -> bytes:
        """A private copy of a small part of the other side's memory."""
        block = await self._staging.small.take()
        try:
            read = await self._engine.read(
                line, offset, length_bytes, self._staging.small.region, block.address
            )
        except BaseException:
            block.give_back()
            raise
        try:
            await read.wait(self._progress_seconds)
            return bytes(block.view[:length_bytes])
        finally:
            read.when_ended(block.give_back)

    # --- payload -----------------------------------------------------------------------------

    async def _deliver(
        self, line: Line, found: _Found, view: memoryview, watch: ReadWatch | None
    ) -> None:
        if not found.slot.length:
            return
        sums = unpack_sums(found.trailer.sums, found.slot.length)
        if found.payload is not None:
            verify_chunk(memoryview(found.payload), sums[0], 0, watch)
            view[:] = found.payload
            tell(watch, len(view), len(view))
            return
        payload = Payload(line, found.slot.offset, found.slot.length, sums, self._progress_seconds)
        region = self._region_of(view)
        if region is not None:
            await read_directly(self._engine, payload, view, region, watch)
        else:
            await read_staged(self._engine, payload, view, self._staging.large, watch)

    def _region_of(self, view: memoryview) -> Region | None:
        """The registered memory that holds a destination."""
        address = address_of(view)
        return next((each for each in self._registered if each.holds(address, len(view))), None)


@asynccontextmanager
async def open_rdma_reading(device: Device) -> AsyncIterator[tuple[ReadEngine, trio.Nursery]]:
    """What transports through one device share, for the length of the block: its reads, and the nursery of its
    lines. At its end all lines are closed and no read is under way; `device` stays open."""
    engine = ReadEngine(device)
    async with open_background_nursery() as background:
        background.start_soon(engine.run)  # until the last line is retired
        async with open_background_nursery() as lines:
            yield engine, lines
    engine.close()
