"""Snapshots that are being put into slots of their own, piece by piece. Pure.

Nothing of such a slot counts before the snapshot is whole and a view takes the slot over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p2pstore.gossip.locations.location_index import LocationIndex
from p2pstore.gossip.locations.snapshots import CheckedSnapshot
from p2pstore.gossip.records import LOCATION_BYTES, Member


@dataclass(slots=True)
class Staged:
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
        self._staged: dict[Member, Staged] = {}

    def __bool__(self) -> bool:
        return bool(self._staged)

    def __iter__(self) -> Iterator[Staged]:
        return iter(self._staged.values())

    @property
    def coming_count(self) -> int:
        """Records of all the snapshots."""
        return sum(staged.snapshot.count for staged in self._staged.values())

    @property
    def done_count(self) -> int:
        """Records of them that are in the index."""
        return sum(staged.done for staged in self._staged.values())

    @property
    def first(self) -> Staged | None:
        """The one to go on with."""
        return next(iter(self._staged.values()), None)

    def get(self, member: Member) -> Staged | None:
        return self._staged.get(member)

    def begin(self, member: Member, sequence: int, snapshot: CheckedSnapshot) -> Staged:
        """Begin with a snapshot of a member that has none here."""
        assert member not in self._staged
        staged = self._staged[member] = Staged(member, sequence, snapshot, self._index.open())
        return staged

    def put(self, staged: Staged, limit: int) -> None:
        """Put in up to `limit` more records. Without room for them, wait for the index to be swept; where
        there is nothing to sweep, give up."""
        start = staged.done * LOCATION_BYTES
        piece = memoryview(staged.snapshot.packed)[start : start + limit * LOCATION_BYTES]
        count = len(piece) // LOCATION_BYTES
        if self._index.has_room(count):
            self._index.load(staged.slot, piece)
            staged.done += count
        elif not self._index.any_discarded:
            self.drop(staged.member)

    def take(self, staged: Staged) -> int:
        """The slot of a whole one: it is the caller's from now on."""
        assert staged.whole
        del self._staged[staged.member]
        return staged.slot

    def drop(self, member: Member) -> None:
        """Stop putting in the member's snapshot, if there is one."""
        staged = self._staged.pop(member, None)
        if staged is not None:
            self._index.discard(staged.slot)
