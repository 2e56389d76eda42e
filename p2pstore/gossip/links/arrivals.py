"""Incoming connections, until their end: strangers wait for admission in a bounded number of places. Shell."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any, Final

import trio

from p2pstore.access.crowding import Strangers
from p2pstore.addresses import join_address
from p2pstore.gossip.links.control_connection import Connection
from p2pstore.gossip.links.secured_connections import UPGRADE_BYTES, Securing, reason_of
from p2pstore.gossip.links.sockets import (
    GuardedSocket,
)
from p2pstore.runtime.accepting import Accepting

logger = logging.getLogger("p2pstore.host")

MAX_STRANGERS: Final = 256
"""Incoming connections that have not been admitted yet."""

MAX_STRANGERS_PER_HOST: Final = 128


class Arrivals:
    """Accepts connections at `listener`. `serve` runs each whose other side has proved an identity."""

    def __init__(
        self,
        listener: socket.socket,
        securing: Securing,
        refusals: Refusals,
        serve: Callable[[Connection], Awaitable[None]],
    ) -> None:
        self.strangers: Strangers[trio.CancelScope] = Strangers(
            MAX_STRANGERS, MAX_STRANGERS_PER_HOST
        )
        self._listener = listener
        self._securing = securing
        self._refusals = refusals
        self._serve = serve
        self._closed = False

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()

    def admitted(self, connection: Connection) -> None:
        """The connection is no stranger's any more."""
        if connection.stranger is not None:
            self.strangers.leave(connection.stranger)

    async def run(self, nursery: trio.Nursery) -> None:
        """Serve the listening socket until `close`; connections run in `nursery`."""
        with closing(Accepting(logger, "other peers")) as accepting:
            while not self._closed:
                await trio.lowlevel.checkpoint()
                try:
                    sock, address = await accepting.accept(self._listener)
                except (trio.ClosedResourceError, OSError):
                    return  # closed just now
                self._take_in(nursery, sock, address)

    def _take_in(
        self, nursery: trio.Nursery, sock: socket.socket, address: tuple[Any, ...]
    ) -> None:
        """A stranger waits to be admitted; another one may have to go for it."""
        where = join_address(*address[:2])
        scope = trio.CancelScope()
        dropped = self.strangers.arrive(address[0], scope)
        if dropped is scope:
            sock.close()
            self._refusals.dropped(
                where, f"{len(self.strangers)} connections wait to be admitted already"
            )
            return
        if dropped is not None:
            dropped.cancel()
        nursery.start_soon(self._receive, sock, where, scope)

    async def _receive(
        self, accepted: socket.socket, address: str, scope: trio.CancelScope
    ) -> None:
        """One incoming connection, from its first byte to its end. `scope` ends it while it is a stranger's."""
        sock = None
        try:
            with scope:
                sock = GuardedSocket(accepted, UPGRADE_BYTES)
                connection = await self._securing.secure(sock, address, outgoing=False)
                connection.stranger = scope
                await self._serve(connection)
        except Exception as error:  # whatever the library makes of what a stranger sent
            self._refusals.dropped(address, reason_of(error))
        else:
            if scope.cancelled_caught:
                self._refusals.dropped(address, "it made room for a stranger from another host")
        finally:
            self.strangers.leave(scope)
            if sock is not None:
                sock.abort()
            accepted.close()


logger = logging.getLogger("p2pstore.host")

QUIET_SECONDS: Final = 60.0
"""After a line about one host the next ones are for DEBUG only."""
MAX_LINES: Final = 60
"""Lines within `QUIET_SECONDS` about all hosts: the owner of a network has any number of addresses."""


class Refusals:
    """Logs, at a bounded rate, and reports every refusal to a callback (a metric)."""

    def __init__(self, on_refused: Callable[[str, str], None]) -> None:
        """`on_refused(address, reason)` is called for every one."""
        self._on_refused = on_refused
        self._quiet_until: dict[str, float] = {}
        self._window_ends = 0.0
        self._lines = 0
        self._left_out = 0
        self._silent = False

    def silence(self) -> None:
        """From now on connections end because this side closes them."""
        self._silent = True

    def dropped(self, address: str, reason: str) -> None:
        """A connection or stream was dropped because of what the other side did."""
        if self._silent:
            return
        self.say(address, f"dropped {address}: {reason}")
        call_back(partial(self._on_refused, address, reason))

    def say(self, address: str, line: str) -> None:
        """One line about the host in `address` (`HOST:PORT`)."""
        host = address.rpartition(":")[0]
        now = trio.current_time()
        if now >= self._window_ends:
            self._quiet_until = {h: until for h, until in self._quiet_until.items() if until > now}
            self._window_ends, self._lines = now + QUIET_SECONDS, 0
        if self._quiet_until.get(host, 0.0) > now:
            logger.debug("%s", line)
        elif self._lines >= MAX_LINES:
            self._left_out += 1
            logger.debug("%s", line)
        else:
            self._quiet_until[host] = now + QUIET_SECONDS
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
            more = f" ({left_out} lines about other hosts were left out)" if left_out else ""
            logger.warning("%s%s", line, more)


def call_back(function: Callable[[], None]) -> None:
    """Call a function of the peer's; its faults must not end the host."""
    try:
        function()
    except Exception:
        logger.exception("a callback of the control host failed")
