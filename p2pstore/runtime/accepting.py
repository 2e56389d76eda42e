"""Accepting connections through shortages of descriptors and memory. Shell."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import trio

from p2pstore.runtime.linux import is_ready, is_shortage, shortage

SAY_SECONDS: Final = 60.0
"""How often one listener says that it lacks something."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 2.0


class Accepting:
    """Accepts connections of one listener, on through shortages: these are logged once a minute, and a process that
    connects meanwhile is turned away with the reason.

    `what` connects, for people. `turn_away` gets such a connection and the reason, and closes it; it may not raise.
    """

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        turn_away: Callable[[socket.socket, str], None] = lambda sock, reason: sock.close(),
    ) -> None:
        self._logger = logger
        self._what = what
        self._turn_away = turn_away
        self._spare = -1
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._said_at = -SAY_SECONDS
        self._keep_spare()

    def close(self) -> None:
        """Let go of the descriptor that is kept for shortages."""
        if self._spare != -1:
            os.close(self._spare)
            self._spare = -1

    async def accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        """The next connection and its address. Raises `trio.ClosedResourceError` when the listener is closed with
        `notify_closing`, and `OSError` when it is closed otherwise."""
        while True:
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener.fileno())
            except OSError as error:
                if listener.fileno() < 0:
                    raise
                if not is_shortage(error):  # the connection was gone before it was accepted
                    await trio.lowlevel.checkpoint()
                elif not is_ready(listener.fileno(), 0):  # no connection waits
                    await trio.lowlevel.wait_readable(listener.fileno())
                else:
                    await self._in_shortage(listener, error)
            else:
                if self._keep_spare():
                    self._pause_seconds = FIRST_PAUSE_SECONDS
                    return sock, address
                # It took the last descriptor, without which the next one could not be told.
                self._say(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), sock)
                await trio.lowlevel.checkpoint()

    async def _in_shortage(self, listener: socket.socket, error: OSError) -> None:
        if self._keep_spare():
            self.close()
            with contextlib.suppress(OSError):
                self._say(error, listener.accept()[0])
                await trio.lowlevel.checkpoint()
                return
        self._say(error)
        await trio.sleep(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _say(self, error: OSError, sock: socket.socket | None = None) -> None:
        """Tell the other side, if it was accepted, and now and then the log."""
        reason = shortage(error)
        if sock is not None:
            self._turn_away(sock, reason)
        self._keep_spare()
        now = time.monotonic()
        if now >= self._said_at + SAY_SECONDS:
            self._said_at = now
            self._logger.error(
                "%s cannot connect now: %s", self._what, reason, extra={"event": "shortage"}
            )

    def _keep_spare(self) -> bool:
        if self._spare == -1:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self._spare != -1
