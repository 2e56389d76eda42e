"""Putting objects on other peers, where the local one has no room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from p2pstore.client import answers
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import (
    AuthenticationFailed,
    CapacityExceeded,
    DeadlineExceeded,
    ObjectTooLarge,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import chunk_sums, format_bytes, key_digest, root_checksum
from p2pstore.put_facts import PutOptions
from p2pstore.results import PutResult
from p2pstore.runtime.side_by_side import PIECE_BYTES
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.data_messages import Store, Stored, Ticket
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Empty

MAX_TRIES: Final = 3
"""Other peers that may fail or refuse before a put gives up."""
_NEXT_PEER: Final = (
    AuthenticationFailed,
    CapacityExceeded,
    DeadlineExceeded,
    ObjectTooLarge,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
"""Errors of one peer, after which the next is asked; any other error ends the put."""


class ElsewhereWriter:
    """Puts on other peers for one client. Nothing of a value moves before its target has room for it."""

    def __init__(self, link: PeerLink, namespace: str) -> None:
        self._link = link
        self._namespace = namespace
        self._pool = ConnectionPool(link.driver, progress_seconds=link.timeout_seconds)

    def close(self) -> None:
        """Close the connections to other peers."""
        self._pool.close()

    async def put(
        self,
        key: str,
        source: memoryview,
        options: PutOptions,
        refusal: P2PStoreError,
        finish_seconds: float,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store one value at the first peer that takes it. `refusal` is why the local one does not,
        `finish_seconds` what its replicas may take. Raises `CapacityExceeded` when no peer takes it."""
        if options.durable:
            raise CapacityExceeded(
                f"durable: only the local peer's SSD is asked. {refusal}"
            ) from refusal
        placed = await self._place(key, len(source), options.pin, refusal)
        request = await self._request(key, source, options, placed.clock)
        reasons: list[str] = []
        tries = 0
        for target in placed.targets:
            try:
                stored = await self._pool.store(
                    _remote(target), request, source, finish_seconds, progress
                )
            except _NEXT_PEER as error:
                self._link.check()  # it may be that this client was closed
                reasons.append(f"{target.name}: {error}")
                tries += not isinstance(error, ProtocolMismatch) and not self._is_own(target)
                if tries == MAX_TRIES:
                    break
            else:
                return await self._finish(key, target, stored)
        raise CapacityExceeded(
            f"no peer took the {format_bytes(len(source))} of {key!r}. Here: {refusal}. "
            + ". ".join(reasons)
        )

    async def _place(self, key: str, length: int, pin: int, refusal: P2PStoreError) -> local.Placed:
        """Where to try. Raises `CapacityExceeded` when no other peer could hold the value."""
        digest = key_digest(key, self._namespace)
        request = local.Place(digest, length, self._namespace, pin)
        try:
            placed = await self._link.request(LocalKind.PLACE, request, local.Placed)
        except ProtocolMismatch:  # a peer of the version before keeps what is put to itself
            raise refusal from None
        if placed.error.code:
            raise CapacityExceeded(f"{refusal}. Elsewhere: {placed.error.text}")
        return placed

    async def _request(self, key: str, source: memoryview, options: PutOptions, clock: int) -> Store:
        sums = await sum_chunks(self._link.driver, source)
        root = root_checksum(len(source), sums)
        travelling = msgspec.structs.asdict(options)
        del travelling["durable"]
        return Store(self._namespace, key, len(source), sums, root, clock, **travelling)

    def _is_own(self, target: local.Target) -> bool:
        """Whether the target is the local peer: it holds the key, and is asked what that means."""
        return target.peer_id == self._link.connection.hello.peer_id

    async def _finish(self, key: str, target: local.Target, stored: Stored) -> PutResult:
        """Tell the local peer, so that its next caller finds the object."""
        if stored.record:
            news = local.StoredElsewhere(
                target.peer_id, stored.incarnation, stored.sequence, stored.record
            )
            await self._link.request(LocalKind.STORED, news, Empty)
        outcome = local.PutOutcome(
            stored.status, stored.copies, stored.wanted, stored.clock, stored.writer
        )
        return answers.put_results([key], outcome, target.name)[0]


async def sum_chunks(driver: Driver, source: memoryview) -> bytes:
    """The chunk sums of a value, packed u64; of a long one in pieces of 4 MiB on a thread."""
    if len(source) <= PIECE_BYTES:
        return chunk_sums(source)
    pieces = []
    for start in range(0, len(source), PIECE_BYTES):
        work: Callable[[], bytes] = partial(chunk_sums, source[start : start + PIECE_BYTES])
        pieces.append(await driver.run_in_thread(work))
    return b"".join(pieces)


def _remote(target: local.Target) -> RemotePeer:
    ticket = Ticket(target.ticket_claims, target.ticket_signature)
    return RemotePeer(target.peer_id, tuple(target.data), GrantedTicket(ticket, target.ticket_secret))
