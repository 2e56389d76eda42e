"""Sending much in a thread: whole, with a deadline, and gone when it is cancelled or closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from p2pstore.errors import DeadlineExceeded
from p2pstore.streams import BytesLike
from p2pstore.trio_streams import TrioStream

MUCH = 64 * 1024 * 1024
"""More than the buffers of two sockets take."""


@contextmanager
def connection(progress_seconds: float = 30.0) -> Iterator[tuple[TrioStream, socket.socket]]:
    """A stream, and the other end of its connection as a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    stream = TrioStream(near, progress_seconds)
    with far:
        try:
            yield stream, far
        finally:
            stream.close()


def receive_all(sock: socket.socket) -> bytes:
    received = bytearray()
    while data := sock.recv(1 << 20):
        received += data
    return bytes(received)


async def sending_thread() -> threading.Thread:
    """Wait until a thread waits for the other side to receive."""
    with trio.fail_after(10):
        while True:
            for thread in threading.enumerate():
                if "send_all" in thread.name:
                    return thread
            await trio.sleep(0.001)


async def test_all_parts_arrive_in_order() -> None:
    parts: list[BytesLike] = [b"head", b"", bytes(range(256)) * (MUCH // 256), memoryview(b"tail")]
    with connection() as (stream, far):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await stream.send_in_thread(*parts)
                stream.close()

            nursery.start_soon(send)
            received = await trio.to_thread.run_sync(receive_all, far)
    assert received == b"".join(parts)


async def test_who_does_not_receive_is_given_up() -> None:
    with (
        connection(progress_seconds=0.05) as (stream, _),
        pytest.raises(DeadlineExceeded, match="no progress"),
    ):
        await stream.send_in_thread(bytes(MUCH))


async def test_a_cancellation_ends_the_thread_and_the_connection() -> None:
    with connection() as (stream, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_in_thread, bytes(MUCH))
            await sending_thread()
            nursery.cancel_scope.cancel()  # leaves the nursery only when the thread has ended
        received = await trio.to_thread.run_sync(receive_all, far)
    assert 0 < len(received) < MUCH


async def test_closing_ends_the_thread() -> None:
    with connection() as (stream, _):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
                    await stream.send_in_thread(bytes(MUCH))

            nursery.start_soon(send)
            await sending_thread()
            stream.close()


async def test_nothing_is_begun_when_cancelled_before() -> None:
    with connection() as (stream, _), trio.CancelScope() as scope:
        scope.cancel()
        await stream.send_in_thread(b"some")
    assert scope.cancelled_caught


async def test_the_other_side_goes_away() -> None:
    with connection() as (stream, far):
        far.close()
        with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
            await stream.send_in_thread(bytes(MUCH))
