"""A chained hash over the rows of a table, by the digest that each begins with. Pure.

Linear hashing (Litwin 1980): buckets are split a few at a time as rows come, so there are about three rows a
bucket and never one great rehash. A link is 4 bytes: one for each row, to the next in its chain, and one for each
bucket, to the first; 0 ends a chain. All links are one array, so "where the link to this row stands" is a number.

Digests are uniformly random by themselves, but a member may announce any. So the hash is Dietzfelbinger's: four
32-bit words times four secret 64-bit numbers, of the sum the upper half. That is strongly universal: whatever
digests somebody picks who does not know the numbers, two share a bucket no more often than random ones. (Two
64-bit words times two numbers would not do: multiples of 2^56 share a bucket whatever the numbers are.)
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from p2pstore.gossip.location_slots import Rows
from p2pstore.gossip.reserved_memory import reserve

ROWS_PER_BUCKET: Final = 3
_FIRST_BUCKETS: Final = 64
_SPLIT_BATCH: Final = 64
"""Buckets are split at least this many at a time: numpy is slow for few."""
_WORDS: Final = struct.Struct("<IIII")
_MASK: Final = (1 << 64) - 1
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)

Words = npt.NDArray[np.uint64]


class RowChains:
    """See the module's docstring. `first` and `second` are the two halves of each row's digest, as the rows
    have them now. `salt`: 128 bits that others cannot guess."""

    def __init__(self, row_limit: int, first: Words, second: Words, salt: int) -> None:
        self._first, self._second = first, second
        secret = salt.to_bytes(16, "little")
        self._factors = tuple(xxh3_64_intdigest(secret, seed=number) for number in range(4))
        self._heads = row_limit
        bucket_limit = row_limit // ROWS_PER_BUCKET + _FIRST_BUCKETS + _SPLIT_BATCH
        memory = memoryview(reserve(4 * (row_limit + bucket_limit)))
        self.link = memory.cast("I")
        """Where a link leads: of a row, or of `head_of`."""
        self._links = np.frombuffer(memory, np.uint32)
        self._buckets = self._level = _FIRST_BUCKETS
        self._rows = 0

    # --- one row -------------------------------------------------------------------------------

    def head_of(self, digest: bytes) -> int:
        """The link to the first row of the digest's chain."""
        words, factors = _WORDS.unpack(digest), self._factors
        mixed: int = (
            words[0] * factors[0]
            + words[1] * factors[1]
            + words[2] * factors[2]
            + words[3] * factors[3]
            & _MASK
        ) >> 32
        bucket = mixed & (2 * self._level - 1)
        return self._heads + (bucket if bucket < self._buckets else mixed & (self._level - 1))

    def link_to(self, row: int, digest: bytes) -> int:
        """The link that leads to a linked row with this digest."""
        at, link = self.head_of(digest), self.link
        while link[at] != row:
            at = link[at]
            if not at:
                raise RuntimeError("a row of the location index is missing from its chain")
        return at

    def add(self, row: int, digest: bytes) -> None:
        """Link a row in that has this digest."""
        at = self.head_of(digest)
        self.link[row] = self.link[at]
        self.link[at] = row
        self._grow(1)

    def remove(self, row: int, at: int) -> None:
        """Take a row out of its chain; `at` is the link to it."""
        self.link[at] = self.link[row]
        self._rows -= 1

    def replace(self, row: int, to: int, digest: bytes) -> None:
        """Put the row `to` where a row with this digest is in its chain."""
        self.link[self.link_to(row, digest)] = to
        self.link[to] = self.link[row]

    # --- many rows -----------------------------------------------------------------------------

    def mix(self, first: Words, second: Words) -> Words:
        """The salted hash of each digest."""
        factors = [np.uint64(factor) for factor in self._factors]
        mixed: Words = (first & _LOW) * factors[0]
        mixed += (first >> _HALF) * factors[1]
        mixed += (second & _LOW) * factors[2]
        mixed += (second >> _HALF) * factors[3]
        return mixed

    def heads_of(self, mixed: Words) -> Rows:
        """The link to the first row of each chain."""
        high = (mixed >> np.uint64(32)).astype(np.intp)
        buckets = high & (2 * self._level - 1)
        late = np.flatnonzero(buckets >= self._buckets)
        if late.size:
            buckets[late] = high[late] & (self._level - 1)
        buckets += self._heads
        return buckets

    def following(self, at: Rows) -> Rows:
        """Where each of these links leads."""
        return self._links[at].astype(np.intp)

    def add_many(self, rows: Rows, mixed: Words | None = None) -> None:
        """Link rows in; `mixed` is their hash, when it is at hand."""
        self._put(rows, self._mix_rows(rows) if mixed is None else mixed)
        self._grow(rows.size)

    def remove_many(self, rows: Rows, at: Rows | None = None) -> None:
        """Take linked rows out of their chains; `at` are the links to them, when they are at hand."""
        self._rows -= rows.size
        links = self._links
        while rows.size:
            if at is None:
                at = self._links_to(rows)
            # Where the row before goes as well, that one goes first.
            after = np.isin(at, rows)
            now = ~after
            links[at[now]] = links[rows[now]]
            rows, at = rows[after], None

    def _links_to(self, rows: Rows) -> Rows:
        links = self._links
        found = self.heads_of(self._mix_rows(rows))
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
        return self.mix(self._first[rows], self._second[rows])

    def _put(self, rows: Rows, mixed: Words) -> None:
        """Link rows in at the heads of their chains. Of several for one chain, one goes in a round."""
        links, heads = self._links, self.heads_of(mixed)
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
        while self._rows >= (self._buckets + _SPLIT_BATCH) * ROWS_PER_BUCKET:
            self._split(self._rows // ROWS_PER_BUCKET - self._buckets)

    def _split(self, count: int) -> None:
        """Split the next `count` buckets (fewer at the end of a round): about half of each one's rows go to
        a new bucket."""
        start = self._buckets - self._level
        count = min(count, self._level - start)
        heads = np.arange(start, start + count) + self._heads
        rows = self.following(heads)
        rows = rows[rows != 0]
        moved = []
        while rows.size:
            moved.append(rows)
            rows = self.following(rows)
            rows = rows[rows != 0]
        self._links[heads] = 0
        self._buckets += count
        if self._buckets == 2 * self._level:
            self._level = self._buckets
        if moved:
            every = np.concatenate(moved)
            self._put(every, self._mix_rows(every))
