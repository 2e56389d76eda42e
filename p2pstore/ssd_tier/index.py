"""What is on the disk: a row for each record, found by digest, listed by key. Pure.

Rows lie in one piece of memory that is reserved at once and costs what is written to it: some 110 bytes for an object
of one part, and its key. The parts of an object are chained. Lower versions give way to higher ones as rows are added;
an object is found when all its parts are there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from p2pstore.errors import CapacityExceeded
from p2pstore.objects import Version
from p2pstore.ssd_tier.digest_slots import NOT_FOUND, DigestSlots
from p2pstore.ssd_tier.footer import Footer
from p2pstore.ssd_tier.key_texts import KeyTexts, Namespaces
from p2pstore.ssd_tier.layout import ColdFacts, RecordPlace, part_count, record_bytes
from p2pstore.ssd_tier.rows import (
    FLAG_PIN,
    FLAG_SOFT,
    MAX_REPLICAS,
    ROW,
    ROW_BYTES,
    ROW_STRUCT,
    Rows,
    disk_bytes,
    flags_of,
)

MAX_HITS: Final = 0xFFFF
_NO_ROW: Final = 0
"""Row numbers in chains are raised by one, so that zeroed memory is empty."""


class ColdEntry(msgspec.Struct, frozen=True, gc=False):
    """An object on the disk. `places` are its records in the order of its parts, `disk_bytes` what they occupy;
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
    disk_bytes: int


class ColdRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of a segment; `disk_bytes` counts its header page."""

    digest: bytes
    version: Version
    length: int
    part: int
    place: RecordPlace
    stored_bytes: int
    disk_bytes: int
    hits: int


class ColdIndex:
    """See the module's docstring. `salt` is a random number, which nobody else should know."""

    def __init__(self, segments: int, max_records: int, salt: int) -> None:
        self.objects = 0
        """Objects with all their parts."""
        self.records = 0
        self.live_bytes = 0
        """What all records of the index occupy on the disk."""
        self.max_records = max_records
        self._rows = np.zeros(max_records, ROW)
        self._memory = self._rows.view(np.uint8).data
        self._segment_of = np.zeros(max_records, np.uint32)  # segment + 1; 0: a free row
        self._namespace_of = np.zeros(max_records, np.uint32)
        self._next = np.zeros(max_records, np.uint32)  # the next part's row + 1
        self._hits = np.zeros(max_records, np.uint16)
        self._segments = self._segment_of.data
        self._namespaces = self._namespace_of.data
        self._nexts = self._next.data
        self._hit_counts = self._hits.data
        self._used = 0  # rows below were in use at some time
        self._free = array("I")
        self._slots = DigestSlots(max_records, self._memory, ROW_BYTES, salt)
        self._texts = KeyTexts()
        self._names = Namespaces()
        self._generations = np.zeros(segments, np.uint64)
        self._live_bytes = np.zeros(segments, np.int64)
        self._live_records = np.zeros(segments, np.int64)

    @property
    def room(self) -> int:
        """Records that can still be added."""
        return self.max_records - self.records

    def segment_live_bytes(self, segment: int) -> int:
        """What the segment's records in the index occupy."""
        return int(self._live_bytes[segment])

    def segment_records(self, segment: int) -> int:
        """How many of its records are in the index."""
        return int(self._live_records[segment])

    # --- adding --------------------------------------------------------------------------------

    def add(
        self, place: RecordPlace, facts: ColdFacts, part: int, stored_bytes: int
    ) -> tuple[RecordPlace, ...]:
        """Put in a record. The places of those that it makes worthless, which must be marked dead: parts of lower
        versions, the same part of the same version at another place, or this record itself when a higher version is
        there. (Otherwise they would be back after a restart, once the segment of what replaced them is reclaimed.)

        Raises `CapacityExceeded` when the index is full.
        """
        self._check(place)
        digest, version = facts.digest, facts.version
        superseded: tuple[RecordPlace, ...] = ()
        head = self._slots.find(digest)
        if head != NOT_FOUND:
            known = self._version(head)
            if known > version:
                return (place,)
            if known < version:
                superseded = self.drop(digest)
                head = NOT_FOUND
        row = self._take_row()
        if head == NOT_FOUND:
            self._slots.insert(digest, row)
        was_complete = head != NOT_FOUND and self._is_complete(head)
        self._write(row, place, facts, part, stored_bytes)
        if head != NOT_FOUND:
            superseded = self._chain(head, row, part)
            head = self._slots.find(digest)
        else:
            head = row
        self.objects += self._is_complete(head) - was_complete
        return superseded

    def _check(self, place: RecordPlace) -> None:
        if not self.room:
            raise CapacityExceeded(
                f"the index of the SSD tier has no room for more than {self.max_records:,} records"
            )
        segment = place.segment
        if self._live_records[segment] and self._generations[segment] != place.generation:
            raise ValueError(f"segment {segment} still has records of another generation")

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _write(
        self, row: int, place: RecordPlace, facts: ColdFacts, part: int, stored_bytes: int
    ) -> None:
        segment, key, version = place.segment, facts.key.encode(), facts.version
        self._generations[segment] = place.generation
        ROW_STRUCT.pack_into(
            self._memory,
            row * ROW_BYTES,
            facts.digest,
            version.clock,
            version.root,
            facts.length,
            place.sequence,
            facts.expires_unix_ms,
            place.page,
            stored_bytes,
            self._texts.add(segment, key),
            version.writer,
            place.number,
            len(key),
            min(facts.replicas, MAX_REPLICAS),
            0,
            part,
            flags_of(facts.pin, facts.soft),
        )
        self._segments[row] = segment + 1
        self._namespaces[row] = self._names.use(facts.namespace)
        self._nexts[row] = _NO_ROW
        self._hit_counts[row] = 0
        size = record_bytes(stored_bytes)
        self._live_bytes[segment] += size
        self._live_records[segment] += 1
        self.live_bytes += size
        self.records += 1

    def _chain(self, head: int, row: int, part: int) -> tuple[RecordPlace, ...]:
        """Put the row in front of the others of its object, in place of the one that holds the same part."""
        digest = self._digest(head)
        self._slots.replace(digest, head, row)
        self._nexts[row] = head + 1
        before, at = row, head
        while self._part(at) != part:
            before, at = at, self._nexts[at] - 1
            if at < 0:
                return ()
        place = self._place(at)
        self._nexts[before] = self._nexts[at]
        self._release(at)
        return (place,)

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

    def records_of(self, segment: int) -> Iterator[ColdRecord]:
        """The records of a segment in the order of their pages. What is dropped meanwhile is left out."""
        rows = self._rows_of(segment)
        sequences = self._rows["sequence"][rows]
        order = np.argsort(self._rows["page"][rows])
        for row, sequence in zip(rows[order].tolist(), sequences[order].tolist(), strict=True):
            place = self._place(row) if self._segments[row] == segment + 1 else None
            if place is not None and place.sequence == sequence:
                fields = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
                version = Version(fields[1], fields[9], fields[2])
                head = self._slots.find(fields[0])
                yield ColdRecord(
                    fields[0],
                    version,
                    fields[3],
                    fields[14],
                    place,
                    fields[7],
                    record_bytes(fields[7]),
                    self._hit_counts[head],
                )

    @property
    def newest_clock(self) -> int:
        """The highest clock of all versions; 0 when there are none."""
        used = self._segment_of[: self._used] != 0
        return int(self._rows["clock"][: self._used][used].max(initial=0))

    def digests(self, namespace_digest: bytes | None) -> Iterator[bytes]:
        """The digests of all objects that are there now, complete or not: of a namespace, or of all (None). Others
        may come and go while they are gone through."""
        used = self._segment_of[: self._used] != 0
        if namespace_digest is not None:
            number = self._names.number_of_digest(namespace_digest)
            if number is None:
                return iter(())
            used &= self._namespace_of[: self._used] == number
        packed = self._rows["digest"][: self._used][used].tobytes()
        return (packed[start : start + 16] for start in range(0, len(packed), 16))

    def digests_of_namespace(self, namespace_digest: bytes) -> list[bytes]:
        """The digests of all objects in a namespace, complete or not."""
        number = self._names.number_of_digest(namespace_digest)
        if number is None:
            return []
        used = self._segment_of[: self._used] != 0
        rows = np.flatnonzero(used & (self._namespace_of[: self._used] == number))
        packed = np.unique(self._rows["digest"][rows], axis=0).tobytes()
        return [packed[start : start + 16] for start in range(0, len(packed), 16)]

    def page(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[list[ColdEntry], bool]:
        """Up to `limit` objects whose keys begin with `prefix`, in key order, above `after`; and whether there are
        more."""
        number = self._names.number(namespace)
        if number is None:
            return [], False
        used = self._segment_of[: self._used] != 0
        rows = np.flatnonzero(used & (self._namespace_of[: self._used] == number))
        keys = sorted(
            (key, self._digest(row))
            for row in rows.tolist()
            if (key := self._key(row)).startswith(prefix) and key > after
        )
        entries = [entry for _, digest in dict(keys).items() if (entry := self.find(digest))]
        return entries[:limit], len(entries) > limit

    # --- dropping ------------------------------------------------------------------------------

    def drop(self, digest: bytes) -> tuple[RecordPlace, ...]:
        """Take out all records of a digest; their places, which must be marked dead."""
        head = self._slots.find(digest)
        if head == NOT_FOUND:
            return ()
        self.objects -= self._is_complete(head)
        self._slots.remove(digest, head)
        places, row = [], head
        while row >= 0:
            places.append(self._place(row))
            following = self._nexts[row] - 1
            self._release(row)
            row = following
        return tuple(places)

    def drop_segment(self, segment: int) -> list[ColdEntry]:
        """Take out every object that has a record in the segment, with its records elsewhere. The objects that
        were complete; those of their places that lie in other segments must be marked dead."""
        lost: list[ColdEntry] = []
        for row in self._rows_of(segment).tolist():
            if self._segments[row] == segment + 1:
                digest = self._digest(row)
                if entry := self.find(digest):
                    lost.append(entry)
                self.drop(digest)
        self._texts.drop(segment)
        return lost

    def _release(self, row: int) -> None:
        segment = self._segments[row] - 1
        fields = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
        size = record_bytes(fields[7])
        self._segments[row] = 0
        self._names.leave(self._namespaces[row])
        self._live_bytes[segment] -= size
        self._live_records[segment] -= 1
        self.live_bytes -= size
        self.records -= 1
        self._free.append(row)
        if not self._live_records[segment]:
            self._texts.drop(segment)
        elif self._texts.discard(segment, fields[11]):
            self._gather_text(segment)

    def _gather_text(self, segment: int) -> None:
        rows = self._rows_of(segment)
        offsets, lengths = self._rows["key_offset"][rows], self._rows["key_bytes"][rows]
        text, self._rows["key_offset"][rows] = self._texts.gather(segment, offsets, lengths)
        self._texts.set(segment, text, dead_bytes=0)

    # --- many rows at once ---------------------------------------------------------------------

    def footer_of(self, segment: int) -> Footer:
        """The footer of a segment: all its records in the index. So every record placed in it must have been added
        or given up by then."""
        numbers = self._rows_of(segment)
        rows = self._rows[numbers]
        order = np.argsort(rows["number"])
        rows, numbers = rows[order], numbers[order]
        text, rows["key_offset"] = self._texts.gather(
            segment, rows["key_offset"], rows["key_bytes"]
        )
        used, rows["namespace"] = np.unique(self._namespace_of[numbers], return_inverse=True)
        return Footer(rows, [self._names.name(number) for number in used.tolist()], text)

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
        if self._used:
            raise ValueError("only an index that was never used is loaded")
        count = len(rows)
        if count > self.max_records:
            raise CapacityExceeded(
                f"{count:,} records, the index has room for {self.max_records:,}"
            )
        self._rows[:count] = rows
        self._segment_of[:count] = segments + 1
        uses = np.bincount(namespaces, minlength=len(names)).tolist()
        numbers = [
            self._names.use(name, uses[at]) if uses[at] else 0 for at, name in enumerate(names)
        ]
        self._namespace_of[:count] = np.array(numbers, np.uint32)[namespaces]
        heads = rows["part"] == 0
        followed = np.flatnonzero(~heads[1:])
        self._next[followed] = followed + 2
        self._slots.insert_all(rows["digest"][heads], np.flatnonzero(heads).astype(np.uint32))
        sizes = disk_bytes(rows)
        count_of = len(self._live_bytes)
        self._live_bytes += np.bincount(segments, sizes, count_of).astype(np.int64)
        self._live_records += np.bincount(segments, minlength=count_of)
        key_bytes = np.bincount(segments, rows["key_bytes"], count_of).astype(np.int64).tolist()
        for segment, text in texts.items():
            self._texts.set(segment, text, dead_bytes=len(text) - key_bytes[segment])
        for segment, generation in generations.items():
            self._generations[segment] = generation
        self._used = self.records = count
        self.live_bytes, self.objects = int(sizes.sum()), int(heads.sum())

    # --- one row -------------------------------------------------------------------------------

    def _rows_of(self, segment: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._segment_of[: self._used] == segment + 1)

    def _digest(self, row: int) -> bytes:
        return bytes(self._memory[row * ROW_BYTES : row * ROW_BYTES + 16])

    def _version(self, row: int) -> Version:
        fields = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
        return Version(fields[1], fields[9], fields[2])

    def _part(self, row: int) -> int:
        return ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)[14]  # type: ignore[no-any-return]

    def _key(self, row: int) -> str:
        fields = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
        return self._texts.get(self._segments[row] - 1, fields[8], fields[11]).decode()

    def _place(self, row: int) -> RecordPlace:
        segment = self._segments[row] - 1
        fields = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
        return RecordPlace(
            segment, int(self._generations[segment]), fields[6], fields[10], fields[4]
        )

    def _is_complete(self, head: int) -> bool:
        length = ROW_STRUCT.unpack_from(self._memory, head * ROW_BYTES)[3]
        parts, row = 0, head
        while row >= 0:
            parts += 1
            row = self._nexts[row] - 1
        return parts == part_count(length)

    def _entry(self, head: int) -> ColdEntry | None:
        if not self._is_complete(head):
            return None
        fields = ROW_STRUCT.unpack_from(self._memory, head * ROW_BYTES)
        parts, row, size = [], head, 0
        while row >= 0:
            each = ROW_STRUCT.unpack_from(self._memory, row * ROW_BYTES)
            parts.append((each[14], self._place(row)))
            size += record_bytes(each[7])
            row = self._nexts[row] - 1
        flags = fields[15]
        return ColdEntry(
            digest=fields[0],
            version=Version(fields[1], fields[9], fields[2]),
            length=fields[3],
            namespace=self._names.name(self._namespaces[head]),
            key=self._key(head),
            places=tuple(place for _, place in sorted(parts)) if len(parts) > 1 else (parts[0][1],),
            hits=self._hit_counts[head],
            expires_unix_ms=fields[5],
            replicas=fields[12],
            pin=flags & FLAG_PIN,
            soft=bool(flags & FLAG_SOFT),
            disk_bytes=size,
        )
