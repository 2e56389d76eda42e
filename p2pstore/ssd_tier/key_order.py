"""The objects of a namespace in the order of their keys, for listings. Pure.

Sorting waits until somebody asks, and costs some 2 us a key then. What is added later is put in at the next question;
what went stays until it is an eighth of all, and is passed over: a row that was used again is known by its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.ssd_tier.record_rows import SEQUENCE, RecordRows

_ADDED_BESIDE: Final = 1_000
"""So many new keys are put in one by one; for more, all are sorted anew."""
_STALE_SHARE: Final = 1 / 8


class KeyOrder:
    """See the module's docstring. Only the first part of an object counts here."""

    def __init__(self, rows: RecordRows, namespace: int) -> None:
        self._rows = rows
        self._namespace = namespace
        self._order = np.empty(0, np.uint32)
        self._sequences = np.empty(0, np.uint64)
        self._added: list[tuple[int, int]] | None = (
            None  # (row, sequence); None: all are to be sorted
        )
        self._gone = 0

    def added(self, row: int) -> None:
        """A first part was put into this row."""
        if self._added is not None:
            self._added.append((row, self._rows.fields(row)[SEQUENCE]))
            if len(self._added) > _ADDED_BESIDE + len(self._order) // 8:
                self._added = None

    def removed(self) -> None:
        """A first part was taken out."""
        self._gone += 1
        if self._gone > _ADDED_BESIDE + len(self._order) * _STALE_SHARE:
            self._added = None

    def rows_from(self, prefix: str, after: str) -> Iterator[int]:
        """The rows whose keys begin with `prefix` and are above `after`, in order. Ask for no more of them once the
        index has changed."""
        self._sort()
        at = self._first(after, above=True) if after >= prefix and after else self._first(prefix)
        while at < len(self._order):
            if self._is_here(at):
                row = int(self._order[at])
                if not self._rows.key(row).startswith(prefix):
                    return
                yield row
            at += 1

    def _sort(self) -> None:
        if self._added is None:
            rows = self._rows.first_parts(self._namespace)
            rows.sort(key=self._rows.key)
            self._order = np.array(rows, np.uint32)
            self._sequences = self._sequences_of(rows)
            self._gone = 0
        elif self._added:
            here = sorted(self._still_here(self._added), key=self._rows.key)
            places = [self._first(self._rows.key(row)) for row in here]
            self._order = np.insert(self._order, places, here)
            self._sequences = np.insert(self._sequences, places, self._sequences_of(here))
        self._added = []

    def _still_here(self, added: list[tuple[int, int]]) -> list[int]:
        return [row for row, sequence in added if self._rows.is_at(row, sequence)]

    def _sequences_of(self, rows: list[int]) -> npt.NDArray[np.uint64]:
        return np.array([self._rows.fields(row)[SEQUENCE] for row in rows], np.uint64)

    def _is_here(self, at: int) -> bool:
        return self._rows.is_at(int(self._order[at]), int(self._sequences[at]))

    def _first(self, key: str, above: bool = False) -> int:
        """The first place whose key is not below `key`, or is above it; places of rows that went do not count."""
        low, high = 0, len(self._order)
        while low < high:
            middle = probe = (low + high) // 2
            while probe < high and not self._is_here(probe):
                probe += 1
            found = self._rows.key(int(self._order[probe])) if probe < high else None
            if found is None or found > key or (found == key and not above):
                high = middle
            else:
                low = probe + 1
        return low
