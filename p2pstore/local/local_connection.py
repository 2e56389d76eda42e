"""The client's end of the local socket: hello, mapped segments, pipelined requests.

Many tasks or threads use one connection at once. Nobody runs in the background: of those who wait
for a reply one receives, for all of them, and hands the receiving on when its own reply has come.
So a lone caller pays for one send and one receive and nothing else, under both drivers.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final, TypeVar

from p2pstore.errors import (
    ClientForked,
    DeadlineExceeded,
    NoLocalPeer,
    ProtocolError,
    StoreClosed,
)
from p2pstore.local.local_protocol import Access, Hello, HelloReply, LocalKind, SegmentInfo
from p2pstore.local.local_requests import (
    Frame,
    LateFrame,
    RequestAhead,
    Waiter,
    late_frame,
    reply_in,
)
from p2pstore.local.socket_paths import CHOICES, not_a_socket
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES, HazardPage
from p2pstore.memory.mapped.joined_memory import map_joined
from p2pstore.memory.mapped.mapped_memory import map_read_only, map_table, map_writable
from p2pstore.runtime import memory_barrier
from p2pstore.runtime.blocking_streams import is_from_signal_handler
from p2pstore.runtime.linux import is_shortage, shortage
from p2pstore.runtime.streams import (
    DEFAULT_PROGRESS_SECONDS,
    MAX_PASSED_DESCRIPTORS,
    ByteStream,
    Driver,
    Event,
)
from p2pstore.wire import (
    ERROR,
    HEADER_BYTES,
    LOCAL_LIMITS,
    MAX_PROTOCOL_VERSION,
    MIN_PROTOCOL_VERSION,
    PREFACE_LOCAL,
    Code,
    Failure,
    FrameBuffer,
    Message,
    decode_body,
    encode_frame,
    error_of,
    negotiate_version,
)

M = TypeVar("M", bound=Message)

RECEIVE_BYTES: Final = 256 * 1024
BUSY_RETRY_SECONDS: Final = 0.02
PEER_GONE: Final = (
    "the connection to the local peer ended: it stopped or was restarted. Connect again; "
    "`mooncake-p2p join` starts a peer"
)

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""

_open_connections: weakref.WeakSet[LocalConnection] = weakref.WeakSet()


class LocalConnection:
    """An open connection to the local peer. Make one with `LocalConnection.open`.

    `hello` is what the peer said; `segments` are its mapped segments in the hello's order,
    writable for WRITE access; `location_table` is mapped, too, when it was wanted and there is one, and so are
    `hazards`.
    `collect_one_way` is asked for frames to go out with whatever is sent next.
    """

    def __init__(self, driver: Driver, stream: ByteStream, path: str) -> None:
        self.path = path
        self.hello: HelloReply
        self.segments: list[memoryview] = []
        self.location_table: mmap.mmap | None = None
        self.checkpoint: memoryview | None = None
        self.hazards: HazardPage | None = None
        self.collect_one_way: Callable[[], Sequence[bytes]] = tuple
        self._driver = driver
        self._stream = stream
        self._process_id = os.getpid()
        self._closed_because: str | None = None
        self._frames = FrameBuffer(LOCAL_LIMITS)
        self._receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Waiter] = {}
        self._receiving = False
        self._receive_seconds = 0.0
        self._abandoned = 0
        # Guards the three above; held for microseconds, never awaited in.
        self._state = threading.Lock()
        self._sending = driver.lock()
        self._is_sending = False

    @classmethod
    async def open(
        cls,
        driver: Driver,
        path: str,
        *,
        namespace: str,
        access: Access,
        timeout_seconds: float = DEFAULT_PROGRESS_SECONDS,
        location_table: bool = False,
        trusted_users: Collection[int] | None = None,
        directory: int = -1,
        checkpoint: bytes = b"",
        hazards: bool = False,
    ) -> LocalConnection:
        """Connect and say hello; with `location_table`, map the peer's table of locations, too, and with `hazards` a
        page to lease by (where the machine lets one). `directory` is the
        descriptor of a directory that the peer is given, for what is asked on this connection; `checkpoint` the
        version of one in the peer's memory, to be mapped as `self.checkpoint`. Raises
        `NoLocalPeer` when nobody listens at `path`, or a user who is none of `trusted_users`, and
        `DeadlineExceeded` when the peer takes longer than `timeout_seconds` over either."""
        try:
            stream = await driver.connect_unix(path, timeout_seconds)
        except DeadlineExceeded as error:
            raise _hangs(path) from error
        except PermissionError as error:
            raise NoLocalPeer(
                f"no permission to use the local socket {path}: run as the peer's user, or start "
                "the peer with --socket-mode and --socket-group"
            ) from error
        except OSError as error:
            if is_shortage(error):
                raise NoLocalPeer(
                    f"this process cannot connect to the peer at {path}: {shortage(error)}"
                ) from error
            if what := not_a_socket(path):
                raise NoLocalPeer(
                    f"{path} is {what}, not a peer's socket: {CHOICES} names one"
                ) from error
            raise NoLocalPeer(
                f"no peer listens at {path} ({error.strerror}): start one with `mooncake-p2p join`"
            ) from error
        stream.progress_seconds = timeout_seconds
        connection = cls(driver, stream, path)
        try:
            if trusted_users is not None and connection.peer_user not in trusted_users:
                raise NoLocalPeer(f"the socket {path} belongs to another user's process")
            hello = Hello(
                MIN_PROTOCOL_VERSION,
                MAX_PROTOCOL_VERSION,
                namespace,
                access,
                os.getpid(),
                location_table=location_table,
                directory=directory >= 0,
                checkpoint=checkpoint,
                hazards=hazards and memory_barrier.take_part(),
            )
            await connection._greet(hello, directory)
        except ConnectionError as error:
            connection.close()
            raise StoreClosed(f"the peer at {path} closed the connection at once") from error
        except DeadlineExceeded as error:
            connection.close()
            raise _hangs(path) from error
        except BaseException:
            connection.close()
            raise
        _open_connections.add(connection)
        return connection

    async def _greet(self, hello: Hello, directory: int) -> None:
        begin = PREFACE_LOCAL + encode_frame(LocalKind.HELLO, 0, hello)
        with contextlib.suppress(BrokenPipeError):  # refused: the reason can still be received
            if directory < 0:
                await self._stream.send(begin)
            else:  # nothing was sent before: it fits
                with socket.socket(fileno=os.dup(self._stream.fileno())) as sock:
                    socket.send_fds(sock, [begin], [directory])
        descriptors: list[int] = []
        try:
            while (frame := self._frames.next_frame()) is None:
                count, passed = await self._stream.receive_descriptors(self._receive_buffer)
                descriptors += passed
                if count == 0:
                    raise ConnectionResetError
                if len(descriptors) > MAX_PASSED_DESCRIPTORS:
                    raise ProtocolError("the peer passed more descriptors than it has segments")
                self._frames.feed(self._receive_buffer[:count])
            self.hello = reply_in(frame, LocalKind.HELLO, HelloReply)
            negotiate_version(self.hello.version, self.hello.version)
            table_bytes = self.hello.location_table_bytes
            counts = [max(1, len(segment.pieces)) for segment in self.hello.segments]
            checkpoint_bytes = self.hello.checkpoint_bytes
            gives_page = self.hello.hazards
            expected = sum(counts) + bool(table_bytes) + gives_page + bool(checkpoint_bytes)
            if len(descriptors) != expected:
                raise ProtocolError("the peer did not pass a descriptor for each of its memories")
            writable = Access.WRITE == hello.access == self.hello.access
            left = iter(descriptors)
            user = (
                self.peer_user
            )  # could show anything anyway: a file of its memory is taken from it
            self.segments = [
                _map_segment(segment, list(islice(left, count)), user, writable=writable)
                for segment, count in zip(self.hello.segments, counts, strict=True)
            ]
            if table_bytes:
                descriptor = next(left)
                with contextlib.suppress(OSError):  # no room to map it: the peer can be asked
                    self.location_table = map_table(descriptor, table_bytes)
            if gives_page:
                descriptor = next(left)
                with contextlib.suppress(OSError):
                    self.hazards = HazardPage(map_writable(descriptor, HAZARD_PAGE_BYTES))
            if checkpoint_bytes:
                self.checkpoint = map_read_only(next(left), checkpoint_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def peer_user(self) -> int:
        """The user who listens at the other end, as the kernel has it."""
        with socket.socket(fileno=os.dup(self._stream.fileno())) as sock:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user: int = _CREDENTIALS.unpack(credentials)[1]
        return user

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
        descriptor = self._stream.fileno()
        if self._closed_because is None and descriptor >= 0:  # another thread may be closing it
            poll = select.poll()
            poll.register(descriptor, select.POLLRDHUP)
            if poll.poll(0):
                self._end(PEER_GONE)
        return self._closed_because is not None or descriptor < 0

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
        deadline = time.monotonic() + progress_seconds

        on_late_frame = late_frame(on_late_reply, kind, reply_type)
        while True:
            frame = await self._exchange(kind, message, deadline, progress_seconds, on_late_frame)
            if not frame[0].flags & ERROR:
                try:
                    return reply_in(frame, kind, reply_type)
                except ProtocolError:
                    raise
                except BaseException:  # interrupted: nobody looks at it
                    if on_late_frame is not None:
                        on_late_frame(frame)
                    raise
            failure = decode_body(Failure, frame[1])
            if failure.code != Code.BUSY or time.monotonic() + BUSY_RETRY_SECONDS > deadline:
                raise error_of(failure.code, failure.text, failure.detail)
            await self._driver.sleep(BUSY_RETRY_SECONDS)

    async def _exchange(
        self,
        kind: LocalKind,
        message: Message,
        deadline: float,
        progress_seconds: float,
        on_late_frame: LateFrame | None,
    ) -> Frame:
        waiter, frame = self._register(kind, message)
        try:
            await self._send(frame)
            await self._receive_or_wait(waiter, deadline)
            if waiter.frame is None:
                await self._receive_until(waiter, deadline, progress_seconds)
            return self._taken(waiter)
        except BaseException:
            self.give_up(waiter, on_late_frame)
            raise

    async def request_ahead(
        self,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        *,
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> RequestAhead[M]:
        """Send a request whose reply is received later, so that this process and the peer work at the same
        time. `receive` or `abandon` must follow. Raises as `request`."""
        waiter, frame = self._register(kind, message)
        ahead = RequestAhead(
            self, waiter, kind, message, reply_type, progress_seconds, on_late_reply
        )
        try:
            await self._send(frame)
        except BaseException:
            ahead.abandon()
            raise
        return ahead

    async def reply_to(
        self, waiter: Waiter, progress_seconds: float, on_late_frame: LateFrame | None
    ) -> Frame:
        """The reply to a request that was sent ahead. For `RequestAhead`."""
        deadline = time.monotonic() + progress_seconds
        try:
            await self._receive_until(waiter, deadline, progress_seconds)
        except BaseException:
            self.give_up(waiter, on_late_frame)
            raise
        return self._taken(waiter)

    def _register(self, kind: LocalKind, message: Message) -> tuple[Waiter, bytes]:
        """A new request and its frame to send; `_taken` or `give_up` must follow."""
        self.check_usable()
        number = next(self._numbers) & 0xFFFF_FFFF
        frame = encode_frame(kind, number, message)
        if len(frame) - HEADER_BYTES > LOCAL_LIMITS.body_bytes:
            raise ValueError(
                f"the batch needs a request of {len(frame):,} bytes; at most "
                f"{LOCAL_LIMITS.body_bytes:,} are allowed: split it"
            )
        waiter = Waiter(number)
        with self._state:  # another thread may be going through them
            self._waiters[number] = waiter
        return waiter, frame

    async def _receive_until(
        self, waiter: Waiter, deadline: float, progress_seconds: float
    ) -> None:
        """Receive, or have others receive, until the reply is there."""
        while waiter.frame is None:
            self.check_usable()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the local peer did not answer within {progress_seconds:g} s: it is overloaded, "
                    "what was asked for did not come, or the timeout is too short"
                )
            await self._receive_or_wait(waiter, deadline)

    def _taken(self, waiter: Waiter) -> Frame:
        """The reply that has come."""
        with self._state:
            del self._waiters[waiter.number]
        assert waiter.frame is not None
        return waiter.frame

    def give_up(self, waiter: Waiter, on_late_frame: LateFrame | None = None) -> None:
        """Nobody waits for this reply any more; `on_late_frame` gets it when it comes after all."""
        with self._state:
            if (
                not self._receiving
            ):  # that may have been handed to this one: now it is the next one's
                any(other.wake() for other in self._waiters.values() if other is not waiter)
            if waiter.frame is None and on_late_frame is not None:
                waiter.on_late_frame = on_late_frame
                self._abandoned += 1
                return
            self._waiters.pop(waiter.number, None)
        if waiter.frame is not None and on_late_frame is not None:
            on_late_frame(waiter.frame)

    @property
    def awaits_late_replies(self) -> bool:
        """Whether a caller gave up on a request whose reply must still be looked at."""
        return self._abandoned > 0

    async def receive_late_replies(self, timeout_seconds: float) -> None:
        """Receive for those who gave up, for at most that long."""
        deadline = time.monotonic() + timeout_seconds
        onlooker = Waiter(-next(self._numbers))
        with self._state:
            self._waiters[onlooker.number] = onlooker
        try:
            while self._abandoned and time.monotonic() < deadline:
                self.check_usable()
                await self._receive_or_wait(onlooker, deadline)
        finally:
            with self._state:
                del self._waiters[onlooker.number]

    async def flush(self) -> None:
        """Send what `collect_one_way` has, if anything."""
        self.check_usable()
        await self._send()

    async def _send(self, frame: bytes = b"") -> None:
        """Send whole frames: half a frame would spoil the connection for everybody who uses it."""
        async with self._sending:
            unasked = self.collect_one_way()
            if unasked:
                frame = b"".join((*unasked, frame))
            if not frame:
                return
            self._is_sending = True
            try:
                await self._stream.send_whole(frame)
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
                    self._end(
                        "the client was interrupted in the middle of a request: connect again"
                    )
                raise
            finally:
                self._is_sending = False

    async def _receive_or_wait(self, waiter: Waiter, deadline: float) -> None:
        """Receive once for everybody, or wait until somebody who receives has news for `waiter`."""
        event: Event | None = None
        receives = False
        try:
            with self._state:
                if waiter.frame is not None:  # who received before brought it along
                    return
                if self._receiving:
                    event = waiter.event = self._driver.event()
                else:
                    receives = self._receiving = True
            if receives:
                self._limit_receiving(deadline - time.monotonic())
                count = await self._stream.receive_into(self._receive_buffer)
                self._dispatch(self._receive_buffer[:count], waiter)
        except DeadlineExceeded as error:
            if is_from_signal_handler(error):
                raise self._driver.interrupted(error) from None
            # whose deadline it was, its waiter finds out
        except Exception as error:
            if is_from_signal_handler(error):
                raise self._driver.interrupted(error) from None
            if isinstance(error, ProtocolError):
                raise self._end(f"the local peer sent what is not the protocol: {error}") from error
            raise self._end(
                f"the connection to the local peer broke ({error}): connect again"
            ) from error
        finally:
            if receives:
                with self._state:
                    self._receiving = False
                    for other in self._waiters.values():
                        if other.wake():
                            break  # that one receives from now on
        if event is not None:
            await event.wait(deadline - time.monotonic())

    def _limit_receiving(self, seconds: float) -> None:
        """Have the next receive take at most that long, or 1 % more: a new limit costs a system call."""
        if not 0.99 * seconds <= self._receive_seconds <= 1.01 * seconds:
            self._receive_seconds = self._stream.receive_seconds = max(0.001, seconds)

    def _dispatch(self, data: memoryview, receiver: Waiter) -> None:
        """Give the frames that have arrived whole to those who wait for them."""
        if not data:
            self._end(PEER_GONE)
            return
        frame = self._frames.sole_frame(data)
        if frame is not None:
            if frame[0].request_id == receiver.number:
                receiver.frame = frame
            else:
                self._deliver(frame)
            return
        self._frames.feed(data)
        while (frame := self._frames.next_frame()) is not None:
            self._deliver(frame)

    def _deliver(self, frame: Frame) -> None:
        number = frame[0].request_id
        with self._state:
            waiter = self._waiters.get(number)
            if waiter is None:
                return
            waiter.frame = frame
            waiter.wake()
            if waiter.on_late_frame is not None:
                del self._waiters[number]
                self._abandoned -= 1
        if waiter.on_late_frame is not None:
            waiter.on_late_frame(frame)

    def _end(self, reason: str) -> StoreClosed:
        """Close; everybody who waits fails with the reason."""
        with self._state:
            if self._closed_because is None:
                self._closed_because = reason
            for waiter in self._waiters.values():
                waiter.wake()
        self._stream.close()
        return StoreClosed(self._closed_because)

    def say_last(self, frames: bytes) -> None:
        """Send one-way frames before closing, as far as the socket takes them at once: who closes does not
        wait, and half a frame harms nobody when nothing follows."""
        if self._is_sending or self._closed_because is not None or self.is_inherited:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._stream.fileno())) as sock,
        ):
            sock.send(frames, socket.MSG_DONTWAIT)  # a blocking stream's descriptor would wait

    def close(self) -> None:
        """End the connection, its leases and reservations. Views of the mappings stay readable."""
        if not self.is_inherited:
            self._end(
                "the client is closed: call inside its `with` block, or before close(), or connect again"
            )
        self.segments.clear()
        self.location_table = self.hazards = None

    def let_go_after_fork(self) -> None:
        """In a forked child: give up the socket, or the parent's leases would outlive it."""
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            if self._stream.fileno() >= 0:
                os.dup2(nowhere, self._stream.fileno(), inheritable=False)
        finally:
            os.close(nowhere)


def _map_segment(
    segment: SegmentInfo, descriptors: list[int], user: int, *, writable: bool
) -> memoryview:
    length = segment.total_bytes
    if segment.pieces:
        return map_joined(descriptors, segment.pieces, length, writable=writable, trusted_user=user)
    return (map_writable if writable else map_read_only)(descriptors[0], length, trusted_user=user)


def _hangs(path: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the peer at {path} does not answer: its process hangs or was stopped; look at its log, or end "
        "it and start it again"
    )


def _let_go_of_inherited_sockets() -> None:
    for connection in list(_open_connections):
        connection.let_go_after_fork()


os.register_at_fork(after_in_child=_let_go_of_inherited_sockets)
