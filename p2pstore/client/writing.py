"""Putting objects: reserve, copy into the mapped segment, commit; in batches by windows of some MiB, of which the peer
publishes one while the next is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from p2pstore import arguments
from p2pstore.client import answers
from p2pstore.client.fetcher import deadline_ms
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains
from p2pstore.client.put_elsewhere import ElsewhereWriter
from p2pstore.client.puts import WINDOW_BYTES, WINDOW_SHARE, fill, fill_many, trailer_bound, windows
from p2pstore.errors import CapacityExceeded, GpuCopyFailed, ObjectTooLarge, P2PStoreError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.local_connection import RequestAhead
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import check_object_length, encode_namespace, key_hasher, root_checksum
from p2pstore.put_facts import PutFacts
from p2pstore.results import Buffer, ItemResult, OnConflict, PutResult
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.values import Source, value_of
from p2pstore.wire import Code

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A copy on another peer may take this long before a put stops waiting for it."""
ITEM_SECONDS: Final = 0.005
"""What each item of a batch, and each further copy of it, may take besides: other peers are asked about it."""

_NO_MEMORY: Final = local.ItemError(
    int(Code.CAPACITY_EXCEEDED), "the local peer offers no memory: it was started with memory 0"
)

LEAST_AHEAD: Final = 2
MOST_AHEAD: Final = 4
"""Windows of small values, which are much work for the peer and little memory: it is not to wait for the next one."""
NO_ROOM = (Code.CAPACITY_EXCEEDED, Code.OBJECT_TOO_LARGE)

PutOptions = dict[str, Any]
"""Fields of a `PutFacts` that are the caller's choice."""


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


class PutRow(NamedTuple):
    """One value of a batch: its place there, and the digest of the block before it."""

    place: int
    key: str
    source: Source
    follows: bytes


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
        batch = PutBatch(self._link, self, options, rows, results)
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


class _Sent(NamedTuple):
    """A window that the peer is publishing, and the rows for which it reserves room."""

    rows: list[PutRow]
    next_rows: Sequence[PutRow]
    request: RequestAhead[local.Committed]


class PutBatch:
    """One batch, whose values all have the same options. `results` has the keys, and gets the results."""

    def __init__(
        self,
        link: PeerLink,
        writer: Writer,
        options: PutOptions,
        rows: Sequence[PutRow],
        results: list[ItemResult[PutResult]],
    ) -> None:
        self._link = link
        self._writer = writer
        self._options = options
        self._results = results
        sizes = [len(row.source) for row in rows]
        cuts = windows(sizes, writer.window_bytes)
        self._windows = [rows[some.start : some.stop] for some in cuts]
        largest = max((sum(sizes[some.start : some.stop]) for some in cuts), default=0)
        self._ahead = max(LEAST_AHEAD, min(MOST_AHEAD, writer.window_bytes // max(1, largest)))
        """Windows that have room before the first one is published."""
        self._rooms: dict[int, local.Reservation] = {}
        """Room that was granted, by the row's place, until the peer has said what became of it."""
        self._alone: list[PutRow] = []
        """Values that found no room: reservations of this batch may have been in their way."""
        self._sent: deque[_Sent] = deque()

    async def put(self) -> None:
        """Store all; raises for none of them, but when the local peer is gone."""
        try:
            await self._put_windows()
        except BaseException:
            for sent in self._sent:
                sent.request.abandon()
            self._link.abort(room.reservation for room in self._rooms.values())
            raise
        for row in self._alone:
            await self._put_alone(row)

    async def _put_windows(self) -> None:
        """Some windows are being published while another one is written."""
        first = [row for window in self._windows[: self._ahead] for row in window]
        self._grant(first, await self._reserve(first))
        for number, window in enumerate(self._windows):
            while any(sent.next_rows is window for sent in self._sent):
                await self._take_answer()
            rows, items = await self._fill(window)
            after = self._windows[number + self._ahead :]
            next_rows = after[0] if after else ()
            if not items:
                self._grant(next_rows, await self._reserve(next_rows))
            else:
                request = await self._writer.commit_ahead(items, self._rooms_for(next_rows))
                self._sent.append(_Sent(rows, next_rows, request))
        while self._sent:
            await self._take_answer()

    def _rooms_for(self, rows: Sequence[PutRow]) -> list[local.ReserveItem]:
        return [self._writer.room_for(row, self._options) for row in rows]

    async def _reserve(self, rows: Sequence[PutRow]) -> list[local.Reservation]:
        return await self._writer.reserve(self._rooms_for(rows))

    def _grant(self, rows: Sequence[PutRow], reserved: Sequence[local.Reservation]) -> None:
        for row, room in zip(rows, reserved, strict=True):
            if room.error.code in NO_ROOM:
                self._alone.append(row)
            elif room.error.code:
                self._failed(row, answers.error_in(row.key, room.error))
            else:
                self._rooms[row.place] = room

    async def _fill(self, window: Sequence[PutRow]) -> tuple[list[PutRow], list[PutFacts]]:
        """Write those that have room."""
        there = [row for row in window if row.place in self._rooms]
        filled = await self._writer.fill_many(
            there, [self._rooms[row.place] for row in there], self._options
        )
        rows, items = [], []
        for row, facts in zip(there, filled, strict=True):
            if isinstance(facts, GpuCopyFailed):
                self._give_back(row)
                self._failed(row, answers.plain_error(facts))
            else:
                rows.append(row)
                items.append(facts)
        return rows, items

    async def _take_answer(self) -> None:
        """The results of the oldest window, and the rows of a later one that have room."""
        sent = self._sent[0]
        reply = await sent.request.receive()
        self._sent.popleft()
        if len(reply.items) != len(sent.rows) or len(reply.again) != len(sent.next_rows):
            raise P2PStoreError("the local peer answered for another number of puts")
        self._grant(sent.next_rows, reply.again)
        name = self._link.connection.hello.name
        for row, outcome in zip(sent.rows, reply.items, strict=True):
            try:
                result = answers.put_result(row.key, outcome, name)
            except (P2PStoreError, ValueError) as error:
                self._give_back(row)
                self._failed(row, answers.plain_error(error))
            else:
                del self._rooms[row.place]
                self._results[row.place] = ItemResult(row.key, result)

    async def put_alone(self) -> None:
        """Store one after the other: each in one round trip, where room was reserved by the put before."""
        for window in self._windows:
            for row in window:
                await self._put_alone(row)

    async def _put_alone(self, row: PutRow) -> None:
        try:
            result = await self._writer.put(row.key, row.source, self._options, follows=row.follows)
        except StoreClosed:  # the local peer is gone: not this value's fault
            raise
        except (P2PStoreError, ValueError) as error:
            self._failed(row, answers.plain_error(error))
        else:
            self._results[row.place] = ItemResult(row.key, result)

    def _give_back(self, row: PutRow) -> None:
        self._link.abort([self._rooms.pop(row.place).reservation])

    def _failed(self, row: PutRow, error: P2PStoreError | ValueError) -> None:
        self._results[row.place] = ItemResult(row.key, error=error)


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
