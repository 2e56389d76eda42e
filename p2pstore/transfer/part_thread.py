"""The parts of large objects, sent in a thread of their own while others read small objects.

What the thread does between two parts, it does while those who answer small reads wait for the interpreter. So it sends
all parts that it was asked for by then with one call, and borrows the object once for all of them. The event loop would
need a millisecond to take the connection back and lend it again: so the thread begins with the next object as well.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from p2pstore.objects import CHUNK_BYTES, KIB, MAX_OBJECT_BYTES, PART_BYTES
from p2pstore.streams import BytesLike, taking_no_core, waiting_in_kernel
from p2pstore.transfer.messages import Get, GetItem, ObjectReply
from p2pstore.transfer.read_thread import (
    GET,
    MALFORMED,
    OK,
    LentObject,
    QuickSource,
    ReadTally,
    answer_head,
    decode_get,
    request_in,
    send_all,
)
from p2pstore.transfer.uploads import Uploads
from p2pstore.wire import HEADER_BYTES

PAUSE_SECONDS: Final = 0.1
"""Without a request for so long, the thread gives the connection back: it keeps an upload's place."""
NEXT_OBJECT_SECONDS: Final = 0.01
"""For so long it waits after an object for a request for the next one, if small ones are read meanwhile."""
REQUEST_BYTES: Final = 16 * KIB
"""Requests received at once."""
MAX_PARTS: Final = 8
"""Sent with one call."""


class PartThread:
    """Answers requests for parts of large objects on one connection, and ends with the last one of an object, unless
    small ones are read meanwhile and the next large one is asked for soon. `wanted` says whether it is to go on."""

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
        self._lent: LentObject | None = None
        """The one whose parts are sent."""
        self._at_the_end = False
        """Of an object."""

    def serve(self, sock: socket.socket) -> bytes:
        """As `ReadThread.serve`."""
        limits = {"send_seconds": self._progress_seconds, "receive_seconds": PAUSE_SECONDS}
        began = time.monotonic()
        self._uploads.begin(began)
        try:
            with waiting_in_kernel(sock, **limits), taking_no_core():
                return self._serve(sock)
        finally:
            self._end_loan()
            self._uploads.end(began, time.monotonic())

    def _serve(self, sock: socket.socket) -> bytes:
        request = self._request
        while self._wanted():
            if self._at_the_end and not self._another_comes(sock):
                return b""
            try:
                # Without polling: the next request is here by then, and others of this process may poll.
                count = sock.recv_into(request)
            except BlockingIOError:  # a pause
                return b""
            done = 0
            while done < count and (answered := self._answer(sock, request[done:count])):
                done += answered
            if done < count or not count:
                return bytes(request[done:count])
        return b""

    def _answer(self, sock: socket.socket, data: memoryview) -> int:
        """Answer the requests for parts of one object that `data` begins with; how long they were, 0 when the first one
        is not for here."""
        if self._at_the_end and not self._tally.small_reads_go_on:
            return 0
        self._at_the_end = False
        parts: list[BytesLike] = []
        begun: list[bytes] = []
        done = 0
        while len(parts) < 2 * MAX_PARTS and not self._at_the_end:
            kind, request_id, body = request_in(data[done:])
            get = _get_of_part(kind, body)
            if get is None or not self._borrow(get, may_change=not parts):
                break
            answer = self._part(request_id, get.items[0])
            if not answer:
                break
            parts += answer
            if _begins(get):
                begun.append(get.items[0].digest)
            done += HEADER_BYTES + len(body)
        if parts:
            send_all(sock, parts, self._progress_seconds)
            self._tally.add(begun, sum(map(len, parts)))
        return done

    def _another_comes(self, sock: socket.socket) -> bool:
        """Whether the next object is to be sent here as well, and is asked for soon."""
        if not self._tally.small_reads_go_on:
            return False
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(NEXT_OBJECT_SECONDS * 1000))

    def _borrow(self, get: Get, *, may_change: bool) -> bool:
        """Whether the object whose part is asked for is lent now. It stays so until another one is to be, which must
        not happen (`may_change`) while parts of it wait to be sent."""
        (item,) = get.items
        lent = self._lent
        begins = _begins(get)  # each reading is lent anew: its source counts who reads what
        if not begins and lent is not None and lent.digest == item.digest and lent.is_current():
            return True
        if not may_change or (begins and not self._tally.small_reads_go_on):
            return False
        self._end_loan()
        self._lent = self._source.lend(item, self._reader, get.keeps, MAX_OBJECT_BYTES)
        return self._lent is not None

    def _part(self, request_id: int, item: GetItem) -> Sequence[BytesLike]:
        """The answer with a part of the object that is lent, out of its place; nothing when there is no such part."""
        lent = self._lent
        assert lent is not None
        payload = item.of(lent.value)
        if not 0 < len(payload) <= PART_BYTES:
            return ()
        self._at_the_end = item.first_chunk * CHUNK_BYTES + len(payload) == len(lent.value)
        reply = ObjectReply(OK, lent.slot, lent.trailer, len(payload))
        return answer_head(request_id, [reply], len(payload)), payload

    def _end_loan(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            self._source.end_loan(lent)


def _begins(get: Get) -> bool:
    """Whether the first part of an object is asked for."""
    return not get.items[0].first_chunk


def _get_of_part(kind: int, body: memoryview) -> Get | None:
    """A request for a part of one object that may have several."""
    if kind != GET:
        return None
    try:
        get = decode_get(body)
    except MALFORMED:
        return None
    if len(get.items) != 1 or get.may_refuse:
        return None
    (item,) = get.items
    return get if item.first_chunk > 0 or item.chunk_count > 1 else None
