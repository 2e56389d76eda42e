"""What gossip asks of its shell, and what the shell hands back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from p2pstore.gossip.messages import ControlKind
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
    """Fetch the location set of `member` from `peer_id`; the outcome goes to `snapshot_fetched`."""

    token: int
    peer_id: PeerId
    member: Member
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Contact:
    """Connect to who listens at one of these addresses; then `contacted` or `contact_failed`."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another live process uses this peer's identity and has the better right to it: exit."""

    record: PeerRecord


Effect = Ask | FetchSnapshot | Contact | Duplicate


@dataclass(frozen=True, slots=True)
class Push:
    """Fresh operations of this peer's log for one home peer of their keys."""

    peer_id: PeerId
    incarnation: int
    sequences: list[int]
    operations: bytes


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """Where a snapshot stands: the set at (`incarnation`, `sequence`) has `set_hash`."""

    incarnation: int
    sequence: int
    set_hash: int
