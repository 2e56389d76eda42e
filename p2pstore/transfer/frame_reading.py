"""Frames and their bulk bytes off an accepted connection. Under trio."""

from __future__ import annotations

from p2pstore.runtime.streams import AcceptedStream
from p2pstore.wire import Code, FrameBuffer, FrameHeader, encode_failure


class Refused(Exception):
    """The connection ends: `code` and `text` are sent, and one line is logged."""

    def __init__(self, kind: int, request_id: int, code: Code, text: str) -> None:
        super().__init__(text)
        self.frame = encode_failure(kind, request_id, code, text)


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
    """Receive bulk bytes that nobody wants."""
    while length_bytes:
        piece = buffer[: min(length_bytes, len(buffer))]
        await receive_bulk(stream, frames, piece)
        length_bytes -= len(piece)
