"""The links of a peer of a swarm: which to make, and which to end. Pure.

A peer has some 20 links to random participants: with 8 a broadcast to 256 takes 1.2 times as long as with 20, with 40
it is no faster. A small swarm is linked completely. A newcomer is always let in: where all places are taken, the oldest
link makes room, first a useless one (both sides have everything, or need nothing that the other will have). From time
to time an old link is replaced, and all useless ones, so that no group stays among itself. Links to peers of the same
host are always made, and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

FIRST_DIALS: Final = 10
"""At first; others dial as well, so that there will be twice that number of links."""
FEWEST: Final = 16
MOST: Final = 24
SETTLE_SECONDS: Final = 1.0
"""Until then only the first links are made."""
REFRESH_SECONDS: Final = 5.0
REFRESHED: Final = 2
REDIAL_SECONDS: Final = 5.0
"""A member that could not be reached, or was let go, is not dialed for this time."""
DIAL_SECONDS: Final = 30.0
"""A dial without a result by then is forgotten."""


@dataclass(slots=True)
class _Link:
    since: float
    same_host: bool


class Neighbours:
    """Links, dials under way, and members not to dial now."""

    def __init__(self, own: int, rng: Random, now: float) -> None:
        self._own = own
        self._rng = rng
        self._links: dict[int, _Link] = {}
        self._dialing: dict[int, float] = {}
        self._avoided: dict[int, float] = {}
        """Until when a member is not dialed."""
        self._participants: list[int] = []
        self._here: list[int] = []
        self._begin = now
        self._settled = False
        self._next_refresh = now + REFRESH_SECONDS

    @property
    def count(self) -> int:
        """Links to other hosts."""
        return sum(not link.same_host for link in self._links.values())

    def participants(self, members: Iterable[int], here: Iterable[int]) -> None:
        """Set all participants, and those on this host; perhaps with this peer."""
        siblings = set(here) - {self._own}
        self._here = sorted(siblings)
        self._participants = sorted(set(members) - siblings - {self._own})

    def linked(
        self, member: int, same_host: bool, now: float, worth: Callable[[int], int]
    ) -> int | None:
        """A link is there, dialed by either side. Returns the link that makes room for it: the one of least `worth`,
        among these the oldest."""
        self._dialing.pop(member, None)
        if member in self._links:
            return None
        self._links[member] = _Link(now, same_host)
        if same_host or self.count <= MOST:
            return None
        return self._least(worth, but=member)

    def unlinked(self, member: int, now: float, for_good: bool = False) -> None:
        """A link ended, or could not be made. `for_good`: it is not made again."""
        self._dialing.pop(member, None)
        self._links.pop(member, None)
        until = math.inf if for_good else now + REDIAL_SECONDS
        self._avoided[member] = max(until, self._avoided.get(member, 0.0))

    def tick(
        self, now: float, worth: Callable[[int], int], dials: bool = True
    ) -> tuple[list[int], list[int]]:
        """Members to dial, and links to end. Without `dials` (nothing is needed here), none of both."""
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
        """Time of the next `tick`."""
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
