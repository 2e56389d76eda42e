"""Which connections go when there are too many, or no use for them: of strangers, of members, of this peer. Pure.

Strangers have not proved themselves yet: few may wait, shared fairly among hosts. When the table is full, room for
another host comes from the host that has the most: it loses the connection that has waited longest.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_NETWORK_BITS: Final = 64
"""An IPv6 customer has at least a /64: its addresses count as one host."""


def host_group(host: str) -> str:
    """The unit that counts as one host: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


class Strangers(Generic[T]):
    """At most `limit` connections in all, and `per_host` of one host. A connection is any hashable thing."""

    def __init__(self, limit: int, per_host: int) -> None:
        self.limit = limit
        self.per_host = per_host
        self._by_host: dict[str, dict[T, None]] = {}
        self._host_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def arrive(self, host: str, connection: T) -> T | None:
        """A connection from `host` came. Returns the connection to drop for it: None, the longest waiting one of
        the host that has most, or the newcomer itself, which then is not in the table."""
        group = host_group(host)
        own = self._by_host.get(group, {})
        if len(own) >= self.per_host:
            return connection
        dropped: T | None = None
        if len(self) >= self.limit:
            crowd = max(self._by_host.values(), key=len)
            if len(own) >= len(crowd):
                return connection
            dropped = next(iter(crowd))
            self.leave(dropped)
        self._by_host.setdefault(group, {})[connection] = None
        self._host_of[connection] = group
        return dropped

    def leave(self, connection: T) -> None:
        """It proved itself, or ended. May be called twice."""
        group = self._host_of.pop(connection, None)
        if group is not None:
            own = self._by_host[group]
            del own[connection]
            if not own:
                del self._by_host[group]


MEMBER_SHARE: Final = 4
"""A member with this part of all places, and more, makes room for others even where all are in use."""
HOST_SHARE: Final = 2
"""The same of a host (`host_group`)."""


class PlaceOwner(NamedTuple):
    """The owner of a place. `busy`: in use now; `used_at`: its last use."""

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


def crowd(holders: Sequence[PlaceOwner]) -> Crowd:
    """The largest owners; empty where all places are free."""
    members = Counter(each.member for each in holders).most_common(1)
    hosts = Counter(each.host for each in holders).most_common(1)
    return Crowd(*(members[0] if members else (b"", 0)), *(hosts[0] if hosts else ("", 0)))


def yielding(holders: Sequence[PlaceOwner], host: str, member: bytes, limit: int) -> int | None:
    """The index of the holder that makes room for a newcomer when all `limit` places are taken; None for that the
    newcomer has to go.

    1. Of those not in use: of the host that has most places, there of the member that has most, there the one that
       was used longest ago.
    2. Where all are in use: likewise, of a host that has half of all places when the newcomer is from another one, or
       of a member that has a quarter when the newcomer is another one.
    """
    hosts = Counter(each.host for each in holders)
    members = Counter(each.member for each in holders)

    def may_yield(each: PlaceOwner) -> bool:
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


SPARE_AFTER_SECONDS: Final = 1.0
"""Before this a connection is not idle: its opener is about to use it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """When connections of members are closed: idle ones, and the longest unused when there are too many.

    A connection with a neighbour stays open. Others are opened for a probe or a contact, and stay for a while, as
    opening costs much and holding only memory. Its opener closes it when it has no use for it; the other side may open
    its own. Over the limit both sides close, of the host and member that have most, never one with requests under way.
    `idle_seconds` is above one round of probes at 100 members: there all stay connected. `max_open` bounds memory, some
    50 kB a connection.
    """

    idle_seconds: float = 120.0
    max_open: int = 192


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one connection."""

    kept: bool
    """Whether its other end is a neighbour."""
    opened_here: bool
    busy: bool
    """Whether requests are under way on it, in either direction."""
    used_at: float
    host: str = ""
    """The host of the other end (`host_group`)."""
    member: bytes = b""
    """The peer id of the other end; empty for a stranger."""


def idle(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those that this side opened and has no more use for."""
    return [
        place
        for place, use in enumerate(uses)
        if use.opened_here and not (use.kept or use.busy) and use.used_at + limits.idle_seconds <= now
    ]


def surplus(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those to close because there are too many: the longest unused ones of the member that has most, of
    those at the host that has most; too few when the others are in use."""
    spare = {
        place
        for place, use in enumerate(uses)
        if not use.kept and not use.busy and use.used_at + SPARE_AFTER_SECONDS <= now
    }
    hosts = Counter(use.host for use in uses)
    members = Counter(use.member for use in uses)
    chosen: list[int] = []
    while spare and len(uses) - len(chosen) > limits.max_open:
        place = min(
            spare,
            key=lambda each: (
                -hosts[uses[each].host],
                -members[uses[each].member],
                uses[each].used_at,
                each,
            ),
        )
        spare.remove(place)
        chosen.append(place)
        hosts[uses[place].host] -= 1
        members[uses[place].member] -= 1
    return chosen


def next_due(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> float:
    """When to look again, if nothing is opened or closed before; infinity for never."""
    due = min(
        (
            (now if use.busy else use.used_at) + limits.idle_seconds
            for use in uses
            if use.opened_here and not use.kept
        ),
        default=math.inf,
    )
    if len(uses) > limits.max_open:
        due = min(due, now + SPARE_AFTER_SECONDS)
    return due
