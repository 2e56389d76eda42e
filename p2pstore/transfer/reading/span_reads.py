"""Objects of one holder by GET, in spans of chunks: one object, many of them, or the free chunks of a value that others
read as well. Over any `ByteStream`.

Bytes are received straight into the destination and each 1 MiB chunk is checked as soon as it is there, while it is
still in the cache: checking after the fact would cost a quarter of the throughput.

A pure queue says what to ask for next; one loop asks for it ahead of need, and takes the answers in order. See
`p2pstore.transfer.reading.small_reads` for objects of one chunk that go into buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from p2pstore.errors import P2PStoreError, ProtocolError
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import CHUNK_BYTES, KIB, MAX_OBJECT_BYTES, chunk_count, chunk_sum
from p2pstore.runtime.flow import NO_LIMITS, HolderLimits, Outrun
from p2pstore.transfer.data_messages import (
    DataKind,
    Get,
    GetItem,
    Keeps,
    ObjectReply,
    Objects,
    ObjectStatus,
)
from p2pstore.transfer.failover import AnotherVersion, PullFailed, TooSlow
from p2pstore.transfer.reading.arriving import (
    ONLY_READER,
    PART_CHUNKS,
    Arriving,
    Destination,
    ResumableDestination,
    check_sum,
    checked_view,
    resume,
    watch_of,
)
from p2pstore.transfer.reading.data_requests import DataRequests, is_damage
from p2pstore.transfer.transport import Pulled, check_object
from p2pstore.wire import Code, code_of

ItemOutcome = Pulled | P2PStoreError | ValueError
"""One item of a batch: pulled, or why not."""
BatchItem = tuple[bytes, Destination]
"""A digest, and where the object goes."""

MIN_BATCH_ITEMS: Final = 32
MAX_BATCH_ITEMS: Final = 256
"""Objects in one request."""
BATCHES_AHEAD: Final = 2
"""Requests for objects of which nothing is known yet, under way at once: the other side works on one while this side
takes in the other."""
DISCARD_BYTES: Final = CHUNK_BYTES
"""Bytes that nothing needs which are read to keep a connection; for more, a new connection is cheaper."""

SMALL_BYTES: Final = 64 * KIB
"""Payloads that are copied to where they belong: a batch of them takes few receives."""
TRANSPORT_NAME: Final = "tcp"
NO_CHUNK: Final = MAX_OBJECT_BYTES // CHUNK_BYTES
"""Beyond the end of any object: asks for its slot and trailer alone."""


def batch_items(count: int) -> int:
    """How many of `count` objects one request asks for: a quarter, so that both sides have work all the time."""
    return max(MIN_BATCH_ITEMS, min(MAX_BATCH_ITEMS, -(-count // 4)))


@dataclass(slots=True, eq=False)
class Wanted:
    """One object to read, into `destination`; or what is free of a value that is `arriving`. `outcome` is set when all
    of it that was asked for has come, or is not to come any more."""

    digest: bytes
    destination: Destination | None
    slot_hint: int = 0
    arriving: Arriving | None = None
    outcome: ItemOutcome | None = None


class Span(NamedTuple):
    """Chunks of an object."""

    wanted: Wanted
    item: GetItem


class SpanQueue:
    """Decides what to ask for next. Pure."""

    def __init__(self, wanted: Sequence[Wanted], reader: int) -> None:
        self._reader = reader
        self._batch_items = batch_items(len(wanted))
        self._begun = deque(each for each in wanted if each.arriving is not None)
        """Values of which some chunks may be free."""
        self._unknown = deque(each for each in wanted if each.arriving is None)
        self._alone: deque[Wanted] = deque()
        """Objects that did not fit into an answer with others."""
        self._requests = 0
        self._left_chunks = 0
        """Of values, asked for and not here."""

    def next(self) -> list[Span]:
        """The spans of the next request; none when what is under way is enough.

        1. Free chunks of a value that has begun, when few of those that were asked for are left.
        2. Objects of which nothing is known yet, many in one request.
        3. Those that are too large for that, one by one.
        """
        while self._begun:
            wanted = self._begun[0]
            assert wanted.arriving is not None
            if self._left_chunks > wanted.arriving.sharing.ahead_chunks:
                return []
            if run := wanted.arriving.take(self._reader):
                self._left_chunks += len(run)
                item = GetItem(wanted.digest, run.start, len(run), wanted.slot_hint)
                return [Span(wanted, item)]
            self._begun.popleft()
        source, count = (self._unknown, self._batch_items) if self._unknown else (self._alone, 1)
        if not source or self._requests >= BATCHES_AHEAD:
            return []
        self._requests += 1
        return [_first_span(source.popleft()) for _ in range(min(count, len(source)))]

    @property
    def is_due(self) -> bool:
        """Whether more of a value is to be asked for before the next answer."""
        if not self._begun or (arriving := self._begun[0].arriving) is None:
            return False
        return self._left_chunks <= arriving.sharing.ahead_chunks

    def begins(self, wanted: Wanted, arriving: Arriving, item: GetItem) -> range:
        """It is known what arrives, and these of its chunks come now."""
        run = arriving.claim(self._reader, item.first_chunk, item.chunk_count)
        wanted.arriving = arriving
        self._left_chunks += len(run)
        self._begun.append(wanted)
        return run

    def came(self, chunks: int) -> None:
        """Chunks of a value are here, or do not come any more."""
        self._left_chunks -= chunks

    def answered(self) -> None:
        """A request for objects of which nothing was known is answered whole."""
        self._requests -= 1

    def ask_again(self, wanted: Wanted) -> None:
        """From its beginning, by itself."""
        self._alone.append(wanted)


def _first_span(wanted: Wanted) -> Span:
    first, count = 0, PART_CHUNKS
    if isinstance(wanted.destination, ResumableDestination):
        first, count = wanted.destination.wanted_first()
    return Span(wanted, GetItem(wanted.digest, first, count, wanted.slot_hint))


class SpanReader:
    """Reads the spans of a queue over one connection, as one operation of it."""

    def __init__(
        self,
        connection: DataRequests,
        wanted: Sequence[Wanted],
        reader: int = ONLY_READER,
        *,
        keeps: Keeps = Keeps.NO,
        may_refuse: bool = False,
        expected_bytes: int = 0,
    ) -> None:
        """`may_refuse`: the first answer may be BUSY; `keeps` as for GET. `expected_bytes` is about the length of a
        single object, where that is known."""
        self._connection = connection
        self._wanted = wanted
        self._reader = reader
        self._keeps = keeps
        self._may_refuse = may_refuse
        self._expected_bytes = expected_bytes
        self._queue = SpanQueue(wanted, reader)
        self._under_way: deque[tuple[Asked, list[Span], bool]] = deque()
        """Requests with their spans, and whether the objects were known."""

    async def run(self) -> None:
        """Set the outcome of each that is wanted. Raises as every operation, for all that have none; the failure of an
        object is its outcome, and is raised as well when it leaves the connection in the middle of a value."""
        try:
            await self._ask()
            while self._under_way:
                await self._take_answer()
                await self._ask()
            for each in self._wanted:
                if each.arriving is not None and each.outcome is None:
                    slot, trailer = each.arriving.slot, each.arriving.trailer
                    each.outcome = Pulled(slot, trailer, slot.length, TRANSPORT_NAME)
        finally:
            for each in self._wanted:
                if each.arriving is not None:
                    each.arriving.leave(self._reader)

    async def _ask(self) -> None:
        """Ask for what is due, with one send: each request would wake the other side."""
        connection, frames = self._connection, []
        while spans := self._queue.next():
            known = spans[0].wanted.arriving is not None
            connection.inbox.expect(
                spans[0].item.chunk_count * CHUNK_BYTES if known else self._expected_bytes
            )
            keeps = Keeps.NO if known else self._keeps
            items = tuple([each.item for each in spans])
            request = Get(list(items), self._may_refuse, int(keeps))
            self._may_refuse = False
            number, frame = connection.frame(DataKind.GET, request)
            frames.append(frame)
            self._under_way.append((Asked(number, items), spans, known))
        if frames:
            await connection.stream.send(*frames)

    async def _take_answer(self) -> None:
        asked, spans, known = self._under_way.popleft()
        connection = self._connection
        for reply, span in zip(await receive_answer(connection, asked), spans, strict=True):
            bulk_left = connection.bulk_left - reply.bulk_bytes
            try:
                await self._receive(span, reply)
            except (P2PStoreError, ValueError) as error:
                self._failed(span.wanted, error, alone=len(spans) == 1)
                await self._skip(connection.bulk_left - bulk_left)
        if not known:
            self._queue.answered()

    def _failed(self, wanted: Wanted, error: P2PStoreError | ValueError, *, alone: bool) -> None:
        """An object does not come. Raises what is the whole connection's, or leaves it in the middle of a value."""
        if isinstance(error, (ProtocolError, OSError)):
            raise error
        if not alone and isinstance(error, PullFailed) and error.code is Code.OBJECT_TOO_LARGE:
            self._queue.ask_again(wanted)
            return
        wanted.outcome = error
        self._connection.damaged = self._connection.damaged or is_damage(error)
        more = any(each.wanted is wanted for _, spans, _ in self._under_way for each in spans)
        if more or (wanted.arriving is not None and wanted.arriving.next_free()):
            raise error

    async def _skip(self, length_bytes: int) -> None:
        """Bytes of an object that failed. The next one's follow anyway; the last ones may not be worth it."""
        connection = self._connection
        is_last = length_bytes == connection.bulk_left and not self._under_way
        if length_bytes and not (is_last and length_bytes > DISCARD_BYTES):
            await connection.inbox.discard(length_bytes)
            connection.bulk_left -= length_bytes

    async def _receive(self, span: Span, reply: ObjectReply) -> None:
        """An object whose payload comes next, or a part of it."""
        wanted, asked = span
        if wanted.arriving is not None:
            if not wanted.arriving.is_of(*check_reply(reply, asked)):
                raise AnotherVersion()
            run = range(asked.first_chunk, asked.first_chunk + asked.chunk_count)
            await self._receive_run(wanted.arriving, run)
            return
        destination, connection, bulk_bytes = wanted.destination, self._connection, reply.bulk_bytes
        assert destination is not None
        watched = watch_of(destination) is not None
        slot, trailer = check_reply(reply, asked)
        # Without bytes, chunks were asked for that a longer version had.
        if slot.length > CHUNK_BYTES or (slot.length and (watched or not bulk_bytes)):
            arriving = resume(destination, slot, trailer)
            run = self._queue.begins(wanted, arriving, asked)
            if isinstance(destination, ResumableDestination):
                destination.when_begun(arriving)
            await self._receive_run(arriving, run)
            return
        view = checked_view(destination, slot, trailer)
        if bulk_bytes:  # of one chunk: keeping account of that would take as long as a small one
            if bulk_bytes <= SMALL_BYTES:
                await connection.inbox.read_into(view)
                value_sum = chunk_sum(view)
            else:
                value_sum = await connection.inbox.read_summed(view)
            connection.bulk_left -= bulk_bytes
            check_sum(value_sum, int.from_bytes(trailer.sums, "little"), 0)
        wanted.outcome = Pulled(slot, trailer, slot.length, TRANSPORT_NAME)

    async def _receive_run(self, arriving: Arriving, run: range) -> None:
        """Chunks whose bytes come next: each is summed as it comes, and verified as soon as it is there. A watch is to
        see the summing by itself. Free chunks after them are asked for in time."""
        connection, left = self._connection, len(run)
        try:
            for number in run:
                if self._queue.is_due:
                    await self._ask()
                chunk = arriving.chunk(number)
                payload_sum = None
                if arriving.is_watched:
                    await connection.inbox.read_into(chunk)
                else:
                    payload_sum = await connection.inbox.read_summed(chunk)
                connection.bulk_left -= len(chunk)
                arriving.verify(number, self._reader, payload_sum=payload_sum)
                left -= 1
                self._queue.came(1)
        finally:
            self._queue.came(left)


async def read_one(
    connection: DataRequests,
    wanted: Wanted,
    limits: HolderLimits = NO_LIMITS,
    reader: int = ONLY_READER,
    *,
    keeps: Keeps = Keeps.NO,
    expected_bytes: int = 0,
) -> Pulled:
    """Read one object, or what is free of one that others read as well; `expected_bytes` is about its length, where
    that is known. Raises `PullFailed` (`AnotherVersion` when this holder has another one than the others), or what
    `destination.prepare` raises. Where other holders have it, the other side may be too busy for a large object (BUSY);
    when the object is kept, or could be, it may also be BUSY because others have it."""
    may_refuse = limits.answer_seconds < math.inf
    with connection.operation(limits):
        await SpanReader(
            connection,
            [wanted],
            reader,
            keeps=keeps,
            may_refuse=may_refuse,
            expected_bytes=expected_bytes,
        ).run()
        outcome = wanted.outcome
        if isinstance(outcome, Exception):
            raise outcome  # in the operation, which ends the connection where that is damaged
        assert isinstance(outcome, Pulled)
        return outcome


async def read_many(
    connection: DataRequests,
    items: Sequence[BatchItem],
    limits: HolderLimits = NO_LIMITS,
    keeps: Keeps = Keeps.NO,
) -> list[ItemOutcome]:
    """Read many objects, small ones together in few frames: per item what was pulled, or why not.

    An item's own failure, and what its `destination.prepare` raises, is that item's result. When the
    connection fails on the way, what was pulled before stands and the rest is `PullFailed`; raises
    only when nothing was pulled. `limits` and `keeps` as for `read_one`.
    """
    wanted = [Wanted(digest, destination) for digest, destination in items]
    with connection.operation(limits):
        failure = PullFailed(Code.INTERNAL, "it was not read")
        try:
            await SpanReader(connection, wanted, keeps=keeps).run()
        except (OSError, ProtocolError, PullFailed) as error:
            if all(each.outcome is None for each in wanted):
                raise
            connection.close()
            failure = failure_of(error)
            if any(each.outcome is error for each in wanted):
                text = "the connection ended with an item before this one"
                failure = PullFailed(Code.UNAVAILABLE, text, retriable=True)
        return [failure if each.outcome is None else each.outcome for each in wanted]


async def look(
    connection: DataRequests, digest: bytes, slot_hint: int = 0, limits: HolderLimits = NO_LIMITS
) -> tuple[Slot, TrailerBody]:
    """An object's slot and trailer, verified, and none of its bytes. Raises like `read_one`."""
    item = GetItem(digest, NO_CHUNK, 0, slot_hint)
    with connection.operation(limits):
        number = await connection.send(DataKind.GET, Get([item]))
        (reply,) = await receive_answer(connection, Asked(number, (item,)))
        return check_reply(reply, item)


class Asked(NamedTuple):
    """A GET under way: its request id and what was asked for."""

    request_id: int
    items: tuple[GetItem, ...]


async def receive_answer(connection: DataRequests, asked: Asked) -> list[ObjectReply]:
    """The replies about each item. Their bytes come next, one item's after the other's, all bulk there is. Raises
    `ProtocolError` when these do not add up."""
    objects = await connection.receive(DataKind.GET, asked.request_id, Objects)
    if len(objects.items) != len(asked.items):
        raise ProtocolError("the reply to GET has another number of items than the request")
    bulk_left = connection.bulk_left
    for item in objects.items:
        if not 0 <= item.bulk_bytes <= bulk_left:
            raise ProtocolError("the items of a reply do not add up to its bulk bytes")
        bulk_left -= item.bulk_bytes
    if bulk_left:
        raise ProtocolError("the items of a reply do not add up to its bulk bytes")
    return objects.items


def check_reply(reply: ObjectReply, asked: GetItem) -> tuple[Slot, TrailerBody]:
    """Slot and trailer of an answer that claims to have the object, verified. Raises `PullFailed`."""
    if reply.status:
        raise refusal(reply)
    slot, trailer = check_object(reply.slot, reply.trailer, asked.digest)
    if slot.length > MAX_OBJECT_BYTES:
        raise PullFailed(Code.OBJECT_TOO_LARGE, "the holder claims an object above 4 GiB")
    last_chunk = chunk_count(slot.length)
    if asked.chunk_count:
        last_chunk = min(last_chunk, asked.first_chunk + asked.chunk_count)
    end = min(slot.length, last_chunk * CHUNK_BYTES)
    if reply.bulk_bytes != max(0, end - asked.first_chunk * CHUNK_BYTES):
        raise PullFailed(Code.MALFORMED, "the holder sent another range than it was asked for")
    return slot, trailer


def refusal(reply: ObjectReply) -> PullFailed:
    """Why the holder did not send the object."""
    if reply.status == ObjectStatus.NOT_FOUND:
        return PullFailed(
            Code.NO_SUCH_KEY,
            "the holder does not have the object any more",
            incarnation=reply.incarnation,
            sequence=reply.sequence,
        )
    if reply.status == ObjectStatus.BUSY and reply.keep:
        text = "others read it, too: the local peer is to bring it, and keep it"
        if reply.others:
            text = "others read it, too, and send it on"
        return PullFailed(Code.BUSY, text, keep=True, others=reply.others)
    if reply.status == ObjectStatus.BUSY:
        return PullFailed(
            Code.BUSY,
            "the holder has much to send already, or cannot bring it from its SSD: that does not answer, or memory is "
            "full of pins and leases",
        )
    if reply.status == ObjectStatus.TOO_LARGE:
        return PullFailed(Code.OBJECT_TOO_LARGE, "the object did not fit into the reply")
    return PullFailed(Code.UNSUPPORTED, f"the holder answered with status {reply.status}")


def failure_of(error: Exception) -> PullFailed:
    """A broken connection as the failure of a pull; another transport may still get there."""
    if isinstance(error, PullFailed):
        return error
    if isinstance(error, Outrun):
        return TooSlow(str(error))
    code = code_of(error)
    if isinstance(error, OSError) and code is Code.INTERNAL:
        code = Code.UNAVAILABLE
    return PullFailed(code, str(error), retriable=True)
