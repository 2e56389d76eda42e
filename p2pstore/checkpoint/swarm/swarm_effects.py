"""What happens to a peer of a swarm, and what it asks of its shell. Pure.

Members are named by numbers (the short names of peers). All are plain values.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from p2pstore.checkpoint.content.piece_map import PieceMap
from p2pstore.checkpoint.swarm.swarm_messages import Refusal, SwarmMessage

# --- events ----------------------------------------------------------------------------------


class Participants(msgspec.Struct, frozen=True, gc=False):
    """All that are known to have or to want this version, as gossip says it, and which of them are on this host;
    this peer may be among them."""

    members: frozenset[int]
    here: frozenset[int] = frozenset()


class Linked(msgspec.Struct, frozen=True, gc=False):
    """There is a connection to this member now, whoever made it."""

    member: int
    same_host: bool = False


class Unlinked(msgspec.Struct, frozen=True, gc=False):
    """The connection to this member ended, or could not be made."""

    member: int


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message came."""

    member: int
    message: SwarmMessage


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A member asks for a piece: answered by `Serve` or `Decline`."""

    member: int
    piece: int


class Served(msgspec.Struct, frozen=True, gc=False):
    """A piece was sent; `whole` unless that ended before its end. Comes once for each `Serve`."""

    member: int
    piece: int
    whole: bool = True


class PieceArrived(msgspec.Struct, frozen=True, gc=False):
    """A piece came, has the right hash, and is where it can be served from. Comes, or `PieceFailed`, once for each
    `Fetch`, except after `Abandon`; but also then it may come."""

    member: int
    piece: int


class Failure(Enum):
    """Why a piece did not come."""

    BUSY = "no slot was free"
    LACKS = "the member does not have it"
    LOST = "the connection failed"
    BAD = "it had the wrong hash"


class PieceFailed(msgspec.Struct, frozen=True, gc=False):
    """A piece did not come."""

    member: int
    piece: int
    why: Failure


class Needed(msgspec.Struct, frozen=True, gc=False):
    """These pieces are to be brought here, too."""

    pieces: PieceMap


class Found(msgspec.Struct, frozen=True, gc=False):
    """These pieces are here now though no member sent them: they are copies of others that came."""

    pieces: PieceMap


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The time that `Swarm.wake_at` named has come."""


Event = (
    Participants
    | Linked
    | Unlinked
    | Received
    | Asked
    | Served
    | PieceArrived
    | PieceFailed
    | Needed
    | Found
    | Tick
)

# --- effects ---------------------------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Make a connection to this member; `Linked` or `Unlinked` follows."""

    member: int


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """End the connection; no `Unlinked` is expected. `banned`: and take no other from this member for this version."""

    member: int
    banned: bool = False


class Tell(msgspec.Struct, frozen=True, gc=False):
    """Send a message to these members."""

    members: tuple[int, ...]
    message: SwarmMessage


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Ask this member for a piece, verify it and store it: `PieceArrived` or `PieceFailed`. `same_host`: by
    memory or a hard link. The deadline is the machine's: it says `Abandon`."""

    member: int
    piece: int
    same_host: bool = False


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """Stop fetching the piece from this member."""

    member: int
    piece: int


class Serve(msgspec.Struct, frozen=True, gc=False):
    """Answer with the piece; then `Served`."""

    member: int
    piece: int


class Decline(msgspec.Struct, frozen=True, gc=False):
    """Answer that the piece is not sent: BUSY (with how many wait) or LACKS."""

    member: int
    piece: int
    why: Refusal
    waiting: int = 0


class Complete(msgspec.Struct, frozen=True, gc=False):
    """All pieces that are needed are here. Comes once, and once more for what `Needed` brings."""


Effect = Connect | Disconnect | Tell | Fetch | Abandon | Serve | Decline | Complete
