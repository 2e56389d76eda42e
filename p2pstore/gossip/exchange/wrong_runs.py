"""Who passed on operations that their owner did not sign. Pure.

An honest peer checks what it passes on, so the sender made it up, or is broken. Of such a sender no operations are
taken any more, until it starts again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from p2pstore.gossip.records import PeerId

MAX_SENDERS: Final = 1_024

Life = tuple[PeerId, int]
"""A peer, and its incarnation as it is known."""


class WrongRuns:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._senders: OrderedDict[PeerId, int] = OrderedDict()
        self._news: dict[PeerId, PeerId] = {}

    def come_from(self, sender: Life) -> bool:
        """Whether nothing is taken from this sender."""
        peer_id, incarnation = sender
        return incarnation <= self._senders.get(peer_id, -1)

    def note(self, sender: Life, owner: PeerId) -> None:
        """The sender passed on what the owner did not sign."""
        peer_id, incarnation = sender
        self._senders[peer_id] = incarnation
        self._senders.move_to_end(peer_id)
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        if len(self._news) < MAX_SENDERS:
            self._news[peer_id] = owner

    def take_news(self) -> dict[PeerId, PeerId]:
        """Who passed on wrong operations since the last call, and whose log they were said to be of."""
        news, self._news = self._news, {}
        return news
