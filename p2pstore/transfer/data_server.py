"""The accepting side of data connections, under trio.

Payload goes from the segment to the socket without a copy in between; an object is held while it is
being sent. All requests that have arrived are taken before anything is answered, and small answers
leave together in one `sendmsg`: that is what makes many small reads cheap. Whatever a stranger sends ends
at most his connection.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio

from p2pstore.config import join_address, split_address
from p2pstore.errors import ConfigError, DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.keyring import KeyRing
from p2pstore.objects import CHUNK_BYTES, KIB, MIB, PART_BYTES
from p2pstore.streams import BytesLike, tune_tcp
from p2pstore.transfer.messages import (
    READ_KINDS,
    REQUESTS,
    DataKind,
    Get,
    GetItem,
    Hello,
    HelloReply,
    ObjectReply,
    Objects,
    ObjectStatus,
    Proof,
)
from p2pstore.transfer.tickets import (
    NONCE_BYTES,
    Scope,
    SignerLike,
    TicketClaims,
    VerifierLike,
    check_proof,
    open_ticket,
    prove,
)
from p2pstore.trio_streams import TrioStream
from p2pstore.wire import (
    DATA_REQUEST_LIMITS,
    HELLO_LIMITS,
    ONE_WAY,
    PREFACE_BYTES,
    PREFACE_DATA,
    REPLY,
    Code,
    FrameBuffer,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    encode_failure,
    encode_frame,
    negotiate_version,
)

logger = logging.getLogger("p2pstore.transfer")

RECEIVE_BYTES: Final = 64 * KIB
MAX_GET_ITEMS: Final = 1024
MAX_REPLY_BODY_BYTES: Final = 3 * MIB
"""Slots and trailers in one reply; the frame's cap is 4 MiB."""
GATHER_BYTES: Final = 256 * KIB
"""Answers to pipelined requests wait for each other until they have this many bytes."""
GATHER_PARTS: Final = 512
LISTEN_BACKLOG: Final = 512


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """An object that stays where it is until the backend's `let_go`. `handle` is the backend's own."""

    slot: bytes
    trailer: bytes
    payload: memoryview
    handle: Any


class DataBackend(Protocol):
    """What the peer does behind its data connections."""

    def open_objects(self, items: Sequence[GetItem]) -> Sequence[OpenedObject | ObjectReply]:
        """Hold objects that are about to be sent, one result per item: an `ObjectReply` says why not.

        Every `OpenedObject` is given back by `let_go`, whatever happens. Never blocks.
        """
        ...

    def let_go(self, opened: OpenedObject) -> None:
        """The end of `open_objects`."""
        ...

    async def handle(
        self, kind: DataKind, message: Message, claims: TicketClaims
    ) -> tuple[Message, Sequence[BytesLike]]:
        """Answer any other request: the reply and its bulk. Its `P2PStoreError` or `ValueError` is sent
        as a failure. Cancelled when the connection ends."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What strangers and slow readers may cost. Times in seconds."""

    connections: int = 1024
    unproved_per_address: int = 32
    hello_seconds: float = 5.0
    idle_seconds: float = 600.0
    progress_seconds: float = 5.0
    handlers_per_connection: int = 64
    reply_bulk_bytes: int = PART_BYTES


class QuietLog:
    """Warnings about strangers: at most one line per second and subject, with how many were left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, subject: str, text: str) -> None:
        """One line, unless `subject` had one within the last second."""
        now = self._clock()
        if now - self._last.get(subject, -1e9) < 1.0:
            self._left_out[subject] += 1
            return
        self._last[subject] = now
        left_out = self._left_out.pop(subject, 0)
        logger.warning("%s%s", text, f" ({left_out} more like it)" if left_out else "")


async def open_data_listeners(addresses: Sequence[str]) -> list[socket.socket]:
    """Listening sockets for `HOST:PORT` and `[v6]:PORT` (port 0: any free one).

    Raises `ConfigError` naming the address that is in use, not of this host, or malformed.
    """
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            host, port = split_address(address, "--data-listen")
            try:
                found = await trio.socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                listeners.append(_listen(found[0][0], found[0][4]))
            except OSError as error:
                reason = "is already in use" if error.errno == errno.EADDRINUSE else str(error)
                raise ConfigError(
                    f"cannot listen on the data address {address}: {reason}. "
                    "Choose another with --data-listen HOST:PORT (port 0 for any free one)"
                ) from error
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # so that 0.0.0.0 and [::] can have the same port
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def listener_address(listener: socket.socket) -> str:
    """`HOST:PORT` that a listener is bound to."""
    host, port = listener.getsockname()[:2]
    return join_address(host, port)


class _Refused(Exception):
    """The connection ends: `code` and `text` are sent, and one line is logged."""

    def __init__(self, kind: int, request_id: int, code: Code, text: str) -> None:
        super().__init__(text)
        self.frame = encode_failure(kind, request_id, code, text)


class DataServer:
    """Serves data connections. `connections` and `served_bytes` are for the peer's statistics."""

    def __init__(
        self,
        backend: DataBackend,
        *,
        ring: KeyRing,
        signer: SignerLike,
        verifier: VerifierLike,
        incarnation: int,
        limits: ServerLimits | None = None,
        unix_clock: Callable[[], float] = time.time,
        software: str = "",
    ) -> None:
        self.backend = backend
        self.limits = limits or ServerLimits()
        self.connections = 0
        self.served_bytes = 0
        self.served_objects = 0
        self._ring = ring
        self._signer = signer
        self._verifier = verifier
        self._incarnation = incarnation
        self._unix_clock = unix_clock
        self._software = software
        self._unproved: Counter[str] = Counter()
        self.log = QuietLog(time.monotonic)

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept until cancelled; then every connection is closed, and the listeners too."""
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
        finally:
            for listener in listeners:
                trio.lowlevel.notify_closing(listener.fileno())
                listener.close()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener.fileno())
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.log.warning("accept", f"cannot accept data connections: {error}")
                    await trio.sleep(0.1)
                else:  # the connection was gone before it was accepted
                    await trio.lowlevel.checkpoint()
                continue
            host = str(address[0])
            if self.connections >= self.limits.connections:
                self.log.warning(
                    "full", f"{self.connections} data connections are open: refused {host}"
                )
                sock.close()
            elif self._unproved[host] >= self.limits.unproved_per_address:
                self.log.warning("unproved", f"{host} opens many connections without a valid hello")
                sock.close()
            else:
                self.connections += 1
                self._unproved[host] += 1
                nursery.start_soon(self._run_connection, sock, host)
            await trio.lowlevel.checkpoint()

    async def _run_connection(self, sock: socket.socket, host: str) -> None:
        """One connection from hello to end. Only cancellation leaves this function as an exception."""
        stream = TrioStream(sock, self.limits.progress_seconds)
        proved = False
        try:
            tune_tcp(sock)
            frames = FrameBuffer(HELLO_LIMITS)
            claims = None
            with trio.move_on_after(self.limits.hello_seconds):
                claims = await self._shake_hands(stream, frames)
            if claims is None:
                raise ProtocolError(f"no hello within {self.limits.hello_seconds:g} s")
            proved = True
            self._end_unproved(host)
            frames.limits = DATA_REQUEST_LIMITS
            await _Connection(self, stream, frames, claims).run()
        except _Refused as refusal:
            self.log.warning(f"refused {host}", f"data connection from {host}: {refusal}")
            with trio.move_on_after(1.0):
                await self._send_last(stream, refusal.frame)
        except ProtocolError as error:
            self.log.warning(f"garbage {host}", f"data connection from {host} closed: {error}")
        except DeadlineExceeded as error:
            self.log.warning(f"slow {host}", f"data connection from {host} cut: {error}")
        except OSError as error:
            logger.debug("data connection from %s ended: %s", host, error)
        except Exception:
            logger.exception("data connection from %s closed by an internal error", host)
        finally:
            if not proved:
                self._end_unproved(host)
            self.connections -= 1
            stream.close()

    def _end_unproved(self, host: str) -> None:
        self._unproved[host] -= 1
        if not self._unproved[host]:
            del self._unproved[host]

    async def _send_last(self, stream: TrioStream, frame: bytes) -> None:
        try:
            await stream.send(frame)
        except OSError as error:
            logger.debug("could not say why the connection ends: %s", error)

    async def _shake_hands(self, stream: TrioStream, frames: FrameBuffer) -> TicketClaims:
        """Preface, hello and proof. Raises `_Refused` when the ticket or the proof is not good."""
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        preface = bytearray()
        while len(preface) < PREFACE_BYTES:
            count = await _receive(stream, buffer[: PREFACE_BYTES - len(preface)])
            preface += buffer[:count]
            if not PREFACE_DATA.startswith(preface):
                raise ProtocolError("this is not a p2pstore data connection")
        header, body = await _next_frame(stream, frames, buffer)
        if header.kind != DataKind.HELLO:
            raise ProtocolError("the first frame is not a hello")
        hello = decode_body(Hello, body)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("the hello's nonce has the wrong length")
        try:
            version = negotiate_version(hello.min_version, hello.max_version)
            claims, secret = open_ticket(
                hello.ticket,
                audience=self._signer.peer_id,
                ring=self._ring,
                verifier=self._verifier,
                now_unix=self._unix_clock(),
            )
        except P2PStoreError as error:
            raise _Refused(header.kind, header.request_id, code_of(error), str(error)) from error
        nonce = os.urandom(NONCE_BYTES)
        proof = prove(secret, b"server", hello.nonce, nonce)
        reply = HelloReply(version, nonce, proof, self._incarnation, self._software)
        await stream.send(encode_frame(DataKind.HELLO, header.request_id, reply, flags=REPLY))
        header, body = await _next_frame(stream, frames, buffer)
        if header.kind != DataKind.PROOF:
            raise ProtocolError("the second frame is not a proof")
        if not check_proof(secret, b"client", hello.nonce, nonce, decode_body(Proof, body).proof):
            text = "the proof is wrong: the ticket was shown without its secret"
            raise _Refused(header.kind, header.request_id, Code.AUTHENTICATION_FAILED, text)
        return claims


async def _receive(stream: TrioStream, view: memoryview) -> int:
    count = await stream.receive_into(view)
    if count == 0:
        raise ConnectionResetError("the other side closed the connection")
    return count


async def _next_frame(
    stream: TrioStream, frames: FrameBuffer, buffer: memoryview
) -> tuple[FrameHeader, bytes]:
    while (frame := frames.next_frame()) is None:
        frames.feed(buffer[: await _receive(stream, buffer)])
    return frame


class _Connection:
    """One authenticated connection: reads requests, answers GET in order and inline, the rest in tasks."""

    def __init__(
        self, server: DataServer, stream: TrioStream, frames: FrameBuffer, claims: TicketClaims
    ) -> None:
        self._server = server
        self._stream = stream
        self._frames = frames
        self._claims = claims
        self._sending = trio.Lock()
        self._ended_by: Exception | None = None
        self._handlers = 0
        self._held: list[OpenedObject] = []
        self._parts: list[BytesLike] = []
        self._gathered_bytes = 0

    async def run(self) -> None:
        """Serve until the other side closes. Raises `_Refused`, `ProtocolError` and `OSError` bare."""
        async with trio.open_nursery() as nursery:
            try:
                await self._serve_requests(nursery)
            except (_Refused, ProtocolError, OSError) as error:
                self._ended_by = error
            finally:
                self._let_go_all()
            nursery.cancel_scope.cancel()  # nobody is left to hear the answers
        if self._ended_by is not None:
            raise self._ended_by

    async def _serve_requests(self, nursery: trio.Nursery) -> None:
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        while True:
            await self._answer_all(nursery)
            count = await self._receive_request(buffer)
            if count == 0:
                return
            self._frames.feed(buffer[:count])

    async def _receive_request(self, buffer: memoryview) -> int:
        """The next bytes; 0 when the other side closed, or was silent for too long between requests."""
        if not self._frames.pending_bytes:
            with trio.move_on_after(self._server.limits.idle_seconds) as idle:
                await self._stream.wait_readable_forever()
            if idle.cancelled_caught:
                return 0
        return await self._stream.receive_into(buffer)

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        """Answer every request that has arrived whole."""
        while (frame := self._frames.next_frame()) is not None:
            header, body = frame
            message = self._decode(header, body)
            if message is None:
                continue
            if isinstance(message, Get):
                self._gather_objects(header.request_id, message)
                if self._gathered_bytes >= GATHER_BYTES or len(self._parts) >= GATHER_PARTS:
                    await self._flush()
            elif self._handlers >= self._server.limits.handlers_per_connection:
                text = f"{self._handlers} requests of this connection are under way already"
                self._gather(encode_failure(header.kind, header.request_id, Code.BUSY, text))
            else:
                self._handlers += 1
                nursery.start_soon(self._handle, header, message, nursery.cancel_scope)
        await self._flush()

    def _decode(self, header: FrameHeader, body: bytes) -> Message | None:
        """The request, or None when it was answered with a failure. Raises `_Refused` for garbage."""
        kind, request_id = header.kind, header.request_id
        if kind in (DataKind.HELLO, DataKind.PROOF) or header.flags & REPLY:
            raise ProtocolError(f"a frame of kind {kind}, flags {header.flags} is not a request")
        message_type = REQUESTS.get(kind)
        if message_type is None:
            self._refuse(header, Code.UNSUPPORTED, f"kind {kind} is unknown to this version")
            return None
        wanted = Scope.READ if kind in READ_KINDS else Scope.PEER
        if not self._claims.scope & wanted:
            self._refuse(
                header,
                Code.AUTHENTICATION_FAILED,
                f"the ticket does not allow {DataKind(kind).name}: it was issued for "
                f"{'other peers' if self._claims.scope & Scope.PEER else 'reading'} only",
            )
            return None
        try:
            message: Message = decode_body(message_type, body)
        except ProtocolError as error:
            raise _Refused(kind, request_id, Code.MALFORMED, str(error)) from error
        if isinstance(message, Get) and not 0 < len(message.items) <= MAX_GET_ITEMS:
            text = f"a GET has 1 to {MAX_GET_ITEMS:,} items, not {len(message.items):,}"
            raise _Refused(kind, request_id, Code.MALFORMED, text)
        return message

    def _refuse(self, header: FrameHeader, code: Code, text: str) -> None:
        if not header.flags & ONE_WAY:
            self._gather(encode_failure(header.kind, header.request_id, code, text))

    # --- GET ---------------------------------------------------------------------------------

    def _gather_objects(self, request_id: int, get: Get) -> None:
        """Put the answer to a GET with those that are to be sent next; its objects are held from here on."""
        replies: list[ObjectReply] = []
        payloads: list[memoryview] = []
        bulk_bytes = body_bytes = 0
        opened = self._server.backend.open_objects(get.items)
        self._held += [each for each in opened if isinstance(each, OpenedObject)]
        for item, each in zip(get.items, opened, strict=True):
            if isinstance(each, ObjectReply):
                replies.append(each)
                continue
            payload = _range(each.payload, item)
            body_bytes += len(each.trailer) + 128
            if (
                bulk_bytes + len(payload) > self._server.limits.reply_bulk_bytes
                or body_bytes > MAX_REPLY_BODY_BYTES
            ):
                replies.append(ObjectReply(ObjectStatus.TOO_LARGE))
                continue
            bulk_bytes += len(payload)
            replies.append(
                ObjectReply(ObjectStatus.OK, each.slot, each.trailer, bulk_bytes=len(payload))
            )
            payloads.append(payload)
        self._gather(
            encode_frame(
                DataKind.GET, request_id, Objects(replies), flags=REPLY, bulk_length=bulk_bytes
            )
        )
        self._parts += payloads
        self._gathered_bytes += bulk_bytes
        self._server.served_objects += len(payloads)

    def _gather(self, frame: bytes) -> None:
        self._parts.append(frame)
        self._gathered_bytes += len(frame)

    async def _flush(self) -> None:
        """Send what was gathered and give the objects back."""
        if not self._parts:
            return
        try:
            await self._send(*self._parts)
            self._server.served_bytes += self._gathered_bytes
        finally:
            self._let_go_all()

    async def _send(self, *parts: BytesLike) -> None:
        """Send without another task's reply in between."""
        try:
            self._sending.acquire_nowait()  # `async with` would cost a turn of the event loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._stream.send(*parts)
        finally:
            self._sending.release()

    def _let_go_all(self) -> None:
        held, self._held = self._held, []
        self._parts = []
        self._gathered_bytes = 0
        for opened in held:
            self._server.backend.let_go(opened)

    # --- everything else ---------------------------------------------------------------------

    async def _handle(
        self, header: FrameHeader, message: Message, connection: trio.CancelScope
    ) -> None:
        """Answer one request in a task of its own."""
        kind, request_id = DataKind(header.kind), header.request_id
        bulk: Sequence[BytesLike] = ()
        try:
            reply, bulk = await self._server.backend.handle(kind, message, self._claims)
            size = sum(len(part) for part in bulk)
            frame = encode_frame(kind, request_id, reply, flags=REPLY, bulk_length=size)
        except (P2PStoreError, ValueError) as error:
            detail = getattr(error, "needed", 0)
            frame = encode_failure(kind, request_id, code_of(error), str(error), detail)
        except Exception as error:
            logger.exception("a %s request failed by an internal error", kind.name)
            text = f"internal error of the other peer ({type(error).__name__}): see its log"
            frame = encode_failure(kind, request_id, Code.INTERNAL, text)
        finally:
            self._handlers -= 1
        if not header.flags & ONE_WAY:
            try:
                await self._send(frame, *bulk)
            except OSError as error:  # half a reply may have left: the connection is of no use now
                self._ended_by = error
                connection.cancel()


def _range(payload: memoryview, item: GetItem) -> memoryview:
    """The chunks asked for; nothing when they begin beyond the end (which asks for slot and trailer)."""
    start = max(0, item.first_chunk) * CHUNK_BYTES
    if item.chunk_count <= 0:
        return payload[start:]
    return payload[start : start + item.chunk_count * CHUNK_BYTES]


async def serve_data(
    listeners: Sequence[socket.socket],
    backend: DataBackend,
    *,
    ring: KeyRing,
    signer: SignerLike,
    verifier: VerifierLike,
    incarnation: int,
    limits: ServerLimits | None = None,
    unix_clock: Callable[[], float] = time.time,
) -> None:
    """Serve data connections on `listeners`, which it closes, until cancelled."""
    server = DataServer(
        backend,
        ring=ring,
        signer=signer,
        verifier=verifier,
        incarnation=incarnation,
        limits=limits,
        unix_clock=unix_clock,
    )
    await server.serve(listeners)
