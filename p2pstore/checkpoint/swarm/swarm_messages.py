"""Messages between peers of a swarm, and the events and effects of one peer's state machine. Pure.

A piece is requested on a connection of its own, and answered with its bytes, BUSY or LACKS. The messages here are
one-way, on links: first each side's map, then news and grants. Bodies grow by appended fields. Members are short names.
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
"""Of one `NewPieces`; for more, a peer sends its map."""
MAX_INTRODUCED: Final = 64
"""Members in one `Members`."""
ANY_PIECE: Final = -1


class Kind(IntEnum):
    """Kinds of messages. Numbers never change meaning."""

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
    """Enough pieces are on their way. The receiver's next news say that it takes pieces again."""
    NOTHING = 2
    """The sender has no piece that the receiver wants now."""
    BUSY = 3
    """No slot is free; a grant will come."""
    LACKS = 4
    """The piece is not there."""
    LATER = 5
    """Enough pieces are on their way; an `Invite` follows. Older peers take it for FULL."""


class PieceMapMessage(Message, frozen=True):
    """All that the sender has, as packed by `pack_map`: the first message of a link, and after that for many news."""

    pieces: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECES // 8)]


class NewPieces(Message, frozen=True):
    """Pieces that came to the sender since its last message of this kind."""

    pieces: Annotated[list[int], msgspec.Meta(max_length=MAX_NEW_PIECES)]


class Grant(Message, frozen=True):
    """The receiver may ask for one piece now: this one, or any."""

    piece: int = ANY_PIECE
    slots: int = USUAL_SLOTS
    """Pieces that the sender sends at once, which share its link."""


class Refuse(Message, frozen=True):
    """The grant is not used."""

    reason: int = Refusal.NOTHING


class Members(Message, frozen=True):
    """Others that the sender has links with: gossip does not yet know members of the last second."""

    members: Annotated[list[int], msgspec.Meta(max_length=MAX_INTRODUCED)]


class Needs(Message, frozen=True):
    """All that the sender is to have in the end, as packed by `pack_map`: sent by peers that need some pieces only,
    ahead of their map and after changes. Members that do not know this message offer them more, which they refuse."""

    pieces: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECES // 8)]


class Invite(Message, frozen=True):
    """The sender refused a grant, and would take one now."""


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
    return _KINDS[type(message)]


def decode_message(kind: int, body: bytes) -> SwarmMessage | None:
    """The message in `body`; None for an unknown kind. Raises `ProtocolError`."""
    message_type = _TYPES.get(kind)
    return None if message_type is None else decode_body(message_type, body)


def map_in(message: PieceMapMessage | NewPieces | Needs, count: int) -> PieceMap:
    """The pieces in a message, all below `count`. Raises `ProtocolError`."""
    if isinstance(message, PieceMapMessage | Needs):
        return unpack_map(message.pieces, count)
    if any(not 0 <= piece < count for piece in message.pieces):
        raise ProtocolError(f"a piece beyond the last of {count}")
    return map_of(message.pieces)


# --- events ----------------------------------------------------------------------------------


class Participants(msgspec.Struct, frozen=True, gc=False):
    """All members that, by gossip, have or want this version, and those on this host; perhaps with this peer."""

    members: frozenset[int]
    here: frozenset[int] = frozenset()


class Linked(msgspec.Struct, frozen=True, gc=False):
    """There is a link to this member now, dialed by either side."""

    member: int
    same_host: bool = False


class Unlinked(msgspec.Struct, frozen=True, gc=False):
    """The link ended, or could not be made."""

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
    """A piece was sent; without `whole`, only in part. Comes once for each `Serve`."""

    member: int
    piece: int
    whole: bool = True


class PieceArrived(msgspec.Struct, frozen=True, gc=False):
    """A piece came, is verified, and can be served. This or `PieceFailed` follows each `FetchPiece`; not each
    `Abandon`."""

    member: int
    piece: int


class PieceFailure(Enum):
    """Why a piece did not come."""

    BUSY = "no slot was free"
    LACKS = "the member does not have it"
    LOST = "the connection failed"
    BAD = "it had the wrong hash"


class PieceFailed(msgspec.Struct, frozen=True, gc=False):
    """A piece did not come."""

    member: int
    piece: int
    why: PieceFailure


class Needed(msgspec.Struct, frozen=True, gc=False):
    """Bring these pieces here as well."""

    pieces: PieceMap


class Found(msgspec.Struct, frozen=True, gc=False):
    """Pieces are here though no member sent them: they are copies of others."""

    pieces: PieceMap


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The time of `Swarm.wake_at` has come."""


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
    """Make a link to this member; `Linked` or `Unlinked` follows."""

    member: int


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """End the link, without `Unlinked`. `banned`: and take no other from this member for this version."""

    member: int
    banned: bool = False


class Tell(msgspec.Struct, frozen=True, gc=False):
    """Send a message to these members."""

    members: tuple[int, ...]
    message: SwarmMessage


class FetchPiece(msgspec.Struct, frozen=True, gc=False):
    """Ask this member for a piece and store it; the machine watches the deadline, and says `Abandon`."""

    member: int
    piece: int
    same_host: bool = False


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """Stop fetching the piece from this member."""

    member: int
    piece: int


class Serve(msgspec.Struct, frozen=True, gc=False):
    """Answer with the piece; `Served` follows."""

    member: int
    piece: int


class Decline(msgspec.Struct, frozen=True, gc=False):
    """Answer that the piece is not sent: BUSY (and the length of the queue) or LACKS."""

    member: int
    piece: int
    why: Refusal
    waiting: int = 0


class Complete(msgspec.Struct, frozen=True, gc=False):
    """All needed pieces are here. Comes once, and once more after `Needed`."""


Effect = Connect | Disconnect | Tell | FetchPiece | Abandon | Serve | Decline | Complete
