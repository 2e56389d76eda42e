"""Pieces on their way to this peer, and how many more there may be. Pure.

Those that a slow sender holds up take no places of others, up to as many again as there are places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
