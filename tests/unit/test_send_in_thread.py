"""A connection lent to a thread that sends much: whole, with a deadline, and gone when it is cancelled or closed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import trio

from p2pstore.errors import DeadlineExceeded
from p2pstore.runtime.streams import BytesLike, send_all, taking_no_core, waiting_in_kernel
from p2pstore.runtime.trio_streams import TrioStream

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


async def send_in_thread(stream: TrioStream, *parts: BytesLike) -> None:
    """Lend the connection to a thread that sends these."""

    def send_all_parts(sock: socket.socket) -> None:
        with waiting_in_kernel(sock, send_seconds=stream.progress_seconds):
            send_all(sock, parts, stream.progress_seconds)

    await stream.lend(send_all_parts)


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
                await send_in_thread(stream, *parts)
                stream.close()

            nursery.start_soon(send)
            received = await trio.to_thread.run_sync(receive_all, far)
    assert received == b"".join(parts)


async def test_who_does_not_receive_is_given_up() -> None:
    with (
        connection(progress_seconds=0.05) as (stream, _),
        pytest.raises(DeadlineExceeded, match="no progress"),
    ):
        await send_in_thread(stream, bytes(MUCH))


async def test_a_cancellation_ends_the_thread_and_the_connection() -> None:
    with connection() as (stream, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_in_thread, stream, bytes(MUCH))
            await sending_thread()
            nursery.cancel_scope.cancel()  # leaves the nursery only when the thread has ended
        received = await trio.to_thread.run_sync(receive_all, far)
    assert 0 < len(received) < MUCH


async def test_closing_ends_the_thread() -> None:
    with connection() as (stream, _):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
                    await send_in_thread(stream, bytes(MUCH))

            nursery.start_soon(send)
            await sending_thread()
            stream.close()


async def test_nothing_is_begun_when_cancelled_before() -> None:
    with connection() as (stream, _), trio.CancelScope() as scope:
        scope.cancel()
        await send_in_thread(stream, b"some")
    assert scope.cancelled_caught


async def test_the_other_side_goes_away() -> None:
    with connection() as (stream, far):
        far.close()
        with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
            await send_in_thread(stream, bytes(MUCH))


def in_a_thread(action: Callable[[], list[int]]) -> list[int]:
    """The policy is a thread's own: the one that runs the tests keeps its."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(action).result(30)


def policies() -> list[int]:
    """Before, within and after."""
    before = os.sched_getscheduler(0)
    with taking_no_core():
        within = os.sched_getscheduler(0)
    return [before, within, os.sched_getscheduler(0)]


def test_it_ends_with_what_it_is_for() -> None:
    assert in_a_thread(policies) == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


def test_it_ends_with_a_failure_as_well() -> None:
    def fails() -> list[int]:
        with pytest.raises(BrokenPipeError), taking_no_core():
            raise BrokenPipeError
        return [os.sched_getscheduler(0)]

    assert in_a_thread(fails) == [os.SCHED_OTHER]


def test_what_somebody_chose_stays() -> None:
    def chosen() -> list[int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return policies()

    assert in_a_thread(chosen) == [os.SCHED_IDLE] * 3


def test_where_it_is_forbidden_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert in_a_thread(policies) == [os.SCHED_OTHER] * 3
