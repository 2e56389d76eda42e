"""Which members hold a key: by their logs, and by what was told ahead of or beside them. Pure.

Of what an owner said itself of a key that counts which belongs to the latest place of its log: in the view of its log,
in that of the key's partition, or as a word (`heard`), if it did not deny that since (`mark_stale`). The word of others
hides none of it: it comes as hearsay, which shows where to look and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, compress, pairwise, starmap
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex, digests_of
from p2pstore.gossip.locations.log import REMOVED, Position, check_run
from p2pstore.gossip.locations.views import NO_VIEW, Location, View, ViewTable, exclusive
from p2pstore.gossip.records import LOCATION_BYTES, Member, Tier, decode_location, partition_of
from p2pstore.location_table import TIER_FLAGS, VERSION_BYTES, Matches
from p2pstore.objects import DIGEST_BYTES, Version

_FLAGS: Final = LOCATION_BYTES - 1

_CLOCK: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 8)

_VERSION: Final = Struct("<QHQ")

_VERSION_PLACE: Final = slice(DIGEST_BYTES, DIGEST_BYTES + VERSION_BYTES)

_MAX_CLOCK: Final = (1 << 64) - 1


_Said = tuple[Member, Position, bytes, bool]
"""A record: (owner, place in its log, packed record, whether the owner is believed dead)."""


class HeldKeys(NamedTuple):
    """Which of some keys a member holds, and which of these in its memory: a boolean each; and how long they are, in
    units of 4 KiB, of which 0 is not known."""

    held: npt.NDArray[np.bool_]
    in_memory: npt.NDArray[np.bool_]
    size_units: npt.NDArray[np.uint32]

    @staticmethod
    def of_none(count: int) -> HeldKeys:
        held, in_memory = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        return HeldKeys(held, in_memory, np.zeros(count, np.uint32))


class LocationLookups(ViewTable):
    """Views that can be asked for a key. `holders` may be called from any thread when `share` was given a lock."""

    @exclusive
    def close(self) -> None:
        """Let go of the table and forget all. Nothing but `holders` may be called after that."""
        self._published = None
        self._views.clear()
        self._of_slot.clear()
        index, self.index = self.index, LocationIndex(0)
        index.close()

    @property
    def word_count(self) -> int:
        return len(self._words)

    @exclusive
    def heard(
        self,
        member: Member,
        incarnation: int,
        sequences: Sequence[int],
        operations: bytes,
        now: float,
        *,
        hearsay: bool = False,
    ) -> int:
        """Note what a log's owner or, as `hearsay`, another says of it. How many operations were news. Raises
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
            if position > standing and self._words.note(
                member, position, operation, now, hearsay=hearsay
            ):
                news.add(operation[:DIGEST_BYTES])
                count += 1
        self.watched.heard_of(news)
        return count

    @exclusive
    def expire_words(self, now: float) -> None:
        """Drop words that are so old that logs must have told of them, or homes are to be asked again."""
        self._words.expire(now)

    @exclusive
    def mark_stale(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The owner denied the key at this place of its log: hide it until something later is heard of the owner."""
        self._denials.note(member, digest, (incarnation, sequence))
        self._words.drop_hearsay(member, digest)

    @exclusive
    def holders(self, digest: bytes, *, hearsay: bool = False) -> list[Location]:
        """The key's holders: owners believed alive first, among them the newest version first. The word of others on
        members whose logs this peer follows is left out without `hearsay`. A member may come twice: as it says itself,
        and with something later that others say of it."""
        found = [
            Location(member, *position, decode_location(packed), hidden)
            for member, position, packed, hidden in self._standing(digest)
        ]
        if hearsay or not self.follows_logs:
            found += [
                Location(member, *position, decode_location(packed), hidden, hearsay=True)
                for member, position, packed, hidden in self._hearsay(digest)
            ]
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
        matches = self.index.table.find_many(b"".join(keys))
        is_held = np.zeros(len(keys), np.bool_)
        is_held[matches.queries[self._believed(matches, believed)]] = True
        found = set(compress(keys, is_held.tolist()))
        # Few: a later word counts instead, and a denied location does not.
        apart = (self._words.digests | self._denials.digests) & digests if self._any_apart else ()
        for digest in apart:
            found.discard(digest)
            if any(self._believed_of(digest, believed)):
                found.add(digest)
        return found

    @exclusive
    def holdings(
        self, digests: Sequence[bytes], believed: Callable[[Member], range]
    ) -> dict[Member, HeldKeys]:
        """By member, which of the keys it holds, in versions as `held` counts them: where logs tell of all."""
        found: dict[Member, HeldKeys] = {}
        matches = self.index.table.find_many(b"".join(digests))
        some = self._believed(matches, believed).nonzero()[0]
        some = some[np.argsort(matches.slots[some], kind="stable")]
        slots, queries, rows = matches.slots[some], matches.queries[some], matches.rows[some]
        in_memory = self.index.table.tiers(rows) != Tier.SSD
        size_units = self.index.table.size_units(rows)
        borders = np.flatnonzero(np.diff(slots, prepend=0, append=0)).tolist()
        for begin, end in pairwise(borders):
            view = self._of_slot[int(slots[begin])]
            if self._views.get(view.member) is not view:
                continue  # of a partition, which a log tells of as well
            holding = found[view.member] = HeldKeys.of_none(len(digests))
            holding.held[queries[begin:end]] = True
            holding.in_memory[queries[begin:end]] = in_memory[begin:end]
            holding.size_units[queries[begin:end]] = size_units[begin:end]
        if self._any_apart:
            self._correct_holdings(found, digests, believed)
        return found

    @exclusive
    def logged_tiers(self, digests: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """By the logs of members that are not hidden alone: for each key 1 when one has it in memory, plus 2 when one
        has it on its SSD."""
        found = np.zeros(len(digests), np.uint8)
        matches = self.index.table.find_many(b"".join(digests))
        shown = [view.slot for view in self._views.values() if not view.hidden]
        some = np.isin(matches.slots, shown)
        tiers = self.index.table.tiers(matches.rows[some])
        np.bitwise_or.at(found, matches.queries[some], (tiers + 1) & 3)  # DRAM, SSD, both
        return found

    def _correct_holdings(
        self,
        found: dict[Member, HeldKeys],
        digests: Sequence[bytes],
        believed: Callable[[Member], range],
    ) -> None:
        """A later word counts instead, and a denied location does not: of few keys."""
        said, denied = self._words.digests, self._denials.digests
        for place, digest in enumerate(digests):
            if digest not in said and digest not in denied:
                continue
            for holding in found.values():
                holding.held[place] = holding.in_memory[place] = False
            for member, packed in self._believed_of(digest, believed):
                if member not in found:
                    found[member] = HeldKeys.of_none(len(digests))
                found[member].held[place] = True
                found[member].in_memory[place] = packed[_FLAGS] & TIER_FLAGS != Tier.SSD
                found[member].size_units[place] = decode_location(packed).size_units

    def mentioned(self, digests: Set[bytes]) -> set[bytes]:
        """Which of the keys any member said anything of."""
        keys = list(digests)
        with self._lock:
            found = {keys[place] for place in self.index.known(b"".join(keys))}
            return found | (self._words.digests & digests)

    @exclusive
    def of_other_versions(self, versions: Mapping[bytes, Version]) -> set[bytes]:
        """Those of the keys of which a view or a word names another version than this."""
        keys = list(versions)
        matches = self.index.table.find_many(b"".join(keys))
        mine = np.frombuffer(b"".join(starmap(_VERSION.pack, versions.values())), f"V{VERSION_BYTES}")
        differ = matches.queries[self.index.table.versions(matches.rows) != mine[matches.queries]]
        found = {keys[place] for place in differ.tolist()}
        for digest in self._words.digests & versions.keys():
            packed = _VERSION.pack(*versions[digest])
            if any(word.operation[_VERSION_PLACE] != packed for word in self._words.of(digest).values()):
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
        clocks_held = self.index.table.clocks(matches.rows)
        return (clocks_held >= first[of_slot]) & (clocks_held <= last[of_slot])

    @property
    def _any_apart(self) -> bool:
        return bool(self._words.digests or self._denials)

    def _believed_of(
        self, digest: bytes, believed: Callable[[Member], range]
    ) -> Iterator[tuple[Member, bytes]]:
        """The members that hold a key and are not hidden, in a version whose clock is believed of them: with their
        packed records."""
        hearsay = () if self.follows_logs else self._hearsay(digest)
        for member, _, packed, hidden in chain(self._standing(digest), hearsay):
            if not hidden and int.from_bytes(packed[_CLOCK], "little") in believed(member):
                yield member, packed

    def _standing(self, digest: bytes) -> Iterator[_Said]:
        """The records of a key that count, by their owners' own word."""
        words = self._words.of(digest)
        for slot, packed in self.index.table.find(digest):
            view = self._of_slot.get(slot)
            if view is None or (self.parts and not self._is_latest(view, digest)):
                continue
            word = words.get((view.member, False))
            if word is not None and word.position > view.position:
                continue
            if not self._denials.covers(view.member, digest, view.position):
                yield view.member, view.position, packed, view.hidden
        for (member, hearsay), word in words.items():
            position = word.position
            if hearsay or word.operation[_FLAGS] & REMOVED or position <= self._place(member, digest):
                continue
            if not self._denials.covers(member, digest, position):
                yield member, position, word.operation, self._is_hidden(member)

    def _hearsay(self, digest: bytes) -> Iterator[_Said]:
        """Claims of others, of later places than what the members said themselves. Where a member's own log is
        followed, and does not name the key, the claimed place counts for nothing: else a denial might not reach it."""
        words = self._words.of(digest)
        for (member, hearsay), word in words.items():
            if not hearsay or word.operation[_FLAGS] & REMOVED:
                continue
            position, own, view = word.position, words.get((member, False)), self._views.get(member)
            if position <= max(self._place(member, digest), own.position if own else (0, 0)):
                continue
            if self.follows_logs:
                if view is None or own or self.index.get(view.slot, digest) is not None:
                    continue
                position = view.position
            if not self._denials.covers(member, digest, position, hearsay=True):
                yield member, position, word.operation, self._is_hidden(member)

    def _is_latest(self, view: View, digest: bytes) -> bool:
        """Whether a view that names the key is at the latest place. The log's goes before its partition's."""
        log = self._views.get(view.member)
        if view is not log:
            return log is None or view.position > log.position
        return view.position >= self._place(view.member, digest)

    def _place(self, member: Member, digest: bytes) -> Position:
        """How far the member's log was when a view last told of this key's partition; (0, 0) without a view."""
        place = self.position(member)
        part = self.parts.get(partition_of(digest), {}).get(member) if self.parts else None
        return place if part is None else max(place, part.position)

    def _is_hidden(self, member: Member) -> bool:
        return self._views.get(member, NO_VIEW).hidden

    def _move_on(self, view: View, operations: bytes) -> None:
        self.index.apply(view.slot, operations)
        view.sequence += len(operations) // LOCATION_BYTES
        digests = set(digests_of(operations))
        self.watched.heard_of(digests)
        self._words.overtaken(view.member, view.position, digests)
