"""The chunks of a value that are kept when the next holder is asked."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2pstore.errors import CapacityExceeded
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import MIB
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import ResumableDestination
from p2pstore.transfer.reading.segment_reader import SegmentReader
from p2pstore.transfer.transport import BufferDestination
from tests.contract.test_transport import _buffers, pattern, put, segment_of

VALUE, OTHER = pattern(3 * MIB + 5), pattern(3 * MIB + 5, seed=1)


def described(value: bytes, clock: int = 1) -> tuple[Slot, TrailerBody]:
    segment = segment_of(24 * MIB)
    digest = put(segment, "key", value, clock)
    found = SegmentReader(_buffers[24 * MIB]).find(digest)
    assert found is not None
    return found


def begun(destination: ResumableDestination) -> None:
    """Chunks 0 and 2 come, and then their holder fails."""
    arriving = destination.resume(*described(VALUE))
    for number in arriving.take():
        if number in (0, 2):
            arriving.chunk(number)[:] = VALUE[number * MIB : (number + 1) * MIB]
            arriving.verify(number)
    arriving.leave()


def test_verified_chunks_stay_for_the_same_value_in_the_same_memory() -> None:
    destination = ResumableDestination(BufferDestination(bytearray(len(VALUE) + 10)))
    begun(destination)
    assert destination.wanted_first() == (1, 1)
    arriving = destination.resume(*described(VALUE))
    assert arriving.take() == range(1, 2)
    assert arriving.take() == range(3, 4)


@pytest.mark.parametrize("what", ["version", "bytes", "length", "sums"])
def test_of_another_value_nothing_stays(what: str) -> None:
    destination = ResumableDestination(BufferDestination(bytearray(len(VALUE) + 10)))
    begun(destination)
    slot, trailer = {
        "version": described(VALUE, clock=2),
        "bytes": described(OTHER),
        "length": described(VALUE + b"x"),
        "sums": (described(VALUE)[0], described(OTHER)[1]),
    }[what]
    assert destination.resume(slot, trailer).take() == range(4)
    assert destination.resume(*described(VALUE)) is not None
    assert destination.wanted_first() == (0, 4)  # nor is it remembered behind that


class Moving:
    """A destination with other memory every time."""

    def __init__(self) -> None:
        self.given: list[bytearray] = []

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        self.given.append(bytearray(slot.length))
        return memoryview(self.given[-1])


def test_in_other_memory_nothing_stays() -> None:
    destination = ResumableDestination(Moving())
    begun(destination)
    assert destination.resume(*described(VALUE)).take() == range(4)


def test_what_begins_anew_or_is_refused_in_between_forgets() -> None:
    class Full(BufferDestination):
        full = False

        def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
            if self.full:
                raise CapacityExceeded("full")
            return super().prepare(slot, trailer)

    inner = Full(bytearray(len(VALUE)))
    destination = ResumableDestination(inner)
    begun(destination)
    destination.prepare(
        *described(VALUE)
    )  # a transport that does not know what is there writes anywhere
    assert destination.resume(*described(VALUE)).take() == range(4)
    destination = ResumableDestination(inner)
    begun(destination)
    inner.full = True
    with pytest.raises(CapacityExceeded):
        destination.resume(*described(VALUE))
    assert isinstance(destination.error, CapacityExceeded)
    inner.full = False
    assert destination.resume(*described(VALUE)).take() == range(4)


def test_a_damaged_chunk_is_free_again() -> None:
    destination = ResumableDestination(BufferDestination(bytearray(len(VALUE))))
    arriving = destination.resume(*described(VALUE))
    arriving.take()
    with pytest.raises(PullFailed, match="chunk 1"):
        arriving.verify(1)
    with pytest.raises(PullFailed, match="chunk 0"):
        arriving.verify(0, chunk=memoryview(OTHER)[:MIB])
    assert not any(arriving.view)  # unverified bytes are not copied
    arriving.leave()
    assert arriving.take() == range(4)


def test_a_trailer_that_says_more_is_of_the_same_value() -> None:
    """Such as another time to live."""
    destination = ResumableDestination(BufferDestination(bytearray(len(VALUE))))
    begun(destination)
    slot, trailer = described(VALUE)
    longer = replace(slot, offset=slot.offset + 4096, trailer_length=slot.trailer_length + 5)
    assert destination.resume(longer, trailer).take() == range(1, 2)
