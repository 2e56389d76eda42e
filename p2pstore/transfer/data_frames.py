"""Frames of a data connection: off an accepted stream, with their bulk bytes, and of a link. Under trio."""

from __future__ import annotations

import math
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.streams import AcceptedStream, ByteStream
from p2pstore.wire import ONE_WAY, FrameBuffer, FrameHeader, Limits


async def receive_some(stream: AcceptedStream, view: memoryview) -> int:
    """At least one byte. Raises `ConnectionResetError` when the other side has closed."""
    count = await stream.receive_into(view)
    if count == 0:
        raise ConnectionResetError("the other side closed the connection")
    return count


async def next_frame(
    stream: AcceptedStream, frames: FrameBuffer, buffer: memoryview
) -> tuple[FrameHeader, bytes]:
    """The next header with its body; `buffer` is room to receive into. The frame's bulk bytes, if it has
    some, come next: see `receive_bulk`."""
    while (frame := frames.next_frame()) is None:
        frames.feed(buffer[: await receive_some(stream, buffer)])
    return frame


async def receive_bulk(stream: AcceptedStream, frames: FrameBuffer, view: memoryview) -> None:
    """Fill `view` with the bulk bytes that come next, straight off the socket."""
    position = frames.take_into(view)
    while position < len(view):
        position += await receive_some(stream, view[position:])


async def skip_bulk(
    stream: AcceptedStream, frames: FrameBuffer, length_bytes: int, buffer: memoryview
) -> None:
    """Receive bulk bytes and drop them."""
    while length_bytes:
        piece = buffer[: min(length_bytes, len(buffer))]
        await receive_bulk(stream, frames, piece)
        length_bytes -= len(piece)


LINK_LIMITS: Final = Limits(64 * KIB, 0)
RECEIVE_BYTES: Final = 16 * KIB
MAX_UNSENT_BYTES: Final = MIB
"""Upper bound of bytes that wait for a side that does not read; more ends the link."""


class FrameLink:
    """One task receives; any task enqueues a frame at any time, and one (`send_all`) sends it."""

    def __init__(self, stream: ByteStream, frames: FrameBuffer) -> None:
        """`frames` has what was received already."""
        frames.limits = LINK_LIMITS
        stream.receive_seconds = math.inf  # a side that has nothing to say is well
        self._stream = stream
        self._wait_readable = getattr(stream, "wait_readable_forever", None)
        self._frames = frames
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._closed = False

    def enqueue(self, frame: bytes) -> bool:
        """Have a frame sent next. False when too much waits already: the other side does not read, and the link is
        closed."""
        if not self._unsent_bytes:
            frame = frame[self._send_now(frame) :]
            if not frame:
                return True
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.end()
            return False
        self._unsent.append(frame)
        return True

    def _send_now(self, frame: bytes) -> int:
        """Bytes sent at once, nearly always all: to wake a task for that would cost more than sending."""
        send_now = getattr(self._stream, "send_now", None)
        if send_now is None or self._closed:
            return 0
        try:
            sent: int = send_now(frame)
        except OSError:
            return 0  # `send_all` finds out, and the receiver
        return sent

    @property
    def has_unsent(self) -> bool:
        """Whether `send_all` has something to do."""
        return bool(self._unsent)

    async def send_all(self) -> None:
        """Send what was enqueued. Raises `OSError`, `DeadlineExceeded` among them; the link is of no use then."""
        while self._unsent:
            frames, self._unsent = self._unsent, []
            joined = b"".join(frames)
            await self._stream.send(joined)
            self._unsent_bytes -= len(joined)  # only now may others send past this task

    async def receive(self) -> list[tuple[int, bytes]]:
        """Kinds and bodies of the next frames, at least one; none when the other side has closed. Raises `OSError`,
        and `ProtocolError` for what is no frame of a link."""
        while True:
            received = []
            while (frame := self._frames.next_frame()) is not None:
                header, body = frame
                if header.flags != ONE_WAY:
                    raise ProtocolError(f"a frame with flags {header.flags} on a link")
                received.append((header.kind, body))
            if received:
                return received
            if self._wait_readable is not None:  # else each receive would be tried in vain first
                await self._wait_readable()
            count = await self._stream.receive_into(self._buffer)
            if count == 0:
                return []
            self._frames.feed(self._buffer[:count])

    @property
    def patience_seconds(self) -> float:
        """How long sending may make no progress."""
        return self._stream.progress_seconds

    @patience_seconds.setter
    def patience_seconds(self, seconds: float) -> None:
        self._stream.progress_seconds = seconds

    @property
    def closed(self) -> bool:
        return self._closed

    def end(self) -> None:
        """End it under the tasks that receive or send: both fail at once, and close it. May be called twice."""
        self._closed = True
        self._stream.abort()

    def close(self) -> None:
        """End it when no task uses it any more; may be called twice."""
        self._closed = True
        self._stream.close()
