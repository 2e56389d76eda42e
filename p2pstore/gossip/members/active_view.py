"""The members that exchanges and eager messages go to: at most 32, whatever the size of the cluster. Pure.

A connection costs some 5 ms of CPU at each end, and 50 kB as long as it is open, so a peer talks mostly to a
few. These few are a uniform sample of the live members: a newcomer takes the place of a random one with
the probability that a sample of this size would hold it, one that dies or leaves is replaced at once, and
every ten seconds one is exchanged for a random other. The neighbours of all peers together are a random
graph of degree 32 or more, which is connected as long as anything like 3 of the 32 are alive; the turning
over mends what bad luck or a mass death tore.
"""

from __future__ import annotations

import math
from random import Random
from typing import Final

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberChange, MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import PeerId

ROTATION_SECONDS: Final = 10.0
"""A new connection costs both ends some 5 ms of CPU: so 0.1 % of a core goes into turning over."""
MAX_NEIGHBOURS: Final = 32


class ActiveView:
    """See the module's docstring. With no more than `limit` others, all of them are neighbours.

    Nothing here takes time in proportion to the size of the cluster, except the list of live members that
    `Membership` makes anew after one came or went.
    """

    def __init__(
        self,
        membership: Membership,
        rng: Random,
        limit: int = MAX_NEIGHBOURS,
        rotation_seconds: float = ROTATION_SECONDS,
    ) -> None:
        self._membership = membership
        self._rng = rng
        self._limit = limit
        self._rotation_seconds = rotation_seconds
        self._rotate_at = -math.inf
        self._neighbours: list[PeerId] = []
        self._members: set[PeerId] = set()
        self._seen_version = -1
        self._failed_at: dict[PeerId, float] = {}
        self.version = 0
        """Grows whenever the neighbours change."""

    def neighbours(self) -> list[PeerId]:
        """At most `limit` live members, in no particular order."""
        self._mend()
        return list(self._neighbours)

    def choose(self) -> MemberState | None:
        """A random neighbour; None without another live member. A suspected or silent one is chosen only if a second
        draw is such a one, too: it must hear what is said of it, but not hold up everything else."""
        self._mend()
        if not self._neighbours:
            return None
        state = self._draw()
        return self._draw() if self._is_doubtful(state) else state

    def sample(self, count: int) -> list[MemberState]:
        """Up to `count` different neighbours in random order, the doubtful ones last."""
        self._mend()
        states = [
            state
            for peer_id in self._rng.sample(self._neighbours, len(self._neighbours))
            if (state := self._membership.get(peer_id)) is not None
        ]
        states.sort(key=self._is_doubtful)
        return states[:count]

    def failed(self, peer_id: PeerId, now: float) -> None:
        """A neighbour did not answer: others are preferred until it is heard of."""
        if peer_id in self._members:
            self._failed_at[peer_id] = now

    def follow(self, change: MemberChange) -> None:
        """A member's status changed. A newcomer becomes a neighbour with probability limit / others."""
        came = change.new <= Status.SUSPECT and (change.old is None or change.old > Status.SUSPECT)
        if not came:
            return
        self._mend()
        others = len(self._membership.others())
        if len(self._neighbours) < self._limit or not self._can_hold(change.peer_id):
            return
        if self._rng.random() * others < self._limit:
            self._replace(self._rng.randrange(len(self._neighbours)), change.peer_id)

    def tick(self, now: float) -> None:
        """Exchange one neighbour for another member when it is time to."""
        if now < self._rotate_at:
            return
        if self._rotate_at == -math.inf:  # not all peers of a cluster that was started at once together
            self._rotate_at = now + self._rotation_seconds * self._rng.random()
            return
        self._rotate_at = now + self._rotation_seconds
        self._mend()
        if len(self._membership.others()) > len(self._neighbours):
            self._replace(self._rng.randrange(len(self._neighbours)), self._stranger())

    def due(self) -> float:
        """When `tick` has something to do; infinity while all members are neighbours."""
        if len(self._membership.others()) <= self._limit:
            return math.inf
        return self._rotate_at

    def _draw(self) -> MemberState:
        state = self._membership.get(self._rng.choice(self._neighbours))
        assert state is not None, "`_mend` dropped who is not a member any more"
        return state

    def _is_doubtful(self, state: MemberState) -> bool:
        failed_at = self._failed_at.get(state.peer_id, -math.inf)
        return state.status is not Status.ALIVE or failed_at > state.heard_at

    def _can_hold(self, peer_id: PeerId) -> bool:
        """Whether it may be a neighbour, and is none yet."""
        membership = self._membership
        return peer_id != membership.me and membership.is_live(peer_id) and peer_id not in self._members

    def _mend(self) -> None:
        """Drop members that are not live any more, and fill up."""
        if self._seen_version == self._membership.version:
            return
        self._seen_version = self._membership.version
        others = self._membership.others()
        live = list(filter(self._membership.is_live, self._neighbours))
        if len(live) != len(self._neighbours):
            self._set(live)
        missing = min(self._limit, len(others)) - len(self._neighbours)
        if missing > 0:
            self._fill(others, missing)

    def _fill(self, others: list[MemberState], missing: int) -> None:
        if len(others) <= 2 * self._limit:
            outside = [s.peer_id for s in others if s.peer_id not in self._members]
            self._set(self._neighbours + self._rng.sample(outside, missing))
            return
        for _ in range(missing):
            self._set([*self._neighbours, self._stranger()])

    def _stranger(self) -> PeerId:
        """A random live member that is no neighbour; there is one."""
        others = self._membership.others()
        if len(others) <= 2 * self._limit:
            return self._rng.choice([s.peer_id for s in others if s.peer_id not in self._members])
        while (peer_id := self._rng.choice(others).peer_id) in self._members:
            pass  # each draw succeeds with probability over 1/2
        return peer_id

    def _replace(self, place: int, peer_id: PeerId) -> None:
        changed = list(self._neighbours)
        changed[place] = peer_id
        self._set(changed)

    def _set(self, neighbours: list[PeerId]) -> None:
        self._neighbours = neighbours
        self._members = set(neighbours)
        self._failed_at = {p: at for p, at in self._failed_at.items() if p in self._members}
        self.version += 1
