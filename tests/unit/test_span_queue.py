"""The requests of one reader to a holder, and the chunks of a value that are kept when the next holder is asked."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from p2pstore.errors import CapacityExceeded
from p2pstore.memory.segment_layout import Slot, SlotState, TrailerBody
from p2pstore.objects import MIB, Version, chunk_sums, root_checksum
from p2pstore.transfer.data_messages import GetItem
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import (
    ALONE,
    PART_CHUNKS,
    Arriving,
    ResumableDestination,
    resumable,
)
from p2pstore.transfer.reading.segment_reader import SegmentReader
from p2pstore.transfer.reading.span_reads import BATCHES_AHEAD, MIN_BATCH_ITEMS, Span, SpanQueue, Wanted
from p2pstore.transfer.transport import BufferDestination
from tests.contract.test_transport import _buffers, pattern, put, segment_of

READER = 3


def wanted(number: int) -> Wanted:
    return Wanted(bytes([number]) * 16, BufferDestination(bytearray()))


def arriving(chunks: int, slice_chunks: int = 4, ahead_chunks: int = 2) -> Arriving:
    value = bytes(chunks * MIB)
    sums = chunk_sums(value)
    slot = Slot(
        SlotState.LIVE, bytes(16), Version(1, 1, root_checksum(len(value), sums)), 0, len(value), 0
    )
    sharing = replace(ALONE, slice_chunks=slice_chunks, ahead_chunks=ahead_chunks)
    trailer = TrailerBody("default", "key", sums)
    return Arriving(slot, trailer, memoryview(bytearray(value)), sharing=sharing)


def asked(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    return [(each.digest[0], each.first_chunk, each.chunk_count) for _, each in spans]


def bring(queue: SpanQueue, value: Arriving, run: range) -> None:
    for number in run:
        value.verify(number, READER)
        queue.came(1)


def test_nothing_is_asked_for_nothing() -> None:
    assert SpanQueue([], READER).next() == []


def test_unknown_objects_are_asked_for_in_batches_a_few_ahead() -> None:
    count = BATCHES_AHEAD * MIN_BATCH_ITEMS + 5
    queue = SpanQueue([wanted(number) for number in range(count)], READER)
    for batch in range(BATCHES_AHEAD):
        first = batch * MIN_BATCH_ITEMS
        assert asked(queue.next()) == [
            (number, 0, PART_CHUNKS) for number in range(first, first + MIN_BATCH_ITEMS)
        ]
    assert queue.next() == []
    queue.answered()
    assert [each[0] for each in asked(queue.next())] == list(range(count - 5, count))
    queue.answered()
    assert queue.next() == []


def test_what_did_not_fit_is_asked_for_alone_when_all_have_been_asked_for() -> None:
    queue = SpanQueue([wanted(number) for number in range(MIN_BATCH_ITEMS + 1)], READER)
    first, second = queue.next()[:2]
    queue.ask_again(first.wanted)
    queue.ask_again(second.wanted)
    assert asked(queue.next()) == [(MIN_BATCH_ITEMS, 0, PART_CHUNKS)]
    queue.answered()
    assert asked(queue.next()) == [(0, 0, PART_CHUNKS)]
    assert queue.next() == []
    queue.answered()
    assert asked(queue.next()) == [(1, 0, PART_CHUNKS)]


def test_a_read_that_goes_on_begins_where_the_one_before_stopped() -> None:
    destination = resumable(BufferDestination(bytearray(20 * MIB)))
    destination.arriving = value = arriving(20)
    bring_all = value.claim(READER, 0, 6)
    for number in bring_all:
        value.verify(number, READER)
    queue = SpanQueue([Wanted(bytes(16), destination, slot_hint=7)], READER)
    assert [each.item for each in queue.next()] == [GetItem(bytes(16), 6, 4, 7)]


def test_the_rest_of_a_value_is_asked_for_before_what_there_is_has_come() -> None:
    large, other = wanted(1), wanted(2)
    queue = SpanQueue([large, other], READER)
    first, _ = queue.next()
    value = arriving(10)
    run = queue.begins(large, value, replace_count(first.item, 4))
    assert run == range(4)
    assert not queue.is_due
    assert queue.next() == []
    bring(queue, value, range(2))
    assert queue.is_due
    assert asked(queue.next()) == [(1, 4, 4)]
    assert not queue.is_due
    bring(queue, value, range(2, 6))
    assert asked(queue.next()) == [(1, 8, 2)]
    bring(queue, value, range(6, 10))
    assert value.complete
    assert queue.next() == []
    assert not queue.is_due


def test_chunks_that_do_not_come_hold_nothing_up() -> None:
    one = wanted(1)
    queue = SpanQueue([one], READER)
    (span,) = queue.next()
    value = arriving(10)
    run = queue.begins(one, value, replace_count(span.item, 4))
    assert queue.next() == []
    queue.came(len(run))
    assert queue.is_due


def test_of_a_shared_value_it_takes_what_is_free() -> None:
    value = arriving(10)
    value.claim(READER + 1, 0, 4)
    queue = SpanQueue([Wanted(bytes(16), None, arriving=value)], READER)
    assert asked(queue.next()) == [(0, 4, 4)]
    assert queue.next() == []
    bring(queue, value, range(4, 8))
    assert asked(queue.next()) == [(0, 8, 2)]
    value.leave(READER + 1)
    bring(queue, value, range(8, 10))
    assert asked(queue.next()) == [(0, 0, 4)]


def replace_count(item: GetItem, count: int) -> GetItem:
    return GetItem(item.digest, item.first_chunk, count)


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
    longer = msgspec.structs.replace(
        slot, offset=slot.offset + 4096, trailer_length=slot.trailer_length + 5
    )
    assert destination.resume(longer, trailer).take() == range(1, 2)
