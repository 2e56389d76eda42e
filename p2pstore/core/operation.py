"""The base of all operations.

An operation takes more than one step: look up, fetch, put, replicate, remove, list. Each is a small state
machine owned by `PeerCore`: `start`, then `answered`, `pulled` and `wake` until it finishes. They know
nothing of sockets and time; a simulator and the real peer run the same ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2pstore.core.core_effects import AskPeer, OperationFinished, PullOutcome, Reply
from p2pstore.errors import DeadlineExceeded
from p2pstore.gossip.records import PeerId
from p2pstore.objects import Version
from p2pstore.put_facts import PutStatus

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


class Operation(ABC):
    """Base of all operations. `result` is set when `done`; an exception as result means it failed. `on_finish` is
    called with the result and the time."""

    def __init__(self, core: PeerCore, on_finish: Callable[[Any, float], None] | None = None) -> None:
        self.core = core
        self.number = 0
        self.done = False
        self.result: Any = None
        self.wake_at = float("inf")
        self.on_finish = on_finish

    @abstractmethod
    def start(self, now: float) -> None:
        """Begin; may finish at once."""

    def answered(self, tag: int, reply: Reply, now: float) -> None:  # noqa: B027 - not every operation waits for it
        """The answer to the `AskPeer` with this tag."""

    def pulled(self, outcome: PullOutcome, now: float) -> None:  # noqa: B027 - not every operation waits for it
        """The end of this operation's `PullObject`."""

    def wake(self, now: float) -> None:  # noqa: B027 - not every operation waits for it
        """`wake_at` has come."""

    def heard_of(self, digest: bytes, now: float) -> None:  # noqa: B027 - not every operation waits for it
        """There is news of a key that this operation awaits: see `PeerCore.await_keys`."""

    def cancel(self, now: float) -> None:
        """No caller waits any more; give back reservations and references."""
        if not self.done:
            self.finish(DeadlineExceeded("the operation was cancelled"), now)

    def finish(self, result: Any, now: float) -> None:
        """Set the result, once."""
        if self.done:
            return
        self.done = True
        self.result = result
        self.wake_at = float("inf")
        self.core.operations.retire(self)
        if self.on_finish is not None:
            self.on_finish(result, now)
        self.core.emit(OperationFinished(self.number))

    def ask(self, tag: int, peer_id: PeerId, kind: int, request: Any, timeout_seconds: float) -> None:
        self.core.emit(AskPeer(self.number, tag, peer_id, kind, request, timeout_seconds))


@dataclass(frozen=True, slots=True)
class PutEnd:
    """The result of a put. `copies`: known copies of the version that the key now has."""

    status: PutStatus
    copies: int
    wanted: int
    version: Version
