"""Which segment of the log is in which state, and where the next record goes. Pure.

    EMPTY -> FREE -> OPEN -> SEALING -> SEALED -> DRAINING -> EMPTY          any -> RETIRED

A segment is EMPTY when nothing in it counts any more but its generation on the disk is still the old one (or none). It
is FREE only when a new generation was written and synced: from then on nothing that it held before can be mistaken for
a record of it. At most two segments are open: one takes new objects, the other those that reclaim keeps. Objects that
were kept once are likely to be kept again: apart from the others they need not be moved past each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    MAX_RECORDS_PER_SEGMENT,
    PAGE_BYTES,
    RecordPlace,
)

KEEP_FREE: Final = 2
MAX_FREE: Final = 8
FREE_SHARE: Final = 8
"""Reclaim begins when fewer segments can be written than this part of all, at least `KEEP_FREE`, at most `MAX_FREE`: a
disk fills one in less time than it takes to give the next its new generation."""
MOSTLY_DEAD: Final = 0.8
"""A segment with a larger dead share is reclaimed before older ones."""
MOSTLY_RESERVED: Final = 0.5
"""A segment of which more is reserved is reclaimed after younger ones: that would have to be written again."""
KEPT_SHARE: Final = 0.2
"""At most this share of a segment is written again: each byte of the log costs at most 1.25 bytes of writing."""
RESERVED_SHARE: Final = 0.5
"""The same where it is reserved for its namespace: at most 2 bytes of writing."""


class SegmentState(Enum):
    """See the module."""

    EMPTY = "empty"
    FREE = "free"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    DRAINING = "draining"
    RETIRED = "retired"


class Stream(Enum):
    """The kind of records that an open segment takes."""

    NEW = "new"
    KEPT = "kept"


@dataclass(slots=True)
class Segment:
    """One segment. Pages are counted from its beginning."""

    number: int
    state: SegmentState = SegmentState.EMPTY
    generation: int = 0
    """The one that is on the disk; 0 when none ever was."""
    write_page: int = FIRST_RECORD_PAGE
    records: int = 0
    """Records placed so far: the number of the next one."""
    text_bytes: int = 0
    """Keys and namespaces of these records, as the footer will hold them."""
    first_sequence: int = 0
    """Of the first record placed: the order in which segments were filled."""
    reads: int = 0
    """Reads under way."""
    writes: int = 0
    """Records placed that are neither in the index nor given up yet."""

    @property
    def is_going(self) -> bool:
        """Whether it is free soon, once its reclaim was begun."""
        draining = self.state is SegmentState.DRAINING and not self.reads
        return draining or self.state is SegmentState.SEALED


FooterPages = Callable[[int, int], int]
"""(records, bytes of their keys and namespaces) -> pages of the footer."""


@dataclass(slots=True)
class SegmentTable:
    """All segments of a log. The shell reports what it wrote; the table says what to do next."""

    count: int
    segment_bytes: int
    footer_pages: FooterPages
    next_sequence: int = 1
    segments: list[Segment] = field(init=False)
    _open: dict[Stream, Segment] = field(init=False, default_factory=dict)
    _free: deque[Segment] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.segments = [Segment(number) for number in range(self.count)]

    def __getitem__(self, number: int) -> Segment:
        return self.segments[number]

    @property
    def segment_pages(self) -> int:
        return self.segment_bytes // PAGE_BYTES

    @property
    def usable_bytes(self) -> int:
        """Most bytes of one record with a short key in a segment of its own."""
        return (self.segment_pages - FIRST_RECORD_PAGE - self.footer_pages(1, 0)) * PAGE_BYTES

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def wanted_free(self) -> int:
        return max(KEEP_FREE, min(MAX_FREE, self.count // FREE_SHARE))

    def in_state(self, *states: SegmentState) -> list[Segment]:
        """All segments in any of these states, in the order of their numbers."""
        return [segment for segment in self.segments if segment.state in states]

    def fits_empty(self, pages: int, text_bytes: int) -> bool:
        """Whether a record fits a segment that has no other."""
        return FIRST_RECORD_PAGE + pages + self.footer_pages(1, text_bytes) <= self.segment_pages

    # Writing.

    def place(self, pages: int, text_bytes: int, stream: Stream = Stream.NEW) -> RecordPlace | None:
        """The place of a record of `pages` pages; None when no segment has room for it now.

        Its segment counts a write under way until `written`: it is not sealed before. An open segment that is too full
        is closed (SEALING) when there is a free one to go on with; until then smaller records still find room in it.
        """
        segment = self._open.get(stream)
        if segment is None or not self._fits(segment, pages, text_bytes):
            if not self._may_open(stream) or not self.fits_empty(pages, text_bytes):
                return None
            if segment is not None:
                self.close(segment)
            segment = self._open_next(stream)
        place = RecordPlace(
            segment=segment.number,
            generation=segment.generation,
            page=segment.write_page,
            number=segment.records,
            sequence=self.next_sequence,
        )
        segment.first_sequence = segment.first_sequence or self.next_sequence
        segment.write_page += pages
        segment.records += 1
        segment.text_bytes += text_bytes
        segment.writes += 1
        self.next_sequence += 1
        return place

    def written(self, place: RecordPlace) -> None:
        """A placed record is in the index, or given up."""
        segment = self.segments[place.segment]
        if segment.writes < 1:
            raise ValueError(f"no write is under way in segment {place.segment}")
        segment.writes -= 1

    def close(self, segment: Segment) -> None:
        """Place nothing more in an open segment."""
        for stream, other in list(self._open.items()):
            if other is segment:
                del self._open[stream]
                segment.state = SegmentState.SEALING

    def to_seal(self) -> list[Segment]:
        """Closed segments in which no write is under way any more."""
        return [each for each in self.in_state(SegmentState.SEALING) if not each.writes]

    def sealed(self, segment: Segment) -> None:
        """The footer was written and synced."""
        self._expect(segment, SegmentState.SEALING)
        segment.state = SegmentState.SEALED

    # Reclaiming.

    def choose_reclaim(
        self,
        live_bytes: Callable[[int], int],
        under_way: Collection[int] = (),
        reserved_bytes: Callable[[int], int] = lambda number: 0,
    ) -> Segment | None:
        """The sealed segment to reclaim next; None while enough are free, empty or `under_way` to that, or none is
        sealed. One that waits for its readers does not count: they may take long.

        `live_bytes` tells how much of a segment is alive, `reserved_bytes` how much of it is reserved for namespaces.
        Of segments that are mostly dead the deadest is taken, else the one that was filled first, of those that are not
        mostly reserved if there are any.
        """
        available = self.free_count + len(self.in_state(SegmentState.EMPTY))
        available += sum(self.segments[number].is_going for number in under_way)
        sealed = [each for each in self.in_state(SegmentState.SEALED) if each.number not in under_way]
        if available >= self.wanted_free or not sealed:
            return None
        deadest = min(sealed, key=lambda each: live_bytes(each.number))
        if live_bytes(deadest.number) <= (1 - MOSTLY_DEAD) * self.usable_bytes:
            return deadest
        most = MOSTLY_RESERVED * self.usable_bytes
        in_order = sorted(sealed, key=lambda each: each.first_sequence)
        free = (each for each in in_order if reserved_bytes(each.number) <= most)
        return next(free, in_order[0])

    def drain(self, segment: Segment) -> None:
        """Nothing in the segment is found any more; reads under way may go on."""
        self._expect(segment, SegmentState.SEALED)
        segment.state = SegmentState.DRAINING

    def emptied(self, segment: Segment) -> None:
        """No read of a draining segment is under way any more."""
        self._expect(segment, SegmentState.DRAINING)
        segment.state = SegmentState.EMPTY

    def started(self, segment: Segment, generation: int) -> None:
        """A new generation of an empty segment was written and synced."""
        self._expect(segment, SegmentState.EMPTY)
        if generation <= segment.generation:
            raise ValueError(f"generation {generation} follows {segment.generation}: it must rise")
        segment.generation = generation
        segment.write_page, segment.records, segment.text_bytes = FIRST_RECORD_PAGE, 0, 0
        segment.first_sequence = 0
        segment.state = SegmentState.FREE
        self._free.append(segment)

    def retire(self, segment: Segment) -> None:
        """Nothing goes to the segment any more, whatever its state was."""
        self.close(segment)
        if segment in self._free:
            self._free.remove(segment)
        segment.state = SegmentState.RETIRED

    # Reading.

    def begin_read(self, number: int) -> None:
        """A read of the segment begins; `end_read` must follow."""
        self.segments[number].reads += 1

    def end_read(self, number: int) -> bool:
        """The read is over. True when a draining segment has no other."""
        segment = self.segments[number]
        if segment.reads < 1:
            raise ValueError(f"no read is under way in segment {number}")
        segment.reads -= 1
        return not segment.reads and segment.state is SegmentState.DRAINING

    # After a start.

    def restore(
        self, number: int, generation: int, state: SegmentState, first_sequence: int = 0
    ) -> None:
        """Enter a segment that recovery found: EMPTY, to be sealed (SEALING) or SEALED."""
        segment = self.segments[number]
        self._expect(segment, SegmentState.EMPTY)
        segment.generation, segment.state = generation, state
        segment.first_sequence = first_sequence

    def _fits(self, segment: Segment, pages: int, text_bytes: int) -> bool:
        footer = self.footer_pages(segment.records + 1, segment.text_bytes + text_bytes)
        return (
            segment.records < MAX_RECORDS_PER_SEGMENT
            and segment.write_page + pages + footer <= self.segment_pages
        )

    def _may_open(self, stream: Stream) -> bool:
        """New objects leave the last free segment to those that are kept, unless these have one."""
        spare = 0 if stream is Stream.KEPT or Stream.KEPT in self._open else 1
        return len(self._free) > spare

    def _open_next(self, stream: Stream) -> Segment:
        segment = self._free.popleft()
        segment.state = SegmentState.OPEN
        self._open[stream] = segment
        return segment

    def _expect(self, segment: Segment, state: SegmentState) -> None:
        if segment.state is not state:
            raise ValueError(f"segment {segment.number} is {segment.state.value}, not {state.value}")


Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Record]):
    """A live record of the segment."""

    record: Record
    bytes: int
    """On the disk, its header included."""
    hits: int
    """Reads of its object since it was written (or kept)."""
    last_copy: bool
    """Whether no other peer is known to hold its object."""
    reserved: bool = False
    """Whether its namespace has no more on the disk than what gives way to no other."""


def choose_kept(candidates: Iterable[Candidate[Record]], segment_bytes: int) -> list[Candidate[Record]]:
    """The records worth keeping, the hottest first, as far as the share goes.

    A record is worth it when it is reserved, its object was hit, or is the last copy. Reserved ones go first; among
    equally hot ones last copies. A record that does not fit is skipped for smaller ones.
    """
    worth = [each for each in candidates if each.reserved or each.hits or each.last_copy]
    worth.sort(key=lambda each: (not each.reserved, -each.hits, not each.last_copy))
    kept: list[Candidate[Record]] = []
    kept_bytes = 0
    for each in worth:
        share = RESERVED_SHARE if each.reserved else KEPT_SHARE
        if kept_bytes + each.bytes <= int(segment_bytes * share):
            kept_bytes += each.bytes
            kept.append(each)
    return kept
