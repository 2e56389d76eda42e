"""What a peer has asked others, and is yet to be answered. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.config import GossipConfig
from p2pstore.gossip.effects import Ask, FetchSnapshot
from p2pstore.gossip.messages import ControlKind
from p2pstore.gossip.records import Member, PeerId
from p2pstore.wire import Message

LOST_ANSWER_SECONDS: Final = 120.0
"""An effect that was not answered for this long is taken as failed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question. `kind` is None for a snapshot of what `member` holds; `floors_epoch` is that of which an
    exchange asks."""

    kind: ControlKind | None
    peer_id: PeerId
    member: Member
    sent_at: float
    floors_epoch: int = 0


class Questions:
    """Makes the effects that are answered, and knows them again by their tokens."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self.count = 0
        """How many were asked so far."""
        self._open: dict[int, Asked] = {}

    def __len__(self) -> int:
        """How many are not answered yet."""
        return len(self._open)

    def ask(
        self,
        peer_id: PeerId,
        kind: ControlKind,
        request: Message,
        now: float,
        *,
        floors_epoch: int = 0,
    ) -> Ask:
        """Ask a peer something on its control stream."""
        timeout = self._config.exchange_timeout_seconds
        if kind == ControlKind.PING:
            timeout = self._config.membership.probe_timeout_seconds
        elif kind == ControlKind.LEAVE:
            timeout = self._config.leave_timeout_seconds
        token = self._note(Asked(kind, peer_id, 0, now, floors_epoch))
        return Ask(token, peer_id, kind, request, timeout)

    def fetch_snapshot(self, peer_id: PeerId, member: Member, now: float) -> FetchSnapshot:
        """Ask a peer for all that it holds."""
        token = self._note(Asked(None, peer_id, member, now))
        return FetchSnapshot(token, peer_id, member, self._config.snapshot_timeout_seconds)

    def take(self, token: int) -> Asked | None:
        """What the answer with this token is to; None when it is not waited for any more."""
        return self._open.pop(token, None)

    def asked(self, kind: ControlKind) -> list[PeerId]:
        """Who is being asked questions of this kind."""
        return [each.peer_id for each in self._open.values() if each.kind == kind]

    def fetching(self) -> set[Member]:
        """Of whom snapshots are under way."""
        return {each.member for each in self._open.values() if each.kind is None}

    def give_up_lost(self, now: float) -> None:
        """Forget what was never answered."""
        for token in [t for t, a in self._open.items() if a.sent_at + LOST_ANSWER_SECONDS < now]:
            del self._open[token]

    def _note(self, asked: Asked) -> int:
        self.count += 1
        self._open[self.count] = asked
        return self.count
