"""Answers HTTP requests: pages for Prometheus, Kubernetes, browsers and curl, and queries of routers.

A page is one GET request, and its connection ends; queries are POST requests, many on one connection. A client that
sends garbage or nothing, or does not read its answer, costs a connection for some seconds. Connections are shared
fairly among hosts: a host that opens many keeps only itself out. Every client that reaches the port gets pages; at a
loopback address, pages of other sites do not (`is_own_name`). Queries are answered at a loopback address, and anywhere
with the token, where there is one.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Final, NamedTuple

import trio

from p2pstore.access.crowding import Strangers
from p2pstore.addresses import is_wildcard, join_address, split_address
from p2pstore.errors import ConfigError
from p2pstore.objects import MIB
from p2pstore.runtime.trio_streams import Accepting

logger = logging.getLogger("p2pstore.peer")

REQUEST_SECONDS: Final = 5.0
"""For a whole request and its answer."""
MAX_REQUEST_BYTES: Final = 8192
MAX_BODY_BYTES: Final = MIB
IDLE_SECONDS: Final = 60.0
"""Of a connection between two queries."""
MAX_CONNECTIONS: Final = 64
MAX_HOST_CONNECTIONS: Final = 32
"""Of one host: of these, too, the newest ones are refused."""
PROBES: Final = frozenset({"/livez", "/readyz"})
"""Answered under any name: they tell nothing confidential."""
TEXT: Final = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """An answer. `headers` come on top of the common ones."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Pages = dict[str, Callable[[], Answer | Awaitable[Answer]]]
Queries = dict[str, Callable[[bytes], Answer | Awaitable[Answer]]]
"""By path, what answers to a body."""


class Site(NamedTuple):
    """All that a server answers. `token`: what a query must show; empty: none, and queries come by loopback only."""

    pages: Pages
    queries: Queries
    token: str


class _Request(NamedTuple):
    method: str
    path: str
    version: str
    headers: dict[str, list[str]]

    @staticmethod
    def parse(head: bytes) -> _Request:
        line, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        target, _, version = rest.partition(" ")
        headers: dict[str, list[str]] = {}
        for each in lines:
            name, _, value = each.partition(":")
            headers.setdefault(name.strip().lower(), []).append(value.strip())
        return _Request(method, target.partition("?")[0], version, headers)

    def header(self, name: str) -> str:
        """The value of a header; empty where there is none."""
        return ", ".join(self.headers.get(name, []))

    @property
    def keeps_alive(self) -> bool:
        """Whether the client may send another request on this connection."""
        return self.version == "HTTP/1.1" and "close" not in self.header("connection").lower()


class _Refused(Exception):
    """A request that is answered with a line of text, and ends its connection."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.answer = text_answer(status, text)


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """A line of text."""
    return Answer(status, TEXT, f"{text}\n".encode())


async def open_http_listeners(address: str, setting: str = "metrics") -> list[trio.SocketListener]:
    """Listen at HOST:PORT. Raises `ConfigError` when that is not possible."""
    host, port = split_address(address, setting)
    try:
        listeners: list[trio.SocketListener] = await trio.open_tcp_listeners(
            port, host=None if is_wildcard(host) else host
        )
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen at {address}: {error.strerror or error}; choose another port, or 0 for any"
        ) from None
    return listeners


def address_of(listeners: Sequence[trio.SocketListener]) -> str:
    """HOST:PORT of the first listener."""
    host, port, *_ = listeners[0].socket.getsockname()
    return join_address(host, port)


async def serve_http(listeners: Sequence[trio.SocketListener], site: Site) -> None:
    """Until cancelled."""

    async def serve(stream: trio.SocketStream) -> None:
        await serve_requests(site, stream, at_loopback=_is_at_loopback(stream))

    guests: Strangers[trio.CancelScope] = Strangers(MAX_CONNECTIONS, MAX_HOST_CONNECTIONS)
    await serve_strangers(listeners, guests, serve, "readers of the status page", _turn_away)


async def serve_strangers(
    listeners: Sequence[trio.SocketListener],
    guests: Strangers[trio.CancelScope],
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    what: str,
    turn_away: Callable[[socket.socket, str], None] = lambda sock, reason: sock.close(),
) -> None:
    """Accept connections and serve each in a task, until cancelled. `what` connects, for people."""

    async def greet(sock: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        async with stream:
            try:
                host = str(stream.socket.getpeername()[0])
            except OSError:
                return  # the client has gone
            with trio.CancelScope() as scope:
                dropped = guests.arrive(host, scope)
                if dropped is not None:
                    dropped.cancel()
                try:
                    await serve(stream)
                finally:
                    guests.leave(scope)

    async def accept(listener: trio.SocketListener) -> None:
        async with listener:
            with (
                closing(Accepting(logger, what, turn_away)) as accepting,
                socket.socket(fileno=os.dup(listener.socket.fileno())) as waiting,
            ):
                waiting.setblocking(False)
                while True:
                    sock, _ = await accepting.accept(waiting)
                    nursery.start_soon(greet, sock)

    async with trio.open_nursery() as nursery:
        for each in listeners:
            nursery.start_soon(accept, each)


def _turn_away(sock: socket.socket, reason: str) -> None:
    answer = text_answer(HTTPStatus.SERVICE_UNAVAILABLE, reason)
    with sock, suppress(OSError):
        sock.setblocking(False)
        sock.send(_head(answer) + answer.body)


def _is_at_loopback(stream: trio.SocketStream) -> bool:
    address = ipaddress.ip_address(str(stream.socket.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


async def serve_requests(site: Site, stream: trio.abc.Stream, *, at_loopback: bool = False) -> None:
    """Read requests and answer them: one page, or queries until the client has no more. A request that takes over
    `REQUEST_SECONDS` is given up. `at_loopback`: it must name an address or a name of this machine."""
    received = b""
    try:
        while True:
            with trio.fail_after(REQUEST_SECONDS):
                left = await _answer_one(site, stream, received, at_loopback)
            if left is None:
                return
            received = left
            if not received:
                with trio.fail_after(IDLE_SECONDS):
                    received = bytes(await stream.receive_some(MAX_REQUEST_BYTES))
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        pass  # the client has gone, or says nothing
    except Exception:
        logger.exception("an HTTP request failed by an internal error")


async def _answer_one(
    site: Site, stream: trio.abc.Stream, received: bytes, at_loopback: bool
) -> bytes | None:
    """Answer the next request, perhaps received in part. Returns the bytes behind it; None: the connection ended."""
    while b"\r\n\r\n" not in received:
        more = await stream.receive_some(MAX_REQUEST_BYTES)
        received += bytes(more)
        if not more or len(received) > MAX_REQUEST_BYTES:
            return None
    head, _, left = received.partition(b"\r\n\r\n")
    request = _Request.parse(head)
    try:
        if request.method == "POST":
            _check_query(site, request, at_loopback)
            body, left = await _body(request, stream, left)
            answer = await _made(site.queries[request.path](body))
            await stream.send_all(_head(answer, stay=request.keeps_alive) + answer.body)
            return left if request.keeps_alive else None
        _check_page(site, request, at_loopback)
        answer = await _made(site.pages[request.path]())
    except _Refused as refused:
        answer = refused.answer
    await stream.send_all(_head(answer) + (b"" if request.method == "HEAD" else answer.body))
    return None


async def _made(answer: Answer | Awaitable[Answer]) -> Answer:
    return await answer if isinstance(answer, Awaitable) else answer


def _check_page(site: Site, request: _Request, at_loopback: bool) -> None:
    if request.method not in ("GET", "HEAD"):
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET, HEAD and POST")
    if request.path not in site.pages:
        raise _Refused(HTTPStatus.NOT_FOUND, "there are " + ", ".join(site.pages))
    if request.path not in PROBES and at_loopback:
        _check_name(request)


def _check_query(site: Site, request: _Request, at_loopback: bool) -> None:
    if request.path not in site.queries:
        known = ", ".join(site.queries) or "none"
        raise _Refused(HTTPStatus.NOT_FOUND, f"POST requests are answered at: {known}")
    if site.token:
        kind, _, token = request.header("authorization").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(
            token.strip().encode("latin-1"), site.token.encode()
        ):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN")
    elif not at_loopback:
        raise _Refused(
            HTTPStatus.FORBIDDEN,
            "queries are answered at a loopback address only; a peer with --http-token-file answers them elsewhere",
        )
    if at_loopback:
        _check_name(request)


async def _body(request: _Request, stream: trio.abc.Stream, left: bytes) -> tuple[bytes, bytes]:
    """The request's body, and what came behind it."""
    length = request.header("content-length")
    if "transfer-encoding" in request.headers or not length:
        raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send a body with its Content-Length")
    if not length.isascii() or not length.isdigit():
        raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length is a number")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {MAX_BODY_BYTES:,} bytes")
    size, parts, count = int(length), [left], len(left)
    if count < size and request.header("expect").lower() == "100-continue":
        await stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
    while count < size:
        part = await stream.receive_some(max(MAX_REQUEST_BYTES, size - count))
        if not part:
            raise trio.BrokenResourceError
        parts.append(bytes(part))
        count += len(part)
    whole = b"".join(parts)
    return whole[:size], whole[size:]


def _check_name(request: _Request) -> None:
    machine = socket.gethostname().lower()
    own_names = (machine, machine.partition(".")[0])
    hosts = request.headers.get("host", [])  # none with HTTP/1.0, which browsers do not speak
    if not all(is_own_name(host, own_names) for host in hosts):
        raise _Refused(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this page is not shown by that name at a loopback address: ask for it as localhost, or by its address",
        )


def _head(answer: Answer, *, stay: bool = False) -> bytes:
    status = answer.status
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Connection: {'keep-alive' if stay else 'close'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


LOCALHOST: Final = "localhost"


def is_own_name(host: str, own_names: Collection[str]) -> bool:
    """Whether a request with this Host header may be answered at a loopback address. `own_names` are in lower case."""
    name = _without_port(host.strip()).lower().rstrip(".")
    if name in own_names or name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
