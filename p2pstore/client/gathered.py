"""A value that lies in several places: put without being joined first, so each byte moves once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from p2pstore.client.values import source_view


class Gathered:
    """Buffers that are one value, one after the other. Raises as `source_view` for what is none. The caller may change
    them meanwhile: the sums are of what was copied."""

    def __init__(self, parts: Sequence[Any]) -> None:
        views = [view for view in map(source_view, parts) if view.nbytes]
        self._parts = views
        self._ends = list(accumulate(map(len, views)))
        self._length = self._ends[-1] if views else 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self._length

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
        """All of it in memory of its own."""
        return self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))


Source = memoryview | Gathered
"""What a put takes its bytes from."""


def value_of(value: Any) -> Source:
    """`source_view`, for what may be `Gathered` already."""
    return value if type(value) is Gathered else source_view(value)
