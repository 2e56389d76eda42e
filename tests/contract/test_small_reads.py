"""Many small objects at once, by GET_SMALL: both sides, and the errors that each may meet."""

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import trio

from p2pstore.errors import CapacityExceeded
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import SlotRows
from p2pstore.objects import KIB, MIB, key_digest
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, GetSmall, SmallObjects
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.data_requests import Inbox
from p2pstore.transfer.serving import data_session
from p2pstore.transfer.serving.read_answers import TAKE_IN_OBJECTS
from p2pstore.transfer.serving.read_thread import BRISK_READS
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import ERROR, REPLY, Code, Failure, decode_body, encode_frame
from simulation.segment_checks import check_segment
from tests.contract.sides import DRIVERS, Side
from tests.contract.test_transport import (
    SEGMENT_BYTES,
    TcpHarness,
    _buffers,
    answer,
    assert_closed,
    authenticated,
    caught_log,
    object_reply,
    objects_frame,
    pattern,
    put,
    read_frame,
    scripted_owner,
    segment_of,
)
from tests.readers.values import KEYS_PER_PEER, is_right, key_name, value_of
from tests.waiting import until


@pytest.fixture(params=DRIVERS)
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param, DRIVERS[request.param]())


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


def nothing_is_lent(segment: Segment) -> bool:
    segment.objects.expire(0)  # takes in which loans are over
    return not segment.references.loans.any_known and not segment.leased_bytes


async def test_many_small_objects_in_columns(tcp: TcpHarness, side: Side) -> None:
    """Each length, or -1 for what the other way of asking is to tell more of."""
    values = [pattern(size, seed) for seed, size in enumerate([1, 4096, 64 * KIB, 30_000] * 75)]
    values[4:8] = b"", pattern(64 * KIB + 1), values[4], values[5]
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    room = [len(value) for value in values]
    room[5], room[8], room[9], room[10] = 64 * KIB, 5, 10, 100_000
    views = [memoryview(bytearray(size + 1))[:size] for size in room]
    digests[11] = key_digest("absent")
    entry = tcp.segment.find(digests[14], time.time())
    assert entry is not None
    _buffers[SEGMENT_BYTES][entry.offset] ^= 1
    pool = tcp.pool(side.driver)
    lengths, failure = await side.run(lambda: pool.pull_small(tcp.copy(), digests, views))
    assert failure is None
    told_otherwise = {4, 5, 9, 11, 14}
    for number, (length, view, value) in enumerate(zip(lengths, views, values, strict=True)):
        if number in told_otherwise:
            assert length == -1
        else:
            assert length == len(value)
            assert view[:length] == value
        if number in {9, 11}:
            assert not any(view)  # an object that is too long for a buffer leaves it alone
    assert pool.open_connections == 1  # none of that ends a connection
    await until(lambda: nothing_is_lent(tcp.segment))
    again = await side.run(lambda: pool.pull_small(tcp.copy(), digests[:1], views[:1]))
    assert again == ([1], None)


async def test_objects_of_one_chunk_in_columns(tcp: TcpHarness, side: Side) -> None:
    """Between small ones, in several answers: more than one holds."""
    sizes = [MIB, 5, 64 * KIB + 1, 128 * KIB - 1, 128 * KIB, MIB - 1, 300_000, 64 * KIB, 1, 700_000]
    values = [pattern(size, seed) for seed, size in enumerate(sizes * 2)]
    values[11] = pattern(MIB + 1)
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    room = [len(value) for value in values]
    room[0], room[2], room[11], room[12] = MIB, MIB, MIB, 64 * KIB
    views = [memoryview(bytearray(size)) for size in room]
    digests[13] = key_digest("absent")
    entry = tcp.segment.find(digests[15], time.time())
    assert entry is not None
    _buffers[SEGMENT_BYTES][entry.offset + 400_000] ^= 1
    pool = tcp.pool(side.driver)
    for _ in range(3):
        lengths, failure = await side.run(lambda: pool.pull_small(tcp.copy(), digests, views))
        assert failure is None
        told_otherwise = {11, 12, 13, 15}
        for number, (length, view, value) in enumerate(zip(lengths, views, values, strict=True)):
            assert length == (-1 if number in told_otherwise else len(value))
            assert number in told_otherwise or view[:length] == value
        assert not any(any(views[number]) for number in (11, 12, 13))
        assert pool.open_connections == 1
    await until(lambda: nothing_is_lent(tcp.segment))


async def test_a_large_object_is_not_sent_to_who_has_no_room_for_it(tcp: TcpHarness, side: Side) -> None:
    digests = [put(tcp.segment, f"key {i}", pattern(MIB, i)) for i in range(8)]
    views = [memoryview(bytearray(100_000)) for _ in digests]
    pool = tcp.pool(side.driver)
    lengths, _ = await side.run(lambda: pool.pull_small(tcp.copy(), digests, views))
    assert lengths == [-1] * 8
    assert tcp.server.traffic.bytes < MIB


async def test_small_values_in_large_rooms_come_by_few_receives(
    tcp: TcpHarness, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [put(tcp.segment, f"key {i}", pattern(64 * KIB, i)) for i in range(16)]
    views = [memoryview(bytearray(MIB)) for _ in digests]
    received: list[int] = []
    receive = Inbox._receive

    async def counted(inbox: Inbox, *arguments: Any, **options: Any) -> None:
        received.append(1)
        await receive(inbox, *arguments, **options)

    monkeypatch.setattr(Inbox, "_receive", counted)
    pool = tcp.pool(side.driver)
    lengths, _ = await side.run(lambda: pool.pull_small(tcp.copy(), digests, views))
    assert lengths == [64 * KIB] * 16
    assert all(view[: 64 * KIB] == pattern(64 * KIB, i) for i, view in enumerate(views))
    assert len(received) < 20 * len(digests)  # with as little at once as a head has, it was 200 each


async def test_a_holder_that_claims_more_than_an_answer_holds_is_not_believed(side: Side) -> None:
    """The reader would make room for all of it."""
    digests = [key_digest("key 0")] * 5
    views = [memoryview(bytearray(1)) for _ in digests[1:]] + [memoryview(bytearray(MIB))]
    value = pattern(MIB)
    slots = object_reply(value, "key 0").slot * 5
    frame = encode_frame(DataKind.GET_SMALL, 1, SmallObjects(slots), flags=REPLY, bulk_length=5 * MIB)
    async with scripted_owner(answer(lambda _: frame)) as bad:
        pool = ConnectionPool(side.driver)
        lengths, failure = await side.run(lambda: pool.pull_small(bad, digests, views))
        assert lengths == []
        assert failure is not None
        assert failure.code == Code.MALFORMED
        pool.close()


async def test_small_objects_into_one_buffer_are_delivered_or_asked_for_again(
    tcp: TcpHarness, side: Side
) -> None:
    values = [pattern(50_000, seed) for seed in range(20)]
    digests = [put(tcp.segment, f"key {i}", value) for i, value in enumerate(values)]
    view = memoryview(bytearray(50_000))
    pool = tcp.pool(side.driver)
    lengths, _ = await side.run(lambda: pool.pull_small(tcp.copy(), digests, [view] * 20))
    assert set(lengths[:-1]) <= {50_000, -1}
    assert lengths[-1] == 50_000
    assert view == values[-1]


async def test_small_objects_read_in_a_row_are_answered_in_threads(tcp: TcpHarness) -> None:
    digests = [put(tcp.segment, f"key {i}", pattern(4096, i)) for i in range(64)]
    views = [memoryview(bytearray(4096)) for _ in digests]
    backend = tcp.backend
    pool = tcp.pool(BlockingDriver())

    def read() -> None:
        for _ in range(40):
            assert run_blocking(pool.pull_small(tcp.copy(), digests, views))[0] == [4096] * 64

    await trio.to_thread.run_sync(read)
    await until(lambda: len(backend.noted) == 40 * 64)
    assert all(view == pattern(4096, i) for i, view in enumerate(views))
    await until(lambda: nothing_is_lent(tcp.segment))


async def test_what_was_read_until_the_end_of_a_connection_is_taken_in(
    tcp: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_session, "TAKE_IN_SECONDS", 3600.0)  # not while it lasts
    count = 2 * TAKE_IN_OBJECTS
    digests = [put(tcp.segment, f"key {i}", b"value") for i in range(count)]
    views = [memoryview(bytearray(5)) for _ in digests]
    pool = tcp.pool(BlockingDriver())

    def read() -> None:
        for _ in range(10):
            assert run_blocking(pool.pull_small(tcp.copy(), digests, views))[0] == [5] * count
        assert tcp.server.traffic.read_threads == 1
        pool.close()

    await trio.to_thread.run_sync(read)
    await until(lambda: len(tcp.backend.noted) == 10 * count)


@pytest.mark.parametrize("length", [8, 16 * 513, 0])
async def test_digests_that_are_none_end_the_connection(tcp: TcpHarness, length: int) -> None:
    stream = await authenticated(tcp.address)
    await stream.send(encode_frame(DataKind.GET_SMALL, 1, GetSmall(bytes(length))))
    _, flags, _, body, _ = await read_frame(stream)
    assert flags == REPLY | ERROR
    assert decode_body(Failure, body).code == Code.MALFORMED
    await assert_closed(stream)


# --- holders that misbehave ---


def small_frame(
    *values: bytes, bulk: bytes | None = None, slots: bytes | None = None
) -> Callable[[int], bytes]:
    if slots is None:
        slots = b"".join(object_reply(value, f"key {i}").slot for i, value in enumerate(values))
    sent = b"".join(values) if bulk is None else bulk
    return lambda request_id: (
        encode_frame(
            DataKind.GET_SMALL, request_id, SmallObjects(slots), flags=REPLY, bulk_length=len(sent)
        )
        + sent
    )


SMALL_MISBEHAVIOUR: dict[str, tuple[Callable[[int], bytes], Code | None]] = {
    "another number of slots": (small_frame(b"a", b"b"), Code.MALFORMED),
    "no slots": (small_frame(), Code.MALFORMED),
    "bulk does not add up": (small_frame(b"a", b"b", b"c", bulk=b"abcd"), Code.MALFORMED),
    "one too large": (small_frame(b"a", b"b", bytes(64 * KIB + 1)), Code.MALFORMED),
    "GET's answer": (objects_frame(object_reply(b"a")), Code.MALFORMED),
    "wrong bytes": (small_frame(b"a", b"b", b"c", bulk=b"xyz"), None),
}


@pytest.mark.parametrize("name", SMALL_MISBEHAVIOUR)
async def test_a_holder_that_misbehaves_in_columns(side: Side, name: str) -> None:
    frame, code = SMALL_MISBEHAVIOUR[name]
    digests = [key_digest(f"key {i}") for i in range(3)]
    views = [memoryview(bytearray(100)) for _ in digests]
    async with scripted_owner(answer(frame)) as bad:
        pool = ConnectionPool(side.driver)
        lengths, failure = await side.run(lambda: pool.pull_small(bad, digests, views))
        assert lengths == ([-1] * 3 if code is None else [])
        assert (None if failure is None else failure.code) == code
        assert pool.open_connections == (code is None)
        pool.close()


@pytest.mark.parametrize("code", [*sorted({Code.INTERNAL, Code.CLOSED, Code.INVALID_ARGUMENT}), 999])
async def test_a_holder_that_refuses_columns_fails_the_pull_and_nothing_else(
    side: Side, code: int
) -> None:
    failure = Failure(code, "no")

    def refuse(request_id: int) -> bytes:
        return encode_frame(DataKind.GET_SMALL, request_id, failure, flags=REPLY | ERROR)

    async with scripted_owner(answer(refuse)) as bad:
        pool = ConnectionPool(side.driver)
        view = memoryview(bytearray(100))
        for count in (0, 1, 100):
            digests, views = [key_digest("key")] * count, [view] * count
            lengths, told = await side.run(partial(pool.pull_small, bad, digests, views))
            assert lengths == []
            assert (None if told is None else told.text) == (None if not count else "no")
        pool.close()


async def test_what_came_in_columns_before_the_connection_broke_stands(side: Side) -> None:
    values = [pattern(64 * KIB, seed) for seed in range(100)]
    digests = [key_digest(f"key {i % 34}") for i in range(100)]
    views = [memoryview(bytearray(64 * KIB)) for _ in digests]

    async def script(stream: Any, read: Any) -> None:
        _, _, request_id, body, _ = await read()
        assert decode_body(GetSmall, body).digests == b"".join(digests[:34])
        await stream.send(small_frame(*values[:34])(request_id))
        _, _, request_id, _, _ = await read()
        for _ in range(2):  # a connection that is closed before all is read takes back what was sent
            await read()
        await stream.send(small_frame(*values[:34])(request_id)[:700_000])

    async with scripted_owner(script) as bad:
        pool = ConnectionPool(side.driver)
        lengths, failure = await side.run(lambda: pool.pull_small(bad, digests, views))
        pool.close()
    assert lengths == [64 * KIB] * 34
    assert [view == value for view, value in zip(views[:34], values, strict=False)] == [True] * 34
    assert failure is not None
    assert failure.retriable


# --- readers that misbehave ---------------------------------------------------------------------


@pytest.mark.parametrize("in_thread", [False, True])
async def test_who_does_not_read_what_was_lent_gets_it_unchanged_or_is_cut(in_thread: bool) -> None:
    """Memory of lent objects is not reused before the answer has left, even when they are removed."""
    segment = segment_of(SEGMENT_BYTES)
    values = [pattern(64 * KIB, seed) for seed in range(64)]
    packed = b"".join(put(segment, f"key {seed}", value) for seed, value in enumerate(values))
    limits = ServerLimits(progress_seconds=1.0)
    async with TcpHarness.open(segment, limits) as harness:
        stream = await authenticated(harness.address)
        with socket.socket(fileno=os.dup(stream.fileno())) as sock:  # an answer is more than it takes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
        ask = encode_frame(DataKind.GET_SMALL, 1, GetSmall(packed))
        for _ in range(2 * BRISK_READS if in_thread else 0):
            await stream.send(encode_frame(DataKind.GET_SMALL, 1, GetSmall(packed[:16])))
            await read_frame(stream)
        await until(lambda: bool(harness.server.traffic.read_threads) == in_thread)
        await until(lambda: not segment.references.loans.any_known)
        with caught_log() as lines:
            await stream.send(ask)
            await until(lambda: segment.references.loans.any_known)
            for seed in range(64):
                segment.remove(key_digest(f"key {seed}"))
            new = [pattern(64 * KIB, seed) for seed in range(64, 384)]
            there = [put(segment, f"new {seed}", value) for seed, value in enumerate(new)]
            there = [digest for digest in there if segment.find(digest, 0.0) is not None]
            assert 64 <= len(there) < len(new), "the memory was not filled"
            *_, body, bulk = await read_frame(stream)
            lengths = SlotRows(decode_body(SmallObjects, body).slots).column("length")
            assert lengths == [64 * KIB] * 64
            assert bulk == b"".join(values)
            ask = encode_frame(DataKind.GET_SMALL, 2, GetSmall(b"".join(there[-64:])))
            await stream.send(ask)
            await until(lambda: harness.server.connections == 0)
        assert any("no progress" in line for line in lines)
        stream.close()
        assert nothing_is_lent(segment)
        check_segment(segment)


async def test_a_reader_cancelled_anywhere_leaves_the_next_one_a_good_connection(
    tcp: TcpHarness,
) -> None:
    values = [pattern(30_000, seed) for seed in range(100)]
    digests = [put(tcp.segment, f"key {seed}", value) for seed, value in enumerate(values)]
    pool = tcp.pool(TrioDriver())
    cancelled = 0
    for turns in range(30):
        views = [memoryview(bytearray(30_000)) for _ in digests]
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel_after(turns: int, scope: trio.CancelScope) -> None:
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel_after, turns, scope)
                await pool.pull_small(tcp.copy(), digests, views)
                nursery.cancel_scope.cancel()
        cancelled += scope.cancelled_caught
        before = [bytes(view) for view in views]
        lengths, failure = await pool.pull_small(
            tcp.copy(), digests, [memoryview(bytearray(30_000)) for _ in digests]
        )
        assert (lengths, failure) == ([30_000] * 100, None)
        assert [bytes(view) for view in views] == before, "written to after it was over"
    assert cancelled, "each read was over before its first turn"
    await until(lambda: nothing_is_lent(tcp.segment))


@pytest.mark.parametrize("tls", [False, True])
async def test_values_that_change_all_the_time_are_read_right_or_not_at_all(tls: bool) -> None:
    """In batches and one by one, answered in threads and by the event loop, by two threads of readers."""
    keys = [key_name(0, number) for number in range(KEYS_PER_PEER)]
    digests = [key_digest(key) for key in keys]
    segment = segment_of(2 * MIB)  # less than the values need
    read = {"together": 0, "alone": 0}
    wrong: list[str] = []

    def compare(how: str, key: str, view: memoryview) -> None:
        if not is_right(key, view):
            wrong.append(f"{key}, {how}: {len(view):,} bytes")
        read[how] += 1

    def read_for_a_while(pool: ConnectionPool, copy: RemoteCopy, rng: Random) -> None:
        views = [memoryview(bytearray(300_000)) for _ in keys]
        deadline = time.monotonic() + 30
        while min(read.values()) < 500 and time.monotonic() < deadline:
            lengths, failure = run_blocking(pool.pull_small(copy, digests, views))
            assert failure is None
            for key, view, length in zip(keys, views, lengths, strict=True):
                if length >= 0:
                    compare("together", key, view[:length])
            for _ in range(len(keys)):
                key, view = rng.choice(keys), views[0]
                (length,), _ = run_blocking(pool.pull_small(copy, [key_digest(key)], [view]))
                if length >= 0:
                    compare("alone", key, view[:length])

    async def change(rng: Random) -> None:
        while True:
            key, number = rng.choice(keys), rng.getrandbits(63)
            segment.remove(key_digest(key))
            if len(value := value_of(key, number)) <= 300_000:
                with contextlib.suppress(CapacityExceeded):
                    put(segment, key, value)
            segment.objects.expire(time.time())
            await trio.lowlevel.checkpoint()

    async with TcpHarness.open(segment, tls=tls) as harness, trio.open_nursery() as changing:
        changing.start_soon(change, Random(1))
        async with trio.open_nursery() as readers:
            for seed in range(2):
                pool = harness.pool(BlockingDriver())
                work = partial(read_for_a_while, pool, harness.copy(), Random(seed))
                readers.start_soon(trio.to_thread.run_sync, work)
        changing.cancel_scope.cancel()
        assert wrong == []
        assert min(read.values()) >= 500
        # An answer is with its reader before the thread that sent it ends the loan.
        await until(lambda: nothing_is_lent(segment))
        check_segment(segment)
