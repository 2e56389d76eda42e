"""The protocol of the local socket: kinds of requests, their messages, the hello; and what its server asks of its peer.
Pure.

The client sends the preface `P2PSTORL` and HELLO. The reply carries, as SCM_RIGHTS, one descriptor for
each memory of each segment, in the order of `segments` and their `pieces`: read-only for READ access, writable for
WRITE. Afterwards requests may be pipelined; replies come in any order. The end of a connection ends its reservations
and leases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from p2pstore.local import local_messages as local
from p2pstore.local import older_put_messages
from p2pstore.wire import Empty, Message


class LocalKind(IntEnum):
    HELLO = 1
    RESERVE_ROWS = 16
    COMMIT_ROWS = 17
    ABORT = 18
    LEASE = 19
    RELEASE = 20
    PLAN = 21
    REPORT = 22
    CONTAINS = 23
    LOCATE = 24
    REMOVE = 25
    LIST = 26
    PEERS = 27
    STATISTICS = 28
    LEAVE = 29
    REPLICATE = 30
    PIN = 31
    FLUSH = 32
    PREFETCH = 33
    MATCH_PREFIX = 34
    ESTIMATE = 35
    PLACE = 36
    STORED = 37
    RESERVE = 38
    COMMIT = 39
    CHECKPOINT_PUBLISH = 48
    CHECKPOINT_FETCH = 49
    CHECKPOINT_PROGRESS = 50
    CHECKPOINT_FOLLOW = 56
    CHECKPOINT_FOLLOW_NEWS = 57
    CHECKPOINT_UPDATE = 58
    CHECKPOINT_UPDATE_NEWS = 59
    CHECKPOINT_LIST = 60
    CHECKPOINT_REMOVE = 61


class Access(IntEnum):
    READ = 0
    WRITE = 1


class Hello(Message, frozen=True):
    min_version: int
    max_version: int
    namespace: str
    access: int
    process_id: int
    client: str = ""
    location_table: bool = False
    """Whether the client can look keys up in the peer's table of locations."""
    directory: bool = False
    """Whether the descriptor of a directory comes along, for what is asked on this connection."""
    checkpoint: bytes = b""
    """The version of a checkpoint in the peer's memory that the client wants to map; nothing for none."""
    hazards: bool = False
    """Whether the client can lease objects without asking, by a page of its own (`memory.hazards`)."""


class SegmentInfo(Message, frozen=True):
    """`pieces`: the bytes of each of the memories that it is made of, side by side, with a descriptor each; when there
    are none, one descriptor is all of it."""

    segment_id: bytes
    total_bytes: int
    pieces: list[int] = []


class HelloReply(Message, frozen=True):
    version: int
    peer_id: bytes
    name: str
    incarnation: int
    segments: list[SegmentInfo]
    max_leased_bytes: int
    software: str = ""
    location_table_bytes: int = 0
    """Of the table, whose read-only descriptor follows those of the segments; 0 when there is none."""
    checkpoint_bytes: int = 0
    """Of the version that the client wanted, whose read-only descriptor comes last: files as
    `checkpoint.content.pieces.plan_memory` has them, and from `checkpoint_manifest` on the manifest."""
    checkpoint_manifest: int = 0
    hazards: bool = False
    """Whether there is a page for that. Its writable descriptor comes after that of the table, and before a
    checkpoint's."""
    access: int = int(Access.WRITE)
    """Access of the client: READ, with read-only descriptors, where it asked for more than its user may."""


MESSAGES: Final[dict[int, tuple[type[Message], type[Message] | None]]] = {
    LocalKind.HELLO: (Hello, HelloReply),
    LocalKind.RESERVE_ROWS: (older_put_messages.ReserveRows, older_put_messages.ReservedRows),
    LocalKind.COMMIT_ROWS: (older_put_messages.CommitRows, older_put_messages.CommittedRows),
    LocalKind.RESERVE: (local.Reserve, local.Reserved),
    LocalKind.COMMIT: (local.Commit, local.Committed),
    LocalKind.ABORT: (local.Abort, Empty),
    LocalKind.LEASE: (local.Lease, local.Leased),
    LocalKind.RELEASE: (local.Release, None),
    LocalKind.PLAN: (local.Plan, local.Planned),
    LocalKind.REPORT: (local.Report, None),
    LocalKind.CONTAINS: (local.Contains, local.ContainsReply),
    LocalKind.LOCATE: (local.Locate, local.Located),
    LocalKind.REMOVE: (local.Remove, local.Removed),
    LocalKind.LIST: (local.ListKeys, local.Keys),
    LocalKind.PEERS: (local.Peers, local.PeersReply),
    LocalKind.STATISTICS: (local.Statistics, local.StatisticsReply),
    LocalKind.LEAVE: (local.Leave, Empty),
    LocalKind.REPLICATE: (local.Replicate, local.PutOutcome),
    LocalKind.PIN: (local.SetPin, local.Pinned),
    LocalKind.FLUSH: (local.Flush, local.Flushed),
    LocalKind.PREFETCH: (local.Prefetch, Empty),
    LocalKind.MATCH_PREFIX: (local.MatchPrefix, local.MatchedPrefix),
    LocalKind.ESTIMATE: (local.Locate, local.Estimated),
    LocalKind.PLACE: (local.Place, local.Placed),
    LocalKind.STORED: (local.StoredElsewhere, Empty),
}
"""Request and reply of each kind, but for CHECKPOINT_*; None where there is no reply."""
IN_COLUMNS: Final = {LocalKind.RESERVE_ROWS: LocalKind.RESERVE, LocalKind.COMMIT_ROWS: LocalKind.COMMIT}
"""Requests of protocol version 1 (`older_put_messages`), and those of version 2 in their places."""
IN_ROWS: Final = {newer: older for older, newer in IN_COLUMNS.items()}
REQUESTS: Final = {kind: request for kind, (request, _) in MESSAGES.items()}
REPLIES: Final = {kind: reply for kind, (_, reply) in MESSAGES.items() if reply is not None}


@dataclass(frozen=True, slots=True)
class LocalClient:
    """A connected client. `session` names it in the segment and is never used again."""

    session: int
    namespace: str
    access: Access
    process_id: int
    name: str
    reads_locations: bool = False
    """Whether it can use the peer's table of locations."""
    directory: int = -1
    """The descriptor of a directory that it passed, or -1; closed when the client is gone."""
    checkpoint: bytes = b""
    """The version of a checkpoint in memory that it wants to map."""
    hazards: bool = False
    """Whether it can lease objects by a page of its own."""

    def __hash__(self) -> int:
        return self.session


class LocalBackend(Protocol):
    """The peer, as the server sees it. Errors raised go to the client as failures."""

    @property
    def request_types(self) -> Mapping[int, type[Message]]:
        """The requests that it answers, by `LocalKind`."""

    def welcome(self, client: LocalClient, version: int) -> tuple[HelloReply, list[int]]:
        """The answer to a client's hello, and a descriptor for each memory of each segment in it: read-only ones for
        READ access, writable ones for WRITE; then, where the hello names one and the client reads it, a read-only
        one of the table of locations; then a writable one of its page of hazards; then one of the checkpoint that it
        wants. The descriptors stay the backend's."""

    def welcomed(self, client: LocalClient) -> None:
        """It has what `welcome` gave: descriptors that were for it alone are not needed any more."""

    def handle(
        self, client: LocalClient, kind: LocalKind, message: Message
    ) -> Message | Awaitable[Message | None] | None:
        """The answer to a request, at once or as something to await (which is cancelled when the
        client is gone). None for kinds without an answer."""

    def make_ready(self) -> None:
        """Answers are on their way as far as the socket takes them, and the client may ask again within microseconds:
        the time to prepare for that."""

    def handled(self) -> None:
        """The time for what must not keep answers waiting: before anything but requests of the same client is handled,
        and at most half a millisecond after `make_ready`."""

    def client_gone(self, client: LocalClient) -> None:
        """End the leases and reservations of this client. Called once per welcomed client."""


class RequestObserver(Protocol):
    """Is told of every request, for statistics. Quick; what it raises is an error of this peer."""

    def began(self, kind: LocalKind, message: Message) -> object:
        """A request is not answered at once; the returned value comes back with its answer."""

    def answered(
        self,
        client: LocalClient,
        kind: LocalKind,
        message: Message,
        answer: Message | Exception | None,
        seconds: float,
        began: object | None,
    ) -> None:
        """A request was answered, `seconds` after it was taken from the socket."""
