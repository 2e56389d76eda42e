"""Receiving what comes within microseconds, without going to sleep.

Waking a thread on a core that is idle takes 20 to 60 us in a virtual machine, which is more than all the rest of a
small read. So where waits are short, the waiting thread polls the kernel for a moment before it sleeps. It does not
yield in between: on a busy core it would run again only after milliseconds, since data does not wake a thread that is
not asleep.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

POLL_SECONDS: Final = 150e-6
"""Upper bound of one busy-poll, beyond the time in which the other side works on what it was sent."""
MAX_BUSY_SECONDS: Final = 300e-6
"""Upper bound of that time."""
CHEAP_SECONDS: Final = 40e-6
"""A wait with sleep that polling would hardly have made shorter: wake-ups are cheap here, or both sides take turns on
one core. There, polling keeps the other side from the core: beside a stream that has the other core, one small read in
twenty took 200 us instead of 55."""
SHORT_SECONDS: Final = 2e-3
"""A wait with sleep that polling may have made shorter: the other side slept as well. Much more than two wake-ups:
where cores are slow, a read of 1 MiB took 560 to 620 us where both sides slept, and takes 294 to 320 us where both
poll."""
LOCAL_SHORT_SECONDS: Final = 300e-6
"""The same on the local socket, where an answer takes 20 to 100 us of work, or as long as other peers and SSDs do."""
ALONE_SECONDS: Final = 2e-3
"""A thread polls only if no other thread of its process received for this time: of several, some would wait for each
other's core, or for the interpreter."""
MAX_SLEEPS: Final = 128
"""Upper bound of waits without polling after one with polling in vain; one after the first, then twice as many. With
64, where it always is in vain, more than one small read in 100 was kept waiting by it."""


class _Receiving:
    """The thread (of an event loop: the connection) that waited last, and since when no other one has."""

    last = 0
    since = 0.0


class Polling:
    """The waits of the one thread that receives on a connection. `shares_thread`: it is an event loop with other
    connections, where a turn costs as much as a cheap wake-up. `short_seconds`: see `SHORT_SECONDS`."""

    def __init__(self, *, shares_thread: bool = False, short_seconds: float = SHORT_SECONDS) -> None:
        self._shares_thread = shares_thread
        self._short_seconds = short_seconds
        self._cheap_seconds = 0.0 if shares_thread else CHEAP_SECONDS
        self._sleeps_left = self._sleeps = 1
        self._busy_seconds = 0.0

    def sent(self, seconds: float) -> None:
        """It took `seconds` to make and send what the other side has to take in before it sends anything: with what it
        does then, that takes it up to twice as long."""
        self._busy_seconds = min(2 * seconds, MAX_BUSY_SECONDS)

    def receive(self, at_once: Callable[[], T], receive: Callable[[], T]) -> T:
        """The result of `receive` on a blocking socket, or of `at_once`, which raises `BlockingIOError` while there is
        nothing."""
        began = time.monotonic()
        if self.is_due(began):
            received = self.poll(at_once, began)
            return receive() if received is None else received
        received = receive()
        self.slept(time.monotonic() - began)
        return received

    def is_due(self, now: float) -> bool:
        """Whether the wait that begins now should begin by polling: `poll` follows; else `slept`."""
        receiver = id(self) if self._shares_thread else threading.get_ident()
        if _Receiving.last != receiver:
            _Receiving.last, _Receiving.since = receiver, now
        return not self._sleeps_left and now - _Receiving.since >= ALONE_SECONDS

    def poll(self, receive: Callable[[], T], began: float) -> T | None:
        """The result of `receive` once it raises no `BlockingIOError`; None when that takes too long."""
        until = began + POLL_SECONDS + self._busy_seconds
        while True:
            try:
                received = receive()
            except BlockingIOError:
                if time.monotonic() >= until:
                    self._was_in_vain()
                    return None
            else:
                if time.monotonic() < until:
                    self._sleeps = 1
                else:  # others had the core
                    self._was_in_vain()
                return received

    def receive_into(self, sock: socket.socket, view: memoryview) -> int:
        """`sock.recv_into(view)`, for a blocking socket."""
        return self.receive(
            partial(sock.recv_into, view, 0, socket.MSG_DONTWAIT), partial(sock.recv_into, view)
        )

    def slept(self, seconds: float) -> None:
        """A wait without polling took this time."""
        if not self._cheap_seconds < seconds < self._short_seconds:
            self._sleeps_left = max(1, self._sleeps_left)
        elif self._sleeps_left:
            self._sleeps_left -= 1

    def _was_in_vain(self) -> None:
        self._sleeps_left = self._sleeps
        self._sleeps = min(2 * self._sleeps, MAX_SLEEPS)
