"""Requests and their replies on a data connection, from the hello on. Over any `ByteStream`.

One task or thread uses a connection at a time (`connection_pool` sees to that), so replies come in the order of
requests. When an operation ends in the middle of a reply, by error or cancellation, the connection is closed: its
remaining bytes would be taken for the next reply.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from xxhash import xxh3_64

from p2pstore.errors import AuthenticationFailed, DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB
from p2pstore.runtime.flow import MAX_LEAST_RATE, NO_LIMITS, Flow, HolderLimits, Outrun
from p2pstore.runtime.streams import MAX_GATHER, ByteStream, advance
from p2pstore.transfer.data_messages import (
    MAX_DATA_VERSION,
    MIN_DATA_VERSION,
    DataKind,
    Hello,
    HelloReply,
    Proof,
)
from p2pstore.transfer.failover import PullFailed, Unannounced
from p2pstore.transfer.read_tickets import NONCE_BYTES, GrantedTicket, check_proof, prove
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    ERROR,
    HEADER_BYTES,
    PREFACE_DATA,
    REPLY,
    Code,
    Failure,
    FrameHeader,
    Message,
    decode_body,
    decode_header,
    encode_frame,
    error_of,
    negotiate_version,
)

R = TypeVar("R", bound=Message)
_NO_BULK: Final = memoryview(b"")
HELLO_LIMITS: Final = HolderLimits(least_rate=MAX_LEAST_RATE)
"""A few hundred bytes are no reason to wait longer than for the first of them."""

INBOX_BYTES: Final = 128 * KIB
HEAD_BYTES: Final = 4 * KIB
"""Most bytes received at once before a large payload: a reply's head with few payload bytes."""
SUMMED_BYTES: Final = 256 * KIB
"""Most bytes received before they are summed: more would leave the core's own cache, through which each byte passes
twice, in the kernel's memory and in the destination."""


class DataRequests:
    """An authenticated connection to another peer. Make one with `open`.

    Every operation raises `OSError` when the connection breaks, `DeadlineExceeded` when what is received lags behind
    its least rate by `stream.progress_seconds`, or as its limits say (`p2pstore.runtime.streams`), and `ProtocolError`
    when the other side talks nonsense; the connection is closed then. All of an operation happens in `operation()`.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.inbox = Inbox(stream)
        self.incarnation = 0
        self.version = MIN_DATA_VERSION
        self.closed = False
        self.abandoned = False
        self.unanswered = 0
        """Requests whose replies have not begun."""
        self.bulk_left = 0
        """Bytes of the reply's bulk that come next."""
        self.damaged = False
        """The other side broke the protocol; the connection takes no more requests."""
        self.last_request_id = 0
        self._later_seconds: float | None = None
        """The limit for each wait after the first answer has begun, where that is another one."""

    @classmethod
    async def open(cls, stream: ByteStream, granted: GrantedTicket) -> Self:
        """Shake hands over a fresh stream. Raises `AuthenticationFailed` or `ProtocolMismatch`; then, as
        after any error, the stream is closed."""
        connection = cls(stream)
        try:
            await connection._shake_hands(granted)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _shake_hands(self, granted: GrantedTicket) -> None:
        self.begin_flow(HELLO_LIMITS)
        nonce = os.urandom(NONCE_BYTES)
        hello = Hello(MIN_DATA_VERSION, MAX_DATA_VERSION, granted.ticket, nonce)
        self.unanswered += 1
        await self.stream.send(PREFACE_DATA + encode_frame(DataKind.HELLO, 0, hello))
        reply = await self.receive(DataKind.HELLO, 0, HelloReply)
        own_versions = MIN_DATA_VERSION, MAX_DATA_VERSION
        self.version = negotiate_version(reply.version, reply.version, own_versions)
        if len(reply.nonce) != NONCE_BYTES or not check_proof(
            granted.secret, b"server", nonce, reply.nonce, reply.proof
        ):
            raise AuthenticationFailed(
                "the other peer did not prove that it holds this cluster's key: something else answers at "
                "its data address, or its cluster key file differs"
            )
        self.incarnation = reply.incarnation
        proof = Proof(prove(granted.secret, b"client", nonce, reply.nonce))
        await self.stream.send(encode_frame(DataKind.PROOF, 0, proof))

    def close(self) -> None:
        """Close at once."""
        self.closed = True
        self.stream.close()

    def abandon(self) -> None:
        """End it while it is in use: the user fails at once, and does not try again over another connection."""
        self.abandoned = True
        self.stream.abort()

    def operation(self, limits: HolderLimits = NO_LIMITS) -> Operation:
        """Requests and replies in this block belong together."""
        return Operation(self, limits)

    @property
    def flow(self) -> Flow:
        """The flow of bytes since `begin_flow`."""
        return self.inbox.flow

    def begin_flow(self, limits: HolderLimits = NO_LIMITS) -> None:
        """Set the pace for bytes that are received from now on."""
        stream = self.stream
        patience_seconds = stream.progress_seconds
        self._later_seconds = None
        if limits.answer_seconds < patience_seconds:
            stream.receive_seconds = patience_seconds = limits.answer_seconds
            if limits.begin_seconds < patience_seconds:
                self._later_seconds, stream.receive_seconds = patience_seconds, limits.begin_seconds
        elif stream.receive_seconds is not None:
            stream.receive_seconds = None
        self.inbox.flow.begin(patience_seconds, limits.least_rate)

    @property
    def in_the_middle(self) -> bool:
        """Whether the next exchange cannot begin here: an earlier one is unfinished, or was damaged."""
        return self.unanswered > 0 or self.bulk_left > 0 or self.damaged

    # --- frames ------------------------------------------------------------------------------

    async def send(self, kind: DataKind, message: Message, bulk: memoryview = _NO_BULK) -> int:
        """Send a request: its number."""
        number, frame = self.frame(kind, message, len(bulk))
        await (self.stream.send(frame, bulk) if bulk else self.stream.send(frame))
        return number

    def frame(self, kind: DataKind, message: Message, bulk_length: int = 0) -> tuple[int, bytes]:
        """The next request's number, and its frame, which is to be sent at once."""
        self.last_request_id = number = self.last_request_id % 0xFFFF_FFFF + 1
        self.unanswered += 1
        return number, encode_frame(kind, number, message, bulk_length=bulk_length)

    async def receive(self, kind: DataKind, request_id: int, reply_type: type[R]) -> R:
        """Header and body of the next reply; its bulk bytes are left to the caller. Raises what the other side
        answered instead: `PullFailed` for GET and GET_SMALL, else the error that its code means."""
        if self.bulk_left:
            raise ProtocolError("the previous reply's bulk bytes were not read")
        try:
            header = decode_header(await self.inbox.take(HEADER_BYTES, soon=True), DATA_REPLY_LIMITS)
        except DeadlineExceeded:
            if self._later_seconds is None:
                raise
            self.flow.answer_seconds = waited_seconds = self.stream.receive_seconds or 0.0
            raise Outrun(f"no answer began within {waited_seconds:.3g} s: another is asked") from None
        self.flow.answered()
        if self._later_seconds is not None:
            self.stream.receive_seconds, self._later_seconds = self._later_seconds, None
        body = await self.inbox.take(header.body_length)
        if header.flags & ERROR:
            failure = decode_body(Failure, body)
            self._check_order(header, kind, request_id, failure)
            if kind in (DataKind.GET, DataKind.GET_SMALL):
                raise PullFailed(_known(failure.code), failure.text)
            raise error_of(failure.code, failure.text, failure.detail)
        self._check_order(header, kind, request_id, None)
        return decode_body(reply_type, body)

    def _check_order(
        self, header: FrameHeader, kind: DataKind, request_id: int, failure: Failure | None
    ) -> None:
        """Replies come in the order of requests, because one task at a time uses the connection."""
        if failure is not None and header.kind in (DataKind.HELLO, DataKind.PROOF):
            return  # the other side ends the connection and says why
        if not header.flags & REPLY or (header.kind, header.request_id) != (kind, request_id):
            raise ProtocolError(
                f"expected the reply {request_id} of kind {kind.name}, "
                f"got {header.request_id} of kind {header.kind}"
            )
        if failure is not None and header.bulk_length:
            raise ProtocolError("a failure carries bulk bytes")
        self.unanswered -= 1
        self.bulk_left = header.bulk_length


class Operation:
    """Closes the connection when an exchange does not end where the next one can begin. Entering raises
    `ConnectionResetError` when it is closed already."""

    __slots__ = ("_connection", "_limits")

    def __init__(self, connection: DataRequests, limits: HolderLimits) -> None:
        self._connection = connection
        self._limits = limits

    def __enter__(self) -> None:
        if self._connection.closed:
            raise ConnectionResetError("the connection is closed")
        self._connection.begin_flow(self._limits)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        if connection.in_the_middle or is_damage(error) or connection.abandoned:
            connection.close()


def is_damage(error: BaseException | None) -> bool:
    """Whether what this side received makes no sense, so that it should not go on with the other."""
    if isinstance(error, Unannounced):  # its bytes are what it says
        return False
    if isinstance(error, PullFailed):
        return error.code in (Code.STALE, Code.MALFORMED)
    return isinstance(error, (OSError, ProtocolError))


def _known(code: int) -> Code:
    """A code as sent; INTERNAL for one that a newer version made up."""
    return Code(code) if code in Code._value2member_map_ else Code.INTERNAL


class Inbox:
    """Received bytes before they have a place: headers, bodies and small payloads that came with them.

    One receive brings a small reply whole. Large payloads bypass it. All that is received counts in `flow`, which the
    owner begins anew with each exchange; every method that receives raises `DeadlineExceeded` when it is too slow.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(INBOX_BYTES))
        self._start = 0
        self._end = 0
        self._ahead_bytes = INBOX_BYTES
        self.received_any = False
        """To be set back by its user: tells a connection that went stale while idle from one that broke in the middle
        of an answer."""
        self.flow = Flow()
        self._receive_all = getattr(stream, "receive_all", None)

    def expect(self, payload_bytes: int) -> None:
        """Announce a payload for `read_into`: few of its bytes should come with a head."""
        self._ahead_bytes = HEAD_BYTES if payload_bytes >= INBOX_BYTES else INBOX_BYTES

    def expect_head(self, head_bytes: int, payload_bytes: int) -> None:
        """Announce a head of `head_bytes`, and then payloads of up to `payload_bytes` each, for `fill` and
        `read_summed`."""
        in_place = self._receive_all is not None or payload_bytes >= INBOX_BYTES
        self._ahead_bytes = head_bytes if in_place else INBOX_BYTES

    async def fill(self, views: Sequence[memoryview], length_bytes: int) -> None:
        """Fill many views, none empty and `length_bytes` in all, one after the other. Raises as `read_into`."""
        first = 0
        if self._receive_all is None:
            for view in views:
                await self.read_into(view)
            return
        while self._start < self._end and first < len(views):
            count = self._move_into(views[first])
            length_bytes -= count
            if count < len(views[first]):
                views = [views[first][count:], *views[first + 1 :]]
                first = 0
                break
            first += 1
        left = list(views[first:])
        while length_bytes:
            began = time.monotonic()
            count = self._count(await self._receive_all(left[:MAX_GATHER]), began)
            length_bytes -= count
            left = left[advance(left, 0, count) :]

    def held(self, length: int) -> memoryview | None:
        """The next `length` bytes in place, until the next call, if they are here already."""
        start, end = self._start, self._start + length
        if end > self._end:
            return None
        self._start = end
        return self._buffer[start:end]

    async def take(self, length: int, *, soon: bool = False) -> memoryview:
        """The next `length` bytes: in place, until the next call, unless they are too many for that. `soon`: they
        should be here within microseconds. Raises as `read_into`."""
        if length > INBOX_BYTES:
            return memoryview(await self.read(length))
        while (view := self.held(length)) is None:
            await self._receive(length, soon=soon)
        return view

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `ConnectionResetError` when the other side closes before."""
        position = self._move_into(view)
        while position < len(view):
            if len(view) >= INBOX_BYTES:
                began = time.monotonic()
                position += self._count(await self._stream.receive_into(view[position:]), began)
            else:
                await self._receive(1)
                position += self._move_into(view[position:])

    async def read_summed(self, view: memoryview, *, soon: bool = False) -> int:
        """`read_into` a large view; the xxh3-64 of what comes, made of each piece while it is in the cache."""
        hasher = xxh3_64()
        position = self._move_into(view)
        hasher.update(view[:position])
        receive = self._stream.receive_soon if soon else self._stream.receive_into
        while position < len(view):
            began = time.monotonic()
            count = self._count(await receive(view[position : position + SUMMED_BYTES]), began)
            hasher.update(view[position : position + count])
            position += count
        digest: int = hasher.intdigest()
        return digest

    async def read_in_steps(
        self, view: memoryview, step_bytes: int, wake_after: Callable[[int], None]
    ) -> None:
        """`read_into` a large view, woken when `step_bytes` more have come, or the rest; `wake_after` sees to it."""
        position = self._move_into(view)
        step = 1
        while position < len(view):
            wanted = min(step_bytes, len(view) - position)
            if wanted != step:
                step = wanted
                wake_after(step)
            began = time.monotonic()
            position += self._count(await self._stream.receive_into(view[position:]), began)
        if step != 1:
            wake_after(1)

    async def read(self, length: int) -> bytearray:
        """The next `length` bytes, in memory of their own."""
        data = bytearray(length)
        await self.read_into(memoryview(data))
        return data

    async def discard(self, length: int) -> None:
        """Read `length` bytes and forget them."""
        scratch = memoryview(bytearray(min(length, INBOX_BYTES)))
        while length:
            count = min(length, len(scratch))
            await self.read_into(scratch[:count])
            length -= count

    def take_rest(self) -> bytes:
        """All received bytes that were not read, for a reader of the stream itself."""
        rest = bytes(self._buffer[self._start : self._end])
        self._start = self._end = 0
        return rest

    async def _receive(self, wanted_bytes: int, *, soon: bool = False) -> None:
        """Receive more, with room for `wanted_bytes` from the first unread byte on."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + wanted_bytes > INBOX_BYTES:
            held = self._end - self._start
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        limit = max(self._start + wanted_bytes, self._end + self._ahead_bytes)
        room = self._buffer[self._end : limit]
        receive = self._stream.receive_soon if soon else self._stream.receive_into
        began = time.monotonic()
        self._end += self._count(await receive(room), began)

    def _move_into(self, view: memoryview) -> int:
        count = min(len(view), self._end - self._start)
        if count:  # at most 128 KiB: too little to matter that this holds the GIL
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
        return count

    def _count(self, count: int, began: float) -> int:
        """Count a receive that began then."""
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        self.received_any = True
        if not self.flow.moved(count, time.monotonic() - began):
            raise self.flow.too_slow()
        return count
