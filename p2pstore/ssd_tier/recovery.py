"""Reading a log at a start, segment by segment, and filling the index with the records that count. Pure.

A segment is read by its start and its footer. An opened segment without a footer is searched; since it may not be
synced, its payloads are checked, too. No clean shutdown is needed, and there is no sign of one.

Readers are generators: each yields the next read and is sent the bytes, or None where the disk failed. So one shell
drives them over any disk, several segments at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.objects import KIB, MIB
from p2pstore.ssd_tier.footer import (
    ROW,
    Footer,
    Rows,
    decode_footer,
    decode_footer_tail,
    footer_from_headers,
    footer_generation,
    parts_of,
)
from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    PAGE_BYTES,
    SEGMENT_START_BYTES,
    DamagedRecord,
    DeadMarks,
    Superblock,
    decode_segment_header,
    record_bytes,
    round_up_to_page,
    segment_position,
)
from p2pstore.ssd_tier.record_format import (
    RECORD_MAGIC,
    RecordHeader,
    check_stored_chunk,
    decode_record_header,
    record_generation,
    stored_chunk_bytes,
)

_HOPPED_BYTES: Final = 64 * KIB
"""Read after a hop over a payload: a header is expected right there."""
_SEARCHED_BYTES: Final = MIB
"""Read where none was: it may be anywhere."""
_MAGIC: Final = np.frombuffer(RECORD_MAGIC, "<u8")[0]
_END_BYTES: Final = 32 * KIB
"""Read at the end of a segment: the whole footer of some 200 records."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of the disk that are wanted; both numbers are multiples of 4 KiB."""

    position: int
    length: int


Bytes = bytes | memoryview
Reading = Generator[Read, Bytes | None, None]


class SegmentSearch:
    """A search through one segment. `records` are its headers of one generation, `torn` those whose payload is not
    what they tell of; `highest_generation` is that of anything in it."""

    def __init__(self, superblock: Superblock, segment: int) -> None:
        self.records: list[RecordHeader] = []
        self.torn: list[RecordHeader] = []
        self.highest_generation = 0
        self._unreadable: set[int] = set()
        self._store_id = superblock.store_id
        self._segment = segment
        self._position = segment_position(segment, superblock.segment_bytes)
        self._pages = superblock.segment_bytes // PAGE_BYTES

    @property
    def unreadable_bytes(self) -> int:
        """Bytes that the disk failed to read."""
        return len(self._unreadable) * PAGE_BYTES

    def find_records(self, generation: int) -> Reading:
        """Find all records of a generation: hop over their payloads; where no header is, try page after page."""
        at, hopped = FIRST_RECORD_PAGE, True
        while at < self._pages:
            length = _HOPPED_BYTES if hopped else _SEARCHED_BYTES
            window = yield from self._read(at, length)
            begin, end, hopped = at, at + len(window) // PAGE_BYTES, False
            for page in _candidates(window):
                if begin + page < at:
                    continue  # in a payload
                content = window[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
                try:
                    header = decode_record_header(
                        content, self._store_id, self._segment, generation, begin + page
                    )
                except DamagedRecord:
                    continue
                self.records.append(header)
                at = begin + page + record_bytes(header.stored_bytes) // PAGE_BYTES
                hopped = at >= end
            at = max(at, end)

    def check_payloads(self) -> Reading:
        """Read the payloads of all records, and take out those that are torn: they may never have been written, or
        not to their end. So what they were to replace is not lost."""
        found, self.records = self.records, []
        window = _Window(-1, memoryview(b""))
        for header in found:
            start = (header.place.page + 1) * PAGE_BYTES
            try:
                for number, size in enumerate(stored_chunk_bytes(header)):
                    window = yield from self._window(window, start, size)
                    check_stored_chunk(header, number, window.cut(start, size))
                    start += size
            except DamagedRecord:
                self.torn.append(header)
            else:
                self.records.append(header)

    def _window(
        self, window: _Window, start: int, length: int
    ) -> Generator[Read, Bytes | None, _Window]:
        if window.has(start, length):
            return window
        page = start // PAGE_BYTES
        needed = start + length - page * PAGE_BYTES
        content = yield from self._read(page, max(_SEARCHED_BYTES, round_up_to_page(needed)))
        return _Window(page * PAGE_BYTES, content)

    def find_generations(self) -> Reading:
        """Find the highest generation of which there is any record or footer."""
        for at in range(0, self._pages, _SEARCHED_BYTES // PAGE_BYTES):
            window = yield from self._read(at, _SEARCHED_BYTES)
            found = [
                record_generation(
                    window[page * PAGE_BYTES : (page + 1) * PAGE_BYTES],
                    self._store_id,
                    self._segment,
                    at + page,
                )
                for page in _candidates(window)
            ]
            if at + len(window) // PAGE_BYTES == self._pages:
                found.append(footer_generation(window[-PAGE_BYTES:], self._store_id, self._segment))
            self.highest_generation = max(self.highest_generation, *(each or 0 for each in found), 0)

    def _read(self, page: int, length: int) -> Generator[Read, Bytes | None, memoryview]:
        """Bytes from a page on, at most to the end of the segment. After a failure page by page, with zeros for
        unreadable pages."""
        length = min(length, (self._pages - page) * PAGE_BYTES)
        start = self._position + page * PAGE_BYTES
        whole = yield Read(start, length)
        if whole is not None:
            return memoryview(whole)
        window = bytearray(length)
        for offset in range(0, length, PAGE_BYTES):
            content = yield Read(start + offset, PAGE_BYTES)
            if content is None:
                self._unreadable.add(page + offset // PAGE_BYTES)
            else:
                window[offset : offset + PAGE_BYTES] = content
        return memoryview(window)


@dataclass(frozen=True, slots=True)
class _Window:
    """Bytes of the segment, from `begin` on."""

    begin: int
    content: memoryview

    def has(self, start: int, length: int) -> bool:
        return self.begin <= start and start + length <= self.begin + len(self.content)

    def cut(self, start: int, length: int) -> memoryview:
        return self.content[start - self.begin : start - self.begin + length]


def _candidates(window: memoryview) -> Iterator[int]:
    """The pages of a window that begin like a record header."""
    words = np.frombuffer(window, "<u8").reshape(-1, PAGE_BYTES // 8)
    yield from np.flatnonzero(words[:, 0] == _MAGIC).tolist()


class FoundState(Enum):
    """The state of a segment that was read."""

    FREE = "free"
    """Nothing of its generation was written to it."""
    SEALED = "sealed"
    UNSEALED = "unsealed"
    """It was open when the log ended, or its footer is damaged: to be sealed, or reclaimed. Records whose payload is
    torn are marked dead."""
    DAMAGED = "damaged"
    """Its header is: nothing of it counts. To be reclaimed, with a generation above that of anything in it."""


@dataclass(slots=True)
class FoundSegment:
    """The result of reading a segment. `generation` is the highest one that was ever there; `unreadable_bytes` could
    not be read: a damaged segment with any of these may have had a higher one, so nothing may be written to it
    again."""

    segment: int
    state: FoundState
    generation: int
    marks: DeadMarks
    footer: Footer
    unreadable_bytes: int = 0


SegmentReading = Generator[Read, Bytes | None, FoundSegment]
"""Yields what to read, is sent the bytes or None where the disk failed, and returns what was found. The memory of the
bytes may be used again as soon as the next thing is asked for."""


def read_segment(superblock: Superblock, segment: int) -> SegmentReading:
    store_id, size = superblock.store_id, superblock.segment_bytes
    position = segment_position(segment, size)
    start = yield Read(position, SEGMENT_START_BYTES)
    if start is None:
        return (yield from _damaged(superblock, segment, SEGMENT_START_BYTES))
    try:
        header = decode_segment_header(start[:PAGE_BYTES], store_id, segment)
    except DamagedRecord:
        return (yield from _damaged(superblock, segment, 0))
    generation = header.generation
    marks = DeadMarks.decode(start[PAGE_BYTES:], store_id, segment, generation)
    if not header.opened:
        clean = DeadMarks(store_id, segment, generation)  # whatever is left of an earlier generation
        return FoundSegment(segment, FoundState.FREE, generation, clean, _nothing())
    footer = yield from _read_footer(superblock, segment, generation)
    if footer is not None:
        return FoundSegment(segment, FoundState.SEALED, generation, marks, footer)
    search = SegmentSearch(superblock, segment)
    yield from search.find_records(generation)
    yield from search.check_payloads()
    for torn in search.torn:
        marks.mark(torn.place.number)
    footer = footer_from_headers(search.records)
    return FoundSegment(segment, FoundState.UNSEALED, generation, marks, footer, search.unreadable_bytes)


def _read_footer(
    superblock: Superblock, segment: int, generation: int
) -> Generator[Read, Bytes | None, Footer | None]:
    """The footer, or None where there is none that is whole."""
    end = segment_position(segment + 1, superblock.segment_bytes)
    last = yield Read(end - _END_BYTES, _END_BYTES)
    if last is None:
        return None
    try:
        tail = decode_footer_tail(last[-PAGE_BYTES:], superblock.store_id, segment, generation)
        length = tail.body_bytes
        body: Bytes | None = last[-PAGE_BYTES - length : -PAGE_BYTES]
        if length > _END_BYTES - PAGE_BYTES:
            body = yield Read(end - PAGE_BYTES - length, length)
        return None if body is None else decode_footer(tail, body)
    except DamagedRecord:
        return None


def _damaged(superblock: Superblock, segment: int, unreadable_bytes: int) -> SegmentReading:
    search = SegmentSearch(superblock, segment)
    yield from search.find_generations()
    generation = search.highest_generation
    return FoundSegment(
        segment,
        FoundState.DAMAGED,
        generation,
        DeadMarks(superblock.store_id, segment, generation),
        _nothing(),
        unreadable_bytes + search.unreadable_bytes,
    )


def _nothing() -> Footer:
    return Footer(np.empty(0, ROW), [], b"")


Which = npt.NDArray[np.bool_]


def refill(index: ColdIndex, found: Sequence[FoundSegment]) -> int:
    """Fill an empty index with the records that count, and mark the others dead: these marks are to be written like any
    others. When there are too many records for the index, those written first are left out. Returns the next sequence,
    which is above that of any record.

    Dead marks are obeyed. The highest complete version of an object wins: a version that was being written must not
    take the one before with it. Of equal versions the record written first counts, because a copy made by reclaim need
    not be durable yet. Losers are marked dead: they could come back when the winner is gone.

    A second or two for a million records: not for the event loop's thread.
    """
    names: dict[str, int] = {}
    alive = [~each.marks.dead_of(each.footer.rows["number"]) for each in found]
    rows = _joined([each.footer.rows[which] for each, which in zip(found, alive, strict=True)], ROW)
    owners = np.repeat(np.arange(len(found)), [int(which.sum()) for which in alive])
    namespaces = _joined(
        [_namespaces(each, names)[which] for each, which in zip(found, alive, strict=True)],
        np.dtype(np.uint32),
    )
    order = _best_first(rows)
    rows, owners, namespaces = rows[order], owners[order], namespaces[order]

    kept = _newest(rows, _winners(rows), index.rows.max_records)
    for owner, number in zip(owners[~kept].tolist(), rows["number"][~kept].tolist(), strict=True):
        found[owner].marks.mark(number)
    if not kept.all():
        rows, owners, namespaces = rows[kept], owners[kept], namespaces[kept]
    segments = np.array([each.segment for each in found], np.uint32)
    index.load(
        rows,
        segments[owners],
        namespaces,
        list(names),
        {found[owner].segment: found[owner].footer.keys for owner in np.unique(owners).tolist()},
        {each.segment: each.generation for each in found},
    )
    sequences = [int(each.footer.rows["sequence"].max(initial=0)) for each in found]
    return max(sequences, default=0) + 1


def _joined(pieces: list[npt.NDArray[np.generic]], dtype: np.dtype[np.generic]) -> Rows:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _namespaces(found: FoundSegment, names: dict[str, int]) -> npt.NDArray[np.uint32]:
    """For each row of the segment which of all `names` it is in; names that are new are added to them."""
    numbers = [names.setdefault(name, len(names)) for name in found.footer.namespaces]
    return np.take(np.array(numbers, np.uint32), found.footer.rows["namespace"])


def _best_first(rows: Rows) -> npt.NDArray[np.intp]:
    """The order of digests; of each the highest version first, its parts in order, of each the oldest record first."""
    return np.lexsort(
        (
            rows["sequence"],
            rows["part"],
            ~rows["root"],
            ~rows["writer"],
            ~rows["clock"],
            rows["digest"][:, 1],
            rows["digest"][:, 0],
        )
    )


def _winners(rows: Rows) -> Which:
    """For rows in that order: which are the first record of a part of the highest version that has all its parts."""
    new_object = _differ(rows["digest"][:, 0]) | _differ(rows["digest"][:, 1])
    new_version = new_object.copy()
    for name in ("clock", "writer", "root"):
        new_version |= _differ(rows[name])
    new_part = new_version | _differ(rows["part"])
    # Numbers of versions and objects, counted from 0: of each row, and of each version the object's.
    version = np.cumsum(new_version) - 1
    first = np.flatnonzero(new_version)
    objects = (np.cumsum(new_object) - 1)[first]
    whole = np.bincount(version, new_part, len(first)) == parts_of(rows[first])
    chosen = np.zeros(len(first), bool)
    _, highest = np.unique(objects[whole], return_index=True)
    chosen[np.flatnonzero(whole)[highest]] = True
    found: Which = chosen[version] & new_part
    return found


def _differ(column: npt.NDArray[np.generic]) -> Which:
    """Which values are not the one before them."""
    differ = np.ones(len(column), bool)
    differ[1:] = column[1:] != column[:-1]
    return differ


def _newest(rows: Rows, kept: Which, limit: int) -> Which:
    """Of the objects that are kept those written last, as many as have no more records than `limit`."""
    if int(kept.sum()) <= limit:
        return kept
    places = np.flatnonzero(kept)
    which = np.cumsum(rows["part"][places] == 0) - 1
    sequences = np.zeros(which[-1] + 1, np.uint64)
    np.maximum.at(sequences, which, rows["sequence"][places])
    newest_first = np.argsort(~sequences)
    fitting = np.cumsum(np.bincount(which)[newest_first]) <= limit
    chosen = np.zeros(len(sequences), bool)
    chosen[newest_first[fitting]] = True
    found = np.zeros(len(rows), bool)
    found[places] = chosen[which]
    return found
