"""Answers to reads on one data connection: GET and GET_SMALL.

The event loop makes them, or a thread to which the connection is lent (`read_thread`). Objects are lent,
sent out of their places, and given back. A thread makes only answers that need no decision; the event loop decides the
rest: objects that are absent, hot, on the SSD, or too much to send now.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import trio

from p2pstore.memory.entries import SmallObjectsLent
from p2pstore.memory.segment_layout import SLOT_BYTES
from p2pstore.objects import DIGEST_BYTES, MIB
from p2pstore.runtime.byte_budget import Account
from p2pstore.runtime.streams import AcceptedStream, BytesLike
from p2pstore.transfer.data_messages import (
    SMALL_OBJECT_BYTES,
    DataKind,
    Get,
    GetItem,
    GetSmall,
    ObjectReply,
    Objects,
    ObjectStatus,
    SmallObjects,
)
from p2pstore.transfer.serving.serving_limits import Uploads
from p2pstore.wire import HEADER, ONE_WAY, REPLY, Code, FrameHeader, Message, encode_failure

MAX_REPLY_BODY_BYTES: Final = 3 * MIB
"""Slots and trailers in one reply; the frame's cap is 4 MiB."""
QUICK_BYTES: Final = 16 * MIB
"""Answers up to this count as quick. For larger ones the cost of event loop turns is negligible."""
MIXED_SECONDS: Final = 0.1
"""Time after a small read in which large answers are sent in threads: a small one would wait for a piece of a large
one each time, and longer where the kernel lets others run first, as an event loop that works all the time is no
longer preferred when it wakes up."""
MAX_TALLY: Final = 65_536
COUNTED_READS: Final = 512
"""Counted at once, which takes 50 us: threads wait for the interpreter meanwhile."""
TAKE_IN_OBJECTS: Final = 128
"""Objects that one step takes in: threads wait for the interpreter meanwhile, about 1 us for each."""
MAX_READ_THREADS: Final = 32
"""Of a peer. Connections that do not get one are served by the event loop."""

GET, GET_SMALL, OK = int(DataKind.GET), int(DataKind.GET_SMALL), int(ObjectStatus.OK)
BUSY, TOO_LARGE = int(ObjectStatus.BUSY), int(ObjectStatus.TOO_LARGE)
_encode_body: Final = msgspec.msgpack.Encoder().encode


NoteReads = Callable[[Mapping[bytes, int]], None]
"""Takes how often each object was read."""


class ReadTally:
    """Reads served, for the event loop to take in: digests of objects, each time one was read, and the bytes of
    frames and values. The oldest are forgotten when it is full."""

    def __init__(self) -> None:
        self._digests: deque[bytes] = deque(maxlen=MAX_TALLY)
        self._bytes: deque[int] = deque(maxlen=MAX_TALLY)
        self._counts: Counter[bytes] = Counter()
        """Of reads that were taken from `_digests`, by object."""
        self.small_read_at = -math.inf
        """When a small read was answered last, by a thread or by the event loop, in monotonic seconds."""

    def add(self, digests: Sequence[bytes], length_bytes: int) -> None:
        """An answer was sent, with these objects from their beginning. From any thread."""
        self._digests.extend(digests)
        self._bytes.append(length_bytes)

    @property
    def small_reads_go_on(self) -> bool:
        """Whether one was answered a moment ago."""
        return time.monotonic() - self.small_read_at < MIXED_SECONDS

    def take(self, limit: int) -> tuple[dict[bytes, int], int]:
        """Up to `limit` objects with how often each was read, and bytes sent, that were not taken yet. First all reads
        are counted, some with each call, so that there are few objects. Not for several threads."""
        reads, counts = self._digests, self._counts
        counts.update([reads.popleft() for _ in range(min(COUNTED_READS, len(reads)))])
        sizes = [self._bytes.popleft() for _ in range(min(COUNTED_READS, len(self._bytes)))]
        some = [] if reads else list(islice(counts, limit))
        return {digest: counts.pop(digest) for digest in some}, sum(sizes)

    @property
    def has_more(self) -> bool:
        """Whether there is something to take."""
        return bool(self._digests or self._counts or self._bytes)


@dataclass(slots=True)
class Traffic:
    """Totals of served reads, for statistics; `busy` are reads that were sent to other holders."""

    uploads: Uploads
    objects: int = 0
    bytes: int = 0
    busy: int = 0
    read_threads: int = 0
    """Connections whose reads are answered in threads."""
    tally: ReadTally = field(default_factory=ReadTally)
    """Answers that are still to be taken in."""

    def take_in(self, note_reads: NoteReads) -> bool:
        """Count some answers of the tally, and report their objects to `note_reads`; whether there may be more."""
        counts, length_bytes = self.tally.take(TAKE_IN_OBJECTS)
        self.objects += sum(counts.values())
        self.bytes += length_bytes
        if counts:
            note_reads(counts)
        return self.tally.has_more


class ReadAnswers:
    """Answers of one connection that are sent together: `parts`, of `length_bytes` in all. Frames of other kinds may
    be among them. Of these bytes `own_bytes` are in memory of their own; the rest is lent until `end`."""

    def __init__(
        self, source: ReadSource, reader: bytes, traffic: Traffic, most_bulk_bytes: int
    ) -> None:
        self.parts: list[BytesLike] = []
        self.length_bytes = self.own_bytes = 0
        self.was_quick = False
        """Whether the last answer brought whole objects, all that were asked for, and is not long."""
        self._source = source
        self._reader = reader
        self._traffic = traffic
        self._most_bulk_bytes = most_bulk_bytes
        self._loans: list[Any] = []
        self._begun: list[bytes] = []
        """Objects in `parts` from their beginning on."""
        self._upload_began: float | None = None

    def add(self, frame: bytes, bulk: Sequence[BytesLike] = ()) -> None:
        """Have a frame sent after those before."""
        self.parts.append(frame)
        self.parts += bulk
        self.own_bytes += len(frame)
        self.length_bytes += len(frame) + sum(map(len, bulk))

    def get(self, request_id: int, get: Get, *, decides: bool) -> bool:
        """Answer GET. False, with nothing done, when the event loop is to decide about it."""
        loans: list[Any] = []
        replies: list[ObjectReply] = []
        payloads: list[memoryview] = []
        begun: list[bytes] = []
        self.was_quick = True
        bulk_bytes = body_bytes = 0
        for item in get.items:
            lent = self._source.lend(item, self._reader, get.keeps, decides=decides)
            reply = lent
            if isinstance(lent, LentObject):
                loans.append(lent.handle)
                payload = item.of(lent.value)
                body_bytes += len(lent.trailer) + 128
                reply = self._reply(lent, payload, get.may_refuse, bulk_bytes, body_bytes)
                if not reply.status:
                    payloads.append(payload)
                    bulk_bytes += len(payload)
                    self.was_quick &= len(payload) == len(lent.value)
                    if not item.first_chunk:
                        begun.append(item.digest)
            if not isinstance(reply, ObjectReply) or (reply.status and not decides):
                self._give_back(loans)
                if not self.parts:
                    self._end_upload(sent=False)
                return False
            replies.append(reply)
            self._traffic.busy += reply.status == BUSY
        self.was_quick &= len(payloads) == len(replies) and bulk_bytes <= QUICK_BYTES
        self._loans += loans
        self._begun += begun
        self.add(_frame(GET, request_id, Objects(replies), bulk_bytes), payloads)
        return True

    def _reply(
        self, lent: LentObject, payload: memoryview, may_refuse: bool, bulk_bytes: int, body_bytes: int
    ) -> ObjectReply:
        """The reply about a lent object, in an answer that has `bulk_bytes` and `body_bytes` without it."""
        if len(payload) > SMALL_OBJECT_BYTES and not self._take_upload(may_refuse):
            return ObjectReply(BUSY)
        if bulk_bytes + len(payload) > self._most_bulk_bytes or body_bytes > MAX_REPLY_BODY_BYTES:
            return ObjectReply(TOO_LARGE)
        return ObjectReply(OK, lent.slot, lent.trailer, len(payload))

    def get_small(self, request_id: int, asked: GetSmall, *, decides: bool) -> bool:
        """Answer GET_SMALL. False, with nothing done, when the event loop is to decide about it."""
        if len(asked.digests) % DIGEST_BYTES:
            return False
        # A place among the uploads comes before anything is lent: the source notes the readers of hot objects. Without
        # one, GET is to say what becomes of what is large.
        had_place, large = self._upload_began is not None, asked.most_bytes > SMALL_OBJECT_BYTES
        has_place = large and self._take_upload(may_refuse=True)
        request = asked if has_place or not large else GetSmall(asked.digests)
        lent = self._source.lend_small(request, self._reader)
        if has_place and not had_place and (lent is None or not _has_large(lent)):
            self._end_upload(sent=False)
        if lent is None:
            if not decides:
                return False
            nothing = bytes(len(asked.digests) // DIGEST_BYTES * SLOT_BYTES)
            lent = SmallObjectsLent(nothing, [], [], 0, None)
        self.was_quick = bool(lent.digests)
        self._loans.append(lent.handle)
        self._begun += lent.digests
        frame = _frame(GET_SMALL, request_id, SmallObjects(lent.slots), lent.length_bytes)
        self.parts += (frame, *lent.payloads)
        self.own_bytes += len(frame)
        self.length_bytes += len(frame) + lent.length_bytes
        return True

    def note(self) -> None:
        """They are sent."""
        self._traffic.tally.add(self._begun, self.length_bytes)
        if self._begun and self._upload_began is None:
            self._traffic.tally.small_read_at = time.monotonic()

    def end(self) -> None:
        """Give back all that was lent: it was sent, or will not be."""
        self._end_upload()
        loans, self._loans = self._loans, []
        self.parts, self._begun = [], []
        self.length_bytes = self.own_bytes = 0
        self._give_back(loans)

    def _give_back(self, loans: Sequence[Any]) -> None:
        for handle in loans:
            if handle is not None:
                self._source.end_loan(handle)

    def _take_upload(self, may_refuse: bool) -> bool:
        """Whether a large answer may be sent now; if so, this connection has one on its way until `end`."""
        if self._upload_began is None:
            now = time.monotonic()
            if not self._traffic.uploads.begin(now, may_refuse=may_refuse):
                return False
            self._upload_began = now
        return True

    def _end_upload(self, *, sent: bool = True) -> None:
        began, self._upload_began = self._upload_began, None
        if began is not None:
            self._traffic.uploads.end(began, time.monotonic() if sent else began)


class Outgoing:
    """The answers of one connection that leave from the event loop: gathered, then sent together, in order."""

    def __init__(
        self,
        stream: AcceptedStream,
        answers: ReadAnswers,
        account: Account,
        take_in: Callable[[], object],
    ) -> None:
        """`account` has the bytes of answers that are in memory of their own; `take_in` counts what was sent."""
        self._stream = stream
        self._answers = answers
        self._account = account
        self._take_in = take_in
        self._sending = trio.Lock()
        self._held_bytes = 0

    def add(self, frame: bytes, bulk: Sequence[BytesLike] = ()) -> None:
        """Send this with the next `flush`."""
        self._answers.add(frame, bulk)
        self.hold()

    def refuse(self, header: FrameHeader, code: Code, text: str) -> None:
        """Answer a request with a failure, unless it wants no answer."""
        if not header.flags & ONE_WAY:
            self.add(encode_failure(header.kind, header.request_id, code, text))

    def hold(self) -> None:
        """Hold what was gathered since the last call in the account."""
        self._account.hold(self._answers.own_bytes - self._held_bytes)
        self._held_bytes = self._answers.own_bytes

    async def flush(self) -> None:
        """Send what was gathered and give the objects back."""
        answers = self._answers
        if not answers.parts:
            return
        try:
            answers.note()
            self._take_in()
            await self.send(*answers.parts)
        finally:
            self.drop()

    def send_now(self, frame: bytes) -> int:
        """The bytes of a frame that the socket takes now. The rest is to be sent before any other task runs."""
        send_now = getattr(self._stream, "send_now", None)
        if send_now is None or self._sending.locked():
            return 0
        try:
            sent: int = send_now(frame)
        except OSError:  # `send` will say so
            return 0
        return sent

    async def send(self, *parts: BytesLike) -> None:
        """Send at once, without another task's answer in between."""
        try:
            self._sending.acquire_nowait()  # `async with` would cost a turn of the event loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._stream.send(*parts)
        finally:
            self._sending.release()

    def drop(self) -> None:
        """Give back all that was gathered."""
        self._account.release(self._held_bytes)
        self._held_bytes = 0
        self._answers.end()


def may_be_large(message: Get | GetSmall) -> bool:
    """Whether a large answer may be wanted, for which the event loop had better not have the connection while others
    read small objects."""
    if isinstance(message, GetSmall):
        return message.most_bytes > SMALL_OBJECT_BYTES
    first = message.items[0]
    return len(message.items) == 1 and (first.first_chunk > 0 or first.chunk_count != 1)


def _has_large(lent: SmallObjectsLent) -> bool:
    return max(map(len, lent.payloads), default=0) > SMALL_OBJECT_BYTES


def _frame(kind: int, request_id: int, reply: Message, bulk_length: int) -> bytes:
    body = _encode_body(reply)
    return HEADER.pack(kind, REPLY, request_id, len(body), bulk_length) + body


class LentObject(NamedTuple):
    """An object that stays where it is until `end_loan`, with slot and trailer as they are there. `handle` is its
    source's own; None where nothing is given back."""

    slot: bytes
    trailer: bytes
    value: memoryview
    handle: Any


class ReadSource(Protocol):
    """The objects of a peer. Any thread may borrow them."""

    def lend(
        self, item: GetItem, reader: bytes, keeps: int, *, decides: bool
    ) -> LentObject | ObjectReply | None:
        """An object in memory, to be sent to the peer `reader` or a client of it. It stays there until `end_loan`.
        Otherwise why it is not sent, for the event loop, which `decides`; None for other threads. Never blocks."""

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        """The answer to GET_SMALL of the peer `reader`, or of a client of it; the objects stay there until `end_loan`.
        None when it takes the event loop to say, or another look."""

    def end_loan(self, handle: Any) -> None:
        """The end of `lend` or `lend_small`, in the same thread."""
