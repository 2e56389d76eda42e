"""Values that are no buffer: put from where they lie, without being joined first, so each byte moves once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from p2pstore.objects import chunk_bounds, chunk_sum
from p2pstore.runtime.side_by_side import threads_for
from p2pstore.values import source_view

SMALL_COPY_BYTES: Final = 64 * 1024
"""Up to here a plain copy, which holds the interpreter's lock for a few microseconds, is quicker."""


class PutSource(ABC):
    """A value that is no buffer, whose bytes are copied to where they belong when it is put."""

    @abstractmethod
    def __len__(self) -> int:
        """The length in bytes."""

    @property
    def nbytes(self) -> int:
        """The same."""
        return len(self)

    @property
    def threads(self) -> int:
        """How many may copy side by side."""
        return threads_for(len(self))

    @abstractmethod
    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        """Copy the bytes from `start` on, as many as `target` has; the sums of its chunks, packed u64s. `start` is the
        beginning of a chunk."""

    @abstractmethod
    def joined(self) -> memoryview:
        """All of it in memory of its own. May take its time."""


class Gathered(PutSource):
    """Buffers that are one value, one after the other. Raises as `source_view` for what is none. The caller may change
    them meanwhile: the sums are of what was copied."""

    def __init__(self, parts: Sequence[Any]) -> None:
        views = [view for view in map(source_view, parts) if view.nbytes]
        self._parts = views
        self._ends = list(accumulate(map(len, views)))
        self._length = self._ends[-1] if views else 0

    def __len__(self) -> int:
        return self._length

    def copy_and_sum(self, target: memoryview, start: int) -> bytes:
        sums = []
        for at, end in chunk_bounds(len(target)):
            place = at
            for piece in self.between(start + at, start + end):
                copy_bytes(target[place : place + len(piece)], piece)
                place += len(piece)
            sums.append(chunk_sum(target[at:end]))
        return np.array(sums, "<u8").tobytes()

    def between(self, start: int, end: int) -> list[memoryview]:
        """The pieces of the parts that make up these bytes of the value."""
        pieces = []
        place = bisect_right(self._ends, start)
        while start < end:
            part = self._parts[place]
            offset = start - (self._ends[place] - len(part))
            piece = part[offset : offset + end - start]
            pieces.append(piece)
            start += len(piece)
            place += 1
        return pieces

    def joined(self) -> memoryview:
        return self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `target` has; large ones without the interpreter's lock."""
    if len(source) <= SMALL_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


Source = memoryview | PutSource
"""What a put takes its bytes from."""


def value_of(value: Any) -> Source:
    """`source_view`, for what may lie elsewhere."""
    return value if isinstance(value, PutSource) else source_view(value)
