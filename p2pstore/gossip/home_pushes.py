"""New locations on their way to the home peers of their keys, ahead of gossip. Pure."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from p2pstore.gossip.effects import Push
from p2pstore.gossip.membership import Membership
from p2pstore.gossip.placement import batch_by_home
from p2pstore.gossip.records import Member

PUSH_WORK: Final = 25_000
"""Operations times members in one batch: each costs 0.15 us to find a key's homes. The rest goes with the
next."""
MAX_TO_PUSH: Final = 65_536
"""Operations that wait: by the time that it is their turn, gossip has told of older ones."""


class HomePushes:
    """Batches operations for `batch_seconds`, the first one at once."""

    def __init__(self, membership: Membership, batch_seconds: float) -> None:
        self._membership = membership
        self._batch_seconds = batch_seconds
        self._pushed_at = -math.inf
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MAX_TO_PUSH)

    def add(self, sequence: int, operation: bytes) -> None:
        """An operation of this peer's log."""
        self._waiting.append((sequence, operation))

    def clear(self) -> None:
        """The log begins anew: what waits belongs to the old one."""
        self._waiting.clear()

    def due(self) -> float:
        """When `take` has something; infinity when nothing waits."""
        return self._pushed_at + self._batch_seconds if self._waiting else math.inf

    def take(self, incarnation: int, members: list[Member], now: float) -> list[Push]:
        """The batch that is due now, by home; `members` are all live ones."""
        if now < self.due():
            return []
        self._pushed_at = now
        count = min(len(self._waiting), max(1, PUSH_WORK // (8 + len(members))))
        fresh = [self._waiting.popleft() for _ in range(count)]
        pushes = []
        for member, (sequences, operations) in batch_by_home(fresh, members).items():
            state = self._membership.resolve(member)
            if state is not None and state is not self._membership.own:
                pushes.append(Push(state.peer_id, incarnation, sequences, operations))
        return pushes
