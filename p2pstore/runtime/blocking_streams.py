"""The driver of the blocking client: plain blocking sockets, whose coroutines never suspend.

`run_blocking` runs them to the end in the calling thread, without an event loop and without a thread hop (a hop costs
140 to 500 us).

Python runs signal handlers inside the call that the main thread waits in, and that call raises what they raise: the
`TimeoutError` of a program's alarm looks like the socket's own. It is neither an answer of the other side nor a reason
to try another one. So it is raised as `FromSignalHandler`, past all error handling, as Ctrl-C is, and leaves the client
as itself. The connection stays usable, or says that it was closed.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec

from p2pstore.runtime.polling import LOCAL_SHORT_SECONDS, Polling
from p2pstore.runtime.streams import (
    ANCILLARY_BYTES,
    DEFAULT_PROGRESS_SECONDS,
    SEND_PIECE_BYTES,
    BytesLike,
    Event,
    HelperWork,
    StartHelper,
    T,
    _set_kernel_timeout,
    appending,
    check_descriptors,
    connect_first,
    flatten_parts,
    send_views,
    shut_down,
    silent,
    stalled,
    tune_tcp,
)


class BlockingStream:
    """A `ByteStream` on a blocking socket with a timeout."""

    def __init__(
        self,
        sock: socket.socket,
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        *,
        polling: Polling | None = None,
    ) -> None:
        self._sock = sock
        # Have the kernel keep the time: Python's own timeout polls before every call.
        sock.settimeout(None)
        self._polling = polling or Polling()
        self.pieces: list[bytes] = []
        self._receive_piece = appending(sock, self.pieces)
        self._piece_at_once = appending(sock, self.pieces, socket.MSG_DONTWAIT)
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
            send_views(self._sock, flatten_parts(parts), self._send_limit)
        except OSError as error:
            raise _said(error, self._send_limit) from None

    async def send_whole(self, *parts: BytesLike) -> None:
        try:
            await self.send(*parts)
        except BaseException:
            self.close()
            raise

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

    async def receive_piece(self) -> None:
        try:
            self._polling.receive(self._piece_at_once, self._receive_piece)
        except OSError as error:
            raise _said(error, self._receive_limit) from None

    async def receive_all(self, views: Sequence[memoryview]) -> int:
        """`receive_into` up to 512 views, none empty; the kernel waits until all are full, within the limit."""
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


def _said(error: OSError, seconds: float) -> BaseException:
    """The error of a blocking call on a socket: the kernel's timeout, or what a signal handler raised, or itself."""
    raised = as_raised(error)
    return stalled(seconds) if isinstance(raised, BlockingIOError) else raised


class _Entered(threading.local):
    """The locks that this thread is in, or is about to get into, or just got out of."""

    def __init__(self) -> None:
        self.locks: list[_BlockingLock] = []


_entered = _Entered()


class _BlockingLock:
    """Ctrl-C may strike between taking or releasing the lock and noting that; `release_interrupted` finds out."""

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


class _HelperThread(threading.Thread):
    """A helper of the blocking driver: a thread that runs a coroutine of its own."""

    def __init__(self, work: HelperWork) -> None:
        super().__init__(name="p2pstore-helper")
        self._work = work
        self._state = threading.Lock()
        self._cancelled = False
        self._connecting: socket.socket | None = None
        self.error: BaseException | None = None
        """The exception that it raised."""

    def run(self) -> None:
        _helping.thread = self
        try:
            run_blocking(self._work(self))
        except BaseException as error:
            self.error = error

    def cancel(self) -> None:
        with self._state:
            self._cancelled = True
            if self._connecting is not None:
                shut_down(self._connecting)

    def connected(self) -> None:
        with self._state:
            self._connecting = None

    async def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """`socket.create_connection`, which `cancel` ends."""

        async def connect(sock: socket.socket, address: Any) -> None:
            sock.settimeout(timeout_seconds)
            with self._state:
                self._connecting = sock
                if self._cancelled:
                    raise ConnectionAbortedError("this connection is not needed any more")
            sock.connect(address)

        return await connect_first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), connect)


def _join_all(threads: list[_HelperThread]) -> None:
    """Wait for all to end, through what a signal raises here, such as Ctrl-C: raised then; else what one raised."""
    interrupt: BaseException | None = None
    while alive := [each for each in threads if each.is_alive()]:  # some may start others meanwhile
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


class BlockingDriver:
    """The `Driver` of the blocking client."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> BlockingStream:
        helper = _helping.thread
        try:
            sock = (
                socket.create_connection((host, port), timeout_seconds)
                if helper is None
                else await helper.connect(host, port, timeout_seconds)
            )
        except OSError as error:
            raised = as_raised(error)
            if isinstance(raised, TimeoutError):
                raise silent(f"{host}:{port}", timeout_seconds) from None
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
                raise silent(path, timeout_seconds) from None
            raise raised from None
        except BaseException:
            sock.close()
            raise
        return BlockingStream(sock, polling=Polling(short_seconds=LOCAL_SHORT_SECONDS))

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        return function()

    @asynccontextmanager
    async def helpers(self) -> AsyncIterator[StartHelper]:
        threads: list[_HelperThread] = []
        starting = threading.Lock()

        def start(work: HelperWork) -> None:
            with starting:  # helpers may start others
                threads[:] = [each for each in threads if each.is_alive() or each.error is not None]
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


_OURS: Final = frozenset({"p2pstore", "trio", "outcome", *sys.stdlib_module_names})
"""Packages whose frames lie between a blocking call of this package and what it raised by itself."""


class FromSignalHandler(BaseException):
    """Carries `error` out of the client."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def as_raised(error: Exception) -> BaseException:
    """The exception to raise for an error that was caught in this frame: itself, or a `FromSignalHandler`."""
    return FromSignalHandler(error) if is_from_signal_handler(error) else error


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether the error comes from a frame that this package did not call."""
    at: TracebackType | None = error.__traceback__
    while at is not None and (at := at.tb_next) is not None:
        name = at.tb_frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _OURS or name == "__main__":
            return True
    return False


P = ParamSpec("P")
"""Parameters of a method, which its blocking form has, too."""


class Facade:
    """Blocking methods over an async object, each made of the async one: see `in_blocking_form` and `plain_form`."""

    def __init__(self, original: Any) -> None:
        self._original = original


def in_blocking_form(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Facade, P], T]:
    """The blocking form of an async method, with its parameters, result and documentation."""

    @wraps(method)
    def call(self: Facade, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(self._original, *args, **kwargs))

    call.__doc__ = inspect.getdoc(method)  # its own, or that of the protocol's method
    return call


def plain_form(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Facade, P], T]:
    """A method of the async object that does not wait."""

    @wraps(method)
    def call(self: Facade, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._original, *args, **kwargs)

    call.__doc__ = inspect.getdoc(method)
    return call
