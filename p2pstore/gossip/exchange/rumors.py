"""Rumours: passed on with the next messages, each a bounded number of times, least often sent first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from p2pstore.gossip.gossip_messages import Claim
from p2pstore.gossip.records import PeerId

Name = TypeVar("Name")


class Rumors(Generic[Name]):
    """Names by how often they were sent. Taking some costs no more than their number."""

    def __init__(self) -> None:
        self._sent: dict[Name, int] = {}
        self._levels: list[dict[Name, None]] = []
        """By how often they were sent; within that, the oldest first."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, name: Name) -> None:
        """Begin with a rumour, or begin it anew."""
        self.discard(name)
        self._put(name, 0)

    def discard(self, name: Name) -> None:
        """End a rumour; nothing happens when there is none."""
        level = self._sent.pop(name, None)
        if level is not None:
            del self._levels[level][name]
            if not self._sent:
                self.clear()  # a dictionary that was large once stays so

    def clear(self) -> None:
        self._sent.clear()
        self._levels.clear()

    def least_sent(self) -> Iterator[Name]:
        """All of them, those first that were sent least. Call nothing else before it is closed."""
        for level in self._levels:
            yield from level

    def sent(self, name: Name, times: int) -> bool:
        """It was sent once more; after `times` it ends. Whether it goes on."""
        count = self._sent[name] + 1
        self.discard(name)
        if count < times:
            self._put(name, count)
        return count < times

    def _put(self, name: Name, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append({})
        self._levels[level][name] = None
        self._sent[name] = level


class ClaimRumors:
    """The latest claim about each member. It is not told to the peer that it came from, nor twice running to one peer:
    with few partners that would use up its turns before all have heard it."""

    def __init__(self) -> None:
        self._rumors: Rumors[PeerId] = Rumors()
        self._claims: dict[PeerId, Claim] = {}
        self._partner: dict[PeerId, PeerId] = {}

    def __len__(self) -> int:
        return len(self._rumors)

    def spread(self, claim: Claim) -> None:
        """Pass a claim on, in place of any other about this member."""
        self._claims[claim.peer_id] = claim
        self._rumors.add(claim.peer_id)
        self._partner.pop(claim.peer_id, None)

    def known_to(self, peer_id: PeerId, partner: PeerId) -> None:
        """`partner` knows what the claim about the member `peer_id` says."""
        if peer_id in self._claims:
            self._partner[peer_id] = partner

    def take(self, to: PeerId | None, count: int, times: int) -> list[Claim]:
        """Up to `count` claims for a message to `to`, the least sent first; each is sent `times` times in all."""
        fit = (
            peer_id
            for peer_id in self._rumors.least_sent()
            if to is None or self._partner.get(peer_id) != to
        )
        chosen = list(islice(fit, count))
        claims = [self._claims[peer_id] for peer_id in chosen]
        for peer_id in chosen:
            if not self._rumors.sent(peer_id, times):
                self.discard(peer_id)
            elif to is not None:
                self._partner[peer_id] = to
        return claims

    def discard(self, peer_id: PeerId) -> None:
        """Say no more about a member."""
        self._rumors.discard(peer_id)
        self._claims.pop(peer_id, None)
        self._partner.pop(peer_id, None)
        if not self._claims:  # a dictionary that was large once stays so
            self._claims.clear()
            self._partner.clear()
