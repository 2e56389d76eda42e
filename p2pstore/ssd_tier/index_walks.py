"""Walks over the index in small steps, while it changes: keys in order for listings, digests in any order. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from heapq import merge
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from p2pstore.ssd_tier.footer import SEQUENCE

if TYPE_CHECKING:
    from p2pstore.ssd_tier.record_rows import RecordRows

RUN_KEYS: Final = 4_096
"""A run has at most that many keys, and all but the last about half or more. Sorting a thousand takes 1 ms."""
_SEARCHED_ROWS: Final = 2_048
_STALE_BESIDE: Final = 1_000
_STALE_SHARE: Final = 1 / 8
WALKED_ROWS: Final = 4_096
"""Rows looked at in one step: 0.5 ms, if all are wanted."""
WALKED_DIGESTS: Final = 64
"""Most digests of one step: for each, the caller has some work."""


class KeyOrder:
    """The first parts of a namespace's objects in the order of their keys.

    Nothing is sorted before the first listing. Then keys are sorted in runs of a few thousand, one a step, so that an
    event loop can yield between steps; a listing merges the runs. Later keys make a new run. Rows of removed keys are
    skipped, and swept out when they are an eighth of all; a reused row is recognized by its sequence.
    """

    def __init__(self, rows: RecordRows, namespace: int) -> None:
        self._rows = rows
        self._namespace = namespace
        self._begin()

    def _begin(self) -> None:
        self._runs: list[_Run] = []
        self._unsorted = _Run(self._rows, array("I"), array("Q"))
        self._searched = 0  # rows below were looked at
        self._count = 0
        self._gone = 0

    def added(self, row: int) -> None:
        """A first part was put into this row."""
        if row < self._searched:
            self._unsorted.append(row, self._rows.fields(row)[SEQUENCE])
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
            self._unsorted.append(row, self._rows.fields(row)[SEQUENCE])
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
        taken = _Run(self._memory, self.rows[-count:], self.sequences[-count:])
        del self.rows[-count:], self.sequences[-count:]
        return taken

    def sort(self) -> None:
        """Sort what is still here; what went is left out."""
        key = self._memory.key
        here = sorted(
            (key(row), row, self.sequences[at]) for at, row in enumerate(self.rows) if self._is_here(at)
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


class KeyOrders:
    """The key orders of all namespaces that were listed."""

    def __init__(self, rows: RecordRows) -> None:
        self._rows = rows
        self._orders: dict[int, KeyOrder] = {}

    def of(self, namespace: str) -> KeyOrder | None:
        """The order of a namespace, begun if need be; None without any record in it."""
        number = self._rows.names.number(namespace)
        if number is None:
            return None
        order = self._orders.get(number)
        if order is None:
            order = self._orders[number] = KeyOrder(self._rows, number)
        return order

    def added(self, row: int) -> None:
        """A first part was put into this row."""
        order = self._orders.get(self._rows.namespace(row))
        if order is not None:
            order.added(row)

    def removed(self, row: int) -> None:
        """The first part in this row is about to be taken out."""
        order = self._orders.get(self._rows.namespace(row))
        if order is not None:
            order.removed(row)

    def forget(self, namespace: int) -> None:
        """The namespace of this number has no records any more."""
        self._orders.pop(namespace, None)


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
