"""Taking in a value that is stored over a data connection. Under trio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import trio

from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.runtime.streams import AcceptedStream
from p2pstore.transfer.data_messages import DataKind, Store, Stored, StorePart
from p2pstore.transfer.frame_reading import Refused, next_frame, receive_bulk
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.serving.incoming_value import IncomingValue
from p2pstore.wire import ONE_WAY, REPLY, Code, FrameBuffer, FrameHeader, decode_body


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Room for a value: `payload` is where it goes, `sums` are its chunk sums. `handle` is the backend's
    own."""

    payload: memoryview
    sums: bytes
    handle: Any


class StoreBackend(Protocol):
    """Where values that others store here go. A `P2PStoreError` or `ValueError` is sent as a failure."""

    async def begin_store(self, request: Store, claims: TicketClaims) -> OpenedStore | Stored:
        """Make room for a value, or say what became of the put without its bytes.

        Every `OpenedStore` ends with `abandon_store`, whatever happens.
        """
        ...

    async def finish_store(self, opened: OpenedStore) -> Stored:
        """The value is there, and every chunk of it as announced: put it."""
        ...

    def abandon_store(self, opened: OpenedStore) -> None:
        """Nothing writes to `opened.payload` any more: give the room back, unless the put was finished."""
        ...


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
