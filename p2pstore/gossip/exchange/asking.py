"""Open requests of gossip, and the budget of messages. Pure.

A message costs some half millisecond of CPU at each end, so gossip is bounded by their number, whatever the size and
load of the cluster. Probes and answers never wait: what they take is missing for exchanges and eager messages. Messages
of others take two thirds at most (about half among equals): so the sum keeps to the bound, and no other peer can keep
this one from beginning exchanges. A sender is answered only as often as a peer with the same bounds may ask.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from p2pstore.gossip.gossip_messages import Ask, ControlKind, FetchSnapshot
from p2pstore.gossip.records import Member, PeerId
from p2pstore.objects import put_newest
from p2pstore.wire import Message

if TYPE_CHECKING:
    from p2pstore.gossip.gossip_config import GossipConfig

Name = TypeVar("Name", PeerId, Member)

LOST_ANSWER_SECONDS: Final = 120.0
"""An effect that was not answered for this long is taken as failed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question to `peer_id`. `kind`: None for a snapshot of `member`; `floors_epoch`: which an exchange asks of."""

    kind: ControlKind | None
    peer_id: PeerId
    member: Member
    sent_at: float
    floors_epoch: int = 0
    about: PeerId = b""
    """The peer that a PING_REQUEST asks to ping."""
    most_bytes: int = 0
    """Of a snapshot that is asked for."""


class Questions:
    """Makes the effects that are answered, and knows them again by their tokens."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self.budget = SharedBudget(config.messages_per_second, config.message_burst)
        """Each question is taken from it together with its answer; so are the questions of others."""
        self.count = 0
        """How many were asked so far."""
        self._open: dict[int, Asked] = {}
        self._of_kind: defaultdict[ControlKind | None, dict[int, Asked]] = defaultdict(dict)
        """The same by kind: the number of a kind is asked for after every event."""
        self._overdue_up_to = 0

    def __len__(self) -> int:
        return len(self._open)

    def ask(
        self,
        peer_id: PeerId,
        kind: ControlKind,
        request: Message,
        now: float,
        *,
        floors_epoch: int = 0,
        timeout_seconds: float | None = None,
        about: PeerId = b"",
    ) -> Ask:
        """Ask a peer something on its control stream; by default with the timeout of exchanges, or of farewells."""
        timeout = timeout_seconds
        if timeout is None and kind == ControlKind.LEAVE:
            timeout = self._config.leave_timeout_seconds
        elif timeout is None:
            timeout = self._config.exchange_timeout_seconds
        self.budget.ask(now)
        token = self._note(Asked(kind, peer_id, 0, now, floors_epoch, about))
        return Ask(token, peer_id, kind, request, timeout)

    def fetch_snapshot(
        self, peer_id: PeerId, member: Member, most_bytes: int, now: float
    ) -> FetchSnapshot:
        """Ask a peer for all that it holds."""
        token = self._note(Asked(None, peer_id, member, now, most_bytes=most_bytes))
        timeout = self._config.snapshot_timeout_seconds
        return FetchSnapshot(token, peer_id, member, timeout, most_bytes)

    def take(self, token: int) -> Asked | None:
        """The request of this token; None when it is no longer open."""
        asked = self._open.pop(token, None)
        if asked is not None:
            del self._of_kind[asked.kind][token]
        return asked

    def asked(self, kind: ControlKind) -> list[PeerId]:
        """The peers that are being asked questions of this kind."""
        return [each.peer_id for each in self._of_kind[kind].values()]

    def open_count(self, kind: ControlKind) -> int:
        """How many questions of this kind are not answered yet."""
        return len(self._of_kind[kind])

    def newest_sent_at(self, kind: ControlKind, place: int = 1) -> float:
        """When the newest question of this kind that is under way was asked; the one before it for `place` 2, and
        so on. Minus infinity where there are fewer."""
        newest = islice(reversed(self._of_kind[kind].values()), place - 1, place)
        return next((each.sent_at for each in newest), -math.inf)

    def fetching(self) -> set[Member]:
        """Of whom snapshots are under way."""
        return {each.member for each in self._of_kind[None].values()}

    def overdue(self, since: float, before: float) -> list[PeerId]:
        """Peers that were asked something, other than to answer a probe, after `since` and before `before`, and have
        not answered yet. Each question is named once."""
        found: list[PeerId] = []
        for token, asked in self._open.items():
            if asked.sent_at >= before:
                break
            if token > self._overdue_up_to:
                self._overdue_up_to = token
                if asked.kind in (ControlKind.EXCHANGE, ControlKind.DELTA) and asked.sent_at > since:
                    found.append(asked.peer_id)
        return found

    def give_up_lost(self, now: float) -> None:
        """Forget what was never answered."""
        for token in [t for t, a in self._open.items() if a.sent_at + LOST_ANSWER_SECONDS < now]:
            self.take(token)

    def _note(self, asked: Asked) -> int:
        self.count += 1
        self._open[self.count] = self._of_kind[asked.kind][self.count] = asked
        return self.count


OTHERS_SHARE: Final = 2 / 3
"""Of the messages, that requests of others and their answers may take."""
MESSAGES_PER_REQUEST: Final = 2
"""The request and its answer."""
SENDER_SECONDS: Final = 1.0


class MessageBudget:
    """`per_second` messages, of which `burst` may come at once."""

    def __init__(self, per_second: float, burst: float) -> None:
        if per_second <= 0 or burst <= 0:
            raise ValueError("a message budget must let some messages pass")
        self._per_second = per_second
        self._burst = burst
        self._left = burst
        self._at = -math.inf

    def take(self, count: int, now: float) -> None:
        """This number of messages is sent or came. It may go below nothing, down to an empty bucket's depth: after many
        messages that did not wait this peer begins others again within a second or so."""
        self._left = max(-self._burst, self._level(now) - count)
        self._at = max(now, self._at)

    def ready_at(self, count: int) -> float:
        """The time from which this number is there."""
        missing = min(count, self._burst) - self._left
        return -math.inf if missing <= 0 else self._at + missing / self._per_second

    def has(self, count: int, now: float) -> bool:
        """Whether this number is there now."""
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
        if not budget.has(1, now):
            return False
        budget.take(1, now)
        put_newest(self._budgets, name, budget, self._limit)
        return True


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
        """This peer asks another one something."""
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
        if self._others.has(MESSAGES_PER_REQUEST, now):
            self._others.take(MESSAGES_PER_REQUEST, now)
            self._all.take(MESSAGES_PER_REQUEST, now)
        return True
