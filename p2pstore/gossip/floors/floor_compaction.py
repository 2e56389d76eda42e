"""Floors that all living members have heard of are dropped when there are many. Pure.

They are dropped only up to where this peer agrees with every living member, and every living member says by its signed
record that it agrees with all of them, or has agreed in an answer. A member that confirms nothing for ten minutes while
floors are crowded is not waited for any longer, as if it were away; nor is one that answers and never agrees. What
crowds out compaction slows the writers down (`core.floors`); it never drops a floor early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_comparison import FloorComparison, ShownFloors
from p2pstore.gossip.records import Member
from p2pstore.objects import clock_from_unix_seconds
from p2pstore.runtime.stepping import Steps

HORIZON_SECONDS: Final = 20.0
"""How much longer a member may refuse to agree while its record shows another horizon than most do."""

HURRY_ABOVE: Final = 0.9
"""Above this share every peer compacts, not only the first of the living that are waited for."""

PATIENCE_SECONDS: Final = 300.0
"""Shortest time for which a living member that confirms nothing is waited for."""

SETTLED_PER_STEP: Final = 2_000
"""Members, at a microsecond each."""

SAVED_SLACK: Final = clock_from_unix_seconds(30.0)
"""Floors stay this long after all have confirmed them: a peer that is killed knows only what it had saved that it had
seen, every ten seconds, and would distrust its objects when it is back."""

FOLLOW_SLACK: Final = clock_from_unix_seconds(10.0)
"""The same of floors that others dropped: what they have confirmed was heard of here a little later."""

START_SECONDS: Final = 60.0
"""Nothing is dropped so soon after a start: members of before it may be about to come back."""

GONE_SLACK: Final = clock_from_unix_seconds(180.0)
"""Floors of members that are gone stay this much longer: news of them spreads by questions and answers only."""

LOST_AFTER: Final = clock_from_unix_seconds(3600.0)
"""Of a writer that is gone, older floors which no living member has heard of are given up: else what cannot be
confirmed would crowd out everything else."""


class FloorCompaction(FloorComparison):
    """Drops floors that all have confirmed, and says which members have not."""

    def __init__(
        self,
        me: Member,
        records: ClusterRecords,
        accepts_clock: Callable[[int, float], bool],
        wall_clock: Callable[[float], int],
    ) -> None:
        super().__init__(me, records, accepts_clock, wall_clock)
        self.waits_for: list[Member] = []
        """Members that have not confirmed crowded floors for a while: living ones; where most are gone, those."""
        self.passed_over: list[Member] = []
        """Those of them that are not waited for any longer ..."""
        self.disputed: list[Member] = []
        """... as they answer, and never agree."""
        self._late: list[Member] = []
        """Members that are not known to have lately agreed with all."""
        self._started_at = math.inf
        self._living = {me}
        self._settling: Steps[int] | None = None
        self._may_drop = 0
        """Up to where floors were known to all living members at some time of this life."""

    def _follow_members(self, members: Sequence[ShownFloors], now: float) -> None:
        """Compare and compact while floors are crowded; else wait for no member."""
        if not self.crowded:
            self._settling = None
            self.agreements.end_waiting()
            self.waits_for, self.passed_over, self.disputed, self._late = [], [], [], []
            return
        self._living = {shown.member for shown in members} | {self._me}
        self._compare(members, now)
        self._compact(members, now)

    def _settle_agreement(self, members: Sequence[ShownFloors], now: float) -> Steps[int]:
        """Up to where all members agree with this peer, and say that they agree with all. Some thousands a step."""
        patience = max(self._floors.kept_seconds, PATIENCE_SECONDS)
        mine, everybody = self._announced_end, self._announced_end
        agreements = self.agreements
        late = self._announced_end - clock_from_unix_seconds(patience / 20)
        waits_for: list[Member] = []
        passed_over: list[Member] = []
        disputing: list[Member] = []
        late_ones: list[Member] = []
        same = [shown.floors_horizon for shown in members].count(self._floors.horizon_hash)
        steady = 2 * (1 + same) > self.quorum.live_count
        for place, shown in enumerate(members, start=1):
            if place % SETTLED_PER_STEP == 0:
                yield
            member = shown.member
            agreed = agreements.with_me(member)
            with_all = agreements.with_all(member, shown.floors_seen)
            waited = agreements.waited(member, agreed, self._announced_end, now)
            if with_all < late:
                late_ones.append(member)
            slack = self._dispute_slack(shown, steady)
            disputed = agreements.in_dispute(member, len(self.records), slack)
            if disputed:
                disputing.append(member)
            if disputed or waited > patience:
                passed_over.append(member)
                continue
            if waited > patience / 20:
                waits_for.append(member)
            mine = min(mine, agreed)
            everybody = min(everybody, with_all)
        self.waits_for, self.passed_over = waits_for, passed_over
        self.disputed, self._late = disputing, late_ones
        for member in self.quorum.waited_for(now):
            agreed = agreements.with_me(member)
            if agreements.waited(member, agreed, self._announced_end, now) <= patience:
                came_at = self.quorum.came_at(member)  # older floors do not wait for it
                came = self._wall_clock(came_at) if came_at > -math.inf else 0
                mine = min(mine, max(agreed, came))
        self._agreed_by_all = mine
        confirming = self.quorum.live_count - len(self.passed_over)
        up_to = min(everybody, mine)
        # Where most confirm nothing, it is this peer that was passed over: it must not follow the others.
        if 2 * confirming > self.quorum.live_count and now >= self._started_at + START_SECONDS:
            self._may_drop = max(self._may_drop, up_to - FOLLOW_SLACK)
        if not self.quorum.may_compact(confirming):
            self.waits_for += self.quorum.missing(now)
            return 0
        return up_to - SAVED_SLACK

    def _dispute_slack(self, shown: ShownFloors, steady: bool) -> float:
        """How much longer than others the member may refuse to agree before it is in dispute. Members follow the
        horizon of most (`steady`) soon; where most show others, or this peer was away, that takes its time."""
        if self.quorum.apart:
            return math.inf
        if shown.floors_horizon == self._floors.horizon_hash:
            return 0.0
        return HORIZON_SECONDS if steady else math.inf

    def take_to_ask(self, now: float) -> list[Member]:
        """Members for which compaction has to wait, or would have to, and that are to be asked now."""
        return self.agreements.take_to_ask(self._late, self.quorum.live_count, now)

    def _compact(self, members: Sequence[ShownFloors], now: float) -> None:
        if self._settling is None:
            self._settling = self._settle_agreement(members, now)
        try:
            next(self._settling)
        except StopIteration as end:
            self._settling, up_to = None, end.value
        else:
            return  # the rest of very many members next time
        if now < self._started_at + START_SECONDS or up_to <= 0:
            return
        living = self._living
        first = min(living.difference(self.passed_over))
        if self._me != first and self._floors.crowding <= HURRY_ABOVE:
            return
        clock_now = self._wall_clock(now)
        confirmed = {
            writer: self.seen.get(writer, 0)
            if writer in living
            else max(min(self.seen.get(writer, 0), clock_now - GONE_SLACK), up_to - LOST_AFTER)
            for writer in self._floors.writers
        }
        self._floors.raise_horizon(self._floors.compaction(up_to, confirmed, clock_now))
