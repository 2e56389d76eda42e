"""Has this peer heard of every floor, and which floors have all living members heard of? Pure.

*Seen* (see `floor_stamps`) says up to where this peer has heard of each writer's floors. Two ways establish it.

1. Every few seconds a peer asks another for its view of the last settled epoch. When their hashes of the floors below
   that epoch's end agree, whatever the other has seen up to there, this peer has seen as well: the answer names it,
   writer by writer. The other's own floors are complete by nature, and it promises to make no more below that end.
2. Every peer's signed record announces the hash of the floors that it has below a recent end, with the same promise. A
   peer with the same hash has seen the announcing peer's floors up to there. The record also says up to where its peer
   has found all other living members to agree (`floors_seen`, but for its lowest bit).

*Compaction*: floors are dropped only up to where this peer agrees with every living member, and every living member
says by 2. that it agrees with all of them, or has agreed by 1. when this peer asked it or it asked this peer. A member
that confirms nothing for ten minutes while floors are crowded is not waited for any longer, as if it were away; nor is
one that answers and never agrees (`agreements`). What crowds out compaction slows the writers down (`core.floors`); it
never drops a floor early.

With every answer comes the other's *horizon*: floors up to there it has dropped. An answer is not signed, and whatever
it says, it is taken over in two cases only:

1. This peer might drop the same floors itself: it agreed up to there with all living members, by their signed records.
   It had those floors, so nothing follows for its copies.
2. At least half of the members show that horizon's hash in their signed records (`quorum` says when more must); or
   this peer has seen all of it, floors are crowded, and it was the same for a minute. What this peer had not seen may
   have forbidden one of its copies, and nobody can tell any more: so a peer that was away discards copies that are
   not newer than the newest such floor can be (`take_distrusted`).

A member that has just come (back) and whose record does not show the same horizon may still hold such copies: until it
does, or an answer of its says that it has seen all of this peer's horizon, this peer does not believe its locations of
such versions (`doubted_up_to`). The same goes for a member that was here and has stayed at another horizon for a
minute. One that has just taken another horizon over is ahead, not behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from p2pstore.gossip.floors.agreements import Agreements
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_set import COMPACT_ABOVE, SLICE_BITS
from p2pstore.gossip.floors.floor_stamps import (
    Stamps,
    hash_stamps,
    lower_stamps,
    newest_unseen,
    raise_stamps,
    without_older,
)
from p2pstore.gossip.floors.quorum import Quorum, Showing
from p2pstore.gossip.locations.log import newest_clock
from p2pstore.gossip.records import Member
from p2pstore.objects import (
    MAX_CLOCK_SKEW_SECONDS,
    clock_from_unix_seconds,
    unix_seconds_from_clock,
)
from p2pstore.runtime.stepping import Steps

COMPARE_SECONDS: Final = 5.0
COMPARE_SOON_SECONDS: Final = 0.5
"""Shortest time between two comparisons when another horizon was seen."""
CATCH_UP_SECONDS: Final = 60.0
"""How long a member that was here all the time may take to follow a horizon."""
HORIZON_SECONDS: Final = 20.0
"""How much longer a member may refuse to agree while its record shows another horizon than most do."""
EPOCH_BITS: Final = 29
"""An epoch is 8.2 s: 2^29 of the hybrid clock, which counts 65,536 a millisecond."""
EPOCHS_BACK: Final = 32
"""Questions about older epochs are not answered."""
ANNOUNCED_BACK: Final = clock_from_unix_seconds(600.0)
"""Nor are older announcements compared."""
SETTLE_SECONDS: Final = 3.0
"""Floors are announced when they are this old: they ought to have been heard of everywhere by then."""
APART_BIT: Final = 1
"""Of `floors_seen`: the peer was away, and does not yet know what it missed (`quorum`)."""
CROWDED: Final = COMPACT_ABOVE / 2
"""Above this share of the limit a peer announces its floors although nothing else of its record has changed."""
HURRY_ABOVE: Final = 0.9
"""Above this share every peer compacts, not only the first of the living that are waited for."""
PATIENCE_SECONDS: Final = 300.0
"""Shortest time for which a living member that confirms nothing is waited for."""
SETTLED_PER_STEP: Final = 2_000
"""Members, at a microsecond each."""
SAVED_SLACK: Final = clock_from_unix_seconds(30.0)
"""Floors stay for so long after all have confirmed them: a peer that is killed knows only what it had saved that it had
seen, every ten seconds, and would distrust its objects when it is back."""
FOLLOW_SLACK: Final = clock_from_unix_seconds(10.0)
"""The same of floors that others dropped: what they have confirmed was heard of here a little later."""
MAX_OFFERS: Final = 4
"""Members whose horizon may be considered at a time: a table has up to 16,384 entries."""
DISBELIEVED_SECONDS: Final = 20.0
"""A horizon that is not taken over for so long is told of."""
START_SECONDS: Final = 60.0
"""Nothing is dropped so soon after a start: members of before it may be about to come back."""
GONE_SLACK: Final = clock_from_unix_seconds(180.0)
"""Floors of members that are gone stay so much longer: who has seen them spreads by questions and answers only."""
LOST_AFTER: Final = clock_from_unix_seconds(3600.0)
"""Of a writer that is gone, older floors which no living member has heard of are given up: else what nobody can confirm
would crowd out everything else."""
LONGEST_ABSENCE: Final = clock_from_unix_seconds(30 * 86_400.0)
"""A peer that was away for longer than 30 days is trusted with nothing it kept: older stamps are
forgotten."""


@dataclass(frozen=True, slots=True)
class FloorAnswer:
    """What a peer says when it is asked. `epoch_end` is 0 when the epochs did not agree: then `seen` counts for the
    belief in that peer's own copies only."""

    epoch_end: int = 0
    seen: Stamps = field(default_factory=dict)
    horizon: Stamps = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A horizon that a member told and that is not taken over yet: the hash of all of it, what of it is news, the
    highest stamp that was not seen, since when it is the same, and since when the member has told any."""

    hash: int
    stamps: Stamps
    unseen: int
    same_since: float
    since: float


class ShownFloors(Protocol):
    """What a member's latest record says of floors."""

    @property
    def member(self) -> Member: ...
    @property
    def floors_horizon(self) -> int: ...
    @property
    def floors_end(self) -> int: ...
    @property
    def floors_hash(self) -> int: ...
    @property
    def floors_seen(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _OtherHorizon:
    """A member's record shows another horizon than this peer's: its hash, and since when."""

    shown: int
    since: float


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
        self.has_older_copies = False
        """Whether this peer began with copies of an earlier life."""
        self._me = me
        self._floors = records.floors
        self._started_clock: int | None = None
        self._started_at = math.inf
        self._forgot_at = -math.inf
        self._accepts_clock = accepts_clock
        self._wall_clock = wall_clock
        self._distrusted = 0
        self._compared_at = -math.inf
        self._compared_soon_at = -math.inf
        self._unproven: set[Member] = set()
        self._others: dict[Member, _OtherHorizon] = {}
        self._saw_all: dict[Member, int] = {}
        """Doubted members that said to have seen all of this peer's horizon, and its hash at that time."""
        self.agreements = Agreements()
        self._settling: Steps[int] | None = None
        self._living = {me}
        self.quorum = Quorum()
        self._alive_clock = 0
        self._offers: dict[Member, _Offer] = {}
        """By the member that told it, the oldest first."""
        self._announced_end = 0
        self._agreed_by_all = 0
        self._may_drop = 0
        """Up to where floors were known to all living members at some time of this life."""
        self.distrusted_by: list[Member] = []
        """Whose records showed the horizon for which `take_distrusted` last said to distrust copies."""
        self.waits_for: list[Member] = []
        """Members that have not confirmed floors for a while, though floors are crowded: living ones, and where most
        are gone, those."""
        self.passed_over: list[Member] = []
        """Those of them that are not waited for any longer ..."""
        self.disputed: list[Member] = []
        """... as they answer, and never agree."""
        self._late: list[Member] = []
        """Members that are not known to have lately agreed with all."""

    def load(self, seen: Mapping[Member, int], alive_clock: int = 0) -> None:
        """What was seen in an earlier life, which was over after `alive_clock`, from the state directory; the records
        were loaded before."""
        self.seen, self._alive_clock = dict(seen), alive_clock
        self._distrusted = newest_unseen(self._floors.horizon, self.seen)

    def clock_was_fast(self, limit: int, by: int) -> None:
        """The wall clock was fast by `by` and is right again: stamps above `limit` say of a time to come what was
        meant of another one."""
        self._floors.lower_horizon(limit, by)
        self.seen = lower_stamps(self.seen, limit, by)
        self.agreements.clear()
        self._settling = None
        self._offers.clear()
        self._announced_end = self._agreed_by_all = self._may_drop = 0
        if self.newest_heard > limit:
            self.newest_heard = max(0, self.newest_heard - by)
        self._started_clock = None

    # --- comparing ---------------------------------------------------------------------------

    def question(
        self, member: Member, now: float, *, at_once: bool = False, soon: bool = False
    ) -> tuple[int, int]:
        """The end of an epoch and its hash here, to ask a member about; (0, 0) when it is not time to
        ask. `soon`: its record shows another horizon."""
        if at_once:
            pass
        elif now >= self._compared_at + COMPARE_SECONDS:
            self._compared_at = self._compared_soon_at = now
        elif (soon or not self.synchronised) and (
            now >= self._compared_soon_at + COMPARE_SOON_SECONDS
        ):
            self._compared_soon_at = now
        else:
            return 0, 0
        if self._started_clock is None:
            return 0, 0
        clock_now = self._wall_clock(now)
        end, epoch_hash = self.settled_epoch(clock_now)
        oldest = clock_now - ((EPOCHS_BACK - 2) << EPOCH_BITS)
        if disputed := self.agreements.disputed_end(member, oldest):
            end, epoch_hash = disputed, self._floors.hash_below(disputed)
        # Accepted, the end raises this peer's clock: no floor that it makes from now on is below.
        return (end, epoch_hash) if end and self._accepts_clock(end, now) else (0, 0)

    def settled_epoch(self, clock_now: int) -> tuple[int, int]:
        """The end of an epoch, 8 to 16 s ago, and the hash of the floors below it."""
        end = ((clock_now >> EPOCH_BITS) - 1) << EPOCH_BITS
        return end, self._floors.hash_below(end)

    def _agrees(self, epoch_end: int, epoch_hash: int, clock_now: int) -> bool:
        """Whether the floors known here below the end of an epoch have this hash."""
        number, rest = divmod(epoch_end, 1 << EPOCH_BITS)
        last = clock_now >> EPOCH_BITS
        known = not rest and last - EPOCHS_BACK < number <= last
        return known and self._floors.hash_below(epoch_end) == epoch_hash

    def answer(
        self, epoch_end: int, epoch_hash: int, now: float, asker: Member | None
    ) -> FloorAnswer:
        """Answer the question of a member; None for one of a reader."""
        if not epoch_end:
            return FloorAnswer()
        agrees = self._agrees(epoch_end, epoch_hash, self._wall_clock(now))
        if agrees and self._accepts_clock(epoch_end, now):  # which raises the clock, as above
            if asker is not None and self.quorum.knows(asker):
                self.agreements.agrees(asker, epoch_end)
            if self.synchronised:
                raise_stamps(self.seen, {self._me: epoch_end})
        else:
            epoch_end = 0
        return FloorAnswer(epoch_end, dict(self.seen), self._floors.horizon)

    def learn(
        self, answer: FloorAnswer, asked_end: int, now: float, *, sender: Member, same_now: bool
    ) -> None:
        """Take in a member's answer to a question about `asked_end`. `same_now`: the present sets are equal, too.

        The horizon comes first: what this peer must distrust depends on what it had seen before.
        """
        oldest = self._oldest(now)
        self._note_proof(sender, answer.seen)
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
        # Of writers that nobody here knows, there is nothing to be seen: a table full of them would be kept for long.
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

    def _note_proof(self, sender: Member, seen: Mapping[Member, int]) -> None:
        """A member's copies are what it says of them, as with the horizon in its record."""
        doubted = sender in self._unproven or sender in self._others
        if doubted and newest_unseen(self._floors.horizon, seen) == 0:
            self._saw_all[sender] = self._floors.horizon_hash

    def _knows(self, writer: Member) -> bool:
        floors = self._floors
        return self.quorum.knows(writer) or writer in floors.horizon or floors.has_floors_of(writer)

    # --- horizons of others ------------------------------------------------------------------

    def _consider(
        self, sender: Member, told: Mapping[Member, int], horizon: Stamps, now: float
    ) -> int:
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
            self._raise_horizon(own, now)
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
                self._adopt(offer.stamps, [each.member for each in showing], now)

    def _adopt(self, stamps: Stamps, by: list[Member], now: float) -> None:
        """Take over a horizon, and note what is to be distrusted for that."""
        unseen = self._unseen(stamps)
        if self.quorum.fresh:
            # What was put here before this peer ever met another one was not removed by others.
            unseen = min(unseen, (self._started_clock or 0) if self.has_older_copies else 0)
        if unseen > self._distrusted:
            self._distrusted, self.distrusted_by = unseen, by
        # After that nothing is to be feared of them: or the same copies would go again and again.
        raise_stamps(self.seen, stamps)
        self._raise_horizon(stamps, now)

    def _unseen(self, stamps: Mapping[Member, int]) -> int:
        """The highest clock that a floor may have which was dropped before it was seen here. What nobody could confirm
        for an hour was given up."""
        lost = self._agreed_by_all - LOST_AFTER
        seen = {w: max(self.seen.get(w, 0), 0 if w in self._living else lost) for w in stamps}
        return newest_unseen(stamps, seen)

    def _raise_horizon(self, stamps: Mapping[Member, int], now: float) -> None:
        self._floors.raise_horizon(stamps)

    @property
    def has_offers(self) -> bool:
        """Whether some member told a horizon that is not taken over yet."""
        return bool(self._offers)

    def disbelieved(self, now: float) -> dict[Member, int]:
        """Members that for a while have said that floors are gone of which this peer has not heard, and up to which
        stamp: it is not believed."""
        late = now - DISBELIEVED_SECONDS
        return {
            sender: offer.unseen
            for sender, offer in self._offers.items()
            if offer.since < late and offer.unseen
        }

    # --- announcing --------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether members are to hear soon of which floors this peer has."""
        return self._floors.crowding > CROWDED

    def announcement(self, now: float, head_interval_seconds: float) -> tuple[int, int, int]:
        """`floors_end`, `floors_hash` and `floors_seen` for this peer's record, which others hear of after
        `head_interval_seconds`. The end is 1 while there is nothing to say: 0 means an older peer."""
        settle = max(SETTLE_SECONDS, head_interval_seconds / 4)
        end = self._wall_clock(now) - clock_from_unix_seconds(settle)
        end = end >> SLICE_BITS << SLICE_BITS
        ready = self.synchronised and not self._floors.purging and end > 0
        # Accepted, the end raises this peer's clock: no floor that it makes from now on is below.
        seen = self._agreed_by_all & ~APART_BIT | self.quorum.apart
        if not ready or not self._accepts_clock(end, now):
            return 1, 0, seen
        raise_stamps(self.seen, {self._me: end})
        self._announced_end = max(self._announced_end, end)
        return end, self._floors.hash_below(end), seen

    def shows_apart(self, floors_seen: int) -> bool:
        """Whether a record of this peer's with these `floors_seen` says truly whether it is apart."""
        return floors_seen & APART_BIT == self.quorum.apart

    def _compare(self, members: Sequence[ShownFloors], now: float) -> None:
        """Note which members announced the same floors as this peer has."""
        clock_now = self._wall_clock(now)
        news: list[ShownFloors] = []
        for shown in members:
            end = shown.floors_end
            known = self.agreements.announced.get(shown.member, 0)
            new = end > max(known, clock_now - ANNOUNCED_BACK)
            if not new or end % (1 << SLICE_BITS):
                continue
            if shown.floors_horizon != self._floors.horizon_hash:
                continue
            # The member's clock may be ahead. No floor that this peer makes from now on is below the end.
            if self._accepts_clock(end, now):
                news.append(shown)
        hashes = self._floors.hashes_below({shown.floors_end for shown in news})
        agreed = {m.member: m.floors_end for m in news if hashes[m.floors_end] == m.floors_hash}
        self.agreements.announced |= agreed
        raise_stamps(self.seen, agreed)

    def _settle_agreement(self, members: Sequence[ShownFloors], now: float) -> Steps[int]:
        """Up to where floors may be dropped: all members agree with this peer and say that they agree with all. Some
        thousands of members a step."""
        patience = max(self._floors.kept_seconds, PATIENCE_SECONDS)
        mine, everybody = self._announced_end, self._announced_end
        agreements = self.agreements
        late = self._announced_end - clock_from_unix_seconds(patience / 20)
        waits_for: list[Member] = []
        passed_over: list[Member] = []
        disputing: list[Member] = []
        late_ones: list[Member] = []
        same = [shown.floors_horizon for shown in members].count(self._floors.horizon_hash)
        steady = 2 * (1 + same) > self.quorum.living
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
        confirming = self.quorum.living - len(self.passed_over)
        up_to = min(everybody, mine)
        # Where most confirm nothing, it is this peer that was passed over: it must not follow the others.
        if 2 * confirming > self.quorum.living and now >= self._started_at + START_SECONDS:
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
        return self.agreements.take_to_ask(self._late, self.quorum.living, now)

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

    # --- time --------------------------------------------------------------------------------

    def housekeep(self, now: float, *, alone: bool, members: Sequence[ShownFloors]) -> None:
        """Do what is due a few times a second. `alone`: there is nobody else, nor anybody to wait for. `members` are
        the other living members."""
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
        if not self.crowded:
            self._settling = None
            self.agreements.end_waiting()
            self.waits_for, self.passed_over, self.disputed, self._late = [], [], [], []
        else:
            self._living = {shown.member for shown in members} | {self._me}
            self._compare(members, now)
            self._compact(members, now)
        if self._offers:
            self._judge_offers(members, now)
        self.records.purge()
        oldest = self._oldest(now)
        self._floors.forget_horizon(oldest)
        if min(self.seen.values(), default=oldest + 1) <= oldest:
            self.seen = without_older(self.seen, oldest)
        self._doubt(members, now)

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

    def _track(
        self, members: Sequence[ShownFloors], clock_now: int, now: float, *, alone: bool
    ) -> None:
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

    def _doubt(self, members: Sequence[ShownFloors], now: float) -> None:
        """Note who shows another horizon, and tell clients whether some member is doubted (`doubted_up_to`)."""
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

    def heard_of(self, operations: bytes | bytearray | memoryview, newest: int, now: float) -> None:
        """Locations were heard of, in packed records whose highest clock is `newest`. Those from a clock that is too
        far ahead do not count: nothing can be written above them that others would take."""
        limit = self._wall_clock(now) + clock_from_unix_seconds(MAX_CLOCK_SKEW_SECONDS)
        if newest > limit:
            newest = newest_clock(operations, limit)
        self.newest_heard = max(self.newest_heard, newest)

    # --- what follows ------------------------------------------------------------------------

    def take_distrusted(self) -> int:
        """Copies of this peer's whose versions' clocks are not above this may have been removed without
        its hearing of it; 0 when there is nothing to distrust since the last call."""
        distrusted, self._distrusted = self._distrusted, 0
        return distrusted

    def came(self, member: Member, now: float) -> None:
        """A member has just come, or come back."""
        self._unproven.add(member)
        self._saw_all.pop(member, None)
        self._floors.doubt_members(True)
        self.quorum.came(member, now)

    def went(self, member: Member, now: float, *, left: bool = False) -> None:
        """A member is gone. `left`: it signed that it leaves."""
        self._unproven.discard(member)
        self._saw_all.pop(member, None)
        self._offers.pop(member, None)
        self.quorum.went(member, now, left=left)

    def expelled(self, member: Member) -> None:
        """A member does not belong to the cluster any more: nothing of it is waited for."""
        self._unproven.discard(member)
        self._saw_all.pop(member, None)
        self._offers.pop(member, None)
        self.quorum.expelled(member)
        self.agreements.expelled(member)

    def doubted_up_to(self, member: Member, shown: int | None, now: float) -> int:
        """The member's copies of versions up to this clock may have been removed while it was away; -1 when
        all of them are believed. `shown` is the horizon's hash in its record, None without one."""
        mine = self._floors.horizon_hash
        if shown == mine or self._saw_all.get(member) == mine:
            return -1
        other = self._others.get(member)
        stays = other is not None and other.shown == shown and now > other.since + CATCH_UP_SECONDS
        return self._floors.compacted_before if stays or member in self._unproven else -1

    def was_away_too_long(self, last_clock: int, now: float) -> bool:
        """Whether a peer whose clock last stood at `last_clock` may have missed floors whose stamps are
        forgotten."""
        return last_clock <= self._oldest(now)

    def _oldest(self, now: float) -> int:
        return max(0, self._wall_clock(now) - LONGEST_ABSENCE)
