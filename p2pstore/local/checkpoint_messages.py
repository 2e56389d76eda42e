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
