"""A holder that has much to send says BUSY to readers that can go elsewhere, and to no others."""

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from p2pstore.objects import KIB, MIB, key_digest
from p2pstore.runtime.streams import ByteStream
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, Get, GetItem, GetSmall
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.serving import read_answers, read_thread
from p2pstore.transfer.serving.read_answers import MAX_READ_THREADS
from p2pstore.transfer.serving.read_thread import BRISK_READS
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import (
    BufferDestination,
    PullReport,
    RemoteCopy,
    pull_with_failover,
    with_alternatives,
)
from p2pstore.wire import DATA_REPLY_LIMITS, HEADER_BYTES, Code, decode_header, encode_frame
from tests.contract.sides import DRIVERS, Side
from tests.contract.test_transport import (
    TcpHarness,
    authenticated,
    pattern,
    put,
    read_exactly,
    read_frame,
    segment_of,
)
from tests.waiting import SECONDS, until

LARGE, SMALL = pattern(16 * MIB), pattern(64 * KIB)
DIGEST = key_digest("large")


@pytest.fixture(autouse=True)
def small_reads_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a test is in time for what follows a small read."""
    monkeypatch.setattr(read_answers, "MIXED_SECONDS", SECONDS)


@pytest.fixture(params=DRIVERS)
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param, DRIVERS[request.param]())


@pytest.fixture
async def busy() -> AsyncIterator[TcpHarness]:
    """A holder whose only place for uploads is taken by a reader that does not read."""
    async with holder(1) as harness, occupied(harness):
        yield harness


@contextlib.asynccontextmanager
async def holder(number: int) -> AsyncIterator[TcpHarness]:
    segment = segment_of((16 + 8 * number) * MIB)
    put(segment, "large", LARGE)
    put(segment, "small", SMALL)
    async with TcpHarness.open(segment, ServerLimits(uploads=1)) as harness:
        yield harness


@contextlib.asynccontextmanager
async def occupied(harness: TcpHarness) -> AsyncIterator[ByteStream]:
    slow = await authenticated(harness.address)
    await slow.send(encode_frame(DataKind.GET, 1, Get([GetItem(DIGEST)])))
    await until(lambda: harness.server.traffic.uploads.taken == 1)
    yield slow
    slow.close()
    await until(lambda: harness.server.traffic.uploads.taken == 0)


async def read(side: Side, harness: TcpHarness, *copies: RemoteCopy) -> PullReport:
    """The large object from the first that delivers."""
    buffer = bytearray(len(LARGE))
    transport = harness.transport(side.driver)
    report = await side.run(
        lambda: pull_with_failover(copies, [transport], DIGEST, BufferDestination(buffer))
    )
    assert (report.pulled is not None) == (buffer == LARGE)
    return report


async def test_a_reader_goes_to_another_holder(busy: TcpHarness, side: Side) -> None:
    async with holder(2) as other:
        copies = [busy.copy(), replace(other.copy(), peer_id=b"other", member=2)]
        report = await read(side, busy, *copies)
    assert report.copy is copies[1]
    assert report.failures == ()  # to be busy is no failure
    assert busy.server.traffic.busy == 1


async def test_when_all_are_busy_the_first_serves(busy: TcpHarness, side: Side) -> None:
    async with holder(2) as other, occupied(other):
        copies = [busy.copy(), replace(other.copy(), peer_id=b"other", member=2)]
        report = await read(side, busy, *copies)
        assert report.copy is copies[0]
        assert report.failures == ()
        assert (busy.server.traffic.busy, other.server.traffic.busy) == (1, 1)


async def test_a_busy_holder_serves_when_the_others_fail(busy: TcpHarness, side: Side) -> None:
    copies = [busy.copy(), replace(busy.copy(), peer_id=b"dead", data=("127.0.0.1:1",), member=2)]
    report = await read(side, busy, *copies)
    assert report.copy is copies[0]
    assert [each.member for each in report.failures] == [2]


async def test_how_long_slots_are_taken_is_known_while_they_are(busy: TcpHarness) -> None:
    traffic = busy.server.traffic
    await until(lambda: traffic.uploads.seconds(time.monotonic()) > 0.05)
    assert traffic.uploads.taken == 1
    async with holder(2) as other:
        async with occupied(other):
            pass
        uploads = other.server.traffic.uploads
        assert uploads.seconds(0.0) == uploads.seconds(time.monotonic()) > 0.0


async def test_the_only_holder_serves(busy: TcpHarness, side: Side) -> None:
    report = await read(side, busy, busy.copy())
    assert report.copy is not None
    assert busy.server.traffic.busy == 0


async def test_small_reads_are_never_refused(busy: TcpHarness, side: Side) -> None:
    pool = busy.pool(side.driver)
    buffer = bytearray(len(SMALL))
    destination, digest = BufferDestination(buffer), key_digest("small")
    await side.run(lambda: pool.pull(with_alternatives(busy.copy(), ()), digest, destination))
    assert buffer == SMALL
    with pytest.raises(PullFailed) as caught:
        large = BufferDestination(bytearray(len(LARGE)))
        await side.run(lambda: pool.pull(with_alternatives(busy.copy(), ()), DIGEST, large))
    assert caught.value.code is Code.BUSY
    assert pool.open_connections == 1  # it is as good as before
    await side.run(lambda: pool.pull(with_alternatives(busy.copy(), ()), digest, destination))


async def test_a_place_is_free_when_its_reader_is_done_or_gone() -> None:
    async with holder(1) as harness:
        for reads in (True, False):
            async with occupied(harness) as stream:
                with pytest.raises(PullFailed, match="much to send already"):
                    await _pull(harness)
                if reads:
                    await read_frame(stream)
                    await until(lambda: harness.server.traffic.uploads.taken == 0)
                    await _pull(harness)
            await _pull(harness)
        assert harness.server.traffic.busy == 2


async def _pull(harness: TcpHarness) -> None:
    pool = harness.pool(TrioDriver())
    await pool.pull(
        with_alternatives(harness.copy(), ()), DIGEST, BufferDestination(bytearray(len(LARGE)))
    )
    pool.close()


async def test_a_read_that_is_refused_is_none() -> None:
    async with holder(1) as harness:
        async with occupied(harness):
            before = list(harness.backend.noted)
            with pytest.raises(PullFailed, match="much to send already"):
                await _pull(harness)
            assert harness.backend.noted == before
        await _pull(harness)
        assert harness.backend.noted == [*before, DIGEST]


async def test_when_all_places_are_taken_small_reads_bring_small_objects_only() -> None:
    async with holder(1) as harness:
        chunk = put(harness.segment, "chunk", LARGE[:MIB])
        asked = GetSmall(key_digest("small") + chunk, MIB)
        stream = await authenticated(harness.address)

        async def ask() -> bytes:
            await stream.send(encode_frame(DataKind.GET_SMALL, 1, asked))
            *_, bulk = await read_frame(stream)
            return bulk

        assert await ask() == SMALL + LARGE[:MIB]
        async with occupied(harness):
            assert await ask() == SMALL
        assert harness.server.traffic.busy == 0, "GET is to say that"
        await until(lambda: harness.server.traffic.uploads.taken == 0)
        assert await ask() == SMALL + LARGE[:MIB]
        stream.close()
    assert not harness.segment.references.loans.any_known


# --- small reads beside a large one --------------------------------------------------------------


async def test_a_large_answer_leaves_the_loop_to_small_reads() -> None:
    async with holder(1) as harness:
        await _pull_small(harness)
        async with occupied(harness) as slow:
            assert harness.server.traffic.read_threads == 1
            await _pull_small(harness)
            *_, payload = await read_frame(slow)
            assert payload == LARGE
            await until(lambda: harness.server.traffic.read_threads == 0)


async def test_without_small_reads_there_is_no_thread() -> None:
    async with holder(1) as harness, occupied(harness):
        assert harness.server.traffic.read_threads == 0


async def test_parts_of_one_object_are_no_small_reads_in_a_row() -> None:
    """A thread could answer none of them."""
    async with holder(1) as harness:
        stream = await authenticated(harness.address)
        for number in range(1, 3 * BRISK_READS):
            await stream.send(encode_frame(DataKind.GET, number, Get([GetItem(DIGEST, number % 15, 1)])))
            *_, payload = await read_frame(stream)
            assert len(payload) == MIB
            assert harness.server.traffic.read_threads == 0
        stream.close()


def ask_for(part: int) -> bytes:
    """A third of the large object; sockets hold less than that."""
    return encode_frame(DataKind.GET, part, Get([GetItem(DIGEST, 6 * part, 6)]))


@contextlib.asynccontextmanager
async def in_the_second_part(harness: TcpHarness) -> AsyncIterator[tuple[ByteStream, int]]:
    """A reader that has read the first part of the large object, and the header of the second; how long the rest of
    that is."""
    await _pull_small(harness)
    slow = await authenticated(harness.address)
    with socket.socket(fileno=os.dup(slow.fileno())) as same:
        same.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, MIB
        )  # the kernel would give it a part and more
    await slow.send(ask_for(0))
    await until(lambda: harness.server.traffic.read_threads == 1)
    await slow.send(ask_for(1))
    *_, payload = await read_frame(slow)
    assert payload == LARGE[: 6 * MIB]
    header = decode_header(await read_exactly(slow, HEADER_BYTES), DATA_REPLY_LIMITS)
    assert (header.request_id, header.bulk_length) == (1, 6 * MIB)
    yield slow, header.body_length + header.bulk_length
    slow.close()
    await until(lambda: harness.server.traffic.read_threads == 0)
    assert harness.server.traffic.uploads.taken == 0
    harness.segment.objects.expire(0)  # takes in which loans are over
    assert not harness.segment.references.loans.any_known


async def test_the_thread_that_sent_a_part_sends_those_after_it() -> None:
    async with holder(1) as harness:
        traffic = harness.server.traffic
        async with in_the_second_part(harness) as (slow, rest):
            assert (traffic.read_threads, traffic.uploads.taken) == (1, 1)
            with pytest.raises(PullFailed, match="much to send already"):
                await _pull(harness)
            await _pull_small(harness)
            await slow.send(ask_for(2))
            assert (await read_exactly(slow, rest)).endswith(LARGE[6 * MIB : 12 * MIB])
            *_, payload = await read_frame(slow)
            assert payload == LARGE[12 * MIB :]
            await until(lambda: traffic.read_threads == 0)  # that was the last one
            await slow.send(encode_frame(DataKind.GET, 3, Get([GetItem(key_digest("small"))])))
            *_, payload = await read_frame(slow)
            assert payload == SMALL


async def test_the_thread_begins_with_the_next_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_thread, "PAUSE_SECONDS", SECONDS)
    async with holder(1) as harness:
        traffic = harness.server.traffic
        async with in_the_second_part(harness) as (slow, rest):
            await read_exactly(slow, rest)
            for number in (2, 0, 2):
                await slow.send(ask_for(number))
                *_, payload = await read_frame(slow)
                assert traffic.read_threads == 1, "the event loop sends"
                assert payload == LARGE[6 * number * MIB : (6 * number + 6) * MIB]
        assert traffic.objects == 3, "a small object, and both readings"


async def test_of_what_is_removed_meanwhile_no_part_comes_any_more() -> None:
    def ask_for_two(first_chunk: int) -> bytes:
        return encode_frame(DataKind.GET, first_chunk, Get([GetItem(DIGEST, first_chunk, 2)]))

    async with holder(1) as harness, in_the_second_part(harness) as (slow, rest):
        await read_exactly(slow, rest)
        await slow.send(ask_for_two(12))
        *_, payload = await read_frame(slow)
        assert payload == LARGE[12 * MIB : 14 * MIB]
        harness.segment.remove(DIGEST)
        await slow.send(ask_for_two(14))
        *_, payload = await read_frame(slow)
        assert payload == b""


@pytest.mark.parametrize("stops", [False, True])
async def test_the_thread_of_later_parts_ends_with_its_reader_and_with_the_server(stops: bool) -> None:
    async with holder(1) as harness, in_the_second_part(harness):
        if stops:
            harness.stop.cancel()


async def test_threads_end_with_their_reader_and_with_the_server() -> None:
    async with holder(1) as harness:
        for stops in (False, True):
            await _pull_small(harness)
            async with occupied(harness):
                assert harness.server.traffic.read_threads == 1
                if stops:
                    harness.stop.cancel()
            await until(lambda: harness.server.traffic.read_threads == 0)


async def test_threads_are_few() -> None:
    async with holder(1) as harness:
        await _pull_small(harness)
        harness.server.traffic.read_threads = MAX_READ_THREADS
        async with occupied(harness):
            assert harness.server.traffic.read_threads == MAX_READ_THREADS


async def _pull_small(harness: TcpHarness) -> None:
    buffer = bytearray(len(SMALL))
    pool = harness.pool(TrioDriver())
    await pool.pull_small(harness.copy(), [key_digest("small")], [memoryview(buffer)])
    assert buffer == SMALL
