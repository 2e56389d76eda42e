"""Whole sets of locations as they travel: checked, all at once, before any of it counts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex, digests_of, hash_of
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, MAX_STAMP, REMOVED, check_run, newest_clock
from p2pstore.gossip.records import LOCATION_BYTES, Member
from p2pstore.location_table import RECORD, WHOLE

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
    """Check a snapshot. May run in a worker thread: a million records take a quarter of a second, most of
    it without the interpreter's lock.

    `packed` must not change any more. Raises `ProtocolError` for records that are not whole, repeated or
    withdrawn.
    """
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
