"""Putting objects: reserve, copy into the mapped segment, commit; in batches by windows of some MiB, of which the peer
publishes one while the next is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

from p2pstore import arguments
from p2pstore.client import answers
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains
from p2pstore.client.put_elsewhere import ElsewhereWriter
from p2pstore.client.puts import (
    COPIED_WINDOW_BYTES,
    WINDOW_BYTES,
    WINDOW_SHARE,
    Room,
    RoomSize,
    fill,
    fill_many,
    trailer_bound,
    windows,
)
from p2pstore.errors import CapacityExceeded, GpuCopyFailed, ObjectTooLarge, P2PStoreError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.local_connection import Request
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.put_columns import numbers_in, one_if_alike, rooms_in, runs_of
from p2pstore.objects import check_object_length, encode_key, encode_namespace, key_hasher
from p2pstore.put_facts import PutOptions
from p2pstore.results import Buffer, ItemResult, OnConflict, PutResult
from p2pstore.transfer.transfer_trace import Progress
from p2pstore.values import Source, value_of
from p2pstore.wire import Code

T = TypeVar("T")

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A copy on another peer may take this long before a put stops waiting for it."""
ITEM_SECONDS: Final = 0.005
"""Additional time of each item of a batch, and of each further copy: other peers are asked about it."""

_NO_MEMORY: Final = local.ItemError(
    int(Code.CAPACITY_EXCEEDED), "the local peer offers no memory: it was started with memory 0"
)

MIN_AHEAD: Final = 2
MAX_AHEAD: Final = 4
"""Windows of small values, which are much work for the peer and little memory: it is not to wait for the next one."""
NO_ROOM = (Code.CAPACITY_EXCEEDED, Code.OBJECT_TOO_LARGE)


def put_options(
    replicas: int, pin: str, ttl: float | None, policy: OnConflict, durable: bool
) -> PutOptions:
    """The options of one put, checked. `ttl` in seconds. Raises `TypeError` or `ValueError`."""
    return PutOptions(
        arguments.whole_number("replicas", replicas),
        arguments.pin_number(pin),
        arguments.milliseconds("ttl", ttl),
        policy == "overwrite",
        arguments.flag("durable", durable),
    )


def _checked(keys: Sequence[str], values: Sequence[Buffer]) -> tuple[int, list[Source]]:
    """The length of the longest key, and the sources of the values' bytes. Raises what is wrong with one of them."""
    key_bytes = max(map(len, map(encode_key, keys)), default=0)
    sources = list(map(value_of, values))
    check_object_length(max(map(len, sources), default=0))
    return key_bytes, sources


class Writer:
    """Puts into one namespace over one link. A put that ends early, by an error or by cancellation,
    gives its room back."""

    def __init__(self, link: PeerLink, namespace: str, chains: PrefixChains) -> None:
        self._link = link
        self.namespace = namespace
        self._chains = chains
        self.digest = key_hasher(namespace)
        self._namespace_bytes = len(encode_namespace(namespace))
        self._elsewhere = ElsewhereWriter(link, namespace)
        memory_bytes = max((reader.geometry.data_bytes for reader in link.readers), default=0)
        self._peer_has_memory = memory_bytes > 0
        self._window_share = memory_bytes // WINDOW_SHARE

    def close(self) -> None:
        """Close the connections to other peers."""
        self._elsewhere.close()

    def window_bytes(self, *, is_copied: bool) -> int:
        """Upper bound of the bytes of one window."""
        return min(COPIED_WINDOW_BYTES if is_copied else WINDOW_BYTES, self._window_share)

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
            follows = self.before(key)
        check_object_length(len(source))
        [item] = self.rooms_for([len(source)], len(encode_key(key)), options)
        try:
            room = await self._room_for(key, item)
        except (CapacityExceeded, ObjectTooLarge) as refusal:
            seconds = _copy_seconds(len(source), options.replicas)
            whole = source
            if not isinstance(whole, memoryview):
                whole = await link.driver.run_in_thread(whole.joined)
            return await self._elsewhere.put(key, whole, options, refusal, seconds, progress)
        try:
            # Closed by another task or thread, the peer gives this room to another client.
            check, [target] = link.connection.check_usable, self.targets([room], [len(source)])
            sums = await fill(link.driver, target, source, check, progress)
            again = link.ahead.wanted(item)
            columns = [key], [(room[0], 1)], [len(source)], sums, [options], follows, again
            commit = local.Commit(self.namespace, *columns)
            reply = await link.request(
                LocalKind.COMMIT,
                commit,
                local.Committed,
                extra_seconds=_commit_seconds(commit),
                on_late_reply=lambda late: link.abort(numbers_in(late.again)),
            )
            _check_count(reply, 1)
            self.keep_ahead(again, reply)
            return answers.put_results([key], reply.outcomes[0][1], link.connection.hello.name)[0]
        except BaseException:
            link.abort([room[0]])  # harmless when the commit got through
            raise

    async def _room_for(self, key: str, item: RoomSize) -> Room:
        """Room in the local peer's memory. Raises `CapacityExceeded` or `ObjectTooLarge`."""
        link = self._link
        if taken := self.take_ahead(item):
            return taken[0]
        [room] = await self.reserve([item], 1)
        if isinstance(room, local.ItemError):
            if room.code == Code.CAPACITY_EXCEEDED and link.give_back_idle():
                [room] = await self.reserve([item], 1)
            if isinstance(room, local.ItemError):
                raise answers.error_in(key, room)
        return room

    def take_ahead(self, item: RoomSize) -> list[Room]:
        """Rooms that were granted ahead, for as many of these values as there are."""
        taken, others = self._link.ahead.take(item)
        if others:
            self._link.abort(others)
        return taken

    def keep_ahead(self, again: Sequence[RoomSize], reply: local.Committed) -> None:
        """Keep the rooms that came with a commit for the next put."""
        for item in again:
            rooms = [each for each in rooms_in(reply.again, item[2]) if isinstance(each, tuple)]
            self._link.abort(self._link.ahead.granted(item, rooms))

    async def put_many(
        self, keys: list[str], values: Sequence[Buffer], options: PutOptions
    ) -> list[ItemResult]:
        """Store many values; one result per item. Each follows the one before it, as far as eviction is concerned:
        a batch is a chain of prefix blocks, or it does not matter which of it goes first."""
        unfit: dict[int, ItemResult[PutResult]] = {}
        try:
            key_bytes, sources = _checked(keys, values)
        except (P2PStoreError, ValueError, TypeError):
            for place, (key, value) in enumerate(zip(keys, values, strict=True)):
                try:
                    _checked([key], [value])
                except (P2PStoreError, ValueError, TypeError) as error:
                    unfit[place] = ItemResult(key, error=answers.plain_error(error))
            keys = [key for place, key in enumerate(keys) if place not in unfit]
            key_bytes, sources = _checked(
                keys, [value for place, value in enumerate(values) if place not in unfit]
            )
        if not keys:
            return list(unfit.values())
        batch = PutBatch(self._link, self, options, keys, sources, key_bytes)
        await batch.put()
        if not unfit:
            return batch.results
        results = iter(batch.results)
        return [unfit.get(place) or next(results) for place in range(len(keys) + len(unfit))]

    def before(self, key: str) -> bytes:
        """The digest of the block that it seems to follow, or nothing."""
        return self._chains.before(self.digest(key))

    def rooms_for(self, lengths: Iterable[int], key_bytes: int, options: PutOptions) -> list[RoomSize]:
        """The rooms that values need, in runs; `key_bytes` of the longest key."""
        named_bytes = key_bytes + self._namespace_bytes
        described = options.dtype, len(options.shape)
        return [
            (length, trailer_bound(named_bytes, length, *described), sum(1 for _ in alike))
            for length, alike in groupby(lengths)
        ]

    async def reserve(self, rooms: list[RoomSize], count: int) -> list[Room | local.ItemError]:
        """Room for each, or why there is none."""
        if not self._peer_has_memory:  # its mapping tells, so it need not be asked
            return [_NO_MEMORY] * count
        reply = await self._link.request(
            LocalKind.RESERVE,
            local.Reserve(rooms, self.namespace),
            local.Reserved,
            on_late_reply=lambda late: self._link.abort(numbers_in(late.spans)),
        )
        return rooms_in(reply.spans, count)

    def reserve_ahead(self, rooms: list[RoomSize]) -> Request[local.Reserved]:
        """`reserve`, to be sent, whose answer is received later."""
        return self._link.ask_ahead(
            LocalKind.RESERVE,
            local.Reserve(rooms, self.namespace),
            local.Reserved,
            on_late_reply=lambda late: self._link.abort(numbers_in(late.spans)),
        )

    def targets(self, rooms: Iterable[Room], lengths: Iterable[int]) -> list[memoryview]:
        """Where the values go."""
        memory = self._link.connection.segment(0)
        return [
            memory[offset : offset + length] for (_, offset), length in zip(rooms, lengths, strict=True)
        ]

    def commit_ahead(self, commit: local.Commit) -> Request[local.Committed]:
        """The request, to be sent, that values be published, and room reserved for others. The answer is received
        later."""
        return self._link.ask_ahead(
            LocalKind.COMMIT,
            commit,
            local.Committed,
            extra_seconds=_commit_seconds(commit),
            on_late_reply=lambda late: self._link.abort(numbers_in(late.again)),
        )


class _Sent(NamedTuple):
    """Rows of a window that the peer is publishing, and those for which it reserves room: `again`, for the next batch
    where there are no such rows."""

    rows: Sequence[int]
    next_rows: range
    again: list[RoomSize]
    request: Request[local.Committed]


class PutBatch:
    """One batch, whose values all have the same options; a row is the number of a key. `results` has one for each."""

    def __init__(
        self,
        link: PeerLink,
        writer: Writer,
        options: PutOptions,
        keys: list[str],
        sources: list[Source],
        key_bytes: int,
    ) -> None:
        """`key_bytes`: of the longest key."""
        self._link = link
        self._writer = writer
        self._options = options
        self._keys = keys
        self._sources = sources
        self._follows = writer.before(keys[0])
        self._key_bytes = key_bytes
        self.results: list[ItemResult[PutResult]] = [ItemResult("")] * len(keys)
        sizes = self._lengths = list(map(len, sources))
        is_copied = options.replicas > 1
        window_bytes = writer.window_bytes(is_copied=is_copied)
        self._windows = windows(sizes, window_bytes, is_copied=is_copied)
        largest = max(sum(sizes[some.start : some.stop]) for some in self._windows)
        self._ahead = max(MIN_AHEAD, min(MAX_AHEAD, window_bytes // max(1, largest)))
        """Windows that have room before the first one is published."""
        self._rooms: list[Room | None] = [None] * len(keys)
        """Room that was granted, until the peer has said what became of it."""
        self._alone: list[int] = []
        """Values that found no room: reservations of this batch may have been in their way."""
        self._reserving: tuple[range, Request[local.Reserved]] | None = None
        """Rows that wait for room, while the ones before them are written."""
        self._sent: deque[_Sent] = deque()

    async def put(self) -> None:
        """Store all; raises for none of them, but when the local peer is gone."""
        if len(self._keys) == 1:  # in one round trip, where room was reserved by the put before
            await self._put_alone(0)
            return
        try:
            await self._put_windows()
        except BaseException:
            if self._reserving is not None:
                self._reserving[1].abandon()
            for sent in self._sent:
                sent.request.abandon()
            self._link.abort(room[0] for room in self._rooms if room is not None)
            raise
        for row in self._alone:
            await self._put_alone(row)

    async def _put_windows(self) -> None:
        """Some windows are being published while another one is written. The first one takes the room that was granted
        with the batch before, and is written while the peer makes room for the others."""
        first = self._sizes(self._windows[0])
        taken = self._writer.take_ahead(first[0]) if len(first) == 1 else []
        self._grant(range(len(taken)), taken)
        rest = range(len(taken), self._windows[: self._ahead][-1].stop)
        if len(taken) < len(self._windows[0]):
            await self._reserve(rest)
        elif rest:
            self._reserving = rest, self._writer.reserve_ahead(self._sizes(rest))
            await self._reserving[1].send()
        for number, window in enumerate(self._windows):
            await self._await_room(window)
            rows, sums = await self._fill(window)
            after = self._windows[number + self._ahead :]
            next_rows = after[0] if after else range(0)
            if not rows:
                await self._reserve(next_rows)
                continue
            again = self._sizes(next_rows)
            if window is self._windows[-1] and len(first) == 1:
                again = self._link.ahead.wanted(first[0])
            request = self._writer.commit_ahead(self._commit(rows, sums, again, bool(next_rows)))
            self._sent.append(_Sent(rows, next_rows, again, request))
            await request.send()
        while self._sent:
            await self._take_answer()

    async def _await_room(self, window: range) -> None:
        """Until it is known which of the rows have room."""
        if self._reserving is not None and window.stop > self._reserving[0].start:
            rows, request = self._reserving
            self._grant(rows, rooms_in((await request.receive()).spans, len(rows)))
            self._reserving = None
        while any(sent.next_rows is window for sent in self._sent):
            await self._take_answer()

    def _sizes(self, rows: range) -> list[RoomSize]:
        lengths = self._lengths[rows.start : rows.stop]
        return self._writer.rooms_for(lengths, self._key_bytes, self._options)

    async def _reserve(self, rows: range) -> None:
        if rows:
            self._grant(rows, await self._writer.reserve(self._sizes(rows), len(rows)))

    def _grant(self, rows: range, rooms: Sequence[Room | local.ItemError]) -> None:
        for row, room in zip(rows, rooms, strict=True):
            if isinstance(room, tuple):
                self._rooms[row] = room
            elif room.code in NO_ROOM:
                self._alone.append(row)
            else:
                self._failed(row, answers.error_in(self._keys[row], room))

    def _commit(
        self, rows: Sequence[int], sums: list[bytes], again: list[RoomSize], at_hand: bool
    ) -> local.Commit:
        before = rows[0] - 1
        return local.Commit(
            self._writer.namespace,
            _these(self._keys, rows),
            runs_of([room[0] for room in _these(self._rooms, rows) if room]),
            one_if_alike(_these(self._lengths, rows)),
            b"".join(sums),
            [self._options],
            self._follows if before < 0 else self._writer.digest(self._keys[before]),
            again,
            at_hand=at_hand,
        )

    async def _fill(self, window: range) -> tuple[Sequence[int], list[bytes]]:
        """Write those that have room; the rows that were, and their sums."""
        rows = self._with_room(window)
        rooms = [room for room in _these(self._rooms, rows) if room]
        targets = self._writer.targets(rooms, _these(self._lengths, rows))
        sources = _these(self._sources, rows)
        # Closed by another task or thread, the peer gives this room to another client.
        made = await fill_many(self._link.driver, targets, sources, self._link.connection.check_usable)
        sums = [each for each in made if type(each) is bytes]
        if len(sums) < len(made):
            for row, each in zip(rows, made, strict=True):
                if isinstance(each, GpuCopyFailed):
                    self._give_back(row)
                    self._failed(row, answers.plain_error(each))
        return self._with_room(rows), sums

    def _with_room(self, rows: Sequence[int]) -> Sequence[int]:
        if None not in _these(self._rooms, rows):
            return rows
        return [row for row in rows if self._rooms[row] is not None]

    async def _take_answer(self) -> None:
        """The results of the oldest window, and the rows of a later one that have room."""
        sent = self._sent[0]
        reply = await sent.request.receive()
        self._sent.popleft()
        _check_count(reply, len(sent.rows))
        if sent.next_rows:
            self._grant(sent.next_rows, rooms_in(reply.again, len(sent.next_rows)))
        else:
            self._writer.keep_ahead(sent.again, reply)
        name = self._link.connection.hello.name
        begin = 0
        for count, outcome in reply.outcomes:
            rows = sent.rows[begin : begin + count]
            begin += count
            keys = _these(self._keys, rows)
            try:
                made = answers.put_results(keys, outcome, name)
            except (P2PStoreError, ValueError) as error:
                for row in rows:
                    self._give_back(row)
                    self._failed(row, answers.plain_error(error))
                continue
            results = map(ItemResult, keys, made)
            if type(rows) is range:  # nearly always
                self._rooms[rows.start : rows.stop] = [None] * count
                self.results[rows.start : rows.stop] = results
                continue
            for row, result in zip(rows, results, strict=True):
                self._rooms[row], self.results[row] = None, result

    async def _put_alone(self, row: int) -> None:
        key = self._keys[row]
        follows = self._writer.digest(self._keys[row - 1]) if row else self._follows
        try:
            result = await self._writer.put(key, self._sources[row], self._options, follows=follows)
        except StoreClosed:  # the local peer is gone: not this value's fault
            raise
        except (P2PStoreError, ValueError) as error:
            self._failed(row, answers.plain_error(error))
        else:
            self.results[row] = ItemResult(key, result)

    def _give_back(self, row: int) -> None:
        room, self._rooms[row] = self._rooms[row], None
        if room is not None:
            self._link.abort([room[0]])

    def _failed(self, row: int, error: P2PStoreError | ValueError) -> None:
        self.results[row] = ItemResult(self._keys[row], error=error)


def _these(column: list[T], rows: Sequence[int]) -> list[T]:
    """The column's values in these rows."""
    if type(rows) is range:  # nearly always
        return column[rows.start : rows.stop]
    return [column[row] for row in rows]


def _check_count(reply: local.Committed, count: int) -> None:
    if sum(some for some, _ in reply.outcomes) != count or any(some < 1 for some, _ in reply.outcomes):
        raise P2PStoreError("the local peer answered for another number of puts")


def _commit_seconds(commit: local.Commit) -> float:
    """Additional time of publishing these and making their copies."""
    count, replicas = len(commit.keys), commit.options[0].replicas
    return _copy_seconds(sum(commit.lengths) * (count // len(commit.lengths)), replicas, count)


def _copy_seconds(length_bytes: int, replicas: int, count: int = 1) -> float:
    return length_bytes * (replicas - 1) / REPLICATE_BYTES_PER_SECOND + ITEM_SECONDS * replicas * count
