"""What the whole cluster keeps, whatever becomes of the writer: floors, checkpoint heads, switches.
Pure.

Of each (kind, scope, name) the record with the highest version is kept. Sets of two peers are
compared by the XOR hashes of 64 buckets and spread twice: a new record rides on a bounded number of
messages at once, and whoever missed it gets it when buckets are compared.

A floor forbids all copies of a key, or of a namespace's keys, up to its version. Floors of keys are
bounded: above the limit the oldest are dropped, and `compacted_before` rises to the highest clock
among those dropped. It is no floor for live peers, which dropped their forbidden copies when they
saw each floor. It tells a peer that was away what it can still trust: copies from SSD whose
versions are not above `compacted_before` may have been removed while nobody remembers it, so a peer
that was away discards them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

from p2pstore.gossip.messages import CLUSTER_BUCKETS
from p2pstore.gossip.records import ClusterRecord, ClusterRecordKind, SignedRecord
from p2pstore.objects import ZERO_VERSION, Version

SCOPE_KEY: Final = 0
SCOPE_NAMESPACE: Final = 1
DEFAULT_LIMIT: Final = 100_000

RecordName = tuple[int, int, bytes]
"""(kind, scope, name): what a record is about."""


@dataclass(frozen=True, slots=True)
class _Kept:
    record: ClusterRecord
    signed: SignedRecord
    hash: int


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

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.compacted_before = 0
        """Highest clock of a floor that was dropped for lack of room; 0 when none was."""
        self._kept: dict[RecordName, _Kept] = {}
        self._floors: dict[tuple[int, bytes], Version] = {}
        self._buckets: list[set[RecordName]] = [set() for _ in range(CLUSTER_BUCKETS)]
        self._hashes = [0] * CLUSTER_BUCKETS
        self._recent: dict[RecordName, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # --- keeping -----------------------------------------------------------------------------

    def wants(self, record: ClusterRecord) -> bool:
        """Whether the record would be new: ask before its signature is checked."""
        kept = self._kept.get(name_of(record))
        if kept is not None:
            return rank_of(record) > rank_of(kept.record)
        return not (
            record.kind == ClusterRecordKind.FLOOR
            and record.scope == SCOPE_KEY
            and record.clock <= self.compacted_before
        )

    def offer(self, record: ClusterRecord, signed: SignedRecord) -> bool:
        """Keep a verified record. Whether it was new; new ones join the rumours."""
        if not self.wants(record):
            return False
        name = name_of(record)
        self._remove(name)
        kept = _Kept(record, signed, xxhash.xxh3_64_intdigest(signed.body))
        self._kept[name] = kept
        bucket = bucket_of(record.name)
        self._buckets[bucket].add(name)
        self._hashes[bucket] ^= kept.hash
        if record.kind == ClusterRecordKind.FLOOR:
            self._floors[record.scope, record.name] = record.version
        self._recent[name] = 0
        if len(self._kept) > self.limit:
            self._compact()
        return name in self._kept

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

    def bucket(self, number: int) -> list[SignedRecord]:
        """The records of one bucket, newest first."""
        kept = [self._kept[name] for name in self._buckets[number]]
        kept.sort(key=lambda entry: rank_of(entry.record), reverse=True)
        return [entry.signed for entry in kept]

    @property
    def has_rumors(self) -> bool:
        """Whether new records wait to be passed on."""
        return bool(self._recent)

    def rumors(self, limit_count: int, limit_bytes: int, retransmits: int) -> list[SignedRecord]:
        """New records for the next message, least sent first; each is taken `retransmits` times."""
        chosen: list[SignedRecord] = []
        for name, sent in sorted(self._recent.items(), key=lambda item: item[1])[:limit_count]:
            signed = self._kept[name].signed
            limit_bytes -= len(signed.body) + len(signed.signature)
            if limit_bytes < 0:
                break
            chosen.append(signed)
            if sent + 1 >= retransmits:
                del self._recent[name]
            else:
                self._recent[name] = sent + 1
        return chosen

    # --- persisting --------------------------------------------------------------------------

    def dump(self) -> list[SignedRecord]:
        """All records, for the state directory; `compacted_before` goes beside them."""
        return [kept.signed for kept in self._kept.values()]

    def load(
        self, records: Iterable[tuple[ClusterRecord, SignedRecord]], compacted_before: int = 0
    ) -> None:
        """Take in verified records from the state directory. They are no rumours."""
        self.compacted_before = max(self.compacted_before, compacted_before)
        for record, signed in records:
            self.offer(record, signed)
        self._recent.clear()

    # --- inside ------------------------------------------------------------------------------

    def _remove(self, name: RecordName) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        bucket = bucket_of(kept.record.name)
        self._buckets[bucket].discard(name)
        self._hashes[bucket] ^= kept.hash
        self._recent.pop(name, None)
        if kept.record.kind == ClusterRecordKind.FLOOR:
            self._floors.pop((kept.record.scope, kept.record.name), None)

    def _compact(self) -> None:
        """Drop the oldest tenth of the key floors; without any, the oldest records of all."""
        floors = [
            kept
            for kept in self._kept.values()
            if kept.record.kind == ClusterRecordKind.FLOOR and kept.record.scope == SCOPE_KEY
        ]
        floors.sort(key=lambda kept: rank_of(kept.record))
        for kept in floors[: max(1, self.limit // 10)]:
            self.compacted_before = max(self.compacted_before, kept.record.clock)
            self._remove(name_of(kept.record))
        if not floors:
            oldest = min(self._kept.values(), key=lambda kept: rank_of(kept.record))
            self._remove(name_of(oldest.record))


def bucket_of(name: bytes) -> int:
    """Which of the 64 buckets a record's name belongs to."""
    return name[0] % CLUSTER_BUCKETS if name else 0
