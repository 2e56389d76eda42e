"""Putting many values: in windows of some MiB, of which the peer publishes one while the next is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from p2pstore.client import answers
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.puts import windows
from p2pstore.errors import GpuCopyFailed, P2PStoreError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.local_requests import RequestAhead
from p2pstore.put_facts import PutFacts
from p2pstore.results import ItemResult, PutResult
from p2pstore.values import Source
from p2pstore.wire import Code

LEAST_AHEAD: Final = 2
MOST_AHEAD: Final = 4
"""Windows of small values, which are much work for the peer and little memory: it is not to wait for the next one."""
NO_ROOM = (Code.CAPACITY_EXCEEDED, Code.OBJECT_TOO_LARGE)


class PutRow(NamedTuple):
    """One value of a batch: its place there, and the digest of the block before it."""

    place: int
    key: str
    source: Source
    follows: bytes


class RowWriter(Protocol):
    """The methods of the writer of single values that a batch needs."""

    window_bytes: int
    """Of values that are reserved, written and published together."""

    async def reserve(self, rows: Sequence[PutRow]) -> list[local.Reservation]:
        """Room for each in the local peer's memory, or why there is none."""
        ...

    async def fill(
        self, rows: Sequence[PutRow], rooms: Sequence[local.Reservation]
    ) -> list[PutFacts | GpuCopyFailed]:
        """Copy the values there."""
        ...

    async def commit_ahead(
        self, items: list[PutFacts], next_rows: Sequence[PutRow]
    ) -> RequestAhead[local.Committed]:
        """Have these published, and reserve room for further rows. The answer comes later."""
        ...

    async def put_alone(self, row: PutRow) -> PutResult:
        """Store one value, on another peer if need be."""
        ...


class _Sent(NamedTuple):
    """A window that the peer is publishing, and the rows for which it reserves room."""

    rows: list[PutRow]
    next_rows: Sequence[PutRow]
    request: RequestAhead[local.Committed]


class PutBatch:
    """One batch. `results` has the keys, and gets the results."""

    def __init__(
        self,
        link: PeerLink,
        writer: RowWriter,
        rows: Sequence[PutRow],
        results: list[ItemResult[PutResult]],
    ) -> None:
        self._link = link
        self._writer = writer
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
        self._grant(first, await self._writer.reserve(first))
        for number, window in enumerate(self._windows):
            while any(sent.next_rows is window for sent in self._sent):
                await self._take_answer()
            rows, items = await self._fill(window)
            after = self._windows[number + self._ahead :]
            next_rows = after[0] if after else ()
            if not items:
                self._grant(next_rows, await self._writer.reserve(next_rows))
            else:
                request = await self._writer.commit_ahead(items, next_rows)
                self._sent.append(_Sent(rows, next_rows, request))
        while self._sent:
            await self._take_answer()

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
        filled = await self._writer.fill(there, [self._rooms[row.place] for row in there])
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
            result = await self._writer.put_alone(row)
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
