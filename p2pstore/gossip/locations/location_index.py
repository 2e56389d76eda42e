"""Many sets of location records in one table: some 50 bytes a record. Pure.

A set ("slot") holds one packed record per digest: that is the last one that was written. The table is one array
of rows of 42 bytes; `location_slots` says which rows are whose, and `RowChains` finds the rows of a digest.
Nothing is copied to grow, and no call does more than its arguments ask for.

One thread at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import reduce
from operator import xor
from typing import Final

import numpy as np
import numpy.ma  # else the first `numpy.unique` loads it, which takes 20 ms
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from p2pstore.gossip.locations.location_slots import RowChains, RowSlots
from p2pstore.gossip.locations.reserved_memory import reserve
from p2pstore.location_table import (
    BLOCK_ROWS,
    FEW_DIGESTS,
    HALF_WORDS,
    LOCATION_BYTES,
    RECORD,
    WHOLE,
    LocationTable,
    Rows,
    Words,
    block_count,
    format_table,
    table_bytes,
)
from p2pstore.objects import DIGEST_BYTES

_DIGEST_AND_REST: Final = np.dtype(f"V{DIGEST_BYTES},V{LOCATION_BYTES - DIGEST_BYTES}")
_REMOVED: Final = 0x80
_FLAGS: Final = LOCATION_BYTES - 1
_VERSION_START: Final = DIGEST_BYTES
_VERSION_END: Final = DIGEST_BYTES + 10
_FEW: Final = 64
"""Fewer operations than this are quicker one by one."""
DEFAULT_SALT: Final = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""For tables whose digests are this process's own."""


class LocationRows:
    """Slots, their rows, and how rows are found. The table is `table`, an empty one, or memory of this process alone
    with room for about `max_records` records in all slots. `salt`: 128 bits that others cannot guess."""

    def __init__(
        self, max_records: int, salt: int = DEFAULT_SALT, table: LocationTable | None = None
    ) -> None:
        if table is None:
            blocks = block_count(max_records)
            table = format_table(reserve(table_bytes(blocks)), blocks, salt)
        self.table = table
        self._slots = RowSlots(table, self._move)
        self._chains = RowChains(table)
        self._fields, self._whole = table.fields, table.whole
        self._hashes = array("Q", [0])
        self.record_count = 0
        """Records in all slots that were not discarded."""

    def close(self) -> None:
        """Let go of memory that others have mapped, not by the garbage collector. Nothing may be called after it."""
        del self.table, self._slots, self._chains, self._fields, self._whole

    def open(self) -> int:
        """A new, empty slot: a small number that may be that of a discarded one."""
        slot = self._slots.open()
        if slot == len(self._hashes):
            self._hashes.append(0)
        return slot

    def count(self, slot: int) -> int:
        return self._slots.count(slot)

    def hash(self, slot: int) -> int:
        """XOR of xxh3-64 over the slot's records."""
        return self._hashes[slot]

    def has_room(self, count: int) -> bool:
        """Whether that many more records surely fit into one slot."""
        return self._slots.room >= count + 2 * BLOCK_ROWS

    def discard(self, slot: int) -> None:
        """Close a slot: nothing of it is found any more. `sweep` frees its rows."""
        self.record_count -= self._slots.count(slot)
        self._hashes[slot] = 0
        self._slots.discard(slot)

    def sweep(self, limit_rows: int) -> bool:
        """Free about that many rows of discarded slots. Whether there are more."""
        rows = self._slots.take_discarded(limit_rows)
        if rows.size:
            self._chains.remove_many(rows)
        return self._slots.any_discarded

    def pack(self, slot: int) -> bytes:
        """All records of a slot, one after the other, in no particular order."""
        return b"".join([self._whole[first:end].data for first, end in self._slots.runs(slot)])

    def records(self, slot: int, start: int, stop: int) -> bytes:
        """Packed records at these positions of a slot: see `digests`."""
        return self._whole[self._slots.rows(slot, start, stop)].tobytes()

    def digests(self, slot: int, start: int, stop: int) -> list[bytes]:
        """Digests of the records at these positions of a slot, which are 0 to `count` - 1. A record keeps its
        position, or takes that of another that went; the last one fills the gap."""
        rows = self._slots.rows(slot, start, stop)
        return digests_of(self._whole[rows])

    def get(self, slot: int, digest: bytes) -> bytes | None:
        """The slot's packed record of a digest."""
        row, _ = self._locate(slot, digest)
        return self.table.record(row) if row else None

    def known(self, digests: bytes) -> set[int]:
        """The numbers of those packed digests that any slot has a record of."""
        if not self.record_count:
            return set()
        if len(digests) <= FEW_DIGESTS * DIGEST_BYTES:
            return {number for number, _, _ in self.table.find_few(digests)}
        return set(self.table.find_many(digests).queries.tolist())

    @property
    def any_discarded(self) -> bool:
        return self._slots.any_discarded

    def _locate(self, slot: int, digest: bytes) -> tuple[int, int]:
        """(row, link to it) of a slot's record; (0, 0) when there is none."""
        if len(digest) != DIGEST_BYTES:
            return 0, 0
        table, wanted = self.table, digest[0] | digest[1] << 8
        link, begins, at = table.link, table.begins, table.head_of(digest)
        while row := link[at]:
            if (
                begins[row * HALF_WORDS] == wanted
                and table.owner(row) == slot
                and table.record(row).startswith(digest)
            ):
                return row, at
            at = row
        return 0, 0

    def _locate_many(self, slot: int, fields: npt.NDArray[np.void], mixed: Words) -> tuple[Rows, Rows]:
        """The slot's row of each record's digest (0 where there is none), and the links to the rows."""
        first, second = fields["first"], fields["second"]
        found, links = np.zeros(fields.size, np.intp), np.zeros(fields.size, np.intp)
        table, queries = self.table, np.arange(fields.size)
        at = table.heads_of(mixed)
        rows = table.following(at)
        while live := np.count_nonzero(rows):
            if 2 * live < rows.size:  # finished chains stay in row 0, whose link is 0
                going_on = rows.nonzero()[0]
                rows, at, queries = rows[going_on], at[going_on], queries[going_on]
                first, second = first[going_on], second[going_on]
            same = (table.first[rows] == first).nonzero()[0]
            if same.size:
                there = rows[same]
                right = (table.second[there] == second[same]) & (table.owners(there) == slot)
                right &= there != 0
                if not right.all():
                    same, there = same[right], there[right]
                found[queries[same]], links[queries[same]] = there, at[same]
                rows[same] = 0
            at, rows = rows, table.following(rows)
        return found, links

    def _move(self, row: int, to: int) -> None:
        record = self.table.record(row)
        self._chains.replace(row, to, record[:DIGEST_BYTES])
        self.table.write(to, record)


class LocationIndex(LocationRows):
    """Rows that are written, one by one or many at a time: see the module's docstring."""

    def put(self, slot: int, record: bytes) -> bool:
        """Have a packed record, which is no withdrawal, be the slot's record of its digest. Whether it was not already.
        Raises `MemoryError` when the table is full: see `has_room`."""
        row, _ = self._locate(slot, record[:DIGEST_BYTES])
        if row and self.table.record(row) == record:
            return False
        self._put(slot, row, record)
        return True

    def apply(self, slot: int, operations: bytes) -> None:
        """Carry out packed operations in order. A withdrawal counts only for the version that is held. Raises
        `MemoryError`, with some of them carried out, when the table is full: see `has_room`."""
        if len(operations) < _FEW * LOCATION_BYTES:
            for start in range(0, len(operations), LOCATION_BYTES):
                self._apply_one(slot, operations[start : start + LOCATION_BYTES])
            return
        self._slots.use_blocks(slot)
        whole, fields = np.frombuffer(operations, WHOLE), np.frombuffer(operations, RECORD)
        mixed = self.table.mix(fields["first"], fields["second"])
        ordered = np.sort(mixed)
        if (ordered[1:] != ordered[:-1]).all():
            self._apply_unique(slot, whole, fields, mixed)
        else:
            self._apply_in_rounds(slot, whole, fields, mixed)
        self._slots.drop_last(slot, 0)  # blocks only where they are needed

    def load(self, slot: int, records: bytes | memoryview) -> None:
        """Put in many records of digests that the slot does not hold, each of another one."""
        self._slots.use_blocks(slot)
        whole = np.frombuffer(records, WHOLE)
        rows = self._slots.take_many(slot, whole.size)
        self._whole[rows] = whole
        self._chains.add_many(rows)
        self._hashes[slot] ^= hash_of(whole.tolist())
        self.record_count += whole.size
        self._slots.drop_last(slot, 0)

    def _apply_in_rounds(
        self, slot: int, whole: npt.NDArray[np.void], fields: npt.NDArray[np.void], mixed: Words
    ) -> None:
        """Operations of which some have the same digest: first the first of each, then the second, ..., but
        none that a later one overwrites. So it is no matter how often one key was put."""
        order = np.argsort(mixed, kind="stable")
        order = order[_not_overwritten(fields[order], _begins(mixed[order]))]
        whole, fields, mixed = whole[order], fields[order], mixed[order]
        positions = np.arange(order.size)
        turns = positions - np.maximum.accumulate(np.where(_begins(mixed), positions, 0))
        for turn in range(int(turns.max()) + 1):
            these = np.flatnonzero(turns == turn)
            if these.size < _FEW:
                for operation in whole[np.flatnonzero(turns >= turn)].tolist():
                    self._apply_one(slot, operation)
                return
            self._apply_unique(slot, whole[these], fields[these], mixed[these])

    def _apply_unique(
        self, slot: int, whole: npt.NDArray[np.void], fields: npt.NDArray[np.void], mixed: Words
    ) -> None:
        """Carry out operations that are all of different digests, in a slot with blocks."""
        found, links = self._locate_many(slot, fields, mixed)
        withdrawn = fields["flags"] >= _REMOVED
        held = found != 0
        written = ~withdrawn
        dropping = np.flatnonzero(withdrawn & held)
        old = self._fields[found[dropping]]
        same = (old["clock"] == fields["clock"][dropping]) & (
            old["writer"] == fields["writer"][dropping]
        )
        dropping = dropping[same]
        dropped = found[dropping]
        replacing = np.flatnonzero(written & held)
        replaced = found[replacing]
        self._hashes[slot] ^= (
            hash_of(whole[written].tolist())
            ^ hash_of(self._whole[replaced].tolist())
            ^ hash_of(self._whole[dropped].tolist())
        )
        self._whole[replaced] = whole[replacing]
        if dropped.size:
            self._chains.remove_many(dropped, links[dropping])
        adding = np.flatnonzero(written & ~held)
        self._fill(slot, dropped, whole[adding], mixed[adding])

    def _fill(self, slot: int, dropped: Rows, added: npt.NDArray[np.void], mixed: Words) -> None:
        """Put records in: first into these rows, which were unlinked. Those that are left over are freed."""
        rows = dropped[: added.size]
        if rows.size < added.size:
            more = self._slots.take_many(slot, added.size - rows.size)
            rows = np.concatenate((rows, more))
        if rows.size:
            self._whole[rows] = added
            self._chains.add_many(rows, mixed)
        if dropped.size > added.size:
            self._close_holes(slot, dropped[added.size :])
        self.record_count += added.size - dropped.size

    def _close_holes(self, slot: int, holes: Rows) -> None:
        """Move the last rows of a slot into unlinked ones, and free those at the end."""
        count = self._slots.count(slot)
        last = self._slots.rows(slot, count - holes.size, count)
        at_end, free = set(last.tolist()), set(holes.tolist())
        moving, to = at_end - free, free - at_end
        if moving:
            rows, places = np.array([*moving], np.intp), np.array([*to], np.intp)
            self._whole[places] = self._whole[rows]
            self._chains.replace_many(rows, places)
        self._slots.drop_last(slot, holes.size)

    def _apply_one(self, slot: int, operation: bytes) -> None:
        digest = operation[:DIGEST_BYTES]
        row, at = self._locate(slot, digest)
        if operation[_FLAGS] & _REMOVED:
            if row:
                self._withdraw(slot, row, at, operation)
            return
        self._put(slot, row, operation)

    def _put(self, slot: int, row: int, record: bytes) -> None:
        """Write a record into the slot's row of its digest; `row` is 0 when it has none."""
        if row:
            self._hashes[slot] ^= xxh3_64_intdigest(self.table.record(row))
        else:
            row, digest = self._slots.take(slot), record[:DIGEST_BYTES]
            self.table.write(row, digest)
            self._chains.add(row, digest)
            self.record_count += 1
        self._hashes[slot] ^= xxh3_64_intdigest(record)
        self.table.write(row, record)

    def _withdraw(self, slot: int, row: int, at: int, operation: bytes) -> None:
        held = self.table.record(row)
        version = slice(_VERSION_START, _VERSION_END)
        if held[version] != operation[version]:
            return
        self._hashes[slot] ^= xxh3_64_intdigest(held)
        self._chains.remove(row, at)
        last = self._slots.last(slot)
        if last != row:
            self._move(last, row)
        self._slots.drop_last(slot, 1)
        self.record_count -= 1


def _begins(ordered: Words) -> npt.NDArray[np.bool_]:
    """Where a number is another than the one before it."""
    return np.concatenate(([True], ordered[1:] != ordered[:-1]))


def _not_overwritten(
    fields: npt.NDArray[np.void], begins: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Of operations in groups (each with its own in order): those that no later one puts another record over."""
    positions = np.arange(begins.size)
    starts = np.flatnonzero(begins)
    puts = np.where(fields["flags"] < _REMOVED, positions, -1)
    last_put = np.repeat(np.maximum.reduceat(puts, starts), np.diff(starts, append=begins.size))
    # Two digests may be in one group, by chance.
    other = (fields["first"] != fields["first"][last_put]) | (
        fields["second"] != fields["second"][last_put]
    )
    kept: npt.NDArray[np.bool_] = (positions >= last_put) | other
    return kept


def digests_of(records: bytes | bytearray | memoryview | npt.NDArray[np.void]) -> list[bytes]:
    """The digests of packed records."""
    found: list[bytes] = np.frombuffer(records, _DIGEST_AND_REST)["f0"].tolist()
    return found


def hash_of(records: Iterable[bytes]) -> int:
    """XOR of xxh3-64 over packed records."""
    return reduce(xor, map(xxh3_64_intdigest, records), 0)
