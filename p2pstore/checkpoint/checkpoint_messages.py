"""Messages on the local socket about checkpoints. Pure.

What a client publishes, or fetches to, is a directory that it opened itself: its descriptor comes along with the HELLO
of a connection of its own (`Hello.directory`). What was begun on that connection and is not done ends with it; so
whoever goes away, by Ctrl-C or otherwise, leaves nothing running.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from p2pstore.checkpoint.content.pieces import MAX_PIECES
from p2pstore.wire import Message

MAX_PATTERNS: Final = 256
Patterns = Annotated[list[str], Meta(max_length=MAX_PATTERNS)]


class Publish(Message, frozen=True):
    """Publish the connection's directory. Answered when others can fetch it; with `wait_seeded`, when the others have
    every piece of it among them."""

    namespace: str
    name: str
    include: Patterns = []  # msgspec copies it
    exclude: Patterns = []  # msgspec copies it
    piece_bytes: int = 0
    wait_seeded: bool = False
    path: str = ""
    """How the client calls the directory: for people."""
    file: str = ""
    """What came along is no directory but sealed memory, with this one file in it."""


class Published(Message, frozen=True):
    """The version that it is now."""

    version: bytes
    files: int
    total_bytes: int
    pieces: int
    piece_bytes: int


class Fetch(Message, frozen=True):
    """Fetch a version to the connection's directory. `version`: hexadecimal digits that it begins with, or nothing
    for the newest; `publisher` a peer id, or nothing for the one who is trusted for the name. Answered when it is in
    its place."""

    namespace: str
    name: str
    version: str = ""
    publisher: bytes = b""
    flat: bool = False
    keep: int = 2
    limit_bytes_per_second: int = 0
    verify: bool = False
    wait_ms: int = 0
    path: str = ""
    memory: bool = False
    """To memory instead, for this client: who says HELLO with the version then, while this connection is open, has it
    passed."""
    include: Patterns = []  # msgspec copies it
    exclude: Patterns = []  # msgspec copies it
    pieces: Annotated[bytes, Meta(max_length=MAX_PIECES // 8)] | None = None
    """To memory: only these, as packed by `pack_map`; empty for none yet, None for all."""


class Fetched(Message, frozen=True):
    """It is there. `directory` is where, from the connection's directory on; of `total_bytes` so many came over the
    network, the others were there. `whole`: all its files are there. `unmatched`: patterns that match no file."""

    version: bytes
    directory: str
    total_bytes: int
    fetched_bytes: int
    whole: bool = True
    unmatched: list[str] = []  # msgspec copies it


class Progress(Message, frozen=True):
    """How far is what was begun on this connection? Answered when that is not `seen` any more, or after `wait_ms`."""

    seen: int = 0
    wait_ms: int = 0


class ProgressReply(Message, frozen=True):
    """`number` grows with each change. `phase` is a `JobPhase`; `ended`: the answer is on its way. `members` are those
    with whom pieces are exchanged."""

    number: int
    phase: str
    done_bytes: int
    total_bytes: int
    ended: bool = False
    members: int = 0
    version: bytes = b""


class Follow(Message, frozen=True):
    """Have each version of a name fetched to the connection's directory, and used when its publisher says so.
    `publisher` is a peer id, or nothing for the one who is trusted for the name. Answered when that fails."""

    namespace: str
    name: str
    publisher: bytes = b""
    keep: int = 2
    path: str = ""
    """How the client calls the directory: for people."""
    include: list[str] = []  # msgspec copies it
    exclude: list[str] = []


class FollowNews(Message, frozen=True):
    """How is the follow of this connection? Answered when that is not `seen` any more, or after `wait_ms`."""

    seen: int = 0
    wait_ms: int = 0


class FollowNewsReply(Message, frozen=True):
    """`version` is the one to be used next, or in use; `stage` a `checkpoint.group.Stage`; `current` the one in use;
    `why` something failed. Versions are empty where there is none."""

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
    """Have all who follow this peer's name switch to its newest version, when all of them have it, or, with a
    `quorum` that is not negative, as many. Nobody switches when that is not so within the time."""

    namespace: str
    name: str
    timeout_ms: int
    quorum: int = -1


class UpdateNews(Message, frozen=True):
    """How far is the update of this connection? Answered when that is not `seen` any more, or after `wait_ms`."""

    seen: int = 0
    wait_ms: int = 0


class FollowerEntry(Message, frozen=True):
    """A follower that an update waits for. `dead`: nothing is heard of it any more."""

    peer_id: bytes
    name: str
    stage: str
    done_permille: int = 0
    why: str = ""
    dead: bool = False


class UpdateNewsReply(Message, frozen=True):
    """Of `followers`, so many have the version (`ready`), and use it (`using`); `laggards` are those that are waited
    for."""

    number: int
    version: bytes
    followers: int
    ready: int
    using: int
    switched: bool
    laggards: list[FollowerEntry] = []  # msgspec copies it
    ended: bool = False


class Updated(Message, frozen=True):
    """The end of an update. `switched` says whether the version is the one to use from now on; `superseded`, that it is
    not because there is a newer one. `laggards`: who does not have it, or, once switched, does not use it yet."""

    version: bytes
    switched: bool
    superseded: bool
    followers: int
    ready: int
    using: int
    laggards: list[FollowerEntry] = []  # msgspec copies it


class ListCheckpoints(Message, frozen=True):
    """Which names are published in a namespace (all, if empty)? With `name`, that one, and what members have of it."""

    namespace: str = ""
    name: str = ""


class MemberEntry(Message, frozen=True):
    """What a member has of a name. `version` and `current` are the first 8 bytes; `state` is a `TakesPart`, in lower
    case. `bytes_per_second` is what it fetched at so far, 0 where that is not known."""

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
    """A name of one publisher. `switched` is the version that followers are to use, empty when none was named.
    `trusted`: this peer takes the name from this publisher; `mine`: it is the publisher; `alive`: the publisher is."""

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
    members: list[MemberEntry] = []  # msgspec copies it


class Checkpoints(Message, frozen=True):
    items: list[CheckpointEntry]


class RemoveCheckpoint(Message, frozen=True):
    """Say that a name of this peer's is gone, and give its versions away no more. With a publisher: do not show and
    trust that one's name any more on this peer, until it says something new of it."""

    namespace: str
    name: str
    publisher: bytes = b""


class CheckpointRemoved(Message, frozen=True):
    version: bytes
