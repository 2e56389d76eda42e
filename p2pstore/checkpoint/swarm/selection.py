"""Which piece to take next from somebody who offers. Pure.

The rarest that is missing here and not on its way, by what the neighbours have; of equally rare ones any, so that
neighbours take different ones and have something for each other. (Rarest first keeps the number of copies of all pieces
alike: Legout, Urvoy-Keller and Michiardi 2006.)
"""

from __future__ import annotations

from random import Random

from p2pstore.checkpoint.content.piece_map import (
    NO_PIECES,
    Availability,
    PieceMap,
    any_piece,
    full_map,
)


class Selection:
    """What is here, what is on its way, and what to take next."""

    def __init__(
        self, count: int, have: PieceMap, rng: Random, needed: PieceMap | None = None
    ) -> None:
        """`have`: pieces of `count` that are here and verified. `needed`: those that are to be here; None: all."""
        self.count = count
        self.have = have
        self.needed = full_map(count) if needed is None else needed
        self.missing = self.needed & ~have
        self.wanted = self.missing
        """Missing, and not on its way."""
        self.availability = Availability(count)
        """Of the neighbours' pieces."""
        self._rng = rng

    @property
    def complete(self) -> bool:
        """Whether all pieces that are needed are here."""
        return not self.missing

    def choose(self, offered: PieceMap) -> int | None:
        """The piece of `offered` to take; None when nothing in it is wanted."""
        candidates = self.wanted & offered
        if not candidates:
            return None
        return any_piece(self.availability.with_fewest(candidates), self.count, self._rng)

    def need(self, pieces: PieceMap) -> bool:
        """These are to be here as well. Whether any of them was not to be."""
        new = pieces & full_map(self.count) & ~self.needed
        self.needed |= new
        self.missing |= new & ~self.have
        self.wanted |= new & ~self.have
        return bool(new)

    def found(self, pieces: PieceMap) -> PieceMap:
        """These are here, whether they were needed or not. Those that were not."""
        new = pieces & full_map(self.count) & ~self.have
        self.have |= new
        self.needed |= new
        self.missing &= ~new
        self.wanted &= ~new
        return new

    def on_its_way(self, piece: int) -> None:
        """Somebody was asked for the piece."""
        self.wanted &= ~(1 << piece)

    def not_coming(self, piece: int) -> None:
        """Nobody is on it any more."""
        self.wanted |= (1 << piece) & self.missing

    def arrived(self, piece: int) -> bool:
        """The piece is here and verified. Whether it was missing."""
        bit = 1 << piece
        if not self.missing & bit:
            return False
        self.have |= bit
        self.missing ^= bit
        self.wanted &= ~bit
        return True


class HostShare:
    """Which pieces this peer fetches over the network when several peers of its host want the same checkpoint.

    Peer number i of n in the order of their names takes the pieces k with k mod n = i, and gets the others
    from its siblings, through memory or as hard links: so each piece crosses the network once for the host.
    """

    def __init__(self, count: int, own: int) -> None:
        self._count = count
        self._own = own
        self._siblings: set[int] = set()
        self.mask = full_map(count)
        """The pieces that are this peer's to fetch."""

    def siblings(self, members: set[int]) -> None:
        """Who else of this host is at work on it."""
        if members == self._siblings:
            return
        self._siblings = set(members)
        order = sorted({self._own, *members})
        self.mask = stripe(self._count, order.index(self._own), len(order))


def stripe(count: int, first: int, step: int) -> PieceMap:
    """Each `step`th piece of `count`, beginning with `first`."""
    if first >= count:
        return NO_PIECES
    repeats = -(-count // step)
    every = ((1 << step * repeats) - 1) // ((1 << step) - 1)
    return every << first & full_map(count)
