"""The interface between a data server and its peer: answers to requests, stored values, pieces and links of swarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_frames import FrameLink
from p2pstore.transfer.data_messages import DataKind, GetItem, GetPiece, PieceReply, Store, Stored
from p2pstore.transfer.rdma.rdma_serving import RdmaServer
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.serving.read_answers import ReadSource
from p2pstore.wire import Message


@dataclass(frozen=True, slots=True)
class OpenedPiece:
    """A piece that is about to be sent; `handle` is the backend's own."""

    data: BytesLike
    handle: Any


class OfferedLink(Protocol):
    """A link that another peer asked for, and may have."""

    async def run(self, link: FrameLink) -> None:
        """Use it until it ends. Raises what `FrameLink` raises."""


class SwarmBackend(Protocol):
    """The peer's answers to requests of other members of its swarms. `peer`: the authenticated asker."""

    async def open_piece(self, request: GetPiece, peer: bytes) -> OpenedPiece | PieceReply:
        """The piece, or why not. Every `OpenedPiece` is given back by `piece_sent`, whatever happens."""

    def piece_sent(self, opened: OpenedPiece, whole: bool) -> None:
        """The end of `open_piece`: the other side has all of it, or will not."""

    def take_link(self, version: bytes, peer: bytes) -> OfferedLink:
        """Take a link. Raises `NoSuchKey` when there is no swarm of this version here, and `Unavailable` when the link
        is not wanted now."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Room for a value: `payload` is where it goes, `sums` are its chunk sums. `handle` is the backend's
    own."""

    payload: memoryview
    sums: bytes
    handle: Any


class StoreBackend(Protocol):
    """Where values that others store here go. A `P2PStoreError` or `ValueError` is sent as a failure."""

    async def begin_store(self, request: Store, claims: TicketClaims) -> OpenedStore | Stored:
        """Make room for a value, or say what became of the put without its bytes.

        Every `OpenedStore` ends with `abandon_store`, whatever happens.
        """

    async def finish_store(self, opened: OpenedStore) -> Stored:
        """The value is there, and every chunk of it as announced: put it."""

    def abandon_store(self, opened: OpenedStore) -> None:
        """Nothing writes to `opened.payload` any more: give the room back, unless the put was finished."""


class DataBackend(ReadSource, Protocol):
    """The peer behind its data connections."""

    def must_bring(self, items: Sequence[GetItem]) -> bool:
        """Whether some of these must be brought to memory before they can be lent."""

    async def bring(self, items: Sequence[GetItem]) -> None:
        """Bring them. Whatever keeps one from it, `lend` says; cancelled when the connection ends."""

    def note_reads(self, counts: Mapping[bytes, int]) -> None:
        """Count reads of these objects, by digest. A read in several requests, or from several holders,
        reads it once."""

    async def handle(
        self, kind: DataKind, message: Message, claims: TicketClaims
    ) -> tuple[Message, Sequence[BytesLike]]:
        """Answer any other request: the reply and its bulk. Its `P2PStoreError` or `ValueError` is sent
        as a failure. Cancelled when the connection ends. Bulk bytes that came along were skipped.
        `answered` follows, before any other task runs."""

    def answered(self) -> None:
        """Do what the answer did not wait for: it was sent, as far as the socket took it at once, or never will be."""


@dataclass(frozen=True, slots=True)
class Backends:
    """The parts of a peer behind its data connections; None for those that it lacks."""

    objects: DataBackend
    stores: StoreBackend | None = None
    rdma: RdmaServer | None = None
    swarms: SwarmBackend | None = None
