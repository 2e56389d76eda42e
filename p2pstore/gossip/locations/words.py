"""Words about single keys beside the logs, and denials of owners. Pure.

A *word* is an operation that its owner said ahead of its log, or where the log is not followed; or *hearsay*, what
another member said of the owner. Both are short-lived: a word counts until the owner's log is past its place. A denial
belongs to a place in the owner's log, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Mapping, Set
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.location_slots import ApartKeys
from p2pstore.gossip.locations.log import Position
from p2pstore.gossip.records import Member, decode_location
from p2pstore.objects import DIGEST_BYTES

EXPIRED_AT_ONCE: Final = 1_024
"""A microsecond each."""
HEARSAY_PER_KEY: Final = 64

Source = tuple[Member, bool]
"""The owner, and whether the word is hearsay."""


@dataclass(frozen=True, slots=True)
class Word:
    """A packed operation at a place of its owner's log."""

    position: Position
    operation: bytes

    def follows(self, known: Word, *, hearsay: bool) -> bool:
        """Whether this counts in place of what was known from the same source. Among hearsay that is the newer version,
        not the later place: an invented place hides no version that exists."""
        if not hearsay:
            return self.position > known.position
        return (self._version, self.position) > (known._version, known.position)

    @property
    def _version(self) -> tuple[int, int]:
        version = decode_location(self.operation).version
        return version.clock, version.writer


_NONE: Final[Mapping[Source, Word]] = {}


class Words:
    """The newest word of each key and source, until the log told of it, or for `kept_seconds`. Over `limit` the oldest
    of the owner that has most go: one that pushes much pushes out nothing of others."""

    def __init__(self, limit: int, kept_seconds: float, apart: ApartKeys | None = None) -> None:
        self._limit = limit
        self._apart = apart or ApartKeys()
        self._kept_seconds = kept_seconds
        self._words: dict[bytes, dict[Source, Word]] = {}
        self.digests = self._words.keys()
        """Digests that they are about."""
        self._order: OrderedDict[tuple[bytes, Source], float] = OrderedDict()
        """When each came, the oldest first."""
        self._owners: dict[Member, OrderedDict[tuple[bytes, Source], None]] = {}
        """The same, by owner."""
        self._largest: Member | None = None
        """The member that had most when that was looked for."""
        self._until_look = 0

    def __len__(self) -> int:
        return len(self._order)

    def of(self, digest: bytes) -> Mapping[Source, Word]:
        """The newest word of each source about this key."""
        return self._words.get(digest, _NONE)

    def note(
        self, member: Member, position: Position, operation: bytes, now: float, *, hearsay: bool = False
    ) -> bool:
        """Keep a word, unless the known one is as new. Whether it says something else."""
        digest, source, word = operation[:DIGEST_BYTES], (member, hearsay), Word(position, operation)
        words = self._words.get(digest, _NONE)
        known = words.get(source)
        if known is None and hearsay and len(words) >= HEARSAY_PER_KEY:
            return False
        if known is not None and not word.follows(known, hearsay=hearsay):
            return False
        if not words:
            self._apart.add(digest)
        self._words.setdefault(digest, {})[source] = word
        entry = digest, source
        own = self._owners.setdefault(member, OrderedDict())
        self._order[entry], own[entry] = now, None
        self._order.move_to_end(entry)
        own.move_to_end(entry)
        while len(self._order) > self._limit:
            self._drop(*next(iter(self._owners[self._who_makes_room(member)])))
        return known is None or known.operation != operation

    def _who_makes_room(self, newest: Member) -> Member:
        """An owner that has more than an even share. To look through all costs some: that is done once for as many
        words as there are owners; in between the owner of the oldest makes room where none is known."""
        share = self._limit // len(self._owners)
        for member in (self._largest, newest):
            if member is not None and len(self._owners.get(member, ())) > share:
                return member
        if self._until_look > 0:
            self._until_look -= 1
            return next(iter(self._order))[1][0]
        self._until_look = len(self._owners)
        self._largest = max(self._owners, key=lambda member: len(self._owners[member]))
        return self._largest

    def expire(self, now: float) -> None:
        """Drop some words that are too old."""
        for _ in range(min(EXPIRED_AT_ONCE, len(self._order))):
            entry, came_at = next(iter(self._order.items()))
            if came_at + self._kept_seconds > now:
                break
            self._drop(*entry)

    def overtaken(self, member: Member, position: Position, digests: Set[bytes]) -> None:
        """The owner's log, which told of these digests, is known up to `position` now."""
        for digest in self._words.keys() & digests:
            word = self._words[digest].get((member, False))
            if word is not None and word.position <= position:
                self._drop(digest, (member, False))
            self.drop_hearsay(member, digest)

    def drop_hearsay(self, member: Member, digest: bytes) -> None:
        """The owner's own word goes before that of others."""
        if (member, True) in self.of(digest):
            self._drop(digest, (member, True))

    def _drop(self, digest: bytes, source: Source) -> None:
        member = source[0]
        del self._order[digest, source]
        own = self._owners[member]
        del own[digest, source]
        if not own:
            del self._owners[member]
        words = self._words[digest]
        del words[source]
        if not words:
            del self._words[digest]
            self._apart.remove(digest)


class Denials:
    """At most `limit` denials; the oldest go first. Each belongs to a place in its owner's log."""

    def __init__(self, limit: int, apart: ApartKeys | None = None) -> None:
        self._limit = limit
        self._apart = apart or ApartKeys()
        self._positions: dict[tuple[bytes, Member], Position] = {}
        self._members: dict[bytes, set[Member]] = {}
        """Members that denied each digest."""

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def digests(self) -> KeysView[bytes]:
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
        """Whether what the owner said at `position` is denied. Only the owner's going past a denial forgets it."""
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
