"""Whole frames over one multiplexed stream: bounds, deadlines, and one writer task. Shell (trio), without libp2p."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

import trio

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.gossip.links.admission import AdmissionRefused
from p2pstore.objects import MIB
from p2pstore.runtime.byte_budget import Account, ByteBudget, Owner
from p2pstore.wire import (
    CONTROL_LIMITS,
    ERROR,
    HEADER_BYTES,
    HELLO_LIMITS,
    Code,
    Failure,
    FrameBuffer,
    FrameHeader,
    Message,
    decode_body,
)

M = TypeVar("M", bound=Message)


MAX_REQUESTS_IN_FLIGHT: Final = 64
"""Per stream, at both ends: an asker beyond it waits, a listener beyond it stops reading."""


WRITE_SECONDS: Final = 10.0
"""How long 60 KiB may take to leave."""
FRAME_SECONDS: Final = 30.0
"""By when a frame that has begun is whole: 4 MiB at 140 KB/s."""


MAX_UNSENT_BYTES: Final = 4 * MIB
"""Of frames that wait to be sent on a stream: until there are fewer, no request is answered or made there."""


_READ_BYTES: Final = 64 * 1024
_WRITE_PIECE_BYTES: Final = 60 * 1024
"""One piece is one frame of the multiplexer and one message of the encryption."""


class RawStream(Protocol):
    """One stream of a multiplexed connection. Both calls raise `OSError` when it ends or breaks."""

    async def read(self, max_bytes: int) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


def printable(text: str) -> str:
    """Text of a stranger, fit for one line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])


def code_from(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        return Code.INTERNAL


def nobodys_account() -> Account:
    """Where nothing bounds what is held but the limits of one stream."""
    return ByteBudget().open(Owner("", b""), lambda why: None)


class Frames:
    """Whole frames in, whole frames out. The account holds the bytes of every frame: of one that comes from its first
    byte until `handled`, of one that goes until it was sent."""

    def __init__(self, stream: RawStream, account: Account | None) -> None:
        self.account = account if account is not None else nobodys_account()
        self._stream = stream
        self._buffer = FrameBuffer(HELLO_LIMITS)
        self._outgoing, self._queue = trio.open_memory_channel[bytes](MAX_REQUESTS_IN_FLIGHT)
        self._held_bytes = 0
        self._is_over = False
        self._unsent_bytes = 0
        self._sent = trio.Event()

    async def read(self) -> tuple[FrameHeader, bytes]:
        """The next frame. Raises `ProtocolError`, and `OSError` at the end or for a frame that is not whole in time."""
        while (frame := self._buffer.next_frame()) is None:
            if self._buffer.pending_bytes:
                await self._read_rest()
            else:
                await self._read_some()
        return frame

    async def _read_rest(self) -> None:
        with trio.move_on_after(FRAME_SECONDS) as scope:
            while not self._buffer.has_frame:
                await self._read_some()
        if scope.cancelled_caught:
            raise TimeoutError(f"a frame was not whole within {FRAME_SECONDS:g} s")

    async def _read_some(self) -> None:
        data = await self._stream.read(_READ_BYTES)
        self._hold(len(data))
        self._buffer.feed(data)

    def _hold(self, count: int) -> None:
        if not self._is_over:
            self._held_bytes += count
            self.account.hold(count)

    def _release(self, count: int) -> None:
        if not self._is_over:
            self._held_bytes -= count
            self.account.release(count)

    def handled(self, body: bytes) -> None:
        """A frame that was read is not needed any more."""
        self._release(HEADER_BYTES + len(body))

    async def run(self, take: Callable[[trio.Nursery, FrameHeader, bytes], Awaitable[None]]) -> None:
        """Send what is queued and hand on what comes, until the stream ends. Raises `ProtocolError` and `OSError`."""
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run_writer)
                    while True:  # no name keeps a frame, which may be large: the next one may be late
                        await take(nursery, *await self.read())
        finally:
            # Nothing is left of the stream: neither what came nor what was to go.
            self._release(self._held_bytes)
            self._buffer.drop()
            self._is_over = True
            self._unsent_bytes = 0
            self._sent.set()

    async def write(self, frame: bytes) -> None:
        """Send now; only during admission, when there is no writer task."""
        with trio.fail_after(WRITE_SECONDS):
            await self._stream.write(frame)

    async def enqueue(self, frame: bytes) -> None:
        """Hand over to the writer task. Raises `OSError` when that has ended."""
        self._unsent_bytes += len(frame)
        self._hold(len(frame))
        try:
            await self._outgoing.send(frame)
        except trio.BrokenResourceError:
            raise ConnectionResetError("the stream has ended") from None
        except BaseException:
            self._gone(len(frame))
            raise

    @property
    def is_full(self) -> bool:
        return self._unsent_bytes >= MAX_UNSENT_BYTES

    async def wait_sent(self) -> None:
        """Return when little waits to be sent, or the stream has ended. No deadline: the writer has one."""
        while self.is_full:
            await self._sent.wait()

    def _gone(self, count: int) -> None:
        """`count` bytes do not wait to be sent any more."""
        self._release(count)
        before, self._unsent_bytes = self._unsent_bytes, self._unsent_bytes - count
        if before >= MAX_UNSENT_BYTES:
            self._sent.set()
            self._sent = trio.Event()

    def admitted(self) -> None:
        """Frames of every size from now on."""
        self._buffer.limits = CONTROL_LIMITS

    async def _run_writer(self) -> None:
        """Send what is queued, joining small frames. Raises `OSError` when a write fails or is stuck."""
        with self._queue, self._dropping_queued():
            async for frame in self._queue:
                data = frame
                with suppress(trio.WouldBlock):
                    while len(data) < _WRITE_PIECE_BYTES:
                        data += self._queue.receive_nowait()
                for start in range(0, len(data), _WRITE_PIECE_BYTES):
                    with trio.move_on_after(WRITE_SECONDS) as scope:
                        await self._stream.write(data[start : start + _WRITE_PIECE_BYTES])
                    if scope.cancelled_caught:
                        raise TimeoutError(f"a write made no progress for {WRITE_SECONDS:g} s")
                self._gone(len(data))
                del frame, data  # they may be large, and the next one late

    @contextmanager
    def _dropping_queued(self) -> Iterator[None]:
        """Frames that were not sent at the end are dropped, not kept for as long as the queue is referred to."""
        try:
            yield
        finally:
            with suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    self._queue.receive_nowait()

    async def expect(self, kind: ControlKind, flags: int, message_type: type[M]) -> M:
        """A frame of the handshake. Raises `AdmissionRefused` with the other side's reason for an ERROR."""
        header, body = await self.read()
        if header.kind == kind and header.flags & ERROR:
            failure = decode_body(Failure, body)
            raise AdmissionRefused(
                code_from(failure.code), f"the other side says: {printable(failure.text)}"
            )
        if header.kind != kind or header.flags != flags:
            raise ProtocolError(f"a frame of kind {header.kind} where the handshake has {kind.name}")
        self.handled(body)
        return decode_body(message_type, body)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise what ended a stream or a connection as itself, not in a nursery's group: the others are its echoes."""
    try:
        yield
    except BaseExceptionGroup as group:
        _, unexpected = group.split((ProtocolError, OSError))
        if unexpected is not None:
            cancelled, others = unexpected.split(trio.Cancelled)
            if others is None and cancelled is not None:
                raise cancelled from None  # it was to end anyhow
            raise
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
