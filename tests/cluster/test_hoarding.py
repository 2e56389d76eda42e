"""Members that hold the cluster's key and take all they can get of a peer: its memory, and its places for connections.

Built on the project's own codecs. The peer's memory stays bounded, and honest members read and join meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio

from p2pstore import errors
from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import split_address
from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.gossip.gossip_messages import Ping as ControlPing
from p2pstore.gossip.links import control_frames, secured_connections
from p2pstore.gossip.links import host as host_module
from p2pstore.gossip.links.admission import Opener
from p2pstore.gossip.links.control_link import open_asking_stream
from p2pstore.gossip.links.host import ControlHost
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.libp2p_parts import MultiselectClient, MultiselectCommunicator
from p2pstore.objects import KIB, MIB, key_digest
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind, Get, GetItem, Ping
from p2pstore.transfer.peer_messages import ListKeys
from p2pstore.transfer.read_tickets import Scope, issue_ticket
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.serving import data_server
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.wire import HEADER, ONE_WAY, encode_frame
from tests.cluster.machines import Machine, new_machine
from tests.cluster.machines import Peer as Process
from tests.cluster.peers import cluster, config
from tests.cluster.test_control_host import stranger_host
from tests.cluster.test_strangers import private_bytes_of
from tests.waiting import eventually, until

OPEN: Final = ("--transport", "tcp", "--insecure")
SECONDS = 20.0
MAX_BYTES: Final = 96 * MIB
"""Memory that hoarders may add to a peer: 48 MiB are its budget, the rest is for their connections."""
QUIET_SECONDS: Final = 0.5
"""Hoarders that get nothing through for this long have got all they can."""
BYTES_AT_ONCE: Final = 256 * KIB


class Hoarders:
    """Members that only take. `sent_bytes` of them all."""

    def __init__(self, nursery: trio.Nursery, stack: AsyncExitStack, victim: Victim) -> None:
        self.sent_bytes = 0
        self.nursery = nursery
        self.stack = stack
        self.victim = victim

    async def host(self, number: int) -> ControlHost:
        """A member of its own. In each test others: what one began is held for it until its deadline."""
        return await self.stack.enter_async_context(hostile_host(number, self.victim.cluster))

    async def stream(self, host: ControlHost) -> Any:
        """An admitted stream on a connection of its own."""
        connection = await host.dialler.dial(None, [self.victim.control], SECONDS)
        return await admitted(host, connection)

    async def data(self, number: int) -> DataConnection:
        """A data connection of a member."""
        victim = self.victim
        if not victim.peer_id:
            victim.peer_id = await (await self.host(250)).discover(victim.control, SECONDS)
        identity = Identity(bytes([number]) * 32)
        connection = await open_data(victim.peer_id, victim.data, identity)
        self.stack.callback(connection.close)
        return connection

    def pour(self, write: Any, data: bytes) -> None:
        """Send in a task of its own, for as long as anything is taken."""
        self.nursery.start_soon(self.send, write, data)

    async def send(self, write: Any, data: bytes) -> None:
        """Send for as long as anything is taken."""
        with suppress(OSError, errors.P2PStoreError):
            for start in range(0, len(data), BYTES_AT_ONCE):
                await write(data[start : start + BYTES_AT_ONCE])
                self.sent_bytes += len(data[start : start + BYTES_AT_ONCE])

    async def quiet(self) -> None:
        """Return when nothing more gets through."""
        before = -1
        with trio.fail_after(60):
            while self.sent_bytes != before or self.victim.grows():
                before = self.sent_bytes
                await trio.sleep(QUIET_SECONDS)


class Victim:
    """A peer in a process of its own, with a neighbour."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cluster = machine.environment["MOONCAKE_P2P_CLUSTER"]
        self.peer = machine.join("victim", *OPEN, "--memory", "256MiB")
        self.control: str = self.peer.ready["control"]
        self.data: str = self.peer.ready["data"][0]
        self.neighbour = self.join("neighbour")
        eventually(lambda: self.peer.alive() == self.neighbour.alive() == 2)
        self.peer.client.put("anchor", b"anchor" * 1000, pin="hard")
        self.peer_id = b""
        self.before = self.last = self.memory

    def join(self, name: str) -> Process:
        """One that must be let in."""
        patience = f"--join-timeout={SECONDS:g}"
        process = self.machine.join(name, *OPEN, patience, "--bootstrap", self.control)
        assert process.ready["joined"]
        return process

    @property
    def memory(self) -> int:
        return private_bytes_of(self.peer.process.pid)

    def grows(self) -> bool:
        """Whether it holds more than at the last look."""
        before, self.last = self.last, self.memory
        return self.last > before + MIB

    def serves(self, name: str) -> None:
        """Its neighbour, and who comes now."""
        for peer in (self.neighbour, self.join(name)):
            assert peer.client.get("anchor", wait=SECONDS) == b"anchor" * 1000
        self.machine.peers[-1].stop()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with new_machine() as machine:
        yield Victim(machine)


@asynccontextmanager
async def hoarding(victim: Victim) -> AsyncIterator[Hoarders]:
    """The peer bears what is done in the block, and who does it holds on until all has been looked at."""
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        hoarders = Hoarders(nursery, stack, victim)
        yield hoarders
        await hoarders.quiet()
        assert hoarders.sent_bytes
        grown = victim.memory - victim.before
        print(f"the victim grew by {grown / MIB:.0f} MiB")
        name = f"newcomer{time.monotonic_ns()}"
        await trio.to_thread.run_sync(victim.serves, name)
        assert grown < MAX_BYTES
        assert victim.memory - victim.before < MAX_BYTES
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def hostile_host(number: int, cluster_name: str) -> AsyncIterator[ControlHost]:
    async with stranger_host(number, cluster=cluster_name) as host:
        host._end_when_useless = stay  # type: ignore[method-assign, assignment]  # its streams are not the host's
        yield host


async def stay(_: object) -> None:
    await trio.sleep_forever()


async def admitted(host: ControlHost, connection: Any) -> Any:
    """A stream on which the other side takes requests."""
    stream = await connection.muxed.open_stream()
    communicator = MultiselectCommunicator(stream)
    await MultiselectClient().select_one_of([secured_connections._PROTOCOL], communicator)
    await stream.lift_allowance()
    await open_asking_stream(stream, host.settings.side(Opener, connection.peer_id))
    return stream


async def open_data(
    peer_id: bytes, address: str, identity: Identity, scope: Scope = Scope.READ | Scope.PEER
) -> DataConnection:
    """A data connection with a ticket that this identity made for itself."""
    granted = issue_ticket(
        signer=identity,
        ring=KeyRing(),
        audience=peer_id,
        now_unix=time.time(),
        ticket_id=os.urandom(16),
        scope=scope,
    )
    stream = await TrioDriver().connect_tcp(*split_address(address, "data"), SECONDS)
    return await DataConnection.open(stream, granted)


async def test_control_frames_that_are_never_whole(victim: Victim) -> None:
    """Each of ten members has four, of 4 MiB, on which the last byte is missing."""
    frame = HEADER.pack(ControlKind.EXCHANGE, 0, 1, 4 * MIB, 0) + bytes(4 * MIB - 1)
    async with hoarding(victim) as hoarders:
        for number in range(10):
            host = await hoarders.host(100 + number)
            connection = await host.dialler.dial(None, [victim.control], SECONDS)
            for _ in range(4):
                stream = await admitted(host, connection)
                hoarders.pour(stream.write, frame)


async def test_nothing_is_kept_of_requests_that_were_handled(victim: Victim) -> None:
    """Large ones, the last on their streams: they have fields of a version to come."""
    body = msgspec.msgpack.encode([1, [], bytes(4 * MIB - 100)])
    frame = HEADER.pack(ControlKind.PING, ONE_WAY, 1, len(body), 0) + body
    async with hoarding(victim) as hoarders:
        for number in range(8):
            host = await hoarders.host(120 + number)
            connection = await host.dialler.dial(None, [victim.control], SECONDS)
            for _ in range(4):
                stream = await admitted(host, connection)
                await hoarders.send(stream.write, frame)


async def test_data_requests_that_are_never_whole(victim: Victim) -> None:
    frame = HEADER.pack(DataKind.LOOKUP, 0, 1, MIB, 0) + bytes(MIB - 1)
    async with hoarding(victim) as hoarders:
        for number in range(160):
            connection = await hoarders.data(140 + number % 10)
            hoarders.pour(connection.stream.send, frame)


async def test_answers_that_nobody_reads(victim: Victim) -> None:
    """Each of long lists of keys: to 64 requests of every connection at once."""
    await trio.to_thread.run_sync(put_long_keys, victim)
    async with hoarding(victim) as hoarders:
        asked = b"".join(
            encode_frame(DataKind.LIST, number, ListKeys("default", "long", "", 4000))
            for number in range(64)
        )
        for number in range(10):
            connection = await hoarders.data(160 + number)
            hoarders.pour(connection.stream.send, asked)


def put_long_keys(victim: Victim) -> None:
    items = [(f"long/{number:04}/" + "x" * 1000, b"v") for number in range(2000)]
    victim.peer.client.put_many(items)


async def test_copies_of_small_objects_that_nobody_reads(victim: Victim) -> None:
    """Each answer may have 16 MiB of them."""
    await trio.to_thread.run_sync(partial(victim.peer.client.put, "small", bytes(16 * KIB)))
    async with hoarding(victim) as hoarders:
        asked = encode_frame(DataKind.GET, 1, Get([GetItem(key_digest("small"))] * 1024))
        for number in range(16):
            connection = await hoarders.data(180 + number)
            hoarders.pour(connection.stream.send, asked)


# --- places ----------------------------------------------------------------------------------


def member(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


@asynccontextmanager
async def data_of(
    peer: Peer, count: int, members: int = 1, first: int = 1000
) -> AsyncIterator[list[DataConnection]]:
    """Idle connections of this number of members."""
    connections: list[DataConnection] = []
    try:
        for number in range(count):
            identity = member(first + number % members)
            connections.append(await open_data(peer.node.core.peer_id, peer.data[0], identity))
            await connections[-1].request(DataKind.PING, Ping())
        yield connections
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("members", [1, 8])
async def test_idle_data_connections_yield_to_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Idle members take all places: active ones get theirs, and a member that has taken many is reported."""
    monkeypatch.setattr(data_server, "ServerLimits", partial(ServerLimits, connections=8))
    async with cluster(tmp_path, 2, transport="tcp") as (victim, reader):
        await victim.put("k", os.urandom(100_000))
        places = victim.node.data_places
        async with data_of(victim, 8 - places.taken, members):
            assert places.taken == 8
            for _ in range(3):
                reader.node.pool.renew()  # each of its connections anew
                assert len(await reader.get("k", wait=SECONDS)) == 100_000
                await reader.remove("none")
            async with data_of(victim, 2, members=2, first=5000) as newcomers:
                for newcomer in newcomers:
                    await newcomer.request(DataKind.PING, Ping())
            assert places.taken <= 8
            assert places.yielded
            document = (await victim.statistics())["peer"]["places"]["data"]
            assert document["limit"] == 8
            if members == 1:
                assert document["largest"]["places"] >= 4
                assert document["largest"]["host_places"] == document["taken"]


async def test_busy_data_connections_of_one_member_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps all of them in use, with requests that never become whole."""
    monkeypatch.setattr(data_server, "ServerLimits", partial(ServerLimits, connections=8))
    async with open_peer(config(tmp_path, "victim")) as victim, data_of(victim, 8) as taken:
        beginning = encode_frame(DataKind.PING, 1, Ping())[:-1]
        for connection in taken:
            await connection.stream.send(beginning)
        sessions = victim.node.data_places
        await until(lambda: all(holder.busy for holder in sessions.holders()))
        with pytest.raises(errors.Unavailable, match="all 8 data connections"):
            async with data_of(victim, 1):
                pass
        async with data_of(victim, 1, first=2000):
            assert sessions.yielded == 1
        assert sessions.refused == 1


async def test_a_request_that_is_never_whole_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no progress."""
    monkeypatch.setattr(data_server, "ServerLimits", partial(ServerLimits, frame_seconds=0.5))
    monkeypatch.setattr(control_frames, "FRAME_SECONDS", 0.5)
    async with (
        open_peer(config(tmp_path, "victim")) as victim,
        data_of(victim, 1) as (connection,),
        hostile_host(7, "default") as host,
    ):
        control = await host.dialler.dial(None, [victim.control], SECONDS)
        stream = await admitted(host, control)
        await until(lambda: victim.node.host.keeper.admitted() != [])
        data = HEADER.pack(DataKind.PING, 0, 1, 1000, 0) + bytes(900)
        ping = HEADER.pack(ControlKind.PING, 0, 1, 1000, 0) + bytes(900)
        with trio.fail_after(SECONDS), suppress(OSError):
            for number in range(900):
                await connection.stream.send(data[number : number + 1])
                await trio.sleep(0.01)
            raise AssertionError("the data connection is still there")
        with trio.fail_after(SECONDS), suppress(OSError):
            for number in range(900):
                await stream.write(ping[number : number + 1])
                await trio.sleep(0.01)
            raise AssertionError("the stream is still there")


@pytest.mark.parametrize("hosts", [1, 12])
async def test_a_newcomer_finds_a_place_among_hoarders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    """All places for members are taken, by one that has many or by many that have one, and none is used."""
    monkeypatch.setattr(host_module, "MAX_ADMITTED", 12)
    async with open_peer(config(tmp_path, "victim")) as victim, AsyncExitStack() as stack:
        keeper = victim.node.host.keeper
        hostile = [
            await stack.enter_async_context(hostile_host(number + 1, "default"))
            for number in range(hosts)
        ]
        for number in range(12):
            host = hostile[number % hosts]
            connection = await host.dialler.dial(None, [victim.control], SECONDS)
            await admitted(host, connection)
        await until(lambda: len(keeper.admitted()) == 12)
        # a connection that was made just now is about to be used
        await until(lambda: not any(holder.busy for holder in keeper.holders()))
        newcomer = await stack.enter_async_context(open_peer(config(tmp_path, "newcomer", victim)))
        await until(lambda: len(newcomer.node.core.live_peers()) == 1)
        await newcomer.put("k", b"value")
        assert await victim.get("k", wait=SECONDS) == b"value"
        assert keeper.counts.yielded >= 1
        assert len(keeper.admitted()) <= 12


async def test_a_member_that_uses_all_places_makes_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection has a request under way; itself, it gets no more."""
    monkeypatch.setattr(host_module, "MAX_ADMITTED", 8)
    async with open_peer(config(tmp_path, "victim")) as victim, hostile_host(1, "default") as host:
        keeper = victim.node.host.keeper
        for _ in range(8):
            connection = await host.dialler.dial(None, [victim.control], SECONDS)
            await admitted(host, connection)
        await until(lambda: len(keeper.admitted()) == 8)
        for connection in keeper.admitted():
            connection.activity.begin()
        with pytest.raises(Exception, match="in use"):
            await admitted(host, await host.dialler.dial(None, [victim.control], SECONDS))
        async with hostile_host(2, "default") as other:
            await other.ask(
                victim.node.core.peer_id, [victim.control], ControlKind.PING, ControlPing(1, []), SECONDS
            )
        assert keeper.counts.yielded == 1
        assert keeper.counts.refused_full == 1
