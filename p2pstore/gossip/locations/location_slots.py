"""The table of location records: rows of each set ("slot"), rows of each digest, and the facts for clients. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from p2pstore.gossip.records import Member
from p2pstore.location_table import (
    BLOCK_ROWS,
    MAX_COUNTED_SLOTS,
    NOBODY,
    ROWS_PER_BUCKET,
    SHARED,
    SPLIT_BATCH,
    LocationTable,
    Rows,
    Word,
    Words,
    apart_counter,
    floor_clock,
)
from p2pstore.objects import DIGEST_BYTES

SMALL_ROWS: Final = 16
"""The largest extent in a shared block."""
_SHARED_BATCH: Final = 32
"""Shared blocks are set aside this many at a time: the owners of their rows are one page of memory."""


@dataclass(slots=True)
class _Remains:
    """Rows of a discarded slot: an extent, or blocks."""

    count: int
    base: int
    capacity: int
    blocks: array[int] | None


class RowSlots:
    """The rows of each set of locations ("slot"). `move(row, to)` carries a row's content and links to another row.

    A slot's rows have positions 0 to count - 1 without holes. A large slot has blocks of 32 rows of its own, and one
    owner per block is noted. There may be very many small slots, so those with up to 16 rows take an extent of 1, 2,
    4, 8 or 16 rows in a block that they share, and which stays divided so; the owner is noted per row there. The facts
    of a slot stand in arrays, some 17 bytes each. Row 0 is never given out: it stands for "none".
    """

    def __init__(self, table: LocationTable, move: Callable[[int, int], None]) -> None:
        self._block_limit = table.block_limit
        self._block_owner, self._block_owners = table.block_owner, table.block_owners
        self._row_owner, self._row_owners = table.row_owner, table.row_owners
        self._move = move
        self._fresh_block = 1
        self._free_blocks = array("I")
        self._spare_shared = array("I")
        self._free_extents = {size: array("I") for size in (1, 2, 4, 8, 16)}
        self._counts = array("I", [0])
        self._bases = array("I", [0])
        self._capacities = array("B", [0])
        self._blocks: dict[int, array[int]] = {}
        """Of the slots that have blocks of their own."""
        self._free_slots = array("I")
        self._discarded: deque[_Remains] = deque()

    @property
    def room(self) -> int:
        """How many rows one more large slot could take."""
        return (self._block_limit - self._fresh_block + len(self._free_blocks)) * BLOCK_ROWS

    @property
    def any_discarded(self) -> bool:
        return bool(self._discarded)

    def open(self) -> int:
        """A new, empty slot. Its number may have been that of one that was discarded."""
        if self._free_slots:
            return self._free_slots.pop()
        self._counts.append(0)
        self._bases.append(0)
        self._capacities.append(0)
        return len(self._counts) - 1

    def count(self, slot: int) -> int:
        return self._counts[slot]

    def rows(self, slot: int, start: int, stop: int) -> Rows:
        """The rows at the positions from `start` to before `stop`."""
        return _rows_at(self._bases[slot], self._blocks.get(slot), start, stop)

    def runs(self, slot: int) -> list[tuple[int, int]]:
        """The slot's rows as few runs (first, one past the last), in the order of positions."""
        count, blocks = self._counts[slot], self._blocks.get(slot)
        if blocks is None:
            return [(self._bases[slot], self._bases[slot] + count)] if count else []
        numbers = np.frombuffer(blocks, np.uint32).astype(np.intp)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        firsts = numbers[np.concatenate(([0], breaks))] * BLOCK_ROWS
        ends = (numbers[np.concatenate((breaks - 1, [numbers.size - 1]))] + 1) * BLOCK_ROWS
        ends[-1] -= len(blocks) * BLOCK_ROWS - count
        return list(zip(firsts.tolist(), ends.tolist(), strict=True))

    def take(self, slot: int) -> int:
        """One more row, at position `count`. Raises `MemoryError` when all are in use."""
        count, blocks = self._counts[slot], self._blocks.get(slot)
        if blocks is None and count == self._capacities[slot]:
            self._set_capacity(slot, max(1, 2 * count))
            blocks = self._blocks.get(slot)
        if blocks is None:
            row = self._bases[slot] + count
            self._row_owner[row] = slot
        else:
            if count == len(blocks) * BLOCK_ROWS:
                blocks.append(self._take_block(slot))
            row = blocks[count // BLOCK_ROWS] * BLOCK_ROWS + count % BLOCK_ROWS
        self._counts[slot] = count + 1
        return row

    def take_many(self, slot: int, count: int) -> Rows:
        """`take` that many, of a slot that has blocks."""
        before, blocks = self._counts[slot], self._blocks[slot]
        wanted = -(-(before + count) // BLOCK_ROWS) - len(blocks)
        if wanted > 0:
            added = array("I", [self._take_block(NOBODY) for _ in range(wanted)])
            self._block_owners[np.frombuffer(added, np.uint32)] = slot
            blocks.extend(added)
        self._counts[slot] = before + count
        return self.rows(slot, before, before + count)

    def use_blocks(self, slot: int) -> None:
        """Give the slot blocks of its own. Its rows may move."""
        if slot not in self._blocks:
            self._set_capacity(slot, BLOCK_ROWS)

    def last(self, slot: int) -> int:
        """The row at the last position of a slot that is not empty."""
        position, blocks = self._counts[slot] - 1, self._blocks.get(slot)
        if blocks is None:
            return self._bases[slot] + position
        return blocks[position // BLOCK_ROWS] * BLOCK_ROWS + position % BLOCK_ROWS

    def drop_last(self, slot: int, count: int) -> None:
        """Free the rows at the last `count` positions. Others may move, to take less room."""
        left = self._counts[slot] = self._counts[slot] - count
        blocks = self._blocks.get(slot)
        if blocks is not None:
            kept = -(-left // BLOCK_ROWS)
            if left > SMALL_ROWS // 2:
                self._free_blocks.extend(blocks[kept:])
                del blocks[kept:]
            else:
                self._set_capacity(slot, _extent_for(left))
        elif left <= self._capacities[slot] // 4:
            self._set_capacity(slot, _extent_for(left))

    def discard(self, slot: int) -> None:
        """Close a slot. Its rows belong to no slot until `take_discarded` has given them all."""
        count, base, capacity = self._counts[slot], self._bases[slot], self._capacities[slot]
        blocks = self._blocks.pop(slot, None)
        if blocks is not None:
            self._block_owners[np.frombuffer(blocks, np.uint32)] = NOBODY
        else:
            self._row_owners[base : base + count] = NOBODY
        if count or capacity:
            self._discarded.append(_Remains(count, base, capacity, blocks))
        self._counts[slot] = self._bases[slot] = self._capacities[slot] = 0
        self._free_slots.append(slot)

    def take_discarded(self, limit: int) -> Rows:
        """About `limit` rows of discarded slots. They are free now: unlink them before anything else."""
        taken: list[Rows] = []
        room = limit
        while self._discarded and room > 0:
            remains = self._discarded[0]
            blocks, left = remains.blocks, 0
            if blocks is not None:
                left = max(0, remains.count - room) // BLOCK_ROWS * BLOCK_ROWS
            taken.append(_rows_at(remains.base, blocks, left, remains.count))
            room -= max(1, remains.count - left)
            remains.count = left
            if blocks is None:
                self._free_extents[remains.capacity].append(remains.base)
            else:
                self._free_blocks.extend(blocks[left // BLOCK_ROWS :])
                del blocks[left // BLOCK_ROWS :]
            if not left:
                self._discarded.popleft()
        return np.concatenate(taken) if taken else np.empty(0, np.intp)

    def _set_capacity(self, slot: int, capacity: int) -> None:
        """Move a slot of at most 16 rows to another extent (or none), or to or from blocks."""
        count, old_base = self._counts[slot], self._bases[slot]
        old_capacity, old_blocks = self._capacities[slot], self._blocks.pop(slot, None)
        first = old_blocks[0] * BLOCK_ROWS if old_blocks else old_base
        if capacity > SMALL_ROWS:
            block = self._take_block(slot)
            self._blocks[slot] = array("I", [block])
            base, to, capacity = 0, block * BLOCK_ROWS, 0
        else:
            base = to = self._take_extent(capacity) if capacity else 0
            self._row_owners[base : base + count] = slot
        for position in range(count):
            self._move(first + position, to + position)
        self._bases[slot], self._capacities[slot] = base, capacity
        if old_blocks is not None:
            self._free_blocks.extend(old_blocks)
        elif old_capacity:
            self._free_extents[old_capacity].append(old_base)

    def _take_extent(self, size: int) -> int:
        free = self._free_extents[size]
        if not free:
            first = self._take_shared_block() * BLOCK_ROWS
            free.extend(range(first + BLOCK_ROWS - size, first - 1, -size))
        return free.pop()

    def _take_shared_block(self) -> int:
        if not self._spare_shared:
            if self._fresh_block + _SHARED_BATCH > self._block_limit:
                return self._take_block(SHARED)
            first = self._fresh_block
            self._fresh_block += _SHARED_BATCH
            self._spare_shared.extend(range(first + _SHARED_BATCH - 1, first - 1, -1))
        block = self._spare_shared.pop()
        self._block_owner[block] = SHARED
        return block

    def _take_block(self, owner: int) -> int:
        if self._free_blocks:
            block = self._free_blocks.pop()
        elif self._fresh_block < self._block_limit:
            block = self._fresh_block
            self._fresh_block += 1
        else:
            raise MemoryError("the index of locations is full")
        self._block_owner[block] = owner
        return block


def _extent_for(count: int) -> int:
    """The smallest extent with this number of rows; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def _rows_at(base: int, blocks: array[int] | None, start: int, stop: int) -> Rows:
    if blocks is None:
        return np.arange(base + start, base + stop, dtype=np.intp)
    first = start // BLOCK_ROWS
    numbers = np.frombuffer(blocks, np.uint32)[first : -(-stop // BLOCK_ROWS)].astype(np.intp)
    rows = (numbers[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
    return rows[start - first * BLOCK_ROWS : stop - first * BLOCK_ROWS]


class RowChains:
    """The rows of each digest, as chains from its bucket. The table has each row's digest."""

    def __init__(self, table: LocationTable) -> None:
        self._table = table
        self._words = table.words
        self._rows = 0

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

    def replace_many(self, rows: Rows, to: Rows) -> None:
        """Put each row `to`, which is in no chain, where the row with the same digest is in its chain."""
        links, at = self._table.links, self._links_to(rows)
        links[to] = links[rows]
        links[at] = to
        # Where two of these follow each other, the link between them is that of the row before in its new place.
        places = dict(zip(rows.tolist(), to.tolist(), strict=True))
        for before, place in zip(at.tolist(), places.values(), strict=True):
            if before in places:
                links[places[before]] = place

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

    def _grow(self, count: int) -> None:
        self._rows += count
        while self._rows >= (self._words[Word.BUCKETS] + SPLIT_BATCH) * ROWS_PER_BUCKET:
            self._split(self._rows // ROWS_PER_BUCKET - self._words[Word.BUCKETS])

    def _split(self, count: int) -> None:
        """Split the next `count` buckets (fewer at a round's end): about half of the rows go to new buckets."""
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


_FULL: Final = 255
"""A counter that came so far stays there."""


class ApartKeys:
    """Keys of which more is known than the table says: a counting Bloom filter with one hash (Fan et al. 2000).
    Without `counters`, no client asks for it and nothing is kept."""

    def __init__(self, counters: memoryview | None = None) -> None:
        self._counters = counters

    def add(self, digest: bytes) -> None:
        """Something more is known; `remove` takes it back as often. Names that are no digests are left out."""
        counters = self._counters
        if counters is None or len(digest) != DIGEST_BYTES:
            return
        if counters[at := apart_counter(digest)] < _FULL:
            counters[at] += 1

    def remove(self, digest: bytes) -> None:
        """One of the things that were `add`ed is known no more."""
        counters = self._counters
        if counters is None or len(digest) != DIGEST_BYTES:
            return
        if counters[at := apart_counter(digest)] < _FULL:
            counters[at] -= 1

    def close(self) -> None:
        self._counters = None


class PublishedLocations:
    """The table of locations that clients of this peer look up by themselves. `table` is in memory that they may map.

    It has the records of all views. Beside them it says which members' records count, between which clocks versions
    are believed, and of which keys more is known. Clients ask their peer about the latter, and while the table is being
    changed; so they need no rules of gossip.
    """

    def __init__(self, table: LocationTable) -> None:
        self.table = table
        self.apart = ApartKeys(table.apart)
        self._words = table.words
        self._forbidden_up_to = 0

    def begin(self) -> None:
        """Rows or links are about to be changed."""
        self._words[Word.CHANGES] += 1

    def end(self) -> None:
        """They are as they should be again."""
        self._words[Word.CHANGES] += 1

    def count(self, slot: int, member: Member, counts: bool) -> None:
        """A member's records are in a slot; whether they count."""
        if slot < MAX_COUNTED_SLOTS:
            self.table.members[slot] = member
            self.table.counted[slot] = counts

    def forbid_up_to(self, clock: int) -> None:
        """Versions up to this clock may be forbidden: of those, clients ask."""
        self._forbidden_up_to = max(self._forbidden_up_to, clock)
        self._words[Word.BELIEVED_AFTER] = max(self._words[Word.BELIEVED_AFTER], clock)

    def doubt_up_to(self, clock: int) -> None:
        """As `forbid_up_to`, until the next call: a member's copies of versions up to this clock are not believed."""
        self._words[Word.BELIEVED_AFTER] = max(self._forbidden_up_to, clock)

    def forbid_key_up_to(self, digest: bytes, clock: int) -> None:
        """`forbid_up_to` for one key, for good: newer versions count all the same. Other names are left out."""
        if len(digest) == DIGEST_BYTES:
            at, floors = floor_clock(digest), self.table.floors
            floors[at] = max(floors[at], clock)

    def vouch(self, now: float, newest_clock: int) -> None:
        """At this time the table says all that is known here; versions above `newest_clock` are not believed."""
        self._words[Word.BELIEVED_BEFORE] = newest_clock + 1
        self._words[Word.ALIVE_AT] = max(1, int(now * 1e9))

    def withdraw(self) -> None:
        """Clients are to ask about everything."""
        self._words[Word.ALIVE_AT] = 0

    def close(self) -> None:
        """`withdraw` for good, and let go of the memory. Nothing else may be called after that."""
        self.withdraw()
        self.apart.close()
        del self.table, self._words
