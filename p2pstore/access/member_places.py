"""Who makes room when all places for connections are taken: members are admitted, but not trusted with all. Pure.

A connection without use yields to any that is wanted now. One in use yields only where many are of one member or of
one host, to a newcomer of another one: who has many takes places from himself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

MEMBER_SHARE: Final = 4
"""A member with this part of all places, and more, makes room for others even where all are in use."""
HOST_SHARE: Final = 2
"""The same of a host (`strangers.host_group`)."""


class Holder(NamedTuple):
    """Who has a place. `busy`: whether it is in use now; `used_at`: when it last was."""

    host: str
    member: bytes
    busy: bool
    used_at: float


class Crowd(NamedTuple):
    """The member and the host that have most places."""

    member: bytes
    member_places: int
    host: str
    host_places: int


def crowd(holders: Sequence[Holder]) -> Crowd:
    """Of all that have places; nobody's where all are free."""
    members = Counter(each.member for each in holders).most_common(1)
    hosts = Counter(each.host for each in holders).most_common(1)
    return Crowd(*(members[0] if members else (b"", 0)), *(hosts[0] if hosts else ("", 0)))


def yielding(holders: Sequence[Holder], host: str, member: bytes, limit: int) -> int | None:
    """The index of the holder that makes room for a newcomer when all `limit` places are taken; None for that the
    newcomer has to go.

    1. Of those not in use: of the host that has most places, there of the member that has most, there the one that
       was used longest ago.
    2. Where all are in use: likewise, of a host that has half of all places when the newcomer is from another one, or
       of a member that has a quarter when the newcomer is another one.
    """
    hosts = Counter(each.host for each in holders)
    members = Counter(each.member for each in holders)

    def may_yield(each: Holder) -> bool:
        if not each.busy:
            return True
        if each.host != host and hosts[each.host] * HOST_SHARE >= limit:
            return True
        return each.member != member and members[each.member] * MEMBER_SHARE >= limit

    candidates = [place for place, each in enumerate(holders) if may_yield(each)]
    return min(
        candidates,
        key=lambda place: (
            holders[place].busy,
            -hosts[holders[place].host],
            -members[holders[place].member],
            holders[place].used_at,
        ),
        default=None,
    )
