"""Parts of a large object that are asked for before those before them are there."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from p2pstore.objects import MIB
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.reading.arriving import ALONE, PARTS_AHEAD, Arriving, resumable
from p2pstore.transfer.reading.span_reads import Span, SpanQueue
from p2pstore.transfer.transport import BufferDestination
from tests.contract.test_transport import TcpHarness, pattern, put, segment_of

CHUNKS = 12


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(32 * MIB)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("slice_chunks", "ahead_chunks", "left"),
    [
        (1, 4, [0, 1, 2, 3, *[4] * 8]),
        (2, 4, [0, 2, 4, 4, 4, 4]),
        (4, 1, [0, 1, 1]),
        (3, 0, [0, 0, 0, 0]),
    ],
)
async def test_so_much_is_asked_for_ahead(
    tcp: TcpHarness,
    monkeypatch: pytest.MonkeyPatch,
    slice_chunks: int,
    ahead_chunks: int,
    left: list[int],
) -> None:
    """The reader asks for more as soon as few of the requested chunks are left."""
    left_chunks = 0
    left_when_asked: list[int] = []
    next_spans = SpanQueue.next

    def watched_next(self: SpanQueue) -> list[Span]:
        nonlocal left_chunks
        spans = next_spans(self)
        for _, item in spans:
            left_when_asked.append(left_chunks)
            left_chunks += min(item.chunk_count, CHUNKS - item.first_chunk)
        return spans

    verify = Arriving.verify

    def watched_verify(self: Arriving, *arguments: object, **options: object) -> None:
        nonlocal left_chunks
        verify(self, *arguments, **options)  # type: ignore[arg-type] # passed on
        left_chunks -= 1

    monkeypatch.setattr(SpanQueue, "next", watched_next)
    monkeypatch.setattr(Arriving, "verify", watched_verify)
    value, buffer = pattern(CHUNKS * MIB - 5), bytearray(CHUNKS * MIB - 5)
    digest = put(tcp.segment, "key", value)
    destination = resumable(BufferDestination(buffer))
    destination.share(replace(ALONE, slice_chunks=slice_chunks, ahead_chunks=ahead_chunks))
    await tcp.transport(TrioDriver()).pull(tcp.copy(digest), digest, destination)
    assert buffer == value
    assert left_when_asked == left


def test_who_reads_alone_has_several_parts_asked_for() -> None:
    assert ALONE.ahead_chunks == PARTS_AHEAD * ALONE.slice_chunks
