"""Logs of cold objects read back: after any end, and with any part of them damaged."""

from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.objects import KIB, MIB, PART_BYTES
from p2pstore.ssd_tier.index import ColdEntry, ColdIndex
from p2pstore.ssd_tier.log_layout import (
    MAX_RECORDS_PER_SEGMENT,
    PAGE_BYTES,
    SECTOR_BYTES,
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    part_bytes,
    part_count,
    record_bytes,
    record_position,
    segment_position,
)
from p2pstore.ssd_tier.record_format import (
    check_part,
    compress_part,
    decode_record_header,
    encode_record_header,
)
from p2pstore.ssd_tier.recovery import FoundState, Read, SegmentSearch
from tests.present import present
from tests.unit.cold_log import Log
from tests.unit.cold_objects import STORE_ID, facts_of


def value_of(number: int, length: int) -> bytes:
    return Random(number).randbytes(length)


def three_records(log: Log, segment: int = 0) -> dict[str, tuple[ColdFacts, RecordPlace, bytes]]:
    """Three objects of different lengths in one segment."""
    written = {}
    for number, length in enumerate((9_000, 4_096, 30_000)):
        value = value_of(number, length)
        facts = facts_of(f"key {number}", length, value=value)
        written[facts.key] = (facts, log.append(segment, facts, payload=value), value)
    return written


def keys(index: ColdIndex) -> set[str]:
    return {entry.key for entry in index.page("default", "", "", 1000)[0]}


def read_object(log: Log, entry: ColdEntry) -> bytes | None:
    """The bytes of an object of one part, None when they are damaged: what a reader does."""
    place = entry.places[0]
    start = record_position(place, log.segment_bytes)
    page = bytes(log.disk[start : start + PAGE_BYTES])
    payload = bytes(log.disk[start + PAGE_BYTES : start + PAGE_BYTES + entry.length])
    try:
        header = decode_record_header(page, STORE_ID, place.segment, place.generation, place.page)
        check_part(header, memoryview(payload))
    except DamagedRecord:
        return None
    return payload


@pytest.mark.parametrize("sealed", [False, True])
def test_records_are_found_with_and_without_a_footer(sealed: bool) -> None:
    log = Log()
    written = three_records(log)
    if sealed:
        log.seal(0)
    index, found, next_sequence = log.recover()
    expected = FoundState.SEALED if sealed else FoundState.UNSEALED
    assert [each.state for each in found] == [expected, FoundState.FREE, FoundState.FREE]
    assert next_sequence == 4
    for facts, place, value in written.values():
        entry = present(index.find(facts.digest))
        assert (entry.key, entry.version, entry.places) == (facts.key, facts.version, (place,))
        assert read_object(log, entry) == value
    assert index.objects == 3
    assert not any(each.marks.dirty for each in found)


def test_a_free_segment_is_not_searched() -> None:
    log = Log()
    log.find()
    assert [read.length for read in log.reads] == [2 * PAGE_BYTES] * 3


def test_a_search_hops_over_payloads() -> None:
    log = Log(segments=1, segment_bytes=32 * MIB)
    for number in range(6):
        log.append(0, facts_of(f"{number}", 5 * MIB))
    search = SegmentSearch(log.superblock, 0)
    reading, content = search.find_records(1), None
    with suppress(StopIteration):
        while True:
            content = log.read(reading.send(content))
    assert len(search.records) == 6
    searched = [read for read in log.reads if read.position < 30 * MIB]
    assert sum(read.length for read in searched) < 2 * MIB


def test_a_header_within_a_payload_is_part_of_that() -> None:
    log = Log(segments=1)
    inner = RecordPlace(0, 1, 4, 77, 1_000)
    value = bytes(PAGE_BYTES) + encode_record_header(STORE_ID, inner, facts_of("inner", 0), 0, 0)
    outer = facts_of("outer", len(value), value=value)
    log.append(0, outer, payload=value)
    index, _, next_sequence = log.recover()
    assert keys(index) == {"outer"}
    assert next_sequence == 2


def test_a_segment_cut_at_every_sector_gives_the_records_that_are_whole() -> None:
    whole = Log(segments=1)
    written = three_records(whole)
    end = whole.pages[0] * PAGE_BYTES
    content = bytes(whole.disk)
    begin = segment_position(0, whole.segment_bytes)
    for cut in range(SECTOR_BYTES, end + SECTOR_BYTES, SECTOR_BYTES):
        whole.disk[:] = content
        whole.disk[begin + cut :] = bytes(len(content) - begin - cut)
        index, found, _ = whole.recover()
        assert found[0].state is FoundState.UNSEALED
        for facts, place, value in written.values():
            start = place.page * PAGE_BYTES
            end = start + PAGE_BYTES + len(value)
            is_whole = not content[begin + max(cut, start) : begin + max(cut, end)].strip(b"\0")
            entry = index.find(facts.digest)
            assert (entry is not None) == is_whole
            if entry is not None:
                assert (entry.places, read_object(whole, entry)) == ((place,), value)
            # A record that has only its header in one piece does not come back when more of it does.
            if cut >= 2 * PAGE_BYTES:  # below, the cut takes dead marks as well
                header_left = content[begin + cut : begin + start + PAGE_BYTES].strip(b"\0")
                is_torn = not is_whole and not header_left
                assert found[0].marks.is_dead(place.number) == is_torn


@given(holes=st.sets(st.integers(2, 255), max_size=40), fill=st.binary(min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_records_between_damaged_pages_are_found(holes: set[int], fill: bytes) -> None:
    log = Log(segments=1)
    rng, placed = Random(1), list[tuple[ColdFacts, RecordPlace]]()
    while log.pages[0] < 230:
        facts = facts_of(f"{len(placed)}", rng.randrange(20_000))
        placed.append((facts, log.append(0, facts)))
    before = bytes(log.disk)
    for page in holes:
        log.write(MIB + page * PAGE_BYTES, (fill * PAGE_BYTES)[:PAGE_BYTES])
    index, _, _ = log.recover()
    for facts, place in placed:
        start = MIB + place.page * PAGE_BYTES
        end = start + PAGE_BYTES + facts.length
        is_whole = log.disk[start:end] == before[start:end]
        assert (index.find(facts.digest) is not None) == is_whole


def test_any_byte_of_a_footer_can_be_damaged() -> None:
    log = Log(segments=1)
    written = three_records(log)
    log.seal(0)
    content = bytes(log.disk)
    for position in range(len(content) - 2 * PAGE_BYTES, len(content), 13):
        log.disk[position] ^= 0x10
        found = log.find()
        assert found[0].state is FoundState.UNSEALED, position
        assert len(found[0].footer.rows) == len(written)
        log.disk[position] = content[position]
    assert log.find()[0].state is FoundState.SEALED


def test_a_large_footer_is_read_in_a_second_step() -> None:
    log = Log(segments=1, segment_bytes=8 * MIB)
    for number in range(700):
        log.append(0, facts_of(f"key {number:>50}", 10, namespace=f"namespace {number % 9}"))
    log.seal(0)
    index, found, _ = log.recover()
    assert found[0].state is FoundState.SEALED
    assert (index.objects, len(log.reads)) == (700, 3)
    assert len(index.page("namespace 4", "", "", 1000)[0]) == 78


def test_nothing_of_an_earlier_generation_counts() -> None:
    log = Log(segments=1)
    three_records(log)
    log.seal(0)
    log.start(0, 2, opened=False)
    index, found, next_sequence = log.recover()
    assert (found[0].state, found[0].generation, index.rows.records) == (FoundState.FREE, 2, 0)
    assert next_sequence == 1
    log.start(0, 2, opened=True)
    index, found, _ = log.recover()
    assert (found[0].state, index.rows.records) == (FoundState.UNSEALED, 0)


def test_a_reclaim_that_is_torn_leaves_no_marks_of_the_generation_before() -> None:
    """The new header is on the disk, the clean dead marks are not."""
    log = Log(segments=1)
    written = three_records(log)
    log.mark(written["key 0"][1])
    marks = bytes(log.disk[MIB + PAGE_BYTES : MIB + 2 * PAGE_BYTES])
    log.start(0, 2, opened=False)
    log.write(MIB + PAGE_BYTES, marks)
    found = log.find()[0]
    assert found.state is FoundState.FREE
    assert not found.marks.dirty
    assert not any(found.marks.is_dead(number) for number in range(MAX_RECORDS_PER_SEGMENT))


def test_a_segment_without_its_header_counts_for_nothing_but_its_generation() -> None:
    for sealed in (False, True):
        log = Log(segments=1)
        log.start(0, 7, opened=True)
        three_records(log)
        if sealed:
            log.seal(0)
            log.write(MIB + 2 * PAGE_BYTES, bytes(200 * KIB))  # only the footer tells
        log.write(MIB, bytes(100))
        index, found, _ = log.recover()
        assert (found[0].state, found[0].generation) == (FoundState.DAMAGED, 7)
        assert (index.rows.records, found[0].unreadable_bytes) == (0, 0)


def test_dead_marks_are_obeyed() -> None:
    log = Log()
    written = three_records(log)
    log.mark(written["key 1"][1])
    for _ in ("unsealed", "sealed"):
        index, _, _ = log.recover()
        assert keys(index) == {"key 0", "key 2"}
        log.seal(0)


def test_a_damaged_sector_of_dead_marks_kills_its_records_for_good() -> None:
    log = Log()
    three_records(log)
    log.disk[MIB + PAGE_BYTES + 100] ^= 1
    index, found, _ = log.recover()
    assert index.rows.records == 0
    assert found[0].marks.dirty
    log.write(MIB + PAGE_BYTES, found[0].marks.encode())
    assert log.recover()[0].rows.records == 0


@pytest.mark.parametrize("newer_first", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_the_highest_version_wins_and_the_other_is_dead_for_good(
    newer_first: bool, sealed: bool
) -> None:
    log = Log()
    old, new = facts_of("k", 100, clock=1), facts_of("k", 50, clock=2)
    order = [new, old] if newer_first else [old, new]
    places = {facts.version: log.append(at, facts) for at, facts in enumerate(order)}
    if sealed:
        log.seal(0)
    index, found, _ = log.recover()
    entry = present(index.find(new.digest))
    assert (entry.version, entry.places) == (new.version, (places[new.version],))
    assert (index.objects, index.rows.records) == (1, 1)
    dead = places[old.version]
    assert found[dead.segment].marks.is_dead(dead.number)
    assert [each.marks.dirty for each in found].count(True) == 1
    assert index.segment_live_bytes(dead.segment) == 0


def test_of_equal_versions_the_record_written_first_wins() -> None:
    """The other one is a copy that reclaim made, and had perhaps not synced yet."""
    log = Log()
    facts = facts_of("k", 100)
    first, second = log.append(1, facts), log.append(0, facts)
    index, found, _ = log.recover()
    entry = present(index.find(facts.digest))
    assert entry.places == (first,)
    assert found[second.segment].marks.is_dead(second.number)


def test_an_object_without_one_of_its_parts_is_dead_for_good() -> None:
    log = Log(segments=3, segment_bytes=160 * MIB)
    facts, other = facts_of("k", 2 * PART_BYTES + 1), facts_of("other", 2 * PART_BYTES)
    places = [log.append(segment, facts, part) for part, segment in ((2, 0), (0, 1), (1, 1))]
    missing = log.append(2, other, 1)
    index, found, _ = log.recover()
    entry = present(index.find(facts.digest))
    assert entry.places == (places[1], places[2], places[0])
    assert index.find(other.digest) is None
    assert (index.objects, index.rows.records) == (1, 3)
    assert found[2].marks.is_dead(missing.number)


def test_a_version_that_was_being_written_does_not_take_the_one_before_with_it() -> None:
    log = Log(segments=3, segment_bytes=70 * MIB)
    old, new = facts_of("k", 100, clock=1), facts_of("k", PART_BYTES + 1, clock=2)
    first, part = log.append(0, old), log.append(1, new, 0)
    index, found, _ = log.recover()
    entry = present(index.find(old.digest))
    assert (entry.version, entry.places) == (old.version, (first,))
    assert found[1].marks.is_dead(part.number)
    assert not found[0].marks.dirty


@pytest.mark.parametrize("compressed", [False, True])
def test_a_payload_that_is_torn_does_not_take_the_version_before_with_it(compressed: bool) -> None:
    value = value_of(1, 300_000) + bytes(3 * MIB)
    new, payload = facts_of("k", len(value), clock=2, value=value), value
    sizes: tuple[int, ...] = ()
    if compressed:
        packed = present(compress_part(memoryview(value)))
        payload, sizes = b"".join(packed[0]), packed[1]
    for damaged in (None, 0, 4096, 200_000, len(payload) - 1):
        log = Log(segments=2, segment_bytes=8 * MIB)
        old = facts_of("k", 5000, clock=1)
        places = [log.append(0, old), log.append(0, new, 0, payload, sizes)]
        if damaged is not None:
            log.disk[record_position(places[1], 8 * MIB) + PAGE_BYTES + damaged] ^= 1
        index, found, _ = log.recover()
        entry = present(index.find(old.digest))
        assert entry.places == ((places[1],) if damaged is None else (places[0],))
        assert found[0].marks.is_dead(1) == (damaged is not None)
        assert found[0].marks.is_dead(0) == (damaged is None)


@pytest.mark.parametrize(("key", "page"), [("key 0", 2), ("key 1", 0)], ids=["a payload", "a header"])
def test_what_the_disk_cannot_read_is_left_out(key: str, page: int) -> None:
    log = Log(segments=1)
    written = three_records(log)
    broken = MIB + (written[key][1].page + page) * PAGE_BYTES

    def read(wanted: Read) -> bytes | None:
        if wanted.position <= broken < wanted.position + wanted.length:
            return None
        return log.read(wanted)

    [found] = log.find(read)
    assert found.state is FoundState.UNSEALED
    assert (len(found.footer.rows), found.unreadable_bytes) == (2, PAGE_BYTES)
    assert not page or found.marks.is_dead(written[key][1].number)


def test_too_many_records_for_the_index_leave_out_the_oldest_objects() -> None:
    log = Log()
    facts = [facts_of(f"{number}", 10) for number in range(20)]
    places = [log.append(number % 2, each) for number, each in enumerate(facts)]
    index, found, _ = log.recover(max_records=12)
    assert keys(index) == {str(number) for number in range(8, 20)}
    for place in places[:8]:
        assert found[place.segment].marks.is_dead(place.number)


def test_a_start_or_a_footer_that_cannot_be_read() -> None:
    log = Log(segments=1)
    three_records(log)
    log.seal(0)
    start = log.find(lambda wanted: None if wanted.position == MIB else log.read(wanted))[0]
    assert (start.state, start.generation) == (FoundState.DAMAGED, 1)
    assert start.unreadable_bytes > 0
    last = len(log.disk) - PAGE_BYTES
    end = log.find(lambda wanted: None if wanted.position + wanted.length > last else log.read(wanted))[
        0
    ]
    assert (end.state, len(end.footer.rows)) == (FoundState.UNSEALED, 3)


def test_an_index_that_was_filled_goes_on_like_any_other() -> None:
    log = Log(segments=2)
    facts = [facts_of(f"key {number}", 10, namespace=f"namespace {number % 3}") for number in range(30)]
    for each in facts[:20]:
        log.append(0, each)
    log.append(1, facts_of("key 7", 10, clock=2, namespace="namespace 1"))
    index, _, next_sequence = log.recover()
    for number, each in enumerate(facts[20:], next_sequence):
        place = RecordPlace(0, 1, 2 + 2 * number, number, number)
        assert index.add(place, each, 0, 10) == ()
    assert index.drop(facts[3].digest) != ()
    for namespace in range(3):
        wanted = sorted(
            each.key for number, each in enumerate(facts) if number % 3 == namespace and number != 3
        )
        listed = index.page(f"namespace {namespace}", "", "", 100)[0]
        assert [entry.key for entry in listed] == wanted
    footer = index.rows.footer(0)
    assert len(footer.rows) == 28
    assert len(footer.keys) == sum(len(facts[number].key) for number in range(30)) - 2 * 5
    assert (index.objects, index.rows.records) == (29, 29)
    for record in index.records_of(0):
        index.drop(record.digest)
    assert (index.objects, index.segment_live_bytes(0), [*index.records_of(0)]) == (1, 0, [])


def test_a_log_without_segments_worth_anything_gives_an_empty_index() -> None:
    index, found, next_sequence = Log().recover()
    assert (index.objects, index.rows.records, index.rows.live_bytes, len(found)) == (0, 0, 0, 3)
    assert next_sequence == 1


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_is_damaged_what_is_read_is_right_and_what_was_discarded_stays_away(seed: int) -> None:
    """Rot, zeros, pages that went elsewhere, pages as they were before: anywhere in the log but its first page."""
    rng, log = Random(seed), Log(segments=3)
    values: dict[bytes, dict[int, bytes]] = {}
    discarded: set[RecordPlace] = set()
    before = bytes(log.disk)
    for step in range(rng.randrange(5, 40)):
        if step == 10:
            before = bytes(log.disk)
        segment = rng.randrange(3)
        if rng.random() < 0.2 and log.placed[segment]:
            place = rng.choice(log.placed[segment])
            log.mark(place)
            discarded.add(place)
        elif rng.random() < 0.1:
            log.start(segment, log.generations[segment] + 1, opened=False)
        elif log.pages[segment] < 200:
            value = rng.randbytes(rng.choice((0, 100, 5000, 40_000)))
            facts = facts_of(rng.choice("abcdefgh"), len(value), step + 1, value=value)
            log.append(segment, facts, payload=value)
            values.setdefault(facts.digest, {})[step + 1] = value
    for segment in range(3):
        if rng.random() < 0.5 and log.placed[segment]:
            log.seal(segment)
    _damage(log, rng, before)

    index, found, _ = log.recover()
    assert index.rows.records == sum(len([*index.records_of(segment)]) for segment in range(3))
    for digest, versions in values.items():
        entry = index.find(digest)
        if entry is not None:
            [place] = entry.places
            assert place not in discarded
            assert not found[place.segment].marks.is_dead(place.number)
            assert place.generation == log.generations[place.segment]
            content = read_object(log, entry)
            assert content is None or content == versions[entry.version.clock]


def _damage(log: Log, rng: Random, before: bytes) -> None:
    pages = range(MIB // PAGE_BYTES, len(log.disk) // PAGE_BYTES)
    interesting = [page for page in pages if any(log.disk[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])]
    for _ in range(rng.randrange(1, 12)):
        page = rng.choice(interesting) if rng.random() < 0.9 else rng.choice(pages)
        start = page * PAGE_BYTES
        match rng.randrange(4):
            case 0:
                log.disk[start + rng.randrange(PAGE_BYTES)] ^= 1 << rng.randrange(8)
            case 1:
                sector = start + rng.randrange(PAGE_BYTES // SECTOR_BYTES) * SECTOR_BYTES
                log.write(sector, bytes(SECTOR_BYTES))
            case 2:
                other = rng.choice(interesting) * PAGE_BYTES
                log.write(start, bytes(log.disk[other : other + PAGE_BYTES]))
            case 3:
                # A lost write. Of what says what does not count, none may be lost: that was synced.
                if (page - MIB // PAGE_BYTES) % (MIB // PAGE_BYTES) > 1:
                    log.write(start, before[start : start + PAGE_BYTES])


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_whatever_was_written_recovery_agrees_with_a_plain_reading(data: st.DataObject) -> None:
    """Random objects, versions, parts, seals, marks and reclaims, against dictionaries."""
    log = Log(segments=4, segment_bytes=70 * MIB)
    rng = Random(data.draw(st.integers(0, 2**32)))
    facts = {}
    for key in "abcdef":
        for clock in (1, 2, 3):
            length = rng.choice((0, 10, 10, 5000, 5000, PART_BYTES + 1))
            facts[key, clock] = facts_of(key, length, clock, namespace=rng.choice("xy"))
    alive: dict[RecordPlace, tuple[ColdFacts, int]] = {}
    for _ in range(rng.randrange(1, 60)):
        segment, kind = rng.randrange(4), rng.random()
        placed = [place for place in alive if place.segment == segment]
        if kind < 0.1 and placed:
            alive.pop(rng.choice(placed))
            for place in placed:
                if place not in alive:
                    log.mark(place)
        elif kind < 0.15:
            log.start(segment, log.generations[segment] + 1, opened=rng.random() < 0.5)
            alive = {place: each for place, each in alive.items() if place.segment != segment}
        else:
            chosen = rng.choice(list(facts.values()))
            part = rng.randrange(2) if chosen.length > PART_BYTES else 0
            pages = record_bytes(part_bytes(chosen.length, part)) // PAGE_BYTES
            if log.pages[segment] + pages > log.segment_bytes // PAGE_BYTES - 10:
                continue
            alive[log.append(segment, chosen, part)] = (chosen, part)
    for segment in range(4):
        if rng.random() < 0.5 and log.placed[segment]:
            log.seal(segment)

    index, found, _ = log.recover()
    parts: dict[ColdFacts, dict[int, RecordPlace]] = {}
    for place, (each, part) in sorted(alive.items(), key=lambda item: item[0].sequence):
        parts.setdefault(each, {}).setdefault(part, place)
    kept = set()
    for digest in {each.digest for each in facts.values()}:
        whole = [
            each
            for each, places in parts.items()
            if each.digest == digest and len(places) == part_count(each.length)
        ]
        entry = index.find(digest)
        assert (entry is not None) == bool(whole)
        if entry is not None:
            best = max(whole, key=lambda each: each.version)
            assert (entry.version, entry.namespace) == (best.version, best.namespace)
            assert entry.places == tuple(parts[best][part] for part in sorted(parts[best]))
            kept |= set(entry.places)
    assert index.rows.records == len(kept)
    for place in alive:
        assert found[place.segment].marks.is_dead(place.number) == (place not in kept)
    sealed_anew = [index.rows.footer(segment) for segment in range(4)]
    assert sum(len(footer.rows) for footer in sealed_anew) == len(kept)
    for segment, footer in enumerate(sealed_anew):
        assert np.all(np.diff(footer.rows["number"].astype(int)) > 0)
        wanted = sorted(place.number for place in kept if place.segment == segment)
        assert footer.rows["number"].tolist() == wanted
