"""Reading and hashing pieces, to make manifests and to verify what was fetched. Shell.

All bytes are read once, by more threads than cores: each has a read under way when it does not hash. A thread takes
neighbouring pieces of one file, up to 16 MiB or one piece, so that a cancellation takes effect soon. Reads and BLAKE3
release the GIL.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio
from blake3 import blake3

from p2pstore.checkpoint.content.directory_versions import read_fully
from p2pstore.checkpoint.content.manifest import (
    HASH_BYTES,
    FileEntry,
    FileHashes,
    Manifest,
    hash_of,
    make_manifest,
)
from p2pstore.checkpoint.content.pieces import Extent, PieceLayout, choose_piece_bytes
from p2pstore.checkpoint.content.sources import PublishedFiles
from p2pstore.errors import CheckpointChanged

STEP_BYTES: Final = 16 * 1024 * 1024
MIN_THREADS: Final = 4
MAX_THREADS: Final = 16

Progress = Callable[[int], None]
"""Called with the number of bytes hashed since the last call."""
Opened = Callable[[int], AbstractContextManager[int]]
"""Opens a file, by number, for one thread: a descriptor for the time of a block."""
BLOCK_BYTES: Final = 1024 * 1024
"""Read and hashed at once: efficient for disks, and small enough for a processor's cache."""
AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Readahead, in each range."""
CACHE_SECONDS_PER_BYTE: Final = 0.6e-9
"""Above this CPU time for filling the page cache, files are read past it; 0.1e-9 to 0.4e-9 is usual."""
JUDGED_BYTES: Final = BLOCK_BYTES
"""Minimum sample for that."""
_PAGE: Final = mmap.PAGESIZE
LOCAL_FILE_SYSTEMS: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)


class PieceHashes:
    """Hashes of pieces and of small files. Concurrent steps write to places of their own."""

    def __init__(self, layout: PieceLayout, opened: Opened, reader: BulkReader) -> None:
        self.packed = bytearray(HASH_BYTES * layout.count)
        """Concatenated hashes of all pieces; zeros for those not hashed."""
        self.small_files: dict[int, bytes] = {}
        """Of files that share a piece with others."""
        self._layout = layout
        self._opened = opened
        self._reader = reader

    def of(self, pieces: range) -> bytes:
        return bytes(self.packed[pieces.start * HASH_BYTES : pieces.stop * HASH_BYTES])

    async def find(
        self, pieces: Iterable[int], *, threads: int = 0, progress: Progress = lambda count: None
    ) -> None:
        """Hash these pieces, which are in order. `threads`: 0 for the usual number, by cores. Raises `OSError`,
        `EOFError` for a short file, and errors of `opened`."""
        usual = min(MAX_THREADS, max(MIN_THREADS, os.cpu_count() or 1))
        runs = neighbours(self._layout, pieces, STEP_BYTES)
        await at_once((partial(self.hash_run, run) for run in runs), threads or usual, progress)

    def hash_run(self, pieces: range) -> int:
        """Hash neighbouring pieces of one file, or a shared piece; blocking. Returns their bytes. Raises as `find`."""
        extents = self._layout.extents(pieces[0])
        if self._layout.is_shared(pieces[0]):
            return self._hash_shared(pieces[0], extents)
        file, offset, _ = extents[0]
        ends = [self._layout.extents(piece)[0] for piece in (pieces[0], pieces[-1])]
        length = ends[1].offset + ends[1].length - offset
        piece, hasher, missing = pieces[0], blake3(), ends[0].length
        with self._opened(file) as descriptor:
            for block in self._reader.blocks(descriptor, offset, length):
                while block:
                    part, block = block[:missing], block[missing:]
                    hasher.update(part)
                    missing -= len(part)
                    if not missing:
                        self._set(piece, hasher.digest())
                        piece, hasher = piece + 1, blake3()
                        missing = self._layout.sizes[piece] if piece in pieces else 0
        return length

    def _hash_shared(self, piece: int, extents: Sequence[Extent]) -> int:
        of_piece = blake3()
        for file, offset, length in extents:
            of_file = blake3()
            with self._opened(file) as descriptor:
                for block in self._reader.blocks(descriptor, offset, length):
                    of_piece.update(block)
                    of_file.update(block)
            self.small_files[file] = of_file.digest()
        self._set(piece, of_piece.digest())
        return sum(extent.length for extent in extents)

    def _set(self, piece: int, digest: bytes) -> None:
        self.packed[piece * HASH_BYTES : (piece + 1) * HASH_BYTES] = digest


async def at_once(steps: Iterator[Callable[[], int]], threads: int, progress: Progress) -> None:
    """Do steps on files in this number of worker threads; `progress` gets the bytes of each. The first failure ends
    it, and is raised."""
    limiter = trio.CapacityLimiter(threads)
    failures: list[Exception] = []

    async def work() -> None:
        try:
            for step in steps:
                progress(await trio.to_thread.run_sync(step, limiter=limiter))
        except (CheckpointChanged, OSError, EOFError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(threads):
            nursery.start_soon(work)
    if failures:
        raise failures[0]


def neighbours(layout: PieceLayout, pieces: Iterable[int], most_bytes: int) -> Iterator[range]:
    """Runs of consecutive pieces of one file, at most `most_bytes` each; a shared piece is a run of its own."""
    run = range(0)
    for piece in pieces:
        joins = (
            piece == run.stop
            and bool(run)
            and (len(run) + 1) * layout.piece_bytes <= most_bytes
            and not layout.is_shared(piece)
            and layout.extents(piece)[0].file == layout.extents(run[0])[0].file
        )
        if run and not joins:
            yield run
        run = range(run.start if joins else piece, piece + 1)
    if run:
        yield run


async def hash_source(
    source: PublishedFiles,
    name: str,
    *,
    reader: BulkReader | None = None,
    piece_bytes: int = 0,
    previous_piece_bytes: int = 0,
    threads: int = 0,
    progress: Progress = lambda count: None,
) -> Manifest:
    """The manifest of all files or tensors. `piece_bytes` and `threads`: 0 for the usual, by size and by cores;
    `previous_piece_bytes`: see `choose_piece_bytes`. Raises `CheckpointChanged` when a file changes meanwhile,
    `CheckpointRefused` for a name or size that a manifest cannot have, `OSError` when a file cannot be read."""
    plan = partial(_plan, source, piece_bytes, previous_piece_bytes)
    layout = await trio.to_thread.run_sync(plan)
    hashes = PieceHashes(layout, source.opened, reader or BulkReader())
    await hashes.find(range(layout.count), threads=threads, progress=progress)
    await trio.to_thread.run_sync(source.check)
    return await trio.to_thread.run_sync(_describe, source, name, layout, hashes)


def _plan(source: PublishedFiles, piece_bytes: int, previous_piece_bytes: int) -> PieceLayout:
    """The layout of pieces; 0.1 s for 100,000 files."""
    sizes = [file.size for file in source.files]
    return PieceLayout(sizes, piece_bytes or choose_piece_bytes(sizes, previous_piece_bytes))


def _describe(source: PublishedFiles, name: str, layout: PieceLayout, hashes: PieceHashes) -> Manifest:
    """The manifest, after hashing; 0.5 s for 100,000 files."""
    empty = hash_of(b"")
    files = []
    for number, file in enumerate(source.files):
        if file.size < layout.piece_bytes:
            digest = hashes.small_files.get(number, empty)
        else:
            digest = hash_of(hashes.of(layout.pieces_of(number)))
        files.append(FileEntry(file.path, file.size, file.mode, digest, file.dtype, list(file.shape)))
    return make_manifest(name, files, layout.piece_bytes, bytes(hashes.packed), FileHashes.OF_PIECES)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class BulkReader:
    """Reads ranges of files to hash them, as fast as their disk gives them; blocking, for several threads.

    Cached blocks come from the page cache, others through it with readahead, as hashed files are often read again soon.
    Reading past the cache (O_DIRECT) is for files that would not stay in it, and for machines where filling it takes
    more CPU time than the disk takes: in many virtual machines the host allocates memory at the first touch, 2 s of CPU
    time for 1 GB; direct I/O into the same blocks takes 0.1 s.
    """

    def __init__(self, *, past_cache: bool = False) -> None:
        """`past_cache`: the files have no room in memory. Raises `OSError`."""
        self.past_cache = past_cache
        """Whether to read uncached blocks past the page cache; set when that is found to be cheaper."""
        self._file_systems = Path("/proc/self/mountinfo").read_text()
        self._buffers: list[mmap.mmap] = []

    def blocks(self, descriptor: int, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range, block by block; each view is valid until the next. `offset` is a multiple of 4,096;
        `descriptor` must not be in use elsewhere. Raises `OSError`, and `EOFError` for a short file."""
        if not length:
            return
        on_disk = is_local(self._file_systems, os.fstat(descriptor).st_dev)
        cached = cached_blocks(descriptor, offset, length)
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, BLOCK_BYTES)
        whole = memoryview(buffer)
        price, asked = _Price(), offset
        try:
            for number, begin in enumerate(range(offset, offset + length, BLOCK_BYTES)):
                view = whole[: min(BLOCK_BYTES, offset + length - begin)]
                if cached[number]:
                    read_fully(descriptor, view, begin)
                elif not (on_disk and self.past_cache and _read_past(descriptor, whole, view, begin)):
                    asked = max(asked, begin)
                    more = min(begin + AHEAD_BYTES, offset + length) - asked
                    with price.of(more):
                        os.posix_fadvise(descriptor, asked, more, os.POSIX_FADV_WILLNEED)
                        read_fully(descriptor, view, begin)
                    asked += more
                    if price.is_high:
                        self.past_cache = True
                yield view
        finally:
            self._buffers.append(buffer)


class _Price:
    """CPU time of this thread for filling the page cache."""

    def __init__(self) -> None:
        self._bytes = 0
        self._seconds = 0.0

    @property
    def is_high(self) -> bool:
        """Whether it exceeds the cost of reading past the cache."""
        limit = self._bytes * CACHE_SECONDS_PER_BYTE
        return self._bytes >= JUDGED_BYTES and self._seconds > limit

    @contextmanager
    def of(self, length: int) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._seconds += time.thread_time() - began
        self._bytes += length


def cached_blocks(descriptor: int, offset: int, length: int) -> list[bool]:
    """For each block of a range, whether the page cache has all of it; of other users' files the kernel says yes."""
    blocks = -(-length // BLOCK_BYTES)
    try:
        mapping = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):  # it ends before, or cannot be mapped: reading it tells
        return [False] * blocks
    with mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = np.ones(blocks * (BLOCK_BYTES // _PAGE), np.uint8)
        failed = _libc.mincore(view.ctypes.data, length, pages.ctypes.data)
        del view
    if failed:
        return [False] * blocks
    per_block = (pages & 1).reshape(blocks, BLOCK_BYTES // _PAGE)
    return [bool(each.all()) for each in per_block]


def _read_past(descriptor: int, whole: memoryview, view: memoryview, offset: int) -> bool:
    """Read a block past the page cache. False when the file does not support it, or for a short read."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        aligned = whole[: -(-len(view) // _PAGE) * _PAGE]
        return os.preadv(descriptor, [aligned], offset) >= len(view)
    except OSError:
        return False  # reading it through the cache says what is wrong, if something is
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def is_local(file_systems: str, device: int) -> bool:
    """Whether files on `device` (`st_dev`) are on a disk or in memory of this machine, by /proc/self/mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in file_systems.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) > 2 and fields[2] == number and kinds:
            return kinds[0] in LOCAL_FILE_SYSTEMS
    return False


def is_local_directory(path: Path) -> bool:
    """`is_local` for an existing directory. Raises `OSError`."""
    return is_local(Path("/proc/self/mountinfo").read_text(), path.stat().st_dev)
