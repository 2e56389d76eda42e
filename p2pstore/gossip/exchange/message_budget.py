"""The budget of gossip messages. Pure.

A message costs half a millisecond of CPU at each end, so gossip is bounded by their number, whatever the size and
load of the cluster. Probes and answers never wait: what they take is missing for exchanges and eager messages. Messages
of others take two thirds at most (about half among equals): so the sum keeps to the bound, and no other peer can keep
this one from beginning exchanges. A sender is answered only as often as a peer with the same bounds may ask.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, Generic, TypeVar

from p2pstore.gossip.records import Member, PeerId
from p2pstore.objects import put_newest

Name = TypeVar("Name", PeerId, Member)

OTHERS_SHARE: Final = 2 / 3
"""Of the messages, that requests of others and their answers may take."""
MESSAGES_PER_REQUEST: Final = 2
"""The request and its answer."""
SENDER_SECONDS: Final = 1.0


class MessageBudget:
    """`per_second` messages, of which `burst` may come at once."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = burst
        self._at = -math.inf

    def take(self, count: int, now: float) -> None:
        """This number of messages is sent or came. It may go below nothing, down to an empty bucket's depth: after many
        messages that did not wait this peer begins others again within a second or so."""
        self._left = max(-self._burst, self._level(now) - count)
        self._at = max(now, self._at)

    def affords(self, count: int, now: float) -> bool:
        """Take this number if it is there. Whether it was."""
        if self.has(count, now):
            self.take(count, now)
            return True
        return False

    def ready_at(self, count: int) -> float:
        """The time from which this number is there."""
        missing = min(count, self._burst) - self._left
        return -math.inf if missing <= 0 else self._at + missing / self._per_second

    def has(self, count: int, now: float) -> bool:
        return self._level(now) >= count

    def _level(self, now: float) -> float:
        if self._at == -math.inf:
            return self._burst
        return min(self._burst, self._left + max(0.0, now - self._at) * self._per_second)


class MemberBudgets(Generic[Name]):
    """A budget for each member whose words cause work here; those of the `limit` that were heard last are kept."""

    def __init__(self, per_second: float, burst: float, limit: int) -> None:
        self._per_second, self._burst, self._limit = per_second, burst, limit
        self._budgets: OrderedDict[Name, MessageBudget] = OrderedDict()

    def __len__(self) -> int:
        return len(self._budgets)

    def affords(self, name: Name, now: float) -> bool:
        """Whether this one's budget has room for one more. Counts it, if so."""
        budget = self._budgets.get(name) or MessageBudget(self._per_second, self._burst)
        if budget.affords(1, now):
            put_newest(self._budgets, name, budget, self._limit)
            return True
        return False


class SharedBudget:
    """One peer's messages of gossip, its own and those of others."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._all = MessageBudget(per_second, burst)
        self._others = MessageBudget(OTHERS_SHARE * per_second, OTHERS_SHARE * burst)
        self._requests_per_sender = SENDER_SECONDS * per_second
        """In a second: twice what a peer may ask for long, since it may save up some, and probes do not wait."""
        self._served: dict[PeerId, int] = {}
        """How many requests each sender made since `_counted_from`."""
        self._counted_from = -math.inf

    def ask(self, now: float) -> None:
        self._all.take(MESSAGES_PER_REQUEST, now)

    def ready_at(self, count: int) -> float:
        """The time from which this peer may send and be sent this number of messages for its own questions."""
        return self._all.ready_at(count)

    def serve(self, sender: PeerId, now: float) -> bool:
        """Another peer asks something. Whether to answer: not when it asks more than any peer may."""
        if not self._counted_from <= now < self._counted_from + SENDER_SECONDS:
            self._served.clear()
            self._counted_from = now
        served = self._served[sender] = self._served.get(sender, 0) + 1
        if served > self._requests_per_sender:
            return False
        if self._others.affords(MESSAGES_PER_REQUEST, now):
            self._all.take(MESSAGES_PER_REQUEST, now)
        return True
