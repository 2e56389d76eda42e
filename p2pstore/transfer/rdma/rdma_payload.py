"""An object's payload by RDMA: several chunks under way, each verified before it counts. Under trio."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import trio
from xxhash import xxh3_64

from p2pstore.memory.segment_layout import SLOT_BYTES, Slot, round_up, trailer_offset
from p2pstore.objects import CHUNK_BYTES, KIB, chunk_bounds
from p2pstore.runtime.flow import Flow
from p2pstore.transfer.rdma.rdma_reads import Line, Piece, Read, ReadFailed
from p2pstore.transfer.rdma.rdma_rules import Meaning, first_of_two
from p2pstore.transfer.rdma.rdma_staging import Block, BlockPool, Registered
from p2pstore.transfer.reading.arriving import Arriving

if TYPE_CHECKING:
    from p2pstore.transfer.rdma.rdma_lines import ChosenLines

CHUNKS_UNDER_WAY: Final = 8
"""Of one object, by each line; more of them hardly fill a path better, and take blocks away from others."""
MEASURED_UNDER_WAY: Final = 4
MEASURED_READ_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Payload:
    """The part of an object to read: those chunks of `arriving` that are not there yet; `offset` is in the other side's
    memory."""

    offset: int
    arriving: Arriving
    flow: Flow


# --- where chunks go -------------------------------------------------------------------------


class Places(Protocol):
    """Registered memory that chunks are read into."""

    def take_nowait(self, start: int, end: int) -> Block | None:
        """Room for one, if there is some."""

    async def take(self, start: int, end: int) -> Block:
        """Room for one; waits for it."""

    def deliver(self, block: Block, chunk: int, arriving: Arriving) -> None:
        """The chunk of that number was read. Raises `PullFailed` (STALE) unless it is what it must be."""

    async def leave(self, under_way: Iterable[Chunk]) -> None:
        """Nothing is delivered any more. Not cancelled."""


class Direct:
    """Straight into the destination `view`, which is inside `memory`. Nothing writes to it after `leave`."""

    def __init__(self, memory: Registered, view: memoryview, address: int) -> None:
        self._memory = memory
        self._view = view
        self._address = address

    def take_nowait(self, start: int, end: int) -> Block:
        return Block(self._view[start:end], self._address + start, self._memory)

    async def take(self, start: int, end: int) -> Block:
        return self.take_nowait(start, end)

    def deliver(self, block: Block, chunk: int, arriving: Arriving) -> None:
        arriving.verify(chunk)

    async def leave(self, under_way: Iterable[Chunk]) -> None:
        reads: dict[Line, list[Read]] = {}
        for chunk in under_way:
            reads.setdefault(chunk.line, []).append(chunk.read)
        for line, its_reads in reads.items():
            await line.engine.settle(line, its_reads)


class Staged:
    """Into blocks of `pool`, and what was verified on to where it belongs. Blocks that are left stay with the reads
    that still fill them; the destination is touched no more."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def take_nowait(self, start: int, end: int) -> Block | None:
        return self._pool.take_nowait()

    async def take(self, start: int, end: int) -> Block:
        return await self._pool.take()

    def deliver(self, block: Block, chunk: int, arriving: Arriving) -> None:
        arriving.verify(chunk, chunk=block.view[: len(arriving.chunk(chunk))])

    async def leave(self, under_way: Iterable[Chunk]) -> None:
        for chunk in under_way:
            chunk.read.when_ended(chunk.block.give_back)


# --- reading ---------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A chunk of an object: its number and its bounds."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that is being read."""

    wanted: Wanted
    line: Line
    read: Read
    block: Block


async def read_payload(choosing: ChosenLines, payload: Payload, places: Places) -> None:
    """Read an object's chunks to their places, each verified before it is delivered. What a line that fails had
    under way is read again through another one.

    Raises `PullFailed` (STALE) for a chunk that does not match, `ReadFailed`, `DeadlineExceeded` when chunks come too
    slowly.
    """
    arriving, flow = payload.arriving, payload.flow
    bounds = list(chunk_bounds(arriving.slot.length))
    waiting, under_way = deque[Wanted](), deque[Chunk]()
    while run := arriving.take():
        waiting += [Wanted(number, *bounds[number]) for number in run]
    try:
        while waiting or under_way:
            while waiting and (room := CHUNKS_UNDER_WAY * choosing.count() - len(under_way)) > 0:
                some = list(islice(waiting, -(-room // choosing.count())))
                # Blocks may be scarce: a read with blocks under way does not wait for more.
                blocks = await _take_blocks(places, some, wait=not under_way)
                begun = await _begin(choosing, payload, some, blocks)
                if not begun:  # no block, or its line failed
                    break
                under_way += begun
                for _ in begun:
                    waiting.popleft()
            if not under_way:
                continue
            chunk = under_way[0]
            began = trio.current_time()
            try:
                await chunk.read.wait(flow.patience_seconds)
            except ReadFailed as failure:
                under_way.popleft().block.give_back()
                waiting.appendleft(chunk.wanted)
                await change_line(choosing, chunk.line, failure)
                continue
            under_way.popleft()
            size = chunk.wanted.end - chunk.wanted.start
            if not flow.moved(size, trio.current_time() - began):
                chunk.block.give_back()
                raise flow.too_slow()
            try:
                places.deliver(chunk.block, chunk.wanted.number, arriving)
            finally:
                chunk.block.give_back()
    finally:
        try:
            await places.leave(under_way)
        finally:
            arriving.leave()


async def _take_blocks(places: Places, chunks: Sequence[Wanted], *, wait: bool) -> list[Block]:
    """For the first of these chunks, as many as there are; with `wait`, at least one."""
    blocks = [await places.take(chunks[0].start, chunks[0].end)] if wait else []
    for chunk in chunks[len(blocks) :]:
        block = places.take_nowait(chunk.start, chunk.end)
        if block is None:
            break
        blocks.append(block)
    return blocks


async def _begin(
    choosing: ChosenLines, payload: Payload, chunks: Sequence[Wanted], blocks: Sequence[Block]
) -> list[Chunk]:
    """Begin to read the first of these chunks, as many as there are blocks, all of one memory, and the line takes at
    once. None when the line failed, and another one is there to try. Other blocks are given back."""
    if not blocks:
        return []
    begun: list[Chunk] = []
    try:
        line = await choosing.line()
        some = list(zip(chunks, blocks, strict=False))[: line.engine.most_pieces(line, CHUNK_BYTES)]
        pieces = [
            Piece(payload.offset + chunk.start, chunk.end - chunk.start, block.address)
            for chunk, block in some
        ]
        reads = await line.engine.read_pieces(line, pieces, blocks[0].memory)
        begun = [
            Chunk(chunk, line, read, block) for (chunk, block), read in zip(some, reads, strict=True)
        ]
    except ReadFailed as error:
        failure = error
    else:
        return begun
    finally:
        for block in blocks[len(begun) :]:
            block.give_back()
    await change_line(choosing, line, failure)
    return []


async def change_line(choosing: ChosenLines, line: Line, failure: ReadFailed) -> None:
    """Raise the failure, unless another line may do better."""
    if failure.meaning is Meaning.STALE or not await choosing.another(line, failure.text):
        raise failure


async def read_bytes(
    line: Line, pool: BlockPool, offset: int, length_bytes: int, seconds: float
) -> bytes:
    """A private copy of a small part of the other side's memory. Raises `ReadFailed`, `DeadlineExceeded`."""
    block = await pool.take()
    read = await _into_block(line, offset, length_bytes, block, soon=1)
    try:
        await read.wait(seconds)
        return bytes(block.view[:length_bytes])
    finally:
        read.when_ended(block.give_back)


async def _into_block(
    line: Line, offset: int, length_bytes: int, block: Block, *, soon: int = 0
) -> Read:
    try:
        piece = Piece(offset, length_bytes, block.address)
        return await line.engine.read(line, piece, block.memory, soon=soon)
    except BaseException:
        block.give_back()
        raise


async def read_for(line: Line, pool: BlockPool, seconds: float) -> tuple[int, float]:
    """Read the beginning of the other side's memory again and again, for `seconds`, into blocks that are not looked at:
    (bytes, seconds). Raises `ReadFailed`, `DeadlineExceeded`."""
    size = min(pool.block_bytes, line.memory.length_bytes)
    under_way: deque[tuple[Read, Block]] = deque()
    moved, begin = 0, trio.current_time()
    try:
        while True:
            while len(under_way) < MEASURED_UNDER_WAY:
                block = await pool.take()
                under_way.append((await _into_block(line, 0, size, block), block))
            read, block = under_way[0]
            await read.wait(MEASURED_READ_SECONDS)
            under_way.popleft()
            block.give_back()
            moved += size
            elapsed = trio.current_time() - begin
            if elapsed >= seconds:
                return moved, elapsed
    finally:
        for read, block in under_way:
            read.when_ended(block.give_back)


WHOLE_BYTES: Final = 512 * KIB
"""Payloads up to this come in one piece, with the trailer: a work request more costs more than it would save."""
MAX_PIECES: Final = 4
"""A slot, a trailer and two pieces of a payload."""
ONLY_CHUNK: Final = 0


def block_bytes_for(slot: Slot) -> int:
    """Length of a block for such an object: its payload and trailer as they lie in the extent, then its slot."""
    return _slot_place(slot) + SLOT_BYTES


def _slot_place(slot: Slot) -> int:
    return round_up(trailer_offset(slot.length) + slot.trailer_length, 8)


def _pieces_of(length_bytes: int, link_bytes_per_second: float) -> Sequence[tuple[int, int]]:
    """Beginnings and ends of the parts that a payload comes in."""
    if length_bytes <= WHOLE_BYTES:
        return [(0, length_bytes)]
    parted_at = first_of_two(length_bytes, link_bytes_per_second)
    return [(0, parted_at), (parted_at, length_bytes)]


class ExtentRead:
    """One object's payload and trailer on their way into a block, at the same places as in the extent. `leave` it at
    the end."""

    def __init__(self, line: Line, slot: Slot, block: Block, seconds: float) -> None:
        self.line = line
        self._slot = slot
        self._block = block
        self._seconds = seconds
        self._pieces = _pieces_of(slot.length, line.engine.device.limits.link_bytes_per_second)
        self._slot_read: Read | None = None
        self._reads: Sequence[Read] = ()

    @classmethod
    async def begin(
        cls, line: Line, block: Block, slot: Slot, seconds: float, *, again_at: int | None = None
    ) -> ExtentRead:
        """Ask for all of it, into this block, which is given back at the end; each part has `seconds`. With
        `again_at`, its place in the segment, for the slot as well, before all else. Raises `ReadFailed`, and
        `ProtocolError` for a slot that leads outside of the other side's memory."""
        made = cls(line, slot, block, seconds)
        pieces = [
            Piece(slot.offset + start, end - start, block.address + start)
            for start, end in made._bounds()
        ]
        if again_at is not None:
            pieces.insert(0, Piece(again_at, SLOT_BYTES, block.address + _slot_place(slot)))
        soon = 1 if again_at is None else 2  # up to the trailer
        try:
            reads = await line.engine.read_pieces(line, pieces, block.memory, soon=soon)
        except BaseException:
            block.give_back()
            raise
        if again_at is not None:
            made._slot_read = reads.pop(0)
        made._reads = reads
        return made

    async def slot(self) -> bytes:
        """The slot as it is now, in a private copy: with `again_at`, before `trailer`. Raises as `trailer`."""
        assert self._slot_read is not None
        await self._slot_read.wait(self._seconds)
        start = _slot_place(self._slot)
        return bytes(self._block.view[start : start + SLOT_BYTES])

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Bounds of each read: the trailer, with a payload of one piece before it, then the payload's pieces."""
        trailer = trailer_offset(self._slot.length)
        together = len(self._pieces) == 1
        yield 0 if together else trailer, trailer + self._slot.trailer_length
        if not together:
            yield from self._pieces

    async def trailer(self) -> bytes:
        """The trailer, in a private copy. Raises `ReadFailed`, `DeadlineExceeded`."""
        await self._reads[0].wait(self._seconds)
        start = trailer_offset(self._slot.length)
        return bytes(self._block.view[start : start + self._slot.trailer_length])

    async def deliver(self, arriving: Arriving) -> None:
        """The payload to where it belongs; once, after `trailer`. Raises `PullFailed` (STALE) unless it is what it must
        be, and like `trailer`."""
        if not arriving.take():
            return
        try:
            place, hasher = arriving.chunk(ONLY_CHUNK), xxh3_64()
            reads = self._reads[-len(self._pieces) :]
            for (start, end), read in zip(self._pieces, reads, strict=True):
                await read.wait(self._seconds)
                piece = self._block.view[start:end]
                hasher.update(piece)
                place[start:end] = piece
            arriving.verify(ONLY_CHUNK, payload_sum=hasher.intdigest())
        finally:
            arriving.leave()

    def leave(self) -> None:
        """End it: its block is free as soon as nothing writes to it. May be called twice."""
        reads, self._reads = self._reads, ()
        if reads:
            reads[-1].when_ended(self._block.give_back)  # reads of one queue pair end in order
