"""Progress as a rate: whether the bytes of one exchange move fast enough, and what other holders would bring. Pure.

A flow may lag behind its least rate by some seconds (`patience_seconds`), at any moment. Each byte pays for waiting
time at the least rate: single bytes now and then pay for nothing, and a fast beginning is no credit for later.

1. Other holders have what is read: the least rate is half of what the best of them is expected to bring, within
   limits, and the patience is short. A reader loses little when it goes on there.
2. There is no other way: the least rate is `MIN_RATE`, so that a slow link can deliver. 4 GiB end within 73 hours.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from p2pstore.errors import DeadlineExceeded
from p2pstore.objects import KIB, MIB, format_bytes, put_newest

MIN_RATE: Final = 16 * KIB
"""Bytes a second; several readers that share a link of 100 KB/s stay above it."""
ASSUMED_RATE: Final = 10 * MIB
"""Bytes a second that a holder is expected to bring which was not measured."""
PATIENCE: Final = 2.0
"""A holder is left when another one is expected to be this many times faster."""
MAX_LEAST_RATE: Final = 10 * MIB
"""A holder of at least this rate is never left for its rate, however fast others were: many readers may share the
reader's own link. Below 64 MiB an object is there within 7 s then; the readers of larger ones compare each other
(`transfer.reading.span_reads`)."""
ANSWER_SHARE: Final = 0.2
"""Share of the patience that each answer's beginning gives back: round trips of a slow path."""
STALL: Final = 1.25
"""A stream ends a wait that is longer than the patience. A wait this many times as long was a stall of this process."""

MEASURED_BYTES: Final = 256 * KIB
"""From here on an exchange tells a rate; less tells round trips."""
MEASURED_SECONDS: Final = 0.5
"""An exchange of at least this time tells a rate whatever it brought."""
REMEMBERED_SECONDS: Final = 60.0
MIN_SOON_SECONDS: Final = 0.2
"""Shortest wait for the beginning of an answer: a lost packet is repeated within that."""
TIMES_USUAL: Final = 4.0
FORGOTTEN: Final = 0.1
"""Share of a holder's longest wait that the next answer makes up for."""
SHARE_OF_NEWEST: Final = 0.5
MAX_HOLDERS: Final = 1024


class HolderLimits(NamedTuple):
    """Limits of one holder in a read: seconds to each answer, and the minimum rate. Tight where others have the
    object."""

    answer_seconds: float = math.inf
    """For each wait for bytes, no longer than the connection's own limit. Finite where others have the object."""
    least_rate: float = MIN_RATE
    """Bytes a second."""
    begin_seconds: float = math.inf
    """For the first answer to begin, where another holder is asked next."""


NO_LIMITS: Final = HolderLimits()


class Outrun(DeadlineExceeded):
    """Bytes came, but another holder is expected to bring them sooner."""


class Flow:
    """The bytes of one exchange, as one side receives or sends them."""

    __slots__ = (
        "_lag_seconds",
        "answer_seconds",
        "least_rate",
        "moved_bytes",
        "patience_seconds",
        "waited_seconds",
    )

    def __init__(self, patience_seconds: float = math.inf) -> None:
        self.begin(patience_seconds)

    def begin(self, patience_seconds: float, least_rate: float = MIN_RATE) -> None:
        """Another exchange begins."""
        self.patience_seconds = patience_seconds
        self.least_rate = least_rate
        self._lag_seconds = self.waited_seconds = self.answer_seconds = 0.0
        self.moved_bytes = 0

    def answered(self) -> None:
        """An answer begins, with the bytes that were counted last."""
        self.answer_seconds = self.answer_seconds or self.waited_seconds
        if self.least_rate == MIN_RATE:
            self._lag_seconds = 0.0
        else:
            self._lag_seconds = max(0.0, self._lag_seconds - ANSWER_SHARE * self.patience_seconds)

    def moved(self, count: int, seconds: float) -> bool:
        """`count` bytes moved, after a wait of `seconds`. Whether the flow is still fast enough."""
        if seconds > STALL * self.patience_seconds:
            seconds = 0.0
        self.moved_bytes += count
        self.waited_seconds += seconds
        lag = self._lag_seconds + seconds - count / self.least_rate
        self._lag_seconds = lag if lag > 0.0 else 0.0
        return lag <= self.patience_seconds

    def too_slow(self) -> DeadlineExceeded:
        """The error of a flow that is not fast enough: `Outrun` when it would do where there is no other way."""
        moved = format_bytes(self.moved_bytes)
        text = f"only {moved} moved within {self.waited_seconds:.3g} s of waiting"
        is_least = self.least_rate == MIN_RATE
        if is_least or self.moved_bytes < MIN_RATE * self.waited_seconds:
            return DeadlineExceeded(f"the connection made next to no progress: {text}")
        return Outrun(f"{text}: another holder is expected to be faster")


class HolderRates:
    """Recent rates of holders, in bytes a second, and how soon they begin to answer, by peer id."""

    def __init__(self) -> None:
        self._rates: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """The rate, and when it was measured last."""
        self._answers: dict[bytes, float] = {}

    def answered(self, peer_id: bytes, flow: Flow) -> None:
        """The first answer of an exchange began, or was waited for in vain. A long wait is forgotten slowly."""
        if not (seconds := flow.answer_seconds):
            return
        usual = self._answers.pop(peer_id, 0.0)
        self._answers[peer_id] = max(seconds, usual + FORGOTTEN * (seconds - usual))
        while len(self._answers) > MAX_HOLDERS:
            del self._answers[next(iter(self._answers))]

    def begin_seconds(self, peer_id: bytes) -> float:
        """How long this holder may take to begin with an answer where others have the same; longer each time that it
        does not begin."""
        usual = self._answers.get(peer_id, math.inf)
        return max(MIN_SOON_SECONDS, TIMES_USUAL * usual)

    def measured(self, peer_id: bytes, flow: Flow, now: float) -> None:
        """An exchange with this holder is over."""
        seconds = flow.waited_seconds
        if flow.moved_bytes < MEASURED_BYTES and seconds < MEASURED_SECONDS:
            return
        rate = flow.moved_bytes / max(seconds, 1e-6)
        before, at = self._rates.get(peer_id, (rate, now))
        if now - at < REMEMBERED_SECONDS:
            rate = SHARE_OF_NEWEST * rate + (1 - SHARE_OF_NEWEST) * before
        put_newest(self._rates, peer_id, (rate, now), MAX_HOLDERS)

    def expected(self, peer_id: bytes, now: float) -> float:
        rate, at = self._rates.get(peer_id, (ASSUMED_RATE, now))
        return rate if now - at < REMEMBERED_SECONDS else ASSUMED_RATE

    def least(self, others: Sequence[bytes], now: float, readers: int = 1) -> float:
        """The least rate of a holder where these others have the same, for one of `readers` of one object."""
        best = max((self.expected(each, now) for each in others), default=0.0)
        return max(MIN_RATE, min(best / PATIENCE, MAX_LEAST_RATE) / readers)


def is_outrun(left_seconds: float, seconds_instead: float) -> bool:
    """Whether to leave a reader that needs `left_seconds` for the rest, when another one needs `seconds_instead`."""
    return left_seconds > PATIENCE * seconds_instead
