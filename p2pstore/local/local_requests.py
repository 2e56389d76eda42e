"""Requests on their way to the local peer: who waits for which reply. No I/O of its own.

`LocalConnection` sends and receives; here is what it remembers of each request, and the handle that is given to
who wants the reply later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from p2pstore.errors import AnswerTooLarge, ProtocolError
from p2pstore.local.local_protocol import LocalKind
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Event
from p2pstore.wire import (
    ERROR,
    LOCAL_LIMITS,
    REPLY,
    Code,
    Failure,
    FrameHeader,
    Message,
    decode_body,
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


class Asking(Protocol):
    """What a request that was sent needs of its connection."""

    async def request(
        self,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        *,
        progress_seconds: float = DEFAULT_PROGRESS_SECONDS,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> M: ...

    async def reply_to(
        self, waiter: Waiter, progress_seconds: float, on_late_frame: LateFrame | None
    ) -> Frame: ...

    def give_up(self, waiter: Waiter, on_late_frame: LateFrame | None = None) -> None: ...


class RequestAhead(Generic[M]):
    """A request that was sent; its reply is still to be received, or to be given up."""

    def __init__(
        self,
        connection: Asking,
        waiter: Waiter,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        progress_seconds: float,
        on_late_reply: Callable[[M], None] | None,
    ) -> None:
        self._connection = connection
        self._waiter = waiter
        self._kind = kind
        self._message = message
        self._reply_type = reply_type
        self._progress_seconds = progress_seconds
        self._on_late_reply = on_late_reply
        self._on_late_frame = late_frame(on_late_reply, kind, reply_type)
        self._is_open = True

    async def receive(self) -> M:
        """Wait for the reply, once. Raises as `LocalConnection.request`, which asks again where the peer was
        too busy."""
        self._is_open = False
        frame = await self._connection.reply_to(
            self._waiter, self._progress_seconds, self._on_late_frame
        )
        if frame[0].flags & ERROR and decode_body(Failure, frame[1]).code == Code.BUSY:
            return await self._connection.request(
                self._kind,
                self._message,
                self._reply_type,
                progress_seconds=self._progress_seconds,
                on_late_reply=self._on_late_reply,
            )
        return reply_in(frame, self._kind, self._reply_type)

    def abandon(self) -> None:
        """Nobody wants the reply. Does nothing after `receive`."""
        if self._is_open:
            self._is_open = False
            self._connection.give_up(self._waiter, self._on_late_frame)


def late_frame(
    on_late_reply: Callable[[M], None] | None, kind: LocalKind, reply_type: type[M]
) -> LateFrame | None:
    """What takes a frame that comes after its request was given up."""
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
    if header.kind != kind or not header.flags & REPLY:
        raise ProtocolError(
            f"the local peer answered {kind.name} with a frame of kind {header.kind}"
        )
    return decode_body(reply_type, body)


MAX_REPORTED_FAILURES: Final = 1024
"""Holders that failed, of one report: each may cost the peer a look at its own copy."""
REQUEST_BYTES: Final = LOCAL_LIMITS.body_bytes // 2
"""Of the items of one request. The other half of a frame is for the fields around them."""
MOST_ITEMS: Final[dict[LocalKind, int]] = {
    LocalKind.RESERVE: 128,  # two windows of puts
    LocalKind.COMMIT: 64,
    LocalKind.ABORT: 4096,
    LocalKind.LEASE: 256,  # a millisecond of the peer's event loop
    LocalKind.RELEASE: 4096,
    LocalKind.PLAN: 1024,
    LocalKind.CONTAINS: 4096,
    LocalKind.MATCH_PREFIX: 4096,
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
        self._most = MOST_ITEMS[kind]
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
    """What a text takes in a request, at most."""
    return 4 * len(text) + 5 if not text.isascii() else len(text) + 5
