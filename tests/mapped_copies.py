"""Copies out of mapped segments, by every way that a reader has to look objects up."""

from collections.abc import Sequence

from p2pstore.transfer.reading.segment_reader import FEW_DIGESTS, SegmentReader, Spots


def copy_spots(reader: SegmentReader, spots: Spots, rooms: Sequence[memoryview]) -> bytes:
    """All steps: a byte a spot, 1 where the object was copied."""
    steps = reader.copy_steps(spots, rooms)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return bytes(stop.value)


def copy_many(reader: SegmentReader, digests: Sequence[bytes], rooms: Sequence[memoryview]) -> list[int]:
    """The lengths; -1 for what is not there, changed, or has too small a room."""
    spots = reader.spots(digests)
    good = copy_spots(reader, spots, [rooms[place] for place in spots.places])
    lengths = [-1] * len(digests)
    for place, length, fine in zip(spots.places, spots.lengths, good, strict=True):
        if fine:
            lengths[place] = length
    return lengths


def copy_one(reader: SegmentReader, digest: bytes, room: memoryview) -> int | None:
    """The length, or None: alone, which must come to the same as among many."""
    other = memoryview(bytearray(len(room)))
    among_many = [digest] + [bytes(16)] * FEW_DIGESTS
    many = copy_many(reader, among_many, [other] * len(among_many))[0]
    alone = copy_many(reader, [digest], [room])[0]
    assert alone == many
    assert alone < 0 or other[:alone] == room[:alone]
    return alone if alone >= 0 else None
