"""Operations that were pushed here ahead of their owner's log, until that log tells of them itself. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Mapping, Set
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.log import Position
from p2pstore.gossip.locations.published_locations import ApartKeys
from p2pstore.gossip.records import Member
from p2pstore.objects import DIGEST_BYTES

EXPIRED_AT_ONCE: Final = 1_024
"""A microsecond each."""

_NONE: Final[Mapping[Member, EarlyOperation]] = {}


@dataclass(frozen=True, slots=True)
class EarlyOperation:
    """A packed operation at a place of its owner's log."""

    position: Position
    operation: bytes
    hearsay: bool = False
    """Its owner did not say so itself: it shows where to look, and nothing else."""


class EarlyOperations:
    """The newest operation of each key and owner. The oldest go after `kept_seconds`: the log must have told of them by
    then. When there are over `limit`, the oldest of the owner that has most go: one that pushes much pushes out
    nothing of others. What the log told of goes at once."""

    def __init__(self, limit: int, kept_seconds: float, apart: ApartKeys | None = None) -> None:
        self._limit = limit
        self._apart = apart or ApartKeys()
        self._kept_seconds = kept_seconds
        self._entries: dict[bytes, dict[Member, EarlyOperation]] = {}
        self._order: OrderedDict[tuple[bytes, Member], float] = OrderedDict()
        """When each came, the oldest first."""
        self._owners: dict[Member, OrderedDict[bytes, None]] = {}
        """The same, by owner."""
        self._largest: Member | None = None
        """Who had most when that was looked for."""
        self._until_look = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def digests(self) -> KeysView[bytes]:
        """What they are about."""
        return self._entries.keys()

    def of(self, digest: bytes) -> Mapping[Member, EarlyOperation]:
        """The newest operation of each owner about this key."""
        return self._entries.get(digest, _NONE)

    def note(
        self,
        member: Member,
        position: Position,
        operation: bytes,
        now: float,
        *,
        hearsay: bool = False,
    ) -> bool:
        """Keep an operation. False when one of the same key is as new. What the owner says itself goes before
        hearsay, whatever place that claims."""
        digest = operation[:DIGEST_BYTES]
        known = self._entries.get(digest, _NONE).get(member)
        if known is not None and (
            hearsay > known.hearsay or (hearsay == known.hearsay and position <= known.position)
        ):
            return False
        if digest not in self._entries:
            self._entries[digest] = {}
            self._apart.add(digest)
        self._entries[digest][member] = EarlyOperation(position, operation, hearsay)
        self._order[digest, member] = now
        self._order.move_to_end((digest, member))
        own = self._owners.setdefault(member, OrderedDict())
        own[digest] = None
        own.move_to_end(digest)
        while len(self._order) > self._limit:
            owner = self._who_makes_room(member)
            self._drop(next(iter(self._owners[owner])), owner)
        return True

    def _who_makes_room(self, newest: Member) -> Member:
        """An owner that has more than an even share. To look through all costs some: that is done once for as many
        operations as there are owners; in between the owner of the oldest makes room where none is known."""
        share = self._limit // len(self._owners)
        for member in (self._largest, newest):
            if member is not None and len(self._owners.get(member, ())) > share:
                return member
        if self._until_look > 0:
            self._until_look -= 1
            return next(iter(self._order))[1]
        self._until_look = len(self._owners)
        self._largest = max(self._owners, key=lambda member: len(self._owners[member]))
        return self._largest

    def expire(self, now: float) -> None:
        """Drop some of what was pushed so long ago that the log must have told of it."""
        for _ in range(min(EXPIRED_AT_ONCE, len(self._order))):
            (digest, member), arrived_at = next(iter(self._order.items()))
            if arrived_at + self._kept_seconds > now:
                break
            self._drop(digest, member)

    def overtaken(self, member: Member, position: Position, digests: Set[bytes]) -> None:
        """The owner's log, which told of these digests, is known up to `position` now."""
        for digest in self._entries.keys() & digests:
            entry = self._entries[digest].get(member)
            if entry is not None and (entry.hearsay or entry.position <= position):
                self._drop(digest, member)

    def _drop(self, digest: bytes, member: Member) -> None:
        del self._order[digest, member]
        own = self._owners[member]
        del own[digest]
        if not own:
            del self._owners[member]
        entries = self._entries[digest]
        del entries[member]
        if not entries:
            del self._entries[digest]
            self._apart.remove(digest)


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
