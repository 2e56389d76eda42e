"""The side of RDMA that is read from: the segment, registered once, and a queue pair for each reader.

A reader asks on a data connection, which so is what its right to read hangs on: when the connection ends, by
whatever end, its queue pair does too. The reads themselves need nothing of this process.
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Final, Protocol

import trio

from p2pstore.errors import CapacityExceeded
from p2pstore.transfer.messages import RdmaConnect, RdmaConnected
from p2pstore.transfer.rdma_addresses import wake_neighbour
from p2pstore.transfer.rdma_rules import MAX_PACKET_NUMBER, Endpoint, agree
from p2pstore.transfer.rdma_verbs import CompletionQueue, Device, QueuePair, Region
from p2pstore.transfer.tickets import TicketClaims

MAX_READERS: Final = 4096
MAX_READERS_PER_PEER: Final = 8
NO_COMPLETIONS: Final = 16
"""Entries of a queue that stays empty: whoever is only read from hears of nothing."""


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
    """Who lets others read by RDMA."""

    async def connect(self, request: RdmaConnect, claims: TicketClaims) -> ReadableEnd:
        """Let the queue pair that `request` describes read. Raises `CapacityExceeded` when there are too many,
        `ProtocolError` for a queue pair that cannot be, `Unavailable` when there is no way to it."""
        ...


class ServedReader:
    """The `ReadableEnd` of one reader."""

    def __init__(self, server: RdmaServer, issuer: bytes, pair: QueuePair, region: Region) -> None:
        end = pair.endpoint
        self.reply = RdmaConnected(
            *(end.queue_pair, end.packet_number, end.gid, end.path_mtu_bytes, end.reads),
            *(region.address, region.length_bytes, region.remote_key),
        )
        self.issuer = issuer
        self.pair = pair
        self._server = server

    def close(self) -> None:
        """End it: what the reader still has under way fails."""
        self._server.drop(self)


class RdmaServer:
    """Lets other peers read one registered region (a segment, from its header on) through one device."""

    def __init__(self, device: Device, region: Region) -> None:
        self._device = device
        self._region = region
        self._queue: CompletionQueue = device.completion_queue(NO_COMPLETIONS)
        self._readers: set[ServedReader] = set()
        self._of_peer: Counter[bytes] = Counter()

    @property
    def readers(self) -> int:
        """Queue pairs that may read now."""
        return len(self._readers)

    async def connect(self, request: RdmaConnect, claims: TicketClaims) -> ServedReader:
        """See `RdmaBackend`."""
        if (
            len(self._readers) >= MAX_READERS
            or self._of_peer[claims.issuer] >= MAX_READERS_PER_PEER
        ):
            raise CapacityExceeded("too many RDMA connections: read over TCP")
        other = Endpoint(
            *(request.queue_pair, request.packet_number, request.gid),
            *(request.path_mtu_bytes, request.reads),
        )
        pair = self._device.queue_pair(
            self._queue, secrets.randbelow(MAX_PACKET_NUMBER), requests=1, may_be_read=True
        )
        reader = ServedReader(self, claims.issuer, pair, self._region)
        self._readers.add(reader)
        self._of_peer[claims.issuer] += 1
        try:
            path = agree(pair.endpoint, other)
            await wake_neighbour(self._device.interface, other.gid, trio.sleep)
            pair.connect(other, path)
        except BaseException:
            self.drop(reader)
            raise
        return reader

    def drop(self, reader: ServedReader) -> None:
        """End one reader's queue pair."""
        if reader in self._readers:
            self._readers.remove(reader)
            self._of_peer[reader.issuer] -= 1
            if not self._of_peer[reader.issuer]:
                del self._of_peer[reader.issuer]
            reader.pair.close()

    def close(self) -> None:
        """End all readers; the device stays open."""
        for reader in list(self._readers):
            self.drop(reader)
        self._queue.close()
