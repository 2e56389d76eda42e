"""Finding the records of a segment that has no footer, or which generations it ever had. Pure.

These are generators: each yields what to read next and is sent the bytes, or None where the disk failed to read them.
So one shell drives them over any disk, several segments at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from p2pstore.objects import KIB, MIB
from p2pstore.ssd_tier.footer import footer_generation
from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    PAGE_BYTES,
    DamagedRecord,
    record_bytes,
    round_up_to_page,
    segment_position,
)
from p2pstore.ssd_tier.payload import check_stored_chunk, stored_chunk_bytes
from p2pstore.ssd_tier.record_header import (
    RECORD_MAGIC,
    RecordHeader,
    decode_record_header,
    record_generation,
)
from p2pstore.ssd_tier.superblock import Superblock

_HOPPED_BYTES: Final = 64 * KIB
"""Read after a hop over a payload: a header is expected right there."""
_SEARCHED_BYTES: Final = MIB
"""Read where none was: it may be anywhere."""
_MAGIC: Final = np.frombuffer(RECORD_MAGIC, "<u8")[0]


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
        """So much could not be read, whatever is there."""
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
        """This window when it has these bytes of the segment, or one that was read from there on."""
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
            self.highest_generation = max(
                self.highest_generation, *(each or 0 for each in found), 0
            )

    def _read(self, page: int, length: int) -> Generator[Read, Bytes | None, memoryview]:
        """What is there, at most to the end of the segment. Where the disk fails, page after page, with zeros for
        those that it cannot read."""
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
