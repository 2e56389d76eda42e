"""Records of a segment's owner, one for each object and each reservation. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import msgspec

from p2pstore.memory.segment_layout import Pin, SlotState, TrailerBody
from p2pstore.objects import Version

MAX_RESERVATIONS_PER_SESSION: Final = 4096

_PINS: Final = tuple(Pin)


def pin_of(trailer: TrailerBody) -> Pin:
    """The object's pin. One that only newer versions know counts as hard."""
    return _PINS[min(trailer.pin, len(_PINS) - 1)] if trailer.pin > 0 else _PINS[0]


class ObjectEntry(msgspec.Struct, eq=False):
    """One object in a segment. Others may read it; only `Segment` changes it.

    `slot` is its number in the object table, `offset` where its payload begins, in bytes from the
    segment's start; `extent_bytes` is what it occupies with padding and trailer. `references`
    counts leases and I/O in flight. Times are Unix seconds; `pin_until` is 0 for a pin without end.
    `on_ssd`: the same version lies on the peer's SSD as well, so that losing these bytes costs a read of it;
    if not, no write is tried again before `not_written_before`. `verified`: this process has seen that the bytes
    give the version's root; of a local client's put it takes that on trust.

    The rest is for the order of eviction. `group`, `rank` and `within` say where the entry is queued, `colder` and
    `warmer` are its neighbours there. `standing` is what the policy thinks of it. `follows` is the block before it in a
    chain of prefix blocks, `followers` counts the blocks of which it is that. `is_kept_elsewhere`: another peer holds a
    copy and is to keep it before this one does, as far as was known when it was looked up, which counts until
    `known_until`. `timer` is the entry's place among those that have times (`ExpiryTimers`).
    """

    digest: bytes
    version: Version
    slot: int
    offset: int
    length: int
    trailer_length: int
    extent_bytes: int
    namespace: str
    key: str
    expires_unix_ms: int
    replicas: int
    pin: Pin
    pin_until: float
    soft: bool
    dtype: str
    shape: tuple[int, ...]
    last_access: float
    references: int = 0
    hits: int = 0
    state: SlotState = SlotState.LIVE
    on_ssd: bool = False
    not_written_before: float = 0.0
    verified: bool = False
    rank: int | None = None
    within: EntryList | None = None
    colder: ObjectEntry | None = None
    warmer: ObjectEntry | None = None
    standing: int = 0
    follows: ObjectEntry | None = None
    followers: int = 0
    is_kept_elsewhere: bool = False
    known_until: float = 0.0
    group: int = 0
    timer: int | None = None

    def __repr__(self) -> str:
        return f"ObjectEntry({self.key!r} in {self.namespace!r}, slot={self.slot}, {self.state!r})"

    def expired(self, now: float) -> bool:
        """Whether its time to live is over at `now` (Unix seconds)."""
        return self.expires_unix_ms > 0 and self.expires_unix_ms / 1000 <= now


class SmallObjectsLent(NamedTuple):
    """Objects of one chunk that stay where they are until the loan ends. `slots`: 64 bytes for each requested digest,
    zeros where no object is lent. `digests`, `payloads`: of the lent objects, in the order of the request;
    `length_bytes` in all. `handle`: the loan; None when nothing is lent."""

    slots: bytes
    digests: list[bytes]
    payloads: list[memoryview]
    length_bytes: int
    handle: Any


_LENGTH: Final = operator.attrgetter("length")
_EXPIRES: Final = operator.attrgetter("expires_unix_ms")


def small_entries(
    found: Sequence[ObjectEntry | None],
    most_bytes: int,
    most_bytes_in_all: int,
    now: float,
    declines: Callable[[ObjectEntry], bool] | None = None,
) -> tuple[Sequence[int], Sequence[ObjectEntry]]:
    """The places of those that have 1 to `most_bytes` bytes, did not expire and are not declined, up to that many bytes
    in all; and these entries."""
    if declines is None and found and all(found):
        entries = cast(Sequence[ObjectEntry], found)
        lengths = list(map(_LENGTH, entries))  # a look at each by itself takes twice as long
        fit = min(lengths) > 0 and max(lengths) <= most_bytes and sum(lengths) <= most_bytes_in_all
        if fit and not any(map(_EXPIRES, entries)):
            return range(len(entries)), entries
    places, entries, total = [], [], 0
    for place, entry in enumerate(found):
        if entry is None or not 0 < entry.length <= most_bytes or entry.expired(now):
            continue
        if total + entry.length > most_bytes_in_all:
            break
        if declines is not None and declines(entry):
            continue
        total += entry.length
        places.append(place)
        entries.append(entry)
    return places, entries


class Written(msgspec.Struct, frozen=True, gc=False):
    """An object that lies in a reservation, and the digest of the block that it follows, if any."""

    reservation: int
    digest: bytes
    version: Version
    trailer: TrailerBody
    length: int
    follows: bytes = b""


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """Room for a value of up to `length` bytes at `offset` from the segment's start.

    `capacity` is the whole extent in bytes, trailer included. It ends with commit or abort, or with
    its session.
    """

    number: int
    offset: int
    length: int
    capacity: int
    slot: int
    session: Hashable


class Reservations:
    """Reservations of each session, by number."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._of: dict[Hashable, dict[int, Reservation]] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Reservation]:
        return chain.from_iterable(each.values() for each in self._of.values())

    def add(
        self, session: Hashable, offsets: Sequence[int], length: int, capacity: int, slots: Sequence[int]
    ) -> list[Reservation]:
        """New reservations of one size, with numbers of their own."""
        made = [
            Reservation(number, offset, length, capacity, slot, session)
            for offset, slot, number in zip(offsets, slots, self._numbers, strict=False)
        ]
        if made:
            of_holder = self._of.setdefault(session, {})
            of_holder.update([(reservation.number, reservation) for reservation in made])
        self.reserved_bytes += capacity * len(made)
        return made

    def of(self, session: Hashable) -> Mapping[int, Reservation]:
        """The session's reservations, by number. To read only, and not while some are made or end."""
        return self._of.get(session, _NONE)

    def get(self, number: int, session: Hashable) -> Reservation:
        """Raises `ValueError` when the session has no such reservation (any more)."""
        reservation = self.of(session).get(number)
        if reservation is None:
            raise ValueError(f"reservation {number} has ended, or belongs to another session")
        return reservation

    def end(self, session: Hashable, *ended: Reservation) -> None:
        """Forget reservations of a session that were committed or aborted."""
        of_holder = self._of.get(session, {})
        for reservation in ended:
            del of_holder[reservation.number]
            self.reserved_bytes -= reservation.capacity
        if not of_holder:
            self._of.pop(session, None)

    def left_of(self, session: Hashable) -> int:
        """The number of reservations that the session may still make."""
        return MAX_RESERVATIONS_PER_SESSION - len(self.of(session))


_NONE: Final[Mapping[int, Reservation]] = MappingProxyType({})


class EntryList:
    """Entries in order, and the sum of their extents in bytes."""

    __slots__ = ("bytes", "coldest", "warmest")

    def __init__(self) -> None:
        self.coldest: ObjectEntry | None = None
        self.warmest: ObjectEntry | None = None
        self.bytes = 0

    def append(self, *entries: ObjectEntry) -> None:
        """Add entries that are in no list, the last one as the warmest."""
        before = self.warmest
        for entry in entries:
            entry.within = self
            entry.colder = before
            if before is None:
                self.coldest = entry
            else:
                before.warmer = entry
            before = entry
            self.bytes += entry.extent_bytes
        self.warmest = before

    def insert_before(self, entry: ObjectEntry, warmer: ObjectEntry) -> None:
        """Add an entry that is in no list, next to one of this list and colder than it."""
        colder = warmer.colder
        entry.within = self
        entry.colder, entry.warmer = colder, warmer
        warmer.colder = entry
        if colder is None:
            self.coldest = entry
        else:
            colder.warmer = entry
        self.bytes += entry.extent_bytes

    def __iter__(self) -> Iterator[ObjectEntry]:
        """From the coldest on. Nothing may change the list meanwhile."""
        entry = self.coldest
        while entry is not None:
            yield entry
            entry = entry.warmer


def unlink(*entries: ObjectEntry) -> None:
    """Take each entry out of its list."""
    for entry in entries:
        within, colder, warmer = entry.within, entry.colder, entry.warmer
        assert within is not None
        if colder is None:
            within.coldest = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            within.warmest = colder
        else:
            warmer.colder = colder
        within.bytes -= entry.extent_bytes
        entry.within = entry.colder = entry.warmer = None
