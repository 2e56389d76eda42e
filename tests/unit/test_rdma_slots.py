"""Hints of another peer's slots, within bounds."""

from p2pstore.memory.segment_layout import SLOT_BYTES, plan_geometry
from p2pstore.transfer.rdma.rdma_reads import MOST_KEPT, SLOTS_TOGETHER, SeenSlots

GEOMETRY = plan_geometry(1 << 20, 40)


def row(first: int, count: int = SLOTS_TOGETHER) -> bytes:
    """Slots that are told apart by what they begin with."""
    return b"".join((first + each).to_bytes(SLOT_BYTES, "little") for each in range(count))


def test_a_slot_is_read_with_its_neighbours() -> None:
    seen = SeenSlots(GEOMETRY)
    row_bytes = SLOTS_TOGETHER * SLOT_BYTES
    assert seen.extent(0) == seen.extent(15) == (GEOMETRY.slots_offset, row_bytes)
    assert seen.extent(16) == (GEOMETRY.slots_offset + row_bytes, row_bytes)
    assert seen.extent(39) == (GEOMETRY.slots_offset + 2 * row_bytes, 8 * SLOT_BYTES), "the last"


def test_what_was_seen_is_found() -> None:
    seen = SeenSlots(GEOMETRY)
    assert seen.find(5) == b""
    seen.take_in(7, row(0))
    seen.take_in(38, row(32, 8))
    for number in (0, 5, 15, 32, 39):
        assert seen.find(number) == number.to_bytes(SLOT_BYTES, "little")
    assert seen.find(16) == b""
    assert seen.find(40) == b"", "the segment ends before it"
    seen.take_in(0, row(100))
    assert seen.find(5) == (105).to_bytes(SLOT_BYTES, "little"), "the last look counts"


def test_the_oldest_are_forgotten() -> None:
    seen = SeenSlots(plan_geometry(1 << 30))
    for number in range(0, MOST_KEPT * SLOTS_TOGETHER, SLOTS_TOGETHER):
        seen.take_in(number, row(number))
    seen.take_in(0, row(0))  # again
    seen.take_in(MOST_KEPT * SLOTS_TOGETHER, row(0))
    assert seen.find(0) != b""
    assert seen.find(SLOTS_TOGETHER) == b""
    assert seen.find(2 * SLOTS_TOGETHER) != b""
