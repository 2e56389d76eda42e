"""One authenticated connection and its streams, with limits on what the other side may leave unread. Shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, Generic, Protocol, TypeVar

import trio

from p2pstore.gossip.link import ADMISSION_SECONDS, AskingStream
from p2pstore.gossip.records import PeerId
from p2pstore.gossip.sockets import GuardedSocket

_STRANGER_STREAM_BYTES: Final = 32 * 1024
"""What a stream may carry before it is admitted."""
_STRANGER_BYTES: Final = 256 * 1024
"""All that a connection may carry before it is admitted: a handshake is 1 KiB. The multiplexer would collect
one frame of up to 16 MiB before anybody could look at it."""
_BUFFER_BYTES: Final = 40 * 1024 * 1024
"""Unread bytes of one connection: yamux announces windows of up to 16 MiB but does not enforce them."""
_RESET_SECONDS: Final = 0.5


class YamuxLike(Protocol):
    """What a connection needs of its multiplexer."""

    @property
    def stream_buffers(self) -> Mapping[int, bytearray]: ...


class YamuxStreamLike(Protocol):
    """What a stream is made from."""

    async def read(self, n: int | None = -1) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def reset(self) -> None: ...


M = TypeVar("M", bound=YamuxLike)


class Stream:
    """A yamux stream whose every failure is an `OSError`, with a cap on what a stranger may send."""

    def __init__(self, stream: YamuxStreamLike) -> None:
        self._stream = stream
        self._allowance_bytes: int | None = _STRANGER_STREAM_BYTES

    def lift_allowance(self) -> None:
        self._allowance_bytes = None

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = await self._stream.read(n)
        except Exception as error:
            raise ConnectionResetError(f"the stream ended ({type(error).__name__})") from None
        if self._allowance_bytes is not None:
            self._allowance_bytes -= len(data)
            if self._allowance_bytes < 0:
                raise ConnectionResetError("it sends more than a handshake needs")
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except Exception as error:
            raise ConnectionResetError(f"the stream broke ({type(error).__name__})") from None

    async def close(self) -> None:
        """Tell the other side that the stream is over, if that is possible at once."""
        with trio.CancelScope(shield=True), trio.move_on_after(_RESET_SECONDS), suppress(Exception):
            await self._stream.reset()


class Connection(Generic[M]):
    """One authenticated connection; its tasks run in its own nursery."""

    def __init__(
        self, peer_id: PeerId, address: str, muxed: M, sock: GuardedSocket, *, incoming: bool
    ) -> None:
        self.peer_id = peer_id
        self.incoming = incoming
        self.address = address
        self.muxed = muxed
        self.asking: AskingStream | None = None
        self.ever_admitted = False
        self.opened_by_other = 0
        self.ended = trio.Event()
        self.nursery: trio.Nursery | None = None
        self.stranger: trio.CancelScope | None = None
        """Of an incoming connection: its place among those that are not admitted yet."""
        self.key_ids: list[bytes] = []
        """The cluster key with which each admitted stream was admitted."""
        self._sock = sock
        self._used = trio.Event()
        self._unused = trio.Event()
        sock.lift_allowance(self._check_received)

    @property
    def admitted(self) -> bool:
        return bool(self.key_ids)

    def abort(self) -> None:
        """End the connection at once."""
        self._sock.abort()
        if self.nursery is not None:
            self.nursery.cancel_scope.cancel()

    @contextmanager
    def using(self, key_id: bytes) -> Iterator[None]:
        """An admitted stream exists inside."""
        self.ever_admitted = True
        self.key_ids.append(key_id)
        if len(self.key_ids) == 1:
            self._used.set()
            self._unused = trio.Event()
        try:
            yield
        finally:
            self.key_ids.remove(key_id)
            if not self.key_ids:
                self._unused.set()
                self._used = trio.Event()

    async def wait_useless(self) -> None:
        """Return when there has been no admitted stream for 10 s."""
        while True:
            with trio.move_on_after(ADMISSION_SECONDS) as scope:
                await self._used.wait()
            if scope.cancelled_caught:
                return
            await self._unused.wait()

    def _check_received(self) -> None:
        unread = sum(map(len, self.muxed.stream_buffers.values()))
        if not self.ever_admitted and self._sock.received_bytes > _STRANGER_BYTES:
            self._sock.abort()
            raise ConnectionResetError("it sends more than a handshake needs")
        if unread > _BUFFER_BYTES:
            self._sock.abort()
            raise ConnectionResetError(f"{unread:,} bytes that nobody reads")
