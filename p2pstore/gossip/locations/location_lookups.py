"""Which members hold a key: by their logs, and by what was told ahead of or beside them. Pure.

Two things stand beside the views, both short-lived: operations that were pushed here ahead of the log (`early`), and
locations that their owner denied (`mark_stale`). Each belongs to a place in the owner's log and has no effect once the
view has passed it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, pairwise, starmap
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import DEFAULT_SALT, digests_of
from p2pstore.gossip.locations.location_slots import ApartKeys, PublishedLocations
from p2pstore.gossip.locations.log import REMOVED, check_run
from p2pstore.gossip.locations.log import Position as Position
from p2pstore.gossip.locations.views import DirectoryConfig, Location, View, ViewTable, exclusive
from p2pstore.gossip.records import LOCATION_BYTES, Member, Tier, decode_location
from p2pstore.location_table import TIER_FLAGS, VERSION_BYTES, Matches
from p2pstore.objects import DIGEST_BYTES, Version

_FLAGS: Final = LOCATION_BYTES - 1

_CLOCK: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 8)

_VERSION: Final = Struct("<QHQ")

_VERSION_PLACE: Final = slice(DIGEST_BYTES, DIGEST_BYTES + VERSION_BYTES)

_MAX_CLOCK: Final = (1 << 64) - 1


class Holding(NamedTuple):
    """Which of some keys a member holds, and which of these in its memory: a boolean each; and how long they are, in
    units of 4 KiB, of which 0 is not known."""

    held: npt.NDArray[np.bool_]
    in_memory: npt.NDArray[np.bool_]
    size_units: npt.NDArray[np.uint32]

    @staticmethod
    def of_none(count: int) -> Holding:
        """Of none of `count` keys."""
        held, in_memory = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        return Holding(held, in_memory, np.zeros(count, np.uint32))


class LocationLookups(ViewTable):
    """Views that can be asked for a key. `holders` may be called from any thread when `share` was given a lock."""

    def __init__(
        self,
        config: DirectoryConfig | None = None,
        salt: int = DEFAULT_SALT,
        published: PublishedLocations | None = None,
    ) -> None:
        super().__init__(config, salt, published)
        apart = published.apart if published else None
        self._early = EarlyOperations(self.config.max_early, self.config.early_seconds, apart)
        self._denials = Denials(self.config.max_stale, apart)

    @exclusive
    def early(
        self,
        member: Member,
        incarnation: int,
        sequences: Sequence[int],
        operations: bytes,
        now: float,
        *,
        hearsay: bool = False,
    ) -> int:
        """Note operations ahead of the log, from its owner or, as `hearsay`, another. How many were news. Raises
        `ProtocolError`, and changes nothing, when sequences and whole records do not pair up."""
        if check_run(operations) != len(sequences):
            raise ProtocolError("a push has not one sequence number per location record")
        if member in self.shares.refused:
            return 0
        news: set[bytes] = set()
        count = 0
        standing = self.position(member)
        for index, sequence in enumerate(sequences):
            operation = operations[index * LOCATION_BYTES : (index + 1) * LOCATION_BYTES]
            position = (incarnation, sequence)
            if position > standing and self._early.note(
                member, position, operation, now, hearsay=hearsay
            ):
                news.add(operation[:DIGEST_BYTES])
                count += 1
        self.watched.heard_of(news)
        return count

    @exclusive
    def expire_early(self, now: float) -> None:
        """Drop operations that were pushed before the log must have told of them."""
        self._early.expire(now)

    @exclusive
    def mark_stale(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The owner denied the key at this place of its log: hide it until the view is past it."""
        self._denials.note(member, digest, (incarnation, sequence))

    @exclusive
    def holders(self, digest: bytes) -> list[Location]:
        """The key's holders, hearsay included: owners believed alive first, among them the newest version first."""
        found = [
            Location(member, *position, decode_location(packed), hidden)
            for member, position, packed, hidden in self._standing(digest)
        ]
        found += self._hearsay(digest)
        if len(found) > 1:
            found.sort(
                key=lambda location: (
                    location.hidden,
                    -location.record.version.clock,
                    -location.record.version.writer,
                )
            )
        return found

    @exclusive
    def held(self, digests: Set[bytes], believed: Callable[[Member], range]) -> set[bytes]:
        """Which of the keys have a holder that is not hidden, in a version whose clock is in the range that
        is believed of that member. A fraction of a microsecond a key, however many members there are."""
        keys = [digest for digest in digests if len(digest) == DIGEST_BYTES]
        matches = self._index.table.find_many(b"".join(keys))
        is_held = np.zeros(len(keys), np.bool_)
        is_held[matches.queries[self._believed(matches, believed)]] = True
        found = set(compress(keys, is_held.tolist()))
        # Few: a push ahead of the log counts instead, and a denied location does not.
        apart = (self._early.digests | self._denials.digests) & digests if self._any_apart else ()
        for digest in apart:
            found.discard(digest)
            if self._is_held(digest, believed):
                found.add(digest)
        return found

    @exclusive
    def holdings(
        self, digests: Sequence[bytes], believed: Callable[[Member], range]
    ) -> dict[Member, Holding]:
        """By member, which of the keys it holds, in versions as `held` counts them."""
        found: dict[Member, Holding] = {}
        matches = self._index.table.find_many(b"".join(digests))
        some = self._believed(matches, believed).nonzero()[0]
        some = some[np.argsort(matches.slots[some], kind="stable")]
        slots, queries = matches.slots[some], matches.queries[some]
        rows = matches.rows[some]
        in_memory, size_units = (
            self._index.table.tiers(rows) != Tier.SSD,
            self._index.table.size_units(rows),
        )
        borders = np.flatnonzero(np.diff(slots, prepend=0, append=0)).tolist()
        for begin, end in pairwise(borders):
            holding = Holding.of_none(len(digests))
            holding.held[queries[begin:end]] = True
            holding.in_memory[queries[begin:end]] = in_memory[begin:end]
            holding.size_units[queries[begin:end]] = size_units[begin:end]
            found[self._of_slot[int(slots[begin])].member] = holding
        if self._any_apart:
            self._correct_holdings(found, digests, believed)
        return found

    @exclusive
    def logged_tiers(self, digests: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """By the logs of members that are not hidden alone: for each key 1 when one has it in memory, plus 2 when one
        has it on its SSD."""
        found = np.zeros(len(digests), np.uint8)
        matches = self._index.table.find_many(b"".join(digests))
        shown = [slot for slot, view in self._of_slot.items() if not view.hidden]
        some = np.isin(matches.slots, shown)
        tiers = self._index.table.tiers(matches.rows[some])
        np.bitwise_or.at(found, matches.queries[some], (tiers + 1) & 3)  # DRAM, SSD, both
        return found

    def _correct_holdings(
        self, found: dict[Member, Holding], digests: Sequence[bytes], believed: Callable[[Member], range]
    ) -> None:
        """A push ahead of the log counts instead, and a denied location does not: of few keys."""
        early, denied = self._early.digests, self._denials.digests
        for place, digest in enumerate(digests):
            if digest not in early and digest not in denied:
                continue
            for holding in found.values():
                holding.held[place] = holding.in_memory[place] = False
            for member, _, packed, hidden in self._standing(digest):
                if not hidden and int.from_bytes(packed[_CLOCK], "little") in believed(member):
                    if member not in found:
                        found[member] = Holding.of_none(len(digests))
                    found[member].held[place] = True
                    found[member].in_memory[place] = packed[_FLAGS] & TIER_FLAGS != Tier.SSD
                    found[member].size_units[place] = decode_location(packed).size_units

    @exclusive
    def mentioned(self, digests: Set[bytes]) -> set[bytes]:
        """Which of the keys are in a log, or were pushed ahead of it."""
        keys = list(digests)
        found = {keys[place] for place in self._index.known(b"".join(keys))}
        return found | (self._early.digests & digests)

    @exclusive
    def of_other_versions(self, versions: Mapping[bytes, Version]) -> set[bytes]:
        """Those of the keys of which a log, or what was pushed ahead of it, names another version than this."""
        keys = list(versions)
        matches = self._index.table.find_many(b"".join(keys))
        mine = np.frombuffer(b"".join(starmap(_VERSION.pack, versions.values())), f"V{VERSION_BYTES}")
        differ = matches.queries[self._index.table.versions(matches.rows) != mine[matches.queries]]
        found = {keys[place] for place in differ.tolist()}
        for digest in self._early.digests & versions.keys():
            packed = _VERSION.pack(*versions[digest])
            if any(
                early.operation[_VERSION_PLACE] != packed for early in self._early.of(digest).values()
            ):
                found.add(digest)
        return found

    def _believed(
        self, matches: Matches, believed: Callable[[Member], range]
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of the records count, by their owner and clock."""
        slots, of_slot = np.unique(matches.slots, return_inverse=True)
        first, last = np.ones(slots.size, np.uint64), np.zeros(slots.size, np.uint64)
        for place, slot in enumerate(slots.tolist()):
            view = self._of_slot.get(slot)
            clocks = range(0) if view is None or view.hidden else believed(view.member)
            if clocks:
                first[place] = max(clocks.start, 0)
                last[place] = min(clocks.stop - 1, _MAX_CLOCK)
        clocks_held = self._index.table.clocks(matches.rows)
        return (clocks_held >= first[of_slot]) & (clocks_held <= last[of_slot])

    @property
    def _any_apart(self) -> bool:
        return bool(self._early.digests or self._denials)

    def _is_held(self, digest: bytes, believed: Callable[[Member], range]) -> bool:
        return any(
            not hidden and int.from_bytes(packed[_CLOCK], "little") in believed(member)
            for member, _, packed, hidden in self._standing(digest)
        )

    def _standing(self, digest: bytes) -> Iterator[tuple[Member, Position, bytes, bool]]:
        """The records of a key that count: (owner, place in its log, packed record, whether it is hidden)."""
        early = self._early.of(digest)
        for slot, packed in self._index.table.find(digest):
            view = self._of_slot.get(slot)
            entry = None if view is None else early.get(view.member)
            if view is None or (entry is not None and not entry.hearsay):
                continue
            if not self._denials.covers(view.member, digest, view.position):
                yield view.member, view.position, packed, view.hidden
        for member, entry in early.items():
            if entry.hearsay:
                continue
            known = self._views.get(member)
            position, operation = entry.position, entry.operation
            if known is not None and position <= known.position:
                position, operation = known.position, self._index.get(known.slot, digest) or b""
            counts = operation and not operation[_FLAGS] & REMOVED
            if counts and not self._denials.covers(member, digest, position):
                yield member, position, operation, known is not None and known.hidden

    def _hearsay(self, digest: bytes) -> Iterator[Location]:
        """Claims of others about members whose own logs do not name the key. The claimed place counts for nothing:
        else a denial might not reach it."""
        for member, entry in self._early.of(digest).items():
            view = self._views.get(member)
            if not entry.hearsay or view is None or entry.operation[_FLAGS] & REMOVED:
                continue
            named = self._index.get(view.slot, digest) is not None
            if not named and not self._denials.covers(member, digest, view.position):
                record = decode_location(entry.operation)
                yield Location(member, *view.position, record, view.hidden, hearsay=True)

    def _move_on(self, view: View, operations: bytes) -> None:
        self._index.apply(view.slot, operations)
        view.sequence += len(operations) // LOCATION_BYTES
        digests = set(digests_of(operations))
        self.watched.heard_of(digests)
        self._early.overtaken(view.member, view.position, digests)


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
    """The newest operation of each key and owner, until the log told of it, or for `kept_seconds`. Over `limit` the
    oldest of the owner that has most go: one that pushes much pushes out nothing of others."""

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
        """The member that had most when that was looked for."""
        self._until_look = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def digests(self) -> KeysView[bytes]:
        """Digests that they are about."""
        return self._entries.keys()

    def of(self, digest: bytes) -> Mapping[Member, EarlyOperation]:
        """The newest operation of each owner about this key."""
        return self._entries.get(digest, _NONE)

    def note(
        self, member: Member, position: Position, operation: bytes, now: float, *, hearsay: bool = False
    ) -> bool:
        """Keep an operation; False when one of the key is as new. The owner's own word goes before any hearsay."""
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
        """Drop some operations that were pushed before the log must have told of them."""
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
        """Members that denied each digest."""

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def digests(self) -> KeysView[bytes]:
        """The denied digests."""
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
