"""Memory for a moment, for values that lie in several places: used again, as fresh pages cost more than the copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

KEPT_BYTES: Final = 64 * 1024 * 1024
SMALL_BYTES: Final = 64 * 1024


class Scratch:
    """Room for what is gathered or scattered. Any thread may take some; one piece is kept for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: memoryview | None = None

    @contextmanager
    def room(self, size: int) -> Iterator[memoryview]:
        """`size` bytes, whatever they are, for the length of the block."""
        with self._lock:
            memory, self._kept = self._kept, None
        if memory is None or len(memory) < size:
            memory = np.empty(max(size, 1), np.uint8).data
        try:
            yield memory[:size]
        finally:
            if len(memory) <= KEPT_BYTES:
                with self._lock:
                    self._kept = memory


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without the interpreter's lock."""
    if len(source) <= SMALL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy the beginning of `source` to the first part, what follows to the next, and so on, as far as it goes."""
    at = 0
    for part in parts:
        count = min(len(part), len(source) - at)
        copy(part[:count], source[at : at + count])
        at += count
