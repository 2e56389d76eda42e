"""RDMA of one peer: devices of this machine, the segment registered with them once, and a queue pair for each reader.

Where there is no device, nothing of pyverbs is imported. Registering memory holds the interpreter lock, so it happens
before the peer serves, and after the kernel has provided the pages, which takes most of the time. A reader asks on a
data connection, which so is what its right to read hangs on: when the connection ends, by whatever end, its queue pair
does too. The reads themselves need nothing of this process.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.config import PeerConfig
from p2pstore.errors import CapacityExceeded, ConfigError, P2PStoreError, Unavailable
from p2pstore.objects import CHUNK_BYTES
from p2pstore.transfer.data_messages import RdmaConnect, RdmaConnected
from p2pstore.transfer.rdma.rdma_hardware import location_of, read_matrix, wake_neighbour
from p2pstore.transfer.rdma.rdma_rules import (
    MAX_PACKET_NUMBER,
    Endpoint,
    ServingDevice,
    agree,
    choose_serving,
    same_network,
)
from p2pstore.transfer.rdma.rdma_staging import Registered
from p2pstore.transfer.rdma.rdma_topology import Choice, Matrix, natural_order
from p2pstore.transfer.rdma.rdma_verbs import Device, QueuePair, Region
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.reading.connection_pool import ConnectionPool

if TYPE_CHECKING:
    from p2pstore.transfer.rdma.rdma_reads import ReadEngine
    from p2pstore.transfer.rdma.rdma_transport import RdmaTransport

MAX_READERS: Final = 4096
MAX_READERS_PER_PEER: Final = 8
"""Through each device."""
NO_COMPLETIONS: Final = 16
"""Entries of a queue that stays empty: one-sided reads leave no completions at the holder."""


class ServedReader:
    """A queue pair that lets another peer read, until it is closed. `reply`: what the reader has to know of it."""

    def __init__(
        self, server: RdmaServer, issuer: bytes, number: int, pair: QueuePair, region: Region
    ) -> None:
        end = pair.endpoint
        self.reply = RdmaConnected(
            end.queue_pair,
            end.packet_number,
            end.gid,
            end.path_mtu_bytes,
            end.reads,
            region.address,
            region.length_bytes,
            region.remote_key,
            server.preferred,
        )
        self.issuer = issuer
        self.number = number
        self.pair = pair
        self._server = server

    def close(self) -> None:
        """End it: what the reader still has under way fails. Never blocks, may be called twice."""
        self._server.drop(self)


class RdmaServer:
    """Lets other peers read memory that is registered (a segment, from its header on) through several devices, the
    first `preferred` of which are near it (all, when not said)."""

    def __init__(
        self, devices: Sequence[Device], memory: Registered, preferred: int | None = None
    ) -> None:
        self.preferred = preferred or len(devices)
        self._devices = devices
        self._memory = memory
        self._queues = [device.completion_queue(NO_COMPLETIONS) for device in devices]
        self._readers: set[ServedReader] = set()
        self._of_peer: Counter[tuple[bytes, int]] = Counter()
        """By the reader's peer id and the number of the device."""

    @property
    def readers(self) -> int:
        """Queue pairs that may read now."""
        return len(self._readers)

    async def connect(self, request: RdmaConnect, claims: TicketClaims) -> ServedReader:
        """Let the queue pair that `request` describes read. Raises `CapacityExceeded` when there are too many,
        `ProtocolError` for a queue pair that cannot be, `Unavailable` when there is no way to it."""
        other = Endpoint(
            request.queue_pair, request.packet_number, request.gid, request.path_mtu_bytes, request.reads
        )
        number = self._choose(other, claims.issuer)
        device = self._devices[number]
        if (
            len(self._readers) >= MAX_READERS
            or self._of_peer[claims.issuer, number] >= MAX_READERS_PER_PEER
        ):
            raise CapacityExceeded("too many RDMA connections: read over TCP")
        pair = device.queue_pair(
            self._queues[number], secrets.randbelow(MAX_PACKET_NUMBER), requests=1, may_be_read=True
        )
        reader = ServedReader(self, claims.issuer, number, pair, self._memory.regions[number])
        self._readers.add(reader)
        self._of_peer[claims.issuer, number] += 1
        try:
            path = agree(pair.endpoint, other)
            await wake_neighbour(device.interface, other.gid, trio.sleep)
            pair.connect(other, path)
        except BaseException:
            self.drop(reader)
            raise
        return reader

    def _choose(self, other: Endpoint, issuer: bytes) -> int:
        """The device for one more line of a reader. Raises `Unavailable` when none works."""
        found = choose_serving(
            [
                ServingDevice(
                    active=device.is_active,
                    same_network=same_network(device.gid.gid, device.network_bits, other.gid),
                    preferred=number < self.preferred,
                    readers=self._of_peer[issuer, number],
                )
                for number, device in enumerate(self._devices)
            ]
        )
        if found is None:
            raise Unavailable("the links of all RDMA devices of the holder are down")
        return found

    def drop(self, reader: ServedReader) -> None:
        """End one reader's queue pair."""
        if reader in self._readers:
            self._readers.remove(reader)
            key = reader.issuer, reader.number
            self._of_peer[key] -= 1
            if not self._of_peer[key]:
                del self._of_peer[key]
            reader.pair.close()

    def close(self) -> None:
        """End all readers; the devices stay open."""
        for reader in list(self._readers):
            self.drop(reader)
        for queue in self._queues:
            queue.close()


logger = logging.getLogger("p2pstore.peer")

STAGING_BYTES: Final = 8 * CHUNK_BYTES
"""Registered memory for answers: objects of one chunk that fit into it take one round trip less."""


@dataclass(frozen=True, slots=True)
class PeerRdma:
    """RDMA parts of a peer."""

    server: RdmaServer
    transport: RdmaTransport
    engines: Sequence[ReadEngine]

    @property
    def works(self) -> bool:
        """False once all devices are lost."""
        return not all(engine.lost for engine in self.engines)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called for each device that is lost."""
        for engine in self.engines:
            engine.when_lost = callback


@asynccontextmanager
async def open_rdma(
    config: PeerConfig,
    view: memoryview,
    pool: ConnectionPool,
    provide_pages: Callable[[], Awaitable[None]],
) -> AsyncIterator[PeerRdma | None]:
    """RDMA for the length of the block, with the memory of `view` registered; None when this peer is not to use it, or
    has no device. `provide_pages` has the kernel provide that memory.

    Raises `ConfigError` when the settings ask for RDMA (transport rdma, devices by name, a topology) and it does not
    work. Else a device that does not work is only logged.
    """
    names = device_names(config)
    if not names and config.rdma_topology is None:
        yield None
        return
    # Libraries that most machines have no use for are not imported there.
    from p2pstore.transfer.rdma.rdma_staging import Staging
    from p2pstore.transfer.rdma.rdma_transport import RdmaTransport, open_rdma_reading

    matrix = read_matrix(config.rdma_topology, "rdma_topology")
    with ExitStack() as stack:
        try:
            devices = open_devices(names)
            for device in devices:
                stack.callback(device.close)
            await provide_pages()
            used = await register(devices, view, matrix)
            staging = Staging.on(used.devices, STAGING_BYTES)
            server = RdmaServer(used.devices, used.memory, used.preferred)
        except P2PStoreError as error:
            if config.transport == "rdma" or config.rdma_device or config.rdma_topology:
                raise ConfigError(f"transport: {error}") from error
            logger.warning("rdma is not used: %s", error, extra={"event": "rdma_unusable"})
            stack.close()
            yield None
            return
        stack.callback(server.close)
        async with open_rdma_reading(used.devices) as (engines, lines):
            transport = RdmaTransport(
                engines, pool, lines, staging=staging, preferred=used.preferred, registered=[used.memory]
            )
            logger.info(
                "rdma through %s",
                used.text(),
                extra={"event": "rdma", "devices": [each.name for each in used.devices]},
            )
            yield PeerRdma(server, transport, engines)


DEVICES: Final = Path("/sys/class/infiniband")
MAX_DEVICES: Final = 16
"""That one peer uses: with each it registers all its memory."""


@dataclass(frozen=True, slots=True)
class UsedDevices:
    """Devices that know this peer's memory; the first `preferred` of them are near it."""

    devices: Sequence[Device]
    memory: Registered
    preferred: int

    def text(self) -> str:
        """For people."""
        told = [f"{each.name} ({each.interface or 'InfiniBand'})" for each in self.devices]
        near, far = told[: self.preferred], told[self.preferred :]
        return ", ".join(near) + (f"; else {', '.join(far)}" if far else "")


def device_names(config: PeerConfig, folder: Path = DEVICES) -> Sequence[str]:
    """The devices to try; none when this peer is not to use RDMA, or it is optional and absent. Raises
    `ConfigError` when there is none of those that it must use."""
    if config.transport not in ("auto", "rdma") or config.data_tls == "on":
        return ()
    found = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    found.sort(key=natural_order)
    if config.rdma_device:
        missing = [name for name in config.rdma_device if name not in found]
        if missing:
            raise ConfigError(
                f"rdma_device: this machine has no RDMA device {missing[0]}; it has "
                f"{', '.join(found) or 'none'}"
            )
        return list(dict.fromkeys(config.rdma_device))
    if config.transport == "rdma" and not found:
        raise ConfigError(
            "transport: rdma needs an RDMA device, and this machine has none (nothing under "
            f"{folder}): load its driver, or use auto"
        )
    return found


def open_devices(names: Sequence[str], most: int = MAX_DEVICES) -> list[Device]:
    """Those that work, the first `most` of them. Raises `Unavailable` that says of each why it does not when none
    does."""
    devices: list[Device] = []
    problems = []
    for name in names:
        if len(devices) == most:
            break
        try:
            devices.append(Device(name))
        except Unavailable as error:
            problems.append(str(error))
    if not devices:
        raise Unavailable("; ".join(dict.fromkeys(problems)))
    _tell(problems)
    return devices


async def register(devices: Sequence[Device], view: memoryview, matrix: Matrix) -> UsedDevices:
    """Register memory, whose pages are there, with those devices that `matrix` wants for it. One that cannot take it is
    left out. Raises `Unavailable` when none is wanted, and what `Device.register` raises when none can."""
    from p2pstore.memory.mapped.mapping import address_of
    from p2pstore.transfer.rdma.rdma_staging import Registered

    address = address_of(view)
    location = await trio.to_thread.run_sync(location_of, address, len(view))
    choice = near_memory(matrix, location, [device.name for device in devices])
    by_name = {device.name: device for device in devices}
    used, regions, problems = [], [], []
    for name in choice.all:
        try:
            regions.append(by_name[name].register(address, len(view), remote_read=True))
            used.append(by_name[name])
        except P2PStoreError as error:
            if name == choice.all[-1] and not used:
                raise
            problems.append(str(error))
    _tell(problems)
    near = sum(device.name in choice.preferred for device in used)
    return UsedDevices(used, Registered(regions), near or len(used))


def near_memory(matrix: Matrix, location: str, names: Sequence[str]) -> Choice:
    """Of these devices, those to use for memory there. Raises `Unavailable` when there is none among them."""
    choice = matrix.get(location, Choice(tuple(names))).only(names)
    if not choice.all:
        raise Unavailable(
            f"rdma_topology names for {location}, where this peer's memory is, none of the RDMA devices that may be "
            f"used: {', '.join(names)}"
        )
    return choice


def _tell(problems: Sequence[str]) -> None:
    for problem in problems:
        logger.warning("a device is not used: %s", problem, extra={"event": "rdma_unusable"})
