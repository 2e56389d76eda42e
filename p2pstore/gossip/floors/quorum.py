"""How many of the members this peer is in touch with, and whether others may have compacted without it. Pure.

A compaction drops floors that a peer without them would have needed: so members of a split must not compact without
each other, nor may a peer believe that they did when they cannot have. Both follow from one count. Of a split, one
side only has more than half of the members; a side with less than half keeps its floors (`may_compact`), one with
exactly half waits longer for the others. So a peer that was always with more than half of the members has missed no
compaction, whatever others say; only a peer that was not for longer than the others wait is *apart* and has to take
over what they dropped.

Members that are gone count as well, as they may live on the other side: each for four times as long as it had lived
here, an hour at most. So processes that come and die all the time do not add up. Members that said that they leave do
not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.records import Member

GONE_SECONDS: Final = 60.0
"""How long a member that died is waited for: until all have heard of it, some may count it among the living."""
TIE_SECONDS: Final = 300.0
"""The same where exactly half of the members are gone."""
LATELY_SECONDS: Final = 3600.0
"""A member that is gone counts for no longer than this ..."""
LIVED_FACTOR: Final = 4.0
"""... nor longer than this many times as long as it had lived here."""
MARGIN_SECONDS: Final = 20.0
"""How much earlier others may begin to wait for this peer than it finds out: its clock is saved every 10 s."""
SETTLE_SECONDS: Final = 60.0
"""After members came, those that have not yet come count for this long: a peer must not judge by the first it meets."""
FIRST_SECONDS: Final = 5.0
"""The same for a peer that never knew any."""
STALL_SECONDS: Final = 5.0
"""A process that was not asked for longer stood still, alone."""


@dataclass(frozen=True, slots=True)
class Showing:
    """How many members' signed records show a horizon, how many of these do not say that they are apart, and how many
    members do say so, whatever they show."""

    showing: int
    steady: int
    apart: int


class Quorum:
    """Whether this peer is in touch with more than half of the members that count. Times `now` are monotonic; `wall` is
    the wall clock, which also goes on while the machine sleeps."""

    def __init__(self) -> None:
        self.live_count = 1
        """Members that live, with this peer."""
        self.apart = True
        """Whether others may have compacted without this peer, until it has what they have."""
        self.fresh = True
        """Whether this peer was never in touch with another one, in this life or before."""
        self._lately = 0
        self._came: dict[Member, float] = {}
        self._gone_at: dict[Member, float] = {}
        self._left: set[Member] = set()
        self._first_came = self._last_came = self._counted_at = -math.inf
        self._apart_at = -math.inf
        self._last_majority_wall: float | None = None
        self._tracked: float | None = None
        self._minority = False
        self._without_majority_since = math.inf
        """When this peer was last seen to be without more than half, if it was the last time."""
        self._outlived = False
        """Whether this peer was without a majority until the missing members stopped counting, and no member came
        since. The missing may live on, and may have dropped floors."""

    def start(self, known: Iterable[Member], alive: float, now: float) -> None:
        """This peer was last alive at the wall-clock time `alive` (0 when it never was), with these members."""
        for member in known:
            if member not in self._came:
                self._came[member], self._gone_at[member] = -math.inf, now
        self._count(now)
        if alive:
            self._last_majority_wall, self.apart, self.fresh = alive, False, False
            self._minority = len(self._gone_at) > 1

    def member_joined(self, member: Member, now: float) -> None:
        if self._gone_at.pop(member, None) is None or member in self._left:
            self._came[member] = now
        self._left.discard(member)
        self._last_came = now
        self._outlived = False
        if self.live_count == 1:
            self._first_came = now

    def member_gone(self, member: Member, now: float, *, left: bool) -> None:
        """A member is gone. `left`: it said so itself."""
        self._gone_at[member] = now
        if left:
            self._left.add(member)

    def expelled(self, member: Member) -> None:
        """A member does not count any more."""
        self._gone_at.pop(member, None)
        self._came.pop(member, None)
        self._left.discard(member)

    def knows(self, member: Member) -> bool:
        return member in self._came

    def came_at(self, member: Member) -> float:
        """When a member that is known came first."""
        return self._came.get(member, -math.inf)

    def forget(self, now: float) -> list[Member]:
        """Those that are neither waited for nor counted any more."""
        counted = set(self.missing(now))
        over = [
            member
            for member, gone_at in self._gone_at.items()
            if now > gone_at + TIE_SECONDS and member not in counted
        ]
        for member in over:
            self.expelled(member)
        if over:  # a dictionary that was large once stays so: a smaller one takes its place
            self._gone_at, self._came = dict(self._gone_at), dict(self._came)
        return over

    def track(self, now: float, wall: float, living: int, same: int) -> None:
        """Of `living` members beside this peer, `same` show its horizon. Call it a few times a second.

        1. A minority, or a process that stalled: this peer is apart once it had no majority for `GONE_SECONDS`.
        2. Half of the members: the same after `TIE_SECONDS`.
        3. A majority, with the same horizon at more than half: it is not apart any more, `SETTLE_SECONDS` after the
           last member came.
        """
        self.live_count = 1 + living
        if now >= self._counted_at + 1.0:
            self._count(now)
        total = self.live_count + self._lately
        stalled = self._tracked is not None and wall > self._tracked + STALL_SECONDS
        self._tracked = wall
        if self._last_majority_wall is None:
            self._last_majority_wall = wall
        self._minority |= 2 * self.live_count < total or (stalled and total > 2)
        limit = GONE_SECONDS if self._minority else TIE_SECONDS
        if wall > self._last_majority_wall + limit - MARGIN_SECONDS:
            self.apart, self._apart_at = True, now
        if 2 * self.live_count <= total:
            self._without_majority_since = now
        else:
            self._outlived |= self._last_came < self._without_majority_since < math.inf
            self._last_majority_wall, self._minority = wall, False
            self._without_majority_since = math.inf
            settled = now > max(self._last_came, self._apart_at) + SETTLE_SECONDS
            settled &= not self._outlived
            if settled and self.live_count > 1 and 2 * (1 + same) > self.live_count:
                self.apart = self.fresh = False

    def alone(self) -> None:
        """There is no other member, and never was."""
        self.apart = False

    def _count(self, now: float) -> None:
        self._counted_at = now
        self._lately = len(self.missing(now))

    def missing(self, now: float) -> list[Member]:
        """Members that are gone and still count."""
        came, left = self._came, self._left
        return [
            member
            for member, gone_at in self._gone_at.items()
            if now - gone_at < LATELY_SECONDS
            and now - gone_at < LIVED_FACTOR * (gone_at - came.get(member, gone_at))
            and member not in left
        ]

    def waited_for(self, now: float) -> list[Member]:
        """Members that are gone and without which no peer compacts yet."""
        tie = 2 * self.live_count <= self.live_count + self._lately
        late, late_left = now - (TIE_SECONDS if tie else GONE_SECONDS), now - GONE_SECONDS
        left = self._left
        return [
            member
            for member, gone_at in self._gone_at.items()
            if gone_at >= (late_left if member in left else late)
        ]

    def may_compact(self, confirming: int) -> bool:
        """Whether this number of members, this peer among them, is enough to drop floors that all of them have."""
        return 2 * confirming >= self.live_count + self._lately

    def believes(self, others: Showing, now: float, *, costs: bool) -> bool:
        """Whether to take over a horizon that these members show: half of all, or more than half of those that are not
        apart, as most may have been away at once. Where it `costs` copies although this peer cannot have missed a
        compaction, more than half of all must have gone on without it."""
        if now < self._first_came + FIRST_SECONDS:
            return False
        total = self.live_count
        if now < self._last_came + SETTLE_SECONDS:
            total += self._lately
        if costs and not self.apart:
            return 2 * others.showing > total
        return 2 * others.showing >= total or 2 * others.steady > total - others.apart
