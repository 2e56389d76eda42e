"""The control host over real sockets and real processes: strangers, broken peers, dead peers, leaks."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_key_pair
from libp2p.crypto.x25519 import X25519PrivateKey
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import Transport as NoiseTransport

from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import DEFAULT_CONTROL_PORT
from p2pstore.errors import ConfigError, Unavailable
from p2pstore.gossip.gossip_messages import Ack, ControlKind, Exchange, Ping, PingRequest
from p2pstore.gossip.links import connection_keeper as connection_module
from p2pstore.gossip.links import control_frames, secured_connections
from p2pstore.gossip.links import control_link as link_module
from p2pstore.gossip.links import host as host_module
from p2pstore.gossip.links import sockets as sockets_module
from p2pstore.gossip.links.admission import Opener
from p2pstore.gossip.links.control_link import LinkError, open_asking_stream
from p2pstore.gossip.links.host import ControlHost, HostSettings, open_control_host
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import PeerId
from p2pstore.wire import HEADER, Code, Message, encode_frame
from tests.waiting import until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SECONDS = 10.0


@dataclass
class Seen:
    """The reports of one host."""

    lost: list[PeerId] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    held: int = 0
    gate: trio.Event = field(default_factory=trio.Event)

    async def handle(self, _peer_id: PeerId, _kind: int, request: Message) -> Message:
        if isinstance(request, Ping):
            return Ack(request.incarnation + 1, [])
        self.held += 1
        await self.gate.wait()
        return Ack(0, [])

    def says(self, reason: str) -> bool:
        return reason in self.reasons()

    def reasons(self) -> str:
        return "\n".join(reason for _, reason in self.refused)


def opened(
    number: int, seen: Seen | None = None, key: bytes | None = KEY, **options: Any
) -> AbstractAsyncContextManager[ControlHost]:
    seen = seen or Seen()
    settings: dict[str, Any] = {
        "identity": Identity(bytes([number]) * 32),
        "ring": KeyRing([key] if key else []),
        "cluster": "test",
        "handler": seen.handle,
        "on_lost": seen.lost.append,
        "on_refused": lambda address, reason: seen.refused.append((address, reason)),
        "software": "test",
    }
    listen = options.pop("listen", ("127.0.0.1", 0))
    return open_control_host(listen, HostSettings(**(settings | options)))


async def no_requests(*_: object) -> Message:
    raise Unavailable("there is nothing here")


def stranger_host(
    number: int = 77, ring: KeyRing | None = None, **options: Any
) -> AbstractAsyncContextManager[ControlHost]:
    """A host without a peer behind it, by default a member of the keyless cluster."""
    settings: dict[str, Any] = {"ring": ring or KeyRing(), "cluster": "default", "handler": no_requests}
    return opened(number, **{**settings, **options})


def address_of(host: ControlHost) -> str:
    return f"127.0.0.1:{host.listening[1]}"


def peer_id(number: int) -> PeerId:
    return Identity(bytes([number]) * 32).peer_id


async def ping(host: ControlHost, target: PeerId, address: str, timeout: float = SECONDS) -> None:
    reply = await host.ask(target, [address], ControlKind.PING, Ping(41, []), timeout)
    assert reply == Ack(42, [])


def dial(host: ControlHost) -> socket.socket:
    sock = socket.create_connection(host.listening, timeout=SECONDS)
    sock.setblocking(False)
    return sock


async def receive(sock: socket.socket) -> bytes:
    """The next bytes; b"" when the other side has closed or reset the connection."""
    with trio.fail_after(SECONDS):
        await trio.lowlevel.wait_readable(sock)
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


async def drained(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    while piece := await receive(sock):
        data += piece
    return data


@pytest.fixture
async def victim() -> AsyncIterator[tuple[ControlHost, Seen]]:
    """A host, and at the end proof that it still serves an honest peer."""
    seen = Seen()
    with trio.fail_after(60):
        async with opened(1, seen) as host, opened(2) as honest:
            yield host, seen
            await ping(honest, peer_id(1), address_of(host))


Victim = tuple[ControlHost, Seen]


@pytest.fixture
def short_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_module, link_module, connection_module, secured_connections):
        monkeypatch.setattr(module, "ADMISSION_SECONDS", 0.5)


# --- strangers -------------------------------------------------------------------------------

MULTISTREAM = b"\x13/multistream/1.0.0\n"


def garbage() -> Iterator[bytes]:
    rng = random.Random(5)
    yield from (rng.randbytes(4096) for _ in range(10))
    yield from (b"", b"\0" * 100, b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", MULTISTREAM + b"\xff" * 99)
    yield MULTISTREAM + b"\x01\n"
    yield MULTISTREAM + b"\x03\xff\xfe\n"  # not UTF-8
    yield MULTISTREAM + b"\x07/noise\n" + b"\0\x04abcd"
    yield (MULTISTREAM + b"\x07/noise\n" + b"\0\x20" + rng.randbytes(32) + b"\0\x40" + rng.randbytes(64))


async def test_garbage_and_hangups(victim: Victim) -> None:
    host, seen = victim
    for number, data in enumerate(garbage()):
        sock = dial(host)
        sock.send(data)
        if number % 2:
            sock.shutdown(socket.SHUT_WR)
            await drained(sock)
        sock.close()
        reset = dial(host)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
    await until(lambda: len(seen.refused) >= 20)
    assert not seen.lost


@pytest.mark.parametrize("protocol", [b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0"])
async def test_nothing_but_noise_is_negotiated(victim: Victim, protocol: bytes) -> None:
    """With plaintext any stranger could claim any identity."""
    host, _ = victim
    sock = dial(host)
    sock.send(MULTISTREAM + bytes([len(protocol) + 1]) + protocol + b"\n")
    data = b""
    while not data.endswith(b"na\n"):
        piece = await receive(sock)
        assert piece, data
        data += piece
    assert data == MULTISTREAM + b"\x03na\n"
    sock.close()


async def test_a_frame_that_announces_a_gigabyte_is_not_collected(victim: Victim) -> None:
    host, seen = victim
    sock = dial(host)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    sock.send(MULTISTREAM + b"\x80\x80\x80\x80\x04")
    sent = 0
    with contextlib.suppress(ConnectionError), trio.fail_after(SECONDS):
        while sent < 100_000_000:
            await trio.lowlevel.wait_writable(sock)
            sent += sock.send(bytes(65536))
    assert sent < 20_000_000
    assert "more than a handshake needs" in seen.reasons()
    sock.close()


@pytest.mark.usefixtures("short_admission")
async def test_half_open_connections_are_cut_and_hold_up_nobody(victim: Victim) -> None:
    host, seen = victim
    half_open = [dial(host) for _ in range(60)]
    for number, sock in enumerate(half_open):
        sock.send(MULTISTREAM[: number % 20])
    async with opened(3) as honest:
        await ping(honest, peer_id(1), address_of(host))
    for sock in half_open:
        await drained(sock)
        sock.close()
    assert seen.reasons().count("took longer than") == 60


async def test_too_many_strangers_are_turned_away(victim: Victim) -> None:
    host, seen = victim
    host.arrivals.strangers.limit = 5
    waiting = [dial(host) for _ in range(8)]
    await until(lambda: len(seen.refused) == 3)
    assert "5 connections wait" in seen.reasons()
    for sock in waiting:
        sock.close()
    await until(lambda: len(seen.refused) == 8)


@pytest.mark.usefixtures("short_admission")
async def test_a_peer_that_never_asks_to_be_admitted_is_dropped(victim: Victim) -> None:
    host, seen = victim
    async with opened(3) as idle:
        assert await idle.discover(address_of(host), SECONDS) == peer_id(1)
        await until(lambda: "opened no stream" in seen.reasons())
    assert not seen.lost


async def test_a_wrong_key_is_refused_and_both_sides_say_why(
    victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    host, seen = victim
    for key, reason in ((OTHER_KEY, "different keys"), (None, "the opener has none")):
        caplog.clear()
        async with opened(3, key=key) as stranger:
            with pytest.raises(LinkError, match=reason) as error:
                await ping(stranger, peer_id(1), address_of(host))
            assert error.value.refused
            assert error.value.code == Code.AUTHENTICATION_FAILED
            assert "--cluster-key-file" in str(error.value)
            await until(partial(seen.says, reason))
            assert host.connected() == stranger.connected() == []
            with pytest.raises(LinkError):  # nor may the victim ask the stranger
                await ping(host, peer_id(3), address_of(stranger))
    assert not seen.lost


async def test_another_cluster_is_refused(victim: Victim) -> None:
    host, seen = victim
    async with opened(3, cluster="production") as stranger:
        with pytest.raises(LinkError, match="this peer is of cluster 'production'") as error:
            await ping(stranger, peer_id(1), address_of(host))
        assert error.value.code == Code.WRONG_CLUSTER
        assert "'test'" not in str(error.value), "only its own log says what it is called"
        await until(lambda: "'production' calls cluster 'test'" in seen.reasons())


async def test_a_listener_that_is_not_the_wanted_peer_is_noticed(victim: Victim) -> None:
    host, _ = victim
    async with opened(3) as honest:
        with pytest.raises(LinkError, match="another peer than the one wanted"):
            await ping(honest, peer_id(9), address_of(host))
        assert honest.connected() == []


async def test_an_identity_that_is_not_ed25519_is_refused(victim: Victim) -> None:
    host, seen = victim
    async with opened(3) as stranger:
        stranger.dialler._securing._noise = NoiseTransport(create_rsa_key_pair(), X25519PrivateKey.new())
        with contextlib.suppress(LinkError):
            await ping(stranger, peer_id(1), address_of(host), 3)
        await until(lambda: "no ed25519 key" in seen.reasons())
        assert host.connected() == []


# --- peers that are broken, or worse ---------------------------------------------------------


@dataclass
class Attacker:
    """A stream to the victim on which anything can be written."""

    connection: Any
    stream: Any

    @classmethod
    async def connect(cls, host: ControlHost, victim: ControlHost) -> Attacker:
        connection = await host.dialler.dial(None, [address_of(victim)], SECONDS)
        stream = await connection.muxed.open_stream()
        communicator = MultiselectCommunicator(stream)  # type: ignore[arg-type]
        await MultiselectClient().select_one_of([secured_connections._PROTOCOL], communicator)
        await stream.lift_allowance()
        return cls(connection, stream)

    async def be_admitted(self, host: ControlHost) -> None:
        await open_asking_stream(self.stream, host.settings.side(Opener, self.connection.peer_id))

    async def expect_closed(self) -> None:
        with trio.fail_after(SECONDS), contextlib.suppress(OSError):
            while await self.stream.read(65536):
                pass


OVERSIZED = HEADER.pack(ControlKind.EXCHANGE, 0, 1, 5 * 1024 * 1024, 0)
WITH_BULK = HEADER.pack(ControlKind.PING, 0, 1, 0, 1)
NO_MESSAGE = HEADER.pack(ControlKind.PING, 0, 1, 3, 0) + b"abc"
A_REPLY = encode_frame(ControlKind.PING, 1, Ack(1, []), flags=1)


@pytest.mark.parametrize("frame", [OVERSIZED, WITH_BULK, NO_MESSAGE, A_REPLY])
async def test_a_frame_that_breaks_the_protocol_ends_the_stream(victim: Victim, frame: bytes) -> None:
    host, seen = victim
    async with opened(3) as hostile:
        attacker = await Attacker.connect(hostile, host)
        await attacker.be_admitted(hostile)
        await attacker.stream.write(frame)
        await attacker.expect_closed()
        await until(lambda: seen.refused)


@pytest.mark.parametrize(
    "data",
    [
        OVERSIZED,
        encode_frame(ControlKind.PING, 1, Ping(1, [])),  # a request before admission
        HEADER.pack(ControlKind.HELLO, 0, 1, 4097, 0),
        HEADER.pack(ControlKind.HELLO, 0, 1, 3, 0) + b"\xc1\xc1\xc1",
        bytes(100_000),
    ],
)
async def test_a_stream_that_does_not_start_with_admission_ends(victim: Victim, data: bytes) -> None:
    host, seen = victim
    async with opened(3) as hostile:
        attacker = await Attacker.connect(hostile, host)
        with contextlib.suppress(OSError):
            await attacker.stream.write(data)
        await attacker.expect_closed()
        assert not seen.held
        assert host.connected() == []


async def test_streams_beyond_four_are_reset(victim: Victim) -> None:
    host, _ = victim
    async with opened(3) as hostile:
        connection = await hostile.dialler.dial(None, [address_of(host)], SECONDS)
        streams = [await connection.muxed.open_stream() for _ in range(30)]
        for stream in streams[10:]:
            await Attacker(connection, stream).expect_closed()
        [connection] = host.connections[peer_id(3)]
        assert len(connection.muxed.session.streams) <= 4


@pytest.mark.parametrize("admitted", [False, True])
async def test_unread_data_is_bounded(victim: Victim, admitted: bool) -> None:
    """A flood that does not care for the window ends the connection."""
    host, seen = victim
    async with opened(3) as hostile:
        attacker = await Attacker.connect(hostile, host)
        if admitted:
            await attacker.be_admitted(hostile)
            for number in range(64):  # the listener reads no further
                request = PingRequest(b"", 1)
                await attacker.stream.write(encode_frame(ControlKind.PING_REQUEST, number, request))
            await until(lambda: seen.held == 64)
            flooded = attacker.stream.state.number
        else:
            flooded = 99  # opened by this very frame
        with contextlib.suppress(Exception), trio.fail_after(SECONDS):
            for number in range(400):
                flags = 1 if number == 0 and not admitted else 0
                header = struct.pack("!BBHII", 0, 0, flags, flooded, 65536)
                await attacker.connection.muxed.send(header + bytes(65536))
        await until(attacker.connection.ended.is_set)
        await until(lambda: peer_id(3) not in host.connections)
        assert bool(seen.lost) == admitted


async def test_a_peer_that_does_not_read_its_answers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window is full: a frame to be written must not wait for ever."""
    monkeypatch.setattr(control_frames, "WRITE_SECONDS", 0.5)

    async def large(_peer_id: PeerId, _kind: int, request: Message) -> Message:
        assert isinstance(request, Ping)
        return request if request.incarnation else Exchange(bytes(3_000_000), 0, b"", [])

    async with opened(3, handler=large) as slow_victim, opened(4) as hostile:
        attacker = await Attacker.connect(hostile, slow_victim)
        await attacker.be_admitted(hostile)
        await attacker.stream.write(encode_frame(ControlKind.PING, 1, Ping(0, [])))
        await until(lambda: slow_victim.connected() == [peer_id(4)])
        await until(lambda: slow_victim.connected() == [])


async def test_a_connection_that_takes_no_bytes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "WRITE_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    guarded = sockets_module.GuardedSocket(socket.create_connection(listener.getsockname()), 1000)
    silent, _ = listener.accept()
    with silent, listener:
        with pytest.raises(ConnectionResetError, match="took no byte"):
            await guarded.write(bytes(50_000_000))
        with pytest.raises(ConnectionResetError):
            await guarded.write(b"more")
        guarded.abort()


# --- other processes -------------------------------------------------------------------------

PEER = """
import sys, trio
from p2pstore.gossip.links.host import open_control_host, HostSettings
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.gossip_messages import Ack, Ping
from p2pstore.access.keyring import KeyRing

async def handle(peer_id, kind, request):
    return Ack(request.incarnation + 1, []) if isinstance(request, Ping) else Ack(0, [])

async def main():
    settings = HostSettings(
        identity=Identity(bytes([9]) * 32), ring=KeyRing([b"k" * 32]), cluster="test",
        handler=handle, on_lost=lambda _: None, software="child",
    )
    async with open_control_host(("127.0.0.1", 0), settings) as host:
        print(host.listening[1], flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A peer in another process, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", PEER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def test_a_killed_peer_is_lost_and_a_stopped_one_times_out(
    child: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = child
    seen = Seen()
    with trio.fail_after(60):
        async with opened(1, seen) as host, opened(2) as other:
            assert await host.discover(address, SECONDS) == peer_id(9)
            await ping(host, peer_id(9), address)

            process.send_signal(signal.SIGSTOP)
            start = trio.current_time()
            large = Exchange(bytes(3_000_000), 0, b"", [])
            for kind, request in ((ControlKind.PING, Ping(1, [])), (ControlKind.EXCHANGE, large)):
                with pytest.raises(LinkError, match="did not answer") as error:
                    await host.ask(peer_id(9), [address], kind, request, 0.4)
                assert not error.value.refused
            assert trio.current_time() - start < 3
            await ping(host, peer_id(2), address_of(other))  # no other peer is held up
            assert not seen.lost
            process.send_signal(signal.SIGCONT)
            await ping(host, peer_id(9), address)

            process.kill()
            await until(lambda: seen.lost == [peer_id(9)], 3)
            assert host.connected() == [peer_id(2)]
            with pytest.raises(LinkError, match=r"cannot reach|the connection broke"):
                await ping(host, peer_id(9), address, 3)


async def test_stderr_stays_empty_whatever_strangers_do(
    child: tuple[subprocess.Popen[bytes], str],
) -> None:
    """Without any logging set up, Python prints warnings to stderr: one line a minute for a host, no traces."""
    process, address = child
    host, port = address.split(":")
    for data in garbage():
        with socket.create_connection((host, int(port))) as sock:
            sock.send(data)
    with trio.fail_after(60):
        async with opened(1) as honest, opened(3, key=OTHER_KEY) as stranger:
            with pytest.raises(LinkError, match="wrong cluster key"):
                await ping(stranger, peer_id(9), address)
            await ping(honest, peer_id(9), address)
    process.kill()
    assert process.stderr is not None
    lines = process.stderr.read().decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dropped 127.0.0.1:")


# --- addresses, life and death of a host -----------------------------------------------------


async def test_a_taken_port_is_a_config_error() -> None:
    async with opened(1) as host:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{host.listening[1]}.*--listen"):
            async with opened(2, listen=host.listening):
                pass
    for listen, reason in ((("192.0.2.1", 0), "no interface"), (("no.invalid", 0), "resolved")):
        with pytest.raises(ConfigError, match=reason):
            async with opened(2, listen=listen):
                pass


async def test_a_taken_default_port_is_no_obstacle() -> None:
    anywhere: dict[str, Any] = {"listen": ("127.0.0.1", None)}  # the default port may be taken before
    async with opened(1, **anywhere) as first, opened(2, **anywhere) as second:
        assert second.listening not in {first.listening, ("127.0.0.1", DEFAULT_CONTROL_PORT)}


async def test_wildcard_and_ipv6_and_names() -> None:
    with trio.fail_after(30):
        async with (
            opened(1, listen=("0.0.0.0", 0)) as everywhere,
            opened(2, listen=("::1", 0)) as v6,
            opened(3) as host,
        ):
            # localhost is ::1 too on many machines, without a listener at this port
            port = everywhere.listening[1]
            assert await host.discover(f"localhost:{port}", SECONDS) == peer_id(1)
            address = f"[::1]:{v6.listening[1]}"
            assert await host.discover(address, SECONDS) == peer_id(2)
            await ping(host, peer_id(2), address)
            with pytest.raises(LinkError, match="this peer itself"):
                await host.discover(address_of(host), SECONDS)
            for wrong in ("127.0.0.1:1", "no-such-host.invalid:1", "127.0.0.1", "[::1]"):
                with pytest.raises(LinkError):
                    await host.discover(wrong, SECONDS)
            with socket.create_server(("127.0.0.1", 0)) as silent:
                start = trio.current_time()
                with pytest.raises(LinkError, match="did not answer within"):
                    await host.discover(f"127.0.0.1:{silent.getsockname()[1]}", 0.3)
                assert trio.current_time() - start < 1


async def test_every_host_asks_every_other_at_once() -> None:
    """Simultaneous dials in both directions, and both sides asking over whatever came first."""
    with trio.fail_after(60):
        async with contextlib.AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(opened(n)) for n in range(1, 6)]
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for one in hosts:
                        for number, other in enumerate(hosts, 1):
                            if one is not other:
                                for _ in range(3):
                                    nursery.start_soon(ping, one, peer_id(number), address_of(other))
            assert all(len(host.connected()) == 4 for host in hosts)
            assert not any(len(host._attempts) for host in hosts)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("way", ["end", "error", "cancel"])
async def test_a_host_closes_quickly_and_leaks_nothing(way: str) -> None:
    async def life() -> None:
        async with opened(1) as one, opened(2) as two, opened(3, key=OTHER_KEY) as three:
            await ping(one, peer_id(2), address_of(two))
            await ping(two, peer_id(1), address_of(one))
            with contextlib.suppress(LinkError):
                await ping(three, peer_id(1), address_of(one))
            await three.discover(address_of(two), SECONDS)
            with contextlib.closing(dial(one)):
                await trio.testing.wait_all_tasks_blocked(0.01)
                ended.append(time.monotonic())
                if way == "error":
                    raise KeyError("of the block")
                if way == "cancel":
                    scope.cancel()
                    await trio.sleep_forever()

    for _ in range(4):
        before = open_descriptors()
        ended: list[float] = []
        with trio.CancelScope() as scope:
            if way == "error":
                with pytest.raises(KeyError, match="of the block"):
                    await life()
            else:
                await life()
        assert time.monotonic() - ended[0] < 1
        assert open_descriptors() == before


async def test_a_cancelled_dial_leaks_nothing() -> None:
    async with opened(1) as host, opened(2) as other:
        await ping(host, peer_id(2), address_of(other))
        await host.disconnect(peer_id(2))
        await until(lambda: not other.connections)
        before = open_descriptors()
        for step in range(40):
            with trio.move_on_after(0.0004 * step):
                await ping(host, peer_id(2), address_of(other))
            await host.disconnect(peer_id(2))
        await until(lambda: not other.connections and open_descriptors() == before)


async def test_the_library_logs_nothing_above_debug_and_the_root_logger_is_left_alone(
    victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    host, seen = victim
    library = logging.getLogger("libp2p")
    assert not library.propagate
    assert [type(each) for each in library.handlers].count(secured_connections._Forward) == 1
    root = logging.getLogger()
    with caplog.at_level(logging.DEBUG):
        before = list(root.handlers), root.level
        logging.getLogger("libp2p.somewhere").error("two\nlines %s", "here")
        for _ in range(3):
            sock = dial(host)
            sock.send(b"\xff" * 50)
            sock.close()
        await until(lambda: len(seen.refused) == 3)
        assert (list(root.handlers), root.level) == before
    ours = [record for record in caplog.records if record.name.startswith("p2pstore")]
    assert ours[0].getMessage() == "libp2p.somewhere: two?lines here"
    assert ours[0].levelno == logging.DEBUG
    shown = [record.getMessage() for record in ours if record.levelno > logging.DEBUG]
    assert len(shown) == 1, "one line a minute for one host"
    assert shown[0].startswith("dropped 127.0.0.1:")
    assert not any(record.exc_info for record in ours)


async def test_a_callback_that_fails_does_not_end_the_host() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("callback")

    async with opened(1, on_lost=fail, on_refused=fail) as host:
        async with opened(2) as other:
            await ping(other, peer_id(1), address_of(host))
        await until(lambda: not host.connections)
        dial(host).close()
        async with opened(3) as other:
            await ping(other, peer_id(1), address_of(host))


async def test_who_sends_faster_than_is_read_does_not_hold_up_everything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    guarded = sockets_module.GuardedSocket(accepted, 1 << 30)
    sender.setblocking(False)
    sent = bytes(range(256)) * 1024
    left = memoryview(sent)
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            await trio.lowlevel.checkpoint()
            others += 1

    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        with trio.fail_after(10):
            while len(received) < len(sent):
                with contextlib.suppress(BlockingIOError):  # there is always more to read
                    left = left[sender.send(left) :]
                received += await guarded.read(64)
        nursery.cancel_scope.cancel()
    assert received == sent
    assert others >= len(sent) / 64 / 64 / 2
    guarded.abort()
    sender.close()
