"""TCP under the control host: listening, dialling by name, and sockets that bound what a stranger may send."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import trio

from p2pstore.addresses import DEFAULT_CONTROL_PORT, join_address, split_address
from p2pstore.errors import ConfigError
from p2pstore.runtime.streams import connect_first, tune_tcp
from p2pstore.runtime.trio_streams import connect_socket

T = TypeVar("T")

WRITE_SECONDS: Final = 10.0
"""A write that makes no progress for this long ends the connection."""
STAGGER_SECONDS: Final = 0.25
"""How long one address has before the next one is tried beside it."""
MAX_ENDPOINTS: Final = 64
"""Addresses tried in one dial: a headless service may have a record for every peer of a large cluster."""

_RECEIVE_BYTES: Final = 64 * 1024
_READS_A_TURN: Final = 64
"""Reads that find their bytes there (32 encrypted messages: a millisecond) before other tasks have a turn."""
_BACKLOG: Final = 512
_DEAD_AFTER_SECONDS: Final = 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One resolved address."""

    family: int
    address: Any

    def __str__(self) -> str:
        return join_address(self.address[0], self.address[1])


class GuardedSocket:
    """The socket under libp2p's reads and writes: raises `ConnectionResetError` once the connection is over.

    A read returns exactly what was asked, out of a buffer that one receive fills, and gives way now and then, as a fast
    sender never would. A write is shielded from cancellation: half an encrypted message makes the rest unreadable."""

    def __init__(self, sock: socket.socket, allowance_bytes: int) -> None:
        """`allowance_bytes`: how much the other side may send before `lift_allowance`."""
        sock.setblocking(False)
        tune_tcp(sock)
        _detect_dead_hosts(sock)
        self._sock = sock
        self._allowance_bytes: int | None = allowance_bytes
        self._data = b""
        self._position = 0
        self.received_bytes = 0
        """All that has come since the connection was made."""
        self.sent_bytes = 0
        self._unchecked_bytes = 0
        self._reads = 0
        """Since the reader last gave way; `_READS_A_TURN` for that it is to with the next one."""
        self._check: Callable[[], None] = lambda: None

    def lift_allowance(self, check: Callable[[], None]) -> None:
        """From now on `check` judges, once in 64 KiB, whether too much came; it may close this."""
        self._allowance_bytes = None
        self._check = check

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes; without `n`, what has arrived (at least one byte)."""
        wanted = 1 if n is None else n
        self._reads += 1
        if self._reads >= _READS_A_TURN:
            self._reads = 0
            await trio.lowlevel.checkpoint()
        while len(self._data) - self._position < wanted:
            await self._receive()
        end = len(self._data) if n is None else self._position + n
        taken = self._data[self._position : end]
        self._position = end
        return taken

    async def _receive(self) -> None:
        self._reads = _READS_A_TURN  # unless it waits: more is there than was read so far
        while True:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
                break
            except BlockingIOError:
                self._reads = 0
                with _closed_is_reset():
                    await trio.lowlevel.wait_readable(self._sock)
            except OSError as error:
                raise ConnectionResetError(f"the connection broke: {error.strerror}") from None
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        if self._allowance_bytes is not None:
            self._allowance_bytes -= len(data)
            if self._allowance_bytes < 0:
                raise ConnectionResetError("it sends more than a handshake needs")
        self.received_bytes += len(data)
        self._unchecked_bytes += len(data)
        if self._unchecked_bytes >= _RECEIVE_BYTES:
            self._unchecked_bytes = 0
            self._check()
        rest = self._data[self._position :]
        self._data = rest + data if rest else data
        self._position = 0

    async def write(self, data: bytes) -> None:
        """Send everything."""
        rest = self._send(memoryview(data))
        if rest:  # seldom: a shield costs as much as the sending
            with trio.CancelScope(shield=True):
                while rest:
                    await self._wait_writable()
                    rest = self._send(rest)

    def _send(self, data: memoryview) -> memoryview:
        """Send what the kernel takes at once; the rest is returned."""
        try:
            sent = self._sock.send(data)
            self.sent_bytes += sent
            return data[sent:]
        except BlockingIOError:
            return data
        except OSError as error:
            raise ConnectionResetError(f"the connection broke: {error.strerror}") from None

    async def _wait_writable(self) -> None:
        with trio.move_on_after(WRITE_SECONDS) as scope, _closed_is_reset():
            await trio.lowlevel.wait_writable(self._sock)
        if scope.cancelled_caught:
            self.abort()
            raise ConnectionResetError(f"it took no byte for {WRITE_SECONDS:g} s")

    def abort(self) -> None:
        """Close at once; may be called twice."""
        if self._sock.fileno() != -1:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def close(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._sock.getpeername()[:2]
        except OSError:
            return None
        return str(host), int(port)


class _closed_is_reset:
    """trio says that a socket was closed under a waiting task in its own way."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, trio.ClosedResourceError):
            raise ConnectionResetError("the connection was closed") from None


def _detect_dead_hosts(sock: socket.socket) -> None:
    """A host without power sends no FIN: let the kernel notice within about 20 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_SECONDS // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_SECONDS * 1000)


async def listen_tcp(host: str, port: int | None) -> socket.socket:
    """A listening socket; port 0 is any free one, None the default one or, when that is taken, any. Raises
    `ConfigError` naming the address and what to do."""
    if port is None:
        # Only listening takes a port: looked at before, it may be free for two processes that start at once.
        try:
            return await _listen_tcp(host, DEFAULT_CONTROL_PORT)
        except _PortTaken:
            port = 0
    return await _listen_tcp(host, port)


class _PortTaken(ConfigError):
    """Another process listens there already."""


async def _listen_tcp(host: str, port: int) -> socket.socket:
    where = join_address(host, port)
    try:
        records = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"listen: {where} cannot be resolved: {error}") from None
    family, kind, protocol, _, address = records[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        advice = {
            errno.EADDRINUSE: "another process listens there: stop it, or choose another port with --listen",
            errno.EADDRNOTAVAIL: "no interface of this machine has that address: choose another with --listen",
            errno.EACCES: "this user may not bind that port: choose one above 1023 with --listen",
        }.get(error.errno or 0, "choose another address with --listen")
        kind_of_error = _PortTaken if error.errno == errno.EADDRINUSE else ConfigError
        raise kind_of_error(
            f"cannot listen on {where}: {os.strerror(error.errno or 0)}; {advice}"
        ) from None
    return sock


async def resolve(addresses: Sequence[str]) -> list[Endpoint]:
    """All records of all addresses (`HOST:PORT`, `[v6]:PORT`), in order, without repetition. Raises `OSError` when none
    resolves, and `ConfigError` for an address that is none."""
    endpoints: dict[Endpoint, None] = {}
    failure: OSError = OSError("there is no address to try")
    for address in addresses:
        host, port = split_address(address, "address")
        try:
            records = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failure = OSError(f"{host} cannot be resolved: {error.strerror}")
            continue
        for family, _, _, _, found in records:
            endpoints[Endpoint(family, found)] = None
    if not endpoints:
        raise failure
    return list(endpoints)[:MAX_ENDPOINTS]


async def connect(endpoint: Endpoint) -> socket.socket:
    """A connected socket. Raises `OSError`."""
    record = endpoint.family, socket.SOCK_STREAM, 0, "", endpoint.address
    return await connect_first([record], connect_socket)


async def first_success(
    attempts: Sequence[Callable[[], Awaitable[T]]], failures: tuple[type[Exception], ...]
) -> T:
    """The result of the first attempt that succeeds (the next starts when one fails or after 0.25 s); raises the last
    failure when all fail. `attempts` must not be empty."""
    results: list[T] = []
    errors: list[Exception] = []

    async def run(attempt: Callable[[], Awaitable[T]], finished: trio.Event) -> None:
        try:
            results.append(await attempt())
            nursery.cancel_scope.cancel()
        except failures as error:
            errors.append(error)
        finally:
            finished.set()

    async with trio.open_nursery() as nursery:
        for attempt in attempts:
            finished = trio.Event()
            nursery.start_soon(run, attempt, finished)
            with trio.move_on_after(STAGGER_SECONDS):
                await finished.wait()
    if results:
        return results[0]
    raise errors[-1]
