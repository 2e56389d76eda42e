"""Reads that follow one another on a data connection, answered in a thread of their own.

A turn of the event loop costs more than all the rest of a small read. So a connection on which one small read follows
the other is lent to a thread, which waits in the kernel for each request and answers it at once, from what it can look
at without the event loop (see `QuickSource`). Whatever else comes, a pause too, ends that: the event loop has the
connection again, and the bytes that it is to answer.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from p2pstore.objects import DIGEST_BYTES, KIB, MIB
from p2pstore.polling import Polling
from p2pstore.streams import (
    MAX_GATHER,
    BytesLike,
    advance,
    flatten_parts,
    send_views,
    waiting_in_kernel,
)
from p2pstore.transfer.entries import QuickCopy, SmallObjectsLent
from p2pstore.transfer.messages import (
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
from p2pstore.transfer.uploads import Uploads
from p2pstore.wire import DATA_REQUEST_LIMITS, HEADER, HEADER_BYTES, REPLY

BRISK_READS: Final = 8
"""So many small reads, one soon after the other, and the next ones are answered in a thread."""
BRISK_SECONDS: Final = 0.01
"""What is soon."""
PAUSE_SECONDS: Final = 0.5
"""Without a request for so long, a thread gives the connection back."""
MAX_READ_THREADS: Final = 16
"""Of a peer. What does not get one is answered by the event loop."""
QUICK_BYTES: Final = 64 * KIB
"""Values up to this are copied before they are sent, so that nobody needs to keep them in place."""
LENT_BYTES: Final = 16 * MIB
"""Values up to this are sent in threads. Larger ones take so long that turns of the event loop hardly count."""
SMALL_ANSWER_BYTES: Final = MIB + 64 * KIB
"""A lent object of 1 MiB with its head counts as a small read, a larger one does not."""
VALUES_BYTES: Final = 2 * MIB
"""Of values in one answer."""
MIXED_SECONDS: Final = 0.1
"""For so long after a small read, large answers are sent in threads: a small one would wait for a piece of a large
one each time, and longer where the kernel lets others run first, as an event loop that works all the time is no
longer preferred when it wakes up."""
MAX_TALLY: Final = 65_536
COUNTED_READS: Final = 512
"""Counted at once, which takes 50 us: threads wait for the interpreter meanwhile."""
REQUEST_BYTES: Final = 64 * KIB
"""Requests received at once."""

GET, GET_SMALL, OK = int(DataKind.GET), int(DataKind.GET_SMALL), int(ObjectStatus.OK)
_encode_body: Final = msgspec.msgpack.Encoder().encode
decode_get: Final = msgspec.msgpack.Decoder(Get).decode
_decode_get_small: Final = msgspec.msgpack.Decoder(GetSmall).decode
MALFORMED: Final = msgspec.DecodeError, RecursionError, UnicodeDecodeError


class LentObject(NamedTuple):
    """An object that stays where it is until `end_loan`, with slot and trailer as they are there. `is_current` says
    whether it would be lent now as well; `handle` is its source's own."""

    digest: bytes
    slot: bytes
    trailer: bytes
    value: memoryview
    is_current: Callable[[], bool]
    handle: Any


class QuickSource(Protocol):
    """Objects that any thread may look at."""

    def copy_quickly(self, digest: bytes, into: memoryview) -> QuickCopy | None:
        """Copy an object in memory, which may be read now, to the beginning of `into`. None when there is none, it
        does not fit, or it takes the event loop to say."""
        ...

    def lend(self, item: GetItem, reader: bytes, keeps: int, most_bytes: int) -> LentObject | None:
        """An object in memory of up to `most_bytes`, or a larger one of which a later part is asked for, to be sent to
        the peer `reader` or a client of it. It stays there until `end_loan`. None when there is none, or it takes the
        event loop to say."""
        ...

    def end_loan(self, lent: LentObject) -> None:
        """The end of `lend`, in the same thread."""
        ...

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        """What GET_SMALL of the peer `reader`, or of a client of it, is answered with; it stays there until
        `end_small_loan`. None when it takes the event loop to say, or another look."""
        ...

    def end_small_loan(self, lent: SmallObjectsLent) -> None:
        """The end of `lend_small`, in the same thread."""
        ...


class ReadTally:
    """What threads have served, for the event loop to take in: digests of objects, each time one was read, and the
    bytes of frames and values. Where nobody does for long, the oldest are forgotten."""

    def __init__(self) -> None:
        self._digests: deque[bytes] = deque(maxlen=MAX_TALLY)
        self._bytes: deque[int] = deque(maxlen=MAX_TALLY)
        self._counts: Counter[bytes] = Counter()
        """Of reads that were taken from `_digests`, by object."""
        self.small_read_at = -math.inf
        """When a small read was answered last, by a thread or by the event loop, in monotonic seconds."""

    def add(self, digests: Sequence[bytes], length_bytes: int) -> None:
        """An answer was sent, or parts of large objects, of which the first one was asked for. From any thread."""
        self._digests.extend(digests)
        self._bytes.append(length_bytes)

    @property
    def small_reads_go_on(self) -> bool:
        """Whether one was answered a moment ago."""
        return time.monotonic() - self.small_read_at < MIXED_SECONDS

    def take(self, limit: int) -> tuple[dict[bytes, int], int]:
        """Up to `limit` objects with how often each was read, and bytes sent, that nobody took yet. First all reads
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


class ReadThread:
    """Answers what it can on one connection. `wanted` says whether it is to go on."""

    def __init__(
        self,
        source: QuickSource,
        reader: bytes,
        tally: ReadTally,
        uploads: Uploads,
        wanted: Callable[[], bool],
        progress_seconds: float,
    ) -> None:
        self._source = source
        self._reader = reader
        self._tally = tally
        self._uploads = uploads
        self._wanted = wanted
        self._progress_seconds = progress_seconds
        self._request = memoryview(bytearray(REQUEST_BYTES))
        self._values = memoryview(bytearray(VALUES_BYTES))
        """Those of the answer that is made."""
        self._taken_bytes = self._sent_bytes = 0
        self._polling = Polling()

    def serve(self, sock: socket.socket) -> bytes:
        """Answer requests until one comes that is not for here, or none for a while: the bytes received that were not
        answered. To be run in a thread that has the (non-blocking) socket for itself, and gives it back like that.

        Raises `DeadlineExceeded` when what is sent makes no progress, and `OSError` when the connection breaks.
        """
        limits = {"send_seconds": self._progress_seconds, "receive_seconds": PAUSE_SECONDS}
        with waiting_in_kernel(sock, **limits):
            return self._serve(sock)

    def _serve(self, sock: socket.socket) -> bytes:
        request, held, rest_by = self._request, 0, math.inf
        while self._wanted() and time.monotonic() < rest_by:
            try:
                received = self._polling.receive_into(sock, request[held:])
            except BlockingIOError:  # a pause
                break
            count = held + received
            done, began = 0, time.monotonic()
            while done < count and (answered := self._answer(sock, request[done:count])):
                done += answered
            held = count - done
            request[:held] = request[done:count]
            if not received or (held and not _may_be_here_soon(request[:held])):
                break
            if not held:
                rest_by = math.inf
            elif done or rest_by == math.inf:
                rest_by = began + PAUSE_SECONDS
            self._polling.sent(time.monotonic() - began)
        return bytes(request[:held])

    def _answer(self, sock: socket.socket, data: memoryview) -> int:
        """Answer the request that `data` begins with; how long it was, 0 when it is not for here."""
        kind, request_id, body = request_in(data)
        try:
            if kind == GET:
                done = self._answer_get(sock, request_id, decode_get(body))
            elif kind == GET_SMALL:
                done = self._answer_small(sock, request_id, _decode_get_small(body))
            else:
                return 0
        except MALFORMED:
            return 0
        return HEADER_BYTES + len(body) if done else 0

    def _answer_get(self, sock: socket.socket, request_id: int, get: Get) -> bool:
        """Whether that could be done here."""
        items = get.items
        if replies := self._take(items):
            self._reply(sock, request_id, replies, self._values[: self._taken_bytes])
        elif len(items) != 1 or not self._reply_lent(sock, request_id, get):
            return False
        self._tally.add([each.digest for each in items], self._sent_bytes)
        if replies or self._sent_bytes <= SMALL_ANSWER_BYTES:
            self._tally.small_read_at = time.monotonic()
        return True

    def _answer_small(self, sock: socket.socket, request_id: int, asked: GetSmall) -> bool:
        """Whether that could be done here."""
        if len(asked.digests) % DIGEST_BYTES:
            return False
        began = time.monotonic()
        has_place = wants_large(asked) and self._uploads.begin(began, may_refuse=True)
        try:
            lent = self._source.lend_small(asked if has_place else only_small(asked), self._reader)
            if lent is None:
                return False
            if has_place and not has_large(lent):
                has_place = False
                self._uploads.end(began, began)
            try:
                parts = small_answer(request_id, lent)
                send_all(sock, parts, self._progress_seconds)
            finally:
                self._source.end_small_loan(lent)
        finally:
            if has_place:
                self._uploads.end(began, time.monotonic())
        self._tally.add(lent.digests, len(parts[0]) + lent.length_bytes)
        if not has_place:
            self._tally.small_read_at = time.monotonic()
        return True

    def _reply_lent(self, sock: socket.socket, request_id: int, get: Get) -> bool:
        """Answer with one larger object, out of its place; whether that could be done here."""
        (item,) = get.items
        if item.first_chunk:
            return False
        began = time.monotonic()
        if not self._uploads.begin(began, may_refuse=get.may_refuse):
            return False
        try:
            lent = self._source.lend(item, self._reader, get.keeps, LENT_BYTES)
            if lent is None:
                return False
            try:
                payload = item.of(lent.value)
                reply = ObjectReply(OK, lent.slot, lent.trailer, len(payload))
                self._reply(sock, request_id, [reply], payload)
            finally:
                self._source.end_loan(lent)
        finally:
            self._uploads.end(began, time.monotonic())
        return True

    def _take(self, items: Sequence[GetItem]) -> list[ObjectReply]:
        """Copy the values of all of them, one after the other, or nothing."""
        replies: list[ObjectReply] = []
        taken = 0
        for item in items:
            into = self._values[taken : taken + QUICK_BYTES]
            if item.first_chunk or (copy := self._source.copy_quickly(item.digest, into)) is None:
                return []
            slot, trailer, length = copy
            replies.append(ObjectReply(OK, slot, trailer, length))
            taken += length
        self._taken_bytes = taken
        return replies

    def _reply(
        self,
        sock: socket.socket,
        request_id: int,
        replies: list[ObjectReply],
        values: memoryview,
    ) -> None:
        head = answer_head(request_id, replies, len(values))
        self._sent_bytes = len(head) + len(values)
        send_all(sock, (head, values), self._progress_seconds)


def request_in(data: memoryview) -> tuple[int, int, memoryview]:
    """Kind, number and body of the request that `data` begins with. Kind 0, which there is not, when it is not whole,
    is too long, has bulk, or wants no answer."""
    nothing = 0, 0, data[:0]
    if len(data) < HEADER_BYTES:
        return nothing
    kind, flags, request_id, body_length, bulk_length = HEADER.unpack_from(data)
    end: int = HEADER_BYTES + body_length
    if flags or bulk_length or len(data) < end or body_length > DATA_REQUEST_LIMITS.body_bytes:
        return nothing
    return kind, request_id, data[HEADER_BYTES:end]


def _may_be_here_soon(data: memoryview) -> bool:
    """Whether this is the beginning of a request that may be for here: a network brings long ones in several pieces."""
    if len(data) < HEADER_BYTES:
        return True
    kind, flags, _, body_length, bulk_length = HEADER.unpack_from(data)
    end = HEADER_BYTES + body_length
    return (
        kind in (GET, GET_SMALL) and not (flags or bulk_length) and len(data) < end <= REQUEST_BYTES
    )


def answer_head(request_id: int, replies: list[ObjectReply], bulk_length: int) -> bytes:
    """The frame that answers GET, up to its bulk."""
    body = _encode_body(Objects(replies))
    return HEADER.pack(GET, REPLY, request_id, len(body), bulk_length) + body


def wants_large(asked: GetSmall) -> bool:
    """Whether the answer may be a large one, which takes a place among the uploads before anything is lent: who lends
    notes who reads what is hot."""
    return asked.most_bytes > SMALL_OBJECT_BYTES


def only_small(asked: GetSmall) -> GetSmall:
    """Without what takes a place: of that, GET is to say what becomes of it."""
    return GetSmall(asked.digests) if wants_large(asked) else asked


def has_large(lent: SmallObjectsLent) -> bool:
    """Whether it needs that place."""
    return max(map(len, lent.payloads), default=0) > SMALL_OBJECT_BYTES


def small_answer(request_id: int, lent: SmallObjectsLent) -> list[BytesLike]:
    """The frame that answers GET_SMALL with what was lent, in parts."""
    body = _encode_body(SmallObjects(lent.slots))
    head = HEADER.pack(GET_SMALL, REPLY, request_id, len(body), lent.length_bytes) + body
    return [head, *lent.payloads]


def send_all(sock: socket.socket, parts: Sequence[BytesLike], progress_seconds: float) -> None:
    """Send all on a socket that waits in the kernel. Raises as `p2pstore.streams.send_all`."""
    sent = sock.sendmsg(parts[:MAX_GATHER])
    if sent < sum(map(len, parts)):  # seldom: many parts, or little progress
        views = flatten_parts(parts)
        del views[: advance(views, 0, sent)]
        send_views(sock, views, progress_seconds)


class Briskness:
    """Whether reads that a thread can answer follow one another. Pure."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._answered_at = 0.0

    def answered(self, now: float, *, quick: bool) -> None:
        """A request was answered; `quick`: a thread could have done that."""
        soon = now - self._answered_at < BRISK_SECONDS
        self._in_a_row = (self._in_a_row + 1 if soon else 1) if quick else 0
        self._answered_at = now

    @property
    def is_brisk(self) -> bool:
        """Whether the next one is likely to be one as well, soon."""
        return self._in_a_row >= BRISK_READS
