"""Byte streams and the blocking driver.

Protocol code (data connections, the local socket, the clients) is written once as coroutines over two
small interfaces, `ByteStream` and `Driver`. `p2pstore.runtime.trio_streams` drives it under trio,
`p2pstore.runtime.asyncio_streams` under asyncio. The driver here uses plain blocking sockets: its coroutines
never suspend, so `run_blocking` runs them to the end in the calling thread, without an event loop and
without a thread hop (a hop costs 140-500 us).

A deadline counts time without progress, not total time. Progress is a rate (`p2pstore.runtime.flow`): streams measure
it of what they send, and whoever receives measures it there.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB
from p2pstore.runtime.flow import Flow
from p2pstore.runtime.polling import Polling
from p2pstore.runtime.signal_errors import FromSignalHandler, as_raised

T = TypeVar("T")
BytesLike = bytes | bytearray | memoryview

SEND_PIECE_BYTES: Final = 2 * 1024 * 1024
"""Largest single send, and what is moved between two turns of an event loop: one send of 64 MiB would hold it for
20 ms, and turns cost a server CPU time."""
MAX_GATHER: Final = 512
"""Buffers in one `sendmsg`; the kernel allows 1,024."""
DEFAULT_PROGRESS_SECONDS: Final = 5.0
MAX_PASSED_DESCRIPTORS: Final = 16
_TIMEVAL: Final = struct.Struct("@ll")


class ByteStream(Protocol):
    """A connected stream socket. All calls raise `DeadlineExceeded` when nothing moves for
    `progress_seconds`, sends also when too little does (`p2pstore.runtime.flow`), and `OSError` when the
    connection breaks."""

    progress_seconds: float
    receive_seconds: float | None
    """Instead of `progress_seconds` for receiving alone, unless None: who sends on a connection that many
    share must not be cut off because somebody else's wait for a reply is nearly over."""

    async def send(self, *parts: BytesLike) -> None:
        """Send all parts, in order."""
        ...

    async def send_whole(self, *parts: BytesLike) -> None:
        """`send`, but never a part of it: a cancellation takes effect when everything was sent, and
        whatever else interrupts it closes the stream. For frames on a connection that many share."""
        ...

    async def receive_into(self, view: memoryview) -> int:
        """Receive at least one byte into `view`; 0 means the other side closed."""
        ...

    async def receive_soon(self, view: memoryview) -> int:
        """`receive_into` of what should be here within microseconds: where that helps, without sleeping."""
        ...

    async def receive_descriptors(self, view: memoryview) -> tuple[int, list[int]]:
        """Like `receive_into`, with the file descriptors that came along (the caller closes them)."""
        ...

    def fileno(self) -> int: ...

    def abort(self) -> None:
        """End the connection under whoever uses it, in another task or thread: what they wait for fails at once.
        They close it; its descriptor stays theirs until then."""
        ...

    def close(self) -> None:
        """Close at once; never blocks, may be called twice."""
        ...


class AcceptedStream(ByteStream, Protocol):
    """A server's end, which waits for as long as it likes between requests."""

    async def wait_readable_forever(self) -> None:
        """Wait, without a deadline, until a receive would not block."""
        ...

    @property
    def can_lend(self) -> bool:
        """Whether `lend` works: the bytes of the socket are those of the stream."""
        ...

    async def lend(self, work: Callable[[socket.socket], T]) -> T:
        """Have a thread run `work` on the non-blocking socket, which nobody else uses meanwhile. A cancellation ends
        the connection. Raises the `OSError` that `work` raises."""
        ...

    def stop_receiving(self) -> None:
        """Whoever waits to receive gets what has arrived, and then 0 as if the other side had closed."""
        ...


class Event(Protocol):
    """Something that one task or thread waits for; it may be set before that, and only once."""

    def set(self) -> None: ...

    async def wait(self, timeout_seconds: float) -> bool:
        """Whether the event was set within that time."""
        ...


class HelperTask(Protocol):
    """A coroutine that runs side by side with the one that started it."""

    def cancel(self) -> None:
        """End it where it waits. A thread only while it connects: whoever wants to end it elsewhere closes the
        connection that it uses."""
        ...

    def connected(self) -> None:
        """It has the connection that it wanted: `cancel` leaves that alone."""
        ...


StartHelper = Callable[[Callable[[HelperTask], Coroutine[Any, Any, None]]], None]
"""Starts `work(task)`. Raises `RuntimeError` where no more threads can be had. The work catches its own errors."""


class Driver(Protocol):
    """How protocol code reaches the world."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> ByteStream: ...

    async def connect_unix(self, path: str, timeout_seconds: float) -> ByteStream: ...

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a long copy or hash (over 5 ms) where it does not stop others. It may be cancelled before it
        begins, but not then: the call returns only when `function` has."""
        ...

    def helpers(self) -> AbstractAsyncContextManager[StartHelper]:
        """For what runs side by side with a block: tasks, or threads where this one can only do one thing at a time.
        All have ended when the block is left; when it ends, in whatever way, it sees to it that they do. Event loops
        cancel those that are left."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def lock(self) -> AbstractAsyncContextManager[Any]:
        """A new mutual exclusion lock."""
        ...

    def event(self) -> Event:
        """A new event, for one waiter."""
        ...

    def interrupted(self, error: Exception) -> BaseException:
        """What to raise for an error of a signal handler that ran within a call."""
        ...


def total_bytes(parts: Sequence[BytesLike]) -> int:
    """The bytes of all parts together."""
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
    """The views for the next `sendmsg`: at most 512, and no further one after 2 MiB in all.

    A header goes out with the first of its payload: alone it would cost the reader a wake-up.
    """
    total = 0
    last = first
    while last < len(views) and last - first < MAX_GATHER and total < SEND_PIECE_BYTES:
        total += len(views[last])
        last += 1
    return list(views[first:last])


def send_all(sock: socket.socket, parts: Sequence[BytesLike], progress_seconds: float) -> None:
    """Send everything on a socket that waits in the kernel. Raises `DeadlineExceeded` when next to nothing moves for
    `progress_seconds`, and `OSError` when the connection breaks, or somebody shuts it down."""
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
        # All that is left: between two calls the thread needs the interpreter's lock, and whoever else wants that
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
    `DeadlineExceeded` when nothing moves for so long, receiving `BlockingIOError`."""
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
    have the kernel stop who is at work (SCHED_BATCH, see sched(7)). Who sends a large object waits thousands of times
    for room, and would go on each time for a piece so small that most of it is switching."""
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:  # somebody chose what is better
        yield
        return
    with contextlib.suppress(PermissionError):  # a sandbox; what is sent arrives as well
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


def received_descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """File descriptors out of the ancillary data of a `recvmsg`."""
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_PASSED_DESCRIPTORS * array.array("i").itemsize)
_TCP_NOTSENT_LOWAT: Final = 25
"""Linux' number of the option; Python has no name for it before 3.13."""
UNSENT_BYTES: Final = 256 * KIB
"""So much may wait in the kernel beyond what is on its way. The kernel sends what waits when an acknowledgement comes:
within a host on the receiver's processor, while the sender's thread sends on its own one. So pieces of large objects
overtook each other, were taken for lost and sent again, and a connection to which that had happened was up to twice as
slow from then on. With 512 KiB it still happens, with 256 hardly ever. More would also stand in the way of messages
where the link is slow."""


def tune_tcp(sock: socket.socket) -> None:
    """Options for every data connection: no Nagle delay, little that waits in the kernel, and a congestion control that
    does not pace.

    bbr, the default of many distributions, halves loopback and same-rack throughput.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # what is sent arrives without it as well
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    for congestion_control in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control)
            return


class BlockingStream:
    """A `ByteStream` on a blocking socket with a timeout."""

    def __init__(
        self, sock: socket.socket, progress_seconds: float = DEFAULT_PROGRESS_SECONDS
    ) -> None:
        self._sock = sock
        # Have the kernel keep the time: Python's own timeout polls before every call.
        sock.settimeout(None)
        self._polling = Polling()
        self._receive_seconds: float | None = None
        self._progress_seconds = self._send_limit = self._receive_limit = 0.0
        self.progress_seconds = progress_seconds

    @property
    def progress_seconds(self) -> float:
        return self._progress_seconds

    @progress_seconds.setter
    def progress_seconds(self, seconds: float) -> None:
        if seconds == self._progress_seconds:  # nearly always
            return
        self._progress_seconds = seconds
        if _differs(seconds, self._send_limit):
            self._send_limit = seconds
            _set_kernel_timeout(self._sock, socket.SO_SNDTIMEO, seconds)
        if self._receive_seconds is None:
            self._limit_receiving(seconds)

    @property
    def receive_seconds(self) -> float | None:
        return self._receive_seconds

    @receive_seconds.setter
    def receive_seconds(self, seconds: float | None) -> None:
        self._receive_seconds = seconds
        self._limit_receiving(self._progress_seconds if seconds is None else seconds)

    def _limit_receiving(self, seconds: float) -> None:
        if _differs(seconds, self._receive_limit):
            self._receive_limit = seconds
            _set_kernel_timeout(self._sock, socket.SO_RCVTIMEO, seconds)

    async def send(self, *parts: BytesLike) -> None:
        try:
            if len(parts) == 1 and len(parts[0]) <= SEND_PIECE_BYTES:
                sent = self._sock.send(parts[0])  # whole, nearly always
                if sent == len(parts[0]):
                    return
                parts = (memoryview(parts[0])[sent:],)
            self._send_views(flatten_parts(parts))
        except OSError as error:
            raise _said(error, self._send_limit) from None

    async def send_whole(self, *parts: BytesLike) -> None:
        try:
            await self.send(*parts)
        except BaseException:
            self.close()
            raise

    def _send_views(self, views: list[memoryview]) -> None:
        flow, first = Flow(self._send_limit), 0
        while first < len(views):
            began = time.monotonic()
            sent = self._sock.sendmsg(gather(views, first))
            if not flow.moved(sent, time.monotonic() - began):
                raise flow.too_slow()
            first = advance(views, first, sent)

    async def receive_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except OSError as error:
            raise _said(error, self._receive_limit) from None

    async def receive_soon(self, view: memoryview) -> int:
        try:
            return self._polling.receive_into(self._sock, view)
        except OSError as error:
            raise _said(error, self._receive_limit) from None

    async def receive_all(self, views: Sequence[memoryview]) -> int:
        """`receive_into` up to 512 views, none empty; the kernel waits for all of them to be full, as long as a wait
        for some bytes may take."""
        try:
            return self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise _said(error, self._receive_limit) from None

    async def receive_descriptors(self, view: memoryview) -> tuple[int, list[int]]:
        try:
            count, ancillary, flags, _ = self._sock.recvmsg_into(
                [view], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _said(error, self._receive_limit) from None
        return count, check_descriptors(ancillary, flags)

    def fileno(self) -> int:
        return self._sock.fileno()

    def abort(self) -> None:
        shut_down(self._sock)

    def close(self) -> None:
        shut_down(self._sock)  # wakes a thread that waits in a receive
        self._sock.close()


def _differs(seconds: float, limit: float) -> bool:
    """Whether setting the limit anew is worth a system call."""
    return abs(seconds - limit) > 0.01 * limit


def _set_kernel_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    microseconds = max(1000, round(seconds * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))


def stalled(seconds: float) -> DeadlineExceeded:
    """The error of a connection on which nothing moved for so long."""
    return DeadlineExceeded(f"the connection made no progress for {seconds:g} s")


def _said(error: OSError, seconds: float) -> BaseException:
    """What a blocking call on a socket raised: the kernel's timeout, or what a signal handler raised meanwhile, or
    itself."""
    raised = as_raised(error)
    return stalled(seconds) if isinstance(raised, BlockingIOError) else raised


def check_descriptors(ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> list[int]:
    """The descriptors of one message; closes them and raises `ProtocolError` when some were lost."""
    descriptors = received_descriptors(ancillary)
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(
            f"file descriptors were lost: over {MAX_PASSED_DESCRIPTORS} were sent, or this process "
            "has none left (raise `ulimit -n`)"
        )
    return descriptors


class _Entered(threading.local):
    """The locks that this thread is in, or is about to get into, or just got out of."""

    def __init__(self) -> None:
        self.locks: list[_BlockingLock] = []


_entered = _Entered()


class _BlockingLock:
    """Ctrl-C may strike when the lock is taken and nobody has noted it yet, or before it is released;
    `release_interrupted` finds out."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # it knows its owner

    async def __aenter__(self) -> None:
        if self in _entered.locks:  # a frame in the middle of another one would end the session
            raise RuntimeError(
                "the client was called from a signal handler that interrupted one of its calls"
            )
        _entered.locks.append(self)
        try:
            self._lock.acquire()
        except Exception as error:
            raise as_raised(error) from None

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        _entered.locks.remove(self)

    @staticmethod
    def release_interrupted(outer: int) -> None:
        """Release what this thread still holds, but for the first `outer` locks: its coroutine has ended, and another
        one, which a signal handler interrupts, may go on."""
        while len(_entered.locks) > outer:
            with contextlib.suppress(RuntimeError):  # this thread does not hold it
                _entered.locks[-1]._lock.release()
            _entered.locks.pop()


class _BlockingEvent:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    async def wait(self, timeout_seconds: float) -> bool:
        try:
            return self._lock.acquire(timeout=max(0.0, timeout_seconds))
        except Exception as error:
            raise as_raised(error) from None


class _HelperThread:
    """A helper of the blocking driver: a thread that runs a coroutine of its own."""

    def __init__(self, work: Callable[[HelperTask], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name="p2pstore-helper")
        self._state = threading.Lock()
        self._cancelled = False
        self._connecting: socket.socket | None = None
        self.error: BaseException | None = None
        """What it raised."""

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        _helping.thread = self
        try:
            run_blocking(self._work(self))
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        with self._state:
            self._cancelled = True
            if self._connecting is not None:
                shut_down(self._connecting)

    def connected(self) -> None:
        with self._state:
            self._connecting = None

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """`socket.create_connection`, which `cancel` ends."""
        problem: OSError = OSError(f"{host} has no address")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(timeout_seconds)
                with self._state:
                    self._connecting = sock
                    if self._cancelled:
                        raise ConnectionAbortedError("nobody waits for this connection any more")
                sock.connect(address)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                problem = error
            else:
                return sock
        raise problem


def _join_all(threads: list[_HelperThread]) -> None:
    """Wait for the end of all, through whatever a signal raises here, such as Ctrl-C: that is raised then. Raises what
    one of them raised."""
    interrupt: BaseException | None = None
    while alive := [each for each in threads if each.is_alive]:  # some may start others meanwhile
        try:
            alive[0].join()
        except Exception as error:
            interrupt = as_raised(error)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    for thread in threads:
        if thread.error is not None:
            raise thread.error


class _Helping(threading.local):
    """The helper that this thread is."""

    thread: _HelperThread | None = None


_helping = _Helping()


def shut_down(sock: socket.socket) -> None:
    """End a connection, also one that is only being made: whoever waits for it is woken."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class BlockingDriver:
    """The `Driver` of the blocking client."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> BlockingStream:
        helper = _helping.thread
        try:
            sock = (
                socket.create_connection((host, port), timeout_seconds)
                if helper is None
                else helper.connect(host, port, timeout_seconds)
            )
        except OSError as error:
            raised = as_raised(error)
            if isinstance(raised, TimeoutError):
                raise DeadlineExceeded(
                    f"{host}:{port} did not answer within {timeout_seconds:g} s"
                ) from None
            raise raised from None
        tune_tcp(sock)
        return BlockingStream(sock)

    async def connect_unix(self, path: str, timeout_seconds: float) -> BlockingStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # With Python's own timeout a full backlog is refused at once instead of being waited out.
            _set_kernel_timeout(sock, socket.SO_SNDTIMEO, timeout_seconds)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raised = as_raised(error)
            if isinstance(raised, BlockingIOError):
                raise DeadlineExceeded(
                    f"{path} did not answer within {timeout_seconds:g} s"
                ) from None
            raise raised from None
        except BaseException:
            sock.close()
            raise
        return BlockingStream(sock)

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        return function()

    @asynccontextmanager
    async def helpers(self) -> AsyncIterator[StartHelper]:
        threads: list[_HelperThread] = []
        starting = threading.Lock()

        def start(work: Callable[[HelperTask], Coroutine[Any, Any, None]]) -> None:
            with starting:  # helpers may start others
                threads[:] = [each for each in threads if each.is_alive or each.error is not None]
                thread = _HelperThread(work)
                thread.start()
                threads.append(thread)

        try:
            yield start
        finally:
            _join_all(threads)

    async def sleep(self, seconds: float) -> None:
        try:
            threading.Event().wait(seconds)
        except Exception as error:
            raise as_raised(error) from None

    def lock(self) -> AbstractAsyncContextManager[Any]:
        return _BlockingLock()

    def event(self) -> Event:
        return _BlockingEvent()

    def interrupted(self, error: Exception) -> BaseException:
        return FromSignalHandler(error)  # `run_blocking` has it out again


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses only a `BlockingDriver` and its streams: it never suspends."""
    outer = len(_entered.locks)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except FromSignalHandler as carrier:
        _BlockingLock.release_interrupted(outer)
        raise carrier.error from carrier.error.__cause__
    except BaseException:
        _BlockingLock.release_interrupted(outer)
        raise
    coroutine.close()
    raise RuntimeError("a coroutine of the blocking client tried to suspend")
