"""Open requests of gossip: each counts against the message budget, and ends by its answer or as failed. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from p2pstore.gossip.exchange.message_budget import SharedBudget
from p2pstore.gossip.gossip_messages import Ask, ControlKind, FetchSnapshot
from p2pstore.gossip.records import Member, PeerId
from p2pstore.wire import Message

if TYPE_CHECKING:
    from p2pstore.gossip.gossip_config import GossipConfig

LOST_ANSWER_SECONDS: Final = 120.0
"""An effect that was not answered for this long is taken as failed."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
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


class OpenRequests:
    """Makes the effects that are answered, and knows them again by their tokens."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self.budget = SharedBudget(config.messages_per_second, config.message_burst)
        """Each question is taken from it together with its answer; so are the questions of others."""
        self.count = 0
        """How many were asked so far."""
        self._open: dict[int, OpenRequest] = {}
        self._of_kind: defaultdict[ControlKind | None, dict[int, OpenRequest]] = defaultdict(dict)
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
        token = self._note(OpenRequest(kind, peer_id, 0, now, floors_epoch, about))
        return Ask(token, peer_id, kind, request, timeout)

    def fetch_snapshot(
        self, peer_id: PeerId, member: Member, most_bytes: int, now: float
    ) -> FetchSnapshot:
        """Ask a peer for all that it holds."""
        token = self._note(OpenRequest(None, peer_id, member, now, most_bytes=most_bytes))
        timeout = self._config.snapshot_timeout_seconds
        return FetchSnapshot(token, peer_id, member, timeout, most_bytes)

    def take(self, token: int) -> OpenRequest | None:
        """The request of this token; None when it is no longer open."""
        asked = self._open.pop(token, None)
        if asked is not None:
            del self._of_kind[asked.kind][token]
        return asked

    def asked(self, kind: ControlKind) -> list[PeerId]:
        """The peers that are being asked questions of this kind."""
        return [each.peer_id for each in self._of_kind[kind].values()]

    def open_count(self, kind: ControlKind) -> int:
        return len(self._of_kind[kind])

    def newest_sent_at(self, kind: ControlKind, place: int = 1) -> float:
        """When the newest question of this kind that is under way was asked; the one before it for `place` 2, and
        so on. Minus infinity where there are fewer."""
        newest = islice(reversed(self._of_kind[kind].values()), place - 1, place)
        return next((each.sent_at for each in newest), -math.inf)

    def fetching(self) -> set[Member]:
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

    def _note(self, asked: OpenRequest) -> int:
        self.count += 1
        self._open[self.count] = self._of_kind[asked.kind][self.count] = asked
        return self.count
