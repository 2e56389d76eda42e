"""A version in memory that clients of this host map read-only. Shell; `write` and `read` are for worker threads."""

from __future__ import annotations

import os
import threading

from p2pstore.checkpoint.manifest import SignedManifest, read_manifest, version_of
from p2pstore.checkpoint.memory_layout import plan_memory
from p2pstore.checkpoint.piece_map import NO_PIECES, PieceMap
from p2pstore.errors import StoreClosed
from p2pstore.transfer.memory import create_table_memory


class MemoryTarget:
    """A `Target` in a memfd: a page counts once something was written to it."""

    def __init__(self, signed: SignedManifest) -> None:
        """`signed` must have been verified. Raises `ConfigError` where there can be no such memory."""
        self.manifest = read_manifest(signed.body)
        self.version = version_of(signed.body)
        sizes = [file.size for file in self.manifest.files]
        self.layout = plan_memory(sizes, len(signed.body))
        self._memory = create_table_memory(self.layout.total_bytes, "p2pstore-checkpoint")
        self._memory.view[self.layout.manifest : self.layout.total_bytes] = signed.body
        self.is_local = True
        self._have = NO_PIECES
        self._lock = threading.Lock()
        self._closed = False
        self.descriptor = self._memory.read_only_descriptor()
        """For clients, as long as this is open."""

    @property
    def have(self) -> PieceMap:
        return self._have

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

    def read(self, piece: int) -> bytearray:
        """A piece that is here, for others."""
        data = bytearray()
        with self._lock:
            for file, offset, length in self.manifest.layout.extents(piece):
                at = self.layout.files[file] + offset
                data += self._open_view[at : at + length]
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
