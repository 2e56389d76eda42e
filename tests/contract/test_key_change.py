"""Data connections when the keys change under them: requests under way are finished, and then they end."""

import os
from collections.abc import AsyncIterator

import pytest
import trio

from p2pstore.access.keyring import KeyRing
from p2pstore.gossip.links.identity import Identity
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, Ping
from p2pstore.transfer.peer_messages import Replicate, Replicated
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving import data_server
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.transfer.transport import RemotePeer
from tests.contract import test_transport as transport
from tests.contract.test_transport import OWNER, RING, TcpHarness, grant, segment_of
from tests.waiting import until

NEW_KEY = b"N" * 32


@pytest.fixture
async def tcp() -> AsyncIterator[TcpHarness]:
    """A data server whose ring is put back in the end."""
    keys = RING.keys
    try:
        async with TcpHarness.open(segment_of(1024 * 1024)) as harness:
            yield harness
    finally:
        RING.replace(keys)


async def connected(tcp: TcpHarness) -> DataConnection:
    host, port = tcp.address.split(":")
    stream = await TrioDriver().connect_tcp(host, int(port), 5.0)
    return await DataConnection.open(stream, grant(scope=Scope.READ | Scope.PEER))


async def ended(connection: DataConnection, seconds: float) -> None:
    with trio.fail_after(seconds):
        assert await connection.stream.receive_into(memoryview(bytearray(1))) == 0
    connection.close()


async def test_a_key_that_is_still_accepted_ends_nothing(tcp: TcpHarness) -> None:
    connection = await connected(tcp)
    kept = RING.keys
    RING.replace([NEW_KEY, *kept])
    removed = await connected(tcp)
    RING.replace(kept)
    tcp.server.recheck()
    await ended(removed, 2)
    await connection.request(DataKind.PING, Ping())
    connection.close()


async def test_idle_connections_of_a_removed_key_end_at_once(tcp: TcpHarness) -> None:
    connections = [await connected(tcp) for _ in range(3)]
    RING.replace([NEW_KEY])
    tcp.server.recheck()
    for connection in connections:
        await ended(connection, 2)


async def test_what_is_under_way_is_answered_first(tcp: TcpHarness) -> None:
    connection, idle = await connected(tcp), await connected(tcp)
    answers: list[object] = []

    async def ask() -> None:
        answers.append(await connection.request(DataKind.REPLICATE, Replicate(bytes(16), 5, 6, 7)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: tcp.backend.waiting)
        RING.replace([NEW_KEY])
        tcp.server.recheck()
        await ended(idle, 2)
        tcp.backend.release.set()
    assert answers == [Replicated(5, 6)]
    await ended(connection, 2)


async def test_nothing_is_under_way_for_ever(tcp: TcpHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that goes on asking, or waits for a slow answer, is cut off."""
    monkeypatch.setattr(data_server, "RETIRE_SECONDS", 0.6)
    busy, waiting = await connected(tcp), await connected(tcp)

    async def wait() -> None:
        with pytest.raises(ConnectionError):
            await waiting.request(DataKind.REPLICATE, Replicate(bytes(16), 5, 6, 7))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await until(lambda: tcp.backend.waiting)
        RING.replace([NEW_KEY])
        tcp.server.recheck()
        begin = trio.current_time()
        with pytest.raises(ConnectionError), trio.fail_after(60):
            while True:
                await busy.request(DataKind.PING, Ping())
                await trio.sleep(0.01)
        assert trio.current_time() - begin < 2
    busy.close()
    waiting.close()
    assert not tcp.backend.waiting


async def test_new_tickets_and_connections_are_made_with_the_new_key(tcp: TcpHarness) -> None:
    """A pool that is told of the change leaves nothing that depends on the old key."""
    ring = KeyRing([transport.RING.keys[0]])
    identity = Identity(os.urandom(32))
    issuer = TicketIssuer(identity, ring)
    first = issuer.ticket(OWNER.peer_id, Scope.READ)
    assert issuer.ticket(OWNER.peer_id, Scope.READ) is first
    ring.replace([NEW_KEY, *ring.keys])
    issuer.renew()
    assert issuer.ticket(OWNER.peer_id, Scope.READ) is not first

    pool = tcp.pool(TrioDriver())
    remote = RemotePeer(OWNER.peer_id, (tcp.address,), grant())
    await pool.request(remote, DataKind.PING, Ping(), DEFAULT_PROGRESS_SECONDS)
    [[place]] = pool._peers.values()
    kept = place.connection
    await pool.request(remote, DataKind.PING, Ping())
    assert place.connection is kept
    before = trio.current_time()
    while trio.current_time() == before:  # a clock that stands still would hide the order
        await trio.lowlevel.checkpoint()
    pool.renew()
    await pool.request(remote, DataKind.PING, Ping())
    [[place]] = pool._peers.values()
    assert place.connection is not kept
