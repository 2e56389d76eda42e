"""Dead marks: a page of bits whose sectors are checked each for itself."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.ssd_tier.log_layout import MAX_RECORDS_PER_SEGMENT, PAGE_BYTES, SECTOR_BYTES, DeadMarks
from tests.unit.cold_objects import STORE_ID

RECORDS_PER_SECTOR = MAX_RECORDS_PER_SEGMENT * SECTOR_BYTES // PAGE_BYTES
ALL = np.arange(MAX_RECORDS_PER_SEGMENT, dtype=np.uint16)


def read(page: bytes, segment: int = 3, generation: int = 9) -> DeadMarks:
    return DeadMarks.decode(page, STORE_ID, segment, generation)


def dead(marks: DeadMarks) -> set[int]:
    return set(np.flatnonzero(marks.dead_of(ALL)).tolist())


@given(st.sets(st.integers(0, MAX_RECORDS_PER_SEGMENT - 1), max_size=50))
def test_marks_come_back(numbers: set[int]) -> None:
    marks = DeadMarks(STORE_ID, 3, 9)
    for number in numbers:
        marks.mark(number)
    page = marks.encode()
    assert len(page) == PAGE_BYTES
    again = read(page)
    assert dead(again) == dead(marks) == numbers
    assert all(again.is_dead(number) for number in numbers)
    assert not again.dirty
    assert again.encode() == page


def test_dirty_until_they_are_written() -> None:
    marks = DeadMarks(STORE_ID, 3, 9)
    assert not marks.dirty
    marks.mark(7)
    assert marks.dirty
    marks.encode()
    assert not marks.dirty
    marks.mark(7)
    assert not marks.dirty
    marks.mark(6)
    assert marks.dirty


@pytest.mark.parametrize("number", [-1, MAX_RECORDS_PER_SEGMENT])
def test_a_number_that_no_record_has(number: int) -> None:
    marks = DeadMarks(STORE_ID, 3, 9)
    with pytest.raises(ValueError, match="no record number"):
        marks.mark(number)


def test_whatever_byte_is_damaged_all_records_of_its_sector_are_dead() -> None:
    marks = DeadMarks(STORE_ID, 3, 9)
    marked = set(Random(1).sample(range(MAX_RECORDS_PER_SEGMENT), 100))
    for number in marked:
        marks.mark(number)
    page = marks.encode()
    for position in range(PAGE_BYTES):
        changed = bytearray(page)
        changed[position] ^= 1 << position % 8
        again = read(bytes(changed))
        first = position // SECTOR_BYTES * RECORDS_PER_SECTOR
        assert dead(again) == marked | set(range(first, first + RECORDS_PER_SECTOR))
        assert again.dirty
        assert read(again.encode()).encode() == again.encode()


def test_marks_of_another_place_or_generation_kill_everything() -> None:
    page = DeadMarks(STORE_ID, 3, 9).encode()
    assert dead(read(page)) == set()
    assert len(dead(read(page, 3, 8))) == len(dead(read(page, 4, 9))) == MAX_RECORDS_PER_SEGMENT


@given(torn=st.integers(0, PAGE_BYTES // SECTOR_BYTES), late=st.booleans())
def test_a_write_that_is_torn_loses_new_marks_at_most(torn: int, late: bool) -> None:
    marks = DeadMarks(STORE_ID, 3, 9)
    old, new = set(range(0, 30_000, 700)), set(range(5, 30_000, 900))
    for number in old:
        marks.mark(number)
    before = marks.encode()
    for number in new:
        marks.mark(number)
    cut = torn * SECTOR_BYTES
    pages = [marks.encode(), before]
    first, second = reversed(pages) if late else pages
    found = dead(read(first[:cut] + second[cut:]))
    assert old <= found <= old | new
