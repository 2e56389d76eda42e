"""Locations that this peer heard of lately and need not keep: least recently used first out. Pure.

A cached location may be outdated, or made up. Whoever follows it is told so by the holder, and drops it. What a
holder said itself is kept apart from what others say of it, which shows where to look and hides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.directory import Location, Position
from p2pstore.gossip.records import Member, decode_location

HOLDERS_PER_KEY: Final = 64


_Source = tuple[Member, bool]
"""Of whom something was said, and whether by itself."""


@dataclass(frozen=True, slots=True)
class _Heard:
    position: Position
    operation: bytes
    heard_at: float
    hearsay: bool
    """Neither its holder nor a home of the key said so."""

    def follows(self, known: _Heard, *, own_word: bool) -> bool:
        """Whether this counts in place of what was known from the same source. Among what others say that is the
        newer version, not the later place: who names a version that is there is not hidden by who made up a place."""
        if self.hearsay != known.hearsay:
            return not self.hearsay
        if own_word:
            return self.position >= known.position
        mine, theirs = (self._version, self.position), (known._version, known.position)
        return mine > theirs if self.hearsay else mine >= theirs

    @property
    def _version(self) -> tuple[int, int]:
        version = decode_location(self.operation).version
        return version.clock, version.writer


class LocationCache:
    """At most `limit` locations, none older than `seconds`."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._keys: OrderedDict[bytes, dict[_Source, _Heard]] = OrderedDict()
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
        own_word: bool = False,
    ) -> bool:
        """Take in what a member is said to hold (or, `removed`, not to hold) at a place of its log. Whether it
        was news. What homes say goes before hearsay, whatever that claims; and hearsay makes nothing younger that is
        known."""
        digest, source = operation[:16], (member, own_word)
        told = _Heard(position, operation, now, hearsay)
        heard = self._keys.setdefault(digest, {})
        known = heard.get(source)
        if known is None:
            if len(heard) >= HOLDERS_PER_KEY and not (own_word and self._drop_others_word(digest)):
                return False
            self.count += 1
        elif known.heard_at + self._seconds > now and not told.follows(known, own_word=own_word):
            return False
        heard[source] = told
        self._keys.move_to_end(digest)
        while self.count > self._limit:
            _, dropped = self._keys.popitem(last=False)
            self.count -= len(dropped)
        return known is None or known.operation != operation

    def known(self, digests: Set[bytes]) -> set[bytes]:
        """Which of the keys anything was heard of."""
        return {digest for digest in digests if digest in self._keys}

    def holders(self, digest: bytes, now: float, *, hearsay: bool = True) -> list[Location]:
        """Who is said to hold the key, twice who says so as others do; without what is hearsay only, when that is
        not wanted."""
        heard = self._keys.get(digest)
        if heard is None:
            return []
        for source in [s for s, each in heard.items() if each.heard_at + self._seconds <= now]:
            self._drop(digest, source)
        found = []
        for (member, own_word), each in heard.items():
            record = decode_location(each.operation)
            if not record.removed and (hearsay or not each.hearsay):
                found.append(Location(member, *each.position, record, hearsay=not own_word))
        if found:
            self._keys.move_to_end(digest)
        return found

    def deny(self, member: Member, digest: bytes) -> None:
        """The member said that it does not hold the key: it knows best, whatever somebody else said."""
        for own_word in (False, True):
            if (member, own_word) in self._keys.get(digest, {}):
                self._drop(digest, (member, own_word))

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self.count = 0

    def _drop_others_word(self, digest: bytes) -> bool:
        """Make room for a holder's own word. Whether there is any."""
        source = next((each for each in self._keys[digest] if not each[1]), None)
        if source is not None:
            del self._keys[digest][source]
            self.count -= 1
        return source is not None

    def _drop(self, digest: bytes, source: _Source) -> None:
        heard = self._keys[digest]
        del heard[source]
        self.count -= 1
        if not heard:
            del self._keys[digest]
