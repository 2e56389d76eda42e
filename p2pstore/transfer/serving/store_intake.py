"""Taking in a value that is stored over a data connection. Under trio."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import CHUNK_BYTES, chunk_count, chunk_sum
from p2pstore.runtime.streams import AcceptedStream
from p2pstore.transfer.data_frames import Refused, next_frame, receive_bulk
from p2pstore.transfer.data_messages import DataKind, StorePart
from p2pstore.transfer.serving.serving_backends import OpenedStore
from p2pstore.wire import ONE_WAY, REPLY, Code, FrameBuffer, FrameHeader, decode_body


async def receive_value(
    stream: AcceptedStream,
    frames: FrameBuffer,
    buffer: memoryview,
    opened: OpenedStore,
    seconds: float,
) -> FrameHeader:
    """Receive all parts of a value straight into its place; returns the header of the last one.

    Raises `Refused` for a chunk that is not as announced and for parts out of order, `ProtocolError` for
    anything but parts, `DeadlineExceeded` when the value is not there after `seconds`, and `OSError` when
    the connection breaks. After that nothing writes to the place any more.
    """
    incoming = IncomingValue(opened.payload, opened.sums)
    with trio.move_on_after(seconds):
        while True:
            header = await _receive_part(stream, frames, buffer, incoming)
            if incoming.complete:
                return header
    length = len(opened.payload)
    raise DeadlineExceeded(f"a value of {length:,} bytes did not arrive within {seconds:.3g} s")


async def _receive_part(
    stream: AcceptedStream, frames: FrameBuffer, buffer: memoryview, incoming: IncomingValue
) -> FrameHeader:
    header, body = await next_frame(stream, frames, buffer)
    if header.kind != DataKind.STORE_PART or header.flags & REPLY:
        raise ProtocolError(f"a frame of kind {header.kind} in the middle of a value")
    part = decode_body(StorePart, body)
    try:
        for chunk in incoming.part(part.offset, header.bulk_length):
            await receive_bulk(stream, frames, chunk)
    except ProtocolError as error:
        raise Refused(header.kind, header.request_id, Code.MALFORMED, str(error)) from error
    except ValueError as error:
        raise Refused(header.kind, header.request_id, Code.INVALID_ARGUMENT, str(error)) from error
    if bool(header.flags & ONE_WAY) is incoming.complete:
        raise ProtocolError("the last part of a value, and only that one, is to be answered")
    return header


class IncomingValue:
    """Fills `view` from front to end. `sums` are the chunk sums that were announced, packed u64.

    Raises `ProtocolError` when there is not one sum per chunk.
    """

    def __init__(self, view: memoryview, sums: bytes) -> None:
        if len(sums) != 8 * chunk_count(len(view)):
            raise ProtocolError(f"{len(sums)} bytes of chunk sums for {len(view):,} bytes")
        self._view = view
        self._sums = memoryview(sums).cast("Q")
        self._position = 0

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and is right."""
        return self._position == len(self._view)

    def part(self, offset: int, length_bytes: int) -> Iterator[memoryview]:
        """Where the bytes of the next part go, chunk by chunk: fill each before the next is asked for.

        Raises `ProtocolError`, before the first, for a part that does not begin where the one before
        ended, is empty, goes beyond the value or ends within a chunk; `ValueError` for a chunk that is
        not the one announced.
        """
        end = offset + length_bytes
        if offset != self._position or end > len(self._view):
            raise ProtocolError(
                f"a part from byte {offset:,} to {end:,} of a value of {len(self._view):,} bytes, of "
                f"which {self._position:,} have arrived"
            )
        if (end % CHUNK_BYTES or not length_bytes) and end != len(self._view):
            raise ProtocolError("a part that ends within a chunk")
        return self._fill(end)

    def _fill(self, end: int) -> Iterator[memoryview]:
        while self._position < end:
            number = self._position // CHUNK_BYTES
            chunk = self._view[self._position : self._position + CHUNK_BYTES]
            yield chunk
            if chunk_sum(chunk) != self._sums[number]:
                raise ValueError(
                    f"chunk {number} is not the one that was announced: the value was changed while "
                    "it was being stored, or spoilt on its way"
                )
            self._position += len(chunk)
