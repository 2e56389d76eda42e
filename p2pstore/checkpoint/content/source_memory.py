"""A file that is published from memory, as a trainer has it. Shell; blocking, for worker threads.

Whoever publishes wrote it to a memfd and sealed that, so that nobody can change or cut it any more; this process reads
it from there for as long as it is published, and keeps no copy.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from p2pstore.checkpoint.content.content_paths import check_path
from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.source_directory import SourceFile
from p2pstore.errors import CheckpointChanged, CheckpointRefused

MODE: Final = 0o644
"""Of the file where it is fetched to a directory."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SourceMemory:
    """One file in sealed memory. Close it when it is published no more."""

    def __init__(self, descriptor: int, path: str) -> None:
        """`descriptor` stays the caller's. Raises `CheckpointRefused` for what is not sealed memory, and for a path
        that a file cannot have."""
        check_path(path)
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except (OSError, ValueError):  # no descriptor, or none of memory
            seals = 0
        if seals & SEALS != SEALS:
            raise CheckpointRefused(
                f"{path}: it came in no memory, or in memory that may still change"
            )
        found = os.fstat(descriptor)
        self.files = [SourceFile(path, found.st_size, MODE, (0, found.st_dev, found.st_ino))]
        self._descriptor = os.dup(descriptor)

    @property
    def total_bytes(self) -> int:
        """The file's length."""
        return self.files[0].size

    def read(self, extents: Sequence[Extent]) -> bytearray:
        """The bytes of these ranges, one behind the other. Raises `OSError`."""
        data = bytearray(sum(extent.length for extent in extents))
        view = memoryview(data)
        for extent in extents:
            part, view = view[: extent.length], view[extent.length :]
            offset = extent.offset
            while part:
                count = os.preadv(self._descriptor, [part], offset)
                if not count:
                    raise EOFError(f"{self.files[0].path} ends before byte {offset:,}")
                part, offset = part[count:], offset + count
        return data

    @contextmanager
    def opened(self, file: int) -> Iterator[int]:
        """The memory, as a file; `file` is 0."""
        del file
        yield self._descriptor

    def check(self) -> None:
        """Nobody can change it."""

    def read_piece(self, manifest: Manifest, piece: int) -> bytearray:
        """A piece of the manifest that was made of it. Raises `CheckpointChanged` when memory failed."""
        data = self.read(manifest.layout.extents(piece))
        if not manifest.is_piece(piece, data):
            raise CheckpointChanged(f"{self.files[0].path}: not the bytes that were published")
        return data

    def close(self) -> None:
        """Let go of the memory; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
