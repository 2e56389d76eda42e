"""The client's end of the local socket: hello, mapped segments, pipelined requests.

Many tasks or threads use one connection at once. Nothing runs in the background: of the callers that wait
for a reply one receives, for all of them, and hands the receiving on when its own reply has come.
So a lone caller pays for one send and one receive and nothing else, under both drivers.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from p2pstore.errors import ClientForked, DeadlineExceeded, ProtocolError, StoreClosed
from p2pstore.local.local_greeting import Greeting, Opening, connect_to_peer, greet, hangs, user_at
from p2pstore.local.local_messages import Contains
from p2pstore.local.local_protocol import IN_ROWS, LocalKind
from p2pstore.local.local_requests import ReplyPieces, Silence, Waiter, Waiters, late_frame, reply_in
from p2pstore.local.older_put_messages import older
from p2pstore.runtime.blocking_streams import is_from_signal_handler
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver, Event, UnixStream
from p2pstore.wire import (
    ERROR,
    HEADER_BYTES,
    LOCAL_LIMITS,
    Code,
    Failure,
    Message,
    decode_body,
    encode_frame,
    error_of,
)

M = TypeVar("M", bound=Message)

BUSY_RETRY_SECONDS: Final = 0.02
PEER_GONE: Final = (
    "the connection to the local peer ended: it stopped or was restarted. Connect again; "
    "`mooncake-p2p join` starts a peer"
)
PEER_HANGS: Final = (
    "the local peer does not answer: its process hangs or was stopped, or this machine is overloaded"
)

_open_connections: weakref.WeakSet[LocalConnection] = weakref.WeakSet()


class LocalConnection:
    """An open connection to the local peer. Make one with `LocalConnection.open`.

    `hello` is what the peer said; its memories are mapped as `segments`, `location_table`, `hazards` and `checkpoint`
    (see `Greeting`). `collect_one_way` adds frames that go out with whatever is sent next; after an interrupt some
    may go out twice. With `silence.patience_seconds` callers probe a silent peer, and fail as soon as it hangs.
    """

    def __init__(self, driver: Driver, stream: UnixStream, path: str, greeting: Greeting) -> None:
        self.path = path
        self.hello = greeting.hello
        self.segments = greeting.segments
        self.location_table = greeting.location_table
        self.hazards = greeting.hazards
        self.checkpoint = greeting.checkpoint
        self.collect_one_way: Callable[[list[bytes]], None] = lambda frames: None
        self._unsent: list[bytes] = []
        self._driver = driver
        self._stream = stream
        self._process_id = os.getpid()
        self._closed_because: str | None = None
        self._received = ReplyPieces(stream.pieces)
        self._waiters = Waiters()
        self.silence = Silence()
        self._receive_seconds = 0.0
        self._sending = driver.lock()
        self._is_sending = False

    @classmethod
    async def open(
        cls,
        driver: Driver,
        path: str,
        opening: Opening,
        timeout_seconds: float = DEFAULT_PROGRESS_SECONDS,
    ) -> LocalConnection:
        """Connect and say hello. Raises `NoLocalPeer` when no peer listens at `path`, or one of another user than the
        trusted ones; `DeadlineExceeded` when the peer takes longer than `timeout_seconds` over either step; the error
        with which the peer refuses."""
        stream = await connect_to_peer(driver, path, timeout_seconds)
        stream.progress_seconds = timeout_seconds
        connection = None
        try:
            greeting = await greet(stream, path, opening)
            connection = cls(driver, stream, path, greeting)
        except ConnectionError as error:
            raise StoreClosed(f"the peer at {path} closed the connection at once") from error
        except DeadlineExceeded as error:
            raise hangs(path) from error
        finally:
            if connection is None:
                stream.close()
        _open_connections.add(connection)
        return connection

    @property
    def peer_user(self) -> int:
        """The user at the other end, by the kernel's account."""
        return user_at(self._stream)

    def segment(self, number: int) -> memoryview:
        """The mapped segment that an answer names. Raises `StoreClosed` when the client was closed since,
        `ProtocolError` when there is none of that number."""
        try:
            return self.segments[number]
        except IndexError:
            self.check_usable()
            raise ProtocolError(f"the local peer has no segment {number}") from None

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's connection."""
        return os.getpid() != self._process_id

    def check_usable(self) -> None:
        """Raises `ClientForked` in a forked child and `StoreClosed` after the end."""
        if os.getpid() != self._process_id:  # `is_inherited`, without another call
            raise ClientForked(
                "this client was connected before the process forked: connect again in the child"
            )
        if self._closed_because is not None:
            raise StoreClosed(self._closed_because)

    def peer_is_gone(self) -> bool:
        """Whether the connection has ended (a system call; never waits)."""
        if self._closed_because is None and _is_so(self._stream, select.POLLRDHUP):
            self._end(PEER_GONE)
        return self._closed_because is not None or self._stream.fileno() < 0

    async def request(
        self,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        *,
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> M:
        """Send one request and wait for its reply.

        `on_late_reply` gets the reply when it comes after this call ended without it. Raises the
        error that the peer answered, `DeadlineExceeded`, or `StoreClosed` when the connection ends.
        """
        request = Request(self, kind, message, reply_type, progress_seconds, on_late_reply)
        try:
            await request.send()
            return await request.receive()
        except BaseException:  # interrupted, too, before the caller has seen the reply
            request.abandon()
            raise

    def _frame(self, kind: LocalKind, message: Message, number: int) -> bytes:
        """The frame of a request."""
        if self.hello.version == 1 and kind in IN_ROWS:
            kind, message = IN_ROWS[kind], older(message)
        frame = encode_frame(kind, number, message)
        if len(frame) - HEADER_BYTES > LOCAL_LIMITS.body_bytes:
            raise ValueError(
                f"the batch needs a request of {len(frame):,} bytes; at most "
                f"{LOCAL_LIMITS.body_bytes:,} are allowed: split it"
            )
        return frame

    async def _receive_until(self, waiter: Waiter, deadline: float, progress_seconds: float) -> None:
        """Receive, or have others receive, until the reply is there."""
        asked_at = deadline - progress_seconds
        while waiter.frame is None:
            self.check_usable()
            await self._receive_or_wait(waiter, deadline)
            if waiter.frame is not None:
                return
            now = time.monotonic()
            if self.silence.lasts(asked_at, now):
                raise DeadlineExceeded(PEER_HANGS)
            if self.silence.wants_probe(asked_at, now):
                await _probe(self, now)
            if now >= deadline:
                raise DeadlineExceeded(
                    f"the local peer did not answer within {progress_seconds:g} s: it is overloaded, "
                    "what was asked for did not come, or the timeout is too short"
                )

    async def hear(self, seconds: float) -> None:
        """Wait for any bytes, for which the peer is probed once. Raises `DeadlineExceeded` when none come in time, and
        `StoreClosed`. 0 seconds: a look, which takes no time."""
        begin, heard_before = time.monotonic(), self.silence.heard_at
        if not seconds and self.silence.hangs and not _is_so(self._stream, select.POLLIN):
            raise DeadlineExceeded(PEER_HANGS)
        onlooker = self._waiters.add(Waiter(-self._waiters.next_number()))
        try:
            if seconds and not self.silence.is_probed:
                await _probe(self, begin)
            while True:
                self.check_usable()
                await self._receive_or_wait(onlooker, begin + seconds)
                if self.silence.heard_at > heard_before or not (seconds or self.silence.hangs):
                    return
                if time.monotonic() >= begin + seconds:
                    raise DeadlineExceeded(PEER_HANGS)
        finally:
            self._waiters.give_up(onlooker)

    @property
    def awaits_late_replies(self) -> bool:
        """Whether a caller gave up on a request whose reply must still be looked at."""
        return self._waiters.any_abandoned

    async def receive_late_replies(self, timeout_seconds: float) -> None:
        """Receive replies of abandoned requests, for at most that long."""
        deadline = time.monotonic() + timeout_seconds
        onlooker = self._waiters.add(Waiter(-self._waiters.next_number()))
        try:
            while self._waiters.any_abandoned and time.monotonic() < deadline:
                self.check_usable()
                await self._receive_or_wait(onlooker, deadline)
        finally:
            self._waiters.give_up(onlooker)

    async def flush(self) -> None:
        """Send what `collect_one_way` has, if anything."""
        self.check_usable()
        await self._send()

    async def _send(self, frame: bytes = b"", waiter: Waiter | None = None) -> None:
        """Send whole frames: half a frame would spoil the connection for all its users. `waiter`: of the reply."""
        async with self._sending:
            self.collect_one_way(self._unsent)
            if self._unsent:
                frame = b"".join((*self._unsent, frame))
            if not frame:
                return
            self._is_sending = True
            try:
                if waiter is not None:
                    self._waiters.add(waiter)
                await self._stream.send_whole(frame)
                self._unsent.clear()
            except DeadlineExceeded:
                raise self._end(
                    "the local peer takes no more requests: its process hangs or was stopped; end it, start "
                    "it again, and connect again"
                ) from None
            except OSError as error:
                raise self._end(
                    f"the local peer closed the connection ({error}): connect again"
                ) from error
            except BaseException:
                if self._stream.fileno() < 0:
                    self._end("the client was interrupted in the middle of a request: connect again")
                raise
            finally:
                self._is_sending = False

    async def _receive_or_wait(self, waiter: Waiter, deadline: float) -> None:
        """Receive once for all that wait, or wait until the one that receives has news for `waiter`."""
        event: Event | None = None
        waiters = self._waiters
        try:
            event = waiters.begin_receiving(waiter, self._driver.event)
            # A receiver that was interrupted has left what it had received.
            if waiters.receiver is waiter and not (self._received.pieces and self._dispatch()):
                self._limit_receiving(
                    min(deadline - time.monotonic(), self.silence.patience_seconds / 2)
                )
                await self._stream.receive_piece()
                self.silence.heard(time.monotonic())
                self._dispatch()
        except DeadlineExceeded as error:
            if is_from_signal_handler(error):
                raise self._driver.interrupted(error) from None
            # the waiter whose deadline it was finds out
        except Exception as error:
            if is_from_signal_handler(error):
                raise self._driver.interrupted(error) from None
            if isinstance(error, ProtocolError):
                raise self._end(f"the local peer sent what is not the protocol: {error}") from error
            raise self._end(
                f"the connection to the local peer broke ({error}): connect again"
            ) from error
        finally:
            waiters.end_receiving(waiter)
        if event is not None:
            await event.wait(min(deadline - time.monotonic(), self.silence.patience_seconds / 2))

    def _limit_receiving(self, seconds: float) -> None:
        """Have the next receive take at most that long, or 1 % more: a new limit costs a system call."""
        if not 0.99 * seconds <= self._receive_seconds <= 1.01 * seconds:
            self._receive_seconds = self._stream.receive_seconds = max(0.001, seconds)

    def _dispatch(self) -> bool:
        """Give the frames that have arrived whole to their waiters. False when there is none."""
        if not self._received.pieces[-1]:
            self._end(PEER_GONE)
            return False
        return self._received.deliver(self._waiters.deliver)

    def _end(self, reason: str) -> StoreClosed:
        """Close; every request that waits fails with the reason."""
        if self._closed_because is None:
            self._closed_because = reason
        self._waiters.wake_all()
        self._stream.close()
        return StoreClosed(self._closed_because)

    def say_last(self, frames: bytes) -> None:
        """Send one-way frames before closing, as far as the socket takes them at once: closing does not
        wait, and half a frame does no harm when nothing follows."""
        if self._is_sending or self._closed_because is not None or self.is_inherited:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._stream.fileno())) as sock:
            sock.send(frames, socket.MSG_DONTWAIT)  # a blocking stream's descriptor would wait

    def close(self) -> None:
        """End the connection, its leases and reservations. Views of the mappings stay readable."""
        if not self.is_inherited:
            self._end(
                "the client is closed: call inside its `with` block, or before close(), or connect again"
            )
        self.segments.clear()
        self.location_table = self.hazards = None


async def _probe(connection: LocalConnection, now: float) -> None:
    """Send what a peer answers at once, unless another caller is sending: that ends by itself."""
    if not connection._is_sending:
        connection.silence.probed(now)
        number = connection._waiters.next_number()
        await connection._send(encode_frame(LocalKind.CONTAINS, number, Contains(b"")))


def _is_so(stream: UnixStream, event: int) -> bool:
    """Whether this event of `select.poll` is there now."""
    descriptor = stream.fileno()
    if descriptor < 0:  # another thread may be closing it
        return False
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(0))


class Request(Generic[M]):
    """One request: `send`, then `receive` at once, or later, so that this process and the peer work at the same time.
    `abandon` must follow whatever either raises. The parameters are those of `LocalConnection.request`."""

    __slots__ = (
        "_kind",
        "_message",
        "_on_late_frame",
        "_progress_seconds",
        "_reply_type",
        "_waiter",
        "connection",
    )

    def __init__(
        self,
        connection: LocalConnection,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> None:
        self.connection = connection
        self._kind = kind
        self._message = message
        self._reply_type = reply_type
        self._progress_seconds = progress_seconds
        self._on_late_frame = late_frame(on_late_reply, kind, reply_type)
        self._waiter: Waiter | None = None
        """While the reply is to come, or is not with the caller yet."""

    async def send(self) -> None:
        """Send it. Raises as `LocalConnection.request`."""
        connection = self.connection
        if connection.silence.hangs:
            await connection.hear(0.0)
        connection.check_usable()
        waiter = self._waiter = Waiter(connection._waiters.next_number())
        await connection._send(connection._frame(self._kind, self._message, waiter.number), waiter)

    async def receive(self) -> M:
        """The reply, once. Sends the request again where the peer was too busy."""
        connection = self.connection
        deadline = time.monotonic() + self._progress_seconds
        while True:
            assert self._waiter is not None
            await connection._receive_until(self._waiter, deadline, self._progress_seconds)
            header, body = frame = connection._waiters.take(self._waiter)
            if not header.flags & ERROR:
                try:
                    return reply_in(frame, self._kind, self._reply_type)
                except ProtocolError:
                    self._waiter = None
                    raise
            self._waiter = None
            failure = decode_body(Failure, body)
            if failure.code != Code.BUSY or time.monotonic() + BUSY_RETRY_SECONDS > deadline:
                raise error_of(failure.code, failure.text, failure.detail)
            await connection._driver.sleep(BUSY_RETRY_SECONDS)
            await self.send()

    def abandon(self) -> None:
        """Give the reply up: `on_late_reply` gets it when it comes, or when it has come."""
        if self._waiter is not None:
            self.connection._waiters.give_up(self._waiter, self._on_late_frame)
            self._waiter = None


def _let_go_of_inherited_sockets() -> None:
    """In a forked child: give up the sockets, or the parent's leases would outlive it."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for connection in list(_open_connections):
            if connection._stream.fileno() >= 0:
                os.dup2(nowhere, connection._stream.fileno(), inheritable=False)
    finally:
        os.close(nowhere)


os.register_at_fork(after_in_child=_let_go_of_inherited_sockets)
