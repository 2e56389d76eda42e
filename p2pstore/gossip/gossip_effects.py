"""What gossip asks of its shell, and what the shell hands back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.gossip.records import Member, PeerId, PeerRecord
from p2pstore.wire import Message


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to a peer on its control stream; the outcome goes to `answered`."""

    token: int
    peer_id: PeerId
    kind: ControlKind
    request: Message
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch the location set of `member` from `peer_id`; the outcome goes to `snapshot_fetched`. One of more than
    `most_bytes` is not even received."""

    token: int
    peer_id: PeerId
    member: Member
    timeout_seconds: float
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Contact:
    """Connect to who listens at one of these addresses; then `contacted` or `contact_failed`."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another live process uses this peer's identity and has the better right to it: exit."""

    record: PeerRecord


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply (`Failure` for an error) to the request that was answered by the `Later` of this token.

    Comes once for each `Later`, unless the peer leaves first.
    """

    token: int
    reply: Message


Effect = Ask | FetchSnapshot | Contact | Duplicate | Answer


@dataclass(frozen=True, slots=True)
class Later:
    """What `serve` returns in place of a reply that another peer has yet to be asked for: an `Answer` with
    this token brings it, at the latest after `timeout_seconds`."""

    token: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class PartitionSet:
    """All that a peer holds of one partition after its operation `number`: packed location records."""

    partition: int
    number: int
    set_hash: int
    records: bytes


@dataclass(frozen=True, slots=True)
class Push:
    """Send a home peer what it should know of this peer's log; the outcome goes to `push_answered`.

    The fields from `incarnation` on are those of the message PUSH.
    """

    token: int
    peer_id: PeerId
    timeout_seconds: float
    incarnation: int
    sequences: list[int]
    operations: bytes
    numbers: bytes = b""
    sequence: int = 0
    sets: list[PartitionSet] = field(default_factory=list)
    audit: bytes = b""
    audit_seconds: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """Where a snapshot stands: the set at (`incarnation`, `sequence`) has `set_hash`."""

    incarnation: int
    sequence: int
    set_hash: int
