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

import pytest
import trio

from p2pstore import errors
from p2pstore.config import split_address
from p2pstore.gossip.links import host as host_module
from p2pstore.gossip.links import link as link_module
from p2pstore.gossip.links.admission import Opener
from p2pstore.gossip.links.host import ControlHost, open_control_host
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.libp2p_parts import MultiselectClient, MultiselectCommunicator
from p2pstore.gossip.links.link import LinkError, open_asking_stream
from p2pstore.gossip.messages import ControlKind, Ping, PingRequest
from p2pstore.keyring import KeyRing
from p2pstore.objects import KIB, MIB, key_digest
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from p2pstore.transfer import data_server
from p2pstore.transfer.data_connection import DataConnection
from p2pstore.transfer.data_session import ServerLimits
from p2pstore.transfer.messages import DataKind, Get, GetItem, ListKeys
from p2pstore.transfer.messages import Ping as DataPing
from p2pstore.transfer.tickets import Scope, issue_ticket
from p2pstore.trio_streams import TrioDriver
from p2pstore.wire import HEADER, Message, encode_frame
from tests.cluster.test_cli import Machine, eventually, new_machine
from tests.cluster.test_cli import Peer as Process
from tests.cluster.test_open_peer import cluster, config, until
from tests.cluster.test_strangers import private_bytes_of

SECONDS = 20.0
MOST_BYTES: Final = 96 * MIB
"""What hoarders may add to a peer's memory: 48 MiB are its budget, the rest is for their connections."""
QUIET_SECONDS: Final = 0.5
"""Hoarders that get nothing through for so long have got all they can."""
BYTES_AT_ONCE: Final = 256 * KIB


class Hoarders:
    """Members that only take. `sent_bytes` of them all."""

    def __init__(self, nursery: trio.Nursery, stack: AsyncExitStack, victim: Victim) -> None:
        self.sent_bytes = 0
        self.nursery = nursery
        self.stack = stack
        self.victim = victim

    async def host(self, number: int) -> ControlHost:
        """A member of its own."""
        return await self.stack.enter_async_context(hostile_host(number, self.victim.cluster))

    async def stream(self, host: ControlHost) -> Any:
        """An admitted stream on a connection of its own."""
        connection = await host._dial(None, [self.victim.control], SECONDS)
        return await admitted(host, connection)

    async def data(self, number: int) -> DataConnection:
        """A data connection of a member."""
        connection = await open_data(self.victim, Identity(bytes([number]) * 32))
        self.stack.callback(connection.close)
        return connection

    def pour(self, write: Any, data: bytes) -> None:
        """Send in a task of its own, for as long as anything is taken."""
        self.nursery.start_soon(self._pour, write, data)

    async def _pour(self, write: Any, data: bytes) -> None:
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
        self.peer = machine.join("victim", "--transport", "tcp", "--memory", "256MiB")
        self.control: str = self.peer.ready["control"]
        self.data: str = self.peer.ready["data"][0]
        self.neighbour = self.join("neighbour")
        eventually(lambda: self.peer.alive() == self.neighbour.alive() == 2)
        self.peer.client.put("anchor", b"anchor" * 1000, pin="hard")
        self.known = b""
        self.before = self.last = self.memory

    def join(self, name: str) -> Process:
        """One that must be let in."""
        process = self.machine.join(name, "--transport", "tcp", "--bootstrap", self.control)
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
        assert grown < MOST_BYTES
        assert victim.memory - victim.before < MOST_BYTES
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def hostile_host(number: int, cluster_name: str) -> AsyncIterator[ControlHost]:
    async def handle(*_: object) -> Message:
        raise errors.Unavailable("there is nothing here")

    async with open_control_host(
        identity=Identity(bytes([number]) * 32),
        listen=("127.0.0.1", 0),
        ring=KeyRing(),
        cluster=cluster_name,
        handler=handle,
        on_lost=lambda _: None,
        software="hostile",
    ) as host:
        yield host


async def admitted(host: ControlHost, connection: Any) -> Any:
    """A stream on which the other side takes requests."""
    stream = await connection.muxed.open_stream()
    communicator = MultiselectCommunicator(stream)
    await MultiselectClient().select_one_of([host_module._PROTOCOL], communicator)
    await stream.lift_allowance()
    await open_asking_stream(stream, host._side(Opener, connection))
    return stream


async def open_data(victim: Any, identity: Identity) -> DataConnection:
    """A data connection with a ticket that this identity made for itself."""
    if not victim.known:
        async with hostile_host(250, victim.cluster) as host:
            victim.known = await host.discover(victim.control, SECONDS)
    granted = issue_ticket(
        signer=identity,
        ring=KeyRing(),
        audience=victim.known,
        now_unix=time.time(),
        ticket_id=os.urandom(16),
        scope=Scope.READ | Scope.PEER,
    )
    stream = await TrioDriver().connect_tcp(*split_address(victim.data, "data"), SECONDS)
    return await DataConnection.open(stream, granted)


async def test_control_frames_that_are_never_whole(victim: Victim) -> None:
    """Each of ten members has four, of 4 MiB, on which the last byte is missing."""
    frame = HEADER.pack(ControlKind.EXCHANGE, 0, 1, 4 * MIB, 0) + bytes(4 * MIB - 1)
    async with hoarding(victim) as hoarders:
        for number in range(10):
            host = await hoarders.host(100 + number)
            connection = await host._dial(None, [victim.control], SECONDS)
            for _ in range(4):
                stream = await admitted(host, connection)
                hoarders.pour(stream.write, frame)


async def test_data_requests_that_are_never_whole(victim: Victim) -> None:
    frame = HEADER.pack(DataKind.LOOKUP, 0, 1, MIB, 0) + bytes(MIB - 1)
    async with hoarding(victim) as hoarders:
        for number in range(160):
            connection = await hoarders.data(100 + number % 10)
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
            connection = await hoarders.data(100 + number)
            hoarders.pour(connection.stream.send, asked)


def put_long_keys(victim: Victim) -> None:
    items = [(f"long/{number:04}/" + "x" * 1000, b"v") for number in range(2000)]
    victim.peer.client.put_many(items)


async def test_copies_of_small_objects_that_nobody_reads(victim: Victim) -> None:
    """Each answer may have 64 MiB of them."""
    await trio.to_thread.run_sync(partial(victim.peer.client.put, "small", bytes(16 * KIB)))
    async with hoarding(victim) as hoarders:
        asked = encode_frame(DataKind.GET, 1, Get([GetItem(key_digest("small"))] * 4000))
        for number in range(8):
            connection = await hoarders.data(100 + number)
            hoarders.pour(connection.stream.send, asked)
