"""Up to where each member has the same floors as this peer, and how long it is waited for. Pure.

A member says so in two ways. Its signed record announces a hash, and up to where it agrees with all others. Asked about
the end of an epoch, it says whether its floors below are the same ones. Its own word is enough: a member that lies
about that fools itself only.

A member that confirms nothing is waited for as long as `patience_seconds`, as it may be hard to reach. One that answers
is not: once it knows of a difference, exchanges bring it all that this peer has, and bring what it has here. A member
that is asked about the same end again and again, for longer than all of that takes, and never agrees, is broken or
lies: it is *in dispute*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.records import Member

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
    """A member does not agree up to `end`: how often it has said so, first and last at these times. `found`: that was
    enough."""

    end: int
    since: float
    at: float
    refusals: int = 1
    found: bool = False


class Agreements:
    """See the module's docstring."""

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

    # --- what members say --------------------------------------------------------------------

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
        """Whether the member has refused for longer than `records` floors take to travel, and `slack_seconds`: from
        then on, until it agrees."""
        dispute = self._disputes.get(member)
        if dispute is None:
            return False
        needed = DISPUTE_SECONDS + records / RECORDS_PER_SECOND + slack_seconds
        enough = dispute.refusals >= DISPUTE_REFUSALS and dispute.at - dispute.since >= needed
        dispute.found = dispute.found or enough
        return dispute.found

    # --- what follows ------------------------------------------------------------------------

    def with_me(self, member: Member) -> int:
        """Up to where the member has the same floors as this peer."""
        return max(self.announced.get(member, 0), self._told.get(member, 0))

    def with_all(self, member: Member, shown: int) -> int:
        """Up to where nothing need wait for the member, whose signed record shows that it agrees with all up to
        `shown`. A member whose record shows other floors than what it tells this peer may show anything there."""
        announced, told = self.announced.get(member, 0), self._told.get(member, 0)
        by_record = min(announced, shown)
        self._settle(member, by_record)
        return by_record if announced >= told else max(by_record, told)

    def waited(self, member: Member, agreed: int, end: int, now: float) -> float:
        """For how long, altogether, the member was waited for since it last had agreed about all. `end` is what it is
        to agree about from now on."""
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
