"""What a publisher sends while nobody else has the whole checkpoint. Pure.

It is the only one with pieces that nobody else has, so it lets nobody choose: it names the piece that it sent least, of
these the rarest among its neighbours. So after as many pieces as there are, each is in the swarm, and the publisher's
link has carried the checkpoint once. (BitTorrent's BEP 16 has the idea.) When receivers choose the rarest piece
instead, many choose the same, and a broadcast takes longer.

Several publishers of one version see by their neighbours' maps what the others have sent.
"""

from __future__ import annotations

from random import Random

from p2pstore.checkpoint.content.piece_map import NO_PIECES, Availability, PieceMap, any_piece


class SuperSeeding:
    """What was sent how often, until everything was."""

    def __init__(self, count: int, rng: Random, copies: PieceMap = NO_PIECES) -> None:
        """`copies`: pieces that receivers make of others, and need not be sent."""
        self._sent = Availability(count)
        self._sent.add(copies)
        self._rng = rng

    @property
    def over(self) -> bool:
        """Whether each piece was sent, so that receivers may choose."""
        return not self._sent.count or self._sent.fewest() > 0

    def choose(self, lacked: PieceMap, availability: Availability) -> int:
        """The piece to send to somebody who lacks these (at least one)."""
        least_sent = self._sent.with_fewest(lacked)
        rarest = availability.with_fewest(least_sent)
        return any_piece(rarest, self._sent.count, self._rng)

    def sending(self, piece: int) -> None:
        """The piece is promised to somebody."""
        self._sent.add(1 << piece)

    def not_sent(self, piece: int) -> None:
        """It did not get there."""
        self._sent.remove(1 << piece)
