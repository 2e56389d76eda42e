"""Received bytes before they have a place. Over any `ByteStream`."""

from __future__ import annotations

from typing import Final

from p2pstore.objects import KIB
from p2pstore.streams import ByteStream

INBOX_BYTES: Final = 128 * KIB


class Inbox:
    """Received bytes before they have a place: headers, bodies and small payloads that came with them.

    One receive brings a small reply whole. Large payloads bypass it.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(INBOX_BYTES))
        self._start = 0
        self._end = 0
        self.received_any = False

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `ConnectionResetError` when the other side closes before."""
        position = self._take(view)
        while position < len(view):
            if len(view) >= INBOX_BYTES:
                position += self._count(await self._stream.receive_into(view[position:]))
            else:
                self._start = 0
                self._end = 0
                self._end = self._count(await self._stream.receive_into(self._buffer))
                position += self._take(view[position:])

    async def wait_for_more(self) -> None:
        """Return when something is here that nobody has read yet. Raises as `read_into`."""
        if self._start == self._end:
            self._start = self._end = 0
            self._end = self._count(await self._stream.receive_into(self._buffer))

    async def read(self, length: int) -> bytearray:
        """The next `length` bytes, in memory of their own."""
        if length <= self._end - self._start:
            self._start += length
            return bytearray(self._buffer[self._start - length : self._start])
        data = bytearray(length)
        await self.read_into(memoryview(data))
        return data

    async def discard(self, length: int) -> None:
        """Read `length` bytes and forget them."""
        scratch = memoryview(bytearray(min(length, INBOX_BYTES)))
        while length:
            count = min(length, len(scratch))
            await self.read_into(scratch[:count])
            length -= count

    def _take(self, view: memoryview) -> int:
        count = min(len(view), self._end - self._start)
        if count:  # at most 128 KiB: too little to matter that this holds the GIL
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
        return count

    def _count(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        self.received_any = True
        return count
