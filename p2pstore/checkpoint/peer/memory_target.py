"""A version in memory that clients of this host map read-only. Shell; `write` and `read` are for worker threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from p2pstore.checkpoint.content.manifest import SignedManifest
from p2pstore.checkpoint.content.memory_layout import plan_memory
from p2pstore.checkpoint.content.piece_map import NO_PIECES, PieceMap, full_map
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.errors import StoreClosed
from p2pstore.memory.mapped.mapped_memory import create_table_memory


class MemoryTarget:
    """A `Target` in a memfd: a page counts once something was written to it."""

    def __init__(self, signed: SignedManifest, needed: PieceMap | None = None) -> None:
        """`signed` must have been verified. `needed`: the pieces that are wanted; None: all. Raises `ConfigError` where
        there can be no such memory."""
        self.manifest = signed.manifest
        self.signed = signed
        self.version = signed.version
        sizes = [file.size for file in self.manifest.files]
        self.layout = plan_memory(sizes, len(signed.body))
        self._memory = create_table_memory(self.layout.total_bytes, "p2pstore-checkpoint")
        self._memory.view[self.layout.manifest : self.layout.total_bytes] = signed.body
        self.is_local = True
        self._have = NO_PIECES
        self.needed = full_map(self.manifest.layout.count) if needed is None else needed
        """The pieces that somebody wants; more may be, later."""
        self.copies = self.manifest.copies_among(self.needed)
        self._lock = threading.Lock()
        self._closed = False
        self.descriptor = self._memory.read_only_descriptor()
        """For clients, as long as this is open."""

    @property
    def have(self) -> PieceMap:
        return self._have

    @property
    def used_bytes(self) -> int:
        """What it takes when all that is wanted is here."""
        layout = self.manifest.layout
        if self.needed == full_map(layout.count):
            return self.layout.total_bytes
        return layout.size_of(self.needed) + self.layout.total_bytes - self.layout.manifest

    def bytes_more(self, pieces: PieceMap) -> int:
        """How much more it takes when these are wanted, too."""
        return self.manifest.layout.size_of(pieces & ~self.needed)

    @property
    def closed(self) -> bool:
        """Whether its memory was given back."""
        return self._closed

    def write(self, piece: int, data: bytes | bytearray | memoryview) -> bool:
        """Verify a piece and keep it. False when these are not its bytes. A piece that is here is never written
        again: clients look at it."""
        if not self.manifest.is_piece(piece, data):
            return False
        with self._lock:
            if self._have >> piece & 1:
                return True
            view = memoryview(data)
            for file, offset, length in self.manifest.layout.extents(piece):
                at = self.layout.files[file] + offset
                self._open_view[at : at + length] = view[:length]
                view = view[length:]
            self._have |= 1 << piece
        return True

    def read(self, piece: int, room: memoryview | None = None) -> memoryview:
        """A piece that is here, for others; in `room` where there is some."""
        return self.read_extents(self.manifest.layout.extents(piece), room)

    def read_extents(self, extents: Sequence[Extent], room: memoryview | None = None) -> memoryview:
        """Ranges of files, one behind the other, in pieces that are here; in `room` where there is some."""
        size = sum(extent.length for extent in extents)
        data = memoryview(bytearray(size)) if room is None else room[:size]
        left = data
        with self._lock:
            for file, offset, length in extents:
                at = self.layout.files[file] + offset
                left[:length] = self._open_view[at : at + length]
                left = left[length:]
        return data

    def close(self) -> None:
        """Let go of the memory; what clients have mapped stays as long as they do. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)
                self._memory.close()

    @property
    def _open_view(self) -> memoryview:
        if self._closed:
            raise StoreClosed("the memory of this version was given back")
        return self._memory.view
