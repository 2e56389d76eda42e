"""Streams over one encrypted connection: `yamux` with tasks and waiting. Shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from p2pstore.errors import ProtocolError
from p2pstore.gossip.links.control_frames import nobodys_account, single_error
from p2pstore.gossip.links.yamux import GOODBYE, Session, StreamState
from p2pstore.objects import MIB
from p2pstore.runtime.byte_budget import Account
from p2pstore.runtime.trio_tasks import wait_room

STRANGER_STREAM_BYTES: Final = 32 * 1024
"""Most bytes that a stream carries before it is admitted."""
ADMITTED_WINDOW_BYTES: Final = MIB
"""Unread bytes on a stream that was admitted: 100 MiB/s at a round trip of 10 ms."""
MAX_REPLY_BYTES: Final = 64 * 1024
"""Bytes that wait to be sent in answer to the other side's frames, before it counts as one that does not read."""
FAREWELL_SECONDS: Final = 0.5


class Secured(Protocol):
    """An encrypted connection."""

    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class MuxedStream:
    """One stream. Every failure is an `OSError`. Each side must `close` it in the end."""

    def __init__(self, multiplexer: Multiplexer, state: StreamState) -> None:
        self.state = state
        self._multiplexer = multiplexer
        self._changed = trio.Event()
        self._allowance_bytes: int | None = STRANGER_STREAM_BYTES

    async def lift_allowance(self) -> None:
        """It is admitted: it may carry any amount, and more of it unread."""
        self._allowance_bytes = None
        await self._multiplexer.send(self.state.widen(ADMITTED_WINDOW_BYTES))

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The bytes that have arrived, at least one. Raises `OSError` at the end."""
        while not (data := self.state.take(max_bytes)):
            if self.state.ended is not None:
                raise ConnectionResetError(f"the stream ended: {self.state.ended}")
            await self._changed.wait()
        if self._allowance_bytes is not None:
            self._allowance_bytes -= len(data)
            if self._allowance_bytes < 0:
                raise ConnectionResetError("it sends more than a handshake needs")
        try:
            if update := self.state.window_update():
                await self._multiplexer.send(update)
        finally:
            self._multiplexer.was_read(len(data))  # from here on it counts where it is read
        return data

    async def write(self, data: bytes) -> None:
        """Send everything; waits while the other side's window is full."""
        view = memoryview(data)
        while view:
            if self.state.reset:
                raise ConnectionResetError(f"the stream ended: {self.state.ended}")
            before = self.state.send_window
            if frame := self.state.data_frame(view):
                view = view[before - self.state.send_window :]
                await self._multiplexer.send(frame)
            else:
                await self._changed.wait()

    async def close(self) -> None:
        """Tell the other side that the stream is over, if that is possible at once."""
        with trio.CancelScope(shield=True), trio.move_on_after(FAREWELL_SECONDS):
            await self._multiplexer.close_stream(self)

    def happened(self) -> None:
        """Let waiting tasks look again."""
        self._changed.set()
        self._changed = trio.Event()


class Multiplexer:
    """The streams of one connection. `accept` is called, and must not wait, for each that the other side
    opens. `account` holds what was not read yet; while its owner has no room, nothing is received."""

    def __init__(
        self,
        secured: Secured,
        *,
        initiator: bool,
        max_incoming: int,
        accept: Callable[[MuxedStream], None],
        account: Account | None = None,
    ) -> None:
        self._account = account if account is not None else nobodys_account()
        self._unread_bytes = 0
        self._secured = secured
        self.session = Session(initiator=initiator, max_incoming=max_incoming)
        self._accept = accept
        self._streams: dict[int, MuxedStream] = {}
        self._sending = trio.Lock()
        self._replies = bytearray()
        self._replying = False
        self._over = False

    async def run(self) -> None:
        """Take in what comes until the other side says goodbye. Raises `OSError` and `ProtocolError`."""
        try:
            with single_error():
                await self._take_in()
        finally:
            self._over = True
            for stream in self._streams.values():
                stream.state.ended = stream.state.ended or "the connection ended"
                stream.state.reset = True
                stream.happened()

    async def _take_in(self) -> None:
        session = self.session
        async with trio.open_nursery() as nursery:
            while not session.said_goodbye:
                try:
                    data = await self._secured.read()
                except Exception as error:  # whatever the encryption raises
                    raise _lost(error) from None
                session.feed(data)
                self._count_unread()
                self._dispatch(nursery)
                if not self._account.has_room:
                    await wait_room(self._account)
            nursery.cancel_scope.cancel()

    def was_read(self, count: int) -> None:
        """`count` bytes were taken off a stream; the account holds what is unread."""
        self.session.unread_bytes -= count
        self._count_unread()

    def _count_unread(self) -> None:
        before, self._unread_bytes = self._unread_bytes, self.session.unread_bytes
        if self._unread_bytes != before:
            self._account.hold(self._unread_bytes - before)

    def _dispatch(self, nursery: trio.Nursery) -> None:
        session = self.session
        for state in session.opened:
            stream = self._streams[state.number] = MuxedStream(self, state)
            self._accept(stream)
        session.opened.clear()
        for number in session.changed:
            if (known := self._streams.get(number)) is not None:
                known.happened()
        session.changed.clear()
        if session.replies:
            self._replies += session.replies
            session.replies.clear()
            if len(self._replies) > MAX_REPLY_BYTES:
                raise ProtocolError("it does not read what it asks for")
            if not self._replying:
                self._replying = True
                nursery.start_soon(self._send_replies)

    async def _send_replies(self) -> None:
        """Not in the task that reads: both sides' readers might wait for each other to read. One task for all: a peer
        that asks and does not read must not cost one for each."""
        try:
            while self._replies:
                frames, self._replies = bytes(self._replies), bytearray()
                await self.send(frames)
        finally:
            self._replying = False

    async def open_stream(self) -> MuxedStream:
        """A new stream. Raises `OSError`."""
        state, frame = self.session.open()
        stream = self._streams[state.number] = MuxedStream(self, state)
        try:
            await self.send(frame)
        except BaseException:
            self._forget(stream)
            raise
        return stream

    async def close_stream(self, stream: MuxedStream) -> None:
        """End a stream; nothing happens when it was closed before."""
        frame = self._forget(stream)
        stream.happened()
        if frame and not self._over:
            try:
                await self.send(frame)
            except OSError:
                return  # the connection is over, and so is the stream

    async def say_goodbye(self) -> None:
        """Announce that this side closes the connection, if that is possible at once."""
        with trio.CancelScope(shield=True), trio.move_on_after(FAREWELL_SECONDS):
            try:
                await self.send(GOODBYE)
            except OSError:
                return  # it was lost already

    async def send(self, frame: bytes) -> None:
        """Raises `OSError`."""
        if self._over:
            raise ConnectionResetError("the connection ended")
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._secured.write(frame)
        except Exception as error:  # whatever the encryption raises
            raise _lost(error) from None
        finally:
            self._sending.release()

    def _forget(self, stream: MuxedStream) -> bytes:
        if self._streams.get(stream.state.number) is stream:
            del self._streams[stream.state.number]
        farewell = self.session.close(stream.state)
        self._count_unread()
        return farewell


def _lost(error: Exception) -> ConnectionResetError:
    cause: BaseException = error
    while not isinstance(cause, OSError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return ConnectionResetError(str(cause) or f"the connection broke ({type(cause).__name__})")
