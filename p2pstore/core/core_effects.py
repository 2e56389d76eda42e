"""The core's requests to its shell. Every effect with an `operation` is answered by an event that names it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pstore.gossip.records import LocationRecord, Member, PeerId, SignedRecord, writer_of
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import ZERO_VERSION, Version
from p2pstore.wire import Failure, Message

if TYPE_CHECKING:
    from p2pstore.core.copies.copy_destination import CopiesDestination
    from p2pstore.memory.entries import ObjectEntry


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
    """Send a request over a data connection; `core.answered(operation, tag, reply)` brings the outcome.

    Operation 0 wants no answer; -1 stands for what gossip tells homes.
    """

    operation: int
    tag: int
    peer_id: PeerId
    kind: int
    request: Message
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class PullObject:
    """Bring an object into this peer's memory from one of `copies`, best first.

    The shell pulls into `core.operations.copy_destination(operation)` and reports with `core.operations.pulled(...)`.
    """

    operation: int
    digest: bytes
    copies: tuple[KnownCopy, ...]
    progress_seconds: float
    insist: bool = False
    """Not to be sent on to those who keep a hot object."""


@dataclass(frozen=True, slots=True)
class PullTogether:
    """Bring objects into this peer's memory, all from one holder.

    The shell has `copies` choose which and where to, pulls these, has them published, and reports with
    `core.operations.pulled(...)`.
    """

    operation: int
    holder: PeerId
    copies: CopiesDestination


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
    `core.earlier_life.returned_checked` brings the outcome. They may go meanwhile; what is read then means nothing."""

    entries: tuple[ObjectEntry, ...]


@dataclass(frozen=True, slots=True)
class CheckObject:
    """Make the checksums of an object in memory, its bytes held until `core.checks.ended` brings them."""

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
class PullFailure:
    """The failure of one holder to deliver. `code` as in `p2pstore.wire.Code`."""

    member: Member
    code: int
    text: str = ""
    incarnation: int = 0
    sequence: int = 0
    keep: bool = False
    others: tuple[Member, ...] = ()
    """With `keep`: the object is hot, and these have it."""


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended: delivered, or not, with the failures on the way."""

    delivered: bool
    failures: tuple[PullFailure, ...] = field(default=())
    error: Exception | None = None
    """Set when this peer itself could not take the object (no room), not a holder's fault."""
    source: int = 0
    transport: str = ""
    """From which member it came, and how."""


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
    | PullTogether
    | LoadObject
    | WriteObject
    | CheckReturned
    | CheckObject
    | SaveClusterRecord
    | ColdSorted
    | OperationFinished
)
