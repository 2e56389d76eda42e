"""Requests to a holder other than reads: values to store, pieces and links of swarms, tasks for others. Under trio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import CHUNK_BYTES, MIB, chunk_count, chunk_sum
from p2pstore.runtime.byte_budget import SHARE_BYTES, Account
from p2pstore.runtime.streams import AcceptedStream, BytesLike, total_bytes
from p2pstore.transfer.data_frames import next_frame, receive_bulk
from p2pstore.transfer.data_messages import (
    DataKind,
    GetPiece,
    PieceReply,
    Refused,
    StorePart,
    SwarmLink,
    SwarmLinked,
)
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.serving.read_answers import Outgoing, Traffic
from p2pstore.transfer.serving.serving_backends import (
    DataBackend,
    OfferedLink,
    OpenedPiece,
    OpenedStore,
    SwarmBackend,
)
from p2pstore.transfer.serving.session_rules import failure_frame, malformed, reply_frame
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    HEADER_BYTES,
    ONE_WAY,
    REPLY,
    Code,
    FrameBuffer,
    FrameHeader,
    Message,
    decode_body,
)

MAX_UNSENT_BYTES: Final = 4 * MIB
"""Answers of tasks that wait to be sent on one connection. While there are more, no further answer is made."""
MAX_HELD_ANSWER_BYTES: Final = SHARE_BYTES
"""Upper bound of what one answer, such as a snapshot, counts: one is always sent, and the next one after it."""
LARGE_ANSWERS: Final = frozenset(
    map(int, (DataKind.LIST, DataKind.LOOKUP, DataKind.SNAPSHOT, DataKind.GET_MANIFEST))
)
"""Kinds of requests, as plain numbers, whose answers may have megabytes."""


# --- requests in tasks of their own ----------------------------------------------------------


class RequestTasks:
    """Answers requests of one connection in tasks, so that none holds up another."""

    def __init__(
        self,
        backend: DataBackend,
        claims: TicketClaims,
        outgoing: Outgoing,
        account: Account,
        on_broken: Callable[[OSError], None],
    ) -> None:
        """`on_broken` is told when an answer could not be sent: half of it may have left."""
        self.count = 0
        """Requests that are not answered yet."""
        self._backend = backend
        self._claims = claims
        self._outgoing = outgoing
        self._account = account
        self._on_broken = on_broken
        self._one_large_answer = trio.StrictFIFOLock()
        self._unsent_bytes = 0
        self._sent = trio.Event()

    def start(
        self, nursery: trio.Nursery, header: FrameHeader, message: Message, body_bytes: int
    ) -> None:
        """Answer a request, whose body counts until that is done."""
        self.count += 1
        self._account.hold(body_bytes)
        nursery.start_soon(self._answer, header, message, body_bytes)

    async def _answer(self, header: FrameHeader, message: Message, body_bytes: int) -> None:
        if header.kind not in LARGE_ANSWERS:
            await self._make_and_send(header, message, body_bytes)
            return
        async with self._one_large_answer:  # the next one is made when this one was sent
            await self._make_and_send(header, message, body_bytes)

    async def _make_and_send(self, header: FrameHeader, message: Message, body_bytes: int) -> None:
        try:
            frame, bulk = await self._make(header, message, body_bytes)
            sent = 0 if header.flags & ONE_WAY else self._outgoing.send_now(frame)
        finally:
            self._backend.answered()
        if sent < len(frame) or bulk:
            await self._send(header, memoryview(frame)[sent:], bulk)

    async def _make(
        self, header: FrameHeader, message: Message, body_bytes: int
    ) -> tuple[bytes, Sequence[BytesLike]]:
        """The answer's frame and bulk bytes."""
        try:
            if header.kind == DataKind.PUSH:  # what a client waits for comes first
                await trio.lowlevel.checkpoint()
            while self._unsent_bytes >= MAX_UNSENT_BYTES:
                await self._sent.wait()
            kind = DataKind(header.kind)
            reply, bulk = await self._backend.handle(kind, message, self._claims)
            frame = reply_frame(header, reply, sum(map(len, bulk)))
            if len(frame) - HEADER_BYTES > DATA_REPLY_LIMITS.body_bytes:
                raise ValueError(f"the answer has {len(frame):,} bytes: ask for less")
            return frame, bulk
        except Exception as error:
            return failure_frame(header, error), ()
        finally:
            self.count -= 1
            self._account.release(body_bytes)

    async def _send(self, header: FrameHeader, frame: memoryview, bulk: Sequence[BytesLike]) -> None:
        if header.flags & ONE_WAY:
            return
        size = len(frame) + total_bytes(bulk)
        held_bytes = min(size, MAX_HELD_ANSWER_BYTES)
        self._unsent_bytes += size
        self._account.hold(held_bytes)
        try:
            await self._outgoing.send(frame, *bulk)
        except OSError as error:
            self._on_broken(error)
        finally:
            self._account.release(held_bytes)
            self._unsent_bytes -= size
            self._sent.set()
            self._sent = trio.Event()


# --- swarms ----------------------------------------------------------------------------------


class SwarmAnswers:
    """Answers requests of the swarms of checkpoints on one connection."""

    def __init__(
        self, swarms: SwarmBackend | None, peer: bytes, outgoing: Outgoing, traffic: Traffic
    ) -> None:
        self.sent_piece: OpenedPiece | None = None
        """The piece that was sent last, until the next request shows that the other side has it."""
        self._swarms = swarms
        self._peer = peer
        self._outgoing = outgoing
        self._traffic = traffic

    async def send_piece(self, header: FrameHeader, request: GetPiece) -> None:
        """Answer with a piece of a checkpoint. Its reader waits for it before it asks for anything else."""
        if (swarms := self._backend(header)) is None:
            return
        try:
            opened = await swarms.open_piece(request, self._peer)
        except Exception as error:
            await self._outgoing.send(failure_frame(header, error))
            return
        if isinstance(opened, PieceReply):
            await self._outgoing.send(reply_frame(header, opened))
            return
        self.sent_piece = opened
        try:
            size = len(opened.data)
            await self._outgoing.send(reply_frame(header, PieceReply(), size), opened.data)
            self._traffic.bytes += size
        except BaseException:
            self.confirm(whole=False)
            raise

    def confirm(self, *, whole: bool) -> None:
        """The other side has all of the piece that was sent last, or never will."""
        sent, self.sent_piece = self.sent_piece, None
        if sent is not None and self._swarms is not None:
            self._swarms.piece_sent(sent, whole)

    async def open_link(self, header: FrameHeader, request: SwarmLink) -> OfferedLink | None:
        """Answer a request for a link: the link, or None where there is none."""
        if (swarms := self._backend(header)) is None:
            return None
        try:
            offered = swarms.take_link(request.version, self._peer)
        except Exception as error:
            await self._outgoing.send(failure_frame(header, error))
            return None
        await self._outgoing.send(reply_frame(header, SwarmLinked()))
        return offered

    def _backend(self, header: FrameHeader) -> SwarmBackend | None:
        if self._swarms is None:
            text = "this peer takes part in no swarms"
            self._outgoing.refuse(header, Code.UNSUPPORTED, text)
        return self._swarms


# --- values to store -------------------------------------------------------------------------


async def receive_value(
    stream: AcceptedStream, frames: FrameBuffer, buffer: memoryview, opened: OpenedStore, seconds: float
) -> FrameHeader:
    """Receive all parts of a value straight into its place; returns the header of the last one.

    Raises `Refused` for a chunk that is not as announced and for parts out of order, `ProtocolError` for
    anything but parts, `DeadlineExceeded` when the value is not there after `seconds`, and `OSError` when
    the connection breaks. After that nothing writes to the place any more.
    """
    incoming = IncomingValue(opened.payload, opened.sums)
    with trio.move_on_after(seconds):
        while True:
            header = await _receive_part(stream, frames, buffer, incoming)
            if incoming.complete:
                return header
    length = len(opened.payload)
    raise DeadlineExceeded(f"a value of {length:,} bytes did not arrive within {seconds:.3g} s")


async def _receive_part(
    stream: AcceptedStream, frames: FrameBuffer, buffer: memoryview, incoming: IncomingValue
) -> FrameHeader:
    header, body = await next_frame(stream, frames, buffer)
    if header.kind != DataKind.STORE_PART or header.flags & REPLY:
        raise ProtocolError(f"a frame of kind {header.kind} in the middle of a value")
    part = decode_body(StorePart, body)
    try:
        for chunk in incoming.part(part.offset, header.bulk_length):
            await receive_bulk(stream, frames, chunk)
    except ProtocolError as error:
        raise malformed(header, str(error)) from error
    except ValueError as error:
        raise Refused(header.kind, header.request_id, Code.INVALID_ARGUMENT, str(error)) from error
    if bool(header.flags & ONE_WAY) is incoming.complete:
        raise ProtocolError("the last part of a value, and only that one, is to be answered")
    return header


class IncomingValue:
    """A value that arrives in parts and fills `view` from front to end, checked chunk by chunk. `sums` are the
    announced chunk sums, packed u64. Pure.

    Raises `ProtocolError` when there is not one sum per chunk.
    """

    def __init__(self, view: memoryview, sums: bytes) -> None:
        if len(sums) != 8 * chunk_count(len(view)):
            raise ProtocolError(f"{len(sums)} bytes of chunk sums for {len(view):,} bytes")
        self._view = view
        self._sums = memoryview(sums).cast("Q")
        self._position = 0

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and is right."""
        return self._position == len(self._view)

    def part(self, offset: int, length_bytes: int) -> Iterator[memoryview]:
        """Where the bytes of the next part go, chunk by chunk: fill each before the next is asked for.

        Raises `ProtocolError`, before the first, for a part that does not begin where the one before
        ended, is empty, goes beyond the value or ends within a chunk; `ValueError` for a chunk that is
        not the one announced.
        """
        end = offset + length_bytes
        if offset != self._position or end > len(self._view):
            raise ProtocolError(
                f"a part from byte {offset:,} to {end:,} of a value of {len(self._view):,} bytes, of "
                f"which {self._position:,} have arrived"
            )
        if (end % CHUNK_BYTES or not length_bytes) and end != len(self._view):
            raise ProtocolError("a part that ends within a chunk")
        return self._fill(end)

    def _fill(self, end: int) -> Iterator[memoryview]:
        while self._position < end:
            number = self._position // CHUNK_BYTES
            chunk = self._view[self._position : self._position + CHUNK_BYTES]
            yield chunk
            if chunk_sum(chunk) != self._sums[number]:
                raise ValueError(
                    f"chunk {number} is not the one that was announced: the value was changed while "
                    "it was being stored, or spoilt on its way"
                )
            self._position += len(chunk)
