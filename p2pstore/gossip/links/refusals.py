"""What the control host says about strangers that it dropped: one line a minute for one host, and not many
for all hosts together. Shell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

logger = logging.getLogger("p2pstore.host")

QUIET_SECONDS: Final = 60.0
"""After a line about one host the next ones are for DEBUG only."""
MAX_LINES: Final = 60
"""Lines within `QUIET_SECONDS` about all hosts: who has a network of his own has any number of addresses."""


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
