"""What the other members hold: one view per owner, each a reader's copy of that owner's log. Pure.

A view stands at (incarnation, sequence) and holds exactly the set that the owner's log had there.
It moves by contiguous runs of operations that the owner signed (`signed_runs`), or is replaced whole by a snapshot
from the owner itself. The owner's signed head says what the set's hash is at some sequence; a view that passes there
with another hash is dropped until its owner gives a snapshot.

The records of all views are in one `LocationIndex`, a slot per view. A snapshot is put into a slot of its own,
in pieces, which `work` goes on with; nothing of it is seen until the view takes that slot over. Until then the
view stands where it stood, and moves on by operations if there are any.

Two things stand beside the views, both short-lived: operations that were pushed here ahead of the
log (`early`), and locations that their owner denied (`mark_stale`). Each belongs to a place in the
owner's log and has no effect once the view has passed it.

`holders` may be called from any thread when `share` was given a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from itertools import compress, starmap
from struct import Struct
from typing import Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.denials import Denials
from p2pstore.gossip.locations.early_operations import EarlyOperations
from p2pstore.gossip.locations.location_index import DEFAULT_SALT, LocationIndex, digests_of
from p2pstore.gossip.locations.location_shares import LocationShares, who_makes_room
from p2pstore.gossip.locations.log import REMOVED, OperationRing, check_run
from p2pstore.gossip.locations.log import Position as Position
from p2pstore.gossip.locations.published_locations import PublishedLocations
from p2pstore.gossip.locations.signed_runs import SignedRun
from p2pstore.gossip.locations.snapshots import CheckedSnapshot
from p2pstore.gossip.locations.staging import Staged, Staging
from p2pstore.gossip.locations.watched_keys import STEP_RECORDS, WatchedKeys
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    LocationRecord,
    LogHead,
    Member,
    decode_location,
)
from p2pstore.location_table import VERSION_BYTES, Matches
from p2pstore.objects import DIGEST_BYTES, Version

_FLAGS: Final = LOCATION_BYTES - 1
_CLOCK: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 8)
_VERSION: Final = Struct("<QHQ")
_VERSION_PLACE: Final = slice(DIGEST_BYTES, DIGEST_BYTES + VERSION_BYTES)
_MAX_CLOCK: Final = (1 << 64) - 1

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Bounds. `max_records` counts the records of all views."""

    max_records: int = 20_000_000
    relay_limit: int = 8_192
    """Operations of each owner that are kept to pass on, while owners are few."""
    relay_total: int = 131_072
    """Of all owners together, about; but at least `relay_least` of each."""
    relay_least: int = 512
    max_early: int = 100_000
    early_seconds: float = 60.0
    max_stale: int = 100_000

    @property
    def max_rows(self) -> int:
        """More than records: a snapshot is staged beside the view that it replaces."""
        return self.max_records * 3 // 2 + (1 << 16)


@dataclass(frozen=True, slots=True)
class Location:
    """A member's word that it holds a record, as of (`incarnation`, `sequence`) of its log.

    `hidden`: the member is believed dead. `hearsay`: another one said so, not the member in its log, or as a push.
    """

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
class _View:
    member: Member
    incarnation: int
    slot: int
    ring: OperationRing | None = None
    """What can be passed on, once there was something."""
    sequence: int = 0
    head: LogHead = field(default_factory=LogHead)
    hidden: bool = False
    diverged: bool = False

    @property
    def position(self) -> Position:
        return self.incarnation, self.sequence


def _exclusive(
    method: Callable[Concatenate[Directory, _P], _R],
) -> Callable[Concatenate[Directory, _P], _R]:
    """Under the lock that `share` was given."""

    @wraps(method)
    def locked(self: Directory, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


def _changing(
    method: Callable[Concatenate[Directory, _P], _R],
) -> Callable[Concatenate[Directory, _P], _R]:
    """Under that lock, and while clients are told that rows move."""

    @wraps(method)
    def locked(self: Directory, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            published = self._published
            if published is None:
                return method(self, *args, **kwargs)
            published.begin()
            try:
                return method(self, *args, **kwargs)
            finally:
                published.end()

    return locked


class Directory:
    """See the module's docstring. A view exists once `observe_head` was told of its owner.

    `salt`: 128 bits that other members cannot guess, for the index. Or `published`: the index is its table, with
    room for `max_rows` rows.
    """

    def __init__(
        self,
        config: DirectoryConfig | None = None,
        salt: int = DEFAULT_SALT,
        published: PublishedLocations | None = None,
    ) -> None:
        self.config = config or DirectoryConfig()
        self._published = published
        apart = published.apart if published else None
        table = published.table if published else None
        self._index = LocationIndex(self.config.max_rows, salt, table)
        self._lock: AbstractContextManager[object] = nullcontext()
        self._views: dict[Member, _View] = {}
        self._of_slot: dict[int, _View] = {}
        """The slots that count. A snapshot's does not before it is whole."""
        self._staging = Staging(self._index)
        self._watched = WatchedKeys(self._index)
        self._relay_limit = self.config.relay_limit
        self._early = EarlyOperations(self.config.max_early, self.config.early_seconds, apart)
        self._denials = Denials(self.config.max_stale, apart)
        self.shares = LocationShares()
        self._unsettled: set[Member] = set()
        self._moved: set[Member] = set()
        self._own_slot: int | None = None

    @_exclusive
    def close(self) -> None:
        """Let go of the table and forget all. Nothing but `holders` may be called after that."""
        self._published = self._own_slot = None
        self._views.clear()
        self._of_slot.clear()
        index, self._index = self._index, LocationIndex(0)
        index.close()

    def share(self, lock: AbstractContextManager[object]) -> None:
        """From now on other threads may call `holders`; `lock` keeps them apart."""
        self._lock = lock

    @property
    def record_count(self) -> int:
        """Records in all views."""
        own = 0 if self._own_slot is None else self._index.count(self._own_slot)
        return self._index.record_count - self._staging.done_count - own

    def watch(self, held: Set[bytes], awaited: Set[bytes]) -> None:
        """Note every change that concerns a digest in one of these live views of sets, for
        `take_touched`."""
        self._watched.watch(held, awaited)

    @property
    def any_touched(self) -> bool:
        """Whether `take_touched` would give some."""
        return self._watched.any_touched

    def take_touched(self, limit: int) -> list[bytes]:
        """Some of the watched digests that operations, pushes or snapshots of others were about, each once.
        Those that somebody waits for come first: a member that is back touches all that is held in common."""
        return self._watched.take(limit)

    def touch(self, digest: bytes) -> None:
        """Have a digest looked at, though nothing new was heard of it."""
        self._watched.touch(digest)

    # --- views -------------------------------------------------------------------------------

    @_changing
    def observe_head(self, member: Member, incarnation: int, head: LogHead) -> bool:
        """Take in the head of a verified record. False when the view was dropped for a wrong hash.

        A higher incarnation voids everything known of the member before; and so does a head of more locations
        than a peer can hold (`shares`).
        """
        view = self._views.get(member)
        if view is None:
            view = self._open(member, incarnation)
        elif incarnation > view.incarnation:
            self._staging.drop(member)
            self._reset(view)
            view.incarnation, view.head = incarnation, LogHead()
        if incarnation == view.incarnation and not self.shares.allows(member, head.count):
            self._refuse(view)
        elif incarnation == view.incarnation and head.sequence >= view.head.sequence:
            view.head = head
        agrees = self._agrees(view)
        self._note_moved(view)
        return agrees

    def has_view(self, member: Member) -> bool:
        """Whether there is a view of the member's log, if only an empty one."""
        return member in self._views

    def position(self, member: Member) -> Position:
        """Where the view stands; (0, 0) without one."""
        view = self._views.get(member)
        return (0, 0) if view is None else view.position

    def wanted_after(self, member: Member, incarnation: int, log_sequence: int) -> int:
        """Up to where no operations are wanted of a member's log of this incarnation, which stood at `log_sequence`
        when its record was signed. A view that diverged waits for its owner's snapshot."""
        view = self._views.get(member)
        if view is None:
            return 0
        sequence = view.sequence if view.incarnation == incarnation else 0
        return max(sequence, log_sequence) if view.diverged else sequence

    def head(self, member: Member) -> LogHead:
        """The latest signed head that was observed."""
        view = self._views.get(member)
        return LogHead() if view is None else view.head

    def diverged(self, member: Member) -> bool:
        """Whether the view was dropped for a wrong hash and takes nothing but a snapshot."""
        view = self._views.get(member)
        return view is not None and view.diverged

    @property
    def unsettled(self) -> Set[Member]:
        """Whose views are not where their signed heads are, or are `diverged`. Changes with the directory."""
        return self._unsettled

    def take_moved(self) -> set[Member]:
        """Whose views moved, were replaced or forgotten, or got a head since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    @_changing
    def apply(self, member: Member, incarnation: int, run: SignedRun) -> Applied:
        """Carry out a run of a member's operations, whose signature was checked. Raises `ProtocolError` when records
        are not whole.

        Operations that the view already has are skipped; nothing is applied across a gap.
        """
        count = check_run(run.operations)
        view = self._views.get(member)
        if view is None or incarnation > view.incarnation:
            return Applied(Outcome.GAP)
        known = view.sequence + 1 - run.first_sequence
        if incarnation < view.incarnation or known >= count or view.diverged:
            return Applied(Outcome.STALE)
        if member in self.shares.refused:
            return Applied(Outcome.STALE)
        if known < 0:
            return Applied(Outcome.GAP)
        if not self._make_room(view, count - known):
            self._staging.drop(member)
            self._reset(view)
            self._note_moved(view)
            return Applied(Outcome.FULL)
        if view.ring is None:
            view.ring = OperationRing(self._relay_limit)
        view.ring.append(run)
        agrees = self._apply_news(view, run.operations[known * LOCATION_BYTES :])
        self._note_moved(view)
        return Applied(Outcome.APPLIED, count - known) if agrees else Applied(Outcome.DIVERGED)

    def _apply_news(self, view: _View, operations: bytes) -> bool:
        """Carry out operations that follow the view. Whether it then agrees with its head."""
        steps = [operations]
        to_head = (view.head.sequence - view.sequence) * LOCATION_BYTES
        if 0 < to_head < len(operations):
            steps = [operations[:to_head], operations[to_head:]]
        for step in steps:
            self._move_on(view, step)
            if not self._agrees(view):
                return False
        return True

    def since(self, member: Member, sequence: int, limit_bytes: int) -> list[SignedRun]:
        """The runs with a member's operations after `sequence`, to pass on; none when they are not here."""
        view = self._views.get(member)
        ring = None if view is None else view.ring
        return [] if ring is None else ring.since(sequence, limit_bytes)

    def snapshot(self, member: Member) -> tuple[int, int, int, bytes] | None:
        """(incarnation, sequence, set hash, packed records) of a view; None of an empty one."""
        view = self._views.get(member)
        if view is None or not view.sequence:
            return None
        return *view.position, self._index.hash(view.slot), self._index.pack(view.slot)

    def lag(self, member: Member) -> int:
        """How many operations the view is behind the latest signed head."""
        view = self._views.get(member)
        return 0 if view is None else max(0, view.head.sequence - view.sequence)

    def has_room(self, count: int) -> bool:
        """Whether that many more records fit, besides snapshots that are being put in."""
        coming = self.record_count + self._staging.coming_count + count
        fits = coming <= self.config.max_records
        return fits and self._index.has_room(count)

    def may_take(self, member: Member, count: int) -> bool:
        """Whether a set of that many records of a member would be taken: see `shares`."""
        held = 0 if (view := self._views.get(member)) is None else self._index.count(view.slot)
        return self.has_room(count - held) or bool(self._would_go(member, count, count - held))

    def _would_go(self, member: Member, wanted: int, more: int) -> list[Member]:
        """Whose views are to be dropped so that the member has `wanted` records, that many more than now."""
        coming = self.record_count + self._staging.coming_count + more
        counts = {other: self._index.count(view.slot) for other, view in self._views.items()}
        for staged in self._staging:
            counts[staged.member] = max(counts[staged.member], staged.snapshot.count)
        return who_makes_room(counts, member, wanted, coming - self.config.max_records)

    def _make_room(self, view: _View, more: int) -> bool:
        """Whether a view has room for more records, now that larger ones may have gone."""
        count = self._index.count(view.slot)
        if not self.shares.allows(view.member, count):
            self._refuse(view)
            return False
        if self.has_room(more):
            return True
        for member in self._would_go(view.member, count + more, more):
            self._staging.drop(member)
            self._reset(self._views[member])
            self._note_moved(self._views[member])
        return self.has_room(more)

    def _refuse(self, view: _View) -> None:
        """Nothing is known of what the member holds, and nothing is missing."""
        self._staging.drop(view.member)
        self._reset(view)
        view.head = LogHead()
        self._note_moved(view)

    def hide(self, member: Member) -> None:
        """The member is believed dead: its locations come last, and are marked."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = True
            self._publish(view)

    def show(self, member: Member) -> None:
        """The member is back: its locations count again, and touch what is watched."""
        view = self._views.get(member)
        if view is not None:
            view.hidden = False
            self._publish(view)
            self._watched.heard_of_all(view.slot)

    @_changing
    def forget(self, member: Member) -> None:
        """Free everything that is known of the member's locations; `hide` and incarnation stay."""
        view = self._views.get(member)
        if view is not None:
            self._staging.drop(member)
            self._reset(view)
            self._note_moved(view)

    @_changing
    def drop(self, member: Member) -> None:
        """Forget that the member ever had a log."""
        view = self._views.pop(member, None)
        if view is not None:
            self._staging.drop(member)
            self._discard(view.slot)
            self.shares.forget(member)
            self._unsettled.discard(member)
            self._moved.add(member)
            self._share_relay()

    # --- snapshots ---------------------------------------------------------------------------

    @_changing
    def install_snapshot(
        self,
        member: Member,
        incarnation: int,
        sequence: int,
        set_hash: int,
        snapshot: CheckedSnapshot,
    ) -> bool:
        """Have a view replaced whole: now, or when `work` has put in a large one. False, and no effect,
        when it is not ahead of the view or has no room.

        Raises `ProtocolError`, and changes nothing, when the records do not add up to `set_hash`,
        or that is not what the owner signed.
        """
        view = self._views.get(member)
        if view is None or incarnation != view.incarnation or member in self.shares.refused:
            return False
        coming = self._staging.get(member)
        if not self._wants(view, sequence) or (coming and sequence <= coming.sequence):
            return False
        head, count = view.head, snapshot.count
        if snapshot.set_hash != set_hash or (
            sequence == head.sequence and (set_hash, count) != (head.set_hash, head.count)
        ):
            raise ProtocolError(
                "a snapshot of locations does not have the hash that its owner signed"
            )
        self._staging.drop(member)
        if not self._make_room(view, count - self._index.count(view.slot)):
            return False
        staged = self._staging.begin(member, sequence, snapshot)
        if count <= STEP_RECORDS:
            self._stage(view, staged, count)
        return True

    def staging(self, member: Member) -> bool:
        """Whether a snapshot of the member is being put in."""
        return self._staging.get(member) is not None

    @property
    def work_pending(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._staging or self._watched.work_pending or self._index.any_discarded)

    @_changing
    def work(self, limit_records: int | None = None) -> bool:
        """Go on with what takes long, a few milliseconds of it (`STEP_RECORDS`). Whether a view was
        replaced."""
        limit_records = STEP_RECORDS if limit_records is None else limit_records
        self._index.sweep(limit_records)
        self._watched.work(limit_records)
        staged = self._staging.first
        return staged is not None and self._stage(self._views[staged.member], staged, limit_records)

    def _stage(self, view: _View, staged: Staged, limit_records: int) -> bool:
        """Put in some records of a snapshot. Whether it is whole, and the view's."""
        if not self._wants(view, staged.sequence):
            self._staging.drop(view.member)  # operations brought the view there meanwhile
            return False
        self._staging.put(staged, limit_records)
        if not staged.whole:
            return False
        self._discard(view.slot)
        view.slot = self._staging.take(staged)
        self._claim_slot(view)
        view.ring = None
        view.sequence = staged.sequence
        view.diverged = False
        if self._agrees(view):  # the head may have come to stand there
            self._watched.heard_of_all(view.slot)
        self._note_moved(view)
        return True

    def _wants(self, view: _View, sequence: int) -> bool:
        return sequence > view.sequence or view.diverged

    # --- ahead of the log --------------------------------------------------------------------

    @_exclusive
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
        """Note operations that arrived ahead of the log, from its owner or, as `hearsay`, from another. How many were
        news.

        Raises `ProtocolError`, and changes nothing, when sequences and whole records do not pair
        up.
        """
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
        self._watched.heard_of(news)
        return count

    @_exclusive
    def expire_early(self, now: float) -> None:
        """Drop what was pushed so long ago that the log must have told it."""
        self._early.expire(now)

    @_exclusive
    def mark_stale(self, member: Member, digest: bytes, incarnation: int, sequence: int) -> None:
        """The owner denied the key at this place of its log: hide it until the view is past it."""
        self._denials.note(member, digest, (incarnation, sequence))

    # --- looking up --------------------------------------------------------------------------

    @_exclusive
    def holders(self, digest: bytes) -> list[Location]:
        """Who holds the key, hearsay included: owners believed alive first, among them the newest version first."""
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

    def show_own(self, member: Member, operation: bytes) -> None:
        """Let clients know of an object that this peer holds where they do not see it, on its SSD. For them alone:
        `holders` and `held` are about other members."""
        if self._published is None:
            return
        if self._own_slot is None:
            self._own_slot = self._index.open()
            self._published.count(self._own_slot, member, True)
        if self._index.has_room(1):
            self._change_own(self._own_slot, operation)

    def hide_own(self, digests: Iterable[bytes]) -> None:
        """The end of `show_own`, for those objects for which that was called."""
        if self._own_slot is None:
            return
        for digest in digests:
            shown = self._index.get(self._own_slot, digest)
            if shown is not None:
                self._change_own(self._own_slot, shown[:_FLAGS] + bytes((shown[_FLAGS] | REMOVED,)))

    @_changing
    def _change_own(self, slot: int, operation: bytes) -> None:
        self._index.apply(slot, operation)

    @_exclusive
    def held(self, digests: Set[bytes], believed: Callable[[Member], range]) -> set[bytes]:
        """Which of the keys have a holder that is not hidden, in a version whose clock is in the range that
        is believed of that member. A fraction of a microsecond a key, however many members there are."""
        keys = [digest for digest in digests if len(digest) == DIGEST_BYTES]
        matches = self._index.find_many(b"".join(keys))
        is_held = np.zeros(len(keys), np.bool_)
        is_held[matches.queries[self._believed(matches, believed)]] = True
        found = set(compress(keys, is_held.tolist()))
        # Few: what was pushed ahead of the log counts instead, and what was denied does not.
        apart = (self._early.digests | self._denials.digests) & digests if self._any_apart else ()
        for digest in apart:
            found.discard(digest)
            if self._is_held(digest, believed):
                found.add(digest)
        return found

    @_exclusive
    def mentioned(self, digests: Set[bytes]) -> set[bytes]:
        """Which of the keys are in a log, or were pushed ahead of it."""
        keys = list(digests)
        found = {keys[place] for place in self._index.known(b"".join(keys))}
        return found | (self._early.digests & digests)

    @_exclusive
    def of_other_versions(self, versions: Mapping[bytes, Version]) -> set[bytes]:
        """Those of the keys of which a log, or what was pushed ahead of it, names another version than this."""
        keys = list(versions)
        matches = self._index.find_many(b"".join(keys))
        mine = np.frombuffer(
            b"".join(starmap(_VERSION.pack, versions.values())), f"V{VERSION_BYTES}"
        )
        differ = matches.queries[self._index.versions(matches.rows) != mine[matches.queries]]
        found = {keys[place] for place in differ.tolist()}
        for digest in self._early.digests & versions.keys():
            packed = _VERSION.pack(*versions[digest])
            if any(
                early.operation[_VERSION_PLACE] != packed
                for early in self._early.of(digest).values()
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
        clocks_held = self._index.clocks(matches.rows)
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
        """What counts of a key: (owner, place in its log, packed record, whether it is hidden)."""
        early = self._early.of(digest)
        for slot, packed in self._index.find(digest):
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
        """What others say of members whose own logs do not name the key. The place that is claimed counts for nothing:
        else a denial might not reach it."""
        for member, entry in self._early.of(digest).items():
            view = self._views.get(member)
            if not entry.hearsay or view is None or entry.operation[_FLAGS] & REMOVED:
                continue
            named = self._index.get(view.slot, digest) is not None
            if not named and not self._denials.covers(member, digest, view.position):
                record = decode_location(entry.operation)
                yield Location(member, *view.position, record, view.hidden, hearsay=True)

    # --- inside ------------------------------------------------------------------------------

    def _open(self, member: Member, incarnation: int) -> _View:
        view = self._views[member] = _View(member, incarnation, self._index.open())
        self._claim_slot(view)
        self._share_relay()
        return view

    def _move_on(self, view: _View, operations: bytes) -> None:
        self._index.apply(view.slot, operations)
        view.sequence += len(operations) // LOCATION_BYTES
        digests = set(digests_of(operations))
        self._watched.heard_of(digests)
        self._early.overtaken(view.member, view.position, digests)

    def _agrees(self, view: _View) -> bool:
        """Whether the view may be right. A wrong one is dropped."""
        held = self._index.hash(view.slot), self._index.count(view.slot)
        if (
            view.diverged
            or view.sequence != view.head.sequence
            or held == (view.head.set_hash, view.head.count)
        ):
            return True
        self._reset(view)
        view.diverged = True
        return False

    def _reset(self, view: _View) -> None:
        self._discard(view.slot)
        view.slot = self._index.open()
        self._claim_slot(view)
        view.ring = None
        view.sequence = 0
        view.diverged = False

    def _note_moved(self, view: _View) -> None:
        """Call it after each change of where a view or its head stands: others look at no other views."""
        self._moved.add(view.member)
        if view.diverged or view.sequence != view.head.sequence:
            self._unsettled.add(view.member)
        else:
            self._unsettled.discard(view.member)

    def _claim_slot(self, view: _View) -> None:
        self._of_slot[view.slot] = view
        self._publish(view)

    def _publish(self, view: _View) -> None:
        if self._published is not None:
            self._published.count(view.slot, view.member, not view.hidden)

    def _discard(self, slot: int) -> None:
        if self._published is not None:
            self._published.count(slot, 0, False)
        del self._of_slot[slot]
        self._watched.forget(slot)
        self._index.discard(slot)

    def _share_relay(self) -> None:
        """What is kept to pass on is bounded over all owners: halve each one's share when there are many."""
        config, limit = self.config, self.config.relay_limit
        while limit > config.relay_least and limit * len(self._views) > config.relay_total:
            limit = max(limit // 2, config.relay_least)
        if limit != self._relay_limit:
            self._relay_limit = limit
            for view in self._views.values():
                if view.ring is not None:
                    view.ring.resize(limit)
