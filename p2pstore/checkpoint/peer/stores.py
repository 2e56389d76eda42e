"""Where the pieces of a version are: what a swarm reads from, and writes to. Blocking, for worker threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.piece_map import PieceMap, full_map
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.runtime.streams import BytesLike


class PieceStore(Protocol):
    """A place for pieces: `TargetDirectory`, or `PublishedPieces`."""

    @property
    def have(self) -> PieceMap:
        """The pieces that are here and verified."""
        ...

    @property
    def needed(self) -> PieceMap:
        """The pieces that are to be here in the end."""
        ...

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        """Of the pieces that are needed, those that are made of others, which come first (`Manifest.copies`)."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether they are in memory or on a disk of this machine, as far as is known."""
        ...

    def read(self, piece: int, room: memoryview | None = None) -> BytesLike:
        """A piece that is here, in the beginning of `room` where there is some and that saves anything. Raises
        `OSError`, and `CheckpointChanged` when it is not what it was."""
        ...

    def write(self, piece: int, data: memoryview) -> bool:
        """Verify a piece and keep it. False when these are not its bytes. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Let go of the place; what is there stays."""
        ...


class Target(PieceStore, Protocol):
    """A place that pieces of one version come to: `TargetDirectory`, `MemoryTarget`."""

    @property
    def manifest(self) -> Manifest: ...

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool: ...

    def read_extents(self, extents: Sequence[Extent]) -> memoryview:
        """Ranges of files, one behind the other, in pieces that are here. Raises `OSError`."""
        ...


class PublishedSource(Protocol):
    """What was published: `SourceDirectory`, `SourceMemory`."""

    def read_piece(self, manifest: Manifest, piece: int) -> bytearray: ...


class PublishedPieces:
    """The `PieceStore` of who publishes: everything is there."""

    def __init__(self, source: PublishedSource, manifest: Manifest) -> None:
        self.is_local = False  # links may lead anywhere, and files may be cold
        self._source = source
        self._manifest = manifest

    @property
    def have(self) -> PieceMap:
        return full_map(self._manifest.layout.count)

    @property
    def needed(self) -> PieceMap:
        return self.have

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        return self._manifest.copies

    def read(self, piece: int, room: memoryview | None = None) -> BytesLike:
        return self._source.read_piece(self._manifest, piece)

    def write(self, piece: int, data: memoryview) -> bool:
        """Nothing is missing, so nothing is fetched. Raises `ValueError`."""
        raise ValueError("what is published is written by nobody")

    def close(self) -> None:
        """Nothing is held open."""
