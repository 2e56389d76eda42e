"""Reading other peers' segments by RDMA: slot, trailer and payload by one-sided reads, verified on the copy.

What the slot hint does not show (the object moved, expired, is gone), the holder is asked for over the pool, so that
its answer says how far its log was. A line that fails in the middle of an object is replaced: what it had under way is
read again through another device.

Objects of one chunk come through a registered block where there is a free one (`rdma_staging`). Chunks of others are
read into destinations inside of registered memory directly; else through blocks, from which only verified ones are
copied on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.memory.segment_layout import (
    Geometry,
    Slot,
    TrailerBody,
    decode_slot,
    decode_trailer,
    slot_matches,
    trailer_matches,
    trailer_offset,
)
from p2pstore.objects import CHUNK_BYTES, MAX_OBJECT_BYTES
from p2pstore.runtime.flow import ASSUMED_RATE, MIN_RATE, PATIENCE, Flow
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.rdma.rdma_lines import ChosenLines, Lines
from p2pstore.transfer.rdma.rdma_payload import (
    MAX_PIECES,
    Direct,
    ExtentRead,
    Payload,
    Places,
    Staged,
    block_bytes_for,
    change_line,
    read_bytes,
    read_for,
    read_payload,
)
from p2pstore.transfer.rdma.rdma_reads import Line, ReadEngine, ReadFailed
from p2pstore.transfer.rdma.rdma_rules import NAME, Meaning
from p2pstore.transfer.rdma.rdma_staging import (
    LARGE_BLOCK_BYTES,
    SMALL_BLOCK_BYTES,
    Block,
    Registered,
    Staging,
)
from p2pstore.transfer.rdma.rdma_verbs import Device
from p2pstore.transfer.reading.arriving import Destination, checked_view, resume, watch_of
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.segment_reader import expired
from p2pstore.transfer.reading.shm_transport import ON_SSD
from p2pstore.transfer.reading.span_reads import failure_of
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import Pulled, RemoteCopy
from p2pstore.wire import Code

STRIPED_BYTES: Final = 4 * CHUNK_BYTES
"""From here on an object is read through several devices, where both ends have them."""
_CODES: Final = {Meaning.STALE: Code.STALE, Meaning.GONE: Code.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class _Found:
    """An object's slot and trailer, verified; and its payload on the way, when it has one chunk."""

    slot: Slot
    trailer: TrailerBody
    extent: ExtentRead | None = None

    def leave(self) -> None:
        """The payload is not waited for any more."""
        if self.extent is not None:
            self.extent.leave()


class RdmaTransport:
    """The `Transport` through RDMA devices; `nursery` and `engines` are those of `open_rdma_reading`.

    The first `preferred` of the devices (all, when not said) are near the memory that is read into; the others are
    used when none of those works. `registered` is memory of this peer that the devices may write to: its own segment.
    """

    name = NAME

    def __init__(
        self,
        engines: Sequence[ReadEngine],
        pool: ConnectionPool,
        nursery: trio.Nursery,
        *,
        staging: Staging,
        preferred: int | None = None,
        registered: Sequence[Registered] = (),
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self.lines = Lines(
            engines, preferred or len(engines), pool, nursery, staging.small, progress_seconds
        )
        self._pool = pool
        self._staging = staging
        self._registered = registered
        self._progress_seconds = progress_seconds

    def why_not(self, copy: RemoteCopy) -> str:
        if copy.on_ssd and not copy.rdma:
            return ON_SSD
        if not copy.rdma:
            return "the holder does not let others read it by RDMA"
        if not copy.data:
            return "the holder advertises no data address"
        return self.lines.why_not(copy.peer_id)

    def cost(self, copy: RemoteCopy) -> float:
        """Less than a TCP connection, more than shared memory."""
        return 0.3

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        """Read one object. Raises `PullFailed`, retriable when RDMA failed rather than the holder, or what
        `destination.prepare` raises."""
        watch = watch_of(destination)
        try:
            found = await self._look(copy, digest, watch)
            try:
                await self._deliver(copy, found, destination)
            finally:
                found.leave()
        except ReadFailed as failure:
            code = _CODES.get(failure.meaning, Code.UNAVAILABLE)
            raise PullFailed(code, failure.text, retriable=True) from failure
        except DeadlineExceeded as error:
            raise failure_of(error) from error
        except ProtocolError as error:  # a slot or header that leads outside of the segment
            raise PullFailed(Code.MALFORMED, str(error), retriable=True) from error
        return Pulled(found.slot, found.trailer, found.slot.length, self.name)

    async def measure(self, copy: RemoteCopy, seconds: float) -> tuple[int, float]:
        """Read the beginning of the holder's segment again and again, for `seconds`: (bytes, seconds). Nothing is
        verified. Raises `PullFailed`."""
        try:
            line = await self.lines.connected(copy)
            return await read_for(line, self._staging.large, seconds)
        except (ReadFailed, DeadlineExceeded) as failure:
            raise PullFailed(Code.UNAVAILABLE, str(failure)) from failure

    # --- slot and trailer --------------------------------------------------------------------

    async def _look(self, copy: RemoteCopy, digest: bytes, watch: ReadWatch | None) -> _Found:
        """The object where the hint says, else what the holder says to that. Raises `PullFailed`, `ReadFailed`."""
        tried: set[int] = set()
        failure: ReadFailed | None = None
        while True:
            try:
                line = await self.lines.connected(copy, tried)
            except PullFailed:
                if failure is None:
                    raise
                raise failure from None  # what went wrong first says more
            if watch is not None:
                watch.connected()
            try:
                found = await self._look_at_hint(line, copy.slot, digest)
                break
            except ReadFailed as error:
                failure = error
                if error.meaning is Meaning.STALE:
                    raise
                tried.add(line.engine.number)
        if found is None:
            slot, trailer = await self._pool.look(copy, digest)
            found = _Found(slot, trailer)
        if found.slot.length > MAX_OBJECT_BYTES:
            raise PullFailed(Code.OBJECT_TOO_LARGE, "the holder claims an object above 4 GiB")
        return found

    async def _look_at_hint(self, line: Line, number: int, digest: bytes) -> _Found | None:
        seen = line.seen
        if not 0 <= number < line.geometry.slots:
            return None
        packed = seen.find(number)
        slot = _slot_for(digest, packed, line.geometry)
        if slot is not None and (found := await self._look_again(line, number, slot, packed)):
            return found
        seen.take_in(number, await self._read_bytes(line, *seen.extent(number)))
        slot = _slot_for(digest, seen.find(number), line.geometry)
        if slot is None:
            return None
        block = await self._block_for(line, slot)
        if block is None:
            start = slot.offset + trailer_offset(slot.length)
            trailer = _checked(await self._read_bytes(line, start, slot.trailer_length), slot)
            return None if trailer is None else _Found(slot, trailer)
        extent = await ExtentRead.begin(line, block, slot, self._progress_seconds)
        return await _found_by(extent, slot)

    async def _look_again(self, line: Line, number: int, slot: Slot, packed: bytes) -> _Found | None:
        """The object where its slot was seen, when that says the same still. None too when it has several chunks."""
        block = await self._block_for(line, slot)
        if block is None:
            return None
        at = line.seen.offset(number)
        extent = await ExtentRead.begin(line, block, slot, self._progress_seconds, again_at=at)
        return await _found_by(extent, slot, packed)

    async def _block_for(self, line: Line, slot: Slot) -> Block | None:
        """Room for an object of one chunk, its trailer and its slot. None when there is none now, or the line takes too
        little at once: then it comes as larger ones do."""
        if slot.length > CHUNK_BYTES or line.engine.most_pieces(line, CHUNK_BYTES) < MAX_PIECES:
            return None
        needed_bytes = block_bytes_for(slot)
        if needed_bytes <= SMALL_BLOCK_BYTES:
            return await self._staging.small.take()
        return self._staging.large.take_nowait() if needed_bytes <= LARGE_BLOCK_BYTES else None

    async def _read_bytes(self, line: Line, offset: int, length_bytes: int) -> bytes:
        """A private copy of a small part of the other side's memory."""
        return await read_bytes(line, self._staging.small, offset, length_bytes, self._progress_seconds)

    # --- payload -----------------------------------------------------------------------------

    async def _deliver(self, copy: RemoteCopy, found: _Found, destination: Destination) -> None:
        await trio.lowlevel.checkpoint()  # while it comes: it may be here before the wait
        length = found.slot.length
        if not length:
            checked_view(destination, found.slot, found.trailer)
            return
        arriving = resume(destination, found.slot, found.trailer)
        choosing = ChosenLines(self.lines, copy)
        if found.extent is not None:
            try:
                await found.extent.deliver(arriving)
                return
            except ReadFailed as failure:
                found.leave()
                await change_line(choosing, found.extent.line, failure)
        if length >= STRIPED_BYTES:
            self.lines.widen(copy)
        flow = Flow()
        # Patience is not shortened for others: a read that is given up ends its line, which many share.
        flow.begin(self._progress_seconds, ASSUMED_RATE / PATIENCE if copy.others else MIN_RATE)
        payload = Payload(found.slot.offset, arriving, flow)
        await read_payload(choosing, payload, self._places(arriving.view))

    def _places(self, view: memoryview) -> Places:
        """Where chunks for a destination are read to."""
        address = address_of(view)
        for memory in self._registered:
            if memory.holds(address, len(view)):
                return Direct(memory, view, address)
        return Staged(self._staging.large)


def _slot_for(digest: bytes, packed: bytes, geometry: Geometry) -> Slot | None:
    """The slot, when it is that of a live object under `digest`."""
    slot = decode_slot(packed)
    if slot is None or not slot_matches(slot, digest, geometry) or not slot.trailer_length:
        return None
    return slot


async def _found_by(extent: ExtentRead, slot: Slot, seen: bytes = b"") -> _Found | None:
    """The object found, when the trailer is that of the slot; and the slot as it was `seen`, where it is read again."""
    found = None
    try:
        if not seen or await extent.slot() == seen:
            trailer = _checked(await extent.trailer(), slot)
            found = None if trailer is None else _Found(slot, trailer, extent)
    finally:
        if found is None:
            extent.leave()
    return found


def _checked(packed: bytes, slot: Slot) -> TrailerBody | None:
    """The trailer, unless it is not that of this slot, or the object expired."""
    trailer = decode_trailer(packed)
    if trailer is None or not trailer_matches(trailer, slot) or expired(trailer):
        return None
    return trailer


@asynccontextmanager
async def open_rdma_reading(
    devices: Sequence[Device],
) -> AsyncIterator[tuple[list[ReadEngine], trio.Nursery]]:
    """The parts that transports through the same devices share, for the length of the block: the reads of each, and the
    nursery of their lines. At its end all lines are closed and no read is under way; the devices stay open."""
    engines = [ReadEngine(device, number) for number, device in enumerate(devices)]
    async with open_background_nursery() as background:
        for engine in engines:
            background.start_soon(engine.run)  # until the last line is retired
        async with open_background_nursery() as lines:
            yield engines, lines
    for engine in engines:
        engine.close()
