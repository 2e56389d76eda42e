"""Making a manifest: all bytes of a directory, or of tensors, are read once and hashed, in threads side by side. Shell.

A large file is one thread's, step by step, as its own hash needs its bytes in order; small files go by the pieces that
they share. A step reads 64 MiB at most, so that cancelling takes effect soon. Reading and BLAKE3 let go of the
interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import trio
from blake3 import blake3

from p2pstore.checkpoint.manifest import HASH_BYTES, FileEntry, Manifest, hash_of, make_manifest
from p2pstore.checkpoint.pieces import LARGEST_USUAL, Extent, PieceLayout, choose_piece_bytes
from p2pstore.errors import CheckpointChanged

STEP_BYTES: Final = LARGEST_USUAL
BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Of a file in memory at once, for each thread: both hashes find it in the cache."""
MOST_THREADS: Final = 16

Progress = Callable[[int], None]
"""Told of so many more bytes that were hashed."""


class SourceEntry(Protocol):
    """A file or a tensor, as a manifest describes it, but its hash."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """What is published: `SourceDirectory` or `SourceMemory`."""

    @property
    def files(self) -> Sequence[SourceEntry]: ...

    def read(self, extents: Sequence[Extent]) -> bytearray: ...

    def check(self) -> None: ...


async def hash_source(
    source: Source,
    name: str,
    *,
    piece_bytes: int = 0,
    previous_piece_bytes: int = 0,
    threads: int = 0,
    progress: Progress = lambda count: None,
) -> Manifest:
    """The manifest of all files, or tensors. `piece_bytes` and `threads`: 0 for the usual, by size and by cores;
    `previous_piece_bytes` is that of the version before, see `choose_piece_bytes`.

    Raises `CheckpointChanged` when a file changes meanwhile, `CheckpointRefused` for a name or sizes that a manifest
    cannot have, `OSError` when a file cannot be read.
    """
    sizes = [file.size for file in source.files]
    layout = PieceLayout(sizes, piece_bytes or choose_piece_bytes(sizes, previous_piece_bytes))
    work = _Hashing(source, layout)
    jobs = iter(work.jobs())
    limiter = trio.CapacityLimiter(threads or min(MOST_THREADS, os.cpu_count() or 1))

    failures: list[Exception] = []

    async def worker() -> None:
        try:
            for job in jobs:
                for step in job:
                    progress(await trio.to_thread.run_sync(step, limiter=limiter))
        except (CheckpointChanged, OSError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(int(limiter.total_tokens)):
            nursery.start_soon(worker)
    if failures:
        raise failures[0]
    await trio.to_thread.run_sync(source.check, limiter=limiter)
    files = [
        FileEntry(
            file.path, file.size, file.mode, work.file_hashes[number], file.dtype, list(file.shape)
        )
        for number, file in enumerate(source.files)
    ]
    return make_manifest(name, files, layout.piece_bytes, bytes(work.piece_hashes))


Step = Callable[[], int]
"""Some work for a thread; returns how many bytes it hashed."""


class _Hashing:
    """What there is to hash, and the hashes. Each step writes to places of its own."""

    def __init__(self, source: Source, layout: PieceLayout) -> None:
        self.file_hashes = [hash_of(b"")] * len(source.files)
        self.piece_hashes = bytearray(HASH_BYTES * layout.count)
        self._source = source
        self._layout = layout

    def jobs(self) -> Iterator[Iterator[Step]]:
        """Jobs are done side by side, the steps of each one after the other; the longest first."""
        large = [
            file
            for file, size in enumerate(self._layout.file_sizes)
            if size >= self._layout.piece_bytes
        ]
        for file in sorted(large, key=lambda file: -self._layout.file_sizes[file]):
            yield self._steps_of_file(file)
        shared_from = sum(len(self._layout.pieces_of(file)) for file in large)
        for piece in range(shared_from, self._layout.count):
            yield iter([partial(self._hash_shared, piece)])

    def _steps_of_file(self, file: int) -> Iterator[Step]:
        hasher = blake3()
        pieces = self._layout.pieces_of(file)
        at_once = max(1, STEP_BYTES // self._layout.piece_bytes)
        for first in range(pieces.start, pieces.stop, at_once):
            some = range(first, min(first + at_once, pieces.stop))
            yield partial(self._hash_pieces, some, hasher)
        self.file_hashes[file] = hasher.digest()

    def _hash_pieces(self, pieces: range, hasher: blake3) -> int:
        total = 0
        for piece in pieces:
            ((file, begin, length),) = self._layout.extents(piece)
            of_piece = blake3()
            for offset in range(begin, begin + length, BLOCK_BYTES):
                block = Extent(file, offset, min(BLOCK_BYTES, begin + length - offset))
                data = self._source.read([block])
                of_piece.update(data)
                hasher.update(data)
            self._set(piece, of_piece.digest())
            total += length
        return total

    def _hash_shared(self, piece: int) -> int:
        extents = self._layout.extents(piece)
        data = self._source.read(extents)
        self._set(piece, hash_of(data))
        view = memoryview(data)
        for extent in extents:
            self.file_hashes[extent.file] = hash_of(view[: extent.length])
            view = view[extent.length :]
        return len(data)

    def _set(self, piece: int, digest: bytes) -> None:
        self.piece_hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES] = digest
