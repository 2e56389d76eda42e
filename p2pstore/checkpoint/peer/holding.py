"""Stores of pieces that keep open, or keep account of, what they read from. Shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.source_memory import SourceMemory
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.checkpoint.peer.held_directory import HeldDirectory
from p2pstore.checkpoint.peer.memories import Memories
from p2pstore.checkpoint.peer.stores import PieceStore, PublishedPieces


class Holding:
    """A store that keeps its directory open."""

    def __init__(self, store: PieceStore, directory: HeldDirectory) -> None:
        self._store = store
        self._directory = directory
        self.is_local = store.is_local
        self.read = store.read
        self.write = store.write

    @property
    def have(self) -> int:
        return self._store.have

    @property
    def needed(self) -> int:
        return self._store.needed

    @property
    def copies(self) -> Mapping[int, Sequence[Extent]]:
        return self._store.copies

    def fetched_to(self, directory: HeldDirectory) -> bool:
        """Whether it was fetched to this directory."""
        fetched = isinstance(self._store, TargetDirectory)
        return fetched and self._directory.identity == directory.identity

    def close(self) -> None:
        """Let go of both."""
        self._store.close()
        self._directory.close()


class PublishedMemory(PublishedPieces):
    """What is published from memory, which counts as long as it is there."""

    def __init__(
        self, source: SourceMemory, manifest: Manifest, version: bytes, memories: Memories
    ) -> None:
        super().__init__(source, manifest)
        self._memory, self._version, self._memories = source, version, memories
        self.is_local = True
        memories.published[version] = source.total_bytes

    def close(self) -> None:
        self._memories.published.pop(self._version, None)
        self._memory.close()
