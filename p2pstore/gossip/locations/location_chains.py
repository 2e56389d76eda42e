"""Changing the chained hash over the rows of a table. Pure.

Buckets are split a few at a time as rows come, so there is about one row a bucket and never one great rehash.
All links are one array, so "where the link to this row stands" is a number.
"""

from __future__ import annotations

import numpy as np

from p2pstore.location_table import (
    ROWS_PER_BUCKET,
    SPLIT_BATCH,
    LocationTable,
    Rows,
    Word,
    Words,
)


class RowChains:
    """See the module's docstring. What a row's digest is, the table says."""

    def __init__(self, table: LocationTable) -> None:
        self._table = table
        self._words = table.words
        self._rows = 0

    # --- one row -------------------------------------------------------------------------------

    def link_to(self, row: int, digest: bytes) -> int:
        """The link that leads to a linked row with this digest."""
        at, link = self._table.head_of(digest), self._table.link
        while link[at] != row:
            at = link[at]
            if not at:
                raise RuntimeError("a row of the location index is missing from its chain")
        return at

    def add(self, row: int, digest: bytes) -> None:
        """Link a row in that has this digest."""
        at, link = self._table.head_of(digest), self._table.link
        link[row] = link[at]
        link[at] = row
        self._grow(1)

    def remove(self, row: int, at: int) -> None:
        """Take a row out of its chain; `at` is the link to it."""
        self._table.link[at] = self._table.link[row]
        self._rows -= 1

    def replace(self, row: int, to: int, digest: bytes) -> None:
        """Put the row `to` where a row with this digest is in its chain."""
        self._table.link[self.link_to(row, digest)] = to
        self._table.link[to] = self._table.link[row]

    # --- many rows -----------------------------------------------------------------------------

    def add_many(self, rows: Rows, mixed: Words | None = None) -> None:
        """Link rows in; `mixed` is their hash, when it is at hand."""
        self._grow(rows.size)  # first: many for few chains would take turns
        self._put(rows, self._mix_rows(rows) if mixed is None else mixed)

    def remove_many(self, rows: Rows, at: Rows | None = None) -> None:
        """Take linked rows out of their chains; `at` are the links to them, when they are at hand."""
        self._rows -= rows.size
        links = self._table.links
        while rows.size:
            if at is None:
                at = self._links_to(rows)
            # Where the row before goes as well, that one goes first.
            after = np.isin(at, rows)
            now = ~after
            links[at[now]] = links[rows[now]]
            rows, at = rows[after], None

    def _links_to(self, rows: Rows) -> Rows:
        links = self._table.links
        found = self._table.heads_of(self._mix_rows(rows))
        pending = np.arange(rows.size)
        while pending.size:
            following = links[found[pending]]
            if not following.all():
                raise RuntimeError("a row of the location index is missing from its chain")
            going_on = np.flatnonzero(following != rows[pending])
            pending = pending[going_on]
            found[pending] = following[going_on]
        return found

    def _mix_rows(self, rows: Rows) -> Words:
        return self._table.mix(self._table.first[rows], self._table.second[rows])

    def _put(self, rows: Rows, mixed: Words) -> None:
        """Link rows in at the heads of their chains. Of several for one chain, one goes in a round."""
        links, heads = self._table.links, self._table.heads_of(mixed)
        while rows.size:
            before = links[heads]
            links[heads] = rows
            done = links[heads] == rows
            links[rows[done]] = before[done]
            rest = ~done
            rows, heads = rows[rest], heads[rest]

    # --- growing -------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        self._rows += count
        while self._rows >= (self._words[Word.BUCKETS] + SPLIT_BATCH) * ROWS_PER_BUCKET:
            self._split(self._rows // ROWS_PER_BUCKET - self._words[Word.BUCKETS])

    def _split(self, count: int) -> None:
        """Split the next `count` buckets (fewer at the end of a round): about half of each one's rows go to
        a new bucket."""
        table, words = self._table, self._words
        buckets, level = words[Word.BUCKETS], words[Word.LEVEL]
        start = buckets - level
        count = min(count, level - start)
        heads = np.arange(start, start + count) + table.heads
        rows = table.following(heads)
        rows = rows[rows != 0]
        moved = []
        while rows.size:
            moved.append(rows)
            rows = table.following(rows)
            rows = rows[rows != 0]
        table.links[heads] = 0
        words[Word.BUCKETS] = buckets + count
        if buckets + count == 2 * level:
            words[Word.LEVEL] = 2 * level
        if moved:
            every = np.concatenate(moved)
            self._put(every, self._mix_rows(every))
