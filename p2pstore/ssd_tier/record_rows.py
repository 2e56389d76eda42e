"""The memory of the index: a row for each record, with the text of its key and counts by segment and namespace. Pure.

All columns are reserved at once, for the largest number of records, and cost memory as they are written to: 94 bytes a
record. A row is free again when its record goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from p2pstore.errors import CapacityExceeded
from p2pstore.objects import DIGEST_BYTES, Version, namespace_digest
from p2pstore.ssd_tier.footer import (
    CLOCK,
    KEY_BYTES,
    KEY_OFFSET,
    MAX_REPLICAS,
    NUMBER,
    PAGE,
    ROOT,
    ROW,
    ROW_BYTES,
    ROW_STRUCT,
    SEQUENCE,
    STORED_BYTES,
    WRITER,
    Footer,
    Rows,
    disk_bytes,
    pack_row,
)
from p2pstore.ssd_tier.index_walks import DigestWalk
from p2pstore.ssd_tier.log_layout import ColdFacts, RecordPlace, record_bytes
from p2pstore.ssd_tier.write_admission import NamespaceBytes

_WORTH_CUTTING_BYTES: Final = 64 * 1024
_REPLICAS_AT: Final = ROW.fields["replicas"][1] if ROW.fields is not None else 0
_EXPIRES_AT: Final = ROW.fields["expires_unix_ms"][1] if ROW.fields is not None else 0
_FLAGS_AT: Final = ROW.fields["flags"][1] if ROW.fields is not None else 0

END: Final = -1
"""There is no next row."""


class KeyTexts:
    """The keys of all records as text, by segment and offset. A segment's text goes with the segment; text of dropped
    records is cut out when it is the larger half."""

    def __init__(self) -> None:
        self._texts: dict[int, bytes | bytearray] = {}
        self._dead_bytes: dict[int, int] = {}

    def add(self, segment: int, key: bytes) -> int:
        """Append a key; its offset."""
        text = self._texts.get(segment, b"")
        if not isinstance(text, bytearray):
            text = self._texts[segment] = bytearray(text)
        text += key
        return len(text) - len(key)

    def get(self, segment: int, offset: int, length: int) -> bytes:
        return bytes(self._texts[segment][offset : offset + length])

    def set(self, segment: int, text: bytes, dead_bytes: int) -> None:
        """The whole text of a segment, `dead_bytes` of which no record uses."""
        self._texts[segment] = text
        self._dead_bytes[segment] = dead_bytes

    def drop(self, segment: int) -> None:
        self._texts.pop(segment, None)
        self._dead_bytes.pop(segment, None)

    def discard(self, segment: int, length: int) -> bool:
        """A key of this length is not used any more; whether the text should be gathered anew."""
        dead = self._dead_bytes.get(segment, 0) + length
        self._dead_bytes[segment] = dead
        return dead > _WORTH_CUTTING_BYTES and 2 * dead > len(self._texts[segment])

    def gather(
        self, segment: int, offsets: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint16]
    ) -> tuple[bytes, npt.NDArray[np.uint32]]:
        """The text of these keys alone, one after the other, and their offsets in it."""
        text = np.frombuffer(bytes(self._texts.get(segment, b"")), np.uint8)
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = ends - lengths
        places = np.repeat(offsets.astype(np.int64) - starts, lengths)
        places += np.arange(len(places))
        return text[places].tobytes(), starts.astype(np.uint32)


class Namespaces:
    """Namespaces by a small number, as long as records use them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._uses: list[int] = []
        self._numbers: dict[str, int] = {}
        self.digests: dict[bytes, int] = {}
        self._free: list[int] = []

    def use(self, name: str, times: int = 1) -> int:
        """The number of a namespace, used by `times` more records."""
        number = self._numbers.get(name)
        if number is None:
            number = self._take(name)
        self._uses[number] += times
        return number

    def leave(self, number: int, times: int = 1) -> None:
        """The namespace has `times` fewer records; after the last one its number is free."""
        self._uses[number] -= times
        if not self._uses[number]:
            name = self._names[number]
            del self._numbers[name], self.digests[namespace_digest(name)]
            self._free.append(number)

    def is_used(self, number: int) -> bool:
        return self._uses[number] > 0

    def name(self, number: int) -> str:
        return self._names[number]

    def number(self, name: str) -> int | None:
        """The number of a namespace, None when no record is in it."""
        return self._numbers.get(name)

    def _take(self, name: str) -> int:
        if self._free:
            number = self._free.pop()
            self._names[number] = name
        else:
            number = len(self._names)
            self._names.append(name)
            self._uses.append(0)
        self._numbers[name] = self.digests[namespace_digest(name)] = number
        return number


class RecordRows:
    """See the module's docstring. Rows are called by their numbers."""

    def __init__(self, segments: int, max_records: int, namespaces: Sequence[str] = ()) -> None:
        self.of_namespaces = NamespaceBytes(namespaces, segments)
        self.max_records = max_records
        self.records = 0
        self.live_bytes = 0
        """Bytes of all records on the disk."""
        self.newest_clock = 0
        """The highest clock of all versions that were ever here."""
        self.segment_live_bytes = np.zeros(segments, np.int64)
        self.segment_records = np.zeros(segments, np.int64)
        self.names = Namespaces()
        self._rows = np.zeros(max_records, ROW)
        self._segment_of = np.zeros(max_records, np.uint32)  # raised by one: 0 is a free row
        self._namespace_of = np.zeros(max_records, np.uint32)
        self._next = np.zeros(max_records, np.uint32)  # raised by one: 0 is the end
        # Single values are read and written through these: numpy's own way takes three times as long.
        self.memory = self._rows.view(np.uint8).data
        self._segments = self._segment_of.data
        self._namespaces = self._namespace_of.data
        self._nexts = self._next.data
        self.end = 0
        """No row from here on was ever in use."""
        self._free = array("I")
        self._texts = KeyTexts()
        self._generations = np.zeros(segments, np.uint64)
        self._walks: WeakSet[DigestWalk] = WeakSet()

    # --- one row -------------------------------------------------------------------------------

    def check(self, place: RecordPlace) -> None:
        """Raise what `write` would, before anything is changed: `CapacityExceeded` when there is no free row;
        `ValueError` when the segment still has records of another generation."""
        if self.records == self.max_records:
            raise CapacityExceeded(
                f"the index of the SSD tier has no room for more than {self.max_records:,} records"
            )
        segment = place.segment
        if self.segment_records[segment] and self._generations[segment] != place.generation:
            raise ValueError(f"segment {segment} still has records of another generation")

    def write(self, place: RecordPlace, facts: ColdFacts, part: int, stored_bytes: int) -> int:
        """Put a record into a free row; which one."""
        if self._free:
            row = self._free.pop()
        else:
            row, self.end = self.end, self.end + 1
        self._about_to_change(row)
        segment, key = place.segment, facts.key.encode()
        self.memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = pack_row(
            facts,
            place,
            part,
            stored_bytes,
            key_offset=self._texts.add(segment, key),
            key_bytes=len(key),
            namespace=0,
        )
        self._segments[row] = segment + 1
        self._namespaces[row] = self.names.use(facts.namespace)
        self._nexts[row] = 0
        self._generations[segment] = place.generation
        self.newest_clock = max(self.newest_clock, facts.version.clock)
        self._count(segment, facts.namespace, record_bytes(stored_bytes), 1)
        return row

    def set_care(self, row: int, replicas: int, flags: int, expires_unix_ms: int | None) -> None:
        """Change the replica count, the flags, and (unless None) the end of the record's object, in this row."""
        start = row * ROW_BYTES
        at = start + _REPLICAS_AT
        self.memory[at : at + 2] = min(replicas, MAX_REPLICAS).to_bytes(2, "little")
        self.memory[start + _FLAGS_AT] = flags
        if expires_unix_ms is not None:
            at = start + _EXPIRES_AT
            self.memory[at : at + 8] = expires_unix_ms.to_bytes(8, "little")

    def release(self, row: int) -> None:
        self._about_to_change(row)
        fields = self.fields(row)
        segment = self._segments[row] - 1
        self._segments[row] = 0
        self._free.append(row)
        namespace = self._namespaces[row]
        name = self.names.name(namespace)
        self.names.leave(namespace)
        self._count(segment, name, -record_bytes(fields[STORED_BYTES]), -1)
        if not self.segment_records[segment]:
            self._texts.drop(segment)
        elif self._texts.discard(segment, fields[KEY_BYTES]):
            self._gather_text(segment)

    def _about_to_change(self, row: int) -> None:
        for walk in self._walks:
            walk.about_to_change(row)

    def _count(self, segment: int, namespace: str, size: int, records: int) -> None:
        self.of_namespaces.count(namespace, segment, size)
        self.segment_live_bytes[segment] += size
        self.segment_records[segment] += records
        self.live_bytes += size
        self.records += records

    def fields(self, row: int) -> tuple[Any, ...]:
        """All fields of a row, in the order of the constants above."""
        return ROW_STRUCT.unpack_from(self.memory, row * ROW_BYTES)

    def digest(self, row: int) -> bytes:
        return bytes(self.memory[row * ROW_BYTES : row * ROW_BYTES + DIGEST_BYTES])

    def version(self, row: int) -> Version:
        fields = self.fields(row)
        return Version(fields[CLOCK], fields[WRITER], fields[ROOT])

    def is_at(self, row: int, sequence: int) -> bool:
        """Whether the row still has the record of this sequence."""
        return self._segments[row] > 0 and bool(self.fields(row)[SEQUENCE] == sequence)

    def place(self, row: int) -> RecordPlace:
        return self.place_of(row, self.fields(row))

    def place_of(self, row: int, fields: tuple[Any, ...]) -> RecordPlace:
        """The same, when the fields of the row are at hand."""
        segment = self._segments[row] - 1
        generation = int(self._generations[segment])
        return RecordPlace(segment, generation, fields[PAGE], fields[NUMBER], fields[SEQUENCE])

    def key(self, row: int) -> str:
        return self.key_of(row, self.fields(row))

    def key_of(self, row: int, fields: tuple[Any, ...]) -> str:
        """The same, when the fields of the row are at hand."""
        segment = self._segments[row] - 1
        return self._texts.get(segment, fields[KEY_OFFSET], fields[KEY_BYTES]).decode()

    def namespace(self, row: int) -> int:
        return self._namespaces[row]

    def next(self, row: int) -> int:
        """The row that follows in a chain, or END."""
        return self._nexts[row] - 1

    def follow(self, row: int, following: int) -> None:
        self._nexts[row] = following + 1

    # --- many rows -----------------------------------------------------------------------------

    def of_segment(self, segment: int) -> npt.NDArray[np.intp]:
        """The rows of a segment's records, in the order of their numbers."""
        rows = np.flatnonzero(self._segment_of[: self.end] == segment + 1)
        return rows[np.argsort(self._rows["number"][rows])]

    def walk(self, namespace: int | None) -> DigestWalk:
        """The digests of the first parts that there are now, of all objects or of those of a namespace."""
        walk = DigestWalk(self, namespace)
        self._walks.add(walk)
        return walk

    def first_parts(self, namespace: int | None, first: int, end: int) -> list[int]:
        """The rows of the first parts of all objects, or of those of a namespace, of the rows from `first` to before
        `end`."""
        chosen = self._segment_of[first:end] > 0
        if namespace is not None:
            chosen &= self._namespace_of[first:end] == namespace
        rows = np.flatnonzero(chosen) + first
        first_parts: list[int] = rows[self._rows["part"][rows] == 0].tolist()
        return first_parts

    def oldest(self, namespace: int, count_bytes: int, limit: int) -> list[bytes]:
        """The digests of a namespace's first written records, together about `count_bytes`; at most `limit`."""
        rows = np.flatnonzero(
            (self._segment_of[: self.end] > 0) & (self._namespace_of[: self.end] == namespace)
        )
        if len(rows) > limit:
            rows = rows[np.argpartition(self._rows["sequence"][rows], limit)[:limit]]
        rows = rows[np.argsort(self._rows["sequence"][rows])]
        ends = np.cumsum(disk_bytes(self._rows[rows]))
        chosen = rows[: int(np.searchsorted(ends, count_bytes)) + 1]
        packed = self._rows["digest"][chosen].tobytes()
        digests = (packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))
        return list(dict.fromkeys(digests))

    def footer(self, segment: int) -> Footer:
        numbers = self.of_segment(segment)
        rows = self._rows[numbers]
        text, rows["key_offset"] = self._texts.gather(segment, rows["key_offset"], rows["key_bytes"])
        used, rows["namespace"] = np.unique(self._namespace_of[numbers], return_inverse=True)
        return Footer(rows, [self.names.name(number) for number in used.tolist()], text)

    def _gather_text(self, segment: int) -> None:
        rows = np.flatnonzero(self._segment_of[: self.end] == segment + 1)
        offsets, lengths = self._rows["key_offset"][rows], self._rows["key_bytes"][rows]
        text, self._rows["key_offset"][rows] = self._texts.gather(segment, offsets, lengths)
        self._texts.set(segment, text, dead_bytes=0)

    def load(
        self,
        rows: Rows,
        segments: npt.NDArray[np.uint32],
        namespaces: npt.NDArray[np.uint32],
        names: Sequence[str],
        texts: Mapping[int, bytes],
        generations: Mapping[int, int],
    ) -> None:
        """Put many records into rows that were never used: for each its row, its segment and which of `names` it is
        in; for segments their text and generation. Rows with `part` above 0 follow the row before."""
        if self.end:
            raise ValueError("only an index that was never used is loaded")
        if len(rows) > self.max_records:
            raise CapacityExceeded(f"{len(rows):,} records, the index has room for {self.max_records:,}")
        count, segment_count = len(rows), len(self.segment_records)
        self._rows[:count] = rows
        self._segment_of[:count] = segments + 1
        uses = np.bincount(namespaces, minlength=len(names)).tolist()
        numbers = [
            self.names.use(name, times) if times else 0 for name, times in zip(names, uses, strict=True)
        ]
        self._namespace_of[:count] = np.array(numbers, np.uint32)[namespaces]
        followed = np.flatnonzero(rows["part"][1:] > 0)
        self._next[followed] = followed + 2
        sizes = disk_bytes(rows)
        self.of_namespaces.load(names, namespaces, segments, sizes)
        self.segment_live_bytes += np.bincount(segments, sizes, segment_count).astype(np.int64)
        self.segment_records += np.bincount(segments, minlength=segment_count)
        key_bytes = np.bincount(segments, rows["key_bytes"], segment_count).astype(np.int64)
        for segment, text in texts.items():
            self._texts.set(segment, text, dead_bytes=len(text) - int(key_bytes[segment]))
        for segment, generation in generations.items():
            self._generations[segment] = generation
        self.end = self.records = count
        self.newest_clock = int(rows["clock"].max(initial=0))
        self.live_bytes = int(sizes.sum())
