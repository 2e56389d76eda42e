"""MEASURE, the doctor's request: exact sizes both ways, limits, and who may ask."""

import time
from collections.abc import AsyncIterator, Callable

import pytest
import trio

from p2pstore.errors import AuthenticationFailed, P2PStoreError, Unavailable
from p2pstore.objects import MIB
from p2pstore.runtime.streams import Driver
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import (
    MAX_MEASURE_BYTES,
    REQUESTS,
    DataKind,
    Measure,
    Measured,
    Ping,
    Pong,
)
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving.serving_limits import ServerLimits
from tests.contract.sides import Side
from tests.contract.test_transport import TcpHarness, grant, segment_of

EVERYTHING = Scope.READ | Scope.PEER
NOTHING = memoryview(b"")


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(4 * MIB)) as opened:
        yield opened


async def connect(harness: TcpHarness, driver: Driver, scope: Scope = EVERYTHING) -> DataConnection:
    host, _, port = harness.address.rpartition(":")
    stream = await driver.connect_tcp(host, int(port), 5.0)
    return await DataConnection.open(stream, grant(scope=scope))


def after(count: int) -> Callable[[], bool]:
    """Enough once it was asked `count` times, and from then on."""
    left = iter(range(count))
    return lambda: next(left, None) is None


@pytest.mark.parametrize(
    ("sent", "received"), [(0, 0), (0, 1), (0, 3 * MIB + 5), (MAX_MEASURE_BYTES, 0), (70_001, 100_003)]
)
async def test_exactly_what_was_asked_moves(
    tcp: TcpHarness, side: Side, sent: int, received: int
) -> None:
    async def measure() -> tuple[int, Measured | None]:
        connection = await connect(tcp, side.driver)
        target = memoryview(bytearray(received))
        await connection.measure(memoryview(bytes(sent)), target, after(7))  # ends with one ahead
        result = await connection.measure(memoryview(bytes(sent)), target, after(8))
        assert isinstance(
            await connection.request(DataKind.PING, Ping()), Pong
        )  # it is still good for others
        connection.close()
        return result

    moved, last = await side.run(measure)
    assert last is not None
    assert last.received_bytes == sent
    assert abs(last.unix_ms / 1000 - time.time()) < 60
    assert moved % max(1, sent + received) == 0
    assert (moved > 0) is (sent + received > 0)


async def test_nothing_is_asked_when_it_is_enough_already(tcp: TcpHarness) -> None:
    connection = await connect(tcp, TrioDriver())
    assert await connection.measure(NOTHING, NOTHING, lambda: True) == (0, None)
    connection.close()


async def test_only_peers_may_measure(tcp: TcpHarness) -> None:
    connection = await connect(tcp, TrioDriver(), Scope.READ)
    with pytest.raises(AuthenticationFailed, match="MEASURE"):
        await connection.request(DataKind.MEASURE, Measure())
    connection.close()


@pytest.mark.parametrize("size", [-1, MAX_MEASURE_BYTES + 1, 2**63])
async def test_sizes_have_a_cap(tcp: TcpHarness, size: int) -> None:
    connection = await connect(tcp, TrioDriver())
    with pytest.raises(ValueError, match="no size for a measurement"):
        await connection.request(DataKind.MEASURE, Measure(size))
    assert isinstance(await connection.request(DataKind.PING, Ping()), Pong)
    connection.close()


async def test_a_connection_measures_only_so_much() -> None:
    limits = ServerLimits(measured_bytes=3 * MIB)
    async with TcpHarness.open(segment_of(4 * MIB), limits) as harness:
        connection = await connect(harness, TrioDriver())
        target = memoryview(bytearray(MIB))
        with pytest.raises(Unavailable, match="enough"), trio.fail_after(60):
            await connection.measure(NOTHING, target, lambda: False)
        fresh = await connect(harness, TrioDriver())
        with pytest.raises(Unavailable, match="enough"), trio.fail_after(60):
            await fresh.measure(target, NOTHING, lambda: False)


async def test_an_older_peer_says_that_it_does_not_measure(
    tcp: TcpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(REQUESTS, DataKind.MEASURE)
    connection = await connect(tcp, TrioDriver())
    with pytest.raises(P2PStoreError, match="unknown to this version"):
        await connection.request(DataKind.MEASURE, Measure())
    connection.close()
