"""Cluster records outlive their writer at every peer: floors, checkpoint heads, switches. Pure.

Floors are kept as `floor_set` says: all of them, until a horizon passes them. Of every other (kind, scope, name) the
record with the highest version is kept. Sets of two peers are compared by the XOR hashes of 64 buckets of 64 cells and
spread twice: a new record rides on a bounded number of messages at once, and a peer that missed it gets it when
buckets are compared.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, product
from random import Random
from typing import Final

import xxhash

from p2pstore.errors import ProtocolError
from p2pstore.gossip.checkpoint_records import names_itself, read_head
from p2pstore.gossip.exchange.rumors import Rumors
from p2pstore.gossip.floors.floor_set import REFUSE_ABOVE, Floor, FloorSet
from p2pstore.gossip.gossip_messages import CLUSTER_BUCKETS, CLUSTER_CELLS
from p2pstore.gossip.records import ClusterRecord, ClusterRecordKind, Member, SignedRecord
from p2pstore.objects import MIB, clock_from_unix_seconds
from p2pstore.runtime.stepping import Steps, run_through

MAX_OTHER_RECORDS: Final = 10_000
MAX_OTHER_BYTES: Final = 16 * MIB
PURGE_STEP: Final = 500
"""Keys of floors looked at in one step: 3 ms when each has a record of its own."""
CELLS_PER_STEP: Final = 64
"""Of 4,096."""
RUMOR_AGE: Final = clock_from_unix_seconds(60.0)
"""Older records are no rumours: a peer that is told of many such was away, and the others have them."""

RecordName = tuple[int, int, bytes]
"""(kind, scope, name): what a record that is no floor is about."""


@dataclass(slots=True, eq=False)
class _Other:
    """A record that is no floor."""

    record: ClusterRecord
    signed: SignedRecord
    hash: int

    @property
    def body(self) -> bytes:
        return self.signed.body

    @property
    def size_bytes(self) -> int:
        return len(self.signed.body) + len(self.signed.signature)


_Kept = Floor | _Other


def name_of(record: ClusterRecord) -> RecordName:
    return record.kind, record.scope, record.name


def rank_of(record: ClusterRecord) -> tuple[int, int, bytes, bytes]:
    """Of two records about the same, the one with the higher rank stays. Body and signer break the tie of equal
    versions, so that all peers keep the same record."""
    return record.clock, record.writer, record.body, record.signer


class ClusterRecords:
    """See the module's docstring."""

    def __init__(self, floors: FloorSet | None = None) -> None:
        self.floors = FloorSet() if floors is None else floors
        self.floors_refused = 0
        """How often a floor was not taken in, as there were twice as many as there may be."""
        self._others: dict[RecordName, _Other] = {}
        self._heads: dict[tuple[str, str], dict[RecordName, ClusterRecord]] = {}
        """Heads of checkpoints, by namespace and name: a name may have several publishers."""
        self._other_bytes = 0
        self._cells: defaultdict[tuple[int, int], dict[bytes, _Kept]] = defaultdict(dict)
        """All records, by cell and body."""
        self._sizes = [0] * CLUSTER_BUCKETS
        self._hashes = [0] * CLUSTER_BUCKETS
        self._cell_hashes = [[0] * CLUSTER_CELLS for _ in range(CLUSTER_BUCKETS)]
        self._rumors: Rumors[_Kept] = Rumors()
        self._rumors_since = 0

    def __len__(self) -> int:
        return sum(self._sizes)

    def wants(self, record: ClusterRecord, signed: SignedRecord) -> bool:
        """Whether the record would be new: ask before its signature is checked."""
        if record.kind != ClusterRecordKind.FLOOR:
            known = self._others.get(name_of(record))
            newer = known is None or rank_of(record) > rank_of(known.record)
            return newer and names_itself(record)
        if self.floors.is_dropped(record):
            return False
        cell = self._cells.get(cell_of(record.name))
        if cell is not None and signed.body in cell:
            return False
        if self.floors.crowding > REFUSE_ABOVE:
            self.floors_refused += 1
            return False
        return True

    def offer(self, record: ClusterRecord, signed: SignedRecord) -> bool:
        """Keep a verified record. Whether it was new; recent ones join the rumours."""
        if not self.wants(record, signed):
            return False
        kept: _Kept
        if record.kind == ClusterRecordKind.FLOOR:
            kept = self.floors.add(record, signed)
        else:
            kept = self._keep_other(record, signed)
        place = cell_of(record.name)
        self._cells[place][signed.body] = kept
        self._sizes[place[0]] += 1
        self._hash(place, kept.hash)
        if record.clock >= self._rumors_since:
            self._rumors.add(kept)
        self._limit_others()
        return signed.body in self._cells.get(place, ())

    def take_out(self, record: ClusterRecord, signed: SignedRecord) -> None:
        """Forget a record whose stamp is to be another one: see `core.timekeeping`."""
        kept = self._cells.get(cell_of(record.name), {}).get(signed.body)
        if isinstance(kept, Floor):
            self.floors.take_out(kept)
            self._take_out(record.name, kept)
        elif kept is not None:
            self._remove_other(name_of(record))

    def get(self, kind: int, scope: int, name: bytes) -> ClusterRecord | None:
        """The record about a name; floors are not found by name."""
        kept = self._others.get((kind, scope, name))
        return None if kept is None else kept.record

    def of_kind(self, kind: int) -> list[ClusterRecord]:
        """All records of a kind other than floors."""
        return [each.record for each in self._others.values() if each.record.kind == kind]

    def heads_of(self, namespace: str, name: str) -> list[ClusterRecord]:
        """The heads of a checkpoint's name, one for each of its publishers."""
        return list(self._heads.get((namespace, name), {}).values())

    @property
    def hash(self) -> int:
        """XOR of all buckets' hashes."""
        total = 0
        for bucket in self._hashes:
            total ^= bucket
        return total

    @property
    def bucket_hashes(self) -> list[int]:
        """64 hashes, each the XOR of xxh3-64 over its records' bodies."""
        return list(self._hashes)

    def bucket_size(self, bucket: int) -> int:
        return self._sizes[bucket]

    def cell_hashes(self, bucket: int) -> list[int]:
        """The hashes of a bucket's 64 cells; their XOR is the bucket's."""
        return self._cell_hashes[bucket]

    def cell(self, bucket: int, cell: int) -> list[SignedRecord]:
        return [kept.signed for kept in self._cells.get((bucket, cell), {}).values()]

    @property
    def has_rumors(self) -> bool:
        return len(self._rumors) > 0

    def rumors(self, limit_count: int, limit_bytes: int, retransmits: int) -> list[SignedRecord]:
        """New records for the next message, least sent first; each is taken `retransmits` times."""
        chosen: list[SignedRecord] = []
        for kept in list(islice(self._rumors.least_sent(), limit_count)):
            signed = kept.signed
            limit_bytes -= len(signed.body) + len(signed.signature)
            if limit_bytes < 0:
                break
            chosen.append(signed)
            self._rumors.sent(kept, retransmits)
        return chosen

    def note_time(self, clock_now: int) -> None:
        """Records written over a minute before `clock_now` are no rumours from now on."""
        self._rumors_since = max(0, clock_now - RUMOR_AGE)

    def purge(self, limit_keys: int = PURGE_STEP) -> None:
        """Make a step of dropping floors below the horizon."""
        for floor, record in self.floors.purge(limit_keys):
            self._take_out(record.name, floor)

    def dump(self) -> list[SignedRecord]:
        """All records, for the state directory; the horizon goes beside them."""
        return run_through(self.dump_in_steps())

    def dump_in_steps(self) -> Steps[list[SignedRecord]]:
        """`dump`, between whose steps records may come and go: those that are there all the time are in it."""
        found: list[SignedRecord] = []
        for number, cell in enumerate([*self._cells.values()]):
            if number % CELLS_PER_STEP == 0:
                yield
            found += [kept.signed for kept in cell.values()]
        return found

    def load(
        self,
        records: Iterable[tuple[ClusterRecord, SignedRecord]],
        horizon: Mapping[Member, int] | None = None,
    ) -> None:
        """Take in verified records from the state directory. They are no rumours."""
        self.floors.raise_horizon(horizon or {})
        for record, signed in records:
            with suppress(ProtocolError):  # a floor whose keys are no list of keys
                self.offer(record, signed)
        self._rumors.clear()

    def _keep_other(self, record: ClusterRecord, signed: SignedRecord) -> _Other:
        name = name_of(record)
        if name in self._others:
            self._remove_other(name)
        other = self._others[name] = _Other(record, signed, xxhash.xxh3_64_intdigest(signed.body))
        if (head := read_head(record)) is not None:
            self._heads.setdefault((head.namespace, head.name), {})[name] = record
        self._other_bytes += other.size_bytes
        return other

    def _remove_other(self, name: RecordName) -> None:
        other = self._others.pop(name)
        self._other_bytes -= other.size_bytes
        if (head := read_head(other.record)) is not None:
            called = head.namespace, head.name
            del self._heads[called][name]
            if not self._heads[called]:
                del self._heads[called]
        self._take_out(other.record.name, other)

    def _take_out(self, record_name: bytes, kept: _Kept) -> None:
        place = cell_of(record_name)
        cell = self._cells[place]
        del cell[kept.body]
        if not cell:
            del self._cells[place]
        self._sizes[place[0]] -= 1
        self._hash(place, kept.hash)
        self._rumors.discard(kept)

    def _hash(self, place: tuple[int, int], record_hash: int) -> None:
        bucket, cell = place
        self._hashes[bucket] ^= record_hash
        self._cell_hashes[bucket][cell] ^= record_hash

    def _limit_others(self) -> None:
        """Of records that are no floors, the oldest go: they are few, unless a peer writes nonsense."""
        while len(self._others) > MAX_OTHER_RECORDS or self._other_bytes > MAX_OTHER_BYTES:
            name = min(self._others, key=lambda name: (rank_of(self._others[name].record), name))
            self._remove_other(name)


def cell_of(name: bytes) -> tuple[int, int]:
    """Which of the 64 buckets a record's name belongs to, and which of the bucket's 64 cells."""
    return (name[0] % CLUSTER_BUCKETS if name else 0, name[1] % CLUSTER_CELLS if len(name) > 1 else 0)


COMPARED_BUCKETS: Final = 4
"""Buckets whose cells are compared at a time: 2 KiB."""
_BUCKETS: Final = struct.Struct(f"<{CLUSTER_BUCKETS}Q")
_CELLS: Final = struct.Struct(f"<B{CLUSTER_CELLS}Q")

Cells = Mapping[int, tuple[int, ...]]
"""Bucket -> hashes of its cells."""


@dataclass(frozen=True, slots=True)
class TheirRecords:
    """Hashes of another peer's cluster records; `buckets`: None when unsaid."""

    buckets: list[int] | None = None
    cells: Cells = field(default_factory=dict)


def pack_buckets(hashes: Iterable[int]) -> bytes:
    """64 bucket hashes as they travel."""
    return _BUCKETS.pack(*hashes)


def read_buckets(packed: bytes) -> list[int] | None:
    """Bucket hashes; None when there are none. Raises `ProtocolError` when they are not 64."""
    if not packed:
        return None
    if len(packed) != _BUCKETS.size:
        raise ProtocolError(f"cluster record buckets of {len(packed)} bytes")
    return list(_BUCKETS.unpack(packed))


def pack_cells(records: ClusterRecords, buckets: Iterable[int]) -> bytes:
    return b"".join(_CELLS.pack(bucket, *records.cell_hashes(bucket)) for bucket in buckets)


def read_cells(packed: bytes) -> Cells:
    """Raises `ProtocolError` when they are not whole, too many, or of no bucket."""
    count, rest = divmod(len(packed), _CELLS.size)
    if rest or count > COMPARED_BUCKETS:
        raise ProtocolError(f"cluster record cells of {len(packed)} bytes")
    cells = {row[0]: row[1:] for row in _CELLS.iter_unpack(packed)}
    if any(bucket >= CLUSTER_BUCKETS for bucket in cells):
        raise ProtocolError(f"cells of bucket {max(cells)} of {CLUSTER_BUCKETS}")
    return cells


def differing_buckets(records: ClusterRecords, theirs: list[int]) -> list[int]:
    """The numbers of those whose hashes are not the same."""
    mine = records.bucket_hashes
    return [number for number in range(CLUSTER_BUCKETS) if mine[number] != theirs[number]]


def records_for(
    records: ClusterRecords, theirs: TheirRecords, limit_count: int, limit_bytes: int, rng: Random
) -> list[SignedRecord]:
    """Records that the other side may lack: of the cells that differ, else of buckets that hold few."""
    candidates: list[SignedRecord] = []
    if theirs.cells:
        candidates = _of_cells(records, theirs.cells, limit_count, rng)
    elif theirs.buckets is not None:
        differing = differing_buckets(records, theirs.buckets)
        if sum(map(records.bucket_size, differing)) <= limit_count:  # else cells are compared first
            places = product(differing, range(CLUSTER_CELLS))
            candidates = [signed for place in places for signed in records.cell(*place)]
            rng.shuffle(candidates)
    chosen = []
    for signed in candidates:
        limit_bytes -= len(signed.body) + len(signed.signature)
        if limit_bytes < 0:
            break
        chosen.append(signed)
    return chosen


def _of_cells(
    records: ClusterRecords, theirs: Cells, limit_count: int, rng: Random
) -> list[SignedRecord]:
    differing = [
        (bucket, cell)
        for bucket, hashes in theirs.items()
        for cell, (mine, other) in enumerate(zip(records.cell_hashes(bucket), hashes, strict=True))
        if mine != other
    ]
    rng.shuffle(differing)
    cells = (records.cell(*place) for place in differing)
    # Shuffled, so that in the end all of a cell go that holds more than may.
    found = (signed for cell in cells for signed in rng.sample(cell, len(cell)))
    return list(islice(found, limit_count))
