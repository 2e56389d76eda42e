"""Requests on their way to the local peer: which caller waits for which reply. No I/O of its own.

`LocalConnection` sends and receives; here is what it remembers of each request.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, cast

from p2pstore.errors import AnswerTooLarge, ProtocolError
from p2pstore.local.local_protocol import IN_ROWS, REPLIES, LocalKind
from p2pstore.local.older_put_messages import newer
from p2pstore.runtime.streams import Event
from p2pstore.wire import (
    ERROR,
    HEADER_BYTES,
    LOCAL_LIMITS,
    REPLY,
    Failure,
    FrameHeader,
    Message,
    decode_body,
    decode_header,
    error_of,
)

M = TypeVar("M", bound=Message)

Frame = tuple[FrameHeader, bytes]
LateFrame = Callable[[Frame], None]


class Waiter:
    """One request on its way."""

    __slots__ = ("event", "frame", "number", "on_late_frame")

    def __init__(self, number: int) -> None:
        self.number = number
        self.frame: Frame | None = None
        self.event: Event | None = None
        self.on_late_frame: LateFrame | None = None
        """Set when the caller has given up, but its reply may hold something to give back."""

    def wake(self) -> bool:
        """Let the caller look again. Whether it was waiting."""
        event, self.event = self.event, None
        if event is not None:
            event.set()
        return event is not None


class Waiters:
    """The requests of one connection that wait for replies, and which of them receives for all. Thread-safe."""

    def __init__(self) -> None:
        self.receiver: Waiter | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Waiter] = {}
        self._state = threading.Lock()  # held for microseconds, never awaited in

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def any_abandoned(self) -> bool:
        """Whether a request was given up whose reply must still be looked at."""
        with self._state:
            return any(waiter.on_late_frame is not None for waiter in self._waiting.values())

    def next_number(self) -> int:
        """The number of the next request."""
        return next(self._numbers) & 0xFFFF_FFFF

    def add(self, waiter: Waiter) -> Waiter:
        """A request is about to be sent; `take` or `give_up` must follow."""
        with self._state:  # another thread may be going through them
            self._waiting[waiter.number] = waiter
        return waiter

    def take(self, waiter: Waiter) -> Frame:
        """The reply that has come."""
        with self._state:
            del self._waiting[waiter.number]
        assert waiter.frame is not None
        return waiter.frame

    def give_up(self, waiter: Waiter, on_late_frame: LateFrame | None = None) -> None:
        """The caller wants this reply no more; `on_late_frame` gets it when it comes after all, as of what was sent."""
        with self._state:
            if self.receiver is waiter:  # it was interrupted when it was about to hand that on
                self.receiver = None
            if self.receiver is None:  # this one may have been woken to receive
                any(other.wake() for other in self._waiting.values() if other is not waiter)
            if waiter.frame is None and on_late_frame is not None and waiter.number in self._waiting:
                waiter.on_late_frame = on_late_frame
                return
            self._waiting.pop(waiter.number, None)
        if waiter.frame is not None and on_late_frame is not None:
            on_late_frame(waiter.frame)

    def begin_receiving(self, waiter: Waiter, new_event: Callable[[], Event]) -> Event | None:
        """Make `waiter` the receiver, if there is none; else an event to wait for. None as well where its reply has
        come. `end_receiving` must follow, whatever interrupts the caller."""
        with self._state:
            if waiter.frame is not None:  # the receiver before brought it along
                return None
            if self.receiver is None:
                self.receiver = waiter
                return None
            waiter.event = event = new_event()
            return event

    def end_receiving(self, waiter: Waiter) -> None:
        """Hand the receiving on to the next one, if `waiter` was the receiver."""
        if self.receiver is waiter:
            with self._state:
                self.receiver = None
                any(other.wake() for other in self._waiting.values())

    def deliver(self, frame: Frame) -> None:
        """Give a reply to its request. May be interrupted and repeated."""
        number = frame[0].request_id
        receiver = self.receiver
        if receiver is not None and receiver.number == number:  # nearly always
            receiver.frame = frame
            return
        with self._state:
            waiter = self._waiting.get(number)
            if waiter is None:
                return
            waiter.frame = frame
            waiter.wake()
        if waiter.on_late_frame is not None:
            waiter.on_late_frame(frame)
            with self._state:
                self._waiting.pop(number, None)

    def wake_all(self) -> None:
        """Let every caller look again."""
        with self._state:
            for waiter in self._waiting.values():
                waiter.wake()


class ReplyPieces:
    """Received bytes, cut into frames. A frame stays until all frames that came with it were delivered, so that an
    interrupt loses none: one may be delivered twice."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        """As they came; b"" is the end."""

    def deliver(self, deliver: Callable[[Frame], None]) -> bool:
        """Deliver the frames that are whole. False when there is none. Raises `ProtocolError`."""
        pieces = self.pieces
        if len(pieces) > 1:
            if sum(map(len, pieces)) < self._wanted_bytes():
                return False
            pieces[:] = [b"".join(pieces)]
        data, start = pieces[0], 0
        while (position := start + HEADER_BYTES) <= len(data):
            header = decode_header(data, LOCAL_LIMITS, start)
            end = position + header.body_length
            if end > len(data):
                break
            deliver((header, data[position:end]))
            start = end
        if start:
            pieces[:] = [data[start:]] if start < len(data) else ()
        return start > 0

    def _wanted_bytes(self) -> int:
        """Bytes of the first frame, as far as its header has come."""
        first = self.pieces[0]
        if len(first) < HEADER_BYTES:
            return HEADER_BYTES
        return HEADER_BYTES + decode_header(first, LOCAL_LIMITS).body_length


class Silence:
    """Whether the peer hangs: a probe is unanswered for `patience_seconds`, after half as long without a byte. Pure;
    times in seconds."""

    def __init__(self) -> None:
        self.patience_seconds = math.inf
        self.hangs = False
        """Until the next byte."""
        self.heard_at = self._probed_at = -math.inf

    @property
    def is_probed(self) -> bool:
        """Whether a probe is unanswered. One is enough: they would fill the socket of a peer that was stopped."""
        return self._probed_at > self.heard_at

    def heard(self, now: float) -> None:
        """Bytes have come."""
        self.heard_at = now
        self.hangs = False

    def probed(self, now: float) -> None:
        """A probe is being sent."""
        self._probed_at = now

    def wants_probe(self, asked_at: float, now: float) -> bool:
        """Whether a caller that waits since `asked_at` should send one."""
        return not self.is_probed and now - max(asked_at, self.heard_at) >= self.patience_seconds / 2

    def lasts(self, asked_at: float, now: float) -> bool:
        """Whether the peer hangs, as far as a caller can tell that waits since `asked_at`."""
        if self.is_probed and now - max(asked_at, self._probed_at) >= self.patience_seconds:
            self.hangs = True
        return self.hangs


def late_frame(
    on_late_reply: Callable[[M], None] | None, kind: LocalKind, reply_type: type[M]
) -> LateFrame | None:
    """The function that takes a frame that comes after its request was given up."""
    if on_late_reply is None:
        return None

    def take(frame: Frame) -> None:
        if not frame[0].flags & ERROR:
            on_late_reply(reply_in(frame, kind, reply_type))

    return take


def reply_in(frame: Frame, kind: LocalKind, reply_type: type[M]) -> M:
    """The reply in a frame. Raises the error that it carries instead."""
    header, body = frame
    if header.flags & ERROR:
        failure = decode_body(Failure, body)
        raise error_of(failure.code, failure.text, failure.detail)
    if header.kind not in (kind, IN_ROWS.get(kind)) or not header.flags & REPLY:
        raise ProtocolError(f"the local peer answered {kind.name} with a frame of kind {header.kind}")
    if header.kind != kind:  # a peer of version 1
        return cast(M, newer(decode_body(REPLIES[header.kind], body)))
    return decode_body(reply_type, body)


MAX_REPORTED_FAILURES: Final = 1024
"""Holders that failed, of one report: each may cost the peer a look at its own copy."""
REQUEST_BYTES: Final = LOCAL_LIMITS.body_bytes // 2
"""Of the items of one request. The other half of a frame is for the fields around them."""
MAX_ITEMS: Final[dict[LocalKind, int]] = {
    LocalKind.RESERVE: 1024,  # four windows of puts
    LocalKind.COMMIT: 256,
    LocalKind.ABORT: 4096,
    LocalKind.LEASE: 256,  # a millisecond of the peer's event loop
    LocalKind.RELEASE: 4096,
    LocalKind.PLAN: 1024,
    LocalKind.CONTAINS: 4096,
    LocalKind.MATCH_PREFIX: 4096,
    LocalKind.ESTIMATE: 4096,
    LocalKind.LOCATE: 1024,
    LocalKind.REMOVE: 2048,
    LocalKind.PREFETCH: 8192,
    LocalKind.LIST: 2000,
}
"""Items of one request that clients send."""


class Cuts:
    """The requests of one batch: iterate for the ranges of items, in order. `sizes` are the bytes of each item where
    they differ; None for digests and numbers, of which as many as are allowed always fit."""

    def __init__(self, kind: LocalKind, count: int, sizes: Sequence[int] | None = None) -> None:
        self._most = MAX_ITEMS[kind]
        self._count = count
        self._sizes = sizes
        self._start = 0

    def __iter__(self) -> Iterator[range]:
        while self._start < self._count:
            some = self._next()
            self._start = some.stop
            yield some

    def _next(self) -> range:
        start, stop = self._start, min(self._start + self._most, self._count)
        if self._sizes is None:
            return range(start, stop)
        total = 0
        for number in range(start, stop):
            total += self._sizes[number]
            if total > REQUEST_BYTES and number > start:
                return range(start, number)
        return range(start, stop)

    def ask_again(self, some: range, error: AnswerTooLarge) -> None:
        """The answer about these does not fit a frame: they come again, in smaller ranges. Raises the error when it is
        one item's."""
        if len(some) <= 1:
            raise error
        self._most = len(some) // 2
        self._start = some.start


def text_bytes(text: str) -> int:
    """Most bytes of a text in a request."""
    return 4 * len(text) + 5 if not text.isascii() else len(text) + 5
