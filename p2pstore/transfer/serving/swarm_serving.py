"""What a data server needs of the swarms of its peer: pieces to send, and links to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_messages import GetPiece, PieceReply
from p2pstore.transfer.frame_link import FrameLink


@dataclass(frozen=True, slots=True)
class OpenedPiece:
    """A piece that is about to be sent; `handle` is the backend's own."""

    data: BytesLike
    handle: Any


class OfferedLink(Protocol):
    """A link that another peer asked for, and may have."""

    async def run(self, link: FrameLink) -> None:
        """Use it until it ends. Raises what `FrameLink` raises."""
        ...


class SwarmBackend(Protocol):
    """What the peer does with requests of other members of its swarms. `peer` is the one who asks, proved."""

    async def open_piece(self, request: GetPiece, peer: bytes) -> OpenedPiece | PieceReply:
        """The piece, or why not. Every `OpenedPiece` is given back by `piece_sent`, whatever happens."""
        ...

    def piece_sent(self, opened: OpenedPiece, whole: bool) -> None:
        """The end of `open_piece`: the other side has all of it, or will not."""
        ...

    def take_link(self, version: bytes, peer: bytes) -> OfferedLink:
        """Take a link. Raises `NoSuchKey` when there is no swarm of this version here, and `Unavailable` when the link
        is not wanted now."""
        ...
