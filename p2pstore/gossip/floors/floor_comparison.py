"""Has this peer heard of every floor? Comparing floors with others, in two ways. Pure.

*Seen* (see `floor_stamps`) says up to where this peer has heard of each writer's floors. Two ways establish it.

1. Every few seconds a peer asks another for its view of the last settled epoch. When their hashes of the floors below
   that epoch's end agree, this peer has seen whatever the other has seen up to there: the answer names it, writer by
   writer. The other's own floors are complete by nature, and it promises to make no more below that end.
2. Every peer's signed record announces the hash of the floors that it has below a recent end, with the same promise. A
   peer with the same hash has seen the announcing peer's floors up to there. The record also says up to where its peer
   has found all other living members to agree (`floors_seen`, but for its lowest bit).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.floors.floor_set import COMPACT_ABOVE, SLICE_BITS
from p2pstore.gossip.floors.floor_stamps import Stamps, raise_stamps
from p2pstore.gossip.floors.quorum import Quorum
from p2pstore.gossip.locations.log import newest_clock
from p2pstore.gossip.records import Member
from p2pstore.objects import MAX_CLOCK_SKEW_SECONDS, clock_from_unix_seconds

COMPARE_SECONDS: Final = 5.0

COMPARE_SOON_SECONDS: Final = 0.5
"""Shortest time between two comparisons when another horizon was seen."""

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

MAX_ABSENCE: Final = clock_from_unix_seconds(30 * 86_400.0)
"""A peer that was away for longer than 30 days is trusted with nothing it kept: older stamps are forgotten."""


@dataclass(frozen=True, slots=True)
class FloorAnswer:
    """Floors in a peer's answer. `epoch_end` is 0 when the epochs did not agree: then `seen` counts for the
    belief in that peer's own copies only."""

    epoch_end: int = 0
    seen: Stamps = field(default_factory=dict)
    horizon: Stamps = field(default_factory=dict)


class ShownFloors(Protocol):
    """Floors in a member's latest record."""

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


class FloorComparison:
    """This peer's side of both ways. `wall_clock(now)` is the hybrid clock's reading of the wall clock."""

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
        """Whether this peer has, since its start, heard of all floors that were made while it was away: it once had
        the same floors as a live neighbour, or there is no other member."""
        self.newest_heard = 0
        """The highest clock of any version of which a location was heard of."""
        self.agreements = Agreements()
        self.quorum = Quorum()
        self._me = me
        self._floors = records.floors
        self._accepts_clock = accepts_clock
        self._wall_clock = wall_clock
        self._started_clock: int | None = None
        self._compared_at = -math.inf
        self._compared_soon_at = -math.inf
        self._announced_end = 0
        self._agreed_by_all = 0

    def question(
        self, member: Member, now: float, *, at_once: bool = False, soon: bool = False
    ) -> tuple[int, int]:
        """The end of an epoch and its hash here, to ask a member about; (0, 0) when it is not time to
        ask. `soon`: its record shows another horizon."""
        if at_once:
            pass
        elif now >= self._compared_at + COMPARE_SECONDS:
            self._compared_at = self._compared_soon_at = now
        elif (soon or not self.synchronised) and (now >= self._compared_soon_at + COMPARE_SOON_SECONDS):
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

    def answer(self, epoch_end: int, epoch_hash: int, now: float, asker: Member | None) -> FloorAnswer:
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

    def heard_of(self, operations: bytes | bytearray | memoryview, newest: int, now: float) -> None:
        """Locations were heard of, in packed records whose highest clock is `newest`. Those from a clock that is too
        far ahead do not count: nothing can be written above them that others would take."""
        limit = self._wall_clock(now) + clock_from_unix_seconds(MAX_CLOCK_SKEW_SECONDS)
        if newest > limit:
            newest = newest_clock(operations, limit)
        self.newest_heard = max(self.newest_heard, newest)

    def was_away_too_long(self, last_clock: int, now: float) -> bool:
        """Whether a peer whose clock last stood at `last_clock` may have missed floors whose stamps are forgotten."""
        return last_clock <= self._oldest(now)

    def _oldest(self, now: float) -> int:
        return max(0, self._wall_clock(now) - MAX_ABSENCE)


DISPUTE_REFUSALS: Final = 3
"""Refusals to agree about the same end, after which a member is in dispute, ..."""
REFUSAL_SECONDS: Final = 5.0
"""... each at least this much later than the one counted before, ..."""
DISPUTE_SECONDS: Final = 10.0
"""... and the last one this much later than the first; longer by the time that all floors take to travel."""
RECORDS_PER_SECOND: Final = 500
"""Floors a second that exchanges between two peers bring at least: 40 each, up to 30 times a second."""
ASKED_A_SECOND: Final = 5.0
"""How often a member that is waited for is asked by all others together, at most."""
WAITED_SECONDS: Final = 3600.0
"""How long a member that is gone is remembered to have confirmed nothing."""


@dataclass(slots=True)
class _Waiting:
    """A member is waited for until it agrees up to `end`: for how long, and when that was looked at last."""

    end: int
    at: float
    seconds: float = 0.0


@dataclass(slots=True)
class _Dispute:
    """A member does not agree up to `end`: its refusals, the first and the last time. `found`: that was enough."""

    end: int
    since: float
    at: float
    refusals: int = 1
    found: bool = False


class Agreements:
    """Up to where each member has the same floors as this peer, and how long it is waited for.

    A member says so by its signed record, and when it is asked about an epoch's end; its own word is enough, as a liar
    fools itself only. One that confirms nothing may be hard to reach, and is waited for. One that refuses the same end
    again and again, for longer than exchanges take to level all differences, is broken or lies: *in dispute*.
    """

    def __init__(self) -> None:
        self.announced: dict[Member, int] = {}
        """Member -> end below which its signed record showed the same floors as this peer has."""
        self._told: dict[Member, int] = {}
        """Member -> end below which it said to this peer that its floors are the same."""
        self._waiting: dict[Member, _Waiting] = {}
        self._disputes: dict[Member, _Dispute] = {}
        self._asked_at: dict[Member, float] = {}

    def clear(self) -> None:
        """Stamps have changed: nothing is known of any member."""
        for each in (self.announced, self._told, self._waiting, self._disputes, self._asked_at):
            each.clear()

    def end_waiting(self) -> None:
        """Floors are not crowded any more: no member is waited for."""
        self._waiting.clear()
        self._disputes.clear()
        self._asked_at.clear()

    def forget(self, member: Member) -> None:
        """The member does not count any more. That it was waited for is remembered for a while."""
        for each in (self.announced, self._told, self._disputes, self._asked_at):
            each.pop(member, None)

    def expelled(self, member: Member) -> None:
        """The member does not belong to the cluster any more."""
        self.forget(member)
        self._waiting.pop(member, None)

    def forget_old(self, now: float) -> None:
        """Forget how long members were waited for that are gone for an hour."""
        over = [m for m, waiting in self._waiting.items() if now > waiting.at + WAITED_SECONDS]
        for member in over:
            del self._waiting[member]

    def agrees(self, member: Member, end: int) -> None:
        """The member has told this peer that below `end` its floors are the same."""
        self._told[member] = max(end, self._told.get(member, 0))
        self._settle(member, end)

    def refuses(self, member: Member, end: int, now: float) -> None:
        """The member has told this peer that below `end` its floors are others."""
        dispute = self._disputes.get(member)
        if dispute is None:
            self._disputes[member] = _Dispute(end, now, now)
        elif now >= dispute.at + REFUSAL_SECONDS:
            dispute.refusals += 1
            dispute.at = now

    def _settle(self, member: Member, end: int) -> None:
        dispute = self._disputes.get(member)
        if dispute is not None and end >= dispute.end:
            del self._disputes[member]

    def in_dispute(self, member: Member, records: int, slack_seconds: float) -> bool:
        """Whether the member refused for longer than `records` floors travel and `slack_seconds`; until it agrees."""
        dispute = self._disputes.get(member)
        if dispute is None:
            return False
        needed = DISPUTE_SECONDS + records / RECORDS_PER_SECOND + slack_seconds
        enough = dispute.refusals >= DISPUTE_REFUSALS and dispute.at - dispute.since >= needed
        dispute.found = dispute.found or enough
        return dispute.found

    def with_me(self, member: Member) -> int:
        return max(self.announced.get(member, 0), self._told.get(member, 0))

    def with_all(self, member: Member, shown: int) -> int:
        """Up to where nothing need wait for the member, whose signed record shows that it agrees with all up to
        `shown`. A member whose record shows other floors than what it tells this peer may show anything there."""
        announced, told = self.announced.get(member, 0), self._told.get(member, 0)
        by_record = min(announced, shown)
        self._settle(member, by_record)
        return by_record if announced >= told else max(by_record, told)

    def waited(self, member: Member, agreed: int, end: int, now: float) -> float:
        """How long in all the member was waited for since it agreed about all; `end` is next to be agreed about."""
        waiting = self._waiting.get(member)
        if waiting is None or agreed >= waiting.end:
            waiting = self._waiting[member] = _Waiting(end, now)
        waiting.seconds += min(now - waiting.at, 1.0)
        waiting.at = now
        return waiting.seconds

    def disputed_end(self, member: Member, oldest: int) -> int:
        """The end about which the member is to be asked again; 0 when there is none, or an older one than that."""
        dispute = self._disputes.get(member)
        return dispute.end if dispute is not None and dispute.end > oldest else 0

    def take_to_ask(self, late: Sequence[Member], living: int, now: float) -> list[Member]:
        """Those of the members that are late which are to be asked now, in a cluster of `living` ones."""
        interval = max(REFUSAL_SECONDS, living / ASKED_A_SECOND)
        due = [m for m in late if now >= self._asked_at.get(m, -math.inf) + interval]
        self._asked_at |= dict.fromkeys(due, now)
        return due
