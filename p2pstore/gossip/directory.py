"""What the other members hold: one view per owner, each a reader's copy of that owner's log. Pure.

A view stands at (incarnation, sequence) and holds exactly the set that the owner's log had there.
It moves by contiguous operations, or is replaced whole by a snapshot. The owner's signed head says
what the set's hash is at some sequence; a view that passes there with another hash was fed wrong
operations by a relay, and is dropped until its owner itself gives a snapshot.

Two things stand beside the views, both short-lived: operations that were pushed here ahead of the
log (`early`), and locations that their owner denied (`mark_stale`). Each belongs to a place in the
owner's log and has no effect once the view has passed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.log import LocationSet, OperationRing, check_run, unpack_set
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    LocationRecord,
    LogHead,
    Member,
    decode_location,
)
from p2pstore.objects import DIGEST_BYTES

_FLAGS: Final = LOCATION_BYTES - 1
_REMOVED: Final = 0x80
_CLOCK: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 8)
_START: Final = (-1, 0)
"""Before every place of every log."""

Position = tuple[int, int]
"""(incarnation, sequence): a place in a member's log."""


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Bounds. `max_records` counts the records of all views."""

    max_records: int = 20_000_000
    relay_limit: int = 8_192
    """Operations of each owner that are kept to pass on."""
    max_early: int = 100_000
    early_seconds: float = 60.0
    max_stale: int = 100_000


@dataclass(frozen=True, slots=True)
class Location:
    """A member's word that it holds a record, as of (`incarnation`, `sequence`) of its log.

    `hidden`: the member is believed dead.
    """

    member: Member
    incarnation: int
    sequence: int
    record: LocationRecord
    hidden: bool = False


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
class _View:
    incarnation: int
    ring: OperationRing
    set: LocationSet = field(default_factory=LocationSet)
    head: LogHead = field(default_factory=LogHead)
    hidden: bool = False
    diverged: bool = False

    @property
    def sequence(self) -> int:
        return self.ring.last


@dataclass(frozen=True, slots=True)
class _Early:
    position: Position
    operation: bytes
    arrived_at: float


class Directory:
    """See the module's docstring. A view exists once `observe_head` was told of its owner."""

    def __init__(self, config: DirectoryConfig | None = None) -> None:
        self.config = config or DirectoryConfig()
        self.record_count = 0
        """Records in all views."""
        self._views: dict[Member, _View] = {}
        self._early: dict[bytes, dict[Member, _Early]] = {}
        self._early_order: deque[tuple[float, bytes, Member]] = deque()
        self._stale: dict[tuple[Member, bytes], Position] = {}
        self._held: Set[bytes] = frozenset()
        self._awaited: Set[bytes] = frozenset()
        self._touched: set[bytes] = set()

    def watch(self, held: Set[bytes], awaited: Set[bytes]) -> None:
        """Note every change that concerns a digest in one of these live views of sets, for
        `take_touched`."""
        self._held, self._awaited = held, awaited

    @property
    def any_touched(self) -> bool:
        """Whether `take_touched` would give some."""
        return bool(self._touched)

    def take_touched(self, limit: int) -> list[bytes]:
        """Some of the watched digests that operations, pushes or snapshots of others were about, each once.
        Those that somebody waits for come first: a member that is back touches all that is held in common."""
        taken = list(islice(self._awaited & self._touched, limit))
        self._touched.difference_update(taken)
        while self._touched and len(taken) < limit:
            taken.append(self._touched.pop())
        return taken

    # --- views -------------------------------------------------------------------------------

    def observe_head(self, member: Member, incarnation: int, head: LogHead) -> bool:
        """Take in the head of a verified record. False when the view was dropped for a wrong hash.

        A higher incarnation voids everything known of the member before.
        """
        view = self._views.get(member)
        if view is None or incarnation > view.incarnation:
            hidden = view is not None and view.hidden
            self._reset(member)
            view = self._views[member] = _View(incarnation, self._ring(), hidden=hidden)
        if incarnation == view.incarnation and head.sequence >= view.head.sequence:
            view.head = head
        return self._agrees(member, view)

    def position(self, member: Member) -> Position:
        """Where the view stands; (0, 0) without one."""
        view = self._views.get(member)
        return (0, 0) if view is None else (view.incarnation, view.sequence)

    def head(self, member: Member) -> LogHead:
        """The latest signed head that was observed."""
        view = self._views.get(member)
        return LogHead() if view is None else view.head

    def diverged(self, member: Member) -> bool:
        """Whether the view was dropped for a wrong hash and takes nothing but a snapshot."""
        view = self._views.get(member)
        return view is not None and view.diverged

    def apply(
        self, member: Member, incarnation: int, first_sequence: int, operations: bytes
    ) -> Applied:
        """Carry out a run of a member's operations. Raises `ProtocolError` when records are not
        whole.

        Operations that the view already has are skipped; nothing is applied across a gap.
        """
        count = check_run(operations)
        view = self._views.get(member)
        if view is None or incarnation > view.incarnation:
            return Applied(Outcome.GAP)
        known = view.sequence + 1 - first_sequence
        if incarnation < view.incarnation or known >= count or view.diverged:
            return Applied(Outcome.STALE)
        if known < 0:
            return Applied(Outcome.GAP)
        if not self.has_room(count - known):
            self._reset(member)
            return Applied(Outcome.FULL)
        operations = operations[known * LOCATION_BYTES :]
        before = len(view.set)
        steps = [operations]
        to_head = (view.head.sequence - view.sequence) * LOCATION_BYTES
        if 0 < to_head < len(operations):
            steps = [operations[:to_head], operations[to_head:]]
        for step in steps:
            for start in range(0, len(step), LOCATION_BYTES):
                operation = step[start : start + LOCATION_BYTES]
                view.set.apply(operation)
                self._touch_watched(operation[:DIGEST_BYTES])
            view.ring.extend(step)
            if self._early:
                self._drop_overtaken(member, (view.incarnation, view.sequence), step)
            if view.sequence == view.head.sequence and not self._matches(view):
                self.record_count += len(view.set) - before
                self._agrees(member, view)
                return Applied(Outcome.DIVERGED)
        self.record_count += len(view.set) - before
        return Applied(Outcome.APPLIED, count - known)

    def since(self, member: Member, sequence: int, limit_bytes: int) -> bytes | None:
        """A member's operations after `sequence`, to pass on; None when they are not here."""
        view = self._views.get(member)
        return None if view is None else view.ring.since(sequence, limit_bytes)

    def snapshot(self, member: Member) -> tuple[int, int, int, bytes] | None:
        """(incarnation, sequence, set hash, packed records) of a view; None of an empty one."""
        view = self._views.get(member)
        if view is None or not view.sequence:
            return None
        return view.incarnation, view.sequence, view.set.hash, view.set.pack()

    def install_snapshot(
        self,
        member: Member,
        incarnation: int,
        sequence: int,
        set_hash: int,
        packed: bytes,
    ) -> bool:
        """Replace a view whole. False, and no effect, when it is not ahead of the view or has no
        room.

        Raises `ProtocolError`, and changes nothing, when the records do not add up to `set_hash`,
        or that is not what the owner signed.
        """
        view = self._views.get(member)
        if view is None or incarnation != view.incarnation:
            return False
        if sequence <= view.sequence and not view.diverged:
            return False
        records = unpack_set(packed)
        head = view.head
        if records.hash != set_hash or (
            sequence == head.sequence and (set_hash, len(records)) != (head.set_hash, head.count)
        ):
            raise ProtocolError(
                "a snapshot of locations does not have the hash that its owner signed"
            )
        if not self.has_room(len(records) - len(view.set)):
            return False
        self.record_count += len(records) - len(view.set)
        view.set = records
        self._touch_all(records.records.keys())
        view.ring = self._ring(sequence)
        view.diverged = False
        return True

    def distrust(self, member: Member) -> None:
        """Drop the view, for good reasons of the caller's: it takes nothing but a snapshot."""
        view = self._views.get(member)
        if view is not None:
            self._reset(member)
            view.diverged = True

    def lag(self, member: Member) -> int:
        """How many operations the view is behind the latest signed head."""
        view = self._views.get(member)
        return 0 if view is None else max(0, view.head.sequence - view.sequence)

    def has_room(self, count: int) -> bool:
        """Whether that many more records fit."""
        return self.record_count + count <= self.config.max_records

    def hide(self, member: Member) -> None:
        """The member is believed dead: its locations come last, and are marked."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = True

    def show(self, member: Member) -> None:
        """The member is back: its locations count again, and touch what is watched."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = False
            self._touch_all(view.set.records.keys())

    def touch(self, digest: bytes) -> None:
        """Have a digest looked at, though nothing new was heard of it."""
        self._touched.add(digest)

    def _touch_watched(self, digest: bytes) -> None:
        if digest in self._held or digest in self._awaited:
            self._touched.add(digest)

    def _touch_all(self, digests: Set[bytes]) -> None:
        self._touched |= self._held & digests
        self._touched |= self._awaited & digests

    def forget(self, member: Member) -> None:
        """Free everything that is known of the member's locations; `hide` and incarnation stay."""
        self._reset(member)

    def drop(self, member: Member) -> None:
        """Forget that the member ever had a log."""
        self._reset(member)
        self._views.pop(member, None)

    # --- ahead of the log --------------------------------------------------------------------

    def early(
        self,
        member: Member,
        incarnation: int,
        sequences: Sequence[int],
        operations: bytes,
        now: float,
    ) -> int:
        """Note operations that arrived ahead of the log. How many were news.

        Raises `ProtocolError`, and changes nothing, when sequences and whole records do not pair
        up.
        """
        if check_run(operations) != len(sequences):
            raise ProtocolError("a push has not one sequence number per location record")
        news = 0
        standing = self.position(member)
        for index, sequence in enumerate(sequences):
            position = (incarnation, sequence)
            start = index * LOCATION_BYTES
            digest = operations[start : start + DIGEST_BYTES]
            known = self._early.get(digest, {}).get(member)
            if position <= standing or (known is not None and position <= known.position):
                continue
            operation = operations[start : start + LOCATION_BYTES]
            self._early.setdefault(digest, {})[member] = _Early(position, operation, now)
            self._early_order.append((now, digest, member))
            self._touch_watched(digest)
            news += 1
        while len(self._early_order) > self.config.max_early:
            self._expire_oldest_early()
        return news

    def expire_early(self, now: float) -> None:
        """Drop what was pushed so long ago that the log must have told it."""
        while self._early_order and self._early_order[0][0] + self.config.early_seconds <= now:
            self._expire_oldest_early()

    def mark_stale(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The owner denied the key at this place of its log: hide it until the view is past it."""
        key = (member, digest)
        self._stale[key] = max(self._stale.pop(key, (0, 0)), (incarnation, sequence))
        while len(self._stale) > self.config.max_stale:
            del self._stale[next(iter(self._stale))]

    # --- looking up --------------------------------------------------------------------------

    def holders(self, digest: bytes) -> list[Location]:
        """Who holds the key: owners believed alive first, among them the newest version first."""
        found: list[Location] = []
        early = self._early.get(digest, {})
        for member, view in list(self._views.items()):  # may be called from any thread
            packed = view.set.records.get(digest)
            if packed is not None and member not in early:
                position = (view.incarnation, view.sequence)
                self._collect(found, member, position, packed, view.hidden)
        for member, entry in list(early.items()):
            owner = self._views.get(member)
            if owner is not None and entry.position <= (owner.incarnation, owner.sequence):
                packed = owner.set.records.get(digest)
                position = (owner.incarnation, owner.sequence)
            else:
                packed, position = entry.operation, entry.position
            if packed is not None and not packed[_FLAGS] & _REMOVED:
                self._collect(found, member, position, packed, owner is not None and owner.hidden)
        if len(found) > 1:
            found.sort(
                key=lambda location: (
                    location.hidden,
                    -location.record.version.clock,
                    -location.record.version.writer,
                )
            )
        return found

    def held(self, digests: Set[bytes], believed: Callable[[Member], range]) -> set[bytes]:
        """Which of the keys have a holder that is not hidden, in a version whose clock is in the range that
        is believed of that member. Set operations of whole views: a fraction of a microsecond a key."""
        early = self._early.keys() & digests
        found: set[bytes] = set()
        for member, view in self._views.items():
            clocks = range(0) if view.hidden else believed(member)
            if not clocks:
                continue
            records = view.set.records
            matched = records.keys() & digests
            position = (view.incarnation, view.sequence)
            if early:  # what was pushed ahead of the log counts instead
                matched -= {d for d in matched & early if self._is_ahead(d, member, position)}
            if self._stale:
                denied = self._stale
                matched -= {d for d in matched if denied.get((member, d), _START) >= position}
            number = int.from_bytes
            found.update(
                [
                    digest
                    for digest in matched
                    if number(records[digest][_CLOCK], "little") in clocks
                ]
            )
        for digest in early - found:
            for member, entry in self._early[digest].items():
                if (
                    not entry.operation[_FLAGS] & _REMOVED
                    and self._is_ahead(digest, member, self.position(member))
                    and self._stale.get((member, digest), _START) < entry.position
                    and not self._is_hidden(member)
                    and int.from_bytes(entry.operation[_CLOCK], "little") in believed(member)
                ):
                    found.add(digest)
        return found

    def _is_hidden(self, member: Member) -> bool:
        view = self._views.get(member)
        return view is not None and view.hidden

    def _is_ahead(self, digest: bytes, member: Member, position: Position) -> bool:
        """Whether what the member pushed of the key is ahead of that place of its log."""
        entry = self._early[digest].get(member)
        return entry is not None and entry.position > position

    # --- inside ------------------------------------------------------------------------------

    def _collect(
        self,
        found: list[Location],
        member: Member,
        position: Position,
        packed: bytes,
        hidden: bool,
    ) -> None:
        if self._stale:
            key = (member, packed[:DIGEST_BYTES])
            denied = self._stale.get(key)
            if denied is not None:
                if position <= denied:
                    return
                del self._stale[key]
        found.append(Location(member, *position, decode_location(packed), hidden))

    def _ring(self, last: int = 0) -> OperationRing:
        return OperationRing(self.config.relay_limit, last)

    def _matches(self, view: _View) -> bool:
        return (view.set.hash, len(view.set)) == (view.head.set_hash, view.head.count)

    def _agrees(self, member: Member, view: _View) -> bool:
        if view.diverged or view.sequence != view.head.sequence or self._matches(view):
            return True
        self._reset(member)
        view.diverged = True
        return False

    def _reset(self, member: Member) -> None:
        view = self._views.get(member)
        if view is not None:
            self.record_count -= len(view.set)
            view.set = LocationSet()
            view.ring = self._ring()
            view.diverged = False

    def _drop_overtaken(self, member: Member, position: Position, operations: bytes) -> None:
        """Drop what was pushed ahead of these operations: the view is past it now."""
        for start in range(0, len(operations), LOCATION_BYTES):
            digest = operations[start : start + DIGEST_BYTES]
            entries = self._early.get(digest)
            if entries and member in entries and entries[member].position <= position:
                del entries[member]
                if not entries:
                    del self._early[digest]

    def _expire_oldest_early(self) -> None:
        arrived_at, digest, member = self._early_order.popleft()
        entries = self._early.get(digest)
        # A newer push of the same key has its own place in the order.
        if entries is not None and member in entries and entries[member].arrived_at == arrived_at:
            del entries[member]
            if not entries:
                del self._early[digest]
