"""A table of location records in one piece of memory, and how to find rows in it. Pure.

The gossip of a peer keeps in it what others hold (`p2pstore.gossip.locations.location_index` changes it), and the
clients of that peer map it to look keys up themselves. It is native-endian and for one machine only.

    header        4,096 bytes: 64-bit words, see `Word`
    counted       a byte for each of `MAX_COUNTED_SLOTS` slots: 1 when a client is to count its records
    members       the short name of the member whose records those of a counted slot are, 8 bytes each
    apart         2^20 counters, by the digest's first bits: facts known of keys from elsewhere
    floors        2^18 clocks of 8 bytes, by the digest's first bits: versions up to it may be forbidden
    block owners  the slot that owns each block of 32 rows
    row owners    the slot that owns each row of a shared block
    links         of rows and of buckets
    rows          of 42 bytes, each a packed location record

A hash with chains leads from a digest to its rows: linear hashing (Litwin 1980) with about one row a bucket. A link
is 4 bytes: one for each row, to the next in its chain, and one for each bucket, to the first; 0 ends a chain.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from p2pstore.errors import ProtocolError, ProtocolMismatch
from p2pstore.objects import DIGEST_BYTES

LOCATION: Final = struct.Struct("<16sQHQI3sB")
"""A packed location record: digest, clock, writer, root, slot, size in 4 KiB units (3 bytes), flags. The two lowest
flags are the tier."""
LOCATION_BYTES: Final = LOCATION.size
assert LOCATION_BYTES == 42
TIER_FLAGS: Final = 3
VERSION_BYTES: Final = 18
"""Clock, writer and root, as a record has them behind its digest."""
RECORD: Final = np.dtype(
    {
        "names": ["first", "second", "clock", "writer", "root", "version", "size", "flags"],
        "formats": ["<u8", "<u8", "<u8", "<u2", "<u8", f"V{VERSION_BYTES}", "<u4", "u1"],
        "offsets": [
            *(0, 8, DIGEST_BYTES, DIGEST_BYTES + 8),
            *(DIGEST_BYTES + 10, DIGEST_BYTES, LOCATION_BYTES - 4, LOCATION_BYTES - 1),
        ],
        "itemsize": LOCATION_BYTES,
    }
)
"""A packed location record, as far as many are looked at at once. The highest byte of `size` is `flags`."""
WHOLE: Final = np.dtype(f"V{LOCATION_BYTES}")
"""A packed location record as one thing."""
CLOCK: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 8)
"""Where a packed record has its version's clock."""

BLOCK_ROWS: Final = 32
ROWS_PER_BUCKET: Final = 1
FIRST_BUCKETS: Final = 64
SPLIT_BATCH: Final = 64
"""Buckets are split at least this many at a time: numpy is slow for few."""
FEW_DIGESTS: Final = 32
"""Digests up to which one search after the other is faster: numpy takes 30 us for any, 90 us with cold caches."""
NOBODY: Final = 0
"""Owner of the rows of a discarded slot. Slots are numbered from 1."""
SHARED: Final = 0xFFFFFFFF
"""Owner of a block whose rows have owners of their own."""

MAX_COUNTED_SLOTS: Final = 1 << 16
"""Of slots with higher numbers, a client asks its peer."""
APART_COUNTERS: Final = 1 << 20
FLOOR_CLOCKS: Final = 1 << 18
_HEADER_BYTES: Final = 4096
_PAGE_BYTES: Final = 4096
_MAGIC: Final = int.from_bytes(b"p2plocs4", "little")
"""The last character is the layout's version: the peer and its clients are different processes."""
HALF_WORDS: Final = LOCATION_BYTES // 2
"""Of 16 bits, in a row."""
_WORDS: Final = struct.Struct("<IIII")
_MASK: Final = (1 << 64) - 1
_HALF: Final = np.uint64(32)
_NO_LIMIT: Final = 1 << 62

Rows = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint64]


class Word(IntEnum):
    """Words of the header."""

    MAGIC = 0
    BLOCKS = 1
    """How many blocks the table has room for: that says where everything is."""
    SALT = 2
    """And the next one."""
    BUCKETS = 4
    LEVEL = 5
    """The power of two of buckets that the round of splits began with."""
    CHANGES = 6
    """Odd while something is being changed."""
    ALIVE_AT = 7
    """Monotonic nanoseconds at which the peer last vouched for the table; 0: do not use it."""
    BELIEVED_AFTER = 8
    """Records count whose versions' clocks are above this ..."""
    BELIEVED_BEFORE = 9
    """... and below this. Whether others do, only the peer can say."""


# Plain numbers: this is looked at for every key.
_BUCKETS: Final = int(Word.BUCKETS)
_LEVEL: Final = int(Word.LEVEL)


def block_count(max_rows: int) -> int:
    """The number of blocks of a table with `max_rows` rows."""
    return -(-max_rows // BLOCK_ROWS) + 1


def table_bytes(blocks: int) -> int:
    """The memory in bytes of a table with that number of blocks."""
    return _part_starts(blocks)[-1]


def _part_starts(blocks: int) -> list[int]:
    """Where the parts begin, and the end."""
    rows = blocks * BLOCK_ROWS
    links = rows + rows // ROWS_PER_BUCKET + FIRST_BUCKETS + SPLIT_BATCH
    starts, end = [0], 0
    for length in (
        *(_HEADER_BYTES, MAX_COUNTED_SLOTS, 8 * MAX_COUNTED_SLOTS, APART_COUNTERS, 8 * FLOOR_CLOCKS),
        *(4 * blocks, 4 * rows, 4 * links, LOCATION_BYTES * rows),
    ):
        end += -(-length // _PAGE_BYTES) * _PAGE_BYTES
        starts.append(end)
    return starts


class LocationTable:
    """The parts of a table in `memory`, and searches in it.

    Digests are uniformly random by themselves, but a member may announce any. So the hash is Dietzfelbinger's: four
    32-bit words times four secret 64-bit numbers, of the sum the upper half. That is strongly universal: whatever
    digests a member picks without knowing the numbers, two share a bucket no more often than random ones. (Two
    64-bit words times two numbers would not do: multiples of 2^56 share a bucket whatever the numbers are.)

    `memory` is a `mmap`, or a `bytearray`. Raises `ProtocolMismatch` for another layout, and `ProtocolError` when its
    length is not right.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        view = memoryview(memory)
        if len(view) < _HEADER_BYTES:
            raise ProtocolError(f"a table of locations cannot have {len(view)} bytes")
        words = view[:_HEADER_BYTES].cast("Q")
        blocks = words[Word.BLOCKS]
        if words[Word.MAGIC] != _MAGIC:
            raise ProtocolMismatch("this memory is no table of locations that this version can read")
        if len(view) < table_bytes(blocks):  # a mapping is whole pages, and those may be large
            raise ProtocolError(f"a table of {blocks} blocks does not fit into {len(view)} bytes")
        parts = [view[start:end] for start, end in pairwise(_part_starts(blocks))]
        self.words = words
        self.block_limit = blocks
        self.counted, self.members, self.apart = parts[1], parts[2].cast("Q"), parts[3]
        # Numpy is slow for one element, and a memoryview for many.
        self.floors, self.floor_clocks = parts[4].cast("Q"), np.frombuffer(parts[4], np.uint64)
        self.block_owner, self.block_owners = parts[5].cast("I"), np.frombuffer(parts[5], np.uint32)
        self.row_owner, self.row_owners = parts[6].cast("I"), np.frombuffer(parts[6], np.uint32)
        self.link, self.links = parts[7].cast("I"), np.frombuffer(parts[7], np.uint32)
        self.counts = np.frombuffer(self.counted, np.uint8)
        self.aparts = np.frombuffer(self.apart, np.uint8)
        self.row_limit = blocks * BLOCK_ROWS
        self.heads = self.row_limit
        """The link of the first bucket."""
        rows = parts[8][: self.row_limit * LOCATION_BYTES]
        self._rows_start = _part_starts(blocks)[8]
        self.begins = rows.cast("H")
        self._many_begins = np.frombuffer(rows, "<u2")
        """Of every `HALF_WORDS`, the first is the first two bytes of a row, as a quick look at it."""
        self.whole: npt.NDArray[np.void] = np.frombuffer(rows, WHOLE)
        self.fields = np.frombuffer(rows, RECORD)
        self.first, self.second = self.fields["first"], self.fields["second"]
        self._clocks = self.fields["clock"]
        self._writers = self.fields["writer"]
        self._versions = self.fields["version"]
        self._flags = self.fields["flags"]
        self._sizes = self.fields["size"]
        secret = bytes(view[8 * Word.SALT : 8 * Word.SALT + 16])
        self._factors = tuple(xxh3_64_intdigest(secret, seed=number) for number in range(4))
        self._many_factors = np.array(self._factors, np.uint64)

    # --- one row -------------------------------------------------------------------------------

    def record(self, row: int) -> bytes:
        """The packed record in a row."""
        start = self._rows_start + row * LOCATION_BYTES
        packed: bytes = self._memory[start : start + LOCATION_BYTES]
        return packed

    def write(self, row: int, packed: bytes) -> None:
        """Put a packed record, or the beginning of one, into a row."""
        start = self._rows_start + row * LOCATION_BYTES
        self._memory[start : start + len(packed)] = packed

    def owner(self, row: int) -> int:
        """The slot that owns a row; 0 (`NOBODY`) when the row is free."""
        owner = self.block_owner[row // BLOCK_ROWS]
        return self.row_owner[row] if owner == SHARED else owner

    def head_of(self, digest: bytes) -> int:
        """The link to the first row of the digest's chain."""
        words, factors = _WORDS.unpack(digest), self._factors
        mixed: int = (
            words[0] * factors[0] + words[1] * factors[1] + words[2] * factors[2] + words[3] * factors[3]
            & _MASK
        ) >> 32
        level = self.words[_LEVEL]
        bucket = mixed & (2 * level - 1)
        return self.heads + (bucket if bucket < self.words[_BUCKETS] else mixed & (level - 1))

    def find(self, digest: bytes) -> list[tuple[int, bytes]]:
        """Which slots hold a record of the digest, and the packed records."""
        if len(digest) != DIGEST_BYTES:
            return []
        return [(slot, record) for _, slot, record in self.find_few(digest)]

    def find_few(self, digests: bytes, most_rows: int = _NO_LIMIT) -> list[tuple[int, int, bytes]]:
        """`find` of digests, packed one after the other: each record behind the number of its digest. `find_many` is
        slower for up to `FEW_DIGESTS`. Raises `IndexError` when one of them takes a look at over `most_rows` rows, or
        the peer changes the table meanwhile."""
        found = []
        link, begins, memory, factors = self.link, self.begins, self._memory, self._factors
        heads, rows_start = self.heads, self._rows_start
        block_owner, row_owner = self.block_owner, self.row_owner
        level, buckets_there = self.words[_LEVEL], self.words[_BUCKETS]
        # A call for each step would take longer than the step.
        for number, (first, second, third, fourth) in enumerate(_WORDS.iter_unpack(digests)):
            mixed = (
                first * factors[0] + second * factors[1] + third * factors[2] + fourth * factors[3]
                & _MASK
            ) >> 32
            bucket = mixed & (2 * level - 1)
            row = link[heads + (bucket if bucket < buckets_there else mixed & (level - 1))]
            begin, rows_left = first & 0xFFFF, most_rows
            while row and rows_left:
                if begins[row * HALF_WORDS] == begin:
                    start = rows_start + row * LOCATION_BYTES
                    record = memory[start : start + LOCATION_BYTES]
                    if _WORDS.unpack_from(record) == (first, second, third, fourth):
                        owner = block_owner[row // BLOCK_ROWS]
                        if owner == SHARED:
                            owner = row_owner[row]
                        if owner != NOBODY:
                            found.append((number, owner, record))
                row = link[row]
                rows_left -= 1
            if row:
                raise IndexError("the chain of rows is too long")
        return found

    # --- many rows -----------------------------------------------------------------------------

    def owners(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """`owner` of each."""
        owners = self.block_owners.take(rows // BLOCK_ROWS)
        shared = (owners == SHARED).nonzero()[0]
        if shared.size:
            owners[shared] = self.row_owners[rows[shared]]
        return owners

    def mix(self, first: Words, second: Words) -> Words:
        """The salted hash of each digest."""
        digests = np.empty((len(first), 2), np.uint64)
        digests[:, 0], digests[:, 1] = first, second
        return self._mix(digests.view(np.uint32))

    def _mix(self, words: npt.NDArray[np.uint32]) -> Words:
        mixed: Words = words.astype(np.uint64) @ self._many_factors
        return mixed

    def heads_of(self, mixed: Words) -> Rows:
        """The link to the first row of each chain."""
        level, buckets_there = self.words[_LEVEL], self.words[_BUCKETS]
        high = (mixed >> _HALF).astype(np.intp)
        buckets = high & (2 * level - 1)
        late = (buckets >= buckets_there).nonzero()[0]
        if late.size:
            buckets[late] = high[late] & (level - 1)
        buckets += self.heads
        return buckets

    def following(self, at: Rows) -> Rows:
        """Where each of these links leads."""
        return self.links.take(at).astype(np.intp)

    def find_many(self, digests: bytes, most_rows: int = _NO_LIMIT) -> Matches:
        """`find` of many digests, packed one after the other."""
        wanted = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        queries = np.arange(len(wanted))
        rows = self.following(self.heads_of(self._mix(wanted.view(np.uint32))))
        found_queries, found_rows = [queries[:0]], [rows[:0]]
        while live := np.count_nonzero(rows):
            if not most_rows:
                raise IndexError("the chain of rows is too long")
            if 2 * live < rows.size:  # finished chains stay in row 0, whose link is 0
                going_on = rows.nonzero()[0]
                rows, queries = rows.take(going_on), queries.take(going_on)
            found_queries.append(queries)
            found_rows.append(rows)
            rows = self.following(rows)
            most_rows -= 1
        queries, rows = np.concatenate(found_queries), np.concatenate(found_rows)
        begins = wanted[:, 0].astype("<u2")
        alike = self._many_begins.take(rows * HALF_WORDS) == begins.take(queries)
        some = alike.nonzero()[0]
        queries, rows = queries.take(some), rows.take(some)
        same = self.first[rows] == wanted[:, 0].take(queries)
        same &= self.second[rows] == wanted[:, 1].take(queries)
        same &= rows != 0
        if not same.all():
            queries, rows = queries[same], rows[same]
        return self._owned(queries, rows)

    def clocks(self, rows: Rows) -> Words:
        """The clocks of the versions in these rows."""
        clocks: Words = self._clocks[rows]
        return clocks

    def versions(self, rows: Rows) -> npt.NDArray[np.void]:
        """The packed versions in these rows."""
        versions: npt.NDArray[np.void] = self._versions[rows]
        return versions

    def writers(self, rows: Rows) -> npt.NDArray[np.uint16]:
        """The hashes of the writers of the versions in these rows."""
        writers: npt.NDArray[np.uint16] = self._writers[rows]
        return writers

    def tiers(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """The tiers of the copies in these rows."""
        tiers: npt.NDArray[np.uint8] = self._flags[rows] & np.uint8(TIER_FLAGS)
        return tiers

    def size_units(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """The sizes of the copies in these rows, in units of 4 KiB."""
        sizes: npt.NDArray[np.uint32] = self._sizes[rows] & np.uint32(0xFFFFFF)
        return sizes

    def _owned(self, queries: Rows, rows: Rows) -> Matches:
        slots = self.owners(rows)
        held = slots != NOBODY
        if held.all():
            return Matches(queries, rows, slots)
        return Matches(queries[held], rows[held], slots[held])


class Matches:
    """Rows found for many digests: row `rows[i]`, of slot `slots[i]`, has the digest number `queries[i]`."""

    __slots__ = ("queries", "rows", "slots")

    def __init__(self, queries: Rows, rows: Rows, slots: npt.NDArray[np.uint32]) -> None:
        self.queries = queries
        self.rows = rows
        self.slots = slots


def format_table(memory: Any, blocks: int, salt: int) -> LocationTable:
    """Make an empty table in zeroed memory of `table_bytes(blocks)` bytes. `salt`: 128 bits that members of the
    cluster cannot guess."""
    words = memoryview(memory)[:_HEADER_BYTES].cast("Q")
    words[Word.MAGIC], words[Word.BLOCKS] = _MAGIC, blocks
    words[Word.SALT], words[Word.SALT + 1] = salt & _MASK, salt >> 64
    words[Word.BUCKETS] = words[Word.LEVEL] = FIRST_BUCKETS
    return LocationTable(memory)


def apart_counter(digest: bytes) -> int:
    """Which of the counters `apart` is the digest's: by its first 20 bits."""
    return digest[0] | digest[1] << 8 | (digest[2] & 15) << 16


def floor_clock(digest: bytes) -> int:
    """Which of the clocks `floors` is the digest's: by its first 18 bits."""
    return apart_counter(digest) & (FLOOR_CLOCKS - 1)
