"""Claims about members that are passed on with other messages, each a bounded number of times. Pure."""

from __future__ import annotations

from itertools import islice

from p2pstore.gossip.exchange.rumors import Rumors
from p2pstore.gossip.gossip_messages import Claim
from p2pstore.gossip.records import PeerId


class ClaimRumors:
    """The latest claim about each member. It is not told to whom it came from, nor twice running to one peer:
    with few partners that would use up its turns before everybody has heard it."""

    def __init__(self) -> None:
        self._rumors: Rumors[PeerId] = Rumors()
        self._claims: dict[PeerId, Claim] = {}
        self._partner: dict[PeerId, PeerId] = {}

    def __len__(self) -> int:
        """How many claims wait to be passed on."""
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
