"""The digests of an index as they were at one moment, read a few at a time while the index goes on changing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from p2pstore.ssd_tier.record_rows import RecordRows

WALKED_ROWS: Final = 4_096
"""Rows looked at in one step: 0.5 ms, if all are wanted."""
WALKED_DIGESTS: Final = 64
"""Most digests of one step: for each, the caller has some work."""


class DigestWalk(Iterator[list[bytes]]):
    """Batches of digests, some of them empty: of all first parts, or of those of a namespace by its number.

    It is told of each row that is about to change (`about_to_change`): a row that it has still to come to counts with
    what was in it when the walk began.
    """

    def __init__(self, rows: RecordRows, namespace: int | None) -> None:
        self._rows = rows
        self._namespace = namespace
        self._at = 0
        self._end = rows.end
        self._found: deque[bytes] = deque()
        self._changed: set[int] = set()
        """Rows from `_at` on that are not as they were when the walk began."""

    def about_to_change(self, row: int) -> None:
        """The record in this row goes, or one is put into it."""
        if self._at <= row < self._end and row not in self._changed:
            self._take(row, row + 1)
            self._changed.add(row)

    def __next__(self) -> list[bytes]:
        if not self._found:
            if self._at == self._end:
                raise StopIteration
            first, self._at = self._at, min(self._at + WALKED_ROWS, self._end)
            self._take(first, self._at)
        count = min(WALKED_DIGESTS, len(self._found))
        return [self._found.popleft() for _ in range(count)]

    def _take(self, first: int, end: int) -> None:
        for row in self._rows.first_parts(self._namespace, first, end):
            if row not in self._changed:
                self._found.append(self._rows.digest(row))
