"""Objects of a chunk at most, read one by one, and reads that follow one another so closely that a thread of the
holder answers them."""

import time
from collections.abc import AsyncIterator

import pytest
import trio

from p2pstore.objects import MIB, key_digest
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, Ping, Pong, split_data_address
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.serving.read_thread import BRISK_READS
from p2pstore.transfer.transport import BufferDestination
from p2pstore.wire import Code
from tests.contract.sides import Side
from tests.contract.test_transport import SEGMENT_BYTES, TcpHarness, _buffers, pattern, put, segment_of
from tests.waiting import until

LENGTHS = [1, 4095, 4096, 65_536, 65_537, MIB - 1, MIB]


@pytest.fixture(params=["tcp", "tls"])
async def holder(request: pytest.FixtureRequest) -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES), tls=request.param == "tls") as opened:
        yield opened


async def connect(pool: ConnectionPool, holder: TcpHarness) -> None:
    assert await pool.request(holder.copy(), DataKind.PING, Ping()) == Pong(7, 42)


async def read_one(pool: ConnectionPool, holder: TcpHarness, digest: bytes, view: memoryview) -> int:
    """The length; -1 where `pull` is to say more."""
    (length,), failure = await pool.pull_small(holder.copy(), [digest], [view[:MIB]])
    assert failure is None
    return length


async def test_values_of_every_length_come_the_short_way(holder: TcpHarness, side: Side) -> None:
    pool = holder.pool(side.driver)
    values = {f"key {length}": pattern(length) for length in LENGTHS}
    digests = {put(holder.segment, key, value): value for key, value in values.items()}

    threads: list[int] = []

    async def read() -> None:
        for _ in range(BRISK_READS):  # in the end from a thread, where there is no TLS
            for digest, value in digests.items():
                buffer = bytearray(b"\xaa") * (len(value) + 10)
                view = memoryview(buffer)
                length = await read_one(pool, holder, digest, view)
                assert length == len(value)
                assert buffer == value + b"\xaa" * 10
        threads.append(holder.server.traffic.read_threads)

    await side.run(read)
    assert threads == [0 if split_data_address(holder.address).tls else 1]
    await until(lambda: len(holder.backend.noted) == BRISK_READS * len(LENGTHS))
    assert pool.open_connections == 1


async def test_what_takes_the_long_way(holder: TcpHarness, side: Side) -> None:
    pool = holder.pool(side.driver)
    long, empty, whole = (
        put(holder.segment, f"key {length}", pattern(length)) for length in (MIB + 1, 0, 5000)
    )
    room = memoryview(bytearray(2 * MIB))

    async def read() -> None:
        await connect(pool, holder)
        for digest, view in ((long, room), (empty, room), (whole, room[:4999])):
            assert await read_one(pool, holder, digest, view) == -1
        assert not any(bytes(room)), "nothing was written of what does not come whole"
        assert await read_one(pool, holder, key_digest("absent"), room) == -1
        assert await read_one(pool, holder, whole, room) == 5000

    await side.run(read)
    assert bytes(room[:5000]) == pattern(5000)
    assert pool.open_connections == 1


@pytest.mark.parametrize("length", [5000, MIB])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_damage_is_refused(tcp: TcpHarness, length: int, in_thread: bool) -> None:
    pool = tcp.pool(TrioDriver())
    digest = put(tcp.segment, "key", pattern(length))
    entry = tcp.segment.find(digest, time.time())
    assert entry is not None
    view = memoryview(bytearray(length))
    await connect(pool, tcp)
    for _ in range(3 * BRISK_READS if in_thread else 1):
        assert await read_one(pool, tcp, digest, view) == length
    memory = _buffers[SEGMENT_BYTES]
    slot = tcp.segment.geometry.slots_offset + entry.slot * 64
    for place in (entry.offset + length - 1, slot + 40, slot + 63):
        memory[place] ^= 1
        lengths, failure = await pool.pull_small(tcp.copy(), [digest], [view])
        assert lengths == [-1] or failure is not None
        with pytest.raises(PullFailed) as caught:
            await pool.pull(tcp.copy(), digest, BufferDestination(bytearray(length)))
        assert caught.value.code is Code.STALE
        memory[place] ^= 1
        assert pool.open_connections == 0  # a peer that sends that is not trusted with the next request
    assert await read_one(pool, tcp, digest, view) == length


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


async def brisk(tcp: TcpHarness, pool: ConnectionPool) -> bytes:
    """A connection of this pool is served by a thread now; the values that were read for that."""
    digest = put(tcp.segment, "key", pattern(5000))
    view = memoryview(bytearray(5000))
    await connect(pool, tcp)
    with trio.fail_after(20):
        while not tcp.server.traffic.read_threads:
            assert await read_one(pool, tcp, digest, view) == 5000
    return digest


async def test_other_requests_in_between(tcp: TcpHarness) -> None:
    """The connection goes to a thread and back, as often as need be; nothing is lost or answered twice."""
    pool = tcp.pool(TrioDriver())
    digest = await brisk(tcp, pool)
    large = put(tcp.segment, "large", pattern(3 * MIB))
    view = memoryview(bytearray(5000))
    for round_number in range(3):
        assert await pool.request(tcp.copy(), DataKind.PING, Ping()) == Pong(7, 42)
        assert await read_one(pool, tcp, key_digest("absent"), view) == -1
        buffer = bytearray(3 * MIB)
        await pool.pull(tcp.copy(), large, BufferDestination(buffer))
        assert buffer == pattern(3 * MIB)
        for _ in range(3 * BRISK_READS):
            view[:] = bytes(5000)
            assert await read_one(pool, tcp, digest, view) == 5000
            assert view == pattern(5000)
        assert pool.open_connections == 1, round_number


async def test_a_removed_object_is_gone_for_threads_as_well(tcp: TcpHarness) -> None:
    pool = tcp.pool(TrioDriver())
    digest = await brisk(tcp, pool)
    tcp.segment.remove(digest)
    assert await read_one(pool, tcp, digest, memoryview(bytearray(5000))) == -1


async def test_the_thread_ends_with_its_reader_and_with_the_server(tcp: TcpHarness) -> None:
    pool = tcp.pool(TrioDriver())
    await brisk(tcp, pool)
    pool.close()
    await until(lambda: tcp.server.connections == 0 and tcp.server.traffic.read_threads == 0)
    await brisk(tcp, tcp.pool(TrioDriver()))
    began = trio.current_time()
    tcp.stop.cancel()
    await until(lambda: tcp.server.connections == 0)
    assert trio.current_time() - began < 5


async def test_a_reader_cancelled_while_it_waits_for_a_thread_leaves_nothing(tcp: TcpHarness) -> None:
    pool = tcp.pool(TrioDriver())
    digest = await brisk(tcp, pool)
    view = memoryview(bytearray(5000))
    for turns in range(6):
        async with trio.open_nursery() as nursery:

            async def cancel_after(turns: int, scope: trio.CancelScope) -> None:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(cancel_after, turns, nursery.cancel_scope)
            await read_one(pool, tcp, digest, view)
        await connect(pool, tcp)
        assert await read_one(pool, tcp, digest, view) == 5000
        assert view == pattern(5000)


async def test_a_key_that_goes_ends_threads_too(tcp: TcpHarness) -> None:
    """`retire` is how a connection ends whose ticket would not be taken any more."""
    pool = tcp.pool(TrioDriver())
    digest = await brisk(tcp, pool)
    (session,) = tcp.server._sessions
    session.retire()
    view = memoryview(bytearray(5000))
    await until(lambda: tcp.server.connections == 0)
    await connect(pool, tcp)
    assert await read_one(pool, tcp, digest, view) == 5000
