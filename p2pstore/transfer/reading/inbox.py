"""Received bytes before they have a place, and whether they come fast enough. Over any `ByteStream`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from xxhash import xxh3_64

from p2pstore.objects import KIB
from p2pstore.runtime.flow import Flow
from p2pstore.runtime.streams import MAX_GATHER, ByteStream, advance

INBOX_BYTES: Final = 128 * KIB
HEAD_BYTES: Final = 4 * KIB
"""What is received at once before a large payload: a reply's head with few of the bytes that belong elsewhere."""
SUMMED_BYTES: Final = 256 * KIB
"""What is received at most before it is summed: of more, the beginning would not be in the core's own cache any more,
through which each byte passes twice, in the kernel's memory and in the destination."""


class Inbox:
    """Received bytes before they have a place: headers, bodies and small payloads that came with them.

    One receive brings a small reply whole. Large payloads bypass it. All that is received counts in `flow`, which the
    owner begins anew with each exchange; every method that receives raises `DeadlineExceeded` when it is too slow.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(INBOX_BYTES))
        self._start = 0
        self._end = 0
        self._ahead_bytes = INBOX_BYTES
        self.received_any = False
        self.flow = Flow()
        self._receive_all = getattr(stream, "receive_all", None)

    def expect(self, payload_bytes: int) -> None:
        """So many bytes will come that are read by `read_into`: few of them should come with a head."""
        self._ahead_bytes = HEAD_BYTES if payload_bytes >= INBOX_BYTES else INBOX_BYTES

    def expect_head(self, head_bytes: int, payload_bytes: int) -> None:
        """What comes next has a head of so many bytes, and then payloads of up to `payload_bytes` each, that are read
        by `fill` and `read_summed`."""
        in_place = self._receive_all is not None or payload_bytes >= INBOX_BYTES
        self._ahead_bytes = head_bytes if in_place else INBOX_BYTES

    async def fill(self, views: Sequence[memoryview], length_bytes: int) -> None:
        """Fill many views, none empty and so many bytes in all, one after the other. Raises as `read_into`."""
        first = 0
        if self._receive_all is None:
            for view in views:
                await self.read_into(view)
            return
        while self._start < self._end and first < len(views):
            count = self._move_into(views[first])
            length_bytes -= count
            if count < len(views[first]):
                views = [views[first][count:], *views[first + 1 :]]
                first = 0
                break
            first += 1
        left = list(views[first:])
        while length_bytes:
            began = time.monotonic()
            count = self._count(await self._receive_all(left[:MAX_GATHER]), began)
            length_bytes -= count
            left = left[advance(left, 0, count) :]

    def held(self, length: int) -> memoryview | None:
        """The next `length` bytes in place, until the next call, if they are here already."""
        start, end = self._start, self._start + length
        if end > self._end:
            return None
        self._start = end
        return self._buffer[start:end]

    def put_back(self, length: int) -> None:
        """What `held` or `take` gave in place just now comes again."""
        self._start -= length

    async def take(self, length: int, *, soon: bool = False) -> memoryview:
        """The next `length` bytes: in place, until the next call, unless they are too many for that. `soon`: they
        should be here within microseconds. Raises as `read_into`."""
        if length > INBOX_BYTES:
            return memoryview(await self.read(length))
        while (view := self.held(length)) is None:
            await self._receive(length, soon=soon)
        return view

    async def read_into(self, view: memoryview, *, soon: bool = False) -> None:
        """Fill `view`; `soon`: from what should be here within microseconds. Raises `ConnectionResetError` when the
        other side closes before."""
        position = self._move_into(view)
        while position < len(view):
            if len(view) >= INBOX_BYTES:
                receive = self._stream.receive_soon if soon else self._stream.receive_into
                began = time.monotonic()
                position += self._count(await receive(view[position:]), began)
            else:
                await self._receive(1, soon=soon)
                position += self._move_into(view[position:])

    async def read_summed(self, view: memoryview, *, soon: bool = False) -> int:
        """`read_into` a large view; the xxh3-64 of what comes, made of each piece while it is in the cache."""
        hasher = xxh3_64()
        position = self._move_into(view)
        hasher.update(view[:position])
        receive = self._stream.receive_soon if soon else self._stream.receive_into
        while position < len(view):
            began = time.monotonic()
            count = self._count(await receive(view[position : position + SUMMED_BYTES]), began)
            hasher.update(view[position : position + count])
            position += count
        digest: int = hasher.intdigest()
        return digest

    async def read_in_steps(
        self, view: memoryview, step_bytes: int, wake_after: Callable[[int], None]
    ) -> None:
        """`read_into` a large view, woken when `step_bytes` more have come, or the rest; `wake_after` sees to it."""
        position = self._move_into(view)
        step = 1
        while position < len(view):
            wanted = min(step_bytes, len(view) - position)
            if wanted != step:
                step = wanted
                wake_after(step)
            began = time.monotonic()
            position += self._count(await self._stream.receive_into(view[position:]), began)
        if step != 1:
            wake_after(1)

    async def read(self, length: int) -> bytearray:
        """The next `length` bytes, in memory of their own."""
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

    def take_rest(self) -> bytes:
        """All that was received and nobody has read: for who reads the stream itself from now on."""
        rest = bytes(self._buffer[self._start : self._end])
        self._start = self._end = 0
        return rest

    async def _receive(self, wanted_bytes: int, *, soon: bool = False) -> None:
        """Receive more, with room for `wanted_bytes` after what nobody has read yet begins."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + wanted_bytes > INBOX_BYTES:
            held = self._end - self._start
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        limit = max(self._start + wanted_bytes, self._end + self._ahead_bytes)
        room = self._buffer[self._end : limit]
        receive = self._stream.receive_soon if soon else self._stream.receive_into
        began = time.monotonic()
        self._end += self._count(await receive(room), began)

    def _move_into(self, view: memoryview) -> int:
        count = min(len(view), self._end - self._start)
        if count:  # at most 128 KiB: too little to matter that this holds the GIL
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
        return count

    def _count(self, count: int, began: float) -> int:
        """What a receive brought that began then."""
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        self.received_any = True
        if not self.flow.moved(count, time.monotonic() - began):
            raise self.flow.too_slow()
        return count
