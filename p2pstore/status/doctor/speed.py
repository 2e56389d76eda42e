"""How fast this machine copies, hashes and writes, in a quarter of a second each. Shell."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from p2pstore.objects import CHUNK_BYTES, MIB, chunk_sum

COPY_BYTES: Final = 64 * MIB
"""More than a processor's caches."""
HASH_BYTES: Final = 4 * MIB
DISK_BYTES: Final = 64 * MIB
DISK_PIECE_BYTES: Final = 4 * MIB
SECONDS: Final = 0.25


def _best_rate(step: Callable[[], int]) -> float:
    """Bytes per second of the fastest step within a quarter of a second: others met other load."""
    best, end = 0.0, time.perf_counter() + SECONDS
    while True:
        begin = time.perf_counter()
        length_bytes = step()
        now = time.perf_counter()
        best = max(best, length_bytes / max(now - begin, 1e-9))
        if now >= end:
            return best


def measure_copy() -> float:
    """Bytes per second of one thread between pages that are there already."""
    source, target = (np.ones(COPY_BYTES, dtype=np.uint8) for _ in range(2))

    def step() -> int:
        np.copyto(target, source)
        return COPY_BYTES

    return _best_rate(step)


def measure_hash() -> float:
    """Bytes per second of chunk sums."""
    chunks = memoryview(bytearray(b"\1" * HASH_BYTES))

    def step() -> int:
        for start in range(0, HASH_BYTES, CHUNK_BYTES):
            chunk_sum(chunks[start : start + CHUNK_BYTES])
        return HASH_BYTES

    return _best_rate(step)


def measure_disk(directory: Path) -> tuple[bool, float, float]:
    """(O_DIRECT works, bytes per second written with fdatasync, read back) of a file in `directory` that
    has no name by the time anything is written. Raises `OSError`."""
    descriptor, path = tempfile.mkstemp(prefix=".p2pstore-doctor-", dir=directory)
    try:
        try:
            fast = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            direct = True
        except OSError:
            fast, direct = os.dup(descriptor), False
    finally:
        os.unlink(path)
        os.close(descriptor)
    piece = mmap.mmap(-1, DISK_PIECE_BYTES)  # aligned to pages, as O_DIRECT wants it
    try:
        piece.write(os.urandom(DISK_PIECE_BYTES))
        pieces = DISK_BYTES // DISK_PIECE_BYTES
        begin = time.perf_counter()
        for number in range(pieces):
            _whole(os.pwrite(fast, piece, number * DISK_PIECE_BYTES))
        os.fdatasync(fast)
        written = time.perf_counter()
        for number in range(pieces):
            _whole(os.preadv(fast, [piece], number * DISK_PIECE_BYTES))
        read = time.perf_counter()
    finally:
        os.close(fast)
        piece.close()
    return direct, DISK_BYTES / (written - begin), DISK_BYTES / (read - written)


def _whole(count: int) -> None:
    if count != DISK_PIECE_BYTES:
        raise OSError(f"only {count:,} of {DISK_PIECE_BYTES:,} bytes were moved: is the disk full?")
