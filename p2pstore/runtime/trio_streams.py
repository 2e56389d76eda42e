"""The trio driver: raw non-blocking sockets and `trio.lowlevel` waits, which cost less than trio's stream objects on
small messages and nothing on large ones.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from p2pstore.errors import DeadlineExceeded
from p2pstore.runtime.linux import is_ready, is_shortage, shortage
from p2pstore.runtime.streams import (
    DEFAULT_PROGRESS_SECONDS,
    SEND_PIECE_BYTES,
    BytesLike,
    Event,
    HelperWork,
    NonblockingStream,
    StartHelper,
    connect_first,
    connect_nonblocking,
    shut_down,
    silent,
    stalled,
    tune_tcp,
)
from p2pstore.runtime.trio_tasks import sole_cause

T = TypeVar("T")


class TrioStream(NonblockingStream):
    """A `ByteStream` under trio."""

    def __init__(self, sock: socket.socket, progress_seconds: float = DEFAULT_PROGRESS_SECONDS) -> None:
        super().__init__(sock, progress_seconds)
        self._in_thread = False
        """Whether a thread has the socket."""

    async def _take_turn(self) -> None:
        if self._unyielded_bytes >= SEND_PIECE_BYTES:
            self._unyielded_bytes = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    async def _wait(self, limit_seconds: float, *, writable: bool = False) -> None:
        ready = trio.lowlevel.wait_writable if writable else trio.lowlevel.wait_readable
        try:
            if limit_seconds == math.inf:  # a scope would cost as much as the rest
                await ready(self._sock)
            else:
                with trio.move_on_after(limit_seconds) as scope:
                    await ready(self._sock)
                if scope.cancelled_caught:
                    raise stalled(limit_seconds)
        except (trio.ClosedResourceError, ValueError):  # ValueError: it was closed before
            raise ConnectionAbortedError("the connection was closed by this side") from None
        self._unyielded_bytes = 0

    async def send_whole(self, *parts: BytesLike) -> None:
        try:
            with trio.CancelScope(shield=True):
                await self.send(*parts)
        except BaseException:
            self.close()
            raise

    async def wait_readable_forever(self) -> None:
        await self._wait(math.inf)

    @property
    def can_lend(self) -> bool:
        return True

    async def lend(self, work: Callable[[socket.socket], T]) -> T:
        error: OSError | DeadlineExceeded | None = None
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._sock.dup() as sock:  # its number is not given to others while the thread has it
            self._in_thread = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._shut_down_when_cancelled)
                with trio.CancelScope(shield=True):  # the thread uses what is ours until it has ended
                    try:
                        # The lender counts the threads.
                        limiter = trio.CapacityLimiter(1)
                        result = await trio.to_thread.run_sync(work, sock, limiter=limiter)
                    except (OSError, DeadlineExceeded) as problem:
                        error = problem
                    finally:
                        self._in_thread = False
                nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
        if error is not None:
            raise error
        return result

    async def _shut_down_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._shut_down_thread()

    def _shut_down_thread(self) -> None:
        if self._in_thread:
            shut_down(self._sock)

    def stop_receiving(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def send_now(self, data: BytesLike) -> int:
        """Send what the kernel takes at once, without a turn of the event loop: how many bytes that was. Not while
        another task sends. Raises `OSError`."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def wake_after(self, length_bytes: int) -> None:
        """Wake a receiver when `length_bytes` have come (or the end), not by each packet: for data that
        comes in bulk over a slow link. To be set back to 1 when fewer may be all that comes."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, length_bytes)

    def close(self) -> None:
        if self._sock.fileno() != -1:
            self._shut_down_thread()
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()


class _TrioEvent:
    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_seconds: float) -> bool:
        if timeout_seconds == math.inf:  # a scope would cost as much as the rest
            await self._event.wait()
            return True
        with trio.move_on_after(timeout_seconds):
            await self._event.wait()
        return self._event.is_set()


class _TrioHelper:
    """A helper of the trio driver."""

    def __init__(self, work: HelperWork) -> None:
        self._work = work
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        with self._scope:
            await self._work(self)

    def cancel(self) -> None:
        self._scope.cancel()

    def connected(self) -> None:
        """A task that is cancelled takes care of its connection itself."""


class TrioDriver:
    """The `Driver` of the peer and of the trio client."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> TrioStream:
        with trio.move_on_after(timeout_seconds):
            addresses = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = await connect_first(addresses, connect_socket)
            tune_tcp(sock)
            return TrioStream(sock)
        raise silent(f"{host}:{port}", timeout_seconds)

    async def connect_unix(self, path: str, timeout_seconds: float) -> TrioStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with trio.move_on_after(timeout_seconds):
                await connect_socket(sock, path)
                return TrioStream(sock)
            raise silent(path, timeout_seconds)
        except BaseException:
            sock.close()
            raise

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):  # what it writes to is busy until it returns
            result: T = await trio.to_thread.run_sync(function)
        return result

    @asynccontextmanager
    async def helpers(self) -> AsyncIterator[StartHelper]:
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:

                def start(work: HelperWork) -> None:
                    nursery.start_soon(_TrioHelper(work).run)

                try:
                    yield start
                except Exception as error:  # as itself, not in a group
                    failure = error
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            cause = sole_cause(group)
            if cause is group:
                raise
            raise cause from None
        if failure is not None:
            raise failure

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    def lock(self) -> AbstractAsyncContextManager[Any]:
        return trio.Lock()

    def event(self) -> Event:
        return _TrioEvent()

    def interrupted(self, error: Exception) -> BaseException:
        return error


async def connect_socket(sock: socket.socket, address: Any) -> None:
    """Connect a fresh socket. Raises `OSError`."""
    await connect_nonblocking(sock, address, trio.sleep, trio.lowlevel.wait_writable)
    await trio.lowlevel.checkpoint_if_cancelled()


SAY_SECONDS: Final = 60.0
"""How often one listener says that it lacks something."""
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 2.0


class Accepting:
    """Accepts connections of one listener of `what` (for people), on through shortages: logged once a minute, with
    `turn_away` called for a connection and the reason, which closes it and may not raise."""

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        turn_away: Callable[[socket.socket, str], None] = lambda sock, reason: sock.close(),
    ) -> None:
        self._logger = logger
        self._what = what
        self._turn_away = turn_away
        self._spare = -1
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._said_at = -SAY_SECONDS
        self._keep_spare()

    def close(self) -> None:
        """Let go of the descriptor that is kept for shortages."""
        if self._spare != -1:
            os.close(self._spare)
            self._spare = -1

    async def accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        """The next connection and its address. Raises `trio.ClosedResourceError` when the listener is closed with
        `notify_closing`, and `OSError` when it is closed otherwise."""
        while True:
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener.fileno())
            except OSError as error:
                if listener.fileno() < 0:
                    raise
                if not is_shortage(error):  # the connection was gone before it was accepted
                    await trio.lowlevel.checkpoint()
                elif not is_ready(listener.fileno(), 0):  # no connection waits
                    await trio.lowlevel.wait_readable(listener.fileno())
                else:
                    await self._in_shortage(listener, error)
            else:
                if self._keep_spare():
                    self._pause_seconds = FIRST_PAUSE_SECONDS
                    return sock, address
                # It took the last descriptor, without which the next one could not be told.
                self._say(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), sock)
                await trio.lowlevel.checkpoint()

    async def _in_shortage(self, listener: socket.socket, error: OSError) -> None:
        if self._keep_spare():
            self.close()
            with contextlib.suppress(OSError):
                self._say(error, listener.accept()[0])
                await trio.lowlevel.checkpoint()
                return
        self._say(error)
        await trio.sleep(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    def _say(self, error: OSError, sock: socket.socket | None = None) -> None:
        """Tell the other side, if it was accepted, and now and then the log."""
        reason = shortage(error)
        if sock is not None:
            self._turn_away(sock, reason)
        self._keep_spare()
        now = time.monotonic()
        if now >= self._said_at + SAY_SECONDS:
            self._said_at = now
            self._logger.error(
                "%s cannot connect now: %s", self._what, reason, extra={"event": "shortage"}
            )

    def _keep_spare(self) -> bool:
        if self._spare == -1:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self._spare != -1
