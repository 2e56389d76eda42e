"""With whom a peer of a swarm is connected. Pure.

Some 20 of all participants, chosen at random: with 8 a broadcast to 256 takes 1.2 times as long as with 20, with 40 it
is no faster. A small swarm is connected completely. Whoever comes late is always let in: where all places are taken,
the oldest connection makes room, first one that is of no use (both sides have everything, or need nothing that the
other will have). Now and then an old connection is replaced anyway, and all that are of no use, so that no group stays
among itself. Peers of the same host do not count: they are always connected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

FIRST_DIALS: Final = 10
"""To begin with: others dial as well, so that there will be twice as many."""
FEWEST: Final = 16
MOST: Final = 24
SETTLE_SECONDS: Final = 1.0
"""Until then nobody looks for more than the first connections."""
REFRESH_SECONDS: Final = 5.0
REFRESHED: Final = 2
REDIAL_SECONDS: Final = 5.0
"""A member that could not be reached, or was let go, is left alone for so long."""
DIAL_SECONDS: Final = 30.0
"""A connection that is neither made nor refused by then is forgotten."""


@dataclass(slots=True)
class _Link:
    since: float
    same_host: bool


class Neighbours:
    """Connections that there are, those that are being made, and which to make or end."""

    def __init__(self, own: int, rng: Random, now: float) -> None:
        self._own = own
        self._rng = rng
        self._links: dict[int, _Link] = {}
        self._dialing: dict[int, float] = {}
        self._avoided: dict[int, float] = {}
        """Until when."""
        self._participants: list[int] = []
        self._here: list[int] = []
        self._begin = now
        self._settled = False
        self._next_refresh = now + REFRESH_SECONDS

    @property
    def count(self) -> int:
        """How many connections to other hosts there are."""
        return sum(not link.same_host for link in self._links.values())

    def participants(self, members: Iterable[int], here: Iterable[int]) -> None:
        """All that take part, and those of them that are on this host; this peer or not."""
        siblings = set(here) - {self._own}
        self._here = sorted(siblings)
        self._participants = sorted(set(members) - siblings - {self._own})

    def linked(
        self, member: int, same_host: bool, now: float, worth: Callable[[int], int]
    ) -> int | None:
        """A connection is there, whoever made it. Which one has to go for it: that of least `worth`, of these the
        oldest."""
        self._dialing.pop(member, None)
        if member in self._links:
            return None
        self._links[member] = _Link(now, same_host)
        if same_host or self.count <= MOST:
            return None
        return self._least(worth, but=member)

    def unlinked(self, member: int, now: float, for_good: bool = False) -> None:
        """A connection ended, or could not be made. `for_good`: none is made again."""
        self._dialing.pop(member, None)
        self._links.pop(member, None)
        until = math.inf if for_good else now + REDIAL_SECONDS
        self._avoided[member] = max(until, self._avoided.get(member, 0.0))

    def tick(
        self, now: float, worth: Callable[[int], int], dials: bool = True
    ) -> tuple[list[int], list[int]]:
        """Members to connect to, and to disconnect from. Without `dials` (nothing is needed here) none of both."""
        self._settled = self._settled or now >= self._begin + SETTLE_SECONDS
        refresh = now >= self._next_refresh
        if refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._avoided = {each: until for each, until in self._avoided.items() if until > now}
            self._dialing = {each: until for each, until in self._dialing.items() if until > now}
        if not dials:
            return [], []
        ended: list[int] = []
        if refresh and self.count >= FEWEST and len(self._participants) > MOST:
            useless = sum(
                worth(each) < 0 for each, link in self._links.items() if not link.same_host
            )
            for _ in range(max(REFRESHED, useless)):
                ended.append(self._least(worth))
                self.unlinked(ended[-1], now)
        return self._dials(now), ended

    def next_tick(self) -> float:
        """When `tick` has something to do next."""
        return self._next_refresh if self._settled else self._begin + SETTLE_SECONDS

    def _dials(self, now: float) -> list[int]:
        wanted = FIRST_DIALS if not self._settled else FEWEST
        if len(self._participants) <= MOST:
            wanted = len(self._participants)
        missing = wanted - self.count - len(self._dialing)
        chosen = self._not_linked(self._here, now)
        if missing > 0:
            candidates = self._not_linked(self._participants, now)
            chosen += self._rng.sample(candidates, min(missing, len(candidates)))
        self._dialing |= dict.fromkeys(chosen, now + DIAL_SECONDS)
        return chosen

    def _not_linked(self, members: Iterable[int], now: float) -> list[int]:
        return [
            member
            for member in members
            if member not in self._links
            and member not in self._dialing
            and self._avoided.get(member, 0.0) <= now
        ]

    def _least(self, worth: Callable[[int], int], but: int | None = None) -> int:
        return min(
            (
                member
                for member, link in self._links.items()
                if not link.same_host and member != but
            ),
            key=lambda member: (worth(member), self._links[member].since),
        )
