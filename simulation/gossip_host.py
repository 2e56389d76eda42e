"""A host in virtual time: its clocks, its CPU, and the event loop of the one process on it.

Messages that arrive while the CPU is busy wait. A turn of the loop fails the questions that ran out, handles
everything that had arrived, and only then does what is due. A process that stands still (SIGSTOP) finds all
that at once when it goes on: its questions have run out although their answers wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from p2pstore.wire import HEADER_BYTES
from simulation.kernel import Kernel

UNIX_START: Final = 1_800_000_000.0
SHORTEST_TICK_SECONDS: Final = 0.0005
"""A machine that is always due would not let time pass."""


@dataclass(slots=True)
class Traffic:
    """Frames of control connections, and of data connections (pushes, snapshots), of one host."""

    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    data_bytes_in: int = 0
    data_messages_out: int = 0
    bytes_by_kind: Counter[int] = field(default_factory=Counter)

    def count_out(self, kind: int, body_bytes: int) -> None:
        """A control message is sent."""
        self.messages_out += 1
        self.bytes_out += HEADER_BYTES + body_bytes
        self.bytes_by_kind[kind] += HEADER_BYTES + body_bytes

    def count_in(self, body_bytes: int) -> None:
        """A control message has come."""
        self.bytes_in += HEADER_BYTES + body_bytes


class GossipHost(ABC):
    """See the module's docstring. The process is the subclass's."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel = kernel
        self.number = number
        self.traffic = Traffic()
        self.clock_skew_seconds = 0.0
        """Of the wall clock."""
        self.clock_rate = 1.0
        """How fast both clocks go, in proportion to virtual time."""
        self.life = 0
        """Number of the process: events of an earlier one are dropped."""
        self.resumed_at = -math.inf
        self.stalled = False
        """Whether the process stands still."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._busy_until = 0.0
        self._turn_at = math.inf
        self._tick_at = math.inf

    # --- what the process does ---------------------------------------------------------------

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether there is a process, if only one that stands still."""

    @abstractmethod
    def fail_expired(self) -> None:
        """Fail the questions that ran out."""

    @abstractmethod
    def tick_if_due(self) -> None:
        """Do what is due."""

    @abstractmethod
    def settle(self) -> None:
        """Finish a turn, or whatever else the process did: end with `tick_at`."""

    # --- clocks ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The host's monotonic clock."""
        return self._started_clock_at + self.kernel.now * self.clock_rate

    @property
    def _started_clock_at(self) -> float:
        return 1000.0 + 17.0 * self.number

    def unix(self, local: float) -> float:
        """What the wall clock shows when the monotonic one shows `local`."""
        return UNIX_START + self.clock_skew_seconds + local

    # --- CPU ---------------------------------------------------------------------------------

    def charge(self, seconds: float) -> float:
        """Use the CPU; when it is done."""
        self._busy_until = max(self._busy_until, self.kernel.now) + seconds
        return self._busy_until

    def start(self) -> None:
        self.life += 1
        self.stalled = False
        self._busy_until = self.kernel.now
        self._turn_at = self._tick_at = math.inf

    def end(self) -> None:
        """The process ends; what it had not handled is lost."""
        self.life += 1
        self.stalled = False
        self._inbox.clear()

    def stall(self, seconds: float) -> None:
        """Stall for this long; messages that arrive meanwhile wait."""
        if not self.running or self.stalled:
            return
        self.stalled = True
        life = self.life
        self.kernel.after(seconds, lambda: self.resume() if life == self.life else None)

    def resume(self) -> None:
        """Go on; nothing happens when it did not stand still."""
        if not self.stalled:
            return
        self.stalled = False
        self.resumed_at = self._busy_until = self.kernel.now
        self._turn_at = self._tick_at = math.inf
        self.turn()

    # --- turns -------------------------------------------------------------------------------

    def arrive(self, life: int, handle: Callable[[], None]) -> None:
        """Something for this process: handled at once, or when it comes to it."""
        if life == self.life and self.running:
            self._inbox.append(handle)
            self.wake()

    def wake(self) -> None:
        """There is something to do: a turn now, or when the CPU is free."""
        if self.stalled or self._turn_at < math.inf:
            return
        if self._busy_until <= self.kernel.now:
            self.turn()
        else:
            self._turn_later(self._busy_until)

    def turn(self) -> None:
        """One turn of the event loop: arrived messages, then due work."""
        self._turn_at = math.inf
        self.drain()
        if self.running:
            self.tick_if_due()
        if self.running:
            self.settle()

    def drain(self) -> None:
        """Fail the questions that ran out, and handle everything that had arrived."""
        self.fail_expired()
        for _ in range(len(self._inbox)):
            if not self._inbox:
                return  # the process ended meanwhile
            self._inbox.popleft()()

    def tick_at(self, local: float) -> None:
        """Have a turn when the monotonic clock shows `local`, and before it when something waits."""
        if self._inbox and self._turn_at == math.inf:
            self._turn_later(max(self._busy_until, self.kernel.now))
        due = (local - self._started_clock_at) / self.clock_rate
        due = max(due, self.kernel.now + SHORTEST_TICK_SECONDS)
        if due < self._tick_at:
            self._tick_at = due
            self.kernel.at(due, partial(self._tick_due, self.life, due))

    def _tick_due(self, life: int, due: float) -> None:
        if life == self.life and due == self._tick_at:
            self._tick_at = math.inf
            self.wake()

    def _turn_later(self, at: float) -> None:
        self._turn_at = at
        self.kernel.at(at, partial(self._begin_turn, self.life, at))

    def _begin_turn(self, life: int, at: float) -> None:
        if life == self.life and at == self._turn_at and not self.stalled:
            self.turn()
