"""What the whole cluster keeps, whatever becomes of the writer: floors, checkpoint heads, switches.
Pure.

Of each (kind, scope, name) the record with the highest version is kept. Sets of two peers are
compared by the XOR hashes of 64 buckets of 64 cells and spread twice: a new record rides on a bounded number of
messages at once, and whoever missed it gets it when buckets are compared.

A floor forbids all copies of a key, or of a namespace's keys, up to its version. A floor of a
namespace makes the floors of its keys below it superfluous: they go. When there are still too many,
the oldest go, and `horizon` says up to where those of each writer are gone: nobody takes them in again,
so that all peers' sets stay alike. Live peers dropped what a floor forbids when they saw it; a peer that
was away compares the horizon with what it has seen (`floor_sync`), and distrusts its older copies.

Records go in steps (`purge`), some hundred at a time: a loop that is held up declares others dead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import xxhash

from p2pstore.gossip.checkpoints import names_itself, read_head
from p2pstore.gossip.exchange.rumors import Rumors
from p2pstore.gossip.floors.floor_epochs import FloorEpochs
from p2pstore.gossip.floors.floor_index import FloorIndex
from p2pstore.gossip.floors.floor_stamps import (
    Stamps,
    hash_stamps,
    lower_stamps,
    raise_stamps,
    without_older,
)
from p2pstore.gossip.locations.published_locations import PublishedLocations
from p2pstore.gossip.messages import CLUSTER_BUCKETS, CLUSTER_CELLS
from p2pstore.gossip.records import (
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    Member,
    SignedRecord,
    member_of,
    namespace_of_floor,
)
from p2pstore.objects import ZERO_VERSION, Version, clock_from_unix_seconds

DEFAULT_LIMIT: Final = 100_000
DEFAULT_LIMIT_BYTES: Final = 64 * 1024 * 1024
HARD_FACTOR: Final = 1.5
"""Above this many times the limit, floors go however young they are, if everybody should know them."""
LAST_FACTOR: Final = 2.0
"""Above this many times the limit they go whoever knows them: memory is bounded first of all."""
DEFAULT_KEPT_SECONDS: Final = 600.0
SEEN_SLACK: Final = clock_from_unix_seconds(120.0)
"""What was seen only just now is not dropped yet: the others may see it an epoch or two later."""
MAX_OTHER_RECORDS: Final = 10_000
MAX_OTHER_BYTES: Final = 16 * 1024 * 1024
PURGE_STEP: Final = 500
RUMOR_AGE: Final = clock_from_unix_seconds(60.0)
"""Older records are no rumours: who is told of many such was away, and the others have them."""

RecordName = tuple[int, int, bytes]
"""(kind, scope, name): what a record is about."""


@dataclass(frozen=True, slots=True)
class _Kept:
    record: ClusterRecord
    signed: SignedRecord
    hash: int
    writer: Member
    namespace: bytes
    """Of a key's floor, where it says so."""

    @property
    def is_floor(self) -> bool:
        return self.record.kind == ClusterRecordKind.FLOOR

    @property
    def size_bytes(self) -> int:
        return len(self.signed.body) + len(self.signed.signature)


def name_of(record: ClusterRecord) -> RecordName:
    """What the record is about."""
    return record.kind, record.scope, record.name


def rank_of(record: ClusterRecord) -> tuple[int, int, bytes, bytes]:
    """Of two records about the same, the one with the higher rank stays.

    Body and signer break the tie of equal versions (two peers may write one floor at the same moment), so
    that all peers keep the same record.
    """
    return record.clock, record.writer, record.body, record.signer


class ClusterRecords:
    """See the module's docstring."""

    def __init__(
        self,
        limit: int = DEFAULT_LIMIT,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        kept_seconds: float = DEFAULT_KEPT_SECONDS,
        published: PublishedLocations | None = None,
    ) -> None:
        self.limit = limit
        """Floors, beyond which the oldest go."""
        self.limit_bytes = limit_bytes
        self.kept_seconds = kept_seconds
        """Younger floors do not go at the limit."""
        self.horizon: Stamps = {}
        """Writer -> clock up to which its floors are gone. Raise it with `raise_horizon` only."""
        self.horizon_hash = 0
        self.compacted_before = 0
        """The highest stamp of the horizon: no floor above it was dropped."""
        self._kept: dict[RecordName, _Kept] = {}
        self._floors: dict[tuple[int, bytes], Version] = {}
        self._others: dict[RecordName, ClusterRecord] = {}
        """Those that are no floors."""
        self._heads: dict[tuple[str, str], dict[RecordName, ClusterRecord]] = {}
        """Heads of checkpoints, by namespace and name: a name may have several publishers."""
        self._published = published
        """Where clients see what floors forbid."""
        self._writers: Counter[Member] = Counter()
        self._floor_bytes = 0
        self._floor_hash = 0
        self._other_bytes = 0
        self._epochs = FloorEpochs()
        self._cells: defaultdict[tuple[int, int], dict[RecordName, None]] = defaultdict(dict)
        self._sizes = [0] * CLUSTER_BUCKETS
        self._hashes = [0] * CLUSTER_BUCKETS
        self._cell_hashes = [[0] * CLUSTER_CELLS for _ in range(CLUSTER_BUCKETS)]
        self._rumors: Rumors[RecordName] = Rumors()
        self._rumors_since = 0
        self._index: FloorIndex[RecordName] = FloorIndex()
        self._beyond: dict[RecordName, None] = {}
        """Old floors that the horizon leaves, taken out of the index so as not to be met again."""
        self._reindex: dict[RecordName, None] = {}
        self._of_namespace: dict[bytes, dict[RecordName, None]] = {}
        self._superseded: dict[bytes, dict[RecordName, None]] = {}
        """Namespaces with a new floor, and the floors of their keys, which are to be looked at."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def floor_count(self) -> int:
        """How many of the records are floors."""
        return len(self._floors)

    # --- keeping -----------------------------------------------------------------------------

    def wants(self, record: ClusterRecord) -> bool:
        """Whether the record would be new: ask before its signature is checked."""
        kept = self._kept.get(name_of(record))
        if kept is not None and rank_of(record) <= rank_of(kept.record):
            return False
        if record.kind != ClusterRecordKind.FLOOR:
            return names_itself(record)
        if self.horizon and record.clock <= self.horizon.get(member_of(record.signer), 0):
            return False
        return not self._is_superseded(record, namespace_of_floor(record))

    def offer(self, record: ClusterRecord, signed: SignedRecord) -> bool:
        """Keep a verified record. Whether it was new; recent ones join the rumours."""
        if not self.wants(record):
            return False
        name = name_of(record)
        replaced = self._kept.get(name)
        if replaced is not None:
            self._remove(name, replaced, by_clock=record.clock)
        kept = _Kept(
            record,
            signed,
            xxhash.xxh3_64_intdigest(signed.body),
            member_of(record.signer),
            namespace_of_floor(record),
        )
        self._kept[name] = kept
        bucket, cell = cell_of(record.name)
        self._cells[bucket, cell][name] = None
        self._sizes[bucket] += 1
        self._hash(bucket, cell, kept)
        if record.clock >= self._rumors_since:
            self._rumors.add(name)
        if kept.is_floor:
            self._add_floor(name, kept)
        else:
            self._others[name] = record
            if (head := read_head(record)) is not None:
                self._heads.setdefault((head.namespace, head.name), {})[name] = record
            self._other_bytes += kept.size_bytes
            self._limit_others()
        return name in self._kept

    def take_out(self, record: ClusterRecord) -> None:
        """Forget a record whose stamp is to be another one: see `core.timekeeping`."""
        kept = self._kept.get(name_of(record))
        if kept is not None and kept.record == record:
            self._remove(name_of(record), kept)

    def floor_for(self, key_digest: bytes, namespace_digest: bytes | None = None) -> Version:
        """The highest version that is forbidden for the key; `ZERO_VERSION` when none is."""
        key = self._floors.get((SCOPE_KEY, key_digest), ZERO_VERSION)
        if namespace_digest is None:
            return key
        return max(key, self._floors.get((SCOPE_NAMESPACE, namespace_digest), ZERO_VERSION))

    def forbids(self, digest: bytes, namespace_digest: bytes | None, version: Version) -> bool:
        """Whether copies of this version may not exist. Without a namespace, by the key's floor."""
        floor = self.floor_for(digest, namespace_digest)
        return floor is not ZERO_VERSION and floor.covers(version)

    def get(self, kind: int, scope: int, name: bytes) -> ClusterRecord | None:
        """The record about a name."""
        kept = self._kept.get((kind, scope, name))
        return None if kept is None else kept.record

    def of_kind(self, kind: int) -> list[ClusterRecord]:
        """All records of a kind other than floors."""
        return [record for record in self._others.values() if record.kind == kind]

    def heads_of(self, namespace: str, name: str) -> list[ClusterRecord]:
        """The heads of a checkpoint's name, one for each of its publishers."""
        return list(self._heads.get((namespace, name), {}).values())

    # --- comparing and spreading -------------------------------------------------------------

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
        """How many records a bucket has."""
        return self._sizes[bucket]

    def cell_hashes(self, bucket: int) -> list[int]:
        """The hashes of a bucket's 64 cells; their XOR is the bucket's."""
        return self._cell_hashes[bucket]

    def cell(self, bucket: int, cell: int) -> list[SignedRecord]:
        """The records of one cell."""
        return [self._kept[name].signed for name in self._cells.get((bucket, cell), ())]

    @property
    def has_rumors(self) -> bool:
        """Whether new records wait to be passed on."""
        return len(self._rumors) > 0

    def rumors(self, limit_count: int, limit_bytes: int, retransmits: int) -> list[SignedRecord]:
        """New records for the next message, least sent first; each is taken `retransmits` times."""
        chosen: list[SignedRecord] = []
        for name in list(islice(self._rumors.least_sent(), limit_count)):
            signed = self._kept[name].signed
            limit_bytes -= len(signed.body) + len(signed.signature)
            if limit_bytes < 0:
                break
            chosen.append(signed)
            self._rumors.sent(name, retransmits)
        return chosen

    def roll_epochs(self, clock_now: int) -> None:
        """Keep the hashes of the last epochs, and tell what is recent. Call it a few times a minute at least."""
        self._epochs.roll(clock_now, self._floor_hash_below)
        self._rumors_since = max(0, clock_now - RUMOR_AGE)

    def settled_epoch(self, clock_now: int) -> tuple[int, int]:
        """The end of an epoch whose floors all live peers ought to have, and the hash of those here; end
        0 before `roll_epochs`."""
        end = self._epochs.settled_end(clock_now)
        found = self._epochs.hash_at(end)
        return (0, 0) if found is None else (end, found)

    def agrees(self, epoch_end: int, epoch_hash: int) -> bool:
        """Whether the floors known here up to the end of an epoch have this hash."""
        return self._epochs.hash_at(epoch_end) == epoch_hash

    # --- bounds ------------------------------------------------------------------------------

    def compact(self, seen: Mapping[Member, int], clock_now: int) -> None:
        """Raise the horizon when there are too many floors: up to what this peer has seen, and
        leaving the young ones, as long as memory allows. Beyond that it may pass what this peer has seen."""
        crowding = max(
            len(self._floors) / max(1, self.limit), self._floor_bytes / max(1, self.limit_bytes)
        )
        if crowding <= 1 or self.purging:
            return
        excess = len(self._floors) - int(0.9 * len(self._floors) / crowding)
        # Never ahead of the clock: what is written from now on is above it.
        before = min(self._index.cut(excess), clock_now) - 1
        if crowding <= HARD_FACTOR:
            before = min(before, clock_now - clock_from_unix_seconds(self.kept_seconds))
        stamps = {  # of those that wrote floors only: the table is kept for a month
            member: min(before, seen[member] - SEEN_SLACK)
            for member in self._writers
            if member in seen
        }
        if crowding > LAST_FACTOR:
            stamps |= dict.fromkeys(self._writers, before)
        self.raise_horizon(stamps)

    def raise_horizon(self, stamps: Mapping[Member, int]) -> bool:
        """Floors up to these stamps are gone, here or elsewhere. Whether that was new."""
        if not raise_stamps(self.horizon, stamps):
            return False
        self._horizon_changed()
        self._reindex |= self._beyond
        self._beyond = {}
        return True

    def forget_horizon(self, oldest: int) -> None:
        """Forget stamps up to `oldest`: no peer that was away for so long is trusted anyway."""
        kept = without_older(self.horizon, oldest)
        if len(kept) != len(self.horizon):
            self.horizon = kept
            self._horizon_changed()

    def lower_horizon(self, limit: int, by: int) -> None:
        """Lower stamps above `limit`, which no other peer can have taken in: the clock that made them was fast by
        `by`. The floors of these stamps are to be lowered as well."""
        if self.compacted_before > limit:
            self.horizon = lower_stamps(self.horizon, limit, by)
            self._horizon_changed()

    @property
    def purging(self) -> bool:
        """Whether records that are superfluous wait for `purge`."""
        return bool(
            self._superseded or self._reindex or self._index.any_before(self.compacted_before)
        )

    def purge(self, limit: int = PURGE_STEP) -> None:
        """Drop superfluous floors; at most `limit` are looked at."""
        for _ in range(limit):
            if self._superseded:
                self._purge_superseded()
            elif self._reindex:
                name, _ = self._reindex.popitem()
                self._index.add(name, self._kept[name].record.clock)
            else:
                oldest = self._index.pop_oldest(self.compacted_before)
                if oldest is None:
                    return
                kept = self._kept[oldest]
                if kept.record.clock <= self.horizon.get(kept.writer, 0):
                    self._remove(oldest, kept)
                else:
                    self._beyond[oldest] = None

    # --- persisting --------------------------------------------------------------------------

    def dump(self) -> list[SignedRecord]:
        """All records, for the state directory; the horizon goes beside them."""
        return [kept.signed for kept in self._kept.values()]

    def load(
        self,
        records: Iterable[tuple[ClusterRecord, SignedRecord]],
        horizon: Mapping[Member, int] | None = None,
    ) -> None:
        """Take in verified records from the state directory. They are no rumours."""
        self.raise_horizon(horizon or {})
        for record, signed in records:
            self.offer(record, signed)
        self._rumors.clear()

    # --- inside ------------------------------------------------------------------------------

    def _is_superseded(self, record: ClusterRecord, namespace: bytes) -> bool:
        """Whether the floor of the whole namespace says as much."""
        floor = self._floors.get((SCOPE_NAMESPACE, namespace)) if namespace else None
        return floor is not None and floor.covers(record.version)

    def _hash(self, bucket: int, cell: int, kept: _Kept) -> None:
        self._hashes[bucket] ^= kept.hash
        self._cell_hashes[bucket][cell] ^= kept.hash

    def _add_floor(self, name: RecordName, kept: _Kept) -> None:
        record = kept.record
        self._floors[record.scope, record.name] = record.version
        if self._published is not None:
            self._publish_floor(self._published, record)
        self._writers[kept.writer] += 1
        self._floor_bytes += kept.size_bytes
        self._floor_hash ^= kept.hash
        self._epochs.added(record.clock, kept.hash)
        self._index.add(name, record.clock)
        if kept.namespace:
            self._of_namespace.setdefault(kept.namespace, {})[name] = None
        if record.scope == SCOPE_NAMESPACE and record.name in self._of_namespace:
            names = self._of_namespace.pop(record.name)
            if record.name in self._superseded:
                self._superseded[record.name] |= names
            else:
                self._superseded[record.name] = names

    def _publish_floor(self, published: PublishedLocations, record: ClusterRecord) -> None:
        if record.scope == SCOPE_KEY:
            published.forbid_key_up_to(record.name, record.clock)
        else:
            published.forbid_up_to(record.clock)

    def _remove(self, name: RecordName, kept: _Kept, by_clock: int | None = None) -> None:
        """Take a record out, for good or because one of `by_clock` takes its place."""
        del self._kept[name]
        bucket, cell = cell_of(kept.record.name)
        names = self._cells[bucket, cell]
        del names[name]
        if not names:
            del self._cells[bucket, cell]
        self._sizes[bucket] -= 1
        self._hash(bucket, cell, kept)
        self._rumors.discard(name)
        if kept.is_floor:
            self._remove_floor(name, kept, by_clock)
        else:
            del self._others[name]
            if (head := read_head(kept.record)) is not None:
                self._remove_head((head.namespace, head.name), name)
            self._other_bytes -= kept.size_bytes

    def _remove_head(self, called: tuple[str, str], name: RecordName) -> None:
        of_name = self._heads[called]
        del of_name[name]
        if not of_name:
            del self._heads[called]

    def _remove_floor(self, name: RecordName, kept: _Kept, by_clock: int | None) -> None:
        record = kept.record
        del self._floors[record.scope, record.name]
        self._writers[kept.writer] -= 1
        if not self._writers[kept.writer]:
            del self._writers[kept.writer]
        self._floor_bytes -= kept.size_bytes
        self._floor_hash ^= kept.hash
        if by_clock is None:
            self._epochs.dropped(record.clock, kept.hash)
        else:
            self._epochs.replaced(record.clock, kept.hash, by_clock)
        if not self._index.remove(name, record.clock):
            self._beyond.pop(name, None)
            self._reindex.pop(name, None)
        if kept.namespace:
            self._leave_namespace(name, kept.namespace)

    def _leave_namespace(self, name: RecordName, namespace: bytes) -> None:
        self._superseded.get(namespace, {}).pop(name, None)
        names = self._of_namespace.get(namespace)
        if names is not None:
            names.pop(name, None)
            if not names:
                del self._of_namespace[namespace]

    def _purge_superseded(self) -> None:
        namespace, names = next(iter(self._superseded.items()))
        if not names:
            del self._superseded[namespace]
            return
        name, _ = names.popitem()
        kept = self._kept[name]
        if self._is_superseded(kept.record, kept.namespace):
            # Who hears of the namespace's floor later compares epochs with this one still in them.
            by = self._floors[SCOPE_NAMESPACE, kept.namespace]
            self._remove(name, kept, by_clock=by.clock)
        else:
            self._of_namespace.setdefault(kept.namespace, {})[name] = None

    def _limit_others(self) -> None:
        """Of records that are no floors, the oldest go: they are few, unless somebody writes nonsense."""
        while len(self._others) > MAX_OTHER_RECORDS or self._other_bytes > MAX_OTHER_BYTES:
            name, _ = min(self._others.items(), key=lambda item: (rank_of(item[1]), item[0]))
            self._remove(name, self._kept[name])

    def _horizon_changed(self) -> None:
        self.horizon_hash = hash_stamps(self.horizon)
        self.compacted_before = max(self.horizon.values(), default=0)
        if self._published is not None:
            self._published.forbid_up_to(self.compacted_before)  # members may be doubted for these

    def _floor_hash_below(self, end: int) -> int:
        total = self._floor_hash
        for name in self._index.since(end):
            total ^= self._kept[name].hash
        return total


def cell_of(name: bytes) -> tuple[int, int]:
    """Which of the 64 buckets a record's name belongs to, and which of the bucket's 64 cells."""
    return (
        name[0] % CLUSTER_BUCKETS if name else 0,
        name[1] % CLUSTER_CELLS if len(name) > 1 else 0,
    )
