"""Has this peer heard of every floor, and which horizons of others does it take over? Pure.

`floor_comparison` says how *seen* is established, `floor_compaction` when floors are dropped here. With every answer
comes the other's *horizon*: floors up to there it has dropped. An answer is not signed, and is taken over in two cases:

1. This peer might drop the same floors itself: it agreed up to there with all living members, by their signed records.
   It had those floors, so nothing follows for its copies.
2. At least half of the members show that horizon's hash in their signed records (`quorum` says when more must); or
   this peer has seen all of it, floors are crowded, and it was the same for a minute. A floor that this peer had not
   seen may have forbidden one of its copies, and cannot be known any more: so a peer that was away discards copies that
   are not newer than the newest such floor can be (`take_distrusted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_compaction import (
    FOLLOW_SLACK,
    GONE_SLACK,
    LOST_AFTER,
    SAVED_SLACK,
    FloorCompaction,
)
from p2pstore.gossip.floors.floor_comparison import APART_BIT, FloorAnswer, ShownFloors
from p2pstore.gossip.floors.floor_set import FloorSet
from p2pstore.gossip.floors.floor_stamps import (
    Stamps,
    hash_stamps,
    lower_stamps,
    newest_unseen,
    raise_stamps,
    without_older,
)
from p2pstore.gossip.floors.quorum import Showing
from p2pstore.gossip.records import Member
from p2pstore.objects import unix_seconds_from_clock

MAX_OFFERS: Final = 4
"""Members whose horizon may be considered at a time: a table has up to 16,384 entries."""
DISBELIEVED_SECONDS: Final = 20.0
"""A horizon that is not taken over within this time is reported."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A horizon that a member told and that is not taken over yet: the hash of all of it, what of it is news, the
    highest stamp that was not seen, since when it is the same, and since when the member has told any."""

    hash: int
    stamps: Stamps
    unseen: int
    same_since: float
    since: float


class FloorSync(FloorCompaction):
    """Learns from answers and from the horizons of others."""

    def __init__(
        self,
        me: Member,
        records: ClusterRecords,
        accepts_clock: Callable[[int, float], bool],
        wall_clock: Callable[[float], int],
    ) -> None:
        super().__init__(me, records, accepts_clock, wall_clock)
        self.has_older_copies = False
        """Whether this peer began with copies of an earlier life."""
        self.distrusted_by: list[Member] = []
        """Members that showed the horizon for which `take_distrusted` last said to distrust copies."""
        self.doubts = DoubtedMembers(self._floors)
        self._distrusted = 0
        self._alive_clock = 0
        self._forgot_at = -math.inf
        self._offers: dict[Member, _Offer] = {}
        """By the member that told it, the oldest first."""

    def load(self, seen: Mapping[Member, int], alive_clock: int = 0) -> None:
        """Load the stamps seen in an earlier life, which ended after `alive_clock`. The records were loaded before."""
        self.seen, self._alive_clock = dict(seen), alive_clock
        self._distrusted = newest_unseen(self._floors.horizon, self.seen)

    def clock_was_fast(self, limit: int, by: int) -> None:
        """The wall clock was fast by `by` and is right again: stamps above `limit` are too high by that."""
        self._floors.lower_horizon(limit, by)
        self.seen = lower_stamps(self.seen, limit, by)
        self.agreements.clear()
        self._settling = None
        self._offers.clear()
        self._announced_end = self._agreed_by_all = self._may_drop = 0
        if self.newest_heard > limit:
            self.newest_heard = max(0, self.newest_heard - by)
        self._started_clock = None

    def learn(
        self, answer: FloorAnswer, asked_end: int, now: float, *, sender: Member, same_now: bool
    ) -> None:
        """Take in a member's answer to a question about `asked_end`. `same_now`: the present sets are equal, too. The
        horizon comes first: distrust depends on what this peer had seen before."""
        oldest = self._oldest(now)
        self.doubts.note_proof(sender, answer.seen)
        horizon = without_older(answer.horizon, oldest)
        if horizon and not self._accepts_clock(max(horizon.values()), now):
            return  # one of the two clocks is wrong: nothing that is said of time can be believed
        unseen = self._consider(sender, answer.horizon, horizon, now)
        if unseen and self.quorum.apart:
            return  # what the sender has, and this peer has not heard of, may be gone by then
        agreed = asked_end > 0 and answer.epoch_end == asked_end
        if asked_end and self.quorum.knows(sender):
            self._note_answer(sender, asked_end, now, agreed=agreed)
        if (asked_end and same_now) or (agreed and asked_end >= (self._started_clock or 0)):
            self.synchronised = True
        if not agreed or unseen:
            return
        # Writers that are not known here are left out: a table full of them would be kept for long.
        seen = {
            writer: min(asked_end, stamp)
            for writer, stamp in without_older(answer.seen, oldest).items()
            if writer in self.seen or self._knows(writer)
        }
        raise_stamps(self.seen, seen)
        raise_stamps(self.seen, {self._me: asked_end})

    def _note_answer(self, sender: Member, asked_end: int, now: float, *, agreed: bool) -> None:
        if agreed:
            self.agreements.agrees(sender, asked_end)
        elif not self._floors.purging:
            self.agreements.refuses(sender, asked_end, now)

    def _knows(self, writer: Member) -> bool:
        floors = self._floors
        return self.quorum.knows(writer) or writer in floors.horizon or floors.has_floors_of(writer)

    def _consider(self, sender: Member, told: Mapping[Member, int], horizon: Stamps, now: float) -> int:
        """Take over of a horizon what this peer may drop itself; the rest waits for others to show the same. Returns
        the highest stamp of the rest that this peer has not seen, 0 when there is none."""
        rest = self._follow(horizon, now)
        known = self._offers.pop(sender, None)
        if not rest:
            return 0
        while len(self._offers) >= MAX_OFFERS:
            del self._offers[next(iter(self._offers))]
        told_hash, since, same_since = hash_stamps(told), now, now
        if known is not None:
            since = known.since
            same_since = known.same_since if known.hash == told_hash else now
        unseen = self._unseen(rest)
        self._offers[sender] = _Offer(told_hash, rest, unseen, same_since, since)
        return unseen

    def _follow(self, horizon: Mapping[Member, int], now: float) -> Stamps:
        """Take over what this peer may drop itself. Returns the rest that is news."""
        mine, clock_now = self._floors.horizon, self._wall_clock(now)
        news = {w: stamp for w, stamp in horizon.items() if stamp > mine.get(w, 0)}
        own = {w: stamp for w, stamp in news.items() if stamp <= self._may_follow(w, clock_now)}
        if own:
            raise_stamps(self.seen, own)
            self._floors.raise_horizon(own)
        return {w: stamp for w, stamp in news.items() if w not in own}

    def _may_follow(self, writer: Member, clock_now: int) -> int:
        """Up to where this peer itself may drop the writer's floors. It had the same ones as all living members, so
        of a writer that is gone it has seen what they have seen."""
        if not self._floors.has_floors_of(writer):
            return 0
        if writer in self._living:
            return min(self._may_drop, self.seen.get(writer, 0))
        return min(self._may_drop, clock_now - GONE_SLACK + SAVED_SLACK)

    def _judge_offers(self, members: Sequence[ShownFloors], now: float) -> None:
        """Take over horizons that enough members show in their signed records."""
        apart = len([member for member in members if member.floors_seen & APART_BIT])
        for sender, offer in list(self._offers.items()):
            if offer.hash == self._floors.horizon_hash:  # taken over by another member's word
                del self._offers[sender]
                continue
            costs = offer.unseen > 0 and not self.quorum.fresh
            # Seen, so nothing is lost here; and all have had time to see it. Else members whose horizons differ after
            # a restart of all could not agree on anything any more.
            old = now > offer.same_since + CATCH_UP_SECONDS
            stale = not offer.unseen and self.crowded and old
            showing = [each for each in members if each.floors_horizon == offer.hash]
            steady = len([each for each in showing if not each.floors_seen & APART_BIT])
            count = Showing(len(showing), steady, apart)
            if stale or self.quorum.believes(count, now, costs=costs):
                del self._offers[sender]
                self._adopt(offer.stamps, [each.member for each in showing])

    def _adopt(self, stamps: Stamps, by: list[Member]) -> None:
        """Take over a horizon, and note what is to be distrusted for that."""
        unseen = self._unseen(stamps)
        if self.quorum.fresh:
            # Objects put here before this peer ever met another one were not removed by others.
            unseen = min(unseen, (self._started_clock or 0) if self.has_older_copies else 0)
        if unseen > self._distrusted:
            self._distrusted, self.distrusted_by = unseen, by
        # After that nothing is to be feared of them: or the same copies would go again and again.
        raise_stamps(self.seen, stamps)
        self._floors.raise_horizon(stamps)

    def _unseen(self, stamps: Mapping[Member, int]) -> int:
        """The highest clock that a floor may have which was dropped before it was seen here. Floors that were not
        confirmed for an hour were given up."""
        lost = self._agreed_by_all - LOST_AFTER
        seen = {w: max(self.seen.get(w, 0), 0 if w in self._living else lost) for w in stamps}
        return newest_unseen(stamps, seen)

    def disbelieved(self, now: float) -> dict[Member, int]:
        """Members that for a while told of dropped floors unknown here, and up to which stamp: not believed."""
        late = now - DISBELIEVED_SECONDS
        return {
            sender: offer.unseen
            for sender, offer in self._offers.items()
            if offer.since < late and offer.unseen
        }

    def housekeep(self, now: float, *, alone: bool, members: Sequence[ShownFloors]) -> None:
        """Do what is due a few times a second. `alone`: no other member is waited for. `members`: the living ones."""
        clock_now = self._wall_clock(now)
        if self._started_clock is None:
            self._started_clock, self._started_at = clock_now, now
            self._remember(clock_now, now)
        self.records.note_time(clock_now)
        if alone:
            self.synchronised = True
            end, _ = self.settled_epoch(clock_now)
            raise_stamps(self.seen, {self._me: end})
        self._track(members, clock_now, now, alone=alone)
        self._follow_members(members, now)
        if self._offers:
            self._judge_offers(members, now)
        self.records.purge()
        oldest = self._oldest(now)
        self._floors.forget_horizon(oldest)
        if min(self.seen.values(), default=oldest + 1) <= oldest:
            self.seen = without_older(self.seen, oldest)
        self.doubts.look(members, now)

    def _remember(self, clock_now: int, now: float) -> None:
        """Which members lived when this peer was last there; up to what it saw of all of them, it may follow others."""
        lately = {
            member: stamp
            for member, stamp in self.seen.items()
            if stamp > clock_now - LOST_AFTER and member != self._me
        }
        self.quorum.start(lately, unix_seconds_from_clock(self._alive_clock), now)
        if lately:
            stamps = [*lately.values(), self.seen.get(self._me, 0)]
            self._may_drop = max(0, min(stamps) - FOLLOW_SLACK)

    def _track(self, members: Sequence[ShownFloors], clock_now: int, now: float, *, alone: bool) -> None:
        same = 0
        if self.quorum.apart or self.quorum.fresh:
            shown = [member.floors_horizon for member in members]
            same = shown.count(self._floors.horizon_hash)
        self.quorum.track(now, unix_seconds_from_clock(clock_now), len(members), same)
        if alone:
            self.quorum.alone()
        if now < self._forgot_at + 1.0:
            return
        self._forgot_at = now
        for member in self.quorum.forget(now):
            self.agreements.forget(member)
        self.agreements.forget_old(now)

    def take_distrusted(self) -> int:
        """Copies of this peer's whose versions' clocks are not above this may have been removed without
        its hearing of it; 0 when there is nothing to distrust since the last call."""
        distrusted, self._distrusted = self._distrusted, 0
        return distrusted

    def came(self, member: Member, now: float) -> None:
        self.doubts.came(member)
        self.quorum.member_joined(member, now)

    def went(self, member: Member, now: float, *, left: bool = False) -> None:
        """A member is gone. `left`: it signed that it leaves."""
        self.doubts.went(member)
        self._offers.pop(member, None)
        self.quorum.member_gone(member, now, left=left)

    def expelled(self, member: Member) -> None:
        """A member does not belong to the cluster any more: nothing of it is waited for."""
        self.doubts.went(member)
        self._offers.pop(member, None)
        self.quorum.expelled(member)
        self.agreements.expelled(member)


CATCH_UP_SECONDS: Final = 60.0
"""How long a member that was here all the time may take to follow a horizon."""


@dataclass(frozen=True, slots=True)
class _OtherHorizon:
    """A member's record shows another horizon than this peer's: its hash, and since when."""

    shown: int
    since: float


class DoubtedMembers:
    """Members whose copies may have been removed while they were away; `floors` tells clients whether there are any.

    A member that has just come (back) may hold copies that dropped floors forbade. Until its record shows this peer's
    horizon, or an answer of its says that it has seen all of it, its locations of such versions are not believed. The
    same goes for a member that has stayed at another horizon for a minute; one that just took another over is ahead.
    """

    def __init__(self, floors: FloorSet) -> None:
        self._floors = floors
        self._unproven: set[Member] = set()
        self._others: dict[Member, _OtherHorizon] = {}
        self._saw_all: dict[Member, int] = {}
        """Doubted members that said to have seen all of this peer's horizon, and its hash at that time."""

    def note_proof(self, sender: Member, seen: Mapping[Member, int]) -> None:
        """A member says what it has seen. Its copies are what it says of them, as with the horizon in its record."""
        doubted = sender in self._unproven or sender in self._others
        if doubted and newest_unseen(self._floors.horizon, seen) == 0:
            self._saw_all[sender] = self._floors.horizon_hash

    def came(self, member: Member) -> None:
        self._unproven.add(member)
        self._saw_all.pop(member, None)
        self._floors.doubt_members(True)

    def went(self, member: Member) -> None:
        self._unproven.discard(member)
        self._saw_all.pop(member, None)

    def look(self, members: Sequence[ShownFloors], now: float) -> None:
        """Note which members show another horizon, and tell clients whether any member is doubted."""
        mine = self._floors.horizon_hash
        if not mine:
            self._unproven.clear()
            self._others.clear()
            self._saw_all.clear()
            return
        others: dict[Member, _OtherHorizon] = {}
        for shown in members:
            if shown.floors_horizon == mine or self._saw_all.get(shown.member) == mine:
                self._unproven.discard(shown.member)
                continue
            known = self._others.get(shown.member)
            if known is None or known.shown != shown.floors_horizon:
                known = _OtherHorizon(shown.floors_horizon, now)
            others[shown.member] = known
        self._others = others
        late = any(now > other.since + CATCH_UP_SECONDS for other in others.values())
        self._floors.doubt_members(bool(self._unproven) or late)

    def up_to(self, member: Member, shown: int | None, now: float) -> int:
        """The member's copies of versions up to this clock may have been removed while it was away; -1 when
        all of them are believed. `shown` is the horizon's hash in its record, None without one."""
        mine = self._floors.horizon_hash
        if shown == mine or self._saw_all.get(member) == mine:
            return -1
        other = self._others.get(member)
        stays = other is not None and other.shown == shown and now > other.since + CATCH_UP_SECONDS
        return self._floors.compacted_before if stays or member in self._unproven else -1
