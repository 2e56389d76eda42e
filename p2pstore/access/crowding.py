"""Connections whose other side has not proved itself yet: few, and shared fairly among hosts. Pure.

A host that opens thousands of connections fills the table. When it is full, room for another host comes from the host
that has the most: it loses the connection that has waited longest.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
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
"""The same of a host (`strangers.host_group`)."""


class Holder(NamedTuple):
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


def crowd(holders: Sequence[Holder]) -> Crowd:
    """The largest owners; empty where all places are free."""
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
