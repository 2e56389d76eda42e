"""Whole sets of locations: when one is fetched, and how it is checked before any of it counts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex, digests_of, hash_of
from p2pstore.gossip.locations.log import (
    MAX_OWN_RECORDS,
    MAX_STAMP,
    REMOVED,
    Position,
    check_run,
    newest_clock,
)
from p2pstore.gossip.records import LOCATION_BYTES, Member
from p2pstore.location_table import RECORD, WHOLE

if TYPE_CHECKING:
    from p2pstore.gossip.locations.directory import Directory
    from p2pstore.gossip.members.member_table import MemberState
    from p2pstore.gossip.members.membership import Membership

_PIECE: Final = 4_096
"""Records that are hashed before other threads may run."""

_FEW: Final = 64
UNSIGNED_RECORDS: Final = 65_536
"""More than its owner's signed head counts: the owner may have put this many since it signed that."""

Packed = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class CheckedSnapshot:
    """Packed records, each of another digest and none withdrawn, the XOR of their hashes, and the highest clock of
    their versions: to look for it again would hold the event loop for 13 ms with a million."""

    packed: Packed
    count: int
    set_hash: int
    newest_clock: int


def most_snapshot_bytes(signed_count: int) -> int:
    """Most bytes of the snapshot of an owner whose signed head counts `count` records."""
    return (min(signed_count, MAX_OWN_RECORDS) + UNSIGNED_RECORDS) * LOCATION_BYTES


def check_snapshot(packed: Packed) -> CheckedSnapshot:
    """Check a snapshot, which must not change any more; in a worker thread, as a million records take a quarter of a
    second, mostly without the interpreter's lock. Raises `ProtocolError` for records not whole, repeated or
    withdrawn."""
    count = check_run(packed)
    whole = np.frombuffer(packed, WHOLE)
    if count <= _FEW:
        repeated = len(set(digests_of(packed))) < count
        withdrawn = any(record[-1] & REMOVED for record in whole.tolist())
    else:
        fields = np.frombuffer(packed, RECORD)
        repeated = _repeats(fields)
        withdrawn = bool((fields["flags"] >= REMOVED).any())
    if repeated:
        raise ProtocolError("a snapshot of locations names a key twice")
    if withdrawn:
        raise ProtocolError("a snapshot of locations holds a withdrawn record")
    set_hash = 0
    for start in range(0, count, _PIECE):
        set_hash ^= hash_of(whole[start : start + _PIECE].tolist())
    return CheckedSnapshot(packed, count, set_hash, newest_clock(packed, MAX_STAMP))


def _repeats(fields: npt.NDArray[np.void]) -> bool:
    first = fields["first"].copy()
    order = np.argsort(first)
    alike = np.flatnonzero(first[order[1:]] == first[order[:-1]])
    if not alike.size:
        return False
    # Halves that are alike, by chance or because the digests are.
    suspects = fields[np.unique(np.concatenate((order[alike], order[alike + 1])))]
    pairs = np.stack((suspects["first"], suspects["second"]), axis=1)
    return len(np.unique(pairs, axis=0)) < len(pairs)


@dataclass(slots=True)
class StagedSnapshot:
    """A snapshot of a log at `sequence`; the slot has the first `done` of its records."""

    member: Member
    sequence: int
    snapshot: CheckedSnapshot
    slot: int
    done: int = 0

    @property
    def whole(self) -> bool:
        return self.done == self.snapshot.count


class Staging:
    """At most one snapshot a member; the one that came first goes on first."""

    def __init__(self, index: LocationIndex) -> None:
        self._index = index
        self._staged: dict[Member, StagedSnapshot] = {}

    def __bool__(self) -> bool:
        return bool(self._staged)

    def __iter__(self) -> Iterator[StagedSnapshot]:
        return iter(self._staged.values())

    @property
    def coming_count(self) -> int:
        return sum(staged.snapshot.count for staged in self._staged.values())

    @property
    def done_count(self) -> int:
        return sum(staged.done for staged in self._staged.values())

    @property
    def first(self) -> StagedSnapshot | None:
        return next(iter(self._staged.values()), None)

    def get(self, member: Member) -> StagedSnapshot | None:
        return self._staged.get(member)

    def begin(self, member: Member, sequence: int, snapshot: CheckedSnapshot) -> StagedSnapshot:
        """Begin with a snapshot of a member that has none here."""
        assert member not in self._staged
        staged = self._staged[member] = StagedSnapshot(member, sequence, snapshot, self._index.open())
        return staged

    def put(self, staged: StagedSnapshot, limit: int) -> None:
        """Put in up to `limit` more records. Without room, wait for the index to be swept, if it can be."""
        start = staged.done * LOCATION_BYTES
        piece = memoryview(staged.snapshot.packed)[start : start + limit * LOCATION_BYTES]
        count = len(piece) // LOCATION_BYTES
        if self._index.has_room(count):
            self._index.load(staged.slot, piece)
            staged.done += count
        elif not self._index.any_discarded:
            self.drop(staged.member)

    def take(self, staged: StagedSnapshot) -> int:
        """The slot of a whole one: it is the caller's from now on."""
        assert staged.whole
        del self._staged[staged.member]
        return staged.slot

    def drop(self, member: Member) -> None:
        """Stop putting in the member's snapshot, if there is one."""
        staged = self._staged.pop(member, None)
        if staged is not None:
            self._index.discard(staged.slot)


MAX_IN_FLIGHT: Final = 4
MAX_RECORDS_IN_FLIGHT: Final = 1 << 20
"""Of all snapshots that are fetched at a time, if they are several: some 40 MB."""
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Behind:
    sequence: int
    since: float
    retry_seconds: float = FIRST_RETRY_SECONDS
    retry_at: float = -math.inf


class CatchUp:
    """Watches the views that differ from their owners' signed heads. A snapshot is due when a view stood still for
    `patience_seconds`, or at once when it has another hash than signed or is behind the owner's ring."""

    def __init__(self, directory: Directory, ring_limit: int, patience_seconds: float) -> None:
        self._directory = directory
        self._ring_limit = ring_limit
        self._patience_seconds = patience_seconds
        self._behind: dict[Member, _Behind] = {}

    def due(self, owners: Sequence[MemberState], fetching: set[Member], now: float) -> list[MemberState]:
        """Owners whose snapshots to fetch now; `fetching` are under way. Call it a few times a second."""
        behind: dict[Member, _Behind] = {}
        chosen: list[MemberState] = []
        coming = sum(self._directory.head(member).count for member in fetching)
        unsettled = self._directory.unsettled
        watched = [owner for owner in owners if owner.member in unsettled] if unsettled else []
        for owner in watched:
            member = owner.member
            lag, diverged = self._directory.lag(member), self._directory.diverged(member)
            if not (lag or diverged) or self._directory.staging(member):
                continue
            sequence = self._directory.position(member)[1]
            entry = behind[member] = self._behind.get(member) or _Behind(sequence, now)
            if entry.sequence != sequence:
                entry.sequence, entry.since = sequence, now
            count = self._directory.head(member).count
            patient = now < entry.since + self._patience_seconds
            if patient and not diverged and lag <= self._ring_limit:
                continue
            if (
                member not in fetching
                and entry.retry_at <= now
                and len(fetching) + len(chosen) < MAX_IN_FLIGHT
                and (not coming or coming + count <= MAX_RECORDS_IN_FLIGHT)
                and self._directory.may_take(member, count)
            ):
                chosen.append(owner)
                coming += count
        self._behind = behind
        return chosen

    def failed(self, member: Member, now: float) -> None:
        """A snapshot did not arrive, or was wrong: wait before the next, longer each time."""
        entry = self._behind.get(member)
        if entry is not None:
            entry.retry_at = now + entry.retry_seconds
            entry.retry_seconds = min(2 * entry.retry_seconds, LAST_RETRY_SECONDS)


MARK_SECONDS: Final = 0.5
"""A view that has not come to where its owner's head was this long ago has something missing."""
KEPT_SECONDS: Final = 0.25
"""How long an answer holds."""


class FollowedLogs:
    """Call `mark` a few times a second."""

    def __init__(self, membership: Membership, directory: Directory) -> None:
        self._membership = membership
        self._directory = directory
        self._before: dict[Member, Position] = {}
        """Where the heads were at the last mark, of those that moved since."""
        self._marked_at = -math.inf
        self._complete = False
        self._complete_until = -math.inf

    def moved(self, member: Member, before: Position, now: float) -> None:
        """A member's head, which was at `before`, is elsewhere now."""
        if now < self._marked_at + 2 * MARK_SECONDS:
            self._before.setdefault(member, before)

    def mark(self, now: float) -> None:
        """Note where the heads are."""
        if now >= self._marked_at + MARK_SECONDS:
            self.complete(now)  # by the marks before
            self._marked_at = now
            self._before = {}

    def begin_anew(self) -> None:
        """The logs were not followed until now."""
        self._before = {}
        self._complete_until = -math.inf

    def complete(self, now: float) -> bool:
        """Whether every live member's view is where its head was half a second ago (a new member's: is now)."""
        if self._complete_until <= now:
            self._complete_until = now + KEPT_SECONDS
            self._complete = all(map(self._is_followed, self._directory.unsettled))
        return self._complete

    def _is_followed(self, member: Member) -> bool:
        """Of a member whose view is not where its head is: whether it is at least where that was."""
        state = self._membership.resolve(member)
        if state is None or not state.live or state is self._membership.own:
            return True
        head = state.record_incarnation, state.log_sequence
        return self._directory.position(member) >= self._before.get(member, head)
