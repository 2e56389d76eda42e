"""Views of other members' logs, one per owner, and of the partitions that this peer is a home of. Pure.

A view stands at (incarnation, sequence) and holds exactly the set that its owner's log, or the keys of a partition
among it, had there. The records of all views are in one `LocationIndex`, a slot per view. The owner's signed head names
the hash of the set at some sequence; a view that passes there with another hash is dropped until its owner gives a
snapshot. Views of partitions are moved by `homes.home_views`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from itertools import islice
from typing import Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from p2pstore.gossip.locations.location_index import DEFAULT_SALT, LocationIndex
from p2pstore.gossip.locations.location_slots import PublishedLocations
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OperationRing, Position, SignedRun
from p2pstore.gossip.locations.words import Denials, Words
from p2pstore.gossip.records import LocationRecord, LogHead, Member


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Bounds. `max_records` counts the records of all views."""

    max_records: int = 20_000_000
    relay_limit: int = 8_192
    """Operations of each owner that are kept to pass on, while owners are few."""
    relay_total: int = 131_072
    """Of all owners together, about; but at least `relay_least` of each."""
    relay_least: int = 512
    max_words: int = 100_000
    word_seconds: float = 60.0
    """How long a word counts that no log has told of since."""
    max_denials: int = 100_000

    @property
    def max_rows(self) -> int:
        """More than records: a snapshot is staged beside the view that it replaces."""
        return self.max_records * 3 // 2 + (1 << 16)


@dataclass(frozen=True, slots=True)
class Location:
    """A member's word that it holds a record, as of (`incarnation`, `sequence`) of its log. `hidden`: it is believed
    dead. `hearsay`: another one said so, not the member in its log, or as a push."""

    member: Member
    incarnation: int
    sequence: int
    record: LocationRecord
    hidden: bool = False
    hearsay: bool = False


class Outcome(Enum):
    APPLIED = "applied"
    GAP = "gap"
    """Operations between the view and these are missing (or the owner's record is)."""
    STALE = "stale"
    """All of it was known already."""
    DIVERGED = "diverged"
    """The set's hash is not the owner's: the view was dropped and wants its owner's snapshot."""
    FULL = "full"
    """The directory has no room: the view was dropped."""


@dataclass(frozen=True, slots=True)
class Applied:
    """How `apply` went; `count` operations were new."""

    outcome: Outcome
    count: int = 0


@dataclass(slots=True)
class View:
    member: Member
    incarnation: int
    slot: int
    ring: OperationRing | None = None
    """Operations to pass on, once there were any."""
    sequence: int = 0
    head: LogHead = field(default_factory=LogHead)
    hidden: bool = False
    diverged: bool = False
    """Whether it lacks something, and only its owner can give that."""
    number: int = 0
    """Of the last operation, in a view of a partition."""

    @property
    def position(self) -> Position:
        return self.incarnation, self.sequence


NO_VIEW: Final = View(0, 0, -1)
"""In place of the view of a member that has none. To read only, and not for its slot."""


class ViewPlace(NamedTuple):
    """Where a view stands. Its records changed by operations alone while nothing but `sequence` differs."""

    incarnation: int
    slot: int
    hidden: bool
    sequence: int


_P = ParamSpec("_P")

_R = TypeVar("_R")
_T = TypeVar("_T", bound="ViewTable")


def exclusive(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Under the lock that `share` was given."""

    @wraps(method)
    def locked(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


def changing(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Under that lock, and while clients are told that rows move."""

    @wraps(method)
    def locked(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.changing_rows():
            return method(self, *args, **kwargs)

    return locked


class ViewTable:
    """All views, where each stands, and what was said beside them. `salt`: 128 bits that other members cannot guess,
    for the index. Or `published`: the index is its table, with room for `max_rows` rows."""

    def __init__(
        self,
        config: DirectoryConfig | None = None,
        salt: int = DEFAULT_SALT,
        published: PublishedLocations | None = None,
    ) -> None:
        self.config = config or DirectoryConfig()
        self._published = published
        table = published.table if published else None
        self.index = LocationIndex(self.config.max_rows, salt, table)
        self._lock: AbstractContextManager[object] = nullcontext()
        self._views: dict[Member, View] = {}
        self._of_slot: dict[int, View] = {}
        """The slots that count. A snapshot's does not before it is whole."""
        self.parts: dict[int, dict[Member, View]] = {}
        """The views of each partition, by owner. To be changed inside `changing_rows`."""
        self.watched = WatchedKeys(self.index)
        self.shares = LocationShares()
        apart = published.apart if published else None
        self._words = Words(self.config.max_words, self.config.word_seconds, apart)
        self._denials = Denials(self.config.max_denials, apart)
        self.follows_logs = True
        """Whether logs tell of all members: then hearsay is left out where it is not asked for."""
        self._relay_limit = self.config.relay_limit
        self.unsettled: set[Member] = set()
        """Members whose views are not where their signed heads are, or are `diverged`. To read only."""
        self._moved: set[Member] = set()

    def share(self, lock: AbstractContextManager[object]) -> None:
        """From now on other threads may call `holders`; `lock` keeps them apart."""
        self._lock = lock

    @contextmanager
    def changing_rows(self) -> Iterator[None]:
        """Hold the lock, and tell clients that rows move."""
        with self._lock:
            published = self._published
            if published is None:
                yield
                return
            published.begin()
            try:
                yield
            finally:
                published.end()

    def has_view(self, member: Member) -> bool:
        """Whether there is a view of the member's log, if only an empty one."""
        return member in self._views

    def position(self, member: Member) -> Position:
        """Where the view stands; (0, 0) without one."""
        return self._views.get(member, NO_VIEW).position

    def wanted_after(self, member: Member, incarnation: int, log_sequence: int) -> int:
        """Up to where no operations are wanted of a member's log of this incarnation, which stood at `log_sequence`
        when its record was signed. A view that diverged waits for its owner's snapshot."""
        view = self._views.get(member, NO_VIEW)
        sequence = view.sequence if view.incarnation == incarnation else 0
        return max(sequence, log_sequence) if view.diverged else sequence

    def head(self, member: Member) -> LogHead:
        """The latest signed head that was observed."""
        return self._views.get(member, NO_VIEW).head

    def diverged(self, member: Member) -> bool:
        """Whether the view was dropped for a wrong hash and takes nothing but a snapshot."""
        return self._views.get(member, NO_VIEW).diverged

    def take_moved(self) -> set[Member]:
        """Members whose views moved, were replaced or forgotten, or got a head since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    def since(self, member: Member, sequence: int, limit_bytes: int) -> list[SignedRun]:
        """The runs with a member's operations after `sequence`, to pass on; none when they are not here."""
        ring = self._views.get(member, NO_VIEW).ring
        return [] if ring is None else ring.since(sequence, limit_bytes)

    def places(self) -> dict[Member, ViewPlace]:
        """Where every view stands now."""
        return {
            member: ViewPlace(view.incarnation, view.slot, view.hidden, view.sequence)
            for member, view in self._views.items()
        }

    def operations_after(self, member: Member, sequence: int) -> bytes | None:
        """A member's operations after `sequence`; None where some of them are not here."""
        ring = self._views.get(member, NO_VIEW).ring
        return None if ring is None else ring.after(sequence)

    def count_of(self, member: Member) -> int:
        view = self._views.get(member)
        return 0 if view is None else self.index.count(view.slot)

    def digests_between(self, member: Member, start: int, stop: int) -> list[bytes]:
        """Digests at these positions of a view: see `LocationIndex.digests`."""
        return self.index.digests(self._views[member].slot, start, stop)

    def lag(self, member: Member) -> int:
        """How many operations the view is behind the latest signed head."""
        view = self._views.get(member, NO_VIEW)
        return max(0, view.head.sequence - view.sequence)

    def open_view(self, member: Member, incarnation: int) -> View:
        view = self._views[member] = View(member, incarnation, self.index.open())
        self._claim_slot(view)
        self._share_relay()
        return view

    def _agrees(self, view: View) -> bool:
        """Whether the view may be right. A wrong one is dropped."""
        held = self.index.hash(view.slot), self.index.count(view.slot)
        if (
            view.diverged
            or view.sequence != view.head.sequence
            or held == (view.head.set_hash, view.head.count)
        ):
            return True
        self._reset(view)
        view.diverged = True
        return False

    def _reset(self, view: View) -> None:
        self._discard(view.slot)
        view.slot = self.index.open()
        self._claim_slot(view)
        view.ring = None
        view.sequence = 0
        view.diverged = False

    def _note_moved(self, view: View) -> None:
        """Call it after each change of where a view or its head stands: others look at no other views."""
        self._moved.add(view.member)
        if view.diverged or view.sequence != view.head.sequence:
            self.unsettled.add(view.member)
        else:
            self.unsettled.discard(view.member)

    def _claim_slot(self, view: View) -> None:
        self._of_slot[view.slot] = view
        self._publish(view)

    def _publish(self, view: View) -> None:
        if self._published is not None:
            self._published.count(view.slot, view.member, not view.hidden)

    def _discard(self, slot: int) -> None:
        if self._published is not None:
            self._published.count(slot, 0, False)
        del self._of_slot[slot]
        self.watched.forget(slot)
        self.index.discard(slot)

    def _share_relay(self) -> None:
        """The operations kept to pass on are bounded over all owners: halve each one's share when there are many."""
        config, limit = self.config, self.config.relay_limit
        while limit > config.relay_least and limit * len(self._views) > config.relay_total:
            limit = max(limit // 2, config.relay_least)
        if limit != self._relay_limit:
            self._relay_limit = limit
            for view in self._views.values():
                if view.ring is not None:
                    view.ring.resize(limit)


class LocationShares:
    """Members whose locations are refused, because they announce more than `MAX_OWN_RECORDS`."""

    def __init__(self) -> None:
        self.refused: set[Member] = set()
        """Members whose locations are not taken. To read only."""
        self._told: set[Member] = set()
        self._news: dict[Member, int] = {}

    def allows(self, member: Member, count: int) -> bool:
        """Whether a member that announces, or has, `count` locations is believed from now on."""
        if count <= MAX_OWN_RECORDS:
            self.refused.discard(member)
            return True
        self.refused.add(member)
        if member not in self._told:
            self._told.add(member)
            self._news[member] = count
        return False

    def take_news(self) -> dict[Member, int]:
        """Members refused for the first time since the last call, and how many locations each announced."""
        news, self._news = self._news, {}
        return news

    def forget(self, member: Member) -> None:
        self.refused.discard(member)
        self._told.discard(member)


def who_makes_room(
    counts: Mapping[Member, int], member: Member, wanted: int, missing: int
) -> list[Member]:
    """Members whose locations are to be dropped, the most first, so that one may have `wanted` of them where `missing`
    do not fit: others who have more than that. None when that does not give room enough."""
    dropped: list[Member] = []
    if missing > 0:
        larger = [
            (count, other) for other, count in counts.items() if other != member and count > wanted
        ]
        for count, other in sorted(larger, reverse=True):
            dropped.append(other)
            missing -= count
            if missing <= 0:
                return dropped
    return []


STEP_RECORDS: Final = 2_048
"""A step of what takes long: one or two milliseconds."""

MAX_AHEAD: Final = 8 * STEP_RECORDS
"""Touched digests that wait to be taken, before more of whole slots are. (Half a million take 10 ms to add.)"""


class WatchedKeys:
    """Keys of which gossip brought news, of two live sets: the keys that are held here, and those that are awaited. A
    whole slot of the index can be gone through as well, in steps."""

    def __init__(self, index: LocationIndex) -> None:
        self._index = index
        self._held: Set[bytes] = frozenset()
        self._awaited: Set[bytes] = frozenset()
        self._touched: set[bytes] = set()
        self._left: dict[int, int] = {}
        """Slots that are gone through: how many records are left, from the first on."""

    def watch(self, held: Set[bytes], awaited: Set[bytes]) -> None:
        """Live views of the sets to watch."""
        self._held, self._awaited = held, awaited

    @property
    def any_touched(self) -> bool:
        return bool(self._touched)

    def take(self, limit: int) -> list[bytes]:
        """Some of the touched digests, each once. Awaited ones come first."""
        taken = list(islice(self._awaited & self._touched, limit))
        self._touched.difference_update(taken)
        while self._touched and len(taken) < limit:
            taken.append(self._touched.pop())
        return taken

    def touch(self, digest: bytes) -> None:
        """Have a digest looked at, watched or not."""
        self._touched.add(digest)

    def heard_of(self, digests: set[bytes]) -> None:
        """Touch those of the digests that are watched."""
        self._touched |= self._held & digests
        self._touched |= self._awaited & digests

    @property
    def work_pending(self) -> bool:
        return bool(self._left)

    def heard_of_all(self, slot: int) -> None:
        """`heard_of` all digests of a slot: now, or when `work` has gone through a large one."""
        self._left[slot] = self._index.count(slot)
        if self._left[slot] <= STEP_RECORDS:
            self._go_through(slot, STEP_RECORDS)

    def forget(self, slot: int) -> None:
        self._left.pop(slot, None)

    def work(self, limit: int) -> None:
        """Go through about `limit` records; not while there are many to `take`."""
        while self._left and limit > 0 and len(self._touched) < MAX_AHEAD:
            limit -= self._go_through(next(iter(self._left)), limit)

    def _go_through(self, slot: int, limit: int) -> int:
        """From the last record to the first: one that takes the place of another comes from behind."""
        left = min(self._left.pop(slot), self._index.count(slot))
        start = max(0, left - limit)
        self.heard_of(set(self._index.digests(slot, start, left)))
        if start:
            self._left[slot] = start
        return max(1, left - start)
