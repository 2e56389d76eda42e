"""The asyncio driver: raw non-blocking sockets, and the loop only to wait for them.

A wait ends before the system call that it was for. So a cancelled task has taken nothing off the
socket and written nothing into a caller's buffer: asyncio's own sock_recv_into receives while the
task sleeps, and what it received is lost when the task is cancelled before it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from p2pstore.runtime.flow import Flow
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
    flatten_parts,
    silent,
    stalled,
    tune_tcp,
)

T = TypeVar("T")


class AsyncioStream(NonblockingStream):
    """A `ByteStream` under asyncio."""

    def __init__(self, sock: socket.socket, progress_seconds: float = DEFAULT_PROGRESS_SECONDS) -> None:
        super().__init__(sock, progress_seconds)
        self._waits: set[_Wait] = set()

    async def _wait(self, limit_seconds: float, *, writable: bool = False) -> None:
        wait = _Wait(self._sock.fileno(), writable=writable)
        self._waits.add(wait)
        try:
            ready = await wait.ready(limit_seconds)
        finally:
            self._waits.discard(wait)
        if not ready:
            raise stalled(limit_seconds)
        self._unyielded_bytes = 0

    async def _take_turn(self) -> None:
        if self._unyielded_bytes >= SEND_PIECE_BYTES:
            self._unyielded_bytes = 0
            await asyncio.sleep(0)

    async def send_whole(self, *parts: BytesLike) -> None:
        views = flatten_parts(parts)
        flow, first = Flow(self.progress_seconds), 0
        cancelled: asyncio.CancelledError | None = None
        try:
            while first < len(views):
                try:
                    first = await self._send_some(views, first, flow)
                except asyncio.CancelledError as error:
                    cancelled = error
        except BaseException:
            self.close()
            raise
        if cancelled is not None:
            raise cancelled

    def close(self) -> None:
        for wait in list(self._waits):
            wait.abort()
        self._sock.close()


class _Wait:
    """One wait for a socket to become readable or writable. The loop knows the socket only meanwhile."""

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        if descriptor < 0:
            raise ConnectionAbortedError("the connection was closed by this side")
        self._descriptor = descriptor
        self._writable = writable
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[bool] = self._loop.create_future()
        self._watching = False

    async def ready(self, timeout_seconds: float) -> bool:
        """Whether the socket became ready within that time. Raises `ConnectionAbortedError` after `abort`."""
        watch = self._loop.add_writer if self._writable else self._loop.add_reader
        watch(self._descriptor, _settle, self._outcome, True)
        self._watching = True
        expiry = self._loop.call_later(timeout_seconds, _settle, self._outcome, False)
        try:
            return await self._outcome
        finally:
            expiry.cancel()
            self._stop_watching()

    def abort(self) -> None:
        """End the wait, because the socket is about to be closed: its number may be another's then."""
        self._stop_watching()
        if not self._outcome.done():
            closed = ConnectionAbortedError("the connection was closed by this side")
            self._outcome.set_exception(closed)

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            forget = self._loop.remove_writer if self._writable else self._loop.remove_reader
            forget(self._descriptor)


def _settle(outcome: asyncio.Future[bool], value: bool) -> None:
    if not outcome.done():
        outcome.set_result(value)


class _AsyncioEvent:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[bool] = self._loop.create_future()

    def set(self) -> None:
        _settle(self._outcome, True)

    async def wait(self, timeout_seconds: float) -> bool:
        if timeout_seconds == math.inf:
            return await self._outcome
        expiry = self._loop.call_later(timeout_seconds, _settle, self._outcome, False)
        try:
            return await self._outcome
        finally:
            expiry.cancel()


class _AsyncioHelper:
    """A helper of the asyncio driver."""

    def __init__(self, work: HelperWork) -> None:
        self.task = asyncio.get_running_loop().create_task(work(self))

    def cancel(self) -> None:
        self.task.cancel()

    def connected(self) -> None:
        """A task that is cancelled takes care of its connection itself."""


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends, through any cancellation, which is raised then; else what one raised."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    failures = list(filter(None, map(_failure, tasks)))
    if cancelled is not None:
        raise cancelled
    if failures:
        raise failures[0]


def _failure(ended: asyncio.Task[None]) -> BaseException | None:
    return None if ended.cancelled() else ended.exception()


class AsyncioDriver:
    """The `Driver` of the asyncio client."""

    async def connect_tcp(self, host: str, port: int, timeout_seconds: float) -> AsyncioStream:
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                sock = await connect_first(await _resolve(host, port), _connect)
        except TimeoutError:
            if not limit.expired():  # the kernel gave up first
                raise
            raise silent(f"{host}:{port}", timeout_seconds) from None
        tune_tcp(sock)
        return AsyncioStream(sock)

    async def connect_unix(self, path: str, timeout_seconds: float) -> AsyncioStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                await _connect(sock, path)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError) and limit.expired():
                raise silent(path, timeout_seconds) from None
            raise
        return AsyncioStream(sock)

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(None, function)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:  # what it writes to is busy until it returns
                cancelled = error
        if cancelled is not None:
            running.exception()  # else asyncio warns that it was never retrieved
            raise cancelled
        return running.result()

    @asynccontextmanager
    async def helpers(self) -> AsyncIterator[StartHelper]:
        tasks: list[asyncio.Task[None]] = []

        def start(work: HelperWork) -> None:
            tasks[:] = [each for each in tasks if not each.done() or _failure(each)]
            tasks.append(_AsyncioHelper(work).task)

        try:
            yield start
        finally:
            await _end(tasks)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def lock(self) -> AbstractAsyncContextManager[Any]:
        return asyncio.Lock()

    def event(self) -> Event:
        return _AsyncioEvent()

    def interrupted(self, error: Exception) -> BaseException:
        return error


async def _resolve(host: str, port: int) -> list[Any]:
    """The addresses of a host. A numeric one needs no thread."""
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _connect(sock: socket.socket, address: Any) -> None:
    async def writable(sock: socket.socket) -> None:
        await _Wait(sock.fileno(), writable=True).ready(math.inf)

    await connect_nonblocking(sock, address, asyncio.sleep, writable)
