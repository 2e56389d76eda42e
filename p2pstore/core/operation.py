"""The base of all operations.

An operation takes more than one step: look up, fetch, put, replicate, remove, list. Each is a small state
machine owned by `PeerCore`: `start`, then `answered`, `pulled` and `wake` until it finishes. They know
nothing of sockets and time; a simulator and the real peer run the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from p2pstore.core.core_effects import AskPeer, OperationFinished, PullOutcome, Reply
from p2pstore.errors import DeadlineExceeded
from p2pstore.gossip.records import PeerId
from p2pstore.objects import Version
from p2pstore.put_facts import PutStatus

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


class Timed(Protocol):
    """A part of the core that acts by itself. `due_at` (monotonic; infinity: never) asks for a tick; each tick of the
    core calls `tick`, which does what is due, some milliseconds of it."""

    @property
    def due_at(self) -> float: ...

    def tick(self, now: float) -> None: ...


Then = Callable[[Any, float], None]
"""Called with an operation's result and the time."""


class Operation:
    """Base of all operations. `result` is set when `done`; an exception as result means it failed."""

    def __init__(self, core: PeerCore) -> None:
        self.core = core
        self.number = 0
        self.done = False
        self.result: Any = None
        self.wake_at = math.inf
        self.on_finish: Then | None = None
        self.asked: dict[int, Any] = {}
        """The questions without an answer yet: what each is about, by its tag."""
        self.parts: dict[Operation, None] = {}
        """Operations that this one waits for."""
        self._next_tag = 0

    def start(self, now: float) -> None:
        """Begin, with a first step unless a subclass does otherwise; may finish at once."""
        self.wake(now)

    def answered(self, about: Any, reply: Reply, now: float) -> None:
        """The answer to the question that was asked about this."""

    def pulled(self, outcome: PullOutcome, now: float) -> None:
        """The end of this operation's `PullObject`."""

    def wake(self, now: float) -> None:
        """Make a step: `wake_at` has come."""

    def heard_of(self, digest: bytes, now: float) -> None:
        """There is news of a key that this operation awaits: see `PeerCore.await_keys`."""

    def cancel(self, now: float) -> None:
        """No caller waits any more; give back reservations and references."""
        if not self.done:
            self.finish(DeadlineExceeded("the operation was cancelled"), now)

    def finish(self, result: Any, now: float) -> None:
        """Set the result, once. Parts that still run are cancelled."""
        if self.done:
            return
        self.done = True
        self.result = result
        self.wake_at = math.inf
        self.core.operations.retire(self)
        if self.on_finish is not None:
            self.on_finish(result, now)
        self.core.emit(OperationFinished(self.number))
        for part in list(self.parts):
            part.cancel(now)

    def ask(self, about: Any, peer_id: PeerId, kind: int, request: Any, timeout_seconds: float) -> None:
        """Ask a peer; `answered` gets `about` with the reply."""
        self._next_tag += 1
        self.asked[self._next_tag] = about
        self.core.emit(AskPeer(self.number, self._next_tag, peer_id, kind, request, timeout_seconds))

    def set_alarm(self, when: float) -> None:
        """Have `wake` called then, in place of an earlier alarm; never at infinity."""
        self.wake_at = when
        if when < math.inf:
            self.core.operations.set_alarm(self)

    def run(self, part: Operation, then: Then, now: float) -> None:
        """Start an operation that ends with this one; `then` is called with its result, unless this one has ended."""

        def ended(result: Any, at: float) -> None:
            self.parts.pop(part, None)
            if not self.done:
                then(result, at)

        self.parts[part] = None
        self.core.operations.start(part, now, ended)


@dataclass(frozen=True, slots=True)
class PutEnd:
    """The result of a put. `copies`: known copies of the version that the key now has."""

    status: PutStatus
    copies: int
    wanted: int
    version: Version
