"""Locations that this peer heard of lately and need not keep: least recently used first out. Pure.

A cached location may be outdated. Whoever follows it is told so by the holder, and drops it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.directory import Location, Position
from p2pstore.gossip.records import Member, decode_location

HOLDERS_PER_KEY: Final = 64


@dataclass(frozen=True, slots=True)
class _Heard:
    position: Position
    operation: bytes
    heard_at: float
    hearsay: bool
    """Neither its holder nor a home of the key said so."""


class LocationCache:
    """At most `limit` locations, none older than `seconds`."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._keys: OrderedDict[bytes, dict[Member, _Heard]] = OrderedDict()
        self.count = 0
        """Locations in the cache."""

    def learn(
        self,
        member: Member,
        position: Position,
        operation: bytes,
        now: float,
        *,
        hearsay: bool = False,
    ) -> bool:
        """Take in what a member is said to hold (or, `removed`, not to hold) at a place of its log. Whether it
        was news. What holders and homes say themselves goes before hearsay, whatever place that claims; and
        hearsay makes nothing younger that is known."""
        digest = operation[:16]
        heard = self._keys.setdefault(digest, {})
        known = heard.get(member)
        if known is None:
            if len(heard) >= HOLDERS_PER_KEY:
                return False
            self.count += 1
        elif hearsay > known.hearsay or (
            hearsay == known.hearsay
            and (known.position > position or (hearsay and known.position == position))
        ):
            return False
        heard[member] = _Heard(position, operation, now, hearsay)
        self._keys.move_to_end(digest)
        while self.count > self._limit:
            _, dropped = self._keys.popitem(last=False)
            self.count -= len(dropped)
        return known is None or known.operation != operation

    def known(self, digests: Set[bytes]) -> set[bytes]:
        """Which of the keys anything was heard of."""
        return {digest for digest in digests if digest in self._keys}

    def holders(self, digest: bytes, now: float, *, hearsay: bool = True) -> list[Location]:
        """Who is said to hold the key; without what is hearsay only, when that is not wanted."""
        heard = self._keys.get(digest)
        if heard is None:
            return []
        for member in [m for m, each in heard.items() if each.heard_at + self._seconds <= now]:
            self._drop(digest, member)
        found = []
        for member, each in heard.items():
            record = decode_location(each.operation)
            if not record.removed and (hearsay or not each.hearsay):
                found.append(Location(member, *each.position, record, in_log=False))
        if found:
            self._keys.move_to_end(digest)
        return found

    def deny(self, member: Member, digest: bytes) -> None:
        """The member said that it does not hold the key: it knows best, whatever somebody else said."""
        if member in self._keys.get(digest, {}):
            self._drop(digest, member)

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self.count = 0

    def _drop(self, digest: bytes, member: Member) -> None:
        heard = self._keys[digest]
        del heard[member]
        self.count -= 1
        if not heard:
            del self._keys[digest]
