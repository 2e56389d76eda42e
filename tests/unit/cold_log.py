"""A log of cold objects in a bytearray, written without a tier and read back by recovery. For tests."""

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pstore.objects import MIB
from p2pstore.ssd_tier.footer import encode_footer, footer_from_headers
from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    PAGE_BYTES,
    Codec,
    ColdFacts,
    DeadMarks,
    RecordPlace,
    Superblock,
    encode_segment_start,
    first_writes,
    part_bytes,
    record_bytes,
    record_position,
    segment_position,
)
from p2pstore.ssd_tier.record_format import decode_record_header, encode_record_header
from p2pstore.ssd_tier.recovery import FoundSegment, Read, SegmentReading, read_segment, refill
from tests.unit.cold_objects import STORE_ID


def drive(reading: SegmentReading, read: Callable[[Read], bytes | None]) -> FoundSegment:
    """Answer what a reading asks for, to its end, each time in the same memory."""
    memory = memoryview(bytearray())
    try:
        wanted = next(reading)
        while True:
            content = read(wanted)
            if content is None:
                wanted = reading.send(None)
                continue
            if len(content) > len(memory):
                memory[:] = b"\xee" * len(memory)
                memory = memoryview(bytearray(len(content)))
            memory[: len(content)] = content
            wanted = reading.send(memory[: len(content)])
            memory[:] = b"\xee" * len(memory)
    except StopIteration as done:
        memory[:] = b"\xee" * len(memory)
        found: FoundSegment = done.value
        return found


@dataclass
class Log:
    """A disk, and where the next record goes in each segment."""

    segments: int = 3
    segment_bytes: int = MIB
    disk: bytearray = field(init=False)
    sequence: int = 0
    reads: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.superblock = Superblock(STORE_ID, self.segments, self.segment_bytes)
        self.disk = bytearray(self.superblock.total_bytes)
        for position, content in first_writes(self.superblock):
            self.write(position, content)
        self.generations = [1] * self.segments
        self.pages = [FIRST_RECORD_PAGE] * self.segments
        self.placed: list[list[RecordPlace]] = [[] for _ in range(self.segments)]
        self.marks = [DeadMarks(STORE_ID, segment, 1) for segment in range(self.segments)]

    def write(self, position: int, content: bytes) -> None:
        assert position + len(content) <= len(self.disk)
        self.disk[position : position + len(content)] = content

    def start(self, segment: int, generation: int, opened: bool) -> None:
        """Reclaim a segment, or open it."""
        content = encode_segment_start(STORE_ID, segment, generation, opened)
        self.write(segment_position(segment, self.segment_bytes), content)
        self.generations[segment], self.pages[segment] = generation, FIRST_RECORD_PAGE
        self.placed[segment] = []
        self.marks[segment] = DeadMarks(STORE_ID, segment, generation)

    def append(
        self,
        segment: int,
        facts: ColdFacts,
        part: int = 0,
        payload: bytes | None = None,
        packed: tuple[int, ...] = (),
    ) -> RecordPlace:
        """Write a record; without a payload, one of zeros. `packed` are the sizes of its chunks in lz4."""
        if not self.placed[segment]:
            self.start(segment, self.generations[segment], opened=True)
        self.sequence += 1
        number = len(self.placed[segment])
        place = RecordPlace(
            segment, self.generations[segment], self.pages[segment], number, self.sequence
        )
        size = sum(packed) if packed else part_bytes(facts.length, part)
        codec = Codec.LZ4 if packed else Codec.RAW
        page = encode_record_header(STORE_ID, place, facts, part, size, codec, packed)
        self.write(
            record_position(place, self.segment_bytes),
            page + (bytes(size) if payload is None else payload),
        )
        self.pages[segment] += record_bytes(size) // PAGE_BYTES
        self.placed[segment].append(place)
        return place

    def seal(self, segment: int) -> None:
        """Write the footer, of all records whose headers are good."""
        generation = self.generations[segment]
        headers = []
        for place in self.placed[segment]:
            start = record_position(place, self.segment_bytes)
            page = bytes(self.disk[start : start + PAGE_BYTES])
            headers.append(decode_record_header(page, STORE_ID, segment, generation, place.page))
        footer = encode_footer(STORE_ID, segment, generation, footer_from_headers(headers))
        self.write(segment_position(segment + 1, self.segment_bytes) - len(footer), footer)

    def mark(self, place: RecordPlace) -> None:
        """Mark a record dead on the disk."""
        marks = self.marks[place.segment]
        marks.mark(place.number)
        position = segment_position(place.segment, self.segment_bytes) + PAGE_BYTES
        self.write(position, marks.encode())

    def read(self, wanted: Read) -> bytes:
        """The bytes there now."""
        assert wanted.position % PAGE_BYTES == wanted.length % PAGE_BYTES == 0
        assert wanted.length > 0
        assert wanted.position + wanted.length <= len(self.disk)
        self.reads.append(wanted)
        return bytes(self.disk[wanted.position : wanted.position + wanted.length])

    def find(self, read: Callable[[Read], bytes | None] | None = None) -> list[FoundSegment]:
        """The records that recovery finds in each segment."""
        self.reads.clear()
        return [
            drive(read_segment(self.superblock, segment), read or self.read)
            for segment in range(self.segments)
        ]

    def recover(self, max_records: int = 1000) -> tuple[ColdIndex, list[FoundSegment], int]:
        """An index of what is on the disk, the segments, and the next sequence."""
        index = ColdIndex(self.segments, max_records, salt=5)
        found = self.find()
        return index, found, refill(index, found)
