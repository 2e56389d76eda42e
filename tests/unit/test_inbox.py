"""Received bytes before they have a place."""

from __future__ import annotations

from typing import cast

import pytest

from p2pstore.objects import chunk_sum
from p2pstore.runtime.blocking_streams import run_blocking
from p2pstore.runtime.streams import ByteStream
from p2pstore.transfer.reading.data_requests import HEAD_BYTES, INBOX_BYTES, SUMMED_BYTES, Inbox


class Scripted:
    """Delivers `data` in receives of at most `piece` bytes."""

    progress_seconds = 1.0
    receive_seconds: float | None = None

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece = data, piece
        self.asked: list[int] = []
        self.asked_soon = 0

    async def receive_into(self, view: memoryview) -> int:
        self.asked.append(len(view))
        count = min(self.piece, len(view), len(self.data))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count

    async def receive_soon(self, view: memoryview) -> int:
        self.asked_soon += 1
        return await self.receive_into(view)


def inbox_of(data: bytes, piece: int) -> tuple[Inbox, Scripted]:
    stream = Scripted(data, piece)
    return Inbox(stream), stream  # type: ignore[arg-type]  # it only receives


DATA = bytes(number * 7 % 251 for number in range(3 * INBOX_BYTES))


@pytest.mark.parametrize("piece", [1000, 40_000, INBOX_BYTES, 10 * INBOX_BYTES])
def test_pieces_of_any_length_come_in_order(piece: int) -> None:
    inbox, _ = inbox_of(DATA, piece)
    lengths = [16, 0, 300, 4096, 65_536, INBOX_BYTES - 5, 1, INBOX_BYTES + 1, 4096]
    position = 0
    for length in lengths:
        assert run_blocking(inbox.take(length)) == DATA[position : position + length]
        position += length
    room = memoryview(bytearray(len(DATA) - position))
    run_blocking(inbox.read_into(room))
    assert room == DATA[position:]
    with pytest.raises(ConnectionResetError):
        run_blocking(inbox.take(1))


@pytest.mark.parametrize("piece", [1000, 40_000, INBOX_BYTES, 10 * INBOX_BYTES])
@pytest.mark.parametrize("already", [0, 5000])
@pytest.mark.parametrize("soon", [False, True])
def test_a_large_payload_is_summed_as_it_comes(piece: int, already: int, soon: bool) -> None:
    inbox, stream = inbox_of(DATA, piece)
    head = bytes(run_blocking(inbox.take(already))) if already else b""
    receives = len(stream.asked)
    room = memoryview(bytearray(len(DATA) - already))
    assert run_blocking(inbox.read_summed(room, soon=soon)) == chunk_sum(DATA[already:])
    assert head + room == DATA
    assert stream.asked_soon == (len(stream.asked) - receives if soon else 0)
    assert max(stream.asked[receives:]) <= SUMMED_BYTES, "it is summed while it is in the cache"
    with pytest.raises(ConnectionResetError):
        run_blocking(inbox.read_summed(memoryview(bytearray(INBOX_BYTES))))


def test_what_is_here_needs_no_wait() -> None:
    inbox, stream = inbox_of(DATA, 5000)
    assert inbox.held(1) is None
    assert bytes(run_blocking(inbox.take(4000))) == DATA[:4000]
    assert inbox.held(1001) is None
    assert bytes(inbox.held(1000) or b"") == DATA[4000:5000]
    assert len(stream.asked) == 1


def test_a_head_brings_little_of_a_large_payload() -> None:
    inbox, stream = inbox_of(DATA, len(DATA))
    inbox.expect(INBOX_BYTES)
    assert run_blocking(inbox.take(16)) == DATA[:16]
    room = memoryview(bytearray(2 * INBOX_BYTES))
    run_blocking(inbox.read_into(room))
    assert room == DATA[16 : 16 + len(room)]
    assert stream.asked == [HEAD_BYTES, len(room) - HEAD_BYTES + 16]


class Link:
    """Brings this number of bytes at a time, but never fewer than are waited for: with less, it would wait forever."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data = data
        self.most = most
        self.low_water = 1
        self.receives = 0

    async def receive_into(self, view: memoryview) -> int:
        assert self.low_water <= len(self.data), "it waits for more than there will be"
        count = min(len(view), len(self.data), max(self.low_water, self.most))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        self.receives += 1
        return count

    def wake_after(self, length_bytes: int) -> None:
        self.low_water = length_bytes


@pytest.mark.parametrize("most", [1, 7_000, 131_073, 1 << 20])
@pytest.mark.parametrize("size", [1, 4096, 131_072, 524_288, 524_289])
def test_steps(most: int, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    link = Link(data[:size], most)
    inbox = Inbox(cast("ByteStream", link))
    view = memoryview(bytearray(size))
    run_blocking(inbox.read_in_steps(view, 131_072, link.wake_after))
    assert view == data[:size]
    assert link.low_water == 1, "what comes next may be short"
    assert link.receives <= size // 131_072 + 1
