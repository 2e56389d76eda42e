"""Members of a swarm that neighbours tell of: gossip takes a second to say who came. Pure.

Who links tells the others, and is told of them. Only members that gossip knows to be alive are ever dialed, so that
who tells nonsense makes others try in vain at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from p2pstore.checkpoint.swarm.swarm_messages import MAX_INTRODUCED, Members

Member = int

GATHER_SECONDS: Final = 0.05
"""News of so long is told together."""
BELIEVED_SECONDS: Final = 10.0
"""By then, gossip says it."""
MAX_BELIEVED: Final = 1024


class Introductions:
    """What is to be told, and what is believed."""

    def __init__(self) -> None:
        self._linked: list[Member] = []
        self._fresh: list[Member] = []
        self._believed: dict[Member, float] = {}

    def linked(self, member: Member) -> None:
        """There is a link to it now."""
        self._fresh.append(member)

    def unlinked(self, member: Member) -> None:
        """There is none any more."""
        self._linked = [each for each in self._linked if each != member]
        self._fresh = [each for each in self._fresh if each != member]

    @property
    def due(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._fresh) and len(self._linked) + len(self._fresh) > 1

    def take(self) -> list[tuple[list[Member], Members]]:
        """What to tell whom: those who came, of all; the others, of those who came."""
        fresh, known = self._fresh, self._linked
        self._fresh, self._linked = [], known + fresh
        told = [(fresh, Members((fresh + known[::-1])[:MAX_INTRODUCED]))]
        if known:
            told.append((known, Members(fresh[:MAX_INTRODUCED])))
        return told

    def hear(self, members: Iterable[Member], now: float) -> bool:
        """A neighbour tells of these. Whether any is new."""
        self._believed = {each: until for each, until in self._believed.items() if until > now}
        before = len(self._believed)
        for member in members:
            if len(self._believed) < MAX_BELIEVED:
                self._believed.setdefault(member, now + BELIEVED_SECONDS)
        return len(self._believed) > before

    @property
    def believed(self) -> frozenset[Member]:
        """All that neighbours told of lately."""
        return frozenset(self._believed)
