"""Answers GET requests over HTTP: enough for Prometheus, Kubernetes, browsers and curl.

One short request a connection. A client that sends garbage or nothing, or does not read its answer, costs a connection
for some seconds. Connections are shared fairly among hosts: a host that opens many keeps only itself out. Every client
that reaches the port gets answers; at a loopback address, pages of other sites do not (`asked_names`).
"""

from __future__ import annotations

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
from p2pstore.runtime.trio_streams import Accepting

logger = logging.getLogger("p2pstore.peer")

REQUEST_SECONDS: Final = 5.0
"""For a whole request and its answer."""
MAX_REQUEST_BYTES: Final = 8192
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


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """A line of text."""
    return Answer(status, TEXT, f"{text}\n".encode())


async def open_metrics_listeners(address: str) -> list[trio.SocketListener]:
    """Listen at HOST:PORT. Raises `ConfigError` when that is not possible."""
    host, port = split_address(address, "metrics")
    try:
        listeners: list[trio.SocketListener] = await trio.open_tcp_listeners(
            port, host=None if is_wildcard(host) else host
        )
    except OSError as error:
        raise ConfigError(
            f"metrics: cannot listen at {address}: {error.strerror or error}; choose another port, or 0 for any"
        ) from None
    return listeners


def address_of(listeners: Sequence[trio.SocketListener]) -> str:
    """HOST:PORT of the first listener."""
    host, port, *_ = listeners[0].socket.getsockname()
    return join_address(host, port)


async def serve_metrics(listeners: Sequence[trio.SocketListener], pages: Pages) -> None:
    """Until cancelled."""
    guests: Strangers[trio.CancelScope] = Strangers(MAX_CONNECTIONS, MAX_HOST_CONNECTIONS)
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept, listener, pages, guests, nursery)


async def _accept(
    listener: trio.SocketListener,
    pages: Pages,
    guests: Strangers[trio.CancelScope],
    nursery: trio.Nursery,
) -> None:
    async with listener:
        await _accept_at(listener.socket.fileno(), pages, guests, nursery)


async def _accept_at(
    descriptor: int, pages: Pages, guests: Strangers[trio.CancelScope], nursery: trio.Nursery
) -> None:
    with (
        closing(Accepting(logger, "readers of the status page", _turn_away)) as accepting,
        socket.socket(fileno=os.dup(descriptor)) as waiting,
    ):
        waiting.setblocking(False)
        while True:
            sock, _ = await accepting.accept(waiting)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            nursery.start_soon(_serve, pages, guests, stream)


def _turn_away(sock: socket.socket, reason: str) -> None:
    answer = text_answer(HTTPStatus.SERVICE_UNAVAILABLE, reason)
    with sock, suppress(OSError):
        sock.setblocking(False)
        sock.send(_head(answer) + answer.body)


async def _serve(
    pages: Pages, guests: Strangers[trio.CancelScope], stream: trio.SocketStream
) -> None:
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
                await serve_request(pages, stream, by_any_name=not _is_at_loopback(stream))
            finally:
                guests.leave(scope)


def _is_at_loopback(stream: trio.SocketStream) -> bool:
    address = ipaddress.ip_address(str(stream.socket.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


async def serve_request(pages: Pages, stream: trio.abc.Stream, *, by_any_name: bool = True) -> None:
    """Read one request and answer it. A request that takes over `REQUEST_SECONDS` is given up. Unless
    `by_any_name`, the request must name an address or a name of this machine."""
    try:
        with trio.move_on_after(REQUEST_SECONDS):
            await _answer(pages, stream, by_any_name)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the client has gone
    except Exception:
        logger.exception("a request for metrics failed by an internal error")


async def _answer(pages: Pages, stream: trio.abc.Stream, by_any_name: bool) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        received = await stream.receive_some(MAX_REQUEST_BYTES)
        head += received
        if not received or len(head) > MAX_REQUEST_BYTES:
            return
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        answer = text_answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
    elif path not in pages:
        answer = text_answer(HTTPStatus.NOT_FOUND, "there are " + ", ".join(pages))
    elif path not in PROBES and not by_any_name and not _is_asked_by_own_name(head):
        answer = text_answer(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this page is not shown by that name at a loopback address: ask for it as localhost, or by its address",
        )
    else:
        made = pages[path]()
        answer = await made if isinstance(made, Awaitable) else made
    head_bytes = _head(answer)
    await stream.send_all(head_bytes if method == "HEAD" else head_bytes + answer.body)


def _is_asked_by_own_name(head: bytes) -> bool:
    machine = socket.gethostname().lower()
    own_names = (machine, machine.partition(".")[0])
    return all(is_own_name(host, own_names) for host in hosts_asked_for(head))


def _head(answer: Answer) -> bytes:
    status = answer.status
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


LOCALHOST: Final = "localhost"


def is_own_name(host: str, own_names: Collection[str]) -> bool:
    """Whether a request whose `Host` is this may be answered at a loopback address. `own_names`: of this machine, in
    lower case."""
    name = _without_port(host.strip()).lower().rstrip(".")
    if name in own_names or name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def hosts_asked_for(head: bytes) -> list[str]:
    """Values of a request's `Host` lines; none with HTTP/1.0, which browsers do not speak."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return [value for name, _, value in pairs if name.strip().lower() == "host"]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
