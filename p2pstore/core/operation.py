"""The base of all operations, and what the core asks of its shell.

An operation takes more than one step: look up, fetch, put, replicate, remove, list. Each is a small state
machine owned by `PeerCore`: `start`, then `answered`, `pulled` and `wake` until it finishes. They know
nothing of sockets and time; a simulator and the real peer run the same ones. Every effect with an `operation` is
answered by an event that names it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from p2pstore.errors import DeadlineExceeded, P2PStoreError
from p2pstore.gossip.records import LocationRecord, Member, PeerId, SignedRecord, writer_of
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.put_facts import PutStatus
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.failover import HolderReport
from p2pstore.wire import Failure, Message

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_NOTES: Final = 100


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
        """There is news of a key that this operation awaits: see `Operations.await_keys`."""

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


class InSteps(Operation):
    """Work in steps, one a tick. The result is what they return, or the error that one raises."""

    def __init__(self, core: PeerCore, steps: Steps[Any]) -> None:
        super().__init__(core)
        self._steps = steps

    def wake(self, now: float) -> None:
        try:
            next(self._steps)
        except StopIteration as end:
            self.finish(end.value, now)
        except (P2PStoreError, ValueError) as error:
            self.finish(error, now)
        else:
            self.set_alarm(now)


@dataclass(frozen=True, slots=True)
class PutEnd:
    """The result of a put. `copies`: known copies of the version that the key now has."""

    status: PutStatus
    copies: int
    wanted: int
    version: Version


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """One copy of an object as far as this peer knows. `reachable`: its peer is believed alive. `proved`: that its
    version was written is more than a claim. `hearsay`: another one said so, not its peer: that shows where to look,
    and decides nothing about copies that are here."""

    member: Member
    peer_id: PeerId
    record: LocationRecord
    reachable: bool
    local: bool = False
    proved: bool = True
    hearsay: bool = False

    @property
    def announced(self) -> Version:
        """The version that its holder has to send, or a newer one of its own; after hearsay, any of its own."""
        version = self.record.version
        unsaid = self.hearsay and version.writer == writer_of(self.peer_id)
        return ZERO_VERSION if unsaid else version


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Send a request over a data connection; `core.answered(operation, tag, reply)` brings the outcome. Operation 0
    wants no answer; -1 stands for pushes to homes."""

    operation: int
    tag: int
    peer_id: PeerId
    kind: int
    request: Message
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class PullObject:
    """Bring an object into this peer's memory from one of `copies`, best first: the shell pulls into
    `core.operations.copy_destination(operation)` and reports with `core.operations.pulled(...)`."""

    operation: int
    digest: bytes
    copies: tuple[KnownCopy, ...]
    progress_seconds: float
    insist: bool = False
    """The holder is not to name peers that keep a hot object."""


@dataclass(frozen=True, slots=True)
class LoadObject:
    """Bring an object from this peer's SSD into its memory: as `PullObject`, without other peers."""

    operation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write an object in memory to the SSD, its bytes held until `core.write_back.ended` brings the outcome."""

    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class CheckReturned:
    """Compare the bytes of objects in memory, which an earlier life put there, with their sums;
    `core.earlier_life.returned_checked` brings the outcome. They may go meanwhile; such an outcome is ignored."""

    entries: tuple[ObjectEntry, ...]


@dataclass(frozen=True, slots=True)
class CheckObject:
    """Make the checksums of an object in memory, its bytes held until `Checks.ended` brings them."""

    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class SaveClusterRecord:
    """Keep this record in the state directory."""

    signed: SignedRecord


@dataclass(frozen=True, slots=True)
class OperationFinished:
    """The operation has its `result`; its callers may go on."""

    operation: int


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended: delivered, or not, with the failures on the way."""

    delivered: bool
    failures: tuple[HolderReport, ...] = field(default=())
    error: Exception | None = None
    """Set when this peer itself could not take the object (no room), not a holder's fault."""
    source: int = 0
    transport: str = ""
    """From which member it came, and how."""


class Note(NamedTuple):
    """One line for the log, with the name of its event."""

    event: str
    text: str
    is_error: bool = False


class Notes:
    """Notes for the operator, until the shell takes them; of too many, the newest."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque(maxlen=MAX_NOTES)

    def add(self, event: str, text: str, *, is_error: bool = False) -> None:
        self._notes.append(Note(event, text, is_error))

    def take(self) -> list[Note]:
        """All since the last call."""
        notes = list(self._notes)
        self._notes.clear()
        return notes


class LateBooks:
    """Bookkeeping that a client's answer does not need, kept in order right after the answer was sent. No other request
    and no other part of the peer acts before that."""

    def __init__(self) -> None:
        self.late = False
        """Whether an answer is to be sent first."""
        self._due: deque[Callable[[], None]] = deque()

    def keep(self, books: Callable[[], None]) -> None:
        """Call it now, or at the next `settle` while an answer is to be sent first."""
        if self.late:
            self._due.append(books)
        else:
            books()

    def settle(self) -> None:
        """Keep all books that are due. Those behind one that fails stay due."""
        if not self._due:
            return
        late, self.late = self.late, False
        try:
            while self._due:
                self._due.popleft()()
        finally:
            self.late = late


Reply = Message | Failure | None
"""An answer, a refusal, or nothing at all within the time."""


@dataclass(frozen=True, slots=True)
class ColdObject:
    """One object of an earlier life. `namespace` is the namespace's digest."""

    digest: bytes
    namespace: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class ColdSorted:
    """Of the objects that the peer returned with: `good` may be served and announced, `discarded` are to be
    destroyed. When all of that is done and durable after the `last` of these, tell `EarlierLife.cold_settled`."""

    good: tuple[ColdObject, ...]
    discarded: tuple[ColdObject, ...]
    last: bool


Effect = (
    AskPeer
    | PullObject
    | LoadObject
    | WriteObject
    | CheckReturned
    | CheckObject
    | SaveClusterRecord
    | ColdSorted
    | OperationFinished
)
