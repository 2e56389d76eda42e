"""TLS as a byte stream: what every `ByteStream` has to do, under trio, under asyncio and with blocking sockets."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from p2pstore.errors import AuthenticationFailed, DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.asyncio_streams import AsyncioStream
from p2pstore.runtime.streams import ByteStream
from p2pstore.runtime.trio_streams import TrioStream
from p2pstore.transfer.tls_streams import (
    MAX_HANDSHAKE_BYTES,
    MAX_RECEIVE_BYTES,
    RENEW_SECONDS,
    VALID_SECONDS,
    AcceptedTlsStream,
    TlsServing,
    TlsStream,
    check_certificate,
    dial_tls,
    dialling_context,
    make_certificate,
    serving_context,
)
from tests.contract.sides import DRIVERS, Side, in_asyncio, started
from tests.contract.test_transport import OWNER, grant, raw_server, read_exactly

Script = Callable[[AcceptedTlsStream], Awaitable[None]]
SIZES = [0, 1, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 300_000, 3 * MIB + 1]


@contextlib.asynccontextmanager
async def tls_server(script: Script) -> AsyncIterator[str]:
    serving = TlsServing(OWNER, time.time)

    async def accept(stream: TrioStream) -> None:
        await script(await serving.accept(stream))

    async with raw_server(accept) as address:
        yield address


async def dial(side: Side, address: str, progress_seconds: float = 5.0) -> TlsStream:
    host, _, port = address.rpartition(":")
    stream = await side.driver.connect_tcp(host, int(port), 5.0)
    stream.progress_seconds = progress_seconds
    secured, _ = await dial_tls(stream, OWNER.peer_id, grant())
    return secured


async def idle(stream: ByteStream) -> None:
    """Keep the connection and say nothing."""
    await trio.sleep_forever()


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["send", "send_whole"])
async def test_bytes_arrive_in_order_whatever_their_parts(side: Side, whole: bool) -> None:
    values = [os.urandom(size) for size in SIZES]
    total = sum(SIZES)
    received: list[bytes] = []

    async def echo(stream: AcceptedTlsStream) -> None:
        received.append(await read_exactly(stream, total))
        await stream.send(*[received[0][at : at + 70_001] for at in range(0, total, 70_001)])

    async def talk() -> bytes:
        stream = await dial(side, address)
        send = stream.send_whole if whole else stream.send
        await send(*values[:3], memoryview(values[3]))
        await send(*values[4:])
        await send()
        first = await read_exactly(stream, 1)
        answer = first + await read_exactly(stream, total - 1)
        assert await stream.receive_into(memoryview(bytearray(1))) == 0
        stream.close()
        stream.close()
        return answer

    async with tls_server(echo) as address:
        assert await side.run(talk) == b"".join(values) == received[0]


async def test_small_views_get_what_a_record_holds_bit_by_bit(side: Side) -> None:
    async def script(stream: AcceptedTlsStream) -> None:
        await stream.send(bytes(range(200)))
        await idle(stream)

    async def talk() -> bytes:
        stream = await dial(side, address)
        received = bytearray(200)
        for at in range(0, 200, 2):
            assert await stream.receive_into(memoryview(received)[at : at + 2]) == 2
        stream.close()
        return bytes(received)

    async with tls_server(script) as address:
        assert await side.run(talk) == bytes(range(200))


async def test_nothing_is_read_after_a_farewell() -> None:
    """Otherwise a stranger that goes on sending would fill the memory."""
    ended = trio.Event()

    async def script(stream: AcceptedTlsStream) -> None:
        view = memoryview(bytearray(100))
        assert await stream.receive_into(view) == 1
        for _ in range(10):
            assert await stream.receive_into(view) == 0
            await stream.wait_readable_forever()
        assert stream._incoming.pending < 2 * MAX_RECEIVE_BYTES
        ended.set()

    async with tls_server(script) as address:
        stream = await dial(Side("trio", DRIVERS["trio"]()), address)
        await stream.send(b"a")
        with pytest.raises(ssl.SSLWantReadError):
            stream._tls.unwrap()
        with trio.fail_after(60), contextlib.suppress(OSError):
            await stream._inner.send(stream._outgoing.read(), bytes(4_000_000))
        with trio.fail_after(60):
            await ended.wait()
        stream.close()


async def test_a_server_sees_what_it_has_received_but_not_read() -> None:
    """Else it would wait for a request that it holds already."""
    seen = trio.Event()

    async def script(stream: AcceptedTlsStream) -> None:
        view = memoryview(bytearray(1))
        assert await stream.receive_into(view) == 1
        for _ in range(2):
            await stream.wait_readable_forever()
            assert await stream.receive_into(view) == 1
        seen.set()
        await stream.wait_readable_forever()  # the end
        assert await stream.receive_into(view) == 0

    async with tls_server(script) as address:
        stream = await dial(Side("trio", DRIVERS["trio"]()), address)
        await stream.send(b"abc")
        with trio.fail_after(60):
            await seen.wait()
        stream.close()


async def test_one_task_sends_while_another_receives() -> None:
    value = os.urandom(8 * MIB)

    async def echo(stream: AcceptedTlsStream) -> None:
        view = memoryview(bytearray(100_000))
        while count := await stream.receive_into(view):
            await stream.send(view[:count])

    async with tls_server(echo) as address, trio.open_nursery() as nursery:
        stream = await dial(Side("trio", DRIVERS["trio"]()), address)
        nursery.start_soon(stream.send, value)
        with trio.fail_after(20):
            assert await read_exactly(stream, len(value)) == value
        stream.close()


# --- deadlines and ends --------------------------------------------------------------------------


async def test_silence_is_a_deadline(side: Side) -> None:
    async def talk() -> None:
        stream = await dial(side, address)
        stream.progress_seconds = 0.05
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await stream.receive_into(memoryview(bytearray(10)))
        stream.progress_seconds = 30
        stream.receive_seconds = 0.06
        with pytest.raises(DeadlineExceeded, match=r"0\.06 s"):
            await stream.receive_into(memoryview(bytearray(10)))
        assert (stream.progress_seconds, stream.receive_seconds) == (30, 0.06)
        stream.close()

    async with tls_server(idle) as address:
        await side.run(talk)


async def test_nobody_reads(side: Side) -> None:
    """Bytes that could not be sent cannot be sent later: the stream is closed."""

    async def talk() -> None:
        for whole in (False, True):
            stream = await dial(side, address)
            stream.progress_seconds = 0.05
            with pytest.raises(DeadlineExceeded):
                await (stream.send_whole if whole else stream.send)(bytes(64 * MIB))
            assert stream.fileno() == -1

    async with tls_server(idle) as address:
        await side.run(talk)


async def test_a_byte_changed_on_the_way_ends_the_connection(side: Side) -> None:
    async def answer(stream: AcceptedTlsStream) -> None:
        await stream.send(b"answer " + await read_exactly(stream, 5))
        await idle(stream)

    async def relay(stream: TrioStream) -> None:
        host, _, port = address.rpartition(":")
        other = await DRIVERS["trio"]().connect_tcp(host, int(port), 5.0)
        with contextlib.closing(other):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on, stream, other, -1)
                nursery.start_soon(pass_on, other, stream, len("answer hello") - 1)

    async def pass_on(source: ByteStream, target: ByteStream, position: int) -> None:
        view = memoryview(bytearray(64 * KIB))
        with contextlib.suppress(OSError):
            while count := await source.receive_into(view):
                if 0 <= position < count <= 100:  # the answer's record: the handshake's are longer
                    view[5 + position] ^= 1
                await target.send(view[:count])

    async def talk() -> None:
        stream = await dial(side, relayed)
        await stream.send(b"hello")
        with pytest.raises(ConnectionAbortedError, match="TLS connection broke"):
            await stream.receive_into(memoryview(bytearray(100)))
        stream.close()

    async with tls_server(answer) as address, raw_server(relay) as relayed:
        await side.run(talk)


async def test_closing_ends_a_wait() -> None:
    ended: list[OSError] = []

    async def wait() -> None:
        try:
            await stream.receive_into(memoryview(bytearray(1)))
        except OSError as error:
            ended.append(error)

    async with tls_server(idle) as address, trio.open_nursery() as nursery:
        stream = await dial(Side("trio", DRIVERS["trio"]()), address)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()
    assert [type(each) for each in ended] == [ConnectionAbortedError]


# --- handshakes ----------------------------------------------------------------------------------


async def test_who_says_nothing_is_given_up(side: Side) -> None:
    async def talk() -> None:
        with pytest.raises(DeadlineExceeded):
            await dial(side, address, progress_seconds=0.05)

    async with raw_server(idle) as address:
        await side.run(talk)


async def test_who_says_little_by_little_is_given_up_as_well(side: Side) -> None:
    """The deadline is for the handshake as a whole."""

    async def dribble(stream: TrioStream) -> None:
        await stream.send(b"\x16\x03\x03\x40\x00")
        for _ in range(100):
            await trio.sleep(0.02)
            await stream.send(b"\x02")

    async def talk() -> None:
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await dial(side, address, progress_seconds=0.2)

    async with raw_server(dribble) as address:
        await side.run(talk)


async def test_a_handshake_has_its_size(side: Side) -> None:
    async def script(stream: TrioStream) -> None:
        view = memoryview(bytearray(64 * KIB))
        count = await stream.receive_into(view)
        assert view[0] == 0x16
        assert count < 4 * KIB
        record = b"\x16\x03\x03\x40\x00" + bytes(16 * KIB)
        await stream.send(b"\x16\x03\x03\x40\x00\x02\x7f\xff\xff" + bytes(16 * KIB - 4))
        await stream.send(*[record] * (2 * MAX_HANDSHAKE_BYTES // len(record)))
        await idle(stream)

    async def talk() -> None:
        with pytest.raises(ProtocolError, match="TLS handshake"):
            await dial(side, address)

    async with raw_server(script) as address:
        await side.run(talk)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        (b"", "ended the TLS handshake: it may speak no TLS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "TLS handshake failed: wrong version"),
        (b"\x16\x03\x03\x00\x04\x0b\x00\x00\x00", "TLS handshake failed: "),
        (b"\x15\x03\x03\x00\x02\x02\x28", "TLS handshake failed: "),
    ],
    ids=["nothing", "text", "another message", "an alert"],
)
async def test_who_speaks_no_tls(side: Side, what: bytes, complaint: str) -> None:
    async def script(stream: TrioStream) -> None:
        await stream.receive_into(memoryview(bytearray(4 * KIB)))
        if what:
            await stream.send(what)

    async def talk() -> None:
        kind = ProtocolError if what else ConnectionResetError
        with pytest.raises(kind, match=complaint):
            await dial(side, address)

    async with raw_server(script) as address:
        await side.run(talk)


async def test_an_old_certificate_is_refused(side: Side) -> None:
    old = make_certificate(OWNER, time.time() - VALID_SECONDS - 60)

    async def script(stream: TrioStream) -> None:
        accepted = AcceptedTlsStream(stream, serving_context(old.pem), old.der)
        await accepted.shake_hands()
        await idle(accepted)

    async def talk() -> None:
        with pytest.raises(AuthenticationFailed, match="expired"):
            await dial(side, address)

    async with raw_server(script) as address:
        await side.run(talk)


async def test_certificates_are_renewed_before_they_expire() -> None:
    now = time.time()
    serving = TlsServing(OWNER, lambda: now)
    shown: list[bytes] = []
    for hours_later in (0, 23, 2, 23, -40):
        now += hours_later * 3600
        ours, theirs = (TrioStream(each) for each in socket.socketpair())
        client = TlsStream(ours, dialling_context(), server_side=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.accept, theirs)
            await client.shake_hands()
        shown.append(client.other_certificate())
        check_certificate(shown[-1], OWNER.peer_id, now)
        ours.close()
        theirs.close()
    assert RENEW_SECONDS == 24 * 3600
    assert shown[0] == shown[1] != shown[2] == shown[3] != shown[4]


# --- cancellation --------------------------------------------------------------------------------


async def test_under_trio_a_cancelled_receive_loses_no_bytes() -> None:
    async with trio_pair() as (client, server):
        received = memoryview(bytearray(8))
        with trio.move_on_after(0) as scope:
            await client.receive_into(received)
        assert scope.cancelled_caught
        await server.send(b"answer")
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.receive_into(received)
        assert scope.cancelled_caught
        assert await client.receive_into(received) == 6
        assert bytes(received[:6]) == b"answer"


async def test_what_came_before_a_send_that_failed_can_be_received() -> None:
    """And nothing is sent after it, which the other side could not decrypt."""
    async with trio_pair() as (client, server):
        await server.send(b"why")
        server.close()
        for complaint in ("Broken pipe", "in an earlier send"):
            with pytest.raises(ConnectionError, match=complaint):
                await client.send(b"more")
        received = memoryview(bytearray(10))
        assert await client.receive_into(received) == 3
        assert bytes(received[:3]) == b"why"


async def test_under_trio_a_cancelled_send_closes_the_stream() -> None:
    async with trio_pair() as (client, _):
        with trio.move_on_after(0.05) as scope:
            await client.send(bytes(64 * MIB))
        assert scope.cancelled_caught
        assert client.fileno() == -1


@contextlib.contextmanager
def tls_pair(kind: type[TrioStream] | type[AsyncioStream]) -> Iterator[tuple[TlsStream, TlsStream]]:
    """A client and a server that have not shaken hands yet."""
    certificate = make_certificate(OWNER, time.time())
    ours, theirs = (kind(each) for each in socket.socketpair())
    client = TlsStream(ours, dialling_context(), server_side=False)
    server = TlsStream(theirs, serving_context(certificate.pem), server_side=True)
    with contextlib.closing(client), contextlib.closing(server):
        yield client, server


@contextlib.asynccontextmanager
async def trio_pair() -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    with tls_pair(TrioStream) as (client, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.shake_hands)
            nursery.start_soon(server.shake_hands)
        yield client, server


@contextlib.asynccontextmanager
async def asyncio_pair() -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    with tls_pair(AsyncioStream) as (client, server):
        await asyncio.gather(client.shake_hands(), server.shake_hands())
        yield client, server


@in_asyncio
async def test_under_asyncio_a_cancelled_receive_loses_no_bytes() -> None:
    async with asyncio_pair() as (client, server):
        received = memoryview(bytearray(8))
        receiving = asyncio.create_task(client.receive_into(received))
        await started(receiving)
        await server.send(b"answer")
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert await client.receive_into(received) == 6
        assert bytes(received[:6]) == b"answer"


@in_asyncio
async def test_under_asyncio_a_whole_send_is_not_cancelled_in_the_middle() -> None:
    async with asyncio_pair() as (client, server):
        frame = os.urandom(3 * MIB)
        sending = asyncio.create_task(client.send_whole(frame[:5], frame[5:]))
        await started(sending)
        sending.cancel()
        assert await read_exactly(server, len(frame)) == frame
        with pytest.raises(asyncio.CancelledError):
            await sending
        await client.send(b"next")
        assert await read_exactly(server, 4) == b"next"


@in_asyncio
async def test_under_asyncio_a_cancelled_send_closes_the_stream() -> None:
    async with asyncio_pair() as (client, _):
        sending = asyncio.create_task(client.send(bytes(64 * MIB)))
        await started(sending)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert client.fileno() == -1


@in_asyncio
async def test_under_asyncio_a_cancelled_handshake_leaves_nothing() -> None:
    ours, theirs = socket.socketpair()
    stream = AsyncioStream(ours)
    with theirs:
        dialling = asyncio.create_task(dial_tls(stream, OWNER.peer_id, grant()))
        await started(dialling)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        assert stream.fileno() == -1
