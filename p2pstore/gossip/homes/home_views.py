"""The home's side of `home_pushes`: per partition and owner, the set that the owner pushed. Pure.

Such a set is a view: the owner's set of that partition after one of its operations. It
moves by operations that follow each other without a gap, or is replaced whole. A view that missed something is
not vouched for until the owner has sent the partition anew. This peer vouches for a partition, that is says that
what it does not know is nowhere, when it has a view of every live owner, and heard of each of them lately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Final

import numpy

from p2pstore.gossip.homes.home_updates import LARGEST_SET_RECORDS, CheckedUpdate
from p2pstore.gossip.homes.partition_homes import PartitionConfig, partition_of
from p2pstore.gossip.locations.location_index import DEFAULT_SALT, LocationIndex
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS
from p2pstore.gossip.locations.views import Location, Position, who_makes_room
from p2pstore.gossip.records import LOCATION_BYTES, Member, decode_location
from p2pstore.home_messages import PartitionSet
from p2pstore.location_table import BLOCK_ROWS
from p2pstore.objects import DIGEST_BYTES

SWEPT_AT_ONCE: Final = 4_096
SWEPT_FOR_EACH: Final = 2
"""How many rows of what was dropped are freed for each new record, while there is no room."""


@dataclass(slots=True)
class _View:
    """An owner's set of one partition. `sequence`: the owner's log was there when it said so last."""

    number: int
    sequence: int
    slot: int | None = None
    whole: bool = True
    """Whether nothing was missed."""


@dataclass(slots=True)
class _Owner:
    incarnation: int
    hidden: bool = False
    vouched_until: float = float("inf")
    partitions: set[int] = field(default_factory=set)
    records: int = 0
    """In all its views."""


@dataclass(slots=True)
class _Completeness:
    until: float
    basis: tuple[int, int]
    complete: bool


class HomeViews:
    """See the module's docstring. `touch` is told of every digest that an update is about."""

    def __init__(
        self, config: PartitionConfig, touch: Callable[[bytes], None], salt: int = DEFAULT_SALT
    ) -> None:
        self._config = config
        self._salt = salt
        self._touch = touch
        self._index: LocationIndex | None = None
        self._owners: dict[Member, _Owner] = {}
        self._views: dict[int, dict[Member, _View]] = {}
        self._of_slot: dict[int, tuple[Member, int]] = {}
        self._unwanted: dict[int, float] = {}
        """Partitions that this peer is no home of, and since when."""
        self._changes = 0
        self._completeness: dict[int, _Completeness] = {}

    @property
    def record_count(self) -> int:
        """Locations in all views."""
        return 0 if self._index is None else self._index.record_count

    # --- taking in ---------------------------------------------------------------------------

    def take(self, owner: Member, update: CheckedUpdate, now: float) -> list[int]:
        """Take in what an owner says. The partitions that it should send whole."""
        known = self._owners.get(owner)
        if known is None or update.incarnation > known.incarnation:
            self.drop(owner)
            known = self._owners[owner] = _Owner(update.incarnation, known is not None and known.hidden)
        elif update.incarnation < known.incarnation:
            return []  # of an earlier life
        behind: dict[int, None] = {}
        for whole in update.sets:
            if not self._install(owner, known, whole, update.sequence):
                behind[whole.partition] = None
        for number, sequence, operation in update.operations:
            partition = partition_of(operation)
            if (
                number
                and partition not in behind
                and not self._apply(owner, known, partition, number, sequence, operation)
            ):
                behind[partition] = None
        for partition, number, set_hash in update.audit:
            if not self._audited(owner, known, partition, number, set_hash, update.sequence):
                behind[partition] = None
        if update.audit_seconds:
            known.vouched_until = now + self._config.trusted_audits * update.audit_seconds
        return list(behind)

    def _install(self, owner: Member, known: _Owner, whole: PartitionSet, sequence: int) -> bool:
        view = self._views.get(whole.partition, {}).get(owner)
        if view is not None and view.whole:
            same = view.number == whole.number and self._hash(view) == whole.set_hash
            if same or view.number > whole.number:
                return True  # it comes again, or late
        slot = None
        count = len(whole.records) // LOCATION_BYTES
        if count:
            index = self._room_for(owner, count, view) if count <= LARGEST_SET_RECORDS else None
            if index is None:
                return False
            slot = index.open()
            index.load(slot, whole.records)
            self._of_slot[slot] = (owner, whole.partition)
            known.records += count
        self._close(known, view)
        self._views.setdefault(whole.partition, {})[owner] = _View(whole.number, sequence, slot)
        known.partitions.add(whole.partition)
        self._changes += 1
        for start in range(0, len(whole.records), LOCATION_BYTES):
            self._touch(whole.records[start : start + DIGEST_BYTES])
        return True

    def _apply(
        self, owner: Member, known: _Owner, partition: int, number: int, sequence: int, operation: bytes
    ) -> bool:
        """Whether the view is at that operation, or past it, now."""
        views = self._views.setdefault(partition, {})
        view = views.get(owner)
        if view is None and number == 1:
            view = views[owner] = _View(0, sequence)
            known.partitions.add(partition)
            self._changes += 1
        if view is None or not view.whole:
            return False
        if number <= view.number:
            return True
        index = self._room_for(owner, 1)
        if number > view.number + 1 or index is None:
            view.whole = False
            self._changes += 1
            return False
        if view.slot is None:
            view.slot = index.open()
            self._of_slot[view.slot] = (owner, partition)
        before = index.record_count
        index.apply(view.slot, operation)
        known.records += index.record_count - before
        view.number, view.sequence = number, sequence
        self._touch(operation[:DIGEST_BYTES])
        return True

    def _audited(
        self, owner: Member, known: _Owner, partition: int, number: int, set_hash: int, sequence: int
    ) -> bool:
        """Whether the view is as the owner says that it should be."""
        view = self._views.get(partition, {}).get(owner)
        if view is None:
            return False
        if view.whole and view.number > number:
            return True  # the audit comes late
        right = view.whole and view.number == number and self._hash(view) == set_hash
        if right:
            view.sequence = max(view.sequence, sequence)
        elif view.whole:
            view.whole = False
            self._changes += 1
        return right

    def _hash(self, view: _View) -> int:
        return 0 if view.slot is None or self._index is None else self._index.hash(view.slot)

    def _room_for(
        self, owner: Member, count: int, replaced: _View | None = None
    ) -> LocationIndex | None:
        """The index, when it has room for `count` more records of the owner. Owners that have more make room."""
        if self._index is None:
            self._index = LocationIndex(self._config.max_records, self._salt)
        index = self._index
        wanted = self._owners[owner].records + count
        if replaced is not None and replaced.slot is not None:
            wanted -= index.count(replaced.slot)
        if wanted > MAX_OWN_RECORDS:
            return None
        if not index.has_room(count) and not index.any_discarded:
            counts = {member: known.records for member, known in self._owners.items()}
            for member in who_makes_room(counts, owner, wanted, count):
                self.drop(member)
        if not index.has_room(count):
            index.sweep(SWEPT_FOR_EACH * (count + BLOCK_ROWS))
        return index if index.has_room(count) else None

    def _close(self, known: _Owner, view: _View | None) -> None:
        if view is not None and view.slot is not None and self._index is not None:
            known.records -= self._index.count(view.slot)
            self._index.discard(view.slot)
            del self._of_slot[view.slot]

    # --- looking up --------------------------------------------------------------------------

    def holders(self, digest: bytes) -> list[Location]:
        """The holders of the key, in no particular order."""
        found: list[Location] = []
        if self._index is None:
            return found
        for slot, packed in self._index.table.find(digest):
            owner, partition = self._of_slot[slot]
            known, view = self._owners[owner], self._views[partition][owner]
            found.append(
                Location(owner, known.incarnation, view.sequence, decode_location(packed), known.hidden)
            )
        return found

    def known(self, digests: Set[bytes]) -> set[bytes]:
        """The keys that have a known holder."""
        if self._index is None:
            return set()
        keys = [digest for digest in digests if len(digest) == DIGEST_BYTES]
        queries = self._index.table.find_many(b"".join(keys)).queries
        return {keys[place] for place in numpy.unique(queries).tolist()}

    def contested(self, sets: Iterable[PartitionSet]) -> list[bytes]:
        """Keys of these sets that several owners hold."""
        found: list[bytes] = []
        for whole in sets:
            if self._index is None or not whole.records:
                continue
            rows = [
                whole.records[start : start + DIGEST_BYTES]
                for start in range(0, len(whole.records), LOCATION_BYTES)
            ]
            counts = numpy.bincount(
                self._index.table.find_many(b"".join(rows)).queries, minlength=len(rows)
            )
            found += [rows[place] for place in numpy.flatnonzero(counts > 1).tolist()]
        return found

    def complete(
        self, partition: int, version: int, owners: Iterable[tuple[Member, int]], now: float
    ) -> bool:
        """Whether what is not known here of this partition is nowhere: there is a view of each of these live
        owners (member, incarnation), which missed nothing. `version` tells when they are others."""
        known = self._completeness.get(partition)
        basis = (version, self._changes)
        if known is None or known.basis != basis or known.until <= now:
            complete = self._vouches(partition, owners, now)
            until = now + self._config.complete_seconds
            known = self._completeness[partition] = _Completeness(until, basis, complete)
        return known.complete

    def _vouches(self, partition: int, owners: Iterable[tuple[Member, int]], now: float) -> bool:
        views = self._views.get(partition, {})
        for member, incarnation in owners:
            view, owner = views.get(member), self._owners.get(member)
            if view is None or owner is None or not view.whole:
                return False
            if owner.incarnation < incarnation or owner.vouched_until <= now:
                return False
        return True

    def position(self, owner: Member, digest: bytes) -> Position:
        """How far the owner's log was when it last spoke of the key's partition."""
        view = self._views.get(partition_of(digest), {}).get(owner)
        known = self._owners.get(owner)
        return (0, 0) if view is None or known is None else (known.incarnation, view.sequence)

    # --- owners and partitions that come and go ----------------------------------------------

    def hide(self, owner: Member) -> None:
        """The owner is believed dead. What it says once it is back must show that nothing was missed."""
        known = self._owners.get(owner)
        if known is not None:
            known.hidden = True
            known.vouched_until = -float("inf")
            self._changes += 1

    def show(self, owner: Member) -> None:
        """The owner is back."""
        known = self._owners.get(owner)
        if known is not None:
            known.hidden = False

    def owners(self) -> list[Member]:
        """The members that have said anything."""
        return list(self._owners)

    def drop(self, owner: Member) -> None:
        """Forget all that the owner said."""
        known = self._owners.pop(owner, None)
        if known is not None:
            for partition in known.partitions:
                self._close(known, self._views[partition].pop(owner))
                if not self._views[partition]:
                    del self._views[partition]
        self._changes += 1

    def housekeep(self, wanted: Iterable[int], now: float) -> None:
        """Forget partitions that this peer has not been a home of for a while (`wanted` are those it is a home
        of), and free some memory of what was forgotten."""
        unwanted = self._views.keys() - set(wanted)
        self._unwanted = {partition: self._unwanted.get(partition, now) for partition in unwanted}
        for partition, since in list(self._unwanted.items()):
            if since + 3 * self._config.former_home_seconds <= now:
                self._forget_partition(partition)
        self._completeness = {
            partition: each for partition, each in self._completeness.items() if each.until > now
        }
        if self._index is not None:
            self._index.sweep(SWEPT_AT_ONCE)

    def _forget_partition(self, partition: int) -> None:
        for owner, view in self._views.pop(partition).items():
            known = self._owners[owner]
            self._close(known, view)
            known.partitions.discard(partition)
        self._unwanted.pop(partition, None)
        self._changes += 1
