"""Reads of a busy data connection, answered in a thread of their own.

A turn of the event loop costs more than all the rest of a small read, and beside large answers small ones wait for it.
So a connection on which one small read follows the other, or that is asked for a large object while others read small
ones, is lent to a thread. The thread waits in the kernel for each request and answers it at once. Whatever needs the
event loop, a pause too, ends that: the event loop has the connection again, and the bytes that it is to answer.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import msgspec

from p2pstore.objects import KIB
from p2pstore.runtime.polling import Polling
from p2pstore.runtime.streams import send_all, taking_no_core, waiting_in_kernel
from p2pstore.transfer.data_messages import Get, GetSmall
from p2pstore.transfer.serving.read_answers import GET, GET_SMALL, ReadAnswers
from p2pstore.wire import DATA_REQUEST_LIMITS, HEADER, HEADER_BYTES

BRISK_READS: Final = 8
"""Small reads in a row, each within `BRISK_SECONDS` of the last, after which a thread answers."""
BRISK_SECONDS: Final = 0.01
"""Upper bound between two reads in a row."""
PAUSE_SECONDS: Final = 0.5
"""Pause after which a thread gives the connection back."""
MAX_PARTS: Final = 16
"""Heads and values that are sent with one call: as many as eight parts of large objects have."""
REQUEST_BYTES: Final = 64 * KIB
"""Requests received at once."""

_decode_get: Final = msgspec.msgpack.Decoder(Get).decode
_decode_get_small: Final = msgspec.msgpack.Decoder(GetSmall).decode
_MALFORMED: Final = msgspec.DecodeError, RecursionError, UnicodeDecodeError


class ReadThread:
    """Answers what it can on one connection. `wanted` says whether it is to go on, `received` was received already.
    `in_bulk`: large objects are asked for, and the thread leaves cores and the interpreter to those that answer small
    reads."""

    def __init__(
        self,
        answers: ReadAnswers,
        wanted: Callable[[], bool],
        progress_seconds: float,
        received: bytes = b"",
        *,
        in_bulk: bool = False,
    ) -> None:
        self._answers = answers
        self._wanted = wanted
        self._progress_seconds = progress_seconds
        self._received = received
        self._in_bulk = in_bulk
        self._request = memoryview(bytearray(REQUEST_BYTES + len(received)))
        self._polling = Polling()

    def serve(self, sock: socket.socket) -> bytes:
        """Answer requests until one comes that is not for here, or none for a while: the bytes received that were not
        answered. To be run in a thread that has the (non-blocking) socket for itself, and gives it back like that.

        Raises `DeadlineExceeded` when what is sent makes no progress, and `OSError` when the connection breaks.
        """
        limits = {"send_seconds": self._progress_seconds, "receive_seconds": PAUSE_SECONDS}
        with waiting_in_kernel(sock, **limits), taking_no_core() if self._in_bulk else nullcontext():
            try:
                return self._serve(sock)
            finally:
                self._answers.end()

    def _serve(self, sock: socket.socket) -> bytes:
        request, count, rest_by = self._request, len(self._received), math.inf
        request[:count] = self._received
        while True:
            began = time.monotonic()
            done = self._answer(sock, request[:count])
            held = count - done
            request[:held] = request[done:count]
            if held and not _may_be_here_soon(request[:held]):
                break
            if not held:
                rest_by = math.inf
            elif done or rest_by == math.inf:
                rest_by = began + PAUSE_SECONDS
            now = time.monotonic()
            self._polling.sent(now - began)
            if not self._wanted() or now >= rest_by:
                break
            try:
                received = self._receive(sock, request[held:])
            except BlockingIOError:  # a pause
                break
            if not received:
                break
            count = held + received
        return bytes(request[:held])

    def _receive(self, sock: socket.socket, view: memoryview) -> int:
        if self._in_bulk:  # the next request is here by now, and others of this process may poll
            return sock.recv_into(view)
        return self._polling.receive_into(sock, view)

    def _answer(self, sock: socket.socket, data: memoryview) -> int:
        """Answer the requests that `data` begins with; how long they were."""
        done = 0
        while done < len(data):
            kind, request_id, body = _request_in(data[done:])
            if not self._make(kind, request_id, body):
                break
            done += HEADER_BYTES + len(body)
            if len(self._answers.parts) >= MAX_PARTS:
                self._send(sock)
        if self._answers.parts:
            self._send(sock)
        return done

    def _make(self, kind: int, request_id: int, body: memoryview) -> bool:
        """Make an answer; whether that could be done here."""
        try:
            if kind == GET_SMALL:
                small = _decode_get_small(body)
                return self._answers.get_small(request_id, small, decides=False)
            if kind == GET and (get := _decode_get(body)).items:
                return self._answers.get(request_id, get, decides=False)
        except _MALFORMED:
            pass
        return False

    def _send(self, sock: socket.socket) -> None:
        answers = self._answers
        try:
            send_all(sock, answers.parts, self._progress_seconds)
            answers.note()
        finally:
            answers.end()


def _request_in(data: memoryview) -> tuple[int, int, memoryview]:
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
    return kind in (GET, GET_SMALL) and not (flags or bulk_length) and len(data) < end <= REQUEST_BYTES


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
