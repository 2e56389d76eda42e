"""Many objects looked up at once: what each alone comes to, whatever collides, goes or expires."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.object_table import KeyIndex
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    INDEX_ENTRY_BYTES,
    SLOT_BYTES,
    SLOT_FLAG_LASTING,
    TrailerBody,
    decode_slot,
    encode_slot,
)
from p2pstore.objects import CHUNK_BYTES, MIB, Announced, chunk_sums
from p2pstore.transfer.reading.segment_reader import FEW_DIGESTS, NOWHERE, SegmentReader
from tests.mapped_copies import copy_many, copy_one, copy_spots
from tests.present import present
from tests.stored import stored
from tests.unit.eviction_entries import entry
from tests.unit.test_reader import empty, new_segment

ENTRIES = 64
DIGESTS = [
    *(bytes([home]) + bytes(7) + bytes([number]) * 8 for home in (0, 1, 62, 63) for number in (1, 2, 3)),
    *(bytes([number]) * 16 for number in range(100, 120)),
]


def put(segment: Segment, key: str, value: bytes, *, expires_unix_ms: int = 0, clock: int = 1) -> bytes:
    trailer = TrailerBody("default", key, chunk_sums(value), expires_unix_ms)
    return stored(segment, trailer, value, clock=clock, writer=7, now=1.0).digest


WINDOWS = st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=12, unique=True)


@given(st.lists(st.tuples(WINDOWS, st.booleans()), max_size=40))
def test_a_column_is_found_as_the_index_has_it(steps: list[tuple[list[bytes], bool]]) -> None:
    """Runs that collide and wrap around, with removals from their middle."""
    segment, view = new_segment(MIB)
    offset = segment.geometry.index_offset
    reader = SegmentReader(view)
    section = view[offset : offset + ENTRIES * INDEX_ENTRY_BYTES]
    reader._index, reader._index_entries = reader._index[:ENTRIES], ENTRIES
    index, numbers = KeyIndex(section, ENTRIES, 1_000), itertools.count()
    there: dict[bytes, ObjectEntry] = {}
    for digests, adds in steps:
        if not adds:
            index.remove([there.pop(digest) for digest in digests if digest in there])
            continue
        made = [entry(next(numbers)) for _ in digests]
        for each, digest in zip(made, digests, strict=True):
            each.digest = digest
        index.set_all(made, new=there.keys().isdisjoint(digests))
        there.update(zip(digests, made, strict=True))
    assert index.restore(0, ENTRIES) == 0
    slots = {digest: each.slot for digest, each in there.items()}
    packed = b"".join(DIGESTS)
    assert reader.contains_many(packed).tolist() == [digest in slots for digest in DIGESTS]
    found = reader._find_slots(np.frombuffer(packed, "<u8").reshape(-1, 2)).tolist()
    assert found == [slots.get(digest, NOWHERE) for digest in DIGESTS]
    assert [reader._find_slot(digest) for digest in DIGESTS] == [slots.get(d) for d in DIGESTS]


LENGTHS = [0, 1, 100, 4096, 65536, 65537, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * MIB + 5]


def test_values_of_all_lengths_in_one_batch() -> None:
    segment, view = new_segment(32 * MIB)
    keys = [f"{length} {number}" for number in range(3) for length in LENGTHS]
    values = [
        (key.encode() * (length // len(key) + 1))[:length]
        for key, length in zip(keys, LENGTHS * 3, strict=True)
    ]
    digests = [put(segment, key, value) for key, value in zip(keys, values, strict=True)]
    segment.remove(digests[3])
    rooms = [empty(len(value) + number % 2) for number, value in enumerate(values)]
    lengths = copy_many(SegmentReader(view.toreadonly()), digests, rooms)
    for number, (value, room, length) in enumerate(zip(values, rooms, lengths, strict=True)):
        assert length == (-1 if number == 3 else len(value))
        assert number == 3 or bytes(room[:length]) == value


def test_one_that_changed_costs_the_others_nothing() -> None:
    segment, view = new_segment(16 * MIB)
    lengths = [4096, 3 * MIB, 70_000] * 4
    digests = [put(segment, f"{n}", bytes([n]) * length) for n, length in enumerate(lengths)]
    reader = SegmentReader(view)
    for spoilt in (0, 1, 2, 11):
        found = present(segment.find(digests[spoilt], 1.0))
        view[found.offset + found.length - 1] ^= 1
        got = copy_many(reader, digests, [empty(length) for length in lengths])
        view[found.offset + found.length - 1] ^= 1
        assert got == [-1 if n == spoilt else length for n, length in enumerate(lengths)]


def test_what_the_owner_told_is_copied_from_there_and_checked() -> None:
    """Slots and sums of a message: right, of spoilt bytes, of a place that another object has, outside the segment."""
    segment, view = new_segment(16 * MIB)
    lengths = [4096, 3 * MIB, 70_000, 1, MIB, 2 * MIB]
    reader = SegmentReader(view)
    digests = [put(segment, f"{n}", bytes([n]) * length) for n, length in enumerate(lengths)]
    found = [present(reader.find(digest)) for digest in digests]
    told = [(slot, trailer.sums) for slot, trailer in found]
    segment.remove(digests[0])
    put(segment, "other", b"\xff" * 4096)
    view[told[1][0].offset + 2 * MIB] ^= 1
    for place, offset in ((2, 32 * MIB), (4, 0)):
        told[place] = replace(told[place][0], offset=offset), told[place][1]
    spots = reader.spots_told(told)
    assert spots.places == [0, 1, 3, 5]
    rooms = [empty(lengths[place]) for place in spots.places]
    assert list(copy_spots(reader, spots, rooms)) == [0, 0, 1, 1]
    assert bytes(rooms[2]) == b"\3"
    assert bytes(rooms[3]) == b"\5" * 2 * MIB


@pytest.fixture
def held() -> tuple[Segment, SegmentReader, memoryview]:
    segment, view = new_segment(4 * MIB)
    return segment, SegmentReader(view), view


@pytest.mark.parametrize("length", [0, 100, CHUNK_BYTES + 1])
def test_what_has_expired_is_not_there(
    held: tuple[Segment, SegmentReader, memoryview], length: int
) -> None:
    segment, reader, _ = held
    now_ms = int(time.time() * 1000)
    for expires, there in ((now_ms - 1, None), (now_ms + 3_600_000, length), (0, length)):
        digest = put(segment, "k", bytes(length), expires_unix_ms=expires, clock=expires + 1)
        assert copy_one(reader, digest, empty(length)) == there
        slot = present(segment.find(digest, 1.0))
        packed = present(decode_slot(segment.table.slot_bytes(slot)))
        assert bool(packed.flags & SLOT_FLAG_LASTING) == (not expires)
        segment.remove(digest)


def test_a_time_to_live_that_is_given_later_counts(
    held: tuple[Segment, SegmentReader, memoryview],
) -> None:
    segment, reader, _ = held
    digest = put(segment, "k", b"value")
    entry = present(segment.find(digest, 1.0))
    segment.objects.set_expiry(entry, 1000)
    assert copy_one(reader, digest, empty(5)) is None
    segment.objects.set_expiry(entry, 0)
    assert copy_one(reader, digest, empty(5)) == 5


def test_an_owner_of_an_earlier_version_says_nothing_of_times_to_live(
    held: tuple[Segment, SegmentReader, memoryview],
) -> None:
    """Its slots lack the flag: then the trailer is looked at."""
    segment, reader, view = held
    for expires, there in ((0, 5), (1, None)):
        digest = put(segment, "k", b"value", expires_unix_ms=expires, clock=1 + expires)
        entry = present(segment.find(digest, 0.0))
        slot = present(decode_slot(segment.table.slot_bytes(entry)))
        older = type(slot)(
            *(slot.state, slot.digest, slot.version, slot.offset, slot.length), slot.trailer_length
        )
        start = segment.geometry.slots_offset + entry.slot * SLOT_BYTES
        view[start : start + SLOT_BYTES] = encode_slot(older)
        assert copy_one(reader, digest, empty(5)) == there


def test_only_what_was_announced_is_there(held: tuple[Segment, SegmentReader, memoryview]) -> None:
    segment, reader, _ = held
    digests = [put(segment, f"k{number}", b"value", clock=5) for number in range(FEW_DIGESTS + 2)]
    entry = present(segment.find(digests[0], 1.0))
    newest, older, newer = (
        entry.version,
        entry.version._replace(clock=4),
        entry.version._replace(clock=6),
    )
    stranger = newest._replace(writer=8)
    for some in (digests[:1], digests):
        every, none = list(range(len(some))), list[int]()
        for announced, versions, there in (
            (Announced(7), (), every),
            (Announced(8), (), none),
            (Announced(8), [newest] * len(some), every),
            (Announced(8), [stranger] * len(some), none),
            (Announced(7), [older] * len(some), every),
            (Announced(7), [newer] * len(some), none),
            (Announced(7), [newer] * (len(some) - 1) + [newest], every[-1:]),
        ):
            assert reader.spots(some, announced, versions).places == there
