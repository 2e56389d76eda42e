"""Whose locations are kept when not all of them can be. Pure.

A member that announces more than a peer can hold is not believed at all. When a directory is full, those make
room who have most: whoever has less than they gets its share, whether it comes first or last.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from p2pstore.gossip.locations.log import MAX_OWN_RECORDS
from p2pstore.gossip.records import Member


class LocationShares:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._refused: set[Member] = set()
        self._told: set[Member] = set()
        self._news: dict[Member, int] = {}

    @property
    def refused(self) -> Set[Member]:
        """Members whose locations are not taken. Changes with what they announce."""
        return self._refused

    def allows(self, member: Member, count: int) -> bool:
        """Whether a member that announces, or has, so many locations is believed from now on."""
        if count <= MAX_OWN_RECORDS:
            self._refused.discard(member)
            return True
        self._refused.add(member)
        if member not in self._told:
            self._told.add(member)
            self._news[member] = count
        return False

    def take_news(self) -> dict[Member, int]:
        """Who was refused for the first time since the last call, and how many locations it announced."""
        news, self._news = self._news, {}
        return news

    def forget(self, member: Member) -> None:
        """The member is not known any more."""
        self._refused.discard(member)
        self._told.discard(member)


def who_makes_room(
    counts: Mapping[Member, int], member: Member, wanted: int, missing: int
) -> list[Member]:
    """Whose locations to drop, the most first, so that a member may have `wanted` of them where `missing` do not
    fit: others who have more than that. Nobody when that does not give room enough."""
    dropped: list[Member] = []
    if missing > 0:
        larger = [
            (count, other) for other, count in counts.items() if other != member and count > wanted
        ]
        for count, other in sorted(larger, reverse=True):
            dropped.append(other)
            missing -= count
            if missing <= 0:
                return dropped
    return []
