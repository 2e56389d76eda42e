"""What peers of a swarm tell each other, beside the pieces themselves. Pure.

A piece is asked for by a request of its own and answered with its bytes, BUSY or LACKS; all else are one-way messages
on the same connection: first each side's map, then what is new, and grants. Bodies grow by appended fields.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Annotated, Final

import msgspec

from p2pstore.checkpoint.content.pieces import MAX_PIECES, PieceMap, map_of, unpack_map
from p2pstore.checkpoint.swarm.upload_slots import USUAL_SLOTS
from p2pstore.errors import ProtocolError
from p2pstore.wire import Message, decode_body

MAX_NEW_PIECES: Final = 4096
"""Of one `NewPieces`; whoever has more to tell sends its map."""
MAX_INTRODUCED: Final = 64
"""Members in one `Members`."""
ANY_PIECE: Final = -1


class Kind(IntEnum):
    """Which message it is, as sent. Numbers never change meaning."""

    PIECE_MAP = 1
    NEW_PIECES = 2
    GRANT = 3
    REFUSE = 4
    MEMBERS = 5
    NEEDS = 6
    INVITE = 7


class Refusal(IntEnum):
    """Why a grant is not used, or a piece not sent. Numbers never change meaning."""

    FULL = 1
    """Enough is on its way. A receiver that takes pieces again says so by the next piece that it has."""
    NOTHING = 2
    """The one who grants has nothing that is wanted now."""
    BUSY = 3
    """No slot is free; a grant will come."""
    LACKS = 4
    """The piece is not there."""
    LATER = 5
    """Enough is on its way; an `Invite` follows some time. Older peers take it for FULL."""


class PieceMapMessage(Message, frozen=True):
    """All that the sender has, as packed by `pack_map`: the first message of a connection, and whenever there is too
    much to tell."""

    pieces: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECES // 8)]


class NewPieces(Message, frozen=True):
    """Pieces that the sender has got since its last message of this kind."""

    pieces: Annotated[list[int], msgspec.Meta(max_length=MAX_NEW_PIECES)]


class Grant(Message, frozen=True):
    """The receiver may ask for one piece now: for this one, or for any."""

    piece: int = ANY_PIECE
    slots: int = USUAL_SLOTS
    """How many pieces the sender sends at once: so many receivers share its link."""


class Refuse(Message, frozen=True):
    """The grant is not used."""

    reason: int = Refusal.NOTHING


class Members(Message, frozen=True):
    """Others with whom the sender has links: who came in the last second is not known to all yet by gossip."""

    members: Annotated[list[int], msgspec.Meta(max_length=MAX_INTRODUCED)]


class Needs(Message, frozen=True):
    """All that the sender is to have in the end, as packed by `pack_map`: told by who is not to have everything, ahead
    of its map, and whenever it changes. Members that do not know this message offer it more, which it refuses."""

    pieces: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECES // 8)]


class Invite(Message, frozen=True):
    """There is room again: the sender refused a grant, and would take one now."""


SwarmMessage = PieceMapMessage | NewPieces | Grant | Refuse | Members | Needs | Invite

_TYPES: Final[dict[int, type[SwarmMessage]]] = {
    Kind.PIECE_MAP: PieceMapMessage,
    Kind.NEW_PIECES: NewPieces,
    Kind.GRANT: Grant,
    Kind.REFUSE: Refuse,
    Kind.MEMBERS: Members,
    Kind.NEEDS: Needs,
    Kind.INVITE: Invite,
}
_KINDS: Final = {message: kind for kind, message in _TYPES.items()}


def kind_of(message: SwarmMessage) -> int:
    """The number that the message is sent under."""
    return _KINDS[type(message)]


def decode_message(kind: int, body: bytes) -> SwarmMessage | None:
    """The message in `body`; None for a kind that this version does not know. Raises `ProtocolError`."""
    message_type = _TYPES.get(kind)
    return None if message_type is None else decode_body(message_type, body)


def map_in(message: PieceMapMessage | NewPieces | Needs, count: int) -> PieceMap:
    """The pieces that a message tells of, all of them below `count`. Raises `ProtocolError`."""
    if isinstance(message, PieceMapMessage | Needs):
        return unpack_map(message.pieces, count)
    if any(not 0 <= piece < count for piece in message.pieces):
        raise ProtocolError(f"a piece beyond the last of {count}")
    return map_of(message.pieces)


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
