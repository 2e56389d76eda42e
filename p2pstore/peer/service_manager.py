"""What a service manager (systemd) is told: that this peer serves, reloads, stops, and that its loop turns. Shell.

As sd_notify(3) has it: a datagram of lines to the socket that NOTIFY_SOCKET names. Where nothing names one, nobody is
told anything.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

import trio

logger = logging.getLogger("p2pstore.peer")

SIGNS_PER_PERIOD: Final = 3
"""How often a sign of life is given within the time after which the manager misses it."""
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The manager that started this process, if one did. Telling it something never fails: it may be gone."""

    def __init__(self, address: str | None = None, watchdog_seconds: float | None = None) -> None:
        self.watchdog_seconds = watchdog_seconds
        """Whoever gives no sign of life for so long is ended and started again; None: nobody waits for one."""
        self._address = None if address is None else address.replace("@", "\0", 1)
        if address is not None and address[:1] not in ("/", "@"):
            logger.warning("NOTIFY_SOCKET: %r is neither a path nor begins with @", address)
            self._address = None

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The one that the environment names. Takes its variables out, as what this process starts is not that
        service."""
        address, period, process = (environment.pop(name, None) for name in _VARIABLES)
        if process is not None and process != str(os.getpid()):
            period = None
        seconds = int(period) / 1e6 if period is not None and period.isdecimal() else 0.0
        return cls(address, seconds or None)

    def ready(self, status: str) -> None:
        """This peer serves: for the first time, or again after `reloading`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """This peer reads its files again."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, seconds: float) -> None:
        """This peer leaves, and may take so long."""
        self._tell("STOPPING=1", "STATUS=leaving", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    async def give_signs(self) -> None:
        """Give signs of life until cancelled: from the event loop, so that one that hangs gives none."""
        if self.watchdog_seconds is None:
            return
        while True:
            self._tell("WATCHDOG=1")
            await trio.sleep(self.watchdog_seconds / SIGNS_PER_PERIOD)

    def _tell(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker:
                speaker.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager was not told %s: %s", lines[0], error.strerror)
