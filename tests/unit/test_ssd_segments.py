"""The table of segments: where records go, which segment is reclaimed, against a model of what lies where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pstore.ssd_tier.log_layout import (
    FIRST_RECORD_PAGE,
    MAX_RECORDS_PER_SEGMENT,
    PAGE_BYTES,
    RecordPlace,
)
from p2pstore.ssd_tier.log_segments import (
    KEEP_FREE,
    KEPT_SHARE,
    Candidate,
    SegmentState,
    SegmentTable,
    Stream,
    choose_kept,
)
from tests.present import present

MIB = 1024 * 1024
PAGES = MIB // PAGE_BYTES


def footer_pages(records: int, text_bytes: int) -> int:
    return 1 + -(-(records * 100 + text_bytes) // PAGE_BYTES)


def table_of(count: int, *, free: int | None = None) -> SegmentTable:
    table = SegmentTable(count, MIB, footer_pages)
    for segment in table.segments[: count if free is None else free]:
        table.started(segment, 1)
    return table


def fill(table: SegmentTable, stream: Stream = Stream.NEW) -> RecordPlace:
    """Place one record that takes a segment almost whole, and end its write."""
    place = present(table.place(table.usable_bytes // PAGE_BYTES - 1, 0, stream))
    table.written(place)
    return place


def seal_all(table: SegmentTable) -> None:
    for segment in table.to_seal():
        table.sealed(segment)


def test_records_follow_each_other_and_are_numbered() -> None:
    table = table_of(4)
    first, second = table.place(3, 10), table.place(2, 10)
    assert first == RecordPlace(segment=0, generation=1, page=FIRST_RECORD_PAGE, number=0, sequence=1)
    assert second == RecordPlace(
        segment=0, generation=1, page=FIRST_RECORD_PAGE + 3, number=1, sequence=2
    )


def test_a_full_segment_is_sealed_once_its_writes_are_over() -> None:
    table = table_of(4)
    place = present(table.place(PAGES // 2, 0))
    other = present(table.place(PAGES // 2, 0))
    assert other.segment == 1
    assert table[0].state.value == SegmentState.SEALING.value
    assert table.to_seal() == []
    table.written(place)
    assert table.to_seal() == [table[0]]
    table.sealed(table[0])
    assert table[0].state.value == SegmentState.SEALED.value


def test_a_record_fits_beside_the_footer_or_not_at_all() -> None:
    table = table_of(4)
    largest = table.usable_bytes // PAGE_BYTES
    assert table.place(largest + 1, 0) is None
    assert table.place(largest, 0) is not None


def test_long_keys_make_the_footer_longer() -> None:
    table = table_of(4)
    assert not table.fits_empty(table.usable_bytes // PAGE_BYTES, 2 * PAGE_BYTES)


def test_no_more_records_than_dead_marks() -> None:
    table = SegmentTable(3, 256 * MIB, lambda records, text_bytes: 1)
    for segment in table.segments:
        table.started(segment, 1)
    table[0].records = MAX_RECORDS_PER_SEGMENT - 1
    table._free.clear()
    table._open[Stream.NEW] = table[0]
    assert table.place(1, 0) is not None
    assert table.place(1, 0) is None


def test_new_and_kept_objects_lie_apart() -> None:
    table = table_of(4)
    new, kept = table.place(1, 0), table.place(1, 0, Stream.KEPT)
    assert new is not None
    assert kept is not None
    assert new.segment != kept.segment


def test_new_objects_leave_the_last_free_segment() -> None:
    table = table_of(2)
    fill(table)
    assert table.place(PAGES // 2, 0) is None, "the last one is for what is kept"
    assert table.place(1, 0, Stream.KEPT) is not None


def test_a_segment_stays_open_while_none_follows_it() -> None:
    table = table_of(2)
    assert table.place(PAGES // 2, 0) is not None
    assert table.place(PAGES // 2, 0) is None
    assert table[0].state.value == SegmentState.OPEN.value
    assert table.place(1, 0) is not None, "what is small still fits"


def test_nothing_is_reclaimed_while_enough_are_free() -> None:
    table = table_of(4)
    fill(table)
    fill(table)
    seal_all(table)
    assert table.free_count == KEEP_FREE
    assert table.choose_reclaim(lambda segment: 0) is None


def test_a_long_log_keeps_more_free() -> None:
    assert [table_of(count).wanted_free for count in (4, 16, 31, 64, 4096)] == [2, 2, 3, 8, 8]


def test_what_is_being_reclaimed_counts_as_free_soon() -> None:
    table = table_of(6)
    for _ in range(5):
        fill(table)
    seal_all(table)
    assert table.free_count == 1
    first = table.choose_reclaim(lambda segment: MIB)
    assert first is table[0]
    assert table.choose_reclaim(lambda segment: MIB, {0}) is None
    table.drain(first)
    assert table.choose_reclaim(lambda segment: MIB, {0}) is None
    table.begin_read(first.number)
    second = table.choose_reclaim(lambda segment: MIB, {0})
    assert second is table[1], "who knows how long its reader takes"
    table.end_read(first.number)
    table.retire(first)
    assert table.choose_reclaim(lambda segment: MIB, {0}) is table[1], "it will never be free"


def test_the_oldest_is_reclaimed_unless_one_is_mostly_dead() -> None:
    table = table_of(5)
    for _ in range(4):
        fill(table)
    seal_all(table)
    live = dict.fromkeys(range(5), MIB)
    oldest = table.choose_reclaim(lambda segment: live[segment])
    assert oldest is table[0]
    live[2] = int(0.1 * table.usable_bytes)
    live[1] = int(0.15 * table.usable_bytes)
    deadest = table.choose_reclaim(lambda segment: live[segment])
    assert deadest is table[2]
    live[1] = live[2] = int(0.3 * table.usable_bytes)
    assert table.choose_reclaim(lambda segment: live[segment]) is table[0]


def test_a_segment_is_reused_only_after_its_reads_and_with_a_new_generation() -> None:
    table = table_of(3)
    fill(table)
    fill(table, Stream.KEPT)
    fill(table)
    seal_all(table)
    table.begin_read(0)
    table.drain(table[0])
    assert table.end_read(0), "the last read of a draining segment says so"
    table.emptied(table[0])
    assert table.free_count == 0
    with pytest.raises(ValueError, match="must rise"):
        table.started(table[0], 1)
    table.started(table[0], 2)
    place = present(table.place(1, 0, Stream.KEPT))
    place = present(table.place(PAGES // 2, 0, Stream.KEPT))
    assert (place.segment, place.generation, place.page) == (0, 2, FIRST_RECORD_PAGE)


def test_a_retired_segment_takes_nothing() -> None:
    table = table_of(3)
    assert table.place(1, 0) is not None
    table.retire(table[0])
    table.retire(table[1])
    assert table.place(1, 0) is None, "one is left, and that is for what is kept"
    place = present(table.place(1, 0, Stream.KEPT))
    assert place.segment == 2


def test_steps_out_of_order_are_refused() -> None:
    table = table_of(3)
    with pytest.raises(ValueError, match="is free, not sealed"):
        table.drain(table[0])
    with pytest.raises(ValueError, match="no read"):
        table.end_read(0)
    place = present(table.place(1, 0))
    table.written(place)
    with pytest.raises(ValueError, match="no write"):
        table.written(place)


def test_recovery_goes_on_where_it_was() -> None:
    table = SegmentTable(4, MIB, footer_pages, next_sequence=70)
    table.restore(0, 7, state=SegmentState.SEALED, first_sequence=60)
    table.restore(1, 3, state=SegmentState.SEALED, first_sequence=50)
    table.restore(2, 3, state=SegmentState.EMPTY)
    table.started(table[2], 4)
    assert table.choose_reclaim(lambda segment: MIB) is None, "one is free, one is empty"
    table.started(table[3], 1)
    place = present(table.place(1, 0))
    assert (place.segment, place.generation, place.sequence) == (2, 4, 70)
    table.place(1, 0, Stream.KEPT)
    assert table.choose_reclaim(lambda segment: MIB) is table[1]


class TableAgainstPages(RuleBasedStateMachine):
    """`taken` holds the pages of every record that may still be read or is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(6, free=3)
        self.taken: dict[tuple[int, int], set[int]] = {}
        """(segment, generation) -> pages."""
        self.writing: list[RecordPlace] = []
        self.reading: list[int] = []
        self.generations: set[tuple[int, int]] = set()
        self.sequences = [0]

    @rule(pages=st.integers(1, PAGES), text=st.integers(0, 3000), stream=st.sampled_from(list(Stream)))
    def place(self, pages: int, text: int, stream: Stream) -> None:
        place = self.table.place(pages, text, stream)
        if place is None:
            return
        segment = self.table[place.segment]
        assert segment.state is SegmentState.OPEN
        assert place.sequence > self.sequences[-1]
        self.sequences.append(place.sequence)
        taken = self.taken.setdefault((place.segment, place.generation), set())
        fresh = set(range(place.page, place.page + pages))
        assert not taken & fresh, "no two records share a page"
        taken |= fresh
        end = PAGES - footer_pages(segment.records, segment.text_bytes)
        assert place.page >= FIRST_RECORD_PAGE
        assert place.page + pages <= end, "the footer always fits"
        self.writing.append(place)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.writing))
        self.writing.remove(place)
        self.table.written(place)

    @rule()
    def seal(self) -> None:
        for segment in self.table.to_seal():
            assert all(place.segment != segment.number for place in self.writing)
            self.table.sealed(segment)

    @rule(number=st.integers(0, 5))
    def begin_read(self, number: int) -> None:
        if self.table[number].state in (SegmentState.SEALED, SegmentState.OPEN):
            self.table.begin_read(number)
            self.reading.append(number)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.reading))
        self.reading.remove(number)
        drained = self.table.end_read(number)
        draining = self.table[number].state is SegmentState.DRAINING
        assert drained == (draining and number not in self.reading)

    @rule(live=st.lists(st.integers(0, MIB), min_size=6, max_size=6))
    def reclaim(self, live: list[int]) -> None:
        segment = self.table.choose_reclaim(lambda number: live[number])
        if segment is None:
            return
        oldest = min(
            (each for each in self.table.segments if each.state is SegmentState.SEALED),
            key=lambda each: each.first_sequence,
        )
        deadest = min(
            live[each.number] for each in self.table.segments if each.state is SegmentState.SEALED
        )
        assert segment is oldest or live[segment.number] == deadest
        self.table.drain(segment)

    @rule()
    def empty(self) -> None:
        for segment in self.table.in_state(SegmentState.DRAINING):
            if not segment.reads:
                self.table.emptied(segment)

    @rule()
    def start(self) -> None:
        for segment in self.table.in_state(SegmentState.EMPTY)[:1]:
            generation = segment.generation + 1
            assert (segment.number, generation) not in self.generations
            self.generations.add((segment.number, generation))
            self.table.started(segment, generation)

    @rule(number=st.integers(0, 5))
    def retire(self, number: int) -> None:
        if len(self.table.in_state(SegmentState.RETIRED)) < 2:
            self.table.retire(self.table[number])

    @invariant()
    def at_most_two_are_open(self) -> None:
        assert len(self.table.in_state(SegmentState.OPEN)) <= 2

    @invariant()
    def free_ones_are_counted(self) -> None:
        assert self.table.free_count == len(self.table.in_state(SegmentState.FREE))


TestTableAgainstPages = TableAgainstPages.TestCase
TestTableAgainstPages.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def candidate(name: str, count: int, hits: int = 0, last_copy: bool = False) -> Candidate[str]:
    return Candidate(name, count, hits, last_copy)


def names(kept: list[Candidate[str]]) -> list[str]:
    return [each.record for each in kept]


def test_what_nobody_read_and_others_hold_is_not_kept() -> None:
    assert choose_kept([candidate("cold", 10)], 1000) == []


def test_hits_and_last_copies_are_kept_the_hottest_first() -> None:
    offered = [
        candidate("last", 50, last_copy=True),
        candidate("hot", 50, hits=9),
        candidate("warm", 50, hits=2),
        candidate("warm and last", 50, hits=2, last_copy=True),
        candidate("cold", 50),
    ]
    assert names(choose_kept(offered, 1000)) == ["hot", "warm and last", "warm", "last"]


def test_what_does_not_fit_is_skipped() -> None:
    offered = [candidate("large", 201, hits=9), candidate("small", 20, hits=1)]
    assert names(choose_kept(offered, 1000)) == ["small"]


@given(st.lists(st.builds(candidate, st.text(), st.integers(1, 500), st.integers(0, 3), st.booleans())))
def test_never_more_than_the_share(offered: list[Candidate[str]]) -> None:
    kept = choose_kept(offered, 1000)
    assert sum(each.bytes for each in kept) <= 1000 * KEPT_SHARE
    assert all(each.hits or each.last_copy for each in kept)
