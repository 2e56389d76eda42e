"""Taking in what an owner pushes to a home, in steps that hold nobody up. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2pstore.gossip.homes.home_updates import CheckedUpdate, HomeUpdate, in_steps
from p2pstore.gossip.locations.directory import Location
from p2pstore.gossip.records import Member

MAX_RIVALS: Final = 64

TakePart = Callable[[Member, CheckedUpdate, int, float], tuple[list[int], list[Location]]]
"""Takes in a part of what an owner says. What to answer: partitions that it should send whole, and at most so
many other versions, at others, of what it pushed."""


class PushIntake:
    """One push. Call `step` until it says that all was taken in; then `behind` and `rivals` are the answer.

    A step takes a few milliseconds. Between two of them anything may happen, other pushes of this owner too: each
    part is taken in as if it had come by itself.
    """

    def __init__(self, owner: Member, update: HomeUpdate, take: TakePart) -> None:
        self.behind: list[int] = []
        """Partitions that the owner should send whole."""
        self.rivals: list[Location] = []
        """Other versions, at others, of what it pushed."""
        self._owner = owner
        self._take = take
        self._parts = in_steps(update)

    def step(self, now: float) -> bool:
        """Go on. Whether all was taken in. Raises `ProtocolError`, before anything was, for nonsense."""
        part = next(self._parts, None)
        if part is None:
            return False
        behind, rivals = self._take(self._owner, part, MAX_RIVALS - len(self.rivals), now)
        self.behind = list(dict.fromkeys([*self.behind, *behind]))
        self.rivals += rivals
        return part.last
