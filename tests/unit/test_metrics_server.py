"""The HTTP server beside a peer: what it says, and whom it does not wait for."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from http import HTTPStatus
from random import Random

import pytest
import trio
import trio.testing

from p2pstore.status.http_server import (
    MAX_HOST_CONNECTIONS,
    MAX_REQUEST_BYTES,
    REQUEST_SECONDS,
    Answer,
    Pages,
    open_metrics_listeners,
    serve_metrics,
    serve_request,
    text_answer,
)

PAGES: Pages = {
    "/": lambda: Answer(HTTPStatus.OK, "text/html", b"<p>", (("X-Said", "so"),)),
    "/livez": lambda: text_answer(HTTPStatus.OK, "alive"),
}


async def answer_to(request: bytes) -> bytes:
    """All that comes back."""
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(request)
    await ours.send_eof()
    await serve_request(PAGES, theirs)
    await theirs.aclose()
    return b"".join([part async for part in ours])


async def test_an_answer_has_its_own_headers_and_those_of_all() -> None:
    head, _, body = (await answer_to(b"GET / HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert {b"X-Said: so", b"X-Content-Type-Options: nosniff", b"Content-Length: 3"} < set(lines)
    assert body == b"<p>"
    assert (await answer_to(b"HEAD / HTTP/1.1\r\n\r\n")).endswith(b"close\r\n\r\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /livez?x=/ HTTP/1.0", b"200"),
        (b"GET /../livez HTTP/1.1", b"404"),
        (b"GET", b"404"),
        (b"", b"405"),
        (b"POST / HTTP/1.1", b"405"),
        (b"\xff\xfe\0 / x", b"405"),
    ],
)
async def test_what_is_no_page_is_refused(request_line: bytes, status: bytes) -> None:
    answer = await answer_to(request_line + b"\r\n\r\n")
    assert answer.split(b" ")[1] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((b"localhost:9946", 200), (b"LOCALHOST", 200), (b"a.localhost:1", 200)),
        *((b"127.0.0.1:9946", 200), (b"[::1]:9946", 200), (b"10.1.2.3", 200), (b"", 421)),
        (socket.gethostname().encode() + b":9946", 200),
        *(
            (b"evil.example:9946", 421),
            (b"localhost.evil.example", 421),
            (b"127.0.0.1.nip.io", 421),
        ),
        *((b"localhost\r\nHost: evil.example", 421), (b"xlocalhost", 421)),
    ],
)
async def test_at_a_loopback_address_no_site_is_asked_for(host: bytes, status: int) -> None:
    """Its name may lead here (DNS rebinding)."""

    async def status_of(path: bytes, address: tuple[str, int]) -> int:
        async with await trio.open_tcp_stream(*address) as ask:
            await ask.send_all(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, host))
            answer = b"".join([part async for part in ask])
        return int(answer.split(b" ")[1])

    listeners = await open_metrics_listeners("127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_metrics, listeners, PAGES)
        address = listeners[0].socket.getsockname()[:2]
        assert await status_of(b"/", address) == status
        assert await status_of(b"/livez", address) == 200
        nursery.cancel_scope.cancel()
    head = b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host
    assert (await answer_to(head)).startswith(b"HTTP/1.1 200")  # at other addresses


async def test_garbage_of_all_kinds_is_refused_and_not_an_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = Random(8)
    whole = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    for _ in range(300):
        request = bytearray(whole)
        for _ in range(rng.randrange(1, 9)):
            place = rng.randrange(len(request))
            request[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        answer = await answer_to(bytes(request))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert caplog.text == ""


async def test_a_request_may_come_in_pieces(autojump_clock: trio.abc.Clock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_request, PAGES, theirs)
        for byte in b"GET /livez HTTP/1.1\r\n\r\n":
            await ours.send_all(bytes([byte]))
            await trio.sleep(REQUEST_SECONDS / 50)
    assert (await ours.receive_some()).endswith(b"alive\n")


async def test_an_endless_request_is_not_answered() -> None:
    with trio.fail_after(REQUEST_SECONDS - 1):
        assert await answer_to(b"GET /" + b"a" * MAX_REQUEST_BYTES) == b""


async def test_who_does_not_ask_or_does_not_read_is_cut(autojump_clock: trio.abc.Clock) -> None:
    silent, _ = trio.testing.memory_stream_pair()
    began = trio.current_time()
    await serve_request(PAGES, silent)
    assert trio.current_time() - began == pytest.approx(REQUEST_SECONDS)

    # A lockstep stream takes nothing before somebody reads it.
    slow, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow.send_all, b"GET / HTTP/1.1\r\n\r\n")
        began = trio.current_time()
        await serve_request(PAGES, theirs)
    assert trio.current_time() - began == pytest.approx(REQUEST_SECONDS)


async def test_a_crowd_from_one_host_keeps_nobody_else_out() -> None:
    """Each of these hosts opens as many connections as there may be of one, and says nothing."""
    listeners = await open_metrics_listeners("127.0.0.1:0")
    address = listeners[0].socket.getsockname()[:2]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_metrics, listeners, PAGES)
        with ExitStack() as stack:

            def crowd_from(host: str) -> None:
                for _ in range(MAX_HOST_CONNECTIONS):
                    source = (host, 0)
                    opened = socket.create_connection(address, timeout=5, source_address=source)
                    stack.enter_context(opened)

            with trio.fail_after(REQUEST_SECONDS - 1):
                crowd_from("127.0.0.2")
                async with await trio.open_tcp_stream(*address, local_address="127.0.0.2") as more:
                    assert await more.receive_some() == b""  # refused: its host has enough
                crowd_from("127.0.0.3")
                async with await trio.open_tcp_stream(*address, local_address="127.0.0.4") as ask:
                    await ask.send_all(b"GET /livez HTTP/1.1\r\n\r\n")
                    answer = b"".join([part async for part in ask])
            assert answer.endswith(b"alive\n")
        nursery.cancel_scope.cancel()
