"""What is to be published or fetched, and what came of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, full_map, unpack_map
from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import PeerId


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """What to publish; see `local.checkpoint_messages.Publish`."""

    namespace: str
    name: str
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    piece_bytes: int = 0
    wait_seeded: bool = False


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """What to fetch, and how; see `local.checkpoint_messages.Fetch`. Without `switch`, it is brought and verified, and
    put in its place by `Fetching.commit` later."""

    namespace: str
    name: str
    version: str = ""
    publisher: PeerId | None = None
    flat: bool = False
    keep: int = 2
    bytes_per_second: int = 0
    verify: bool = False
    wait_seconds: float = 0.0
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    pieces: bytes | None = None
    """To memory: what is wanted, as packed by `pack_map`, empty for nothing yet; None for everything."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is in its place, or as much of it as was wanted. `fetched_bytes` came over the network."""

    version: bytes
    total_bytes: int
    fetched_bytes: int
    whole: bool = True
    unmatched: tuple[str, ...] = ()
    """Patterns that match no file."""


def pieces_ordered(order: FetchOrder, manifest: Manifest) -> PieceMap:
    """The pieces that are to come to memory. Raises `ValueError` for pieces that do not exist."""
    count = manifest.layout.count
    if order.pieces is None:
        return full_map(count)
    try:
        return unpack_map(order.pieces, count) if order.pieces else NO_PIECES
    except ProtocolError as error:
        raise ValueError(f"pieces of checkpoint {manifest.name!r}: {error}") from error
