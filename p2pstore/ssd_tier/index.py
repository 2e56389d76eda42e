"""The index of records on the disk: a row for each record, found by digest, listed by key. Pure.

The parts of an object are chained. Lower versions give way to higher ones as records are added; an object is found when
all its parts are there. Every place that a call returns as dropped or superseded must be marked dead on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from p2pstore.objects import PART_BYTES, Version
from p2pstore.ssd_tier.footer import (
    CLOCK,
    DIGEST,
    EXPIRES,
    FLAG_DESCRIBED,
    FLAG_PIN,
    FLAG_SOFT,
    FLAGS,
    LENGTH,
    PART,
    REPLICAS,
    ROOT,
    ROW_BYTES,
    STORED_BYTES,
    WRITER,
    Rows,
    flags_of,
)
from p2pstore.ssd_tier.index_walks import KeyOrders
from p2pstore.ssd_tier.log_layout import ColdFacts, RecordPlace, part_count, record_bytes
from p2pstore.ssd_tier.record_rows import END, RecordRows

NOT_FOUND: Final = -1
_MASK64: Final = (1 << 64) - 1
MAX_HITS: Final = 0xFFFF


class DigestSlots:
    """Row numbers by digest: open addressing with linear probing and backward-shift deletion, at most half full, so
    that a search looks at about two rows. `rows` is the memory of the rows, each of `row_bytes`, which begin with their
    digest. Hashes are salted, so that a client cannot choose keys that collide."""

    def __init__(self, max_rows: int, rows: memoryview, row_bytes: int, salt: int) -> None:
        bits = max(1, (2 * max_rows - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = 64 - bits
        self._salt = salt & _MASK64 | 1  # odd: no two digests become equal
        self._rows = rows
        self._row_bytes = row_bytes
        # Row number + 1, so that 0 is an entry that is free.
        self._numbers = np.zeros(1 << bits, np.uint32)
        self._entries = self._numbers.data

    def find(self, digest: bytes) -> int:
        """The row of the digest, or NOT_FOUND."""
        entries, rows, size, mask = self._entries, self._rows, self._row_bytes, self._mask
        at = self._home(digest)
        while number := entries[at]:
            start = (number - 1) * size
            if rows[start : start + 16] == digest:
                return number - 1
            at = (at + 1) & mask
        return NOT_FOUND

    def insert(self, digest: bytes, row: int) -> None:
        entries, at = self._entries, self._home(digest)
        while entries[at]:
            at = (at + 1) & self._mask
        entries[at] = row + 1

    def replace(self, digest: bytes, row: int, by: int) -> None:
        self._entries[self._entry_of(digest, row)] = by + 1

    def remove(self, digest: bytes, row: int) -> None:
        entries, mask = self._entries, self._mask
        hole = at = self._entry_of(digest, row)
        while number := entries[at := (at + 1) & mask]:
            start = (number - 1) * self._row_bytes
            home = self._home(self._rows[start : start + 16])
            if (at - home) & mask >= (at - hole) & mask:
                entries[hole] = number
                hole = at
        entries[hole] = 0

    def insert_all(self, digests: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint32]) -> None:
        """Add many digests (rows of two u64) that are not there, at some 0.2 us each."""
        with np.errstate(over="ignore"):
            at = (digests[:, 0] * np.uint64(self._salt)) >> np.uint64(self._shift)
        at, numbers = at.astype(np.int64), rows.astype(np.uint32) + np.uint32(1)
        while len(at):
            # Of those that meet at one free entry the last one gets it; the others go on.
            free = self._numbers[at] == 0
            self._numbers[at[free]] = numbers[free]
            left = self._numbers[at] != numbers
            at, numbers = (at[left] + 1) & self._mask, numbers[left]

    def _home(self, digest: bytes | memoryview) -> int:
        return (int.from_bytes(digest[:8], "little") * self._salt & _MASK64) >> self._shift

    def _entry_of(self, digest: bytes, row: int) -> int:
        at = self._home(digest)
        while self._entries[at] != row + 1:
            if not self._entries[at]:
                raise KeyError(digest)
            at = (at + 1) & self._mask
        return at


class ColdEntry(msgspec.Struct, frozen=True, gc=False):
    """An object on the disk. `places` are its records in the order of its parts, `stored` the bytes of their payloads;
    `hits` counts touches since it was written to where it is now."""

    digest: bytes
    version: Version
    length: int
    namespace: str
    key: str
    places: tuple[RecordPlace, ...]
    hits: int
    expires_unix_ms: int
    replicas: int
    pin: int
    soft: bool
    stored: tuple[int, ...]
    described: bool = False
    """Whether it has a dtype and a shape, which its record tells. Records of older versions never say so."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of its records, header pages included."""
        return sum(map(record_bytes, self.stored))


class ColdRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of a segment; `disk_bytes` counts its header page, `hits` are those of its object."""

    digest: bytes
    version: Version
    length: int
    part: int
    place: RecordPlace
    stored_bytes: int
    disk_bytes: int
    hits: int


def with_care(facts: ColdFacts, entry: ColdEntry | None) -> ColdFacts:
    """The facts of a record, with the current pin, replicas and end of its object."""
    if entry is None or entry.version != facts.version:
        return facts
    return replace(
        facts,
        pin=entry.pin,
        replicas=entry.replicas,
        soft=entry.soft,
        expires_unix_ms=entry.expires_unix_ms,
    )


class ColdIndex:
    """See the module's docstring. `salt` is a secret random number. Bytes on the disk are counted for `namespaces`."""

    def __init__(
        self, segments: int, max_records: int, salt: int, namespaces: Sequence[str] = ()
    ) -> None:
        self.objects = 0
        """Objects with all their parts."""
        self.rows = RecordRows(segments, max_records, namespaces)
        self._slots = DigestSlots(max_records, self.rows.memory, ROW_BYTES, salt)
        self._hits = np.zeros(max_records, np.uint16)
        self._hit_counts = self._hits.data  # of the row that an object's chain begins with
        self._orders = KeyOrders(self.rows)

    def oldest(self, namespace: str, count_bytes: int, limit: int) -> list[bytes]:
        """The digests of a namespace's first written objects, together about `count_bytes`; at most `limit`."""
        number = self.rows.names.number(namespace)
        return [] if number is None else self.rows.oldest(number, count_bytes, limit)

    def segment_live_bytes(self, segment: int) -> int:
        """Bytes on the disk of the segment's records in the index."""
        return int(self.rows.segment_live_bytes[segment])

    # --- adding --------------------------------------------------------------------------------

    def add(
        self, place: RecordPlace, facts: ColdFacts, part: int, stored_bytes: int
    ) -> tuple[RecordPlace, ...]:
        """Put in a record. The places of those that it makes worthless, which must be marked dead: parts of lower
        versions, the same part of the same version at another place, or this record itself when a higher version is
        there. (Otherwise they would be back after a restart, once the segment of the record that replaced them is
        reclaimed.) Sync a copied record before the mark is written: a crash between these would take both.

        Raises `CapacityExceeded` when the index is full, and changes nothing then.
        """
        self.rows.check(place)
        digest, version = facts.digest, facts.version
        superseded: tuple[RecordPlace, ...] = ()
        head = self._slots.find(digest)
        if head != NOT_FOUND:
            known = self.rows.version(head)
            if known > version:
                return (place,)
            if known < version:
                superseded, head = self.drop(digest), NOT_FOUND
        if head == NOT_FOUND:
            row = self.rows.write(place, facts, part, stored_bytes)
            self._slots.insert(digest, row)
        else:
            self.objects -= self._is_complete(head)
            row = self.rows.write(place, facts, part, stored_bytes)
            superseded = self._chain(digest, head, row, part)
        self._hit_counts[row] = 0
        self.objects += self._is_complete(row)
        if part == 0:
            self._orders.added(row)
        return superseded

    def _chain(self, digest: bytes, head: int, row: int, part: int) -> tuple[RecordPlace, ...]:
        """Put the row in front of the others of its object, in place of the one that holds the same part."""
        self._slots.replace(digest, head, row)
        self.rows.follow(row, head)
        before, at = row, head
        while at != END:
            following = self.rows.next(at)
            if self.rows.fields(at)[PART] == part:
                place = self.rows.place(at)
                self.rows.follow(before, following)
                self._release(at)
                return (place,)
            before, at = at, following
        return ()

    def load(
        self,
        rows: Rows,
        segments: npt.NDArray[np.uint32],
        namespaces: npt.NDArray[np.uint32],
        names: Sequence[str],
        texts: Mapping[int, bytes],
        generations: Mapping[int, int],
    ) -> None:
        """Fill an empty index at once: `rows` sorted by digest and part, no two of them alike, only of objects that
        are complete; for each row its segment and which of `names` it is in; text and generation of segments.

        Raises `CapacityExceeded` for more rows than the index has room for.
        """
        self.rows.load(rows, segments, namespaces, names, texts, generations)
        heads = rows["part"] == 0
        self._slots.insert_all(rows["digest"][heads], np.flatnonzero(heads).astype(np.uint32))
        self.objects = int(heads.sum())

    def set_care(
        self,
        digest: bytes,
        version: Version,
        *,
        pin: int,
        replicas: int,
        soft: bool,
        expires_unix_ms: int | None = None,
    ) -> bool:
        """How firmly an object is kept, or (unless None) when it ends, has changed since it was written. Whether that
        version is there."""
        head = self._slots.find(digest)
        if head == NOT_FOUND or self.rows.version(head) != version:
            return False
        for row, _ in self._parts(head):
            described = self.rows.fields(row)[FLAGS] & FLAG_DESCRIBED > 0
            flags = flags_of(pin, soft, described=described)
            self.rows.set_care(row, replicas, flags, expires_unix_ms)
        return True

    # --- finding -------------------------------------------------------------------------------

    def find(self, digest: bytes) -> ColdEntry | None:
        """The object, if all its parts are there."""
        head = self._slots.find(digest)
        return None if head == NOT_FOUND else self._entry(head)

    def touch(self, digest: bytes) -> int:
        """Count a hit; how many there were before. 0 for what is not there."""
        head = self._slots.find(digest)
        if head == NOT_FOUND:
            return 0
        hits = self._hit_counts[head]
        if hits < MAX_HITS:
            self._hit_counts[head] = hits + 1
        return hits

    def digests(self, namespace_digest: bytes | None) -> Iterator[list[bytes]]:
        """The digests of all objects whose first part is there now, or of those of a namespace: `WALKED_DIGESTS` at a
        time, or none where there are few. The index may change meanwhile."""
        number = None
        if namespace_digest is not None:
            number = self.rows.names.digests.get(namespace_digest)
            if number is None:
                return iter(())
        return self.rows.walk(number)

    def prepare_page(self, namespace: str) -> bool:
        """A step of a few milliseconds towards `page`: whether there is no further one. (`page` takes those that are
        left at once: 2 s for a million keys, the first time.)"""
        order = self._orders.of(namespace)
        return order is None or order.prepare()

    def page(self, namespace: str, prefix: str, after: str, limit: int) -> tuple[list[ColdEntry], bool]:
        """Up to `limit` objects whose keys begin with `prefix`, in key order, above `after`; and whether there are
        more."""
        order = self._orders.of(namespace)
        if order is None:
            return [], False
        found: list[ColdEntry] = []
        for row in order.rows_from(prefix, after):
            entry = self.find(self.rows.fields(row)[DIGEST])
            if entry is not None:
                if len(found) == limit:
                    return found, True
                found.append(entry)
        return found, False

    def records_of(self, segment: int) -> Iterator[ColdRecord]:
        """The records of a segment in the order of their numbers. Records dropped meanwhile are left out."""
        rows = [(row, self.rows.place(row).sequence) for row in self.rows.of_segment(segment).tolist()]
        for row, sequence in rows:
            if self.rows.is_at(row, sequence):
                fields = self.rows.fields(row)
                yield ColdRecord(
                    digest=fields[DIGEST],
                    version=self.rows.version(row),
                    length=fields[LENGTH],
                    part=fields[PART],
                    place=self.rows.place(row),
                    stored_bytes=fields[STORED_BYTES],
                    disk_bytes=record_bytes(fields[STORED_BYTES]),
                    hits=self._hit_counts[self._slots.find(fields[DIGEST])],
                )

    def _entry(self, head: int) -> ColdEntry | None:
        rows = self.rows
        fields = rows.fields(head)
        if rows.next(head) == END:
            if fields[LENGTH] > PART_BYTES:
                return None
            places: tuple[RecordPlace, ...] = (rows.place_of(head, fields),)
            stored: tuple[int, ...] = (fields[STORED_BYTES],)
        else:
            parts = {each[PART]: (row, each) for row, each in self._parts(head)}
            if len(parts) < part_count(fields[LENGTH]):
                return None
            places = tuple(rows.place_of(*parts[part]) for part in range(len(parts)))
            stored = tuple(parts[part][1][STORED_BYTES] for part in range(len(parts)))
        version = Version(fields[CLOCK], fields[WRITER], fields[ROOT])
        namespace = rows.namespace(head)
        return ColdEntry(
            fields[DIGEST],
            version,
            fields[LENGTH],
            rows.names.name(namespace),
            rows.key_of(head, fields),
            places,
            self._hit_counts[head],
            fields[EXPIRES],
            fields[REPLICAS],
            fields[FLAGS] & FLAG_PIN,
            fields[FLAGS] & FLAG_SOFT > 0,
            stored,
            fields[FLAGS] & FLAG_DESCRIBED > 0,
        )

    def _parts(self, head: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
        row = head
        while row != END:
            yield row, self.rows.fields(row)
            row = self.rows.next(row)

    def _is_complete(self, head: int) -> bool:
        parts = part_count(self.rows.fields(head)[LENGTH])
        return parts == 1 or parts == sum(1 for _ in self._parts(head))

    # --- dropping ------------------------------------------------------------------------------

    def drop(self, digest: bytes) -> tuple[RecordPlace, ...]:
        """Take out all records of a digest, complete or not; their places, which must be marked dead."""
        head = self._slots.find(digest)
        if head == NOT_FOUND:
            return ()
        self.objects -= self._is_complete(head)
        self._slots.remove(digest, head)
        places = []
        while head != END:
            places.append(self.rows.place(head))
            following = self.rows.next(head)
            self._release(head)
            head = following
        return tuple(places)

    def _release(self, row: int) -> None:
        namespace = self.rows.namespace(row)
        if self.rows.fields(row)[PART] == 0:
            self._orders.removed(row)
        self.rows.release(row)
        if not self.rows.names.is_used(namespace):
            self._orders.forget(namespace)
