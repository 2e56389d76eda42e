"""The floors of one peer: which versions are forbidden, in order of time, and how many may be kept. Pure.

A floor record forbids all copies of one key, of some keys of a namespace, or of all its keys, up to its version.
Records are never changed nor replaced: a record leaves the set only when the *horizon* of its writer passes it. So two
peers have known the same floors exactly when the hashes of their sets are equal, whatever order they heard them in.

Records lie in slices of one second of the hybrid clock. A slice has a hash, so the hash of all records below the end
of a slice (`hash_below`) takes a step for each later slice.

The horizon says, writer by writer, up to which stamp floors were dropped. No peer takes them in again, so that all
peers' sets stay alike. Records go in steps (`purge`): an event loop that is held up declares others dead.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import xxhash

from p2pstore.gossip.floors.floor_stamps import (
    Stamps,
    hash_stamps,
    lower_stamps,
    raise_stamps,
    without_older,
)
from p2pstore.gossip.locations.location_slots import PublishedLocations
from p2pstore.gossip.records import (
    SCOPE_NAMESPACE,
    ClusterRecord,
    Member,
    SignedRecord,
    keys_of_floor,
    member_of,
    read_cluster_record,
)
from p2pstore.objects import DIGEST_BYTES, MIB, ZERO_VERSION, Version, clock_from_unix_seconds

DEFAULT_LIMIT: Final = 500_000
"""Keys of floors. They take 30 MiB when they come in batches."""
DEFAULT_LIMIT_BYTES: Final = 64 * MIB
DEFAULT_KEPT_SECONDS: Final = 600.0
RECORD_BYTES: Final = 400
"""Memory of a record beside its body, and of a key beside its record: measured, CPython 3.11, x86-64."""
KEY_BYTES: Final = 35

COMPACT_ABOVE: Final = 0.5
"""Shares of the limit. Above this one, floors go that are older than ten minutes, down to ..."""
COMPACT_TO: Final = 0.4
COMPACT_YOUNG_ABOVE: Final = 0.7
"""... and above this one those go that are younger, too."""
REFUSE_ABOVE: Final = 2.0
"""Above this one, floors of others are not taken in before some have gone: memory is bounded, and nothing is lost,
since those who have them offer them again."""
SLICE_BITS: Final = 26
"""A slice of time is 1.024 s: 2^26 of the hybrid clock, which counts 65,536 a millisecond."""
LOOKED_AT: Final = 20_000
"""Writers of slices, the oldest first, before a horizon is raised: at most 2 ms. Those of dead writers wait longest."""
MINUTE_BITS: Final = 32
"""A minute is 64 slices. There are at most some ten thousands of minutes, however many slices."""


@dataclass(slots=True, eq=False)
class Floor:
    """One record. `keys` is how many it forbids (1 for a namespace). There may be very many: the facts that its body
    says or sums up to are not kept besides."""

    body: bytes
    signature: bytes
    clock: int
    signer: Member
    keys: int

    @property
    def signed(self) -> SignedRecord:
        """As it travels."""
        return SignedRecord(self.body, self.signature)

    @property
    def hash(self) -> int:
        """The xxh3-64 of its body."""
        return xxhash.xxh3_64_intdigest(self.body)

    @property
    def cost_bytes(self) -> int:
        """Estimate of the memory it takes."""
        return RECORD_BYTES + len(self.body) + KEY_BYTES * self.keys


@dataclass(slots=True)
class _Slice:
    hash: int = 0
    floors: list[Floor] = field(default_factory=list)
    known_oldest: Stamps | None = None

    @property
    def oldest(self) -> Stamps:
        """Writer -> the lowest stamp of its floors in this slice. Kept once it was asked for, of few slices."""
        if self.known_oldest is None:
            self.known_oldest = {}
            for floor in self.floors:
                self.known_oldest[floor.signer] = min(
                    floor.clock, self.known_oldest.get(floor.signer, floor.clock)
                )
        return self.known_oldest


class FloorSet:
    """See the module's docstring. `published` is where clients see what floors forbid."""

    def __init__(
        self,
        limit: int = DEFAULT_LIMIT,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        kept_seconds: float = DEFAULT_KEPT_SECONDS,
        published: PublishedLocations | None = None,
    ) -> None:
        self.limit = limit
        """Keys of floors, which their writers do not exceed (`core.floors`)."""
        self.limit_bytes = limit_bytes
        self.kept_seconds = kept_seconds
        """Younger floors stay while there is room."""
        self.horizon: Stamps = {}
        """Writer -> clock up to which its floors are gone. Raise it with `raise_horizon` only."""
        self.horizon_hash = 0
        self.compacted_before = 0
        """The highest stamp of the horizon: no floor above it was dropped."""
        self.count = 0
        """Keys and namespaces that floors forbid, each as often as there is a floor for it."""
        self._cost_bytes = 0
        self._hash = 0
        self._published = published
        self._doubting = False
        self._keys = KeyVersions()
        """The version of the highest floor of each key ..."""
        self._namespaces = KeyVersions()
        """... and of each namespace."""
        self._slices: dict[int, _Slice] = {}
        self._newest = -1
        """No slice has a higher number."""
        self._minutes: Counter[int] = Counter()
        """Keys in each minute."""
        self._records_of: Counter[Member] = Counter()
        self._names: dict[Member, Member] = {}
        """The writers: one number for all floors of each, which takes no memory again."""
        self._to_purge: list[int] = []
        """Minutes that the horizon has reached since they were looked at last, the oldest last ..."""
        self._in_minute: list[int] = []
        """... and slices of the one being looked at, the oldest last."""
        self._looked_at = 0
        """How many floors of that oldest slice were looked at and stay."""

    def floor_for(self, key_digest: bytes, namespace_digest: bytes | None = None) -> Version:
        """The highest version that is forbidden for the key; `ZERO_VERSION` when none is."""
        of_key = self._keys.get(key_digest)
        if namespace_digest is None:
            return of_key
        return max(of_key, self._namespaces.get(namespace_digest))

    def forbids(self, digest: bytes, namespace_digest: bytes | None, version: Version) -> bool:
        """Whether copies of this version may not exist. Without a namespace, by the key's floor."""
        floor = self.floor_for(digest, namespace_digest)
        return floor is not ZERO_VERSION and floor.covers(version)

    def forbidden(
        self, digests: Iterable[bytes], namespace_digest: bytes, version: Version
    ) -> set[bytes]:
        """Those keys of a namespace of which this version `forbids` copies."""
        if self._namespaces.get(namespace_digest).covers(version):
            return set(digests)
        if not self._keys:
            return set()
        return {digest for digest in digests if self._keys.get(digest).covers(version)}

    def is_dropped(self, record: ClusterRecord) -> bool:
        """Whether the horizon has passed this floor, so that no peer takes it in any more."""
        return bool(self.horizon) and record.clock <= self.horizon.get(member_of(record.signer), 0)

    @property
    def crowding(self) -> float:
        """Which share of the limit is used."""
        return max(self.count / max(1, self.limit), self._cost_bytes / max(1, self.limit_bytes))

    def hash_below(self, end: int) -> int:
        """XOR of the hashes of all records with a clock below `end`, the end of a slice."""
        total = self._hash
        first = end >> SLICE_BITS
        if self._newest - first < len(self._slices):
            later = (n for n in range(first, self._newest + 1) if n in self._slices)
        else:
            later = (n for n in self._slices if n >= first)
        for number in later:
            total ^= self._slices[number].hash
        return total

    def hashes_below(self, ends: Iterable[int]) -> dict[int, int]:
        """`hash_below` of several ends, in one step for each slice between the first and the last of them."""
        hashes: dict[int, int] = {}
        total, number = 0, -1
        for end in sorted(ends, reverse=True):
            if not hashes:
                total, number = self.hash_below(end), end >> SLICE_BITS
            while number > end >> SLICE_BITS:
                number -= 1
                if number in self._slices:
                    total ^= self._slices[number].hash
            hashes[end] = total
        return hashes

    def add(self, record: ClusterRecord, signed: SignedRecord) -> Floor:
        """Keep a floor that is not here yet and that `is_dropped` does not refuse."""
        digests = keys_of_floor(record)
        signer = member_of(record.signer)
        signer = self._names.setdefault(signer, signer)
        floor = Floor(signed.body, signed.signature, record.clock, signer, max(1, len(digests)))
        index = self._namespaces if record.scope == SCOPE_NAMESPACE else self._keys
        index.raise_all(digests, record.version)
        if self._published is not None:
            if record.scope == SCOPE_NAMESPACE:
                self._published.forbid_up_to(record.clock)
            else:
                for digest in digests:
                    self._published.forbid_key_up_to(digest, record.clock)
        number = record.clock >> SLICE_BITS
        part = self._slices.get(number)
        if part is None:
            part = self._slices[number] = _Slice()
            self._newest = max(self._newest, number)
        part.floors.append(floor)
        part.known_oldest = None
        self._tally(floor, part, 1)
        return floor

    def _tally(self, floor: Floor, part: _Slice, sign: int) -> None:
        """Count a floor in (1) or out (-1)."""
        record_hash = floor.hash
        part.hash ^= record_hash
        self._hash ^= record_hash
        self.count += sign * floor.keys
        self._cost_bytes += sign * floor.cost_bytes
        minute = floor.clock >> MINUTE_BITS
        self._minutes[minute] += sign * floor.keys
        if not self._minutes[minute]:
            del self._minutes[minute]
        self._records_of[floor.signer] += sign
        if not self._records_of[floor.signer]:
            del self._records_of[floor.signer], self._names[floor.signer]

    def raise_horizon(self, stamps: Mapping[Member, int]) -> None:
        """Floors up to these stamps are gone, here or elsewhere."""
        if not raise_stamps(self.horizon, stamps):
            return
        self._horizon_changed()
        self._in_minute, self._looked_at = [], 0
        last = self.compacted_before >> MINUTE_BITS
        self._to_purge = sorted((m for m in self._minutes if m <= last), reverse=True)

    def lower_horizon(self, limit: int, by: int) -> None:
        """Lower stamps above `limit`, which no other peer can have taken in: the clock that made them was fast by
        `by`. The floors of these stamps are to be lowered as well."""
        if self.compacted_before > limit:
            self.horizon = lower_stamps(self.horizon, limit, by)
            self._horizon_changed()

    def forget_horizon(self, oldest: int) -> None:
        """Forget stamps up to `oldest`: no peer that was away for longer is trusted anyway."""
        kept = without_older(self.horizon, oldest)
        if len(kept) != len(self.horizon):
            self.horizon = kept
            self._horizon_changed()

    def _horizon_changed(self) -> None:
        self.horizon_hash = hash_stamps(self.horizon)
        self.compacted_before = max(self.horizon.values(), default=0)
        self.doubt_members(self._doubting)

    def doubt_members(self, doubting: bool) -> None:
        """Whether some member's copies of versions below the horizon are doubted: clients ask about these then."""
        self._doubting = doubting
        if self._published is not None:
            self._published.doubt_up_to(self.compacted_before if doubting else 0)

    @property
    def purging(self) -> bool:
        """Whether records below the horizon wait for `purge`."""
        return bool(self._to_purge or self._in_minute)

    def purge(self, limit_keys: int) -> list[tuple[Floor, ClusterRecord]]:
        """Drop records below the horizon, slice by slice, until `limit_keys` keys were looked at."""
        dropped: list[tuple[Floor, ClusterRecord]] = []
        while self.purging and limit_keys > 0:
            if not self._in_minute:
                numbers = reversed(_slices_of(self._to_purge.pop()))
                self._in_minute = [number for number in numbers if number in self._slices]
                continue
            number = self._in_minute[-1]
            part = self._slices[number]
            while self._looked_at < len(part.floors) and limit_keys > 0:
                floor = part.floors[self._looked_at]
                limit_keys -= floor.keys
                if floor.clock > self.horizon.get(floor.signer, 0):
                    self._looked_at += 1
                    continue
                part.floors[self._looked_at] = part.floors[-1]
                part.floors.pop()
                part.known_oldest = None
                dropped.append((floor, self._drop(floor, part)))
            if self._looked_at < len(part.floors):
                break
            self._looked_at = 0
            self._in_minute.pop()
            if not part.floors:
                del self._slices[number]
        return dropped

    def _drop(self, floor: Floor, part: _Slice) -> ClusterRecord:
        record = read_cluster_record(floor.signed)
        index = self._namespaces if record.scope == SCOPE_NAMESPACE else self._keys
        index.drop_all(keys_of_floor(record), record.version)
        self._tally(floor, part, -1)
        return record

    def take_out(self, floor: Floor) -> None:
        """Forget one floor."""
        number = floor.clock >> SLICE_BITS
        part = self._slices[number]
        part.floors.remove(floor)
        part.known_oldest = None
        self._looked_at = 0  # others moved up
        self._drop(floor, part)
        if not part.floors:
            del self._slices[number]
            if number in self._in_minute:
                self._in_minute.remove(number)

    @property
    def writers(self) -> list[Member]:
        return list(self._records_of)

    def has_floors_of(self, writer: Member) -> bool:
        return writer in self._records_of

    def compaction(self, agreed: int, confirmed: Mapping[Member, int], clock_now: int) -> Stamps:
        """The horizon that leaves four tenths of the limit, as far as it can: never above `agreed`, below which all
        living members have the same floors, nor above what is `confirmed` of a writer."""
        crowding = self.crowding
        if crowding <= COMPACT_ABOVE or self.purging:
            return {}
        if crowding <= COMPACT_YOUNG_ABOVE:
            agreed = min(agreed, clock_now - clock_from_unix_seconds(self.kept_seconds))
        before = min(self._cut(1.0 - COMPACT_TO / crowding), agreed) - 1
        stamps = {writer: min(before, confirmed.get(writer, 0)) for writer in self._records_of}
        return stamps if self._would_drop(stamps) else {}

    def _would_drop(self, stamps: Mapping[Member, int]) -> bool:
        """Whether a horizon drops any of the oldest floors: each new one costs all peers a few messages."""
        return any(clock <= stamps[writer] for writer, clock in islice(self._oldest(), LOOKED_AT))

    def _oldest(self) -> Iterator[tuple[Member, int]]:
        """Slice by slice, the writers and the stamp of the oldest floor of each."""
        for minute in sorted(self._minutes):
            for number in _slices_of(minute):
                if (part := self._slices.get(number)) is not None:
                    yield from part.oldest.items()

    def _cut(self, share: float) -> int:
        """The end of the slice up to which that share of all keys lies."""
        wanted, end = share * self.count, 0
        for minute in sorted(self._minutes):
            if self._minutes[minute] < wanted:
                wanted -= self._minutes[minute]
                continue
            for number in _slices_of(minute):
                end = (number + 1) << SLICE_BITS
                part = self._slices.get(number)
                wanted -= 0 if part is None else sum(floor.keys for floor in part.floors)
                if wanted <= 0:
                    return end
        return end


def _slices_of(minute: int) -> range:
    first = minute << (MINUTE_BITS - SLICE_BITS)
    return range(first, first + (1 << (MINUTE_BITS - SLICE_BITS)))


PLACES: Final = 4_096
"""With 500,000 digests each has 122 of them: 3 KB, searched in a fifth of a microsecond."""
_ENTRY: Final = struct.Struct(f"<{DIGEST_BYTES}sQH")
_VERSION: Final = struct.Struct("<QH")
_MAX_CLOCK: Final = (1 << 64) - 1
_MAX_WRITER: Final = (1 << 16) - 1


class KeyVersions:
    """The highest forbidden version of each digest, packed. Roots are left out: they do not count against floors."""

    def __init__(self) -> None:
        self._places: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def get(self, digest: bytes) -> Version:
        """The digest's version; `ZERO_VERSION` without one."""
        entries = self._places.get(hash(digest) % PLACES, b"")
        if digest not in entries or (at := _find(entries, digest)) < 0:
            return ZERO_VERSION
        return Version(*_VERSION.unpack_from(entries, at + DIGEST_BYTES))

    def raise_all(self, digests: Iterable[bytes], version: Version) -> None:
        """These have this version, but those with a higher one. Names that are no digests are left out."""
        wanted = _bounded(version)
        for digest in digests:
            if len(digest) != DIGEST_BYTES:
                continue
            place = hash(digest) % PLACES
            entries = self._places.get(place, b"")
            at = _find(entries, digest)
            if at < 0:
                self._places[place] = entries + _ENTRY.pack(digest, *wanted)
            elif _VERSION.unpack_from(entries, at + DIGEST_BYTES) < wanted:
                entry = _ENTRY.pack(digest, *wanted)
                self._places[place] = entries[:at] + entry + entries[at + _ENTRY.size :]

    def drop_all(self, digests: Iterable[bytes], version: Version) -> None:
        """Forget those that have this version."""
        wanted = _bounded(version)
        for digest in digests:
            place = hash(digest) % PLACES
            entries = self._places.get(place, b"")
            at = _find(entries, digest)
            if at >= 0 and _VERSION.unpack_from(entries, at + DIGEST_BYTES) == wanted:
                self._places[place] = entries[:at] + entries[at + _ENTRY.size :]


def _find(entries: bytes, digest: bytes) -> int:
    """Where the digest's entry begins; -1 when there is none."""
    if len(digest) != DIGEST_BYTES:
        return -1
    at = entries.find(digest)
    while at % _ENTRY.size and at >= 0:  # by chance: bytes of one entry and the next
        at = entries.find(digest, at + 1)
    return at


def _bounded(version: Version) -> tuple[int, int]:
    """Clock and writer: a signed record may say any number."""
    return min(max(version.clock, 0), _MAX_CLOCK), min(max(version.writer, 0), _MAX_WRITER)
