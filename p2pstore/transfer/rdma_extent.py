"""An object of one chunk by RDMA: trailer and payload are asked for at once, and summed as they come. Under trio.

It can do without a round trip of its own for the trailer, and without waiting for all before anything is summed. Where
the payload goes is known only when the trailer is there, so it is read into a block: all pieces but the last one are
summed and copied on while the others still come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from xxhash import xxh3_64

from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.transfer.arriving import Arriving
from p2pstore.transfer.layout import Slot, trailer_offset
from p2pstore.transfer.rdma_reads import Line, Piece, Read
from p2pstore.transfer.rdma_staging import Block

PIECE_BYTES: Final = 512 * KIB
"""What is summed at once: still in the cache, and far more than a work request costs."""
MOST_PIECES: Final = 1 + CHUNK_BYTES // PIECE_BYTES
ONLY_CHUNK: Final = 0


class ExtentRead:
    """One object's payload and trailer on their way into a block, at the same places as in the extent. `leave` it at
    the end."""

    def __init__(self, line: Line, slot: Slot, block: Block, seconds: float) -> None:
        self.line = line
        self._slot = slot
        self._block = block
        self._seconds = seconds
        self._reads: Sequence[Read] = ()

    @classmethod
    async def begin(cls, line: Line, block: Block, slot: Slot, seconds: float) -> ExtentRead:
        """Ask for all of it, into this block, which is given back at the end; each part has so many seconds. Raises
        `ReadFailed`, and `ProtocolError` for a slot that leads outside of the other side's memory."""
        made = cls(line, slot, block, seconds)
        pieces = [
            Piece(slot.offset + start, end - start, block.address + start)
            for start, end in made._bounds()
        ]
        try:
            made._reads = await line.engine.read_pieces(line, pieces, block.memory, soon=True)
        except BaseException:
            block.give_back()
            raise
        return made

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """What each read brings: the trailer, with a payload of one piece before it, then the payload's pieces."""
        length, trailer = self._slot.length, trailer_offset(self._slot.length)
        together = length <= PIECE_BYTES
        yield 0 if together else trailer, trailer + self._slot.trailer_length
        if not together:
            for start in range(0, length, PIECE_BYTES):
                yield start, min(start + PIECE_BYTES, length)

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
            pieces = range(0, self._slot.length, PIECE_BYTES)
            for start, read in zip(pieces, self._reads[-len(pieces) :], strict=True):
                await read.wait(self._seconds)
                end = min(start + PIECE_BYTES, self._slot.length)
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
