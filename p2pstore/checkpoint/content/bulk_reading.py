"""Reading files from end to end, to hash them, as fast as their disk gives them. Shell; blocking, for worker threads.

What the page cache has comes from there. The rest comes through it as well, asked for ahead, as what is hashed is often
read again soon: to be sent, or by an engine. It is read past the cache (O_DIRECT) where it would not stay there anyway,
and where filling the cache takes more CPU time than the disk takes time: in many virtual machines the host finds
memory when it is touched first, 2 s of CPU time for 1 GB; direct I/O into the same few blocks takes 0.1 s.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from p2pstore.checkpoint.content.local_disks import is_local

BLOCK_BYTES: Final = 1024 * 1024
"""That are read and hashed at once: what a disk likes, and a processor's cache holds."""
AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""That the kernel is asked for ahead, of each range that is read."""
CACHE_SECONDS_PER_BYTE: Final = 0.6e-9
"""CPU time that filling the page cache may take; 0.1 to 0.4 is usual."""
JUDGED_BYTES: Final = BLOCK_BYTES
"""With fewer, it is not known."""
_PAGE: Final = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class BulkReader:
    """Reads ranges of files for several threads."""

    def __init__(self, *, past_cache: bool = False) -> None:
        """`past_cache`: what is read is more than memory has room for. Raises `OSError`."""
        self.past_cache = past_cache
        """Whether what is not in the page cache is read past it; becomes true when that is found to be better."""
        self._file_systems = Path("/proc/self/mountinfo").read_text()
        self._buffers: list[mmap.mmap] = []

    def blocks(self, descriptor: int, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range, block by block; each view is good until the next. `offset` is a multiple of 4,096,
        `descriptor` is used by nobody else meanwhile. Raises `OSError`, and `EOFError` when the file ends before."""
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
                    _read_fully(descriptor, view, begin)
                elif not (
                    on_disk and self.past_cache and _read_past(descriptor, whole, view, begin)
                ):
                    asked = max(asked, begin)
                    more = min(begin + AHEAD_BYTES, offset + length) - asked
                    with price.of(more):
                        os.posix_fadvise(descriptor, asked, more, os.POSIX_FADV_WILLNEED)
                        _read_fully(descriptor, view, begin)
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
        """Whether it is known to be more than reading past the cache takes."""
        limit = self._bytes * CACHE_SECONDS_PER_BYTE
        return self._bytes >= JUDGED_BYTES and self._seconds > limit

    @contextmanager
    def of(self, length: int) -> Iterator[None]:
        """So many bytes are read in the block."""
        began = time.thread_time()
        yield
        self._seconds += time.thread_time() - began
        self._bytes += length


def cached_blocks(descriptor: int, offset: int, length: int) -> list[bool]:
    """Of each block of a range, whether the page cache has all of it. (Of others' files the kernel does not say: all
    are then.)"""
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
    """Read a block past the page cache. False when this file cannot be read so, or not all at once."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        aligned = whole[: -(-len(view) // _PAGE) * _PAGE]
        return os.preadv(descriptor, [aligned], offset) >= len(view)
    except OSError:
        return False  # reading it through the cache says what is wrong, if something is
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _read_fully(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"the file ends before byte {offset:,}")
        view = view[count:]
        offset += count
