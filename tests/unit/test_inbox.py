"""Received bytes before they have a place."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from p2pstore.streams import run_blocking
from p2pstore.transfer.inbox import GATHERED_BYTES, HEAD_BYTES, INBOX_BYTES, Inbox
from p2pstore.trio_streams import TrioStream


class Scripted:
    """Delivers `data` in receives of at most `piece` bytes."""

    progress_seconds = 1.0
    receive_seconds: float | None = None

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece = data, piece
        self.asked: list[int] = []

    async def receive_into(self, view: memoryview) -> int:
        self.asked.append(len(view))
        count = min(self.piece, len(view), len(self.data))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


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


def test_what_is_here_needs_no_wait() -> None:
    inbox, stream = inbox_of(DATA, 5000)
    assert inbox.held(1) is None
    run_blocking(inbox.wait_for_more())
    assert bytes(inbox.held(4000) or b"") == DATA[:4000]
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


class Patient(Scripted):
    """Can be waited for until much has arrived."""

    def __init__(self, data: bytes, piece: int) -> None:
        super().__init__(data, piece)
        self.woken_after: list[int] = []

    def wake_after(self, length_bytes: int) -> None:
        self.woken_after.append(length_bytes)

    async def send(self, *parts: object) -> None: ...
    async def send_whole(self, *parts: object) -> None: ...
    async def receive_descriptors(self, view: memoryview) -> tuple[int, list[int]]:
        return await self.receive_into(view), []

    def fileno(self) -> int:
        return -1

    def abort(self) -> None: ...
    def close(self) -> None: ...


def test_what_is_of_use_only_whole_wakes_its_reader_seldom() -> None:
    stream = Patient(DATA, INBOX_BYTES // 2)
    inbox = Inbox(stream)
    run_blocking(inbox.take(16))
    room = memoryview(bytearray(2 * INBOX_BYTES))
    run_blocking(inbox.gather_into(room))
    assert room == DATA[16 : 16 + len(room)]
    assert stream.woken_after[0] == GATHERED_BYTES
    assert stream.woken_after[-2] < GATHERED_BYTES, "no more than is still to come"
    assert stream.woken_after[-1] == 1, "who reads next gets what is there"


def test_where_streams_cannot_wait_for_much_it_comes_as_it_comes() -> None:
    inbox, _ = inbox_of(DATA, 1000)
    room = memoryview(bytearray(len(DATA)))
    run_blocking(inbox.gather_into(room))
    assert room == DATA


def test_a_side_that_closes_in_the_middle_is_noticed_however_much_is_waited_for() -> None:
    stream = Patient(DATA[:1000], 1000)
    inbox = Inbox(stream)
    with pytest.raises(ConnectionResetError):
        run_blocking(inbox.gather_into(memoryview(bytearray(INBOX_BYTES))))
    assert stream.woken_after[-1] == 1


async def test_a_trio_stream_wakes_its_reader_when_as_much_is_there_or_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with far:
        stream = TrioStream(near, progress_seconds=30.0)
        stream.wake_after(1000)
        came = []

        async def receive() -> None:
            while count := await stream.receive_into(memoryview(bytearray(4096))):
                came.append(count)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked(0.05)
            for _ in range(10):
                far.sendall(bytes(100))
                await trio.testing.wait_all_tasks_blocked(0.02)
            far.sendall(bytes(10))
            far.shutdown(socket.SHUT_WR)
        stream.close()
    assert came == [1000, 10]
