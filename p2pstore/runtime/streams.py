"""Byte streams, drivers, and what their implementations share.

Protocol code (data connections, the local socket, the clients) is written once as coroutines over two
small interfaces, `ByteStream` and `Driver`. `blocking_streams`, `trio_streams` and `asyncio_streams` implement them.

A deadline counts time without progress, not total time. Progress is a rate (`p2pstore.runtime.flow`): streams measure
it of what they send, and receivers measure it there.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import repeat
from operator import not_
from typing import Any, Final, Protocol, TypeVar

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.flow import Flow

T = TypeVar("T")
BytesLike = bytes | bytearray | memoryview

SEND_PIECE_BYTES: Final = 2 * MIB
"""Largest single send, and what is moved between two turns of an event loop: one send of 64 MiB would hold it for
20 ms, and turns cost a server CPU time."""
MAX_GATHER: Final = 512
"""Buffers in one `sendmsg`; the kernel allows 1,024."""
DEFAULT_PROGRESS_SECONDS: Final = 5.0
RECEIVED_PIECE_BYTES: Final = 64 * KIB
"""Largest piece of `receive_piece`: Python would get the memory for larger ones from the kernel each time."""
MAX_PASSED_DESCRIPTORS: Final = 16
BACKLOG_RETRY_SECONDS: Final = 0.01
_TIMEVAL: Final = struct.Struct("@ll")


class ByteStream(Protocol):
    """A connected stream socket. All calls raise `DeadlineExceeded` when nothing moves for
    `progress_seconds`, sends also when too little does (`p2pstore.runtime.flow`), and `OSError` when the
    connection breaks."""

    progress_seconds: float
    receive_seconds: float | None
    """Instead of `progress_seconds` for receiving alone, unless None: a send on a connection that many
    share must not be cut off because another caller's wait for a reply is nearly over."""

    async def send(self, *parts: BytesLike) -> None:
        """Send all parts, in order."""

    async def send_whole(self, *parts: BytesLike) -> None:
        """`send`, but never a part of it: a cancellation takes effect when everything was sent, and
        whatever else interrupts it closes the stream. For frames on a connection that many share."""

    async def receive_into(self, view: memoryview) -> int:
        """Receive at least one byte into `view`; 0 means the other side closed."""

    async def receive_soon(self, view: memoryview) -> int:
        """`receive_into` of what should be here within microseconds: where that helps, without sleeping."""

    def fileno(self) -> int: ...

    def abort(self) -> None:
        """End the connection under its users, in other tasks or threads: their waits fail at once.
        They close it; its descriptor stays theirs until then."""

    def close(self) -> None:
        """Close at once; never blocks, may be called twice."""


class UnixStream(ByteStream, Protocol):
    """A connection within this host."""

    async def receive_descriptors(self, view: memoryview) -> tuple[int, list[int]]:
        """Like `receive_into`, with the file descriptors that came along (the caller closes them)."""
        ...

    pieces: list[bytes]
    """Received by `receive_piece` and not taken away yet."""

    async def receive_piece(self) -> None:
        """Append what comes soon, at most 64 KiB, to `pieces`; b"" means the other side closed. An interrupt at any
        moment, such as Ctrl-C, loses no byte."""
        ...


class AcceptedStream(ByteStream, Protocol):
    """A server's end, which waits for as long as it likes between requests."""

    async def wait_readable_forever(self) -> None:
        """Wait, without a deadline, until a receive would not block."""

    @property
    def can_lend(self) -> bool:
        """Whether `lend` works: the bytes of the socket are those of the stream."""

    async def lend(self, work: Callable[[socket.socket], T]) -> T:
        """Have a thread run `work` on the non-blocking socket, which it has for itself meanwhile. A cancellation ends
        the connection. Raises the `OSError` that `work` raises."""

    def stop_receiving(self) -> None:
        """A receive gets bytes that have arrived, and then 0 as if the other side had closed."""


class Event(Protocol):
    """Something that one task or thread waits for; it may be set before that, and only once."""

    def set(self) -> None: ...

    async def wait(self, timeout_seconds: float) -> bool:
        """Whether the event was set within that time."""


class HelperTask(Protocol):
    """A coroutine that runs side by side with the one that started it."""

    def cancel(self) -> None:
        """End it where it waits. A thread only while it connects: elsewhere, close the connection that it uses."""

    def connected(self) -> None:
        """It has the connection that it wanted: `cancel` leaves that alone."""


HelperWork = Callable[[HelperTask], Coroutine[Any, Any, None]]
StartHelper = Callable[[HelperWork], None]
"""Starts `work(task)`. Raises `RuntimeError` where no more threads can be had. The work catches its own errors."""


class Driver(Protocol):
    """How protocol code reaches the world."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> ByteStream: ...

    async def connect_unix(self, path: str, timeout_seconds: float) -> UnixStream: ...

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a long copy or hash (over 5 ms) where it does not stop others. It may be cancelled before it
        begins, but not then: the call returns only when `function` has."""

    def helpers(self) -> AbstractAsyncContextManager[StartHelper]:
        """For what runs side by side with a block: tasks, or threads where this one can only do one thing at a time.
        All have ended when the block is left; when it ends, in whatever way, it sees to it that they do. Event loops
        cancel those that are left."""

    async def sleep(self, seconds: float) -> None: ...

    def lock(self) -> AbstractAsyncContextManager[Any]:
        """A new mutual exclusion lock."""

    def event(self) -> Event:
        """A new event, for one waiter."""

    def interrupted(self, error: Exception) -> BaseException:
        """The exception to raise for an error of a signal handler that ran within a call."""


class NonblockingStream:
    """The base of `ByteStream`s on non-blocking sockets. One task may send while another receives."""

    def __init__(self, sock: socket.socket, progress_seconds: float = DEFAULT_PROGRESS_SECONDS) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.progress_seconds = progress_seconds
        self.receive_seconds: float | None = None
        self._unyielded_bytes = 0
        self.pieces: list[bytes] = []
        self._receive_piece = appending(sock, self.pieces)

    async def _take_turn(self) -> None:
        """Let other tasks run once in 2 MiB; before a system call, because a task may be cancelled here."""
        raise NotImplementedError

    async def _wait(self, limit_seconds: float, *, writable: bool = False) -> None:
        """Wait until the socket is readable, or `writable`. Raises `DeadlineExceeded` after that time."""
        raise NotImplementedError

    async def _wait_readable(self) -> None:
        limit = self.receive_seconds
        await self._wait(self.progress_seconds if limit is None else limit)

    async def send(self, *parts: BytesLike) -> None:
        sent = 0
        if len(parts) <= MAX_GATHER and (size := total_bytes(parts)) <= SEND_PIECE_BYTES:
            await self._take_turn()
            try:  # noqa: SIM105  # in 0.2 us less; a small message goes out whole nearly always
                sent = self._sock.sendmsg(parts)
            except BlockingIOError:
                pass
            self._unyielded_bytes += sent
            if sent == size:
                return
        views = flatten_parts(parts)
        flow, first = Flow(self.progress_seconds), advance(views, 0, sent)
        while first < len(views):
            first = await self._send_some(views, first, flow)

    async def _send_some(self, views: list[memoryview], first: int, flow: Flow) -> int:
        """The index of the first view that is not wholly sent. Cancelled, it has sent nothing."""
        await self._take_turn()
        waited_seconds = 0.0
        while True:
            try:
                sent = self._sock.sendmsg(gather(views, first))
            except BlockingIOError:
                began = time.monotonic()
                await self._wait(self.progress_seconds, writable=True)
                waited_seconds += time.monotonic() - began
                continue
            if not flow.moved(sent, waited_seconds):
                raise flow.too_slow()
            self._unyielded_bytes += sent
            return advance(views, first, sent)

    async def receive_into(self, view: memoryview) -> int:
        await self._take_turn()
        while True:
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                await self._wait_readable()
                continue
            # No cancellation from here on: bytes taken off the socket would be lost.
            self._unyielded_bytes += count
            return count

    receive_soon = receive_into

    async def receive_piece(self) -> None:
        await self._take_turn()
        while True:
            try:
                self._receive_piece()
                return
            except BlockingIOError:
                await self._wait_readable()

    async def receive_descriptors(self, view: memoryview) -> tuple[int, list[int]]:
        await self._take_turn()
        while True:
            try:
                count, ancillary, flags, _ = self._sock.recvmsg_into(
                    [view], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._wait_readable()
                continue
            return count, check_descriptors(ancillary, flags)

    def fileno(self) -> int:
        return self._sock.fileno()

    def abort(self) -> None:
        shut_down(self._sock)


def total_bytes(parts: Sequence[BytesLike]) -> int:
    return sum([part.nbytes if type(part) is memoryview else len(part) for part in parts])


def flatten_parts(parts: Sequence[BytesLike]) -> list[memoryview]:
    """Byte views of at most 2 MiB each, empty parts left out."""
    views: list[memoryview] = []
    for part in parts:
        view = memoryview(part).cast("B") if not isinstance(part, bytes) else memoryview(part)
        for start in range(0, len(view), SEND_PIECE_BYTES):
            views.append(view[start : start + SEND_PIECE_BYTES])
    return views


def gather(views: Sequence[memoryview], first: int) -> list[memoryview]:
    """The views for the next `sendmsg`: at most 512, and no further one after 2 MiB in all. A header goes out with the
    first of its payload: alone it would cost the reader a wake-up."""
    total = 0
    last = first
    while last < len(views) and last - first < MAX_GATHER and total < SEND_PIECE_BYTES:
        total += len(views[last])
        last += 1
    return list(views[first:last])


def send_all(sock: socket.socket, parts: Sequence[BytesLike], progress_seconds: float) -> None:
    """Send everything on a socket that waits in the kernel. Raises `DeadlineExceeded` when next to nothing moves for
    `progress_seconds`, and `OSError` when the connection breaks, or is shut down."""
    sent = sock.sendmsg(parts[:MAX_GATHER])
    if sent < sum(map(len, parts)):  # seldom: many parts, or little progress
        views = flatten_parts(parts)
        del views[: advance(views, 0, sent)]
        send_views(sock, views, progress_seconds)


def send_views(sock: socket.socket, views: list[memoryview], progress_seconds: float) -> None:
    """Send all views, which change, on a socket that waits in the kernel. Raises as `send_all`."""
    flow, first = Flow(progress_seconds), 0
    while first < len(views):
        began = time.monotonic()
        # All that is left: between two calls the thread needs the interpreter's lock, and another one that wants it
        # waits for it when the kernel lets another thread run then.
        sent = sock.sendmsg(views[first : first + MAX_GATHER])
        if not flow.moved(sent, time.monotonic() - began):
            raise flow.too_slow()
        first = advance(views, first, sent)


@contextlib.contextmanager
def waiting_in_kernel(
    sock: socket.socket, *, send_seconds: float, receive_seconds: float | None = None
) -> Iterator[None]:
    """A non-blocking socket for a thread that may wait, which has it for itself: it waits in the kernel. Sending raises
    `DeadlineExceeded` when nothing moves for `send_seconds`, receiving `BlockingIOError` after `receive_seconds`."""
    sock.setblocking(True)
    try:
        _set_kernel_timeout(sock, socket.SO_SNDTIMEO, send_seconds)
        if receive_seconds is not None:
            _set_kernel_timeout(sock, socket.SO_RCVTIMEO, receive_seconds)
        yield
    except BlockingIOError:
        raise stalled(send_seconds) from None
    finally:
        sock.setblocking(False)


@contextlib.contextmanager
def taking_no_core() -> Iterator[None]:
    """The calling thread, each time that it has waited, waits on until a core is free or its turn comes: it does not
    have the kernel preempt running threads (SCHED_BATCH, see sched(7)). A sender of a large object waits thousands of
    times for room, and would run each time for a piece so small that most of it is switching."""
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:  # a better one was chosen
        yield
        return
    with contextlib.suppress(PermissionError):  # a sandbox; sending works as well
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, before, os.sched_param(0))


def advance(views: list[memoryview], first: int, sent: int) -> int:
    """The index of the first view that is not wholly sent, after `sent` bytes from `first` on."""
    while sent:
        view = views[first]
        if sent < len(view):
            views[first] = view[sent:]
            return first
        sent -= len(view)
        first += 1
    return first


def appending(sock: socket.socket, pieces: list[bytes], flags: int = 0) -> Callable[[], bool]:
    """A function that receives and appends to `pieces`, both in C: Python looks for signals in no moment between."""
    received = map(sock.recv, repeat(RECEIVED_PIECE_BYTES), repeat(flags))
    return partial(next, map(not_, map(pieces.append, received)))


ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_PASSED_DESCRIPTORS * array.array("i").itemsize)
_TCP_NOTSENT_LOWAT: Final = 25
"""Linux' number of the option; Python has no name for it before 3.13."""
UNSENT_BYTES: Final = 256 * KIB
"""Bytes that may wait in the kernel beyond those on their way. The kernel sends them when an acknowledgement comes:
within a host on the receiver's processor, while the sender's thread sends on its own one. So pieces of large objects
overtook each other, were taken for lost and sent again, and a connection to which that had happened was up to twice as
slow from then on. With 512 KiB it still happens, with 256 hardly ever. More would also stand in the way of messages
where the link is slow."""


def tune_tcp(sock: socket.socket) -> None:
    """Options for every data connection: no Nagle delay, little that waits in the kernel, and a congestion control that
    does not pace: bbr, the default of many distributions, halves loopback and same-rack throughput."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # sending works without it as well
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    for congestion_control in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control)
            return


def _set_kernel_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    microseconds = max(1000, round(seconds * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))


async def connect_first(
    addresses: Iterable[tuple[Any, ...]], connect: Callable[[socket.socket, Any], Awaitable[None]]
) -> socket.socket:
    """A socket connected to the first of these addresses (of `getaddrinfo`) that takes it. Raises the last one's
    error."""
    error = OSError("the host has no address")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            await connect(sock, address)
        except BaseException as problem:
            sock.close()
            if not isinstance(problem, OSError):
                raise
            error = problem
        else:
            return sock
    raise error


async def connect_nonblocking(
    sock: socket.socket,
    address: Any,
    sleep: Callable[[float], Awaitable[None]],
    wait_writable: Callable[[socket.socket], Awaitable[object]],
) -> None:
    """Connect a fresh socket without blocking. A full backlog of a Unix socket is waited out."""
    sock.setblocking(False)
    while (code := sock.connect_ex(address)) == errno.EAGAIN:  # AF_UNIX: the backlog is full
        await sleep(BACKLOG_RETRY_SECONDS)
    if code == errno.EINPROGRESS:
        await wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def silent(where: str, seconds: float) -> DeadlineExceeded:
    """The error of a connection that was not made within `seconds`."""
    return DeadlineExceeded(f"{where} did not answer within {seconds:g} s")


def stalled(seconds: float) -> DeadlineExceeded:
    """The error of a connection on which nothing moved for `seconds`."""
    return DeadlineExceeded(f"the connection made no progress for {seconds:g} s")


def check_descriptors(ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> list[int]:
    """The descriptors of one message, from the ancillary data of its `recvmsg`; closes them and raises `ProtocolError`
    when some were lost."""
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(
            f"file descriptors were lost: over {MAX_PASSED_DESCRIPTORS} were sent, or this process "
            "has none left (raise `ulimit -n`)"
        )
    return list(descriptors)


def shut_down(sock: socket.socket) -> None:
    """End a connection, also one that is only being made: its waiters are woken."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
