"""Messages on control streams (libp2p), and what gossip asks of its shell. Frames: `p2pstore.wire`. Pure.

A stream belongs to the side that opened it: it asks, the other answers. It starts with admission:

    opener                                 listener
    HELLO Hello(nonce, key ids)  ------->
                                 <-------  HELLO|REPLY HelloReply(nonce, key id, proof)
    PROOF Proof(key id, proof)   ------->
                                 <-------  PROOF|REPLY Welcome    (or an ERROR frame, then close)

A proof is HMAC-SHA256 with a key of the cluster's ring over role, both peer ids (which Noise has
authenticated), both nonces and the cluster's name. A cluster without a key uses 32 zero bytes. Before its proof the
other side is a stranger: it is told neither the cluster's name nor what software runs here (`software` of the first two
messages is empty, and was not in earlier versions). A reader, admitted with a reader's key
(`p2pstore.access.keyring`), gets a signature with the Welcome that only a member can make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from p2pstore.gossip.records import Member, PeerId, PeerRecord, SignedRecord
from p2pstore.home_messages import Push
from p2pstore.wire import Empty, Message


class ControlKind(IntEnum):
    HELLO = 1
    PROOF = 2
    PING = 16
    EXCHANGE = 17
    DELTA = 18
    LEAVE = 19
    PING_REQUEST = 20


# --- admission -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    min_version: int
    max_version: int
    cluster: str
    nonce: bytes
    key_ids: list[bytes]
    software: str = ""


class HelloReply(Message, frozen=True):
    version: int
    nonce: bytes
    key_id: bytes
    proof: bytes
    software: str = ""


class Proof(Message, frozen=True):
    key_id: bytes
    proof: bytes
    software: str = ""


class Welcome(Message, frozen=True):
    software: str = ""
    signature: bytes = b""


# --- membership ------------------------------------------------------------------------------


class Status(IntEnum):
    """A claim about a member. A higher incarnation overrides; within one the higher status does.
    Claims of a status that is not known here are passed over."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Claim(Message, frozen=True):
    """`by` (a member's short name) claims `status` of the incarnation of `peer_id`."""

    peer_id: bytes
    incarnation: int
    status: int
    by: int


MAX_CLAIMS: Final = 1024
"""In one message; checked, like all caps on lists here, before anything is done per element."""

Claims = Annotated[list[Claim], Meta(max_length=MAX_CLAIMS)]


class Ping(Message, frozen=True):
    """Are you there? `incarnation` is what the sender knows of the receiver; claims ride along."""

    incarnation: int
    claims: Claims


class Ack(Message, frozen=True):
    """`unix_ms` is the sender's wall clock when it answered; 0 comes from an older one."""

    incarnation: int
    claims: Claims
    unix_ms: int = 0


class PingRequest(Message, frozen=True):
    """Ping this peer for me (an indirect probe). Answered by `Ack` of the target or an error."""

    peer_id: bytes
    timeout_ms: int


class Leave(Message, frozen=True):
    """The sender leaves on purpose; `record` is its own, marked leaving."""

    record: SignedRecord


# --- anti-entropy ----------------------------------------------------------------------------

CLUSTER_BUCKETS: Final = 64
"""Cluster records are compared by the XOR hash of 64 buckets, chosen by the record name's first byte."""
CLUSTER_CELLS: Final = 64
"""Each bucket is 64 cells, chosen by the name's second byte."""


class LogChunk(Message, frozen=True):
    """Operations of one member's log, contiguous from `first_sequence`: packed location records. The member signed
    them (`log`); without its signature they count for nothing."""

    member: int
    incarnation: int
    first_sequence: int
    operations: bytes
    signature: bytes = b""
    count: int = 0
    """Operations in packed form (`log`). 0: they are plain."""


MAX_RECORDS: Final = 1024
"""Peer records, or cluster records, in one delta."""
MAX_LOG_CHUNKS: Final = 16_384

SignedRecords = Annotated[list[SignedRecord], Meta(max_length=MAX_RECORDS)]


class Delta(Message, frozen=True):
    """News for the receiver: peer records, then log operations, then cluster records. To a receiver that named
    `members_hash`, `operations` go packed, which `runs` divides among these members, with a signature a run
    (`digests`)."""

    records: SignedRecords
    logs: Annotated[list[LogChunk], Meta(max_length=MAX_LOG_CHUNKS)]
    cluster_records: SignedRecords
    claims: Claims
    members_hash: int = 0
    runs: bytes = b""
    operations: bytes = b""
    signatures: bytes = b""


class Exchange(Message, frozen=True):
    """The sender's digest. `cluster_hash` is the XOR of all buckets; `cluster_buckets` (64 u64) is sent
    when the last exchange with this peer showed a difference.

    Now and then `floors_epoch` asks whether the receiver knew the same floors at that end of an epoch,
    which `floors_hash` stands for (`floor_sync`); 0 does not ask.

    `members_hash` stands for the members that the sender knows (`digests`). Where the last
    peer that was heard of knew the same ones, `positions` stand in place of `digest`. `cluster_cells` are hashes of the
    cells of some buckets that differ: `u8 bucket | 64 u64` each.

    `hot` is of v0.1.0, which passed on locations of keys that many looked for; no peer reads it any more.

    `unix_ms` is the sender's wall clock; 0 comes from an older sender.
    """

    digest: bytes
    cluster_hash: int
    cluster_buckets: bytes
    claims: Claims
    floors_epoch: int = 0
    floors_hash: int = 0
    members_hash: int = 0
    positions: bytes = b""
    cluster_cells: bytes = b""
    hot: bytes = b""
    unix_ms: int = 0


class ExchangeReply(Message, frozen=True):
    """News for the sender, and the replier's own digest, so that the sender can answer with a DELTA.

    When asked of floors: the replier's horizon, and up to where it has seen each writer's floors, both 16
    bytes a writer; where the epochs agree, `floors_epoch` again.

    `members_hash` and `positions` as in `Exchange`: the digest is in full where the members differ. With
    neither digest nor positions the replier wants nothing now.
    `cluster_cells` are those of the buckets that were asked of. `unix_ms` as in `Exchange`.
    """

    delta: Delta
    digest: bytes
    cluster_hash: int
    cluster_buckets: bytes
    floors_epoch: int = 0
    floors_seen: bytes = b""
    floors_horizon: bytes = b""
    members_hash: int = 0
    positions: bytes = b""
    cluster_cells: bytes = b""
    hot: bytes = b""
    unix_ms: int = 0


REQUESTS: Final[dict[int, type[Message]]] = {
    ControlKind.HELLO: Hello,
    ControlKind.PROOF: Proof,
    ControlKind.PING: Ping,
    ControlKind.EXCHANGE: Exchange,
    ControlKind.DELTA: Delta,
    ControlKind.LEAVE: Leave,
    ControlKind.PING_REQUEST: PingRequest,
}
REPLIES: Final[dict[int, type[Message]]] = {
    ControlKind.HELLO: HelloReply,
    ControlKind.PROOF: Welcome,
    ControlKind.PING: Ack,
    ControlKind.EXCHANGE: ExchangeReply,
    ControlKind.DELTA: Empty,
    ControlKind.LEAVE: Empty,
    ControlKind.PING_REQUEST: Ack,
}


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
    """Connect to the peer at one of these addresses; then `contacted` or `contact_failed`."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another live process uses this peer's identity and has the better right to it: exit."""

    record: PeerRecord


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply (`Failure` for an error) to the request that was answered by the `Later` of this token: one for each,
    unless the peer leaves first."""

    token: int
    reply: Message


Effect = Ask | FetchSnapshot | Contact | Duplicate | Answer


@dataclass(frozen=True, slots=True)
class Later:
    """`serve` returns this in place of a reply that depends on another peer: an `Answer` with this token brings the
    reply, at the latest after `timeout_seconds`."""

    token: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class HomePush:
    """Send a home peer what it should know of this peer's log; the outcome goes to `PartitionedDirectory.pushed`."""

    token: int
    peer_id: PeerId
    timeout_seconds: float
    message: Push


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """Where a snapshot stands: the set at (`incarnation`, `sequence`) has `set_hash`."""

    incarnation: int
    sequence: int
    set_hash: int
