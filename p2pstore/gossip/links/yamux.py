"""The yamux protocol: several streams over one connection, each with a window that bounds what is unread. Pure.

The format is hashicorp's (github.com/hashicorp/yamux/blob/master/spec.md), as libp2p speaks it. This is not
libp2p's implementation because that one collects frames of up to 16 MiB whatever the window says, takes a
dozen scheduler turns for a message, wakes every idle connection twice a minute, polls while a window
is full, and does not tell a farewell from a loss. Here a byte beyond a window ends the connection, before it is kept.

`Session.feed` takes what arrived; afterwards the shell looks at `opened`, `changed`, `replies` and
`said_goodbye`. A stream stays in the table until this side closes it, whatever the other side does.
"""

from __future__ import annotations

import struct
from typing import Final

from p2pstore.errors import ProtocolError

PROTOCOL: Final = "/yamux/1.0.0"
INITIAL_WINDOW_BYTES: Final = 256 * 1024
MAX_PAYLOAD_BYTES: Final = 60 * 1024
"""Of the frames sent: with its header one fits in a message of the encryption."""

_HEADER: Final = struct.Struct("!BBHII")
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_MAX_SEND_WINDOW_BYTES: Final = 1 << 32

GOODBYE: Final = _HEADER.pack(0, _GO_AWAY, 0, 0, 0)
"""Sent by the side that closes a connection without further use."""


class StreamState:
    """One stream as both sides see it. `ended` says why nothing more will come, once that is so."""

    __slots__ = (
        "_buffer",
        "_receive_window",
        "_released",
        "_window",
        "ended",
        "number",
        "reset",
        "send_window",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended: str | None = None
        self.reset = False
        """Whether nothing may be written any more either."""
        self.send_window = INITIAL_WINDOW_BYTES
        self._buffer = bytearray()
        self._window = INITIAL_WINDOW_BYTES
        self._receive_window = INITIAL_WINDOW_BYTES
        self._released = 0

    def take(self, max_bytes: int | None = None) -> bytes:
        """The bytes that have arrived, at most `limit`; b"" when there are none now."""
        if max_bytes is None or max_bytes >= len(self._buffer):
            data = bytes(self._buffer)
            self._buffer.clear()
        else:
            data = bytes(self._buffer[:max_bytes])
            del self._buffer[:max_bytes]
        self._released += len(data)
        return data

    def window_update(self) -> bytes:
        """The frame that gives the other side back what was taken; b"" while that is less than half a window."""
        if self._released < self._window // 2 or self.ended is not None:
            return b""
        return self._release(self._released)

    def widen(self, window_bytes: int) -> bytes:
        """The frame that lets the other side send this much ahead from now on."""
        more = max(0, window_bytes - self._window)
        self._window += more
        return self._release(self._released + more)

    def _release(self, count: int) -> bytes:
        self._released = 0
        self._receive_window += count
        return _HEADER.pack(0, _WINDOW_UPDATE, 0, self.number, count)

    def data_frame(self, data: memoryview) -> bytes:
        """The next frame of `data`: as much as the other side's window and a frame take; b"" when that is none."""
        count = min(self.send_window, MAX_PAYLOAD_BYTES, len(data))
        if count == 0:
            return b""
        self.send_window -= count
        return _HEADER.pack(0, _DATA, 0, self.number, count) + data[:count]

    def expect(self, count: int) -> None:
        """A frame of `count` bytes begins. Raises `ProtocolError` when it is not allowed: an empty one always is,
        since some say with such a one that a stream is over which they ended before."""
        if self.ended is not None and count:
            raise ProtocolError(f"stream {self.number} goes on after its end")
        if count > self._receive_window:
            raise ProtocolError(f"stream {self.number} sends more than its window")
        self._receive_window -= count

    def put(self, data: bytes) -> None:
        """Bytes of a frame that was expected."""
        self._buffer += data

    def drop(self) -> int:
        """The bytes that have arrived are taken no more: their number."""
        count = len(self._buffer)
        self._buffer.clear()
        return count

    def finish(self) -> None:
        self.ended = self.ended or "the other side closed it"

    def abort(self) -> None:
        """The other side ended the stream in both directions."""
        self.ended, self.reset = self.ended or "the other side reset it", True


class Session:
    """One connection's streams. The side that dialled is the `initiator`."""

    def __init__(self, *, initiator: bool, max_incoming: int) -> None:
        self.streams: dict[int, StreamState] = {}
        self.opened: list[StreamState] = []
        """Streams that the other side opened since the shell last cleared this."""
        self.changed: set[int] = set()
        """Streams on which anything happened, likewise."""
        self.replies = bytearray()
        """Frames to send, likewise."""
        self.said_goodbye = False
        self.unread_bytes = 0
        """On all streams; a reader that takes some says so here."""
        self._own_parity = int(initiator)
        self._max_incoming = max_incoming
        self._next_number = 1 if initiator else 2
        self._rest = b""
        """The beginning of a header."""
        self._filled: StreamState | None = None
        self._missing = 0
        """How many bytes of a data frame are still to come; `_filled` None: to be skipped."""
        self._is_last = False
        """Whether that frame is its stream's last one."""

    def open(self) -> tuple[StreamState, bytes]:
        """A new stream, and the frame that opens it."""
        state = StreamState(self._next_number)
        self._next_number += 2
        self.streams[state.number] = state
        return state, _HEADER.pack(0, _WINDOW_UPDATE, _SYN, state.number, 0)

    def close(self, state: StreamState) -> bytes:
        """End a stream in both directions and forget it; the frame that says so, b"" when the other side did."""
        if self.streams.get(state.number) is not state:
            return b""  # closed before; its number may be another stream's by now
        del self.streams[state.number]
        self.unread_bytes -= state.drop()
        if state.reset:
            return b""
        state.ended, state.reset = "this side closed it", True
        return _HEADER.pack(0, _WINDOW_UPDATE, _RST, state.number, 0)

    def feed(self, data: bytes) -> None:
        """Take in what arrived. Raises `ProtocolError`; then the connection must end."""
        position = 0
        if self._missing:
            position = self._fill(data, 0)
        elif self._rest:
            data, self._rest = self._rest + data, b""
        size, end = _HEADER.size, len(data)
        while position < end:
            if end - position < size:
                self._rest = data[position:]
                return
            self._take_header(*_HEADER.unpack_from(data, position))
            position = self._fill(data, position + size)

    def _fill(self, data: bytes, position: int) -> int:
        """Give the frame that is under way what is there of it. Where the next thing begins."""
        count = min(self._missing, len(data) - position)
        if count:
            self._missing -= count
            if self._filled is not None and self.streams.get(self._filled.number) is self._filled:
                self._filled.put(data[position : position + count])
                self.unread_bytes += count
                self.changed.add(self._filled.number)
                if self._is_last and not self._missing:
                    self._filled.finish()
        return position + count

    def _take_header(self, version: int, kind: int, flags: int, number: int, length: int) -> None:
        if version != 0 or kind > _GO_AWAY:
            raise ProtocolError(f"a frame of version {version} and type {kind}")
        if kind == _PING:
            if flags & _SYN:
                self.replies += _HEADER.pack(0, _PING, _ACK, 0, length)
        elif kind == _GO_AWAY:
            self.said_goodbye = True
        else:
            self._take_stream_header(kind, flags, number, length)

    def _take_stream_header(self, kind: int, flags: int, number: int, length: int) -> None:
        if flags & _SYN:
            self._opened_by_other(number)
        state = self.streams.get(number)
        self._is_last = False
        if kind == _DATA:
            self._filled, self._missing = state, length
            if state is not None and not state.reset:
                state.expect(length)
            elif length > INITIAL_WINDOW_BYTES * 4:
                raise ProtocolError(f"a frame of {length:,} bytes for nobody")
            else:
                self._filled = None
        elif state is not None:
            state.send_window = min(state.send_window + length, _MAX_SEND_WINDOW_BYTES)
        if state is None:
            return
        self.changed.add(number)
        if flags & _RST:
            state.abort()
            self._filled = None
        elif flags & _FIN:
            if kind == _DATA and self._missing:
                self._is_last = True  # a reader meanwhile waits for the rest of it
            else:
                state.finish()

    def _opened_by_other(self, number: int) -> None:
        if number == 0 or number % 2 == self._own_parity or number in self.streams:
            raise ProtocolError(f"stream {number} is not the other side's to open")
        incoming = sum(each % 2 != self._own_parity for each in self.streams)
        if incoming >= self._max_incoming:
            self.replies += _HEADER.pack(0, _WINDOW_UPDATE, _RST, number, 0)
            return
        state = self.streams[number] = StreamState(number)
        self.opened.append(state)
        self.replies += _HEADER.pack(0, _WINDOW_UPDATE, _ACK, number, 0)
