"""Which piece to take next from somebody who offers. Pure.

The rarest that is missing here and not on its way, by what the neighbours have; of equally rare ones any, so that
neighbours take different ones and have something for each other. (Rarest first keeps the number of copies of all pieces
alike: Legout, Urvoy-Keller and Michiardi 2006.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from p2pstore.checkpoint.content.pieces import (
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


@dataclass(slots=True, eq=False)
class Flight:
    """A piece on its way from one member."""

    member: int
    same_host: bool
    since: float
    deadline: float
    held_up_at: float
    """When its sender turns out to be slow; -infinity when that is known."""


class Flights:
    """Each piece comes from one member at most, or in the end from two."""

    def __init__(self) -> None:
        self.over_network = 0
        self.within_host = 0
        self.held_up = 0
        """Of those over the network."""
        self._flights: dict[int, list[Flight]] = {}

    def __bool__(self) -> bool:
        return bool(self._flights)

    def __iter__(self) -> Iterator[tuple[int, Flight]]:
        """All of them, by piece."""
        for piece, flights in self._flights.items():
            for flight in flights:
                yield piece, flight

    def of(self, piece: int) -> Sequence[Flight]:
        """Those of one piece, the first one first."""
        return self._flights.get(piece, ())

    def alone(self) -> list[tuple[int, Flight]]:
        """Pieces that come from one member only."""
        return [
            (piece, flights[0]) for piece, flights in self._flights.items() if len(flights) == 1
        ]

    def pieces_from(self, member: int) -> list[int]:
        """What comes from this member."""
        return [piece for piece, flight in self if flight.member == member]

    def has_room(self, places: int) -> bool:
        """Whether another one may come over the network when there are so many places."""
        return self.over_network - min(self.held_up, places) < places

    def begin(self, piece: int, flight: Flight) -> None:
        """A member was asked for a piece."""
        self._flights.setdefault(piece, []).append(flight)
        if flight.same_host:
            self.within_host += 1
        else:
            self.over_network += 1
            self.held_up += flight.held_up_at == -math.inf

    def end(self, member: int, piece: int) -> Flight | None:
        """The piece came from this member, or does not any more; None when it was not on its way."""
        flights = self._flights.get(piece, [])
        found = next((flight for flight in flights if flight.member == member), None)
        if found is None:
            return None
        flights.remove(found)
        if not flights:
            del self._flights[piece]
        if found.same_host:
            self.within_host -= 1
        else:
            self.over_network -= 1
            self.held_up -= found.held_up_at == -math.inf
        return found

    def overdue(self, now: float) -> list[tuple[int, Flight]]:
        """Those whose deadline has passed."""
        return [(piece, flight) for piece, flight in self if flight.deadline <= now]

    def mark_held_up(self, now: float) -> None:
        """See which ones their senders hold up by now."""
        for _, flight in self:
            if -math.inf < flight.held_up_at <= now:
                flight.held_up_at = -math.inf
                self.held_up += not flight.same_host

    def next_change(self) -> float:
        """When the next one is overdue or held up; infinity when there is none."""
        soonest = math.inf
        for _, flight in self:
            soonest = min(soonest, flight.deadline)
            if flight.held_up_at > -math.inf:
                soonest = min(soonest, flight.held_up_at)
        return soonest
