"""Messages on the local socket about checkpoints. Pure.

A job (publish, fetch, follow, update) has a connection of its own, whose HELLO carries the descriptor of the directory
to work in (`Hello.directory`). A job ends with its connection, so a client that dies leaves nothing running. `path` is
the client's name for the directory, for messages.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from p2pstore.checkpoint.content.pieces import MAX_PIECES
from p2pstore.local.local_protocol import LocalKind
from p2pstore.wire import Empty, Message

MAX_PATTERNS: Final = 256
Patterns = Annotated[list[str], Meta(max_length=MAX_PATTERNS)]

# Empty lists as defaults are safe: msgspec copies them.


class Publish(Message, frozen=True):
    """Publish the connection's directory. Answered when others can fetch it, or, with `wait_seeded`, have all of it."""

    namespace: str
    name: str
    include: Patterns = []
    exclude: Patterns = []
    piece_bytes: int = 0
    wait_seeded: bool = False
    path: str = ""
    file: str = ""
    """Name of the only file, when the descriptor is sealed memory instead of a directory."""


class Published(Message, frozen=True):
    version: bytes
    files: int
    total_bytes: int
    pieces: int
    piece_bytes: int


class Fetch(Message, frozen=True):
    """Fetch a version to the connection's directory; answered when it is in its place."""

    namespace: str
    name: str
    version: str = ""
    """Its first hexadecimal digits; empty for the newest."""
    publisher: bytes = b""
    """A peer id; empty for the trusted publisher of the name."""
    flat: bool = False
    keep: int = 2
    limit_bytes_per_second: int = 0
    verify: bool = False
    wait_ms: int = 0
    path: str = ""
    memory: bool = False
    """Fetch to memory. A client that says HELLO with the version while this connection is open is passed it."""
    include: Patterns = []
    exclude: Patterns = []
    pieces: Annotated[bytes, Meta(max_length=MAX_PIECES // 8)] | None = None
    """To memory: only these, as packed by `pack_map`; empty for none yet, None for all."""


class Fetched(Message, frozen=True):
    """The version is in `directory`, relative to the connection's. `fetched_bytes` of `total_bytes` came over the
    network. `whole`: all files are there. `unmatched`: patterns without a file."""

    version: bytes
    directory: str
    total_bytes: int
    fetched_bytes: int
    whole: bool = True
    unmatched: list[str] = []


class AskNews(Message, frozen=True):
    """Ask for the state of this connection's job. Answered when its number differs from `seen`, or after `wait_ms`."""

    seen: int = 0
    wait_ms: int = 0


class ProgressReply(Message, frozen=True):
    """`number` grows with each change. `phase` is a `JobPhase`; `ended`: the job's answer is on its way. `members` is
    the number of members that pieces are exchanged with."""

    number: int
    phase: str
    done_bytes: int
    total_bytes: int
    ended: bool = False
    members: int = 0
    version: bytes = b""


class Follow(Message, frozen=True):
    """Fetch each version of a name to the connection's directory, and use it when its publisher says so. `publisher` is
    a peer id, empty for the trusted one. Answered only when the follow fails."""

    namespace: str
    name: str
    publisher: bytes = b""
    keep: int = 2
    path: str = ""
    include: list[str] = []
    exclude: list[str] = []


class FollowNewsReply(Message, frozen=True):
    """`version` is the next one to use, or the one in use; `stage` a `group.Stage`; `current` the version in use; `why`
    the reason of a failure. Versions are empty where there is none."""

    number: int
    publisher: bytes
    publisher_name: str
    version: bytes
    stage: str
    current: bytes
    done_bytes: int = 0
    total_bytes: int = 0
    why: str = ""
    ended: bool = False


class Update(Message, frozen=True):
    """Switch all followers of this peer's name to its newest version, once all of them have it; with a `quorum` of 0 or
    more, once that number has it. After the timeout no follower switches."""

    namespace: str
    name: str
    timeout_ms: int
    quorum: int = -1


class FollowerEntry(Message, frozen=True):
    """A follower that an update waits for. `dead`: it counts as dead now."""

    peer_id: bytes
    name: str
    stage: str
    done_permille: int = 0
    why: str = ""
    dead: bool = False


class UpdateNewsReply(Message, frozen=True):
    """`ready` of `followers` have the version, `using` use it; the update waits for `laggards`."""

    number: int
    version: bytes
    followers: int
    ready: int
    using: int
    switched: bool
    laggards: list[FollowerEntry] = []
    ended: bool = False


class Updated(Message, frozen=True):
    """The end of an update. `switched`: followers are to use the version from now on; `superseded`: not, because there
    is a newer one. `laggards` lack the version or, once switched, do not use it yet."""

    version: bytes
    switched: bool
    superseded: bool
    followers: int
    ready: int
    using: int
    laggards: list[FollowerEntry] = []


class ListCheckpoints(Message, frozen=True):
    """List the names of a namespace, or of all when it is empty. With `name`: that one, with its members."""

    namespace: str = ""
    name: str = ""


class MemberEntry(Message, frozen=True):
    """A member's part in a name. `version` and `current` are the first 8 bytes; `state` is a `TakesPart` in lower case.
    `bytes_per_second` is its mean rate of fetching, 0 when unknown."""

    peer_id: bytes
    name: str
    version: bytes
    state: str
    done_permille: int
    follows: bool
    current: bytes = b""
    why: str = ""
    bytes_per_second: int = 0
    me: bool = False
    needs_permille: int = 1000


class CheckpointEntry(Message, frozen=True):
    """A name of one publisher. `switched` is the version that followers are to use, empty for none. `trusted`: this
    peer takes the name from this publisher; `mine`: this peer is the publisher; `alive`: the publisher is."""

    namespace: str
    name: str
    publisher: bytes
    publisher_name: str
    version: bytes
    published_ms: int
    manifest_bytes: int
    total_bytes: int
    files: int
    pieces: int
    previous: bytes = b""
    switched: bytes = b""
    trusted: bool = False
    mine: bool = False
    alive: bool = False
    members: list[MemberEntry] = []


class ListedCheckpoints(Message, frozen=True):
    items: list[CheckpointEntry]


class RemoveCheckpoint(Message, frozen=True):
    """Remove a name of this peer, and end its parts in the name's versions. With a publisher: hide and distrust that
    publisher's name on this peer, until it announces something newer."""

    namespace: str
    name: str
    publisher: bytes = b""


class CheckpointRemoved(Message, frozen=True):
    version: bytes


MESSAGES: Final[dict[int, tuple[type[Message], type[Message]]]] = {
    LocalKind.CHECKPOINT_PUBLISH: (Publish, Published),
    LocalKind.CHECKPOINT_FETCH: (Fetch, Fetched),
    LocalKind.CHECKPOINT_PROGRESS: (AskNews, ProgressReply),
    LocalKind.CHECKPOINT_FOLLOW: (Follow, Empty),
    LocalKind.CHECKPOINT_FOLLOW_NEWS: (AskNews, FollowNewsReply),
    LocalKind.CHECKPOINT_UPDATE: (Update, Updated),
    LocalKind.CHECKPOINT_UPDATE_NEWS: (AskNews, UpdateNewsReply),
    LocalKind.CHECKPOINT_LIST: (ListCheckpoints, ListedCheckpoints),
    LocalKind.CHECKPOINT_REMOVE: (RemoveCheckpoint, CheckpointRemoved),
}
"""Request and reply of each kind."""
REQUESTS: Final = {kind: request for kind, (request, _) in MESSAGES.items()}
REPLIES: Final = {kind: reply for kind, (_, reply) in MESSAGES.items()}
