"""The connecting side of a data connection: requests, verified pulls, stores. Over any `ByteStream`.

Bytes are received straight into the destination and each 1 MiB chunk is checked as soon as it is
there, while it is still in the cache: checking after the fact would cost a quarter of the throughput.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import CHUNK_BYTES, KIB, MAX_OBJECT_BYTES
from p2pstore.runtime.flow import NO_HASTE, Haste
from p2pstore.runtime.streams import ByteStream
from p2pstore.transfer.data_messages import (
    REPLIES,
    DataKind,
    Get,
    GetItem,
    GetPiece,
    Keeps,
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
from p2pstore.transfer.reading.arriving import Arriving
from p2pstore.transfer.reading.data_requests import DataRequests
from p2pstore.transfer.reading.span_reads import (
    Asked,
    BatchItem,
    ItemOutcome,
    SpanReader,
    Wanted,
    check_reply,
    failure_of,
    receive_answer,
)
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.transfer.transport import Destination, Pulled, PullFailed, resumable
from p2pstore.wire import DATA_REQUEST_LIMITS, ONE_WAY, Code, Message, encode_frame

NO_CHUNK: Final = MAX_OBJECT_BYTES // CHUNK_BYTES
"""Beyond the end of any object: asks for its slot and trailer alone."""
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

    async def pull(
        self,
        digest: bytes,
        destination: Destination,
        slot_hint: int = 0,
        haste: Haste = NO_HASTE,
        expected_bytes: int = 0,
        keeps: Keeps = Keeps.NO,
    ) -> Pulled:
        """Read one object; `expected_bytes` is about its length, where that is known. Raises `PullFailed`, or
        what `destination.prepare` raises. When the haste is finite, the other side may be too busy for a large object
        (`PullFailed`, BUSY); when the object is kept, or could be, it may also be BUSY because others have it."""
        wanted = Wanted(digest, resumable(destination), slot_hint)
        may_refuse = haste.answer_seconds < math.inf
        with self.operation(haste):
            await SpanReader(
                self, [wanted], keeps=keeps, may_refuse=may_refuse, expected_bytes=expected_bytes
            ).run()
            return _pulled(wanted)

    async def look(
        self, digest: bytes, slot_hint: int = 0, haste: Haste = NO_HASTE
    ) -> tuple[Slot, TrailerBody]:
        """An object's slot and trailer, verified, and none of its bytes. Raises like `pull`."""
        with self.operation(haste):
            item = GetItem(digest, NO_CHUNK, 0, slot_hint)
            number = await self.send(DataKind.GET, Get([item]))
            (reply,) = await receive_answer(self, Asked(number, (item,)))
            return check_reply(reply, item)

    async def pull_many(
        self, items: Sequence[BatchItem], haste: Haste = NO_HASTE, keeps: Keeps = Keeps.NO
    ) -> list[ItemOutcome]:
        """Read many objects, small ones together in few frames: per item what was pulled, or why not.

        An item's own failure, and what its `destination.prepare` raises, is that item's result. When the
        connection fails on the way, what was pulled before stands and the rest is `PullFailed`; raises
        only when nothing was pulled. `haste` and `keeps` as for `pull`.
        """
        wanted = [Wanted(digest, destination) for digest, destination in items]
        with self.operation(haste):
            failure = PullFailed(Code.INTERNAL, "it was not read")
            try:
                await SpanReader(self, wanted, keeps=keeps).run()
            except (OSError, ProtocolError, PullFailed) as error:
                if all(each.outcome is None for each in wanted):
                    raise
                self.close()
                failure = failure_of(error)
                if any(each.outcome is error for each in wanted):
                    text = "the connection ended with an item before this one"
                    failure = PullFailed(Code.UNAVAILABLE, text, retriable=True)
            return [failure if each.outcome is None else each.outcome for each in wanted]

    async def pull_slices(
        self, digest: bytes, arriving: Arriving, reader: int, slot_hint: int = 0, haste: Haste = NO_HASTE
    ) -> None:
        """Bring chunks of a value that others read as well, until none are free. Raises as `pull`, and
        `AnotherVersion` when this holder has another one."""
        wanted = Wanted(digest, None, slot_hint, arriving)
        may_refuse = haste.answer_seconds < math.inf
        with self.operation(haste):
            await SpanReader(self, [wanted], reader, may_refuse=may_refuse).run()
            _pulled(wanted)


def _pulled(wanted: Wanted) -> Pulled:
    """The outcome of the only object that was wanted. Raises it when it is an error."""
    outcome = wanted.outcome
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Pulled)
    return outcome
