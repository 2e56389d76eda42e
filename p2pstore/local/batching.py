"""How batches are cut into requests on the local socket: the one place that decides it. Pure.

A request is bounded twice: by its items, so that the peer's event loop answers it in a few milliseconds, and by its
bytes, so that it fits a frame whatever the keys' lengths. An answer is as long as it is; the peer refuses to send one
that fits no frame (`AnswerTooLarge`), and the client asks for fewer items at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from p2pstore.errors import AnswerTooLarge
from p2pstore.local.local_messages import LocalKind
from p2pstore.wire import LOCAL_LIMITS

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
