"""The known holders of each key, from all sources. Pure.

Three sources: views of whole logs (`directory`), views of the partitions that this peer is a home of (`home_views`),
and statements of homes, holders and rumours (`LocationCache`). Of a member's own statements about a key, the one at the
latest place of its log counts. Statements of others hide none of these: they are hearsay, which shows where to look and
decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Final

from p2pstore.gossip.homes.home_views import HomeViews
from p2pstore.gossip.homes.partition_homes import DirectoryMode, PartitionConfig, Phase
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_lookups import Denials, Holding
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.views import Location, Position
from p2pstore.gossip.records import Member, decode_location
from p2pstore.objects import DIGEST_BYTES, Version

_NEVER: Final[Position] = (-1, 0)


class Word(Enum):
    """The source of a statement that a member holds something."""

    OWN = "own"
    """The member's own, or that of a local client to whom the member said so."""
    HOME = "home"
    """That of a home of the key."""
    HEARSAY = "hearsay"


class KnownLocations:
    """See the module's docstring. Of the methods only `holders` may be called from other threads: see `share`."""

    def __init__(
        self,
        config: PartitionConfig,
        directory: Directory,
        log: OwnLog,
        mode: DirectoryMode,
        own: Member,
        salt: int,
    ) -> None:
        self.views = HomeViews(config, self._touch, salt)
        self.cache = LocationCache(config.cached_locations, config.cached_seconds)
        self.lock: AbstractContextManager[object] = nullcontext()
        """Hold it while `views` or `cache` are changed."""
        self._config = config
        self._salt = salt
        self._directory = directory
        self._log = log
        self._mode = mode
        self._own = own
        self._denials = Denials(config.max_denied)
        self._held: Set[bytes] = frozenset()
        self._awaited: Set[bytes] = frozenset()

    @property
    def record_count(self) -> int:
        """Locations that are known of others."""
        return self._directory.record_count + self.views.record_count + self.cache.count

    def share(self, lock: AbstractContextManager[object]) -> None:
        """From now on other threads may call `holders`; `lock` keeps them apart."""
        self.lock = lock

    def watch(self, held: Set[bytes], awaited: Set[bytes]) -> None:
        """As `WatchedKeys.watch`, of everything that is heard."""
        self._held, self._awaited = held, awaited
        self._directory.watched.watch(held, awaited)

    def forget_parts(self) -> None:
        """Forget everything but the views of whole logs: this peer has all of them."""
        with self.lock:
            self.views = HomeViews(self._config, self._touch, self._salt)
            self.cache.clear()
            self._denials = Denials(self._config.max_denied)

    # --- taking in ---------------------------------------------------------------------------

    def heard(
        self, member: Member, position: Position, operation: bytes, now: float, *, word: Word
    ) -> bool:
        """A member holds (or, `removed`, no longer holds) a record. Whether it was news."""
        own_word = word is Word.OWN
        if self._mode.follows_logs:
            return (
                self._directory.early(
                    member, position[0], [position[1]], operation, now, hearsay=not own_word
                )
                > 0
            )
        with self.lock:
            news = self.cache.learn(
                member, position, operation, now, hearsay=word is Word.HEARSAY, own_word=own_word
            )
        if news:
            self._touch(operation[:DIGEST_BYTES])
        return news

    def mark_stale(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The owner denied the key at this place of its log: hide it until something newer is heard."""
        self._directory.mark_stale(member, digest, incarnation, sequence)
        if self._mode.phase is not Phase.FULL:
            with self.lock:
                self.cache.deny(member, digest)
                self._denials.note(member, digest, (incarnation, sequence))

    # --- looking up --------------------------------------------------------------------------

    def holders(self, digest: bytes, now: float, *, hearsay: bool = False) -> list[Location]:
        """The holders of the key: owners believed alive first, among them the newest version first. The word of others
        on members whose logs this peer follows is left out without `hearsay`. A member may come twice: as it says
        itself, and with something later that others say of it."""
        found = [each for each in self._directory.holders(digest) if hearsay or not each.hearsay]
        if self._mode.phase is Phase.FULL:
            return found
        best: dict[tuple[Member, bool], Location] = {}
        with self.lock:
            for location in [*found, *self.views.holders(digest), *self.cache.holders(digest, now)]:
                source = location.member, location.hearsay
                known = best.get(source)
                if known is None or _position(known) < _position(location):
                    best[source] = location
            chosen = [each for each in best.values() if self._is_latest_word(each, digest)]
        own = {each.member: _position(each) for each in chosen if not each.hearsay}
        chosen = [
            each for each in chosen if not each.hearsay or _position(each) > own.get(each.member, _NEVER)
        ]
        chosen.sort(
            key=lambda location: (
                location.hidden,
                -location.record.version.clock,
                -location.record.version.writer,
            )
        )
        return chosen

    def held(self, digests: Set[bytes], believed: Callable[[Member], range], now: float) -> set[bytes]:
        """Which of the keys have a holder that is not hidden, in a version whose clock is believed of that member."""
        found = self._directory.held(digests, believed) if self._mode.follows_logs else set()
        if self._mode.phase is Phase.FULL:
            return found
        for digest in self.views.known(digests - found) | self.cache.known(digests - found):
            for location in self.holders(digest, now):
                clock = location.record.version.clock
                if not location.hidden and clock in believed(location.member):
                    found.add(digest)
                    break
        return found

    def holdings(
        self, digests: Sequence[bytes], believed: Callable[[Member], range]
    ) -> dict[Member, Holding] | None:
        """By member, which of the keys it holds. None where logs do not tell all."""
        if self._mode.phase is not Phase.FULL:
            return None
        return self._directory.holdings(digests, believed)

    def mentioned(self, digests: Set[bytes]) -> set[bytes]:
        """The keys that any member said anything of."""
        found = self._directory.mentioned(digests)
        if self._mode.phase is not Phase.FULL:
            with self.lock:
                found |= self.views.known(digests) | self.cache.known(digests)
        return found

    def of_other_versions(self, versions: Mapping[bytes, Version]) -> set[bytes]:
        """Those of the keys of which another version than this may be known."""
        if self._mode.phase is not Phase.FULL:
            return set(versions)
        return self._directory.of_other_versions(versions)

    def first_hand(self, digest: bytes, now: float) -> list[Location]:
        """Holders that this peer heard of from themselves or from a home, itself included."""
        sources = [*self.views.holders(digest), *self.cache.holders(digest, now, hearsay=False)]
        sources.sort(key=lambda each: not each.hearsay)  # what a holder says itself counts
        found = {
            each.member: each
            for each in sources
            if not each.hidden and self._is_latest_word(each, digest)
        }
        if (mine := self.own(digest)) is not None:
            found[self._own] = mine
        return list(found.values())

    def own(self, digest: bytes) -> Location | None:
        """This peer's own location of a key; None when it holds no copy."""
        packed = self._log.held(digest)
        if packed is None:
            return None
        return Location(self._own, self._log.incarnation, self._log.sequence, decode_location(packed))

    def _is_latest_word(self, location: Location, digest: bytes) -> bool:
        """Whether nothing newer is known of that member and key than that it holds it."""
        position = _position(location)
        if self._denials and self._denials.covers(
            location.member, digest, position, hearsay=location.hearsay
        ):
            return False
        if position < self.views.position(location.member, digest):
            return False
        followed = self._directory.position(location.member) if self._mode.follows_logs else _NEVER
        return position >= followed

    def _touch(self, digest: bytes) -> None:
        if digest in self._held or digest in self._awaited:
            self._directory.watched.touch(digest)


def _position(location: Location) -> Position:
    return location.incarnation, location.sequence


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
        """Whether this counts in place of what was known from the same source. Among the words of others that is
        the newer version, not the later place: an invented place hides no version that is there."""
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
        """Take in what a member is said to hold (or, `removed`, not to hold) at a place of its log. Whether it was
        news. Homes' word goes before hearsay, which makes nothing younger that is known."""
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
        """The members said to hold the key, twice where the member and others say so; hearsay if it is wanted."""
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
        """The member said that it does not hold the key: its word counts before that of others."""
        for own_word in (False, True):
            if (member, own_word) in self._keys.get(digest, {}):
                self._drop(digest, (member, own_word))

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self.count = 0

    def _drop_others_word(self, digest: bytes) -> bool:
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
