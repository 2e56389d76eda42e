"""Storing values over data connections: a real server, real sockets, all three drivers."""

import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import trio

from p2pstore.errors import (
    AuthenticationFailed,
    CapacityExceeded,
    DeadlineExceeded,
    ObjectTooLarge,
    P2PStoreError,
    ProtocolMismatch,
    Unavailable,
)
from p2pstore.memory.entries import Written
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import TrailerBody, encode_trailer
from p2pstore.objects import CHUNK_BYTES, MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.transfer.data_messages import (
    WRITE_KINDS,
    DataKind,
    Ping,
    Pong,
    Store,
    Stored,
    StorePart,
    StoreReply,
)
from p2pstore.transfer.read_tickets import Scope, TicketClaims
from p2pstore.transfer.serving.serving_backends import OpenedStore
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import HEADER, ONE_WAY, REPLY, Code, Failure, decode_body, encode_frame
from simulation.segment_checks import check_segment
from tests.contract.sides import Side
from tests.contract.test_transport import (
    SEGMENT_BYTES,
    CancellingDriver,
    TcpHarness,
    assert_closed,
    authenticated,
    caught_log,
    grant,
    pattern,
    read_frame,
    segment_of,
)
from tests.waiting import until

STORED = Stored(0, 1, 1, 5, 6, 7, 42, b"record")


class Stores:
    """Puts what arrives into a segment; the rules of a peer are tested elsewhere."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.requests: list[Store] = []
        self.open: list[OpenedStore] = []
        self.error: Exception | None = None
        self.decided: Stored | None = None
        self.finish_seconds = 0.0

    async def begin_store(self, request: Store, claims: TicketClaims) -> OpenedStore | Stored:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if self.decided is not None:
            return self.decided
        session = object()
        trailer = TrailerBody(request.namespace, request.key, request.sums)
        reservation = self.segment.reserve(
            request.length, len(encode_trailer(trailer)), session=session, now=time.time()
        )
        view = self.segment.reservation_view(reservation.number, session)
        opened = OpenedStore(view, request.sums, (request, trailer, reservation.number, session))
        self.open.append(opened)
        return opened

    async def finish_store(self, opened: OpenedStore) -> Stored:
        await trio.sleep(self.finish_seconds)
        request, trailer, number, session = opened.handle
        self.segment.commit(
            Written(
                number,
                key_digest(request.key, request.namespace),
                Version(5, 6, request.root),
                trailer,
                request.length,
            ),
            session=session,
            soft=False,
            now=time.time(),
        )
        return STORED

    def abandon_store(self, opened: OpenedStore) -> None:
        self.open.remove(opened)
        self.segment.drop_session(opened.handle[-1])

    def value(self, key: str = "k") -> bytes | None:
        entry = self.segment.find(key_digest(key), time.time())
        return None if entry is None else bytes(self.segment.payload(entry))


@contextlib.asynccontextmanager
async def storing(
    limits: ServerLimits | None = None, *, tls: bool = False
) -> AsyncIterator[tuple[TcpHarness, Stores]]:
    """A server that takes values; at its end nothing is held."""
    segment = segment_of(SEGMENT_BYTES)
    stores = Stores(segment)
    async with TcpHarness.open(segment, limits, stores, tls=tls) as harness:
        yield harness, stores
    assert stores.open == []
    used = sum(entry.extent_bytes for entry in segment.entries())
    assert segment.used_bytes == used, "a reservation was left behind"
    check_segment(segment)


@pytest.fixture
async def tcp() -> AsyncIterator[tuple[TcpHarness, Stores]]:
    async with storing() as opened:
        yield opened


def store_request(value: bytes, key: str = "k") -> Store:
    sums = chunk_sums(value)
    return Store("default", key, len(value), sums, root_checksum(len(value), sums), 0)


def writer(harness: TcpHarness, scope: Scope = Scope.WRITE) -> RemoteCopy:
    return replace(harness.copy(), ticket=grant(scope))


async def store(
    harness: TcpHarness, side: Side, value: bytes, announced: bytes | None = None, **options: Any
) -> Stored:
    pool = harness.pool(side.driver, options.pop("progress_seconds", 5.0))
    request = store_request(value if announced is None else announced)
    return await side.run(lambda: pool.store(writer(harness), request, memoryview(value), **options))


@pytest.mark.parametrize(
    "length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 16 * MIB, 17 * MIB + 13], ids=str
)
async def test_the_value_arrives_as_it_is(
    tcp: tuple[TcpHarness, Stores], side: Side, length: int
) -> None:
    harness, stores = tcp
    value = pattern(length)
    assert await store(harness, side, value) == STORED
    assert stores.value() == value


async def test_one_connection_stores_many_and_answers_other_requests(
    tcp: tuple[TcpHarness, Stores], side: Side
) -> None:
    harness, stores = tcp
    pool = harness.pool(side.driver)
    peer = writer(harness, Scope.WRITE | Scope.READ)
    values = {f"k{number}": pattern(number * 100_000, number) for number in range(12)}

    async def all_of_them() -> None:
        for key, value in values.items():
            assert await pool.store(peer, store_request(value, key), memoryview(value)) == STORED
            assert await pool.request(peer, DataKind.PING, Ping()) == Pong(7, 42)

    await side.run(all_of_them)
    assert harness.server.connections == 1
    assert {key: stores.value(key) for key in values} == values


async def test_what_needs_no_bytes_sends_none(tcp: tuple[TcpHarness, Stores], side: Side) -> None:
    harness, stores = tcp
    stores.decided = replace_status(STORED, 1)
    progress: list[int] = []
    outcome = await store(
        harness, side, pattern(8 * MIB), progress=lambda done, total: progress.append(done)
    )
    assert outcome == stores.decided
    assert progress == []


def replace_status(stored: Stored, status: int) -> Stored:
    return Stored(status, stored.copies, stored.wanted, stored.clock, stored.writer)


async def test_progress_is_told_part_by_part(tcp: tuple[TcpHarness, Stores], side: Side) -> None:
    harness, _ = tcp
    told: list[tuple[int, int]] = []
    length = 16 * MIB + 5
    await store(harness, side, pattern(length), progress=lambda done, total: told.append((done, total)))
    assert told == [(16 * MIB, length), (length, length)]


@pytest.mark.parametrize(
    "error", [CapacityExceeded("full"), ObjectTooLarge("huge"), ValueError("bad"), Unavailable("no")]
)
async def test_a_refusal_comes_before_any_byte_and_keeps_the_connection(
    tcp: tuple[TcpHarness, Stores], side: Side, error: Exception
) -> None:
    harness, stores = tcp
    stores.error = error
    pool = harness.pool(side.driver)
    value = pattern(4 * MIB)

    async def twice() -> None:
        told: list[int] = []
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                await pool.store(
                    writer(harness),
                    store_request(value),
                    memoryview(value),
                    progress=lambda done, total: told.append(done),
                )
        assert told == []

    await side.run(twice)
    assert harness.server.connections == 1
    assert len(stores.requests) == 2


@pytest.mark.parametrize("tls", [False, True])
async def test_a_value_that_changed_meanwhile_is_an_error_of_the_caller(tls: bool, side: Side) -> None:
    """Its reason arrives although sending failed before it could be read."""
    value = bytearray(pattern(20 * MIB))
    announced = bytes(value)
    value[3 * MIB] ^= 1
    async with storing(tls=tls) as (harness, stores):
        with caught_log() as lines:
            with pytest.raises(ValueError, match="chunk 3 is not the one that was announced"):
                await store(harness, side, bytes(value), announced)
            await until(lambda: harness.server.connections == 0)
        assert stores.value() is None
        assert len(lines) == 1
        assert await store(harness, side, announced) == STORED


async def test_an_internal_error_is_hidden(tcp: tuple[TcpHarness, Stores], side: Side) -> None:
    harness, stores = tcp
    stores.error = RuntimeError("secret")
    with caught_log() as lines, pytest.raises(P2PStoreError, match="internal error") as caught:
        await store(harness, side, b"value")
    assert "secret" not in str(caught.value)
    assert len(lines) == 1


async def test_a_put_that_takes_long_at_its_end_is_waited_for(
    tcp: tuple[TcpHarness, Stores], side: Side
) -> None:
    harness, stores = tcp
    stores.finish_seconds = 0.3
    stored = await store(harness, side, b"value", progress_seconds=0.1, finish_seconds=5.0)
    assert stored == STORED
    with pytest.raises(DeadlineExceeded):
        await store(harness, side, b"other", progress_seconds=0.1)


# --- who may -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [Scope.READ, Scope.PEER, Scope.READ | Scope.PEER])
async def test_only_a_ticket_to_write_stores(
    tcp: tuple[TcpHarness, Stores], side: Side, scope: Scope
) -> None:
    harness, stores = tcp
    pool = harness.pool(side.driver)
    with pytest.raises(AuthenticationFailed, match="does not allow STORE"):
        await side.run(lambda: pool.store(writer(harness, scope), store_request(b"v"), memoryview(b"v")))
    assert stores.requests == []


async def test_a_ticket_to_write_reads_nothing_and_is_no_peers(tcp: tuple[TcpHarness, Stores]) -> None:
    harness, _ = tcp
    stream = await authenticated(harness.address, grant(Scope.WRITE))
    for kind in DataKind:
        if kind in (DataKind.HELLO, DataKind.PROOF, *WRITE_KINDS):
            continue
        await stream.send(encode_frame(kind, 3, Ping()))
        *_, body, _ = await read_frame(stream)
        assert decode_body(Failure, body).code == Code.AUTHENTICATION_FAILED, kind
    stream.close()


async def test_a_server_that_takes_no_values_says_so(side: Side) -> None:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES)) as harness:
        with pytest.raises(ProtocolMismatch, match="unknown to this version"):
            await store(harness, side, b"value")


# --- what goes wrong on the way ----------------------------------------------------------------


async def begun(harness: TcpHarness, value: bytes) -> Any:
    """A raw stream on which room was made for a value."""
    stream = await authenticated(harness.address, grant(Scope.WRITE | Scope.READ))
    await stream.send(encode_frame(DataKind.STORE, 3, store_request(value)))
    kind, flags, _, body, _ = await read_frame(stream)
    assert (kind, flags, decode_body(StoreReply, body)) == (DataKind.STORE, REPLY, StoreReply(True))
    return stream


def part(offset: int, bulk: bytes, *, last: bool = False, kind: int = DataKind.STORE_PART) -> bytes:
    flags = 0 if last else ONE_WAY
    return encode_frame(kind, 4, StorePart(offset), flags=flags, bulk_length=len(bulk)) + bulk


VALUE = pattern(4 * MIB)
NONSENSE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "another request": encode_frame(DataKind.PING, 5, Ping()),
    "a second store": encode_frame(DataKind.STORE, 5, store_request(b"v", "other")),
    "a part out of order": part(2 * MIB, VALUE[2 * MIB :]),
    "a part that is too long": part(0, VALUE + bytes(MIB), last=True),
    "a part that is over the cap": HEADER.pack(DataKind.STORE_PART, 0, 4, 2, 16 * MIB + 1),
    "an empty part": part(0, b""),
    "a part that ends within a chunk": part(0, VALUE[: MIB + 1]),
    "wrong bytes": part(0, bytes(MIB)),
    "a body that is none": HEADER.pack(DataKind.STORE_PART, 0, 4, 3, 0) + b"\xc1\xc1\xc1",
    "a last part that wants no answer": part(0, VALUE),
    "an early part that wants one": part(0, VALUE[:MIB], last=True),
    "a reply": encode_frame(DataKind.STORE_PART, 4, StorePart(0), flags=REPLY),
}


@pytest.mark.parametrize("name", sorted(NONSENSE))
async def test_nonsense_in_the_middle_ends_its_connection_and_frees_the_room(
    tcp: tuple[TcpHarness, Stores], name: str
) -> None:
    harness, stores = tcp
    good = await authenticated(harness.address)
    with caught_log() as lines:
        stream = await begun(harness, VALUE)
        assert len(stores.open) == 1
        with contextlib.suppress(ConnectionError):
            await stream.send(NONSENSE[name])
        await assert_closed(stream)
        await until(lambda: harness.server.connections == 1)
    assert stores.open == []
    assert stores.value() is None
    assert len(lines) == 1, lines
    await good.send(encode_frame(DataKind.PING, 9, Ping()))
    assert (await read_frame(good))[:3] == (DataKind.PING, REPLY, 9)
    good.close()


@pytest.mark.parametrize(
    "frame",
    [
        part(0, b"x", last=True),
        part(0, b"x"),
        encode_frame(DataKind.STORE, 3, Ping()),
        encode_frame(DataKind.STORE, 3, store_request(b"v"), flags=ONE_WAY),
    ],
    ids=["a part without a store", "a one-way part", "a store of nothing", "a one-way store"],
)
async def test_nonsense_without_a_store_ends_its_connection(
    tcp: tuple[TcpHarness, Stores], frame: bytes
) -> None:
    harness, stores = tcp
    with caught_log():
        stream = await authenticated(harness.address, grant(Scope.WRITE))
        await stream.send(frame)
        await assert_closed(stream)
        await until(lambda: harness.server.connections == 0)
    assert stores.requests == []


async def test_a_broken_connection_frees_the_room(tcp: tuple[TcpHarness, Stores]) -> None:
    harness, stores = tcp
    for sent in (0, 10, MIB + 100, 3 * MIB):
        stream = await begun(harness, VALUE)
        await stream.send(part(0, VALUE, last=True)[:sent])
        stream.close()
        await until(lambda: harness.server.connections == 0)
        assert stores.open == []
    assert stores.value() is None


@pytest.mark.parametrize("sent", [0, 100, MIB + 100])
async def test_a_sender_that_stalls_is_cut(sent: int) -> None:
    async with storing(ServerLimits(progress_seconds=0.1)) as (harness, stores):
        with caught_log() as lines:
            stream = await begun(harness, VALUE)
            await stream.send(part(0, VALUE, last=True)[:sent])
            await until(lambda: stores.open == [] and harness.server.connections == 0)
            stream.close()
        assert "no progress" in lines[0]


async def test_a_sender_that_trickles_does_not_keep_its_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A byte now and then is progress for the connection, but not for the value. The sender's pace is in
    the test's own time, so that nothing is waited for."""
    limits = ServerLimits(progress_seconds=5.0, store_seconds=10.0, store_bytes_per_second=1e6)
    async with storing(limits) as (harness, stores):
        with caught_log() as lines:
            stream = await begun(harness, VALUE)
            begin = trio.current_time()
            frame = part(0, VALUE, last=True)
            with contextlib.suppress(ConnectionError):
                for position in range(1000):
                    await stream.send(frame[position : position + 1])
                    await trio.sleep(1.0)
                    if not stores.open:
                        break
            assert stores.open == []
            assert 10 <= trio.current_time() - begin <= 20
            stream.close()
        assert "did not arrive within 14.2 s" in lines[0]


async def test_a_storer_cancelled_at_each_step_leaves_nothing(tcp: tuple[TcpHarness, Stores]) -> None:
    harness, stores = tcp
    value = pattern(17 * MIB)
    for at in itertools.count(1):
        driver = CancellingDriver()
        driver.at = at
        pool = harness.pool(driver)
        done = False
        with driver.scope:
            await pool.store(writer(harness), store_request(value), memoryview(value))
            done = True
        if done and driver.calls < at:
            break
        await until(lambda: stores.open == [])
        driver.at, driver.scope = 0, trio.CancelScope()
        await pool.store(writer(harness), store_request(value, "next"), memoryview(value))
        harness.segment.remove(key_digest("next"))
        harness.segment.remove(key_digest("k"))
        pool.close()
        await until(lambda: harness.server.connections == 0)
    assert at > 6


async def test_a_server_that_stops_in_the_middle_frees_the_room() -> None:
    async with storing() as (harness, stores):
        stream = await begun(harness, VALUE)
        await stream.send(part(0, VALUE, last=True)[: 2 * MIB])
        harness.stop.cancel()
        await assert_closed(stream)
        await until(lambda: stores.open == [])


async def test_a_server_that_dies_in_the_middle_is_unavailable(side: Side) -> None:
    async with storing() as (harness, stores):
        stores.finish_seconds = 60.0

        async def stop_when_it_is_there() -> None:
            await until(lambda: len(stores.open) == 1)
            harness.stop.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_when_it_is_there)
            with pytest.raises(Unavailable, match="broke"):
                await store(harness, side, VALUE)


async def test_a_request_with_bulk_that_nobody_wants_is_answered_all_the_same(
    tcp: tuple[TcpHarness, Stores],
) -> None:
    """A kind of a newer version may carry bulk; so that it can be refused, its bulk is skipped."""
    harness, _ = tcp
    stream = await authenticated(harness.address, grant())
    bulk = pattern(200_000)
    await stream.send(
        HEADER.pack(999, 0, 1, 0, len(bulk)) + bulk,
        encode_frame(DataKind.PING, 2, Ping(), bulk_length=len(bulk)) + bulk,
    )
    *_, body, _ = await read_frame(stream)
    assert decode_body(Failure, body).code == Code.UNSUPPORTED
    assert (await read_frame(stream))[:3] == (DataKind.PING, REPLY, 2)
    stream.close()
