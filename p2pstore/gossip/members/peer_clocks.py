"""Clocks of other members, compared with this peer's wall clock. Pure.

A member's reading is kept as the difference between its wall clock and this peer's monotonic clock. So a wall clock
that is set here shows at once, in all comparisons, and no member has to be asked again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from p2pstore.gossip.members.member_table import MemberTable
from p2pstore.gossip.records import PeerId
from p2pstore.objects import (
    MAX_CLOCK_SKEW_SECONDS,
    newest_accepted_clock,
    put_newest,
    unix_seconds_from_clock,
)

MAX_READINGS: Final = 64
"""Members whose readings are kept, those heard last: with one probe a second, those of the last minute."""
KEPT_SECONDS: Final = 120.0
TRANSIT_SECONDS: Final = 5.0
"""Longest time that a request is taken to have been under way."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A member's wall clock less this peer's monotonic clock lies between these two, in seconds."""

    low: float
    high: float
    at: float

    def ahead(self, offset: float) -> float:
        """How far this peer's wall clock, at `offset` from its monotonic one, is ahead of the member's at least;
        negative where it is behind, 0 where the reading does not tell."""
        if offset > self.high:
            return offset - self.high
        return min(0.0, offset - self.low)


@dataclass(frozen=True, slots=True)
class ClockView:
    """How this peer's wall clock stands among those of the living members. `middle`: how far it is ahead of theirs, by
    the median; None without a reading. Stamps that are up to `lead` ahead of this peer's wall clock are taken by more
    than half of all (this peer is one of them); negative where even those of the present are not. `is_behind`: more
    than half of all are so far ahead that this peer refuses what they write; `may_be_behind`: just half of them."""

    middle: float | None
    lead: float
    is_behind: bool
    may_be_behind: bool


class PeerClocks:
    """The latest reading of each member. Times are monotonic seconds, `unix_ms` its wall clock (0: it does not say)."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with every reading."""
        self._readings: OrderedDict[PeerId, Reading] = OrderedDict()

    def answered(self, peer_id: PeerId, unix_ms: int, asked_at: float, now: float) -> None:
        """A member's answer says what time it was between `asked_at` and `now`."""
        if unix_ms > 0:
            unix = unix_ms / 1000
            self._keep(peer_id, Reading(unix - now, unix - asked_at, now))

    def asked(self, peer_id: PeerId, unix_ms: int, now: float) -> None:
        """A member's request says what time it was when it left. That counts until the member has answered anything:
        it is not known how long the request was under way."""
        known = self._readings.get(peer_id)
        if unix_ms > 0 and (known is None or known.at + KEPT_SECONDS < now):
            unix = unix_ms / 1000
            self._keep(peer_id, Reading(unix - now, unix - now + TRANSIT_SECONDS, now))

    def _keep(self, peer_id: PeerId, reading: Reading) -> None:
        self.version += 1
        put_newest(self._readings, peer_id, reading, MAX_READINGS)

    def ahead_of(self, peer_id: PeerId, offset: float) -> float | None:
        """How far this peer's wall clock is ahead of a member's at least; None without a reading."""
        reading = self._readings.get(peer_id)
        return None if reading is None else reading.ahead(offset)

    def known(self, is_live: Callable[[PeerId], bool], now: float) -> list[PeerId]:
        """The living members with a reading of the last two minutes."""
        return [
            peer_id
            for peer_id, reading in self._readings.items()
            if reading.at + KEPT_SECONDS >= now and is_live(peer_id)
        ]

    def view(self, peer_ids: Iterable[PeerId], offset: float, *, alone: bool) -> ClockView:
        """How this peer's clock stands among those of these members. `alone`: there is no other member."""
        readings = [self._readings[peer_id] for peer_id in peer_ids]
        middle = median(offset - (each.low + each.high) / 2 for each in readings) if readings else None
        return judge([each.ahead(offset) for each in readings], middle, alone=alone)


def judge(aheads: Iterable[float], middle: float | None, *, alone: bool) -> ClockView:
    """The conclusion from how far this clock is ahead of others'. Where half say one thing and half another, neither is
    known to be right: those ahead may not write, as others would refuse it; those behind may, as far as they know of
    nothing that they had to refuse."""
    ordered = sorted(aheads, reverse=True)
    count = len(ordered) + 1
    behind = sum(ahead < -MAX_CLOCK_SKEW_SECONDS for ahead in ordered)
    lead = MAX_CLOCK_SKEW_SECONDS
    if alone:
        lead = math.inf
    elif ordered:
        # Among the members that this clock is most ahead of, the one whose refusal makes it half of all.
        lead -= max(0.0, ordered[(count + 1) // 2 - 1])
    return ClockView(middle, lead, 2 * behind > count, 2 * behind == count)


class ClusterTime:
    """This peer's wall clock among those of the living members. `wall_clock(now)` is the hybrid clock's reading of the
    wall clock at the monotonic time `now`."""

    def __init__(self, wall_clock: Callable[[float], int], members: MemberTable) -> None:
        self.clocks = PeerClocks()
        self.compared: list[PeerId] = []
        """Members whose clocks the last `view` is about."""
        self._wall_clock = wall_clock
        self._members = members
        self._view = ClockView(None, math.inf, False, False)
        self._key: tuple[int, int, float, int] | None = None

    def unix(self, now: float) -> float:
        return unix_seconds_from_clock(self._wall_clock(now))

    def unix_ms(self, now: float) -> int:
        return round(1000 * self.unix(now))

    def view(self, now: float) -> ClockView:
        offset = self.unix(now) - now
        # Readings grow old by the second.
        key = (self._members.version, self.clocks.version, round(offset, 1), int(now))
        if key != self._key:
            alone = not self._members.others()
            self.compared = self.clocks.known(self._members.is_live, now)
            self._view = self.clocks.view(self.compared, offset, alone=alone)
            self._key = key
        return self._view

    def believed_unix(self, now: float) -> float:
        """The wall-clock time by which stamps of others are judged: this peer's, or the others' where more than half of
        all are ahead of it. So this peer hears of their writes, while it may write nothing itself."""
        view = self.view(now)
        return self.unix(now) - (view.middle or 0.0) if view.is_behind else self.unix(now)

    def newest_accepted(self, now: float) -> int:
        """The highest stamp that this peer takes in."""
        return newest_accepted_clock(self.believed_unix(now))
