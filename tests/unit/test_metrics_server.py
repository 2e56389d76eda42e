"""The HTTP server beside a peer: what it says, and whom it does not wait for."""

import socket
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from random import Random

import pytest
import trio
import trio.testing

from p2pstore.status.http_server import (
    IDLE_SECONDS,
    MAX_BODY_BYTES,
    MAX_HOST_CONNECTIONS,
    MAX_REQUEST_BYTES,
    REQUEST_SECONDS,
    Answer,
    Pages,
    Site,
    open_http_listeners,
    serve_http,
    serve_requests,
    text_answer,
)

PAGES: Pages = {
    "/": lambda: Answer(HTTPStatus.OK, "text/html", b"<p>", (("X-Said", "so"),)),
    "/livez": lambda: text_answer(HTTPStatus.OK, "alive"),
}
SITE = Site(PAGES, {"/echo": lambda body: Answer(HTTPStatus.OK, "text/plain", body)}, "")


async def answer_to(request: bytes) -> bytes:
    """All that comes back."""
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(request)
    await ours.send_eof()
    await serve_requests(SITE, theirs)
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
        (b"PUT / HTTP/1.1", b"405"),
        (b"POST / HTTP/1.1", b"404"),
        (b"\xff\xfe\0 / x", b"405"),
    ],
)
async def test_an_unknown_page_is_refused(request_line: bytes, status: bytes) -> None:
    answer = await answer_to(request_line + b"\r\n\r\n")
    assert answer.split(b" ")[1] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((b"localhost:9946", 200), (b"LOCALHOST", 200), (b"a.localhost:1", 200)),
        *((b"127.0.0.1:9946", 200), (b"[::1]:9946", 200), (b"10.1.2.3", 200), (b"", 421)),
        (socket.gethostname().encode() + b":9946", 200),
        *((b"evil.example:9946", 421), (b"localhost.evil.example", 421), (b"127.0.0.1.nip.io", 421)),
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

    listeners = await open_http_listeners("127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, listeners, SITE)
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
        nursery.start_soon(serve_requests, SITE, theirs)
        for byte in b"GET /livez HTTP/1.1\r\n\r\n":
            await ours.send_all(bytes([byte]))
            await trio.sleep(REQUEST_SECONDS / 50)
    assert (await ours.receive_some()).endswith(b"alive\n")


async def test_an_endless_request_is_not_answered() -> None:
    with trio.fail_after(REQUEST_SECONDS - 1):
        assert await answer_to(b"GET /" + b"a" * MAX_REQUEST_BYTES) == b""


async def test_a_client_that_does_not_ask_or_read_is_cut(autojump_clock: trio.abc.Clock) -> None:
    silent, _ = trio.testing.memory_stream_pair()
    began = trio.current_time()
    await serve_requests(SITE, silent)
    assert trio.current_time() - began == pytest.approx(REQUEST_SECONDS)

    # A lockstep stream takes no bytes before the other side reads.
    slow, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow.send_all, b"GET / HTTP/1.1\r\n\r\n")
        began = trio.current_time()
        await serve_requests(SITE, theirs)
    assert trio.current_time() - began == pytest.approx(REQUEST_SECONDS)


async def test_a_crowd_from_one_host_keeps_no_other_host_out() -> None:
    """Each of these hosts opens as many connections as there may be of one, and says nothing."""
    listeners = await open_http_listeners("127.0.0.1:0")
    address = listeners[0].socket.getsockname()[:2]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, listeners, SITE)
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


def query(body: bytes, *headers: str, path: str = "/echo", length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


def statuses(answers: bytes) -> list[int]:
    return [int(each.split(b" ")[0]) for each in answers.split(b"HTTP/1.1 ")[1:]]


async def loopback_answers(request: bytes, site: Site = SITE) -> bytes:
    """All that a client of this machine gets."""
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(request)
    await ours.send_eof()
    await serve_requests(site, theirs, at_loopback=True)
    await theirs.aclose()
    return b"".join([part async for part in ours])


async def test_many_queries_on_one_connection() -> None:
    answers = await loopback_answers(query(b"one") + query(b"") + query(b"three"))
    assert statuses(answers) == [200, 200, 200]
    assert answers.endswith(b"\r\n\r\nthree")
    assert answers.count(b"keep-alive") == 3
    last = await loopback_answers(query(b"one", "Connection: close") + query(b"two"))
    assert statuses(last) == [200]
    assert last.endswith(b"one")
    page_ends_it = await loopback_answers(query(b"one") + b"GET /livez HTTP/1.1\r\n\r\n" * 2)
    assert statuses(page_ends_it) == [200, 200]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (query(b"", path="/unknown"), 404),
        (query(b"", "Host: evil.example"), 421),
        (query(b"", "Transfer-Encoding: chunked"), 411),
        (b"POST /echo HTTP/1.1\r\n\r\n", 411),
        (query(b"", length=MAX_BODY_BYTES + 1), 413),
        (query(b"", "Content-Length: 0"), 400),
        (query(b"").replace(b": 0", b": -1"), 400),
        (query(b"").replace(b": 0", b": 9" + b"9" * 30), 413),
    ],
)
async def test_a_wrong_query_is_refused(request_bytes: bytes, status: int) -> None:
    answers = await loopback_answers(request_bytes)
    assert statuses(answers) == [status]
    assert b"Connection: close" in answers


async def test_queries_from_afar_need_the_token() -> None:
    assert statuses(await answer_to(query(b""))) == [403]
    guarded = SITE._replace(token="a secret of routers")
    for headers, status in [
        ([], 401),
        (["Authorization: Bearer a secret of router"], 401),
        (["Authorization: Basic a secret of routers"], 401),
        (["Authorization: Bearer \xff"], 401),
        (["authorization: bearer a secret of routers"], 200),
    ]:
        assert statuses(await loopback_answers(query(b"", *headers), guarded)) == [status]


async def test_a_client_that_waits_to_send_a_body_is_told_to() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_requests, SITE, theirs, at_loopback=True))
        head, _, body = query(b"body", "Expect: 100-continue").partition(b"body")
        await ours.send_all(head)
        assert await ours.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await ours.send_all(b"body" + body)
        assert (await ours.receive_some()).endswith(b"body")
        await ours.aclose()


async def test_a_slow_body_is_cut_and_an_idle_connection_later(autojump_clock: trio.abc.Clock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(query(b"b", length=2))
    began = trio.current_time()
    await serve_requests(SITE, theirs, at_loopback=True)
    assert trio.current_time() - began == pytest.approx(REQUEST_SECONDS)
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(query(b"b"))
    began = trio.current_time()
    await serve_requests(SITE, theirs, at_loopback=True)
    assert trio.current_time() - began == pytest.approx(IDLE_SECONDS)
