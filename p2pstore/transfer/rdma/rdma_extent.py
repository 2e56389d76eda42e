"""An object of one chunk by RDMA: trailer and payload are asked for at once, and summed as they come. Under trio.

It can do without a round trip of its own for the trailer, and, where the slot was seen before, for the slot; and
without waiting for all before anything is summed. Where the payload goes is known only when the trailer is there, so it
is read into a block. A large one comes in two pieces, of which the first is summed and copied on while the second
still comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from xxhash import xxh3_64

from p2pstore.memory.segment_layout import SLOT_BYTES, Slot, round_up, trailer_offset
from p2pstore.objects import KIB
from p2pstore.transfer.rdma.rdma_reads import Line, Piece, Read
from p2pstore.transfer.rdma.rdma_rules import first_of_two
from p2pstore.transfer.rdma.rdma_staging import Block
from p2pstore.transfer.reading.arriving import Arriving

WHOLE_BYTES: Final = 512 * KIB
"""Payloads up to this come in one piece, with the trailer: a work request more costs more than it would save."""
MOST_PIECES: Final = 4
"""A slot, a trailer and two pieces of a payload."""
ONLY_CHUNK: Final = 0


def block_bytes_for(slot: Slot) -> int:
    """What a block needs for such an object: its payload and trailer as they lie in the extent, then its slot."""
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
        """Ask for all of it, into this block, which is given back at the end; each part has so many seconds. With
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
        """What each read brings: the trailer, with a payload of one piece before it, then the payload's pieces."""
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
        """Nobody looks at it any more: its block is free as soon as nothing writes to it. May be said twice."""
        reads, self._reads = self._reads, ()
        if reads:
            reads[-1].when_ended(self._block.give_back)  # reads of one queue pair end in order
