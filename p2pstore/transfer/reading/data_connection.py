"""The connecting side of a data connection: requests other than reads, and stores. Over any `ByteStream`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB
from p2pstore.runtime.streams import ByteStream
from p2pstore.transfer.data_messages import (
    REPLIES,
    DataKind,
    GetPiece,
    Measure,
    Measured,
    PieceReply,
    PieceStatus,
    PieceTaken,
    Store,
    Stored,
    StorePart,
    StoreReply,
    SwarmLink,
)
from p2pstore.transfer.reading.data_requests import DataRequests
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.wire import DATA_REQUEST_LIMITS, ONE_WAY, Message, encode_frame

WAKE_BYTES: Final = 512 * KIB
"""Of a piece of a checkpoint that are waited for at once."""
STORE_PART_BYTES: Final = DATA_REQUEST_LIMITS.bulk_bytes


class DataConnection(DataRequests):
    """An authenticated connection to another peer, and what can be asked there. Every method raises as `DataRequests`
    says."""

    # --- requests ----------------------------------------------------------------------------

    async def request(self, kind: DataKind, message: Message) -> Message:
        """Ask something other than GET. Raises the error that the other side answered."""
        reply, _ = await self.request_bulk(kind, message, 0)
        return reply

    async def request_bulk(
        self, kind: DataKind, message: Message, max_bulk_bytes: int
    ) -> tuple[Message, bytearray]:
        """Like `request`, with the reply's bulk bytes. Raises `ProtocolError` when there are more of them
        than `max_bulk_bytes`."""
        with self.operation():
            request_id = await self.send(kind, message)
            reply: Message = await self.receive(kind, request_id, REPLIES[kind])
            if self.bulk_left > max_bulk_bytes:
                raise ProtocolError(
                    f"the reply to {kind.name} announces {self.bulk_left:,} bytes of bulk; "
                    f"at most {max_bulk_bytes:,} were expected"
                )
            bulk = await self.inbox.read(self.bulk_left)
            self.bulk_left = 0
            return reply, bulk

    async def get_piece(self, request: GetPiece, into: memoryview) -> PieceReply:
        """Ask for a piece of a checkpoint, which fills `into` when the reply's status says that it came."""
        with self.operation():
            self.inbox.expect(len(into))
            number = await self.send(DataKind.GET_PIECE, request)
            reply = await self.receive(DataKind.GET_PIECE, number, PieceReply)
            expected = len(into) if reply.status == PieceStatus.OK else 0
            if self.bulk_left != expected:
                raise ProtocolError(
                    f"a piece of {expected:,} bytes was answered with {self.bulk_left:,}"
                )
            await self._read_slowly(into[:expected])
            self.bulk_left = 0
            if expected:
                await self._say_taken()
            return reply

    async def _read_slowly(self, view: memoryview) -> None:
        """Fill `view` in steps: each packet of a slow link would cost a turn of the event loop otherwise."""
        wake_after = getattr(self.stream, "wake_after", None)
        if wake_after is None:  # blocking sockets wait in the kernel, TLS for its records
            await self.inbox.read_into(view)
            return
        await self.inbox.read_in_steps(view, WAKE_BYTES, wake_after)

    async def _say_taken(self) -> None:
        try:
            await self.stream.send(encode_frame(DataKind.PIECE_TAKEN, 0, PieceTaken(), flags=ONE_WAY))
        except OSError:
            self.close()  # the piece is here all the same

    async def become_link(self, request: SwarmLink) -> tuple[ByteStream, bytes]:
        """Have this connection be a link of a swarm: its stream, and what was received of it already. Raises what
        the other side answered; the connection goes on then."""
        await self.request(DataKind.SWARM_LINK, request)
        self.closed = True  # no more requests here; the stream is the caller's
        return self.stream, self.inbox.take_rest()

    async def measure(
        self, send: memoryview, receive: memoryview, enough: Callable[[], bool]
    ) -> tuple[int, Measured | None]:
        """Send `send` and have `receive` filled, again and again with one request ahead, until `enough()`:
        the bytes that were moved, and the last answer. Either view may be empty.

        Raises what the other side answers.
        """
        under_way: deque[int] = deque()
        moved, last = 0, None
        with self.operation():
            while under_way or not enough():
                while len(under_way) < 2 and not enough():
                    request = Measure(len(receive))
                    under_way.append(await self.send(DataKind.MEASURE, request, send))
                if not under_way:
                    break
                last = await self.receive(DataKind.MEASURE, under_way.popleft(), Measured)
                if (self.bulk_left, last.received_bytes) != (len(receive), len(send)):
                    raise ProtocolError("the other peer measures with other sizes than it was asked")
                await self.inbox.read_into(receive)
                self.bulk_left = 0
                moved += len(send) + len(receive)
        return moved, last

    async def store(
        self,
        request: Store,
        source: memoryview,
        finish_seconds: float = 0.0,
        progress: Progress | None = None,
    ) -> Stored:
        """Store a value on the other side; `source` is what `request` describes. `finish_seconds` is what
        the other side may need, beyond the usual, once it has all bytes. `progress` hears of each part.

        Raises `CapacityExceeded` or `ObjectTooLarge` when there is no room there, before any byte of the
        value was sent; `ValueError` when `source` changed meanwhile.
        """
        with self.operation():
            number = await self.send(DataKind.STORE, request)
            reply = await self.receive(DataKind.STORE, number, StoreReply)
            if not reply.send:
                return reply.stored
            self.unanswered += 1  # from here on, whatever ends this early must end the connection
            self.last_request_id = number = number % 0xFFFF_FFFF + 1
            try:
                await self._send_parts(number, source, progress)
            except DeadlineExceeded:
                raise
            except OSError:
                with contextlib.suppress(OSError):  # refused on the way: why, may have arrived
                    await self.receive(DataKind.STORE_PART, number, Stored)
                raise
            self.stream.progress_seconds += finish_seconds
            self.begin_flow()
            return await self.receive(DataKind.STORE_PART, number, Stored)

    async def _send_parts(self, number: int, source: memoryview, progress: Progress | None) -> None:
        for start in range(0, max(1, len(source)), STORE_PART_BYTES):
            bulk = source[start : start + STORE_PART_BYTES]
            end = start + len(bulk)
            frame = encode_frame(
                DataKind.STORE_PART,
                number,
                StorePart(start),
                flags=ONE_WAY if end < len(source) else 0,
                bulk_length=len(bulk),
            )
            await self.stream.send(frame, bulk)
            if progress is not None:
                progress(end, len(source))
