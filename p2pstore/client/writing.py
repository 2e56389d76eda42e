"""Putting objects: reserve, copy into the mapped segment, commit; elsewhere what has no room here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from p2pstore import arguments
from p2pstore.client import answers
from p2pstore.client.fetcher import deadline_ms
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains
from p2pstore.client.put_batches import PutBatch, PutRow
from p2pstore.client.puts import WINDOW_BYTES, WINDOW_SHARE, fill, fill_many, trailer_bound
from p2pstore.errors import (
    AuthenticationFailed,
    CapacityExceeded,
    DeadlineExceeded,
    GpuCopyFailed,
    ObjectTooLarge,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
    StoreClosed,
    Unavailable,
)
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import RequestAhead
from p2pstore.objects import (
    check_object_length,
    chunk_sums,
    encode_namespace,
    format_bytes,
    key_digest,
    key_hasher,
    root_checksum,
)
from p2pstore.put_facts import PutFacts
from p2pstore.results import Buffer, ItemResult, OnConflict, PutResult
from p2pstore.runtime.side_by_side import PIECE_BYTES
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.data_messages import Store, Stored, Ticket
from p2pstore.transfer.read_tickets import GrantedTicket
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.transfer.transport import RemotePeer
from p2pstore.values import Source, value_of
from p2pstore.wire import Code, Empty

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A copy on another peer may take this long before a put stops waiting for it."""
ITEM_SECONDS: Final = 0.005
"""What each item of a batch, and each further copy of it, may take besides: other peers are asked about it."""

_NO_MEMORY: Final = local.ItemError(
    int(Code.CAPACITY_EXCEEDED), "the local peer offers no memory: it was started with memory 0"
)

PutOptions = dict[str, Any]
"""Fields of a `PutFacts` that are the caller's choice."""


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


def put_options(
    replicas: int, pin: str, ttl: float | None, policy: OnConflict, durable: bool
) -> PutOptions:
    """The options of one put, checked. `ttl` in seconds. Raises `TypeError` or `ValueError`."""
    return {
        "replicas": arguments.whole_number("replicas", replicas),
        "pin": arguments.pin_number(pin),
        "ttl_ms": arguments.milliseconds("ttl", ttl),
        "overwrite": policy == "overwrite",
        "durable": arguments.flag("durable", durable),
    }


class _RowWriter:
    """Writes the values of one batch, which all have the same options."""

    def __init__(self, writer: Writer, options: PutOptions) -> None:
        self.window_bytes = writer.window_bytes
        self._writer = writer
        self._options = options

    async def reserve(self, rows: Sequence[PutRow]) -> list[local.Reservation]:
        return await self._writer.reserve(self._rooms_for(rows))

    async def fill(
        self, rows: Sequence[PutRow], rooms: Sequence[local.Reservation]
    ) -> list[PutFacts | GpuCopyFailed]:
        return await self._writer.fill_many(rows, rooms, self._options)

    async def commit_ahead(
        self, items: list[PutFacts], next_rows: Sequence[PutRow]
    ) -> RequestAhead[local.Committed]:
        return await self._writer.commit_ahead(items, self._rooms_for(next_rows))

    async def put_alone(self, row: PutRow) -> PutResult:
        return await self._writer.put(row.key, row.source, self._options, follows=row.follows)

    def _rooms_for(self, rows: Sequence[PutRow]) -> list[local.ReserveItem]:
        return [self._writer.room_for(row, self._options) for row in rows]


class Writer:
    """Puts into one namespace over one link. A put that ends early, by an error or by cancellation,
    gives its room back."""

    def __init__(self, link: PeerLink, namespace: str, chains: PrefixChains) -> None:
        self._link = link
        self._namespace = namespace
        self._chains = chains
        self._digest = key_hasher(namespace)
        self._namespace_bytes = len(encode_namespace(namespace))
        self._elsewhere = ElsewhereWriter(link, namespace)
        memory_bytes = max((reader.geometry.data_bytes for reader in link.readers), default=0)
        self._peer_has_memory = memory_bytes > 0
        self.window_bytes = min(WINDOW_BYTES, memory_bytes // WINDOW_SHARE)

    def close(self) -> None:
        """Close the connections to other peers."""
        self._elsewhere.close()

    async def put(
        self,
        key: str,
        source: Source,
        options: PutOptions,
        progress: Progress | None = None,
        follows: bytes | None = None,
    ) -> PutResult:
        """Store one value: one round trip when the room was reserved by an earlier put. On another peer
        when the local one has no room. `follows` is the digest of the block before it (empty: none); None for what
        `match_prefix` was asked about."""
        link = self._link
        if follows is None:
            follows = self._chains.before(self._digest(key))
        row = PutRow(0, key, source, follows)
        item = self.room_for(row, options)
        try:
            reservation = await self._room_for(key, item)
        except (CapacityExceeded, ObjectTooLarge) as refusal:
            seconds = _replication_seconds(len(source), options["replicas"])
            whole = source
            if not isinstance(whole, memoryview):
                whole = await link.driver.run_in_thread(whole.joined)
            return await self._elsewhere.put(key, whole, options, refusal, seconds, progress)
        try:
            commit = await self.fill(row, reservation, options, progress)
            again = link.ahead.wanted(item)
            reply = await self._commit([commit], again)
            self._keep(again, reply)
            return answers.put_result(key, reply.items[0], link.connection.hello.name)
        except BaseException:
            link.abort([reservation.reservation])  # harmless when the commit got through
            raise

    async def _room_for(self, key: str, item: local.ReserveItem) -> local.Reservation:
        """Room in the local peer's memory. Raises `CapacityExceeded` or `ObjectTooLarge`."""
        link = self._link
        reservation = link.ahead.take(item)
        if reservation is not None:
            return reservation
        if link.ahead.held:
            link.abort(link.ahead.drop_others(item))
        reservation = (await self.reserve([item]))[0]
        if reservation.error.code == Code.CAPACITY_EXCEEDED and link.make_room():
            reservation = (await self.reserve([item]))[0]
        answers.raise_for(key, reservation.error)
        return reservation

    async def put_many(
        self, items: Sequence[tuple[str, Buffer]], options: PutOptions
    ) -> list[ItemResult]:
        """Store many values; one result per item. Each follows the one before it, as far as eviction is concerned:
        a batch is a chain of prefix blocks, or it does not matter which of it goes first."""
        results: list[ItemResult] = [ItemResult(key) for key, _ in items]
        rows: list[PutRow] = []
        before: bytes | None = None
        for place, (key, value) in enumerate(items):
            try:
                digest = self._digest(key)
                source = value_of(value)
                check_object_length(len(source))
            except (P2PStoreError, ValueError, TypeError) as error:
                results[place] = ItemResult(key, error=answers.plain_error(error))
                continue
            if before is None:  # the first one follows what it was missing behind
                before = self._chains.before(digest)
            rows.append(PutRow(place, key, source, before))
            before = digest
        batch = PutBatch(self._link, _RowWriter(self, options), rows, results)
        together = len(rows) > 1 and self._peer_has_memory
        await (batch.put() if together else batch.put_alone())
        return results

    def room_for(self, row: PutRow, options: PutOptions) -> local.ReserveItem:
        """The room that a value needs."""
        check_object_length(len(row.source))
        return local.ReserveItem(
            len(row.source),
            trailer_bound(
                len(row.key.encode()) + self._namespace_bytes,
                len(row.source),
                options.get("dtype", ""),
                len(options.get("shape", ())),
            ),
        )

    async def reserve(self, items: list[local.ReserveItem]) -> list[local.Reservation]:
        """Room for each, or why there is none."""
        if not self._peer_has_memory:  # its mapping tells, so it need not be asked
            return [local.Reservation(0, 0, 0, 0, _NO_MEMORY)] * len(items)
        reply = await self._link.request(
            LocalKind.RESERVE,
            local.Reserve(items, self._namespace),
            local.Reserved,
            on_late_reply=lambda late: self._link.abort(_numbers(late.items)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer reserved room for another number of values")
        return reply.items

    async def fill(
        self,
        row: PutRow,
        reservation: local.Reservation,
        options: PutOptions,
        progress: Progress | None = None,
    ) -> PutFacts:
        """Copy a value there, and sum it. Raises `GpuCopyFailed`."""
        target = self._room(row, reservation)
        # Closed by another task or thread, the peer gives this room to another client.
        check = self._link.connection.check_usable
        sums = await fill(self._link.driver, target, row.source, check, progress)
        return _facts(row, reservation, sums, options)

    async def fill_many(
        self, rows: Sequence[PutRow], rooms: Sequence[local.Reservation], options: PutOptions
    ) -> list[PutFacts | GpuCopyFailed]:
        """`fill` of each."""
        targets = list(map(self._room, rows, rooms))
        check = self._link.connection.check_usable
        made = await fill_many(self._link.driver, targets, [row.source for row in rows], check)
        return [
            sums if isinstance(sums, GpuCopyFailed) else _facts(row, room, sums, options)
            for row, room, sums in zip(rows, rooms, made, strict=True)
        ]

    def _room(self, row: PutRow, reservation: local.Reservation) -> memoryview:
        segment = self._link.connection.segment(reservation.segment)
        return segment[reservation.offset : reservation.offset + len(row.source)]

    async def commit_ahead(
        self, items: list[PutFacts], rooms: list[local.ReserveItem]
    ) -> RequestAhead[local.Committed]:
        """Have these published, and reserve rooms for values at hand. The answer is received later."""
        link = self._link
        commit = local.Commit(
            self._namespace, items, deadline_ms(link.timeout_seconds), rooms, at_hand=True
        )
        return await link.ask_ahead(
            LocalKind.COMMIT,
            commit,
            local.Committed,
            extra_seconds=_commit_seconds(items),
            on_late_reply=lambda late: link.abort(_numbers(late.again)),
        )

    async def _commit(self, items: list[PutFacts], again: list[local.ReserveItem]) -> local.Committed:
        reply = await self._link.request(
            LocalKind.COMMIT,
            local.Commit(self._namespace, items, deadline_ms(self._link.timeout_seconds), again),
            local.Committed,
            extra_seconds=_commit_seconds(items),
            on_late_reply=lambda late: self._link.abort(_numbers(late.again)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer answered for another number of puts")
        return reply

    def _keep(self, again: list[local.ReserveItem], reply: local.Committed) -> None:
        if again:
            self._link.abort(self._link.ahead.granted(again[0], reply.again))


def _facts(row: PutRow, reservation: local.Reservation, sums: bytes, options: PutOptions) -> PutFacts:
    length = len(row.source)
    root = root_checksum(length, sums)
    return PutFacts(reservation.reservation, row.key, length, sums, root, **options, follows=row.follows)


def _commit_seconds(items: Iterable[PutFacts]) -> float:
    """What publishing these may take, on top of the usual."""
    return sum(_replication_seconds(item.length, item.replicas) for item in items)


def _replication_seconds(length: int, replicas: int) -> float:
    """What making the copies may take."""
    return length * (replicas - 1) / REPLICATE_BYTES_PER_SECOND + ITEM_SECONDS * replicas


def _numbers(reservations: Iterable[local.Reservation]) -> list[int]:
    """The numbers of those that were granted."""
    return [each.reservation for each in reservations if not each.error.code]


class ElsewhereWriter:
    """Puts on other peers for one client. Nothing of a value moves before its target has room for it."""

    def __init__(self, link: PeerLink, namespace: str) -> None:
        self._link = link
        self._namespace = namespace
        self._pool = DataPool(link.driver, progress_seconds=link.timeout_seconds)

    def close(self) -> None:
        """Close the connections to other peers."""
        self._pool.close()

    async def put(
        self,
        key: str,
        source: memoryview,
        options: dict[str, Any],
        refusal: P2PStoreError,
        finish_seconds: float,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store one value at the first peer that takes it. `refusal` is why the local one does not,
        `finish_seconds` what its replicas may take. Raises `CapacityExceeded` when no peer takes it."""
        if options["durable"]:
            raise CapacityExceeded(
                f"durable: only the local peer's SSD is asked. {refusal}"
            ) from refusal
        placed = await self._place(key, len(source), options["pin"], refusal)
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

    async def _request(self, key: str, source: memoryview, options: dict[str, Any], clock: int) -> Store:
        sums = await sum_chunks(self._link.driver, source)
        root = root_checksum(len(source), sums)
        travelling = {name: value for name, value in options.items() if name != "durable"}
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
        return answers.put_result(key, outcome, target.name)


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
