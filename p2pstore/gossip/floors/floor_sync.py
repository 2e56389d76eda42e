"""Has this peer heard of every floor? What a peer that was away, or cut off, must find out. Pure.

*Seen* (see `floor_stamps`) is established by comparing epochs. Every few seconds a peer asks another for
its view of the last settled epoch. When their hashes of that epoch agree, whatever the other has seen up
to the epoch's end, this peer has seen as well: the answer names it, writer by writer. The other's own
floors are complete by nature, and it promises to make no more below that end.

With every answer comes the other's *horizon*: floors up to there it has dropped. A floor below the
horizon that this peer had not seen may have forbidden one of its copies, and nobody can tell any more.
So copies that are not newer than the newest such floor can be are to be discarded (`take_distrusted`),
and then the horizon becomes this peer's own. A cluster that is in touch drops only floors that all have
seen, so nothing is discarded there.

A member that has just come (back) and whose record does not show the same horizon may still hold such
copies: until it does, this peer does not believe its locations of such versions (`doubted_up_to`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_stamps import (
    Stamps,
    lower_stamps,
    newest_unseen,
    raise_stamps,
    without_older,
)
from p2pstore.gossip.locations.log import newest_clock
from p2pstore.gossip.records import Member
from p2pstore.objects import MAX_CLOCK_SKEW_SECONDS, clock_from_unix_seconds

COMPARE_SECONDS: Final = 5.0
COMPARE_SOON_SECONDS: Final = 0.5
"""Shortest time between two comparisons when another horizon was seen."""
CATCH_UP_SECONDS: Final = 60.0
"""How long a member that was here all the time may take to follow a horizon."""
LONGEST_ABSENCE: Final = clock_from_unix_seconds(30 * 86_400.0)
"""A peer that was away for longer than 30 days is trusted with nothing it kept: older stamps are
forgotten."""


@dataclass(frozen=True, slots=True)
class FloorAnswer:
    """What a peer says when it is asked. `epoch_end` is 0 when the epochs did not agree, and then `seen`
    is empty."""

    epoch_end: int = 0
    seen: Stamps = field(default_factory=dict)
    horizon: Stamps = field(default_factory=dict)


class FloorSync:
    """See the module's docstring. `wall_clock(now)` is the hybrid clock's reading of the wall clock."""

    def __init__(
        self,
        me: Member,
        records: ClusterRecords,
        accepts_clock: Callable[[int, float], bool],
        wall_clock: Callable[[float], int],
    ) -> None:
        self.records = records
        self.seen: Stamps = {}
        self.synchronised = False
        """Whether this peer has, since its start, heard of all floors that were made while it was away: it
        once had the same ones as a live neighbour, or there is nobody else."""
        self.newest_heard = 0
        """The highest clock of any version of which a location was heard of."""
        self._me = me
        self._started_clock: int | None = None
        self._accepts_clock = accepts_clock
        self._wall_clock = wall_clock
        self._distrusted = 0
        self._compared_at = -math.inf
        self._compared_soon_at = -math.inf
        self._horizon_hash = 0
        self._horizon_since = -math.inf
        self._unproven: set[Member] = set()

    def load(self, seen: Mapping[Member, int]) -> None:
        """What was seen in an earlier life, from the state directory; the records were loaded before."""
        self.seen = dict(seen)
        self._distrusted = newest_unseen(self.records.horizon, self.seen)

    def clock_was_fast(self, limit: int, by: int) -> None:
        """The wall clock was fast by `by` and is right again: stamps above `limit` say of a time to come what was
        meant of another one."""
        self.records.lower_horizon(limit, by)
        self.seen = lower_stamps(self.seen, limit, by)
        if self.newest_heard > limit:
            self.newest_heard = max(0, self.newest_heard - by)
        self._started_clock = None

    # --- comparing ---------------------------------------------------------------------------

    def question(self, now: float, *, at_once: bool = False, soon: bool = False) -> tuple[int, int]:
        """The end of an epoch and its hash here, to ask another peer about; (0, 0) when it is not time to
        ask. `soon`: that peer's record shows another horizon."""
        if at_once or now >= self._compared_at + COMPARE_SECONDS:
            self._compared_at = self._compared_soon_at = now
        elif (soon or not self.synchronised) and (
            now >= self._compared_soon_at + COMPARE_SOON_SECONDS
        ):
            self._compared_soon_at = now
        else:
            return 0, 0
        end, epoch_hash = self.records.settled_epoch(self._wall_clock(now))
        # Accepted, the end raises this peer's clock: no floor that it makes from now on is below.
        return (end, epoch_hash) if end and self._accepts_clock(end, now) else (0, 0)

    def answer(self, epoch_end: int, epoch_hash: int, now: float) -> FloorAnswer:
        """Answer another peer's question."""
        if not epoch_end:
            return FloorAnswer()
        horizon = self.records.horizon
        agrees = self.records.agrees(epoch_end, epoch_hash)
        if not agrees or not self._accepts_clock(
            epoch_end, now
        ):  # which raises the clock, as above
            return FloorAnswer(horizon=horizon)
        if self.synchronised:
            raise_stamps(self.seen, {self._me: epoch_end})
        return FloorAnswer(
            epoch_end,
            {member: min(epoch_end, stamp) for member, stamp in self.seen.items()},
            horizon,
        )

    def learn(self, answer: FloorAnswer, asked_end: int, now: float, *, same_now: bool) -> None:
        """Take in an answer to a question about `asked_end`. `same_now`: the present sets are equal, too.

        The horizon comes first: what this peer must distrust depends on what it had seen before.
        """
        oldest = self._oldest(now)
        horizon = without_older(answer.horizon, oldest)
        if horizon and not self._accepts_clock(max(horizon.values()), now):
            return  # one of the two clocks is wrong: nothing that is said of time can be believed
        self.records.raise_horizon(horizon)
        self._follow(horizon)
        self._note_horizon(now)
        agreed = asked_end > 0 and answer.epoch_end == asked_end
        if (asked_end and same_now) or (agreed and asked_end >= (self._started_clock or 0)):
            self.synchronised = True
        if not agreed:
            return
        seen = without_older(answer.seen, oldest)
        raise_stamps(self.seen, {member: min(asked_end, stamp) for member, stamp in seen.items()})
        raise_stamps(self.seen, {self._me: asked_end})

    # --- time --------------------------------------------------------------------------------

    def housekeep(self, now: float, *, alone: bool, shown: Callable[[Member], int]) -> None:
        """Do what is due a few times a second. `alone`: there is nobody else, nor anybody to wait for.
        `shown(member)` is the horizon's hash in a member's record."""
        clock_now = self._wall_clock(now)
        if self._started_clock is None:
            self._started_clock = clock_now
        self.records.roll_epochs(clock_now)
        if alone:
            self.synchronised = True
            end, _ = self.records.settled_epoch(clock_now)
            raise_stamps(self.seen, {self._me: end})
        before = self.records.horizon_hash
        self.records.compact(self.seen, clock_now)
        if self.records.horizon_hash != before:
            self._follow(self.records.horizon)
        self.records.purge()
        oldest = self._oldest(now)
        self.records.forget_horizon(oldest)
        if min(self.seen.values(), default=oldest + 1) <= oldest:
            self.seen = without_older(self.seen, oldest)
        self._note_horizon(now)
        self._unproven = {m for m in self._unproven if shown(m) != self._horizon_hash}

    def heard_of(self, operations: bytes | bytearray | memoryview, now: float) -> None:
        """Locations were heard of, in packed records. Those from a clock that is too far ahead do not
        count: nothing can be written above them that others would take."""
        limit = self._wall_clock(now) + clock_from_unix_seconds(MAX_CLOCK_SKEW_SECONDS)
        self.newest_heard = max(self.newest_heard, newest_clock(operations, limit))

    # --- what follows ------------------------------------------------------------------------

    def take_distrusted(self) -> int:
        """Copies of this peer's whose versions' clocks are not above this may have been removed without
        its hearing of it; 0 when there is nothing to distrust since the last call."""
        distrusted, self._distrusted = self._distrusted, 0
        return distrusted

    def came(self, member: Member) -> None:
        """A member has just come, or come back."""
        self._unproven.add(member)

    def went(self, member: Member) -> None:
        """A member is gone."""
        self._unproven.discard(member)

    def doubted_up_to(self, member: Member, shown: int | None, now: float) -> int:
        """The member's copies of versions up to this clock may have been removed while it was away; -1 when
        all of them are believed. `shown` is the horizon's hash in its record, None without one."""
        if shown == self.records.horizon_hash:
            return -1
        late = member in self._unproven or now > self._horizon_since + CATCH_UP_SECONDS
        return self.records.compacted_before if late else -1

    def was_away_too_long(self, last_clock: int, now: float) -> bool:
        """Whether a peer whose clock last stood at `last_clock` may have missed floors whose stamps are
        forgotten."""
        return last_clock <= self._oldest(now)

    def _follow(self, horizon: Mapping[Member, int]) -> None:
        """Distrust what floors may have forbidden that were dropped before they were seen here. After that
        nothing is to be feared of them: they count as seen, or the same copies would go again and again."""
        self._distrusted = max(self._distrusted, newest_unseen(horizon, self.seen))
        raise_stamps(self.seen, horizon)

    def _note_horizon(self, now: float) -> None:
        if self._horizon_hash != self.records.horizon_hash:
            self._horizon_hash, self._horizon_since = self.records.horizon_hash, now

    def _oldest(self, now: float) -> int:
        return max(0, self._wall_clock(now) - LONGEST_ABSENCE)
