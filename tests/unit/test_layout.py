"""Codecs of the segment's parts: round trips, damage detected, geometry that holds together."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import CapacityExceeded, ProtocolError
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    GRANULE_BYTES,
    INDEX_ENTRY_BYTES,
    MAX_SLOTS,
    SEGMENT_HEADER_BYTES,
    SEGMENT_STATE_OFFSET,
    SLOT_BYTES,
    Geometry,
    SegmentHeader,
    SegmentState,
    Slot,
    SlotRows,
    SlotState,
    TrailerBody,
    decode_index_entry,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    encode_index_entry,
    encode_segment_header,
    encode_slot,
    encode_trailer,
    extent_bytes,
    index_home,
    is_only_chunk,
    plan_geometry,
    slot_matches,
    trailer_matches,
    trailer_offset,
)
from p2pstore.objects import (
    MAX_OBJECT_BYTES,
    MIB,
    Version,
    chunk_count,
    chunk_sum,
    chunk_sums,
    root_checksum,
)
from p2pstore.transfer.reading.segment_reader import SegmentReader
from simulation.segment_checks import check_segment

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
digests = st.binary(min_size=16, max_size=16)
slots = st.builds(
    Slot,
    state=st.sampled_from(SlotState),
    digest=digests,
    version=st.builds(Version, u64, u16, u64),
    offset=u64,
    length=u64,
    trailer_length=u16,
    flags=u16,
)
trailers = st.builds(
    TrailerBody,
    namespace=st.text(max_size=20),
    key=st.text(max_size=40),
    sums=st.binary(max_size=64),
    expires_unix_ms=u64,
    replicas=st.integers(1, 1000),
    pin=st.integers(0, 2),
    dtype=st.sampled_from(["", "torch.bfloat16"]),
    shape=st.lists(st.integers(0, 2**40), max_size=6).map(tuple),
)


def flipped(data: bytes, bit: int) -> bytes:
    return (int.from_bytes(data, "little") ^ (1 << bit)).to_bytes(len(data), "little")


# --- header ----------------------------------------------------------------------------------


def header(state: SegmentState = SegmentState.OPEN) -> SegmentHeader:
    return SegmentHeader(b"segment-id-16-by", 7, plan_geometry(8 * MIB), state)


@given(st.binary(min_size=16, max_size=16), u64, st.lists(u64, min_size=7, max_size=7))
def test_header_round_trip(segment_id: bytes, incarnation: int, numbers: list[int]) -> None:
    original = SegmentHeader(segment_id, incarnation, Geometry(*numbers), SegmentState.CLOSED)
    packed = encode_segment_header(original)
    assert len(packed) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(packed + b"what follows") == original


def test_every_bit_flip_in_the_header_is_detected() -> None:
    packed = encode_segment_header(header())
    for bit in range(8 * len(packed)):
        with pytest.raises(ProtocolError):
            decode_segment_header(flipped(packed, bit))


def test_closing_changes_only_the_state() -> None:
    packed = bytearray(encode_segment_header(header()))
    packed[SEGMENT_STATE_OFFSET] = SegmentState.CLOSED
    assert decode_segment_header(bytes(packed)) == header(SegmentState.CLOSED)


def test_a_short_or_foreign_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="shorter"):
        decode_segment_header(encode_segment_header(header())[:-1])
    with pytest.raises(ProtocolError, match="not a p2pstore memory segment"):
        decode_segment_header(bytes(SEGMENT_HEADER_BYTES))


# --- index -----------------------------------------------------------------------------------


@given(digests, u32, st.integers(0, 3))
def test_index_entry_round_trip(digest: bytes, slot: int, position: int) -> None:
    packed = bytes(INDEX_ENTRY_BYTES * position) + encode_index_entry(digest, slot)
    assert decode_index_entry(packed, INDEX_ENTRY_BYTES * position) == (digest, slot, True)


def test_an_unused_index_entry() -> None:
    assert decode_index_entry(bytes(INDEX_ENTRY_BYTES))[2] is False


@given(digests, st.integers(0, 23))
def test_home_is_within_the_index(digest: bytes, power: int) -> None:
    assert 0 <= index_home(digest, 1 << power) < 1 << power


# --- slot ------------------------------------------------------------------------------------


@given(slots)
def test_slot_round_trip(slot: Slot) -> None:
    packed = encode_slot(slot)
    assert len(packed) == SLOT_BYTES
    assert decode_slot(packed) == slot


@given(slots, st.integers(0, 8 * SLOT_BYTES - 1))
def test_any_bit_flip_in_a_slot_is_detected(slot: Slot, bit: int) -> None:
    assert decode_slot(flipped(encode_slot(slot), bit)) is None


@given(slots, slots, st.integers(1, SLOT_BYTES - 1))
def test_a_slot_torn_between_two_is_detected(old: Slot, new: Slot, at: int) -> None:
    torn = encode_slot(new)[:at] + encode_slot(old)[at:]
    if torn not in (encode_slot(old), encode_slot(new)):
        assert decode_slot(torn) is None


def test_a_free_slot_and_a_wrong_size_are_no_slots() -> None:
    assert decode_slot(bytes(SLOT_BYTES)) is None
    assert decode_slot(bytes(SLOT_BYTES - 1)) is None


def test_slot_matches_only_a_live_object_inside_the_data_area() -> None:
    geometry = plan_geometry(1 * MIB)
    last = geometry.total_bytes - GRANULE_BYTES

    def matches(
        state: SlotState = SlotState.LIVE,
        offset: int = last,
        length: int = 4000,
        digest: bytes = b"d" * 16,
    ) -> bool:
        slot = Slot(state, digest, Version(1, 2, 3), offset, length, 96)
        return slot_matches(slot, b"d" * 16, geometry)

    assert matches()
    assert not any(matches(state=state) for state in SlotState if state is not SlotState.LIVE)
    assert not matches(digest=b"e" * 16)
    assert not matches(length=4001)
    assert not matches(offset=geometry.data_offset - 1)
    assert not matches(offset=2**63, length=2**63)


# --- trailer ---------------------------------------------------------------------------------


@given(trailers)
def test_trailer_round_trip(trailer: TrailerBody) -> None:
    assert decode_trailer(encode_trailer(trailer)) == trailer


@given(trailers, st.data())
def test_any_bit_flip_in_a_trailer_is_detected(trailer: TrailerBody, data: st.DataObject) -> None:
    packed = encode_trailer(trailer)
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    reserved = 16 <= bit < 32  # means nothing, so a flip there changes nothing
    assert decode_trailer(flipped(packed, bit)) == (trailer if reserved else None)


@given(trailers, st.data())
def test_a_cut_trailer_is_no_trailer(trailer: TrailerBody, data: st.DataObject) -> None:
    packed = encode_trailer(trailer)
    assert decode_trailer(packed[: data.draw(st.integers(0, len(packed) - 1))]) is None


def test_a_trailer_that_does_not_fit_its_length_field_is_refused() -> None:
    with pytest.raises(ValueError, match="metadata"):
        encode_trailer(TrailerBody("n", "k", b"", shape=(2**60,) * 8000))


def test_the_largest_object_with_the_longest_key_has_a_trailer() -> None:
    sums = bytes(8 * chunk_count(MAX_OBJECT_BYTES))
    trailer = TrailerBody("n" * 255, "k" * 1024, sums, 2**63, 100, 2, "float8", (2**40,) * 16)
    assert decode_trailer(encode_trailer(trailer)) == trailer


@given(st.integers(0, 5 * MIB), st.integers(0, 2**64 - 1))
def test_trailer_matches_only_sums_of_the_root(length: int, noise: int) -> None:
    sums = b"\7" * (8 * chunk_count(length))
    root = root_checksum(length, sums)
    trailer = TrailerBody("n", "k", sums)

    def slot(length: int, root: int) -> Slot:
        return Slot(SlotState.LIVE, b"d" * 16, Version(1, 1, root), 0, length, 1)

    assert trailer_matches(trailer, slot(length, root))
    assert not trailer_matches(trailer, slot(length + 1, root))
    assert trailer_matches(trailer, slot(length, noise)) == (noise == root)
    assert not trailer_matches(TrailerBody("n", "k", sums + b"\7" * 8), slot(length, root))


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=80),
            st.none() | st.integers(0, 8 * SLOT_BYTES - 1),
            st.sampled_from(["as it is", "another digest", "another value", "not live"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_many_slots_are_judged_as_each_alone(items: list[tuple[bytes, int | None, str]]) -> None:
    slots, digests, values = [], [], []
    for number, (value, flipped_bit, change) in enumerate(items):
        digest = bytes([number]) * 16
        state = SlotState.DOOMED if change == "not live" else SlotState.LIVE
        root = root_checksum(len(value), chunk_sums(value))
        slot = bytearray(encode_slot(Slot(state, digest, Version(1, 2, root), 0, len(value), 1)))
        if flipped_bit is not None:
            slot[flipped_bit // 8] ^= 1 << flipped_bit % 8
        slots.append(bytes(slot))
        digests.append(digest[1:] + b"x" if change == "another digest" else digest)
        values.append(bytes(len(value)) if change == "another value" else value)
    rows = SlotRows(b"".join(slots))
    sums = b"".join(map(xxhash.xxh3_64_digest, values))
    good = [
        is_only_chunk(slot, digest, len(value), chunk_sum(value))
        for slot, digest, value in zip(slots, digests, values, strict=True)
    ]
    assert len(rows) == len(items)
    # Alone, the payload's length is compared as well.
    same = [length == len(value) for length, value in zip(rows.column("length"), values, strict=True)]
    judged = rows.are_only_chunks(b"".join(digests), sums).tolist()
    assert [each and fits for each, fits in zip(judged, same, strict=True)] == good
    for fine, (_, flipped_bit, change) in zip(good, items, strict=True):
        assert fine or flipped_bit is not None or change != "as it is"


# --- geometry --------------------------------------------------------------------------------


@given(
    st.one_of(st.integers(4 * GRANULE_BYTES, 64 * MIB), st.integers(64 * MIB, 2**44)),
    st.none() | st.integers(1, 2**23),
)
def test_geometry_holds_together(data_bytes: int, max_objects: int | None) -> None:
    geometry = plan_geometry(data_bytes, max_objects)
    assert geometry.data_bytes >= data_bytes
    assert geometry.data_bytes % GRANULE_BYTES == geometry.data_offset % GRANULE_BYTES == 0
    assert geometry.index_offset >= SEGMENT_HEADER_BYTES
    index_end = geometry.index_offset + geometry.index_entries * INDEX_ENTRY_BYTES
    assert index_end <= geometry.slots_offset
    assert geometry.slots_offset + geometry.slots * SLOT_BYTES <= geometry.data_offset
    assert geometry.data_offset + geometry.data_bytes == geometry.total_bytes
    assert geometry.index_entries.bit_count() == 1
    assert geometry.index_entries >= 2 * geometry.slots
    assert 1 <= geometry.slots <= MAX_SLOTS


def test_a_segment_of_no_memory_can_be_mapped_and_holds_nothing() -> None:
    geometry = plan_geometry(0, max_objects=1000)
    assert (geometry.data_bytes, geometry.slots) == (0, 1)
    memory = memoryview(bytearray(geometry.total_bytes))
    segment = Segment(memory, segment_id=bytes(16), incarnation=1, geometry=geometry)
    with pytest.raises(CapacityExceeded, match="offers no memory"):
        segment.reserve(0, 1, session="h", now=0.0)
    check_segment(segment)
    reader = SegmentReader(memory)
    assert not reader.contains(b"d" * 16)
    assert reader.find(b"d" * 16) is None


def test_a_segment_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="16 KiB"):
        plan_geometry(3 * GRANULE_BYTES)


@given(st.integers(0, 4 * MIB), st.integers(1, 65535))
def test_an_extent_holds_payload_and_trailer(length: int, trailer_length: int) -> None:
    assert trailer_offset(length) % 8 == 0
    assert length <= trailer_offset(length) < length + 8
    spare = extent_bytes(length, trailer_length) - trailer_offset(length) - trailer_length
    assert 0 <= spare < GRANULE_BYTES
