"""Whether everything in a segment agrees with everything: for tests and the simulator."""

from __future__ import annotations

from collections import Counter

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.eviction import rank_of
from p2pstore.memory.object_table import packed_slots
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import (
    INDEX_ENTRY_BYTES,
    SlotState,
    decode_index_entry,
    decode_slot,
    decode_trailer,
    encode_slot,
    trailer_matches,
)


def check_segment(segment: Segment) -> None:
    """Raise `AssertionError` unless everything agrees with everything; linear, for tests."""
    _check_extents(segment)
    leases = Counter(map(id, segment.leases.leases.entries()))
    for number, held in segment.objects.held.items():
        assert held.slot == number
        if isinstance(held, ObjectEntry):
            assert held.references >= leases[id(held)]
            _check_entry(segment, held)
    entries = [held for held in segment.objects.held.values() if isinstance(held, ObjectEntry)]
    live = {entry.digest: entry.slot for entry in entries if entry.state is SlotState.LIVE}
    returned = [entry for entry in entries if entry.state is SlotState.RETURNED]
    assert {entry.digest: entry for entry in returned} == segment.objects.returned
    assert live == {digest: entry.slot for digest, entry in segment.objects.live.items()}
    geometry = segment.geometry
    begin = geometry.index_offset
    places = range(begin, begin + geometry.index_entries * INDEX_ENTRY_BYTES, INDEX_ENTRY_BYTES)
    index = (decode_index_entry(segment.table._buffer, place) for place in places)
    assert live == {digest: slot for digest, slot, used in index if used}


def _check_extents(segment: Segment) -> None:
    """Extents cover the data area once, each belongs to something, and the sums are right."""
    position = 0
    taken: list[tuple[int, int]] = []
    for area in segment.areas:
        assert position == area.allocator.begin
        extents = area.allocator.extents()
        for start, size in sorted(extents + area.allocator.free_extents()):
            assert start == position, "extents overlap or leave a hole"
            position += size
        taken += extents
    assert position == segment.data_bytes
    base = segment.geometry.data_offset
    entries = [held for held in segment.objects.held.values() if isinstance(held, ObjectEntry)]
    expected = [(entry.offset - base, entry.extent_bytes) for entry in entries]
    expected += [(held.offset - base, held.capacity) for held in segment.reservations]
    for extent in segment.room.in_making:
        expected.append((extent, segment.areas.at(extent).allocator.size_of(extent)))
    assert sorted(expected) == sorted(taken)
    reserved = sum(held.capacity for held in segment.reservations)
    referenced = sum(entry.extent_bytes for entry in entries if entry.references)
    evictable = sum(entry.extent_bytes for entry in entries if entry in segment.objects.order)
    queued = sorted(entry.offset for entry in entries if entry.rank is not None)
    assert queued == sorted(entry.offset for entry in segment.objects.order.coldest())
    if segment.references.marks is not None:
        marked = {number for number, mark in enumerate(segment.references.marks) if mark}
        assert marked == {entry.slot for entry in entries if entry.references}
    assert reserved == segment.reservations.reserved_bytes
    assert referenced == segment.references.referenced_bytes
    assert evictable == segment.objects.order.evictable_bytes()
    firm = sum(
        entry.extent_bytes
        for entry in segment.objects.order.coldest(cheap=False)
        if entry in segment.objects.order
    )
    assert evictable == firm + segment.objects.order.cheap_bytes
    assert sum(size for _, size in taken) == segment.used_bytes


def _check_entry(segment: Segment, entry: ObjectEntry) -> None:
    assert entry.state in (SlotState.LIVE, SlotState.RETURNED) or entry.references
    if entry not in segment.objects.order.aside:
        assert (entry in segment.objects.order) == (rank_of(entry) is not None)
    area = segment.areas.at(entry.offset - segment.geometry.data_offset)
    assert entry.group == area.group_of(entry.namespace)
    slot = decode_slot(segment.table.slot_bytes(entry))
    assert slot is not None
    assert encode_slot(slot) == packed_slots(entry)[0]
    trailer = decode_trailer(segment.table.trailer_bytes(entry))
    assert trailer is not None
    assert trailer_matches(trailer, slot)
    assert (trailer.key, trailer.pin) == (entry.key, entry.pin)
