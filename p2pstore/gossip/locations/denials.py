"""Locations that their owners denied: what a view says of them counts again once it is past the denial. Pure."""

from __future__ import annotations

from collections.abc import KeysView

from p2pstore.gossip.locations.log import Position
from p2pstore.gossip.locations.published_locations import ApartKeys
from p2pstore.gossip.records import Member


class Denials:
    """At most `limit` denials; the oldest go first. Each belongs to a place in its owner's log."""

    def __init__(self, limit: int, apart: ApartKeys | None = None) -> None:
        self._limit = limit
        self._apart = apart or ApartKeys()
        self._positions: dict[tuple[bytes, Member], Position] = {}
        self._members: dict[bytes, set[Member]] = {}
        """Who denied each digest."""

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def digests(self) -> KeysView[bytes]:
        """What anybody denied."""
        return self._members.keys()

    def note(self, member: Member, digest: bytes, position: Position) -> None:
        """The owner lacked the key at this place of its log."""
        key = (digest, member)
        self._positions[key] = max(self._positions.pop(key, (0, 0)), position)
        if digest not in self._members:
            self._members[digest] = set()
            self._apart.add(digest)
        self._members[digest].add(member)
        while len(self._positions) > self._limit:
            self._forget(next(iter(self._positions)))

    def covers(
        self, member: Member, digest: bytes, position: Position, *, hearsay: bool = False
    ) -> bool:
        """Whether what the owner said at `position` is denied. A denial that is past is forgotten, but not because
        others claim a place that is."""
        key = (digest, member)
        denied = self._positions.get(key)
        if denied is None:
            return False
        if position <= denied:
            return True
        if not hearsay:
            self._forget(key)
        return False

    def _forget(self, key: tuple[bytes, Member]) -> None:
        digest, member = key
        del self._positions[key]
        members = self._members[digest]
        members.discard(member)
        if not members:
            del self._members[digest]
            self._apart.remove(digest)
