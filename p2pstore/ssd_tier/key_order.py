"""The objects of a namespace in the order of their keys, for listings. Pure.

Sorting waits until somebody asks. Then keys are sorted in runs of a few thousand, one a step, so that whoever cannot
stop for long makes pauses between them; a listing merges the runs. What is added later makes a new run. What went stays
until it is an eighth of all, and is passed over: a row that was used again is known by its sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import merge
from operator import itemgetter
from typing import Final

from p2pstore.ssd_tier.record_rows import RecordRows

RUN_KEYS: Final = 4_096
"""A run has at most that many keys, and all but the last about half or more. Sorting a thousand takes 1 ms."""
_SEARCHED_ROWS: Final = 2_048
_STALE_BESIDE: Final = 1_000
_STALE_SHARE: Final = 1 / 8


class KeyOrder:
    """See the module's docstring. Only the first part of an object counts here."""

    def __init__(self, rows: RecordRows, namespace: int) -> None:
        self._rows = rows
        self._namespace = namespace
        self._begin()

    def _begin(self) -> None:
        """All rows of the namespace are to be found and sorted."""
        self._runs: list[_Run] = []
        self._unsorted = _Run(self._rows, array("I"), array("Q"))
        self._searched = 0  # rows below were looked at
        self._count = 0
        self._gone = 0

    def added(self, row: int) -> None:
        """A first part was put into this row."""
        if row < self._searched:
            self._unsorted.append(row, self._rows.sequence(row))
            self._count += 1

    def removed(self, row: int) -> None:
        """The first part in this row was taken out."""
        self._gone += row < self._searched

    def prepare(self) -> bool:
        """Sort one run; whether there is nothing left to sort."""
        if self._gone > _STALE_BESIDE + self._count * _STALE_SHARE:
            self._begin()
        if len(self._unsorted) < RUN_KEYS // 2 and self._searched < self._rows.end:
            self._search(self._searched, min(self._searched + _SEARCHED_ROWS, self._rows.end))
        if len(self._unsorted):
            run = self._unsorted.take(RUN_KEYS // 2)
            if self._runs and len(self._runs[-1]) < RUN_KEYS // 2:
                run.extend(self._runs.pop())
            run.sort()
            self._runs.append(run)
        return not len(self._unsorted) and self._searched == self._rows.end

    def _search(self, first: int, end: int) -> None:
        for row in self._rows.first_parts(self._namespace, first, end):
            self._unsorted.append(row, self._rows.sequence(row))
            self._count += 1
        self._searched = end

    def rows_from(self, prefix: str, after: str) -> Iterator[int]:
        """The rows whose keys begin with `prefix` and are above `after`, in order. Ask for no more of them once the
        index has changed."""
        while not self.prepare():
            pass
        runs = [run.from_key(prefix, after) for run in self._runs]
        for key, row in merge(*runs, key=itemgetter(0)):
            if not key.startswith(prefix):
                return
            yield row


class _Run:
    """Rows, each with the sequence of the record that it had; sorted by key but for those that are to be sorted."""

    def __init__(self, memory: RecordRows, rows: array[int], sequences: array[int]) -> None:
        self.rows = rows
        self.sequences = sequences
        self._memory = memory

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: int, sequence: int) -> None:
        self.rows.append(row)
        self.sequences.append(sequence)

    def extend(self, other: _Run) -> None:
        self.rows.extend(other.rows)
        self.sequences.extend(other.sequences)

    def take(self, count: int) -> _Run:
        """The last rows as a run of their own."""
        taken = _Run(self._memory, self.rows[-count:], self.sequences[-count:])
        del self.rows[-count:], self.sequences[-count:]
        return taken

    def sort(self) -> None:
        """Sort what is still here; what went is left out."""
        key = self._memory.key
        here = sorted(
            (key(row), row, self.sequences[at])
            for at, row in enumerate(self.rows)
            if self._is_here(at)
        )
        self.rows = array("I", [row for _, row, _ in here])
        self.sequences = array("Q", [sequence for _, _, sequence in here])

    def from_key(self, prefix: str, after: str) -> Iterator[tuple[str, int]]:
        """(key, row) from the first key on that is above `after`, and not below `prefix`."""
        at = self._first(after, above=True) if after >= prefix else self._first(prefix, above=False)
        for place in range(at, len(self.rows)):
            if self._is_here(place):
                yield self._memory.key(self.rows[place]), self.rows[place]

    def _is_here(self, at: int) -> bool:
        return self._memory.is_at(self.rows[at], self.sequences[at])

    def _first(self, key: str, above: bool) -> int:
        """The first place whose key is not below `key`, or is above it; places of rows that went do not count."""
        low, high = 0, len(self.rows)
        while low < high:
            middle = probe = (low + high) // 2
            while probe < high and not self._is_here(probe):
                probe += 1
            found = self._memory.key(self.rows[probe]) if probe < high else None
            if found is None or found > key or (found == key and not above):
                high = middle
            else:
                low = probe + 1
        return low
