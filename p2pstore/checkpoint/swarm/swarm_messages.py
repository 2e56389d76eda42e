"""What peers of a swarm tell each other, beside the pieces themselves. Pure.

A piece is asked for by a request of its own and answered with its bytes, BUSY or LACKS; all else are one-way messages
on the same connection: first each side's map, then what is new, and grants. Bodies grow by appended fields.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec

from p2pstore.checkpoint.content.piece_map import PieceMap, map_of, unpack_map
from p2pstore.checkpoint.content.pieces import MAX_PIECES
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
