"""Plans that a client makes itself, without a request to the local peer.

The peer's mapped table of locations (`MappedLocations`) names the holders of an object. Plans of the peer name the
route and the ticket to each member, which stay valid for a while. Where the routes to all holders are known, the client
makes the plan. When its plan does not lead to the object, the client asks the peer.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from p2pstore.client.read_plan import OnlyHolder, OwnPlan, is_far, way_to
from p2pstore.local.local_messages import Holder, PlanItem
from p2pstore.location_table import (
    APART_COUNTERS,
    CLOCK,
    FEW_DIGESTS,
    FLOOR_CLOCKS,
    LOCATION,
    TIER_FLAGS,
    LocationTable,
    Rows,
    Word,
    apart_counter,
    floor_clock,
)
from p2pstore.objects import DIGEST_BYTES, SIZE_UNIT_BYTES, ZERO_VERSION, Version
from p2pstore.transfer.transport import RemoteCopy

TRUSTED_SECONDS: Final = 50.0
"""A ticket is good for 60 s at least when the peer hands it out."""
DISTRUST_SECONDS: Final = 10.0
"""Time for which a member that did not deliver is not chosen without the peer."""
MAX_HOLDERS: Final = 1024
HOLDERS_PER_PLAN: Final = 8

T = TypeVar("T")
FRESH_NANOSECONDS: Final = 2_000_000_000
"""Age from which on the table is not trusted: its peer may be stopped, which a request finds out."""
_TRIES: Final = 3
_MAX_ROWS: Final = 4096
"""Rows that are looked at for a key: links that are being changed may lead in a circle."""
_AT_ONCE: Final = 1024
"""Keys looked up between two looks at the peer's count of changes."""
_FLOOR_BITS: Final = np.uint32(FLOOR_CLOCKS - 1)
_APART_BITS: Final = np.uint32(APART_COUNTERS - 1)
_BEGIN_AND_STAMP: Final = struct.Struct(f"<I{DIGEST_BYTES - 4}xQH")
"""The first 32 bits of a packed record's digest, and its version's clock and writer."""
_WRITER_BITS: Final = np.uint64(0xFFFF)
# Plain numbers: these are looked at for every key.
_CHANGES, _ALIVE_AT = int(Word.CHANGES), int(Word.ALIVE_AT)
_AFTER, _BEFORE = int(Word.BELIEVED_AFTER), int(Word.BELIEVED_BEFORE)


class _Route(NamedTuple):
    """The facts that the peer told of a member, and the time until which they are trusted."""

    trusted_until: float
    holder: Holder
    copy: RemoteCopy
    is_far: bool


def _goes_through_peer(holder: Holder, length_bytes: float) -> bool:
    """Whether the local peer has a faster way to an object of that length, and is to say whether it takes it."""
    return 0 < holder.through_peer_bytes <= length_bytes


class KnownHolders:
    """Plans of the client's own. Any thread may use it."""

    def __init__(self, elsewhere: MappedLocations | None, rng: Random) -> None:
        self._elsewhere = elsewhere
        self._rng = rng
        self._routes: dict[int, _Route] = {}
        self._distrusted_until: dict[int, float] = {}
        """Members that did not deliver, and the end of their distrust: the local peer orders the holders until then."""
        self._changing = threading.Lock()

    def close(self) -> None:
        """Let go of the table."""
        self._elsewhere = None

    def note(self, plans: Iterable[PlanItem]) -> None:
        """Remember the holders that the peer named."""
        trusted_until = time.monotonic() + TRUSTED_SECONDS
        with self._changing:
            for plan in plans:
                for holder in () if plan.through_peer else plan.holders:
                    self._routes.pop(holder.member, None)
                    way = way_to(holder)
                    route = _Route(trusted_until, holder, way, is_far(way))
                    self._routes[holder.member] = route
            while len(self._routes) > MAX_HOLDERS:
                del self._routes[next(iter(self._routes))]

    def forget(self, members: Iterable[int]) -> None:
        """Forget members that did not deliver: the peer may know better where they are, and whether."""
        now = time.monotonic()
        with self._changing:
            for member in members:
                self._routes.pop(member, None)
                self._distrusted_until.pop(member, None)
                self._distrusted_until[member] = now + DISTRUST_SECONDS
            for member in list(
                takewhile(lambda each: self._distrusted_until[each] <= now, self._distrusted_until)
            ):
                del self._distrusted_until[member]

    def only_holder(self, digest: bytes, most_bytes: float = 0) -> OnlyHolder | None:
        """The holder, when just one is known, and objects of up to `most_bytes` are best asked for there as well; None
        when `plan` is to say more."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return None
        found = elsewhere.only_record(digest)
        if found is None:
            return None
        member, record = found
        *_, slot, size, _ = LOCATION.unpack(record)
        route = self._trusted(member, time.monotonic())
        expected_bytes = int.from_bytes(size, "little") * SIZE_UNIT_BYTES
        if route is None or _goes_through_peer(route.holder, max(expected_bytes, most_bytes)):
            return None
        return OnlyHolder(route.copy, route.is_far, slot, expected_bytes)

    def expected_bytes(self, digest: bytes) -> int:
        """The length at most of an object that one other peer is known to hold; 0 where that is not known."""
        only = self.only_holder(digest)
        return 0 if only is None else only.expected_bytes

    def only_many(
        self, digests: Sequence[bytes], most_bytes: float = math.inf
    ) -> list[RemoteCopy | None]:
        """The way to the only holder of each of many objects, of which none longer than `most_bytes` is wanted."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return [None] * len(digests)
        members = elsewhere.only_members(b"".join(digests))
        now = time.monotonic()
        ways = {member: self._direct_way(member, most_bytes, now) for member in set(members)}
        if len(ways) == 1:  # nearly always
            return list(ways.values()) * len(members)
        return list(map(ways.__getitem__, members))

    def _direct_way(self, member: int, most_bytes: float, now: float) -> RemoteCopy | None:
        route = self._trusted(member, now)
        if route is None or _goes_through_peer(route.holder, most_bytes):
            return None
        return route.copy

    def plan(self, digest: bytes) -> OwnPlan | None:
        """Holders of the newest version that is known, best first; None when the peer must be asked."""
        elsewhere = self._elsewhere  # another thread may close it
        if elsewhere is None:
            return None
        records = elsewhere.holders(digest)
        if not records:
            return None
        records = self._newest(records)
        holders = self._holders(records)
        return None if holders is None else OwnPlan(holders)

    def _newest(self, records: Sequence[KnownRecord]) -> list[KnownRecord]:
        """Those of the newest version, when its writer vouches for it; else nothing: the local peer may know more."""
        vouched = max((each.version for each in records if each.is_by_member), default=ZERO_VERSION)
        if any(each.version[:2] > vouched[:2] for each in records):
            return []
        some = [record for record in records if record.version == vouched]
        if len(some) > 1:
            self._rng.shuffle(some)  # readers do not all go to the same one
        return some[:HOLDERS_PER_PLAN]

    def _holders(self, records: Sequence[KnownRecord]) -> list[Holder] | None:
        if not records:
            return None
        now, holders = time.monotonic(), []
        for record in records:
            route = self._trusted(record.member, now)
            if route is None or _goes_through_peer(route.holder, record.size_units * SIZE_UNIT_BYTES):
                return None
            clock, writer, root = record.version
            holders.append(
                replace(
                    route.holder,
                    slot=record.slot,
                    size_units=record.size_units,
                    clock=clock,
                    writer=writer,
                    root=root,
                    tier=record.tier,
                )
            )
        if len(holders) > 1:
            holders.sort(key=lambda holder: not holder.same_host)
        return holders

    def _trusted(self, member: int, now: float) -> _Route | None:
        route = self._routes.get(member)
        if route is None or route.trusted_until < now:
            return None
        distrusted = self._distrusted_until and self._distrusted_until.get(member, 0.0) > now
        return None if distrusted else route


class KnownRecord(NamedTuple):
    """A member's word that it holds a version of a key, and where."""

    member: int
    version: Version
    slot: int
    size_units: int
    tier: int

    @property
    def is_by_member(self) -> bool:
        """Whether the member wrote the version: then it is its word that the version has this root."""
        return self.version.writer == self.member & 0xFFFF


def _known_record(member: int, packed: bytes) -> KnownRecord:
    _, clock, writer, root, slot, size, flags = LOCATION.unpack(packed)
    return KnownRecord(
        member, Version(clock, writer, root), slot, int.from_bytes(size, "little"), flags & TIER_FLAGS
    )


class MappedLocations:
    """Locations of keys at other peers, read from the local peer's mapped table (`memory`). Raises as `LocationTable`.

    The peer goes on changing the table meanwhile. It counts its changes, so that a reader detects a torn read; and it
    stores the time at which all of it was valid. In every doubtful case the answer is None: ask the peer."""

    def __init__(self, memory: Any) -> None:
        self._table = LocationTable(memory)
        self._words = self._table.words
        self._counted, self._apart = self._table.counted, self._table.apart
        self._floors = self._table.floors
        self._member_names = np.frombuffer(self._table.members, np.uint64)

    def contains(self, digest: bytes) -> bool | None:
        """Whether some live peer is known to hold the key; None: the local peer must be asked."""
        return self._settled(digest, self._look_up)

    def holders(self, digest: bytes) -> list[KnownRecord] | None:
        """The records of live peers that hold the key; None: the local peer must be asked."""
        return self._settled(digest, self._records)

    def only_record(self, digest: bytes) -> tuple[int, bytes] | None:
        """The one live member that is known to hold the key, and wrote it, and its packed record; None where there is
        none or several, or the local peer must be asked."""
        found = self._settled(digest, self._only_records)
        return found[0] if found else None

    def contains_many(self, digests: bytes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of packed digests: which are known to be held by some live peer, and of which the local one must be
        asked."""
        count = len(digests) // DIGEST_BYTES
        held, asked = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        for some, found in self._in_turns(digests, self._match):
            if found is not None:
                held[some], asked[some] = found
        return held, asked

    def only_members(self, digests: bytes) -> list[int]:
        """Of packed digests: the one live member that is known to hold each, and wrote it; 0 where there is none or
        several, or the local peer must be asked."""
        count = len(digests) // DIGEST_BYTES
        look_up = self._match_only_of_few if count <= FEW_DIGESTS else self._match_only
        members: list[int] = []
        for some, found in self._in_turns(digests, look_up):
            members += [0] * (some.stop - some.start) if found is None else found
        return members

    def _in_turns(
        self, digests: bytes, look_up: Callable[[bytes], T]
    ) -> Iterator[tuple[slice, T | None]]:
        """`_settled` for some of packed digests after the other, with their places."""
        count = len(digests) // DIGEST_BYTES
        for start in range(0, count, _AT_ONCE):
            end = min(start + _AT_ONCE, count)
            some = digests[start * DIGEST_BYTES : end * DIGEST_BYTES]
            yield slice(start, end), self._settled(some, look_up)

    def _is_fresh(self) -> bool:
        alive_at = self._words[_ALIVE_AT]
        return alive_at > 0 and 0 <= time.monotonic_ns() - alive_at < FRESH_NANOSECONDS

    def _believed(self, digest: bytes) -> tuple[int, int]:
        """Between these clocks versions of the key are believed."""
        words = self._words
        return max(words[_AFTER], self._floors[floor_clock(digest)]), words[_BEFORE]

    def _look_up(self, digest: bytes) -> bool | None:
        if self._apart[apart_counter(digest)]:
            return None
        counted = self._counted
        answer: bool | None = False
        for _, slot, record in self._table.find_few(digest, _MAX_ROWS):
            if counted[slot]:
                clock = int.from_bytes(record[CLOCK], "little")
                after, before = self._believed(digest)
                if after < clock < before:
                    return True
                answer = None  # an old version may be forbidden
        return answer

    def _records(self, digest: bytes) -> list[KnownRecord] | None:
        if self._apart[apart_counter(digest)]:
            return None
        counted, members = self._counted, self._table.members
        found = [
            _known_record(members[slot], record)
            for _, slot, record in self._table.find_few(digest, _MAX_ROWS)
            if counted[slot]
        ]
        after, before = self._believed(digest)
        believed = all(after < known.version[0] < before for known in found)
        return found if believed else None

    def _settled(self, digests: bytes, look_up: Callable[[bytes], T]) -> T | None:
        """The answer of `look_up` on a fresh table that did not change meanwhile; None: there was none."""
        words = self._words
        for _ in range(_TRIES):
            changes = words[_CHANGES]
            if not self._is_fresh():
                return None
            if not changes & 1:
                try:
                    found = look_up(digests)
                except IndexError:
                    continue
                if words[_CHANGES] == changes:
                    return found
        return None

    def _match(self, digests: bytes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        table = self._table
        count = len(digests) // DIGEST_BYTES
        held, asked = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        begins = _beginnings(digests)
        matches = table.find_many(digests, _MAX_ROWS)
        counts = table.counts.take(matches.slots) != 0
        believed = counts & self._are_believed(begins.take(matches.queries), matches.rows)
        held[matches.queries[believed]] = True
        asked[matches.queries[counts]] = True
        asked &= ~held
        apart = self._are_apart(begins)
        return held & ~apart, asked | apart

    def _match_only_of_few(self, digests: bytes) -> list[int]:
        members = [0] * (len(digests) // DIGEST_BYTES)
        for number, (member, _) in self._only_records(digests).items():
            members[number] = member
        return members

    def _only_records(self, digests: bytes) -> dict[int, tuple[int, bytes]]:
        """By the numbers of the digests, which are few, the one member that holds each, and its record."""
        counted, names = self._counted, self._table.members
        apart, floors = self._apart, self._floors
        after, before = self._words[_AFTER], self._words[_BEFORE]
        only: dict[int, tuple[int, bytes]] = {}
        matched = set()
        for number, slot, record in self._table.find_few(digests, _MAX_ROWS):
            if counted[slot]:
                begin, clock, writer = _BEGIN_AND_STAMP.unpack_from(record)
                if (
                    number not in matched
                    and not apart[begin & (APART_COUNTERS - 1)]
                    and after < clock < before
                    and floors[begin & (FLOOR_CLOCKS - 1)] < clock
                    and writer == names[slot] & 0xFFFF
                ):
                    only[number] = names[slot], record
                else:
                    only.pop(number, None)
                matched.add(number)
        return only

    def _match_only(self, digests: bytes) -> list[int]:
        table = self._table
        begins = _beginnings(digests)
        matches = table.find_many(digests, _MAX_ROWS)
        queries, rows, slots = matches.queries, matches.rows, matches.slots
        counted = table.counts.take(slots).nonzero()[0]
        if counted.size < slots.size:
            queries, rows, slots = queries.take(counted), rows.take(counted), slots.take(counted)
        found = self._member_names.take(slots)
        found *= self._are_believed(begins.take(queries), rows)
        found *= table.writers(rows) == found & _WRITER_BITS
        members = np.zeros(len(begins), np.uint64)
        members[queries] = found
        if queries.size > np.count_nonzero(members):  # not all are believed, or some have several
            members[np.bincount(queries, minlength=len(begins)) > 1] = 0
        members *= ~self._are_apart(begins)
        listed: list[int] = members.tolist()
        return listed

    def _are_believed(self, begins: NDArray[np.uint32], rows: Rows) -> NDArray[np.bool_]:
        """`_believed` of the versions in rows, which are of these digests."""
        floors, words = self._table.floor_clocks, self._words
        clocks = self._table.clocks(rows)
        believed: NDArray[np.bool_] = clocks > floors.take(begins & _FLOOR_BITS)
        believed &= clocks > np.uint64(words[_AFTER])
        believed &= clocks < np.uint64(words[_BEFORE])
        return believed

    def _are_apart(self, begins: NDArray[np.uint32]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._table.aparts.take(begins & _APART_BITS) != 0
        return found


def _beginnings(digests: bytes) -> NDArray[np.uint32]:
    """The first 32 bits of each of many packed digests."""
    return np.frombuffer(digests, "<u4")[:: DIGEST_BYTES // 4]
