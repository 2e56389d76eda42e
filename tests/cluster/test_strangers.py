"""Strangers at the doors of real peers: floods, slow beginnings, stolen and repeated proofs, forged words.

Whatever they send costs at most a dropped connection; the peer goes on serving its neighbour meanwhile.
"""

import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import trio

from p2pstore import blocking
from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import split_address
from p2pstore.blocking import BlockingClient
from p2pstore.gossip.gossip_messages import ControlKind, Delta, HelloReply, Leave, Ping
from p2pstore.gossip.links import connection_keeper as connection_module
from p2pstore.gossip.links import control_link as link_module
from p2pstore.gossip.links import host as host_module
from p2pstore.gossip.links import secured_connections
from p2pstore.gossip.links import secured_connections as refusals_module
from p2pstore.gossip.links.admission import Opener
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.multiplexer import MuxedStream
from p2pstore.gossip.records import (
    ClusterRecord,
    SignedRecord,
    read_peer_record,
    sign_cluster_record,
    sign_peer_record,
)
from p2pstore.local import local_protocol
from p2pstore.local import server as local_server
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import key_digest
from p2pstore.peer import Peer
from p2pstore.runtime.trio_streams import TrioDriver, TrioStream
from p2pstore.transfer import data_messages as data
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.read_tickets import GrantedTicket, Scope, issue_ticket
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving import data_server
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.wire import (
    CONTROL_LIMITS,
    HEADER,
    PREFACE_DATA,
    PREFACE_LOCAL,
    Code,
    Failure,
    Message,
    decode_body,
    decode_header,
    encode_frame,
)
from tests.cluster.flooding import flood, flooded
from tests.cluster.machines import Machine
from tests.cluster.machines import Peer as Process
from tests.cluster.peers import cluster, write_private
from tests.cluster.test_attacks import PATIENCE_SECONDS, still_well
from tests.cluster.test_control_host import Attacker, stranger_host
from tests.present import present
from tests.waiting import eventually, until

SECONDS = 10.0
MIB = 1024 * 1024

# --- floods ----------------------------------------------------------------------------------


def descriptors_of(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def private_bytes_of(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def patient(peer: Process) -> BlockingClient:
    """A client that gives up only a peer that hangs, however busy the machine is."""
    return blocking.connect(peer.ready["socket"], timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_ten_thousand_connections(machine: Machine) -> None:
    """To both ports, from one host and from many: neighbours go on and newcomers get in, memory stays, and in the
    end every descriptor is given back."""
    many = 4_200
    victim = machine.join("victim", "--transport", "tcp")
    bootstrap = ("--bootstrap", victim.ready["control"], "--transport", "tcp")
    neighbour = machine.join("neighbour", *bootstrap)
    eventually(lambda: victim.alive() == neighbour.alive() == 2)
    process = victim.process.pid
    descriptors, memory = descriptors_of(process), private_bytes_of(process)
    multistream = b"\x13/multistream/1.0.0\n\x07/noise\n"
    victim.client.put("anchor", bytes(10_000), pin="hard")
    served = 0

    def serves() -> None:
        nonlocal served
        served += 1
        storing.put(f"k{served}", bytes(10_000))
        assert reading.get(f"k{served}", wait=PATIENCE_SECONDS) == bytes(10_000)

    waves = (
        (victim.ready["control"], many, 60, multistream),
        (victim.ready["data"][0], many, 60, PREFACE_DATA),
        (victim.ready["control"], many // 5, 1, multistream),
        (victim.ready["data"][0], many // 5, 1, PREFACE_DATA),
    )
    for wave, (address, count, hosts, beginning) in enumerate(waves):
        with (
            flooded(address, count, hosts, beginning) as done,
            patient(victim) as storing,
            patient(neighbour) as reading,
        ):
            before = served
            while not done(0.02):
                serves()
            assert served > before
            newcomer = machine.join(f"new{wave}", *bootstrap, f"--join-timeout={PATIENCE_SECONDS:g}")
            assert newcomer.ready["joined"]
            with patient(newcomer) as client:
                assert client.get("anchor", wait=PATIENCE_SECONDS) == bytes(10_000)
            newcomer.stop()
            serves()
            assert private_bytes_of(process) - memory < 64 * MIB
    eventually(lambda: descriptors_of(process) <= descriptors + 20)
    log = victim.log.read_text()
    assert len(log.splitlines()) < 400
    assert "Traceback" not in log


async def test_a_stranger_from_another_host_is_let_in_through_a_crowd(tmp_path: Path) -> None:
    """The crowd's longest waiting connection goes for it."""
    async with cluster(tmp_path, 1) as (peer,):
        host = peer.node.host
        host.arrivals.strangers.limit = 8
        crowd = list(flood(peer.control, 12, 3, b""))
        await until(lambda: len(host.arrivals.strangers) == 8)
        async with stranger_host() as newcomer:
            await ask(newcomer, peer, ControlKind.PING, Ping(1, []))
        for sock in crowd:
            sock.close()
        await until(lambda: not len(host.arrivals.strangers))


async def test_lines_about_strangers_are_few_however_many_hosts_they_come_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals_module, "MAX_LINES", 5)
    async with cluster(tmp_path, 1) as (peer,):
        for address in (peer.control, peer.data[0]):
            for sock in flood(address, 100, 50, b"\xff" * 50):
                sock.close()
        await until(lambda: not len(peer.node.host.arrivals.strangers))
        await still_well(peer)
    lines = [r for r in caplog.records if r.name == "p2pstore.host" and r.levelno > logging.DEBUG]
    assert len(lines) == 5


# --- slow beginnings -------------------------------------------------------------------------


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_module, link_module, connection_module, secured_connections):
        monkeypatch.setattr(module, "ADMISSION_SECONDS", 1.0)
    monkeypatch.setattr(local_server, "HELLO_SECONDS", 1.0)
    monkeypatch.setattr(data_server, "ServerLimits", partial(ServerLimits, hello_seconds=1.0))


@pytest.mark.usefixtures("short_deadlines")
async def test_byte_by_byte_on_every_port(tmp_path: Path) -> None:
    """A byte now and then keeps nothing open: the deadline is for the whole beginning."""
    async with cluster(tmp_path, 2) as (victim, neighbour):
        hello = data.Hello(1, 1, data.Ticket(bytes(200), bytes(64)), bytes(32))
        beginnings = {
            "control": b"\x13/multistream/1.0.0\n" + b"\x07/noise\n" + bytes(200),
            "data": PREFACE_DATA + encode_frame(DataKind.HELLO, 1, hello),
            "local": PREFACE_LOCAL
            + encode_frame(LocalKind.HELLO, 1, local_protocol.Hello(1, 1, "default", 0, 1, "x" * 60)),
        }
        sent: dict[str, int] = {}

        async def creep(name: str, stream: TrioStream, silent: bool) -> None:
            """Send byte after byte until the peer closes; how many it took."""
            beginning = beginnings[name]
            sent[f"{name}{silent}"] = 0
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(closed, stream, scope)
                    with suppress(OSError):  # it closed before this heard of it
                        for number in range(len(beginning)):
                            if not (silent and number):
                                await stream.send(beginning[number : number + 1])
                                sent[f"{name}{silent}"] += 1
                            await trio.sleep(0.02)
                    await trio.sleep(SECONDS)
            assert scope.cancelled_caught, "the peer waits for more"
            ended.append(name)
            stream.close()

        async def closed(stream: TrioStream, scope: trio.CancelScope) -> None:
            room = memoryview(bytearray(65536))
            with suppress(OSError):
                while await stream.receive_into(room):
                    pass
            scope.cancel()

        ended: list[str] = []
        async with trio.open_nursery() as nursery:
            driver = TrioDriver()
            for silent in (False, True):
                for name, address in (("control", victim.control), ("data", victim.data[0])):
                    target = split_address(address, name)
                    stream = await driver.connect_tcp(*target, SECONDS)
                    nursery.start_soon(creep, name, stream, silent)
                stream = await driver.connect_unix(victim.socket, SECONDS)
                nursery.start_soon(creep, "local", stream, silent)
            with trio.fail_after(60):
                while len(ended) < 6:
                    await still_well(victim, neighbour)
                    await trio.sleep(0.1)
        for name, beginning in beginnings.items():
            assert sent[f"{name}True"] == 1
            assert 1 < sent[f"{name}False"] < len(beginning), name
        await still_well(victim, neighbour)


# --- proofs that belong to another peer ------------------------------------------------------


def secured(tmp_path: Path) -> dict[str, object]:
    """Settings of a cluster with a key, and the file."""
    return {"cluster_key_file": write_private(tmp_path / "cluster.key", KEY.hex())}


KEY = b"k" * 32


async def raw_stream(host: ControlHost, peer: Peer) -> tuple[Any, MuxedStream]:
    """A stream to a peer on which nothing was said yet."""
    attacker = await Attacker.connect(host, peer.node.host)
    return attacker.connection, attacker.stream


async def read_frame(stream: MuxedStream) -> tuple[int, int, bytes]:
    """Kind, flags and body of what comes next."""
    buffer = b""
    with trio.fail_after(SECONDS):
        while True:
            if len(buffer) >= HEADER.size:
                header = decode_header(buffer, CONTROL_LIMITS)
                if len(buffer) >= HEADER.size + header.body_length:
                    return header.kind, header.flags, buffer[HEADER.size :]
            buffer += await stream.read(65536)


async def refusal(stream: MuxedStream) -> tuple[int, str]:
    """Code and text with which the other side refuses."""
    _, flags, body = await read_frame(stream)
    assert flags & 2, "it was not refused"
    failure = decode_body(Failure, body)
    return failure.code, failure.text


async def test_a_recorded_admission_cannot_be_played_again(tmp_path: Path) -> None:
    """Not on another connection, and not by another identity: nonce and peer ids are part of the proof."""
    async with (
        cluster(tmp_path, 2, **secured(tmp_path)) as (victim, neighbour),
        stranger_host(5, KeyRing([KEY])) as member,
        stranger_host(6) as thief,
    ):
        connection, stream = await raw_stream(member, victim)
        opener = member.settings.side(Opener, connection.peer_id)
        recorded = [encode_frame(ControlKind.HELLO, 1, opener.hello())]
        await stream.write(recorded[0])
        _, _, body = await read_frame(stream)
        proof = opener.receive_reply(decode_body(HelloReply, body))
        recorded.append(encode_frame(ControlKind.PROOF, 2, proof))
        await stream.write(recorded[1])
        assert (await read_frame(stream))[0] == ControlKind.PROOF
        for host in (member, thief):
            _, again = await raw_stream(host, victim)
            await again.write(recorded[0])
            await read_frame(again)
            await again.write(recorded[1])
            code, text = await refusal(again)
            assert code == Code.AUTHENTICATION_FAILED
            assert "does not match" in text
        await still_well(victim, neighbour)


def ticket(
    audience: Peer,
    signer: Any,
    ring: KeyRing,
    scope: Scope = Scope.READ | Scope.PEER,
    now: float | None = None,
    namespace: str = "",
) -> GrantedTicket:
    return issue_ticket(
        signer=signer,
        ring=ring,
        audience=audience.node.core.peer_id,
        now_unix=time.time() if now is None else now,
        ticket_id=os.urandom(16),
        scope=scope,
        namespace=namespace,
    )


async def open_data(peer: Peer, granted: GrantedTicket) -> DataConnection:
    stream = await TrioDriver().connect_tcp(*split_address(peer.data[0], "data"), SECONDS)
    return await DataConnection.open(stream, granted)


# --- words in another peer's name ------------------------------------------------------------


async def test_records_that_their_owner_did_not_sign(tmp_path: Path) -> None:
    """A member, properly admitted, sends what others never said. It is refused whole, and nothing changes."""
    async with cluster(tmp_path, 2) as (victim, neighbour), stranger_host() as liar:
        await neighbour.put("k", b"value")
        await until(lambda: victim.contains_nowait("k"))
        mallory = liar.settings.identity
        gossip = victim.node.core.gossip
        state = present(gossip.membership.get(neighbour.node.core.peer_id))
        assert state.signed is not None
        honest = state.signed
        record = read_peer_record(honest)
        moved = msgspec.structs.replace(
            record, sequence=record.sequence + 1000, control=["127.0.0.1:1"], data=["127.0.0.1:1"]
        )
        left = msgspec.structs.replace(moved, leaving=True)
        mine = msgspec.structs.replace(record, peer_id=mallory.peer_id, sequence=1)
        floor = ClusterRecord(
            1, 1, key_digest("k"), victim.node.core.clock.latest, 1, neighbour.node.core.peer_id
        )
        forged = sign_cluster_record(floor, mallory)

        def relabelled(signed: SignedRecord) -> SignedRecord:
            return SignedRecord(signed.body, honest.signature)

        lies: list[tuple[ControlKind, Message, bool]] = [
            (ControlKind.DELTA, Delta([sign_peer_record(moved, mallory)], [], [], []), True),
            (ControlKind.DELTA, Delta([relabelled(sign_peer_record(moved, mallory))], [], [], []), True),
            (
                ControlKind.DELTA,
                Delta([SignedRecord(honest.body + b"\0", honest.signature)], [], [], []),
                True,
            ),
            (ControlKind.DELTA, Delta([], [], [forged], []), True),
            (ControlKind.DELTA, Delta([], [], [SignedRecord(forged.body, b"")], []), True),
            (ControlKind.LEAVE, Leave(sign_peer_record(left, mallory)), True),
            (ControlKind.LEAVE, Leave(sign_peer_record(mine, mallory)), True),
            (ControlKind.LEAVE, Leave(honest), False),  # a repetition: nothing new
            (ControlKind.DELTA, Delta([honest] * 3, [], [], []), False),
        ]
        for kind, lie, refused in lies:
            expected = pytest.raises(LinkError) if refused else nullcontext()
            with expected as error:
                await ask(liar, victim, kind, lie)
            assert error is None or error.value.code == Code.MALFORMED
        assert state.alive
        assert not state.leaving
        assert state.record is not None
        assert state.record.control == record.control
        assert victim.contains_nowait("k")
        assert await victim.get("k") == b"value"
        await still_well(victim, neighbour)


async def test_an_old_record_does_not_come_back(tmp_path: Path) -> None:
    """Signed by its owner, but of earlier: with other addresses, or from before it left."""
    async with cluster(tmp_path, 1) as (victim,), stranger_host() as liar:
        mallory = liar.settings.identity
        old: list[SignedRecord] = []
        for sequence, leaving in ((1, False), (2, False), (3, True)):
            described = read_peer_record(victim.node.core.gossip.record(victim.node.now))
            record = msgspec.structs.replace(
                described,
                peer_id=mallory.peer_id,
                sequence=sequence,
                name=f"life {sequence}",
                leaving=leaving,
            )
            old.append(sign_peer_record(record, mallory))
            with suppress(LinkError) if leaving else nullcontext():  # who left is disconnected
                await tell(liar, victim, Delta([old[-1]], [], [], []))
        await until(lambda: not liar.connected())
        state = present(victim.node.core.gossip.membership.get(mallory.peer_id))
        for signed in old:
            await tell(liar, victim, Delta([signed], [], [], []))
            assert state.record is not None
            assert (state.record.name, state.leaving) == ("life 3", True)
        await still_well(victim)


async def ask(host: ControlHost, peer: Peer, kind: int, message: Message) -> None:
    await host.ask(peer.node.core.peer_id, [peer.control], kind, message, SECONDS)


async def tell(host: ControlHost, peer: Peer, delta: Delta) -> None:
    await ask(host, peer, ControlKind.DELTA, delta)


# --- too much --------------------------------------------------------------------------------


OVERSIZED: list[tuple[str, int, int]] = [
    ("data", 1024 * 1024 + 1, 0),
    ("data", 0, 16 * 1024 * 1024 + 1),
    ("data", 0xFFFF_FFFF, 0xFFFF_FFFF),
    ("local", 4 * 1024 * 1024 + 1, 0),
    ("local", 0, 1),
    ("local", 0xFFFF_FFFF, 0),
]


@pytest.mark.parametrize("admitted", [False, True])
async def test_frames_that_announce_too_much_end_their_connection_at_once(
    tmp_path: Path, admitted: bool
) -> None:
    """Before a byte of them was collected: it is told by the header. (Control: see test_control_host.)"""
    async with cluster(tmp_path, 1) as (victim,):
        for port, body, bulk in OVERSIZED:
            if port == "data":
                target = split_address(victim.data[0], "data")
                stream = await TrioDriver().connect_tcp(*target, SECONDS)
                if admitted:
                    granted = ticket(victim, Identity(b"m" * 32), KeyRing())
                    await DataConnection.open(stream, granted)
                else:
                    await stream.send(PREFACE_DATA)
            else:
                stream = await TrioDriver().connect_unix(victim.socket, SECONDS)
                await stream.send(PREFACE_LOCAL)
                if admitted:
                    hello = local_protocol.Hello(1, 1, "default", 0, 1)
                    await stream.send(encode_frame(LocalKind.HELLO, 1, hello))
                    room = memoryview(bytearray(65536))
                    _, passed = await stream.receive_descriptors(room)
                    for descriptor in passed:
                        os.close(descriptor)
            await stream.send(HEADER.pack(16 if admitted else 1, 0, 1, body, bulk))
            with trio.fail_after(2), suppress(OSError):
                room = memoryview(bytearray(65536))
                while await stream.receive_into(room):
                    pass
            stream.close()
        await still_well(victim)


# --- the multiplexer -------------------------------------------------------------------------

SYN, ACK, FIN, RST = 1, 2, 4, 8
DATA, WINDOW, PINGED, GO_AWAY = 0, 1, 2, 3


def yamux(kind: int, flags: int, stream: int, length: int, payload: bytes = b"") -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream, length) + payload


def abuse() -> dict[str, Callable[[int], bytes]]:
    """Frames that an attacker may write after Noise, in turn."""
    rng = Random(3)
    return {
        "pings": lambda n: yamux(PINGED, SYN, 0, n),
        "pongs": lambda n: yamux(PINGED, ACK, 0, n),
        "streams": lambda n: yamux(WINDOW, SYN, 1001 + 2 * n, 0),
        "reset storm": lambda n: yamux(WINDOW, SYN, 1001 + n, 0) + yamux(WINDOW, RST, 1001 + n, 0),
        "born dead": lambda n: yamux(WINDOW, SYN | RST, 1001 + 2 * n, 0),
        "born closed": lambda n: yamux(WINDOW, SYN | FIN, 1001 + 2 * n, 0),
        "one stream twice": lambda n: yamux(WINDOW, SYN, 1001, 0),
        "streams of the other side": lambda n: yamux(WINDOW, SYN, 2 + 2 * n, 0),
        "windows": lambda n: yamux(WINDOW, 0, 1, 0xFFFF_FFFF),
        "windows of nothing": lambda n: yamux(WINDOW, 0, 1_000_000 + n, 0xFFFF_FFFF),
        "data for nobody": lambda n: yamux(DATA, 0, 1_000_000 + n, 100, bytes(100)),
        "data that was announced": lambda n: yamux(DATA, SYN, 1001 + 2 * n, 16 * MIB, bytes(4096)),
        "a frame of 4 GiB": lambda n: yamux(DATA, SYN, 1001, 0xFFFF_FFFF),
        "an unknown type": lambda n: yamux(9, n % 16, n, n),
        "an unknown version": lambda n: b"\xff" + yamux(DATA, SYN, 1, 5)[1:],
        "farewells": lambda n: yamux(GO_AWAY, 0, 0, n % 4),
        "garbage": lambda n: rng.randbytes(12),
    }


@pytest.mark.parametrize("admitted", [False, True])
async def test_abuse_of_the_multiplexer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, admitted: bool
) -> None:
    """20,000 frames of each kind: the connection may end, no other peer notices, and nothing piles up."""
    async with cluster(tmp_path, 1) as (victim,):
        for name, frame in abuse().items():
            async with stranger_host() as hostile:
                assert await piled_by(frame, hostile, victim, admitted) < 300, name
            async with stranger_host(78) as honest:
                await ask(honest, victim, ControlKind.PING, Ping(1, []))
            await still_well(victim)
    loud = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("p2p")]
    assert not loud, loud


async def piled_by(
    frame: Callable[[int], bytes], hostile: ControlHost, victim: Peer, admitted: bool
) -> int:
    """The most streams that the victim keeps of one that sends such frames."""
    attacker = await Attacker.connect(hostile, victim.node.host)
    if admitted:
        await attacker.be_admitted(hostile)
    [connection] = victim.node.host.connections[hostile.settings.identity.peer_id]
    piled = 0
    with suppress(Exception), trio.move_on_after(3):
        for start in range(0, 20_000, 500):
            await attacker.connection.muxed.send(b"".join(map(frame, range(start, start + 500))))
            muxed = connection.muxed
            piled = max(piled, len(muxed.session.streams), len(muxed._streams))
            if start % 5000 == 0:
                with trio.fail_after(PATIENCE_SECONDS):
                    await victim.put(f"k{start}", b"value")
    attacker.connection.abort()
    await until(connection.ended.is_set)
    return piled


async def test_a_stranger_is_not_collected_for(tmp_path: Path) -> None:
    """The multiplexer reads a whole frame of up to 16 MiB before it is checked."""
    async with cluster(tmp_path, 1) as (victim,), stranger_host() as hostile:
        attacker = await Attacker.connect(hostile, victim.node.host)
        sent = 0
        with suppress(Exception):
            await attacker.connection.muxed.send(yamux(DATA, SYN, 1001, 16 * MIB))
            for _ in range(250):
                await attacker.connection.muxed._secured.write(bytes(60_000))
                sent += 60_000
        await until(attacker.connection.ended.is_set)
        assert sent < 8 * MIB  # what the sockets take
        await still_well(victim)
