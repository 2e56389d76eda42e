"""The peer's end of the local socket: accepts clients, cuts frames, answers them. A trio shell.

What a request means is the `LocalBackend`'s business. All requests that have arrived are handled
before anything is sent, and all their answers go out in one send; what else they gave to do comes after that. A
request whose answer takes time runs in a task of its connection, so that it holds up no other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Final

import msgspec
import trio

from p2pstore.errors import (
    AnswerTooLarge,
    AuthenticationFailed,
    DeadlineExceeded,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
)
from p2pstore.local import older_put_messages
from p2pstore.local.local_protocol import (
    IN_COLUMNS,
    Access,
    Hello,
    LocalBackend,
    LocalClient,
    LocalKind,
    RequestObserver,
)
from p2pstore.objects import encode_namespace
from p2pstore.runtime.linux import connected_user, is_shortage, shortage
from p2pstore.runtime.polling import LOCAL_SHORT_SECONDS, Polling
from p2pstore.runtime.streams import ANCILLARY_BYTES, check_descriptors
from p2pstore.runtime.trio_streams import TrioStream
from p2pstore.wire import (
    ERROR,
    HEADER_BYTES,
    HELLO_LIMITS,
    LOCAL_LIMITS,
    ONE_WAY,
    PREFACE_BYTES,
    PREFACE_LOCAL,
    REPLY,
    Code,
    Empty,
    FrameBuffer,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    encode_failure,
    encode_frame,
    negotiate_version,
)

logger = logging.getLogger("p2pstore.local")

MAX_IN_FLIGHT: Final = 64
HELLO_SECONDS: Final = 5.0
SEND_SECONDS: Final = 30.0
"""A client that takes none of its answers in this time is cut off."""
RECEIVE_BYTES: Final = 64 * 1024
TURN_SECONDS: Final = 0.0005
"""Time in which a connection goes on answering without giving up its turn of the event loop, and may wait for more to
answer."""
MAX_PASSED: Final = 1
MAX_OUTGOING_BYTES: Final = 16 * 1024 * 1024


WRITING: Final = frozenset(
    {
        *(LocalKind.RESERVE, LocalKind.COMMIT, LocalKind.ABORT, LocalKind.PLACE, LocalKind.STORED),
        *(LocalKind.REMOVE, LocalKind.REPLICATE, LocalKind.PIN, LocalKind.FLUSH, LocalKind.LEAVE),
        *(LocalKind.CHECKPOINT_PUBLISH, LocalKind.CHECKPOINT_FETCH, LocalKind.CHECKPOINT_FOLLOW),
        *(LocalKind.CHECKPOINT_UPDATE, LocalKind.CHECKPOINT_REMOVE),
    }
)
"""Requests refused to a client that connected only to read."""
_HELLO: Final = int(LocalKind.HELLO)
_KINDS: Final = {int(kind): IN_COLUMNS.get(kind, kind) for kind in LocalKind}
_holders = itertools.count(1)


class _Connection:
    """One client from its hello to its end."""

    def __init__(
        self,
        backend: LocalBackend,
        observer: RequestObserver | None,
        others_read_only: bool,
        sock: socket.socket,
    ) -> None:
        self._limited = others_read_only and connected_user(sock) not in (os.geteuid(), 0)
        """Whether this client's user may only read."""
        self._observer = observer
        self._sock = sock
        self._stream = TrioStream(sock, SEND_SECONDS)
        self._backend = backend
        self._request_types = backend.request_types
        self._frames = FrameBuffer(HELLO_LIMITS)
        self._client: LocalClient | None = None
        self._in_flight = 0
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._sending = False
        self._turn_began = 0.0
        self._polling = Polling(shares_thread=True, short_seconds=LOCAL_SHORT_SECONDS)
        self._observed: list[tuple[LocalKind, Message, Message | Exception | None, float]] = []
        """Requests that were answered at once, which the observer is still to be told of."""
        self._one_way: deque[Awaitable[None]] = deque()
        """Unfinished one-way requests: they are done before more is received."""
        self._passed: list[int] = []
        """Descriptors that came with the hello."""

    async def run(self) -> None:
        """Serve until either side ends. Whatever the client sends, only cancellation gets out."""
        try:
            await self._serve()
        except* (ProtocolError, ProtocolMismatch, DeadlineExceeded) as problems:
            logger.warning("dropped %s: %s", self._who(), problems.exceptions[0])
        except* OSError as problems:
            logger.debug("lost %s: %s", self._who(), problems.exceptions[0])
        except* Exception:
            logger.exception("dropped %s after an error of this peer", self._who())
        finally:
            while self._one_way:
                await _call_off(self._one_way.popleft())
            self._stream.close()
            if self._client is not None:
                self._backend.client_gone(self._client)
            for descriptor in self._passed:
                os.close(descriptor)

    def _who(self) -> str:
        if self._client is None:
            return "a local client that had not said hello"
        client = self._client
        return f"local client {client.name or client.session} (process {client.process_id})"

    async def _serve(self) -> None:
        with trio.move_on_after(HELLO_SECONDS) as scope:
            client = await self._greet()
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"no hello within {HELLO_SECONDS:g} s")
        if client is None:
            return
        async with trio.open_nursery() as nursery:
            data = b""
            try:
                while True:
                    unsent = self._answer_now(client, data, nursery)
                    if unsent:
                        await self._send(unsent)
                    while self._one_way:
                        await self._one_way.popleft()
                    data = await self._receive_next()
                    if not data:
                        break
            finally:
                self._settle()
            nursery.cancel_scope.cancel()  # the client has gone: answers are of no use

    async def _receive_next(self) -> bytes:
        """The next requests; none when the client has closed. A lone caller's have often come, or are about to: a turn
        of the event loop costs more than many an answer, and being woken more than most."""
        now = time.monotonic()
        if now - self._turn_began > TURN_SECONDS:
            self._settle()
            await trio.lowlevel.checkpoint()
            self._turn_began = now = time.monotonic()
        try:
            return self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            pass
        polls = self._polling.is_due(now) and not self._in_flight
        if polls:
            data = self._polling.poll(partial(self._sock.recv, RECEIVE_BYTES), now)
            if data is not None:
                return data
        self._settle()
        data = await self._receive()
        if not polls:
            self._polling.slept(self._turn_began - now)
        return data

    async def _receive(self) -> bytes:
        """Wait for bytes. None at all when the client has closed."""
        while True:
            await trio.lowlevel.wait_readable(self._sock.fileno())
            self._turn_began = time.monotonic()
            try:
                return self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue

    def _receive_passed(self, count: int) -> bytes:
        """Bytes that have come, and descriptors with them: only with the beginning of a hello any are taken."""
        data, ancillary, flags, _ = self._sock.recvmsg(count, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        self._passed += check_descriptors(ancillary, flags)
        if len(self._passed) > MAX_PASSED:
            raise ProtocolError(f"it passed {len(self._passed)} descriptors")
        return data

    async def _greet(self) -> LocalClient | None:
        """Take the preface and the hello, and pass the segments. None when the client left."""
        preface = b""
        while len(preface) < PREFACE_BYTES:
            await trio.lowlevel.wait_readable(self._sock.fileno())
            with contextlib.suppress(BlockingIOError):
                data = self._receive_passed(PREFACE_BYTES - len(preface))
                preface += data
                if not data and not preface:
                    return None
                if not data or not PREFACE_LOCAL.startswith(preface):
                    raise ProtocolError("it does not speak the local protocol")
        while (frame := self._frames.next_frame()) is None:
            data = await self._receive()
            if not data:
                raise ProtocolError("it left in the middle of its hello")
            self._frames.feed(data)
        self._frames.limits = LOCAL_LIMITS
        header, body = frame
        if header.kind != LocalKind.HELLO:
            raise ProtocolError(f"it began with a frame of kind {header.kind} instead of a hello")
        hello = decode_body(Hello, body)
        try:
            version = negotiate_version(hello.min_version, hello.max_version)
            encode_namespace(hello.namespace)
            access = Access(hello.access)
        except (ProtocolMismatch, ValueError) as error:
            await self._send([_failure(header, error)])
            raise ProtocolMismatch(str(error)) from error
        return await self._welcome(header, hello, access, version)

    async def _welcome(
        self, header: FrameHeader, hello: Hello, access: Access, version: int
    ) -> LocalClient | None:
        if self._limited:
            access = Access.READ
        client = LocalClient(
            next(_holders),
            hello.namespace,
            access,
            hello.process_id,
            hello.client[:64],
            reads_locations=hello.location_table,
            directory=self._passed[0] if hello.directory and self._passed else -1,
            checkpoint=hello.checkpoint,
            hazards=hello.hazards,
        )
        try:
            reply, descriptors = self._backend.welcome(client, version)
        except P2PStoreError as error:
            await self._send([_failure(header, error)])
            return None
        except OSError as error:
            if not is_shortage(error):
                raise
            text = f"the peer cannot take another client: {shortage(error)}"
            await self._send([encode_failure(header.kind, header.request_id, Code.BUSY, text)])
            return None
        self._client = client
        frame = encode_frame(header.kind, header.request_id, reply, flags=REPLY)
        sent = socket.send_fds(self._sock, [frame], descriptors)  # nothing was sent before: it fits
        self._backend.welcomed(client)
        if sent < len(frame):
            await self._send([frame[sent:]])
        return client

    def _answer_now(self, client: LocalClient, data: bytes, nursery: trio.Nursery) -> list[bytes]:
        """Act on what has arrived; the answers, or what is left of them, that the socket does not take at once."""
        unsent: list[bytes] = []
        try:
            unsent = self._handle_all(client, data, nursery)
            if unsent and not (self._sending or self._outgoing):
                joined = unsent[0] if len(unsent) == 1 else b"".join(unsent)
                sent = self._send_now(joined)
                unsent = [joined[sent:]] if sent < len(joined) else []
            return unsent
        finally:
            self._backend.make_ready()
            if unsent or self._in_flight:
                self._settle()

    def _settle(self) -> None:
        """Do what must not keep the client waiting: before others have their turn."""
        observed, self._observed = self._observed, []
        if self._observer is not None and self._client is not None:
            for kind, message, answer, seconds in observed:
                self._observer.answered(self._client, kind, message, answer, seconds, None)
        self._backend.handled()

    def _handle_all(self, client: LocalClient, data: bytes, nursery: trio.Nursery) -> list[bytes]:
        """Act on every request that has arrived whole; the answers that there are at once."""
        answered: list[bytes] = []
        frame = self._frames.sole_frame(data)
        if frame is not None:
            self._handle(client, *frame, answered, nursery)
            return answered
        self._frames.feed(data)
        while (frame := self._frames.next_frame()) is not None:
            self._handle(client, *frame, answered, nursery)
        return answered

    def _handle(
        self,
        client: LocalClient,
        header: FrameHeader,
        body: bytes,
        answered: list[bytes],
        nursery: trio.Nursery,
    ) -> None:
        """Act on one request: add its answer to `answered`, or start the task that will send it."""
        request_type = self._request_types.get(header.kind)
        if header.flags & (REPLY | ERROR) or header.kind == _HELLO:
            raise ProtocolError(f"it sent a frame of kind {header.kind} that is no request")
        if request_type is None:
            text = f"this peer does not know requests of kind {header.kind}: it is too old"
            if not header.flags & ONE_WAY:
                answered.append(encode_failure(header.kind, header.request_id, Code.UNSUPPORTED, text))
            return
        kind = _KINDS[header.kind]
        begin = time.monotonic()
        try:
            message = decode_body(request_type, body)
        except ProtocolError as error:
            if not isinstance(error.__cause__, msgspec.ValidationError):
                raise
            answered += _answer(
                header, error
            )  # a message, but with a list too long, say: the client stays
            return
        try:
            if kind != header.kind:
                message = older_put_messages.newer(message)
            if kind in WRITING and self._limited:
                raise AuthenticationFailed(
                    "this user may only read here, as the peer was started with --socket-others read: put as the "
                    "peer's own user"
                )
            if kind in WRITING and client.access != Access.WRITE:
                raise ValueError("the client connected only to read: connect with write access")
            outcome = self._backend.handle(client, kind, message)
            if isinstance(outcome, Message) or not isinstance(outcome, Awaitable):
                self._observed.append((kind, message, outcome, time.monotonic() - begin))
                answered += _answer(header, outcome)
                return
        except Exception as error:
            self._observed.append((kind, message, error, time.monotonic() - begin))
            answered += _answer(header, error)
            return
        if header.flags & ONE_WAY:
            self._one_way.append(self._answer_later(client, header, message, outcome, begin))
            self._in_flight += 1
            return
        if self._in_flight >= MAX_IN_FLIGHT:
            nursery.start_soon(_call_off, outcome)
            text = f"{MAX_IN_FLIGHT} requests of this client are waiting already"
            answered.append(encode_failure(header.kind, header.request_id, Code.BUSY, text))
            return
        self._in_flight += 1
        nursery.start_soon(self._answer_later, client, header, message, outcome, begin)

    async def _answer_later(
        self,
        client: LocalClient,
        header: FrameHeader,
        message: Message,
        outcome: Awaitable[Message | None],
        begin: float,
    ) -> None:
        kind = _KINDS[header.kind]
        began = self._observer.began(kind, message) if self._observer is not None else None
        answer: Message | Exception | None = StoreClosed("the client has gone")
        try:
            answer = await outcome
        except Exception as error:
            answer = error
        finally:
            self._in_flight -= 1
            if self._observer is not None:
                seconds = time.monotonic() - begin
                self._observer.answered(client, kind, message, answer, seconds, began)
        await self._send(_answer(header, answer))

    async def _send(self, frames: list[bytes]) -> None:
        """Send, or leave the frames to the task that is sending now."""
        self._outgoing += frames
        self._outgoing_bytes += sum(map(len, frames))
        if self._sending:
            if self._outgoing_bytes > MAX_OUTGOING_BYTES:
                raise ProtocolError("it takes none of its answers")
            return
        self._sending = True
        try:
            while self._outgoing:
                frames, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
                joined = b"".join(frames)
                sent = self._send_now(joined)
                if sent < len(joined):
                    await self._stream.send(memoryview(joined)[sent:])
        finally:
            self._sending = False

    def _send_now(self, data: bytes) -> int:
        """Bytes that the socket takes at once: nearly always all, and without a turn of the event loop."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0


async def _call_off(outcome: Awaitable[object]) -> None:
    """Cancel an answer that is not needed: the work that it began goes on otherwise."""
    with trio.CancelScope() as scope, contextlib.suppress(Exception):
        scope.cancel()
        await outcome


def _answer(header: FrameHeader, answer: Message | Exception | None) -> list[bytes]:
    """The frame for an outcome; none for a one-way request."""
    if header.flags & ONE_WAY:
        if isinstance(answer, Exception):
            logger.debug("one-way request of kind %d failed: %s", header.kind, answer)
        return []
    if isinstance(answer, Exception):
        return [_failure(header, answer)]
    if answer is None:
        answer = Empty()
    if header.kind in IN_COLUMNS:
        answer = older_put_messages.older(answer)
    frame = encode_frame(header.kind, header.request_id, answer, flags=REPLY)
    if len(frame) - HEADER_BYTES > LOCAL_LIMITS.body_bytes:
        text = f"the answer has {len(frame):,} bytes; at most {LOCAL_LIMITS.body_bytes:,} are allowed: ask for less"
        return [_failure(header, AnswerTooLarge(text))]
    return [frame]


def _failure(header: FrameHeader, error: Exception) -> bytes:
    code = code_of(error)
    if code == Code.INTERNAL and not isinstance(error, P2PStoreError):
        logger.error("request of kind %d failed", header.kind, exc_info=error)
        return encode_failure(
            header.kind, header.request_id, code, f"the peer failed ({error!r}): see its log"
        )
    return encode_failure(header.kind, header.request_id, code, str(error), getattr(error, "needed", 0))
