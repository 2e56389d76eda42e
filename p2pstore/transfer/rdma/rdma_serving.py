"""The side of RDMA that is read from: the segment, registered once, and a queue pair for each reader.

A reader asks on a data connection, which so is what its right to read hangs on: when the connection ends, by
whatever end, its queue pair does too. The reads themselves need nothing of this process.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from p2pstore.errors import CapacityExceeded, Unavailable
from p2pstore.transfer.data_messages import RdmaConnect, RdmaConnected
from p2pstore.transfer.rdma.rdma_addresses import wake_neighbour
from p2pstore.transfer.rdma.rdma_rules import (
    MAX_PACKET_NUMBER,
    Endpoint,
    ServingDevice,
    agree,
    choose_serving,
    same_network,
)
from p2pstore.transfer.rdma.rdma_staging import Registered
from p2pstore.transfer.rdma.rdma_verbs import Device, QueuePair, Region
from p2pstore.transfer.read_tickets import TicketClaims

MAX_READERS: Final = 4096
MAX_READERS_PER_PEER: Final = 8
"""Through each device."""
NO_COMPLETIONS: Final = 16
"""Entries of a queue that stays empty: one-sided reads leave no completions at the holder."""


class ReadableEnd(Protocol):
    """A queue pair that lets another peer read, until it is closed."""

    @property
    def reply(self) -> RdmaConnected:
        """What the reader has to know of it."""
        ...

    def close(self) -> None:
        """End it; never blocks, may be called twice."""
        ...


class RdmaBackend(Protocol):
    """The side that lets others read by RDMA."""

    async def connect(self, request: RdmaConnect, claims: TicketClaims) -> ReadableEnd:
        """Let the queue pair that `request` describes read. Raises `CapacityExceeded` when there are too many,
        `ProtocolError` for a queue pair that cannot be, `Unavailable` when there is no way to it."""
        ...


class ServedReader:
    """The `ReadableEnd` of one reader."""

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
        """End it: what the reader still has under way fails."""
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
        """See `RdmaBackend`."""
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
