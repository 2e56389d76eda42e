"""Data servers and readers with TLS: pairs of TLS and plain, strangers, and relays in between. That reading works as
without TLS is in `test_transport`, and the byte stream in `test_tls_streams`."""

import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import trio

from p2pstore.errors import AuthenticationFailed, ProtocolMismatch, Unavailable
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.streams import ByteStream
from p2pstore.runtime.trio_streams import TrioDriver, TrioStream
from p2pstore.transfer.data_messages import (
    TLS_SCHEME,
    DataKind,
    Ping,
    Pong,
    over_tls,
    split_data_address,
)
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.connection_pool import ConnectionPool, open_connection
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.tls_streams import MAX_HANDSHAKE_BYTES, dial_tls
from p2pstore.transfer.transport import BufferDestination, pull_with_failover
from p2pstore.wire import Code, encode_frame
from tests.contract.sides import Side
from tests.contract.test_transport import (
    OWNER,
    READER,
    TcpHarness,
    assert_closed,
    cancelled_at_step,
    caught_log,
    connect,
    grant,
    pattern,
    put,
    raw_server,
    read_frame,
    segment_of,
)
from tests.waiting import until

TRIO = Side("trio", TrioDriver())


@pytest.fixture
async def harness() -> AsyncIterator[TcpHarness]:
    async with TcpHarness.open(segment_of(4 * MIB), tls=True) as opened:
        yield opened


def plain(address: str) -> str:
    """The same place without TLS."""
    return address.removeprefix(TLS_SCHEME)


async def ping(harness: TcpHarness, side: Side, address: str, peer_id: bytes) -> object:
    pool = harness.pool(side.driver)
    peer = replace(harness.copy(), data=(address,), peer_id=peer_id)
    with contextlib.closing(pool):
        return await side.run(lambda: pool.request(peer, DataKind.PING, Ping()))


# --- who meets whom ------------------------------------------------------------------------------


async def test_the_peer_that_was_wanted_answers(harness: TcpHarness, side: Side) -> None:
    assert await ping(harness, side, harness.address, OWNER.peer_id) == Pong(7, 42)


async def test_another_peer_answers(harness: TcpHarness, side: Side) -> None:
    """Though it has the cluster's key, so that its proof would be good."""
    with pytest.raises(AuthenticationFailed, match="certificate is another peer's"):
        await ping(harness, side, harness.address, READER.peer_id)


async def test_a_plain_reader_is_told_to_use_tls(harness: TcpHarness, side: Side) -> None:
    with caught_log() as lines:
        with pytest.raises(ProtocolMismatch, match="takes data connections over TLS only"):
            await ping(harness, side, plain(harness.address), OWNER.peer_id)
        await until(lambda: harness.server.connections == 0)
    assert len(lines) == 1


async def test_a_reader_with_tls_at_a_plain_port(side: Side) -> None:
    async with TcpHarness.open(segment_of(4 * MIB)) as harness:
        with caught_log() as lines:
            with pytest.raises(Unavailable, match="may speak no TLS"):
                await ping(harness, side, over_tls(harness.address), OWNER.peer_id)
            await until(lambda: harness.server.connections == 0)
        assert len(lines) == 1
        assert "not a p2pstore data connection" in lines[0]


async def test_of_two_forms_of_address_the_known_one_is_used(harness: TcpHarness, side: Side) -> None:
    """So peers can get further forms: a reader that does not know one passes it over."""
    unknown = harness.address.replace("tls", "quic")
    peer = replace(harness.copy(), data=(unknown, harness.address))
    pool = harness.pool(side.driver)
    assert await side.run(lambda: pool.request(peer, DataKind.PING, Ping())) == Pong(7, 42)
    with pytest.raises(Unavailable, match="quic://"):
        await ping(harness, side, unknown, OWNER.peer_id)


async def test_a_reader_fails_over_from_tls_to_plain_and_back(harness: TcpHarness, side: Side) -> None:
    value = pattern(2 * MIB + 3)
    async with TcpHarness.open(segment_of(8 * MIB)) as other:
        digest = put(other.segment, "key", value)
        for first, second in (
            (over_tls(other.address), other.address),
            (plain(harness.address), other.address),
        ):
            copies = [
                replace(other.copy(), peer_id=bytes([number]), data=(address,), member=number)
                for number, address in enumerate((first, second))
            ]
            buffer = bytearray(len(value))
            transport = other.transport(side.driver)
            report = await side.run(
                lambda copies=copies, buffer=buffer, transport=transport: pull_with_failover(  # type: ignore[misc]  # mypy: defaults of a lambda
                    copies, [transport], digest, BufferDestination(buffer)
                )
            )
            assert report.copy is copies[1]
            assert buffer == value


# --- relays in between ---------------------------------------------------------------------------


async def test_a_relay_from_plain_to_tls_proves_nothing(harness: TcpHarness, side: Side) -> None:
    """It answers where a peer was reached plainly before, and passes on what is said over its own TLS."""

    async def relay(stream: TrioStream) -> None:
        inner = await connect(plain(harness.address))
        other, _ = await dial_tls(inner, OWNER.peer_id, grant())
        with contextlib.closing(other):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on, stream, other)
                nursery.start_soon(pass_on, other, stream)

    async def pass_on(source: ByteStream, target: ByteStream) -> None:
        view = memoryview(bytearray(64 * KIB))
        with contextlib.suppress(OSError):
            while count := await source.receive_into(view):
                await target.send(view[:count])
        target.close()

    async with raw_server(relay) as address:
        with pytest.raises(AuthenticationFailed, match="did not prove"):
            await ping(harness, side, address, OWNER.peer_id)


async def test_a_proof_for_another_certificate_is_refused(harness: TcpHarness) -> None:
    """The server's end of the same: a secret that was not bound to its certificate."""
    stream = await connect(plain(harness.address))
    secured, bound = await dial_tls(stream, OWNER.peer_id, grant())
    assert bound.secret != grant().secret
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        await DataConnection.open(secured, grant())
    assert secured.fileno() == -1


# --- strangers -----------------------------------------------------------------------------------


def hello_of(version: ssl.TLSVersion) -> bytes:
    """The first message of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = hello_of(ssl.TLSVersion.TLSv1_3)
GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nearly a preface": b"P2PSTORX" + bytes(100),
    "a record of noise": b"\x16\x03\x01\x01\x00" + os.urandom(256),
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a long handshake": b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(2 * MAX_HANDSHAKE_BYTES),
    "another version": hello_of(ssl.TLSVersion.TLSv1_2),
    "a hello and noise": HELLO + os.urandom(500),
    "a hello twice": HELLO * 2,
}


@pytest.mark.parametrize("name", sorted(GARBAGE))
async def test_garbage_ends_its_connection_only(harness: TcpHarness, name: str) -> None:
    stream = await connect(plain(harness.address))
    with caught_log() as lines:
        with contextlib.suppress(ConnectionError):
            await stream.send(GARBAGE[name])
        await assert_closed(stream)
        await until(lambda: harness.server.connections == 0)
    assert len(lines) <= 1
    assert await ping(harness, TRIO, harness.address, OWNER.peer_id) == Pong(7, 42)


@pytest.mark.parametrize("said", [b"", HELLO[:1], HELLO[:100], HELLO], ids=len)
async def test_a_handshake_that_stalls_is_cut_with_the_hello(said: bytes) -> None:
    limits = ServerLimits(hello_seconds=0.1)
    async with TcpHarness.open(segment_of(4 * MIB), limits, tls=True) as harness:
        stream = await connect(plain(harness.address))
        with caught_log() as lines:
            if said:
                await stream.send(said)
            await assert_closed(stream)
            await until(lambda: harness.server.connections == 0)
        assert ["no hello within 0.1 s" in line for line in lines] == [True]


async def test_strangers_with_tls_are_limited_as_others() -> None:
    limits = ServerLimits(unproved_per_address=2)
    async with TcpHarness.open(segment_of(4 * MIB), limits, tls=True) as harness:
        waiting = []
        for _ in range(2):
            waiting.append(
                (await dial_tls(await connect(plain(harness.address)), OWNER.peer_id, grant()))[0]
            )
        third = await connect(plain(harness.address))
        await assert_closed(third)
        assert harness.server.connections == 2
        for stream in waiting:
            stream.close()


async def opened(harness: TcpHarness) -> tuple[ByteStream, DataConnection]:
    """A connection after a good hello, and the stream that its records travel on."""
    inner = await connect(plain(harness.address))
    at = split_data_address(harness.address)
    return inner, await open_connection(inner, at, OWNER.peer_id, grant())


async def test_idle_connections_are_closed() -> None:
    limits = ServerLimits(idle_seconds=0.05)
    async with TcpHarness.open(segment_of(4 * MIB), limits, tls=True) as harness:
        _, connection = await opened(harness)
        await assert_closed(connection.stream)


@pytest.mark.parametrize("said", [b"\x17", b"\x17\x03\x03\x00\x50" + bytes(40)], ids=len)
async def test_half_a_record_is_waited_for_only_so_long(said: bytes) -> None:
    limits = ServerLimits(progress_seconds=0.05)
    async with TcpHarness.open(segment_of(4 * MIB), limits, tls=True) as harness:
        inner, connection = await opened(harness)
        assert await connection.request(DataKind.PING, Ping()) == Pong(7, 42)
        with caught_log() as lines:
            await inner.send(said)
            await assert_closed(inner)
            await until(lambda: harness.server.connections == 0)
        assert ["made no progress for 0.05 s" in line for line in lines] == [True]


async def test_requests_that_arrive_together_are_all_answered(harness: TcpHarness) -> None:
    """Also those that wait as received, but not decrypted, when the first ones are taken."""
    _, connection = await opened(harness)
    pings = [encode_frame(DataKind.PING, number, Ping()) for number in range(20_000)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.stream.send, b"".join(pings))
        answered = 0
        with trio.fail_after(20):
            while answered < len(pings):
                kind, *_ = await read_frame(connection.stream)
                assert kind == DataKind.PING
                answered += 1
    connection.close()


async def test_garbage_inside_tls_ends_its_connection_only(harness: TcpHarness) -> None:
    stream, _ = await dial_tls(await connect(plain(harness.address)), OWNER.peer_id, grant())
    await stream.send(b"GET / HTTP/1.1\r\n\r\n")
    await assert_closed(stream)
    await until(lambda: harness.server.connections == 0)
    assert await ping(harness, TRIO, harness.address, OWNER.peer_id) == Pong(7, 42)


async def test_a_refusal_inside_tls_is_heard(harness: TcpHarness, side: Side) -> None:
    pool = harness.pool(side.driver)
    peer = replace(harness.copy(), ticket=grant(audience=READER.peer_id))
    with pytest.raises(AuthenticationFailed, match="for another peer"):
        await side.run(lambda: pool.request(peer, DataKind.PING, Ping()))


# --- cancellation --------------------------------------------------------------------------------


async def test_who_is_cancelled_in_the_handshake_leaves_nothing(harness: TcpHarness) -> None:
    """At each checkpoint, under trio; `CancellingDriver` of `test_transport` does it at each call."""
    at = split_data_address(harness.address)
    task, steps, done = trio.lowlevel.current_task(), 0, False
    while not done:
        steps += 1
        stream = await connect(plain(harness.address))
        with trio.CancelScope() as scope, cancelled_at_step(task.name, steps, scope) as counter:
            connection = await open_connection(stream, at, OWNER.peer_id, grant())
            done = counter.steps < steps
            connection.close()
        assert stream.fileno() == -1
        await until(lambda: harness.server.connections == 0)
    assert steps > 2


async def test_a_holder_that_hangs_in_the_handshake_fails_over(side: Side) -> None:
    value = pattern(1000)

    async def hang(stream: TrioStream) -> None:
        await trio.sleep_forever()

    async with raw_server(hang) as silence, TcpHarness.open(segment_of(4 * MIB)) as good:
        digest = put(good.segment, "key", value)
        hung = replace(good.copy(), peer_id=READER.peer_id, data=(over_tls(silence),))
        pool = ConnectionPool(side.driver, connect_seconds=0.1)
        buffer = bytearray(len(value))
        with pytest.raises(PullFailed) as caught:
            await side.run(lambda: pool.pull(hung, digest, BufferDestination(buffer)))
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        assert pool.open_connections == 0
        pool.close()
