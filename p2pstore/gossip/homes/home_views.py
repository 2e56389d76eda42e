"""The home's side of `home_pushes`: per partition and owner, the set that the owner pushed. Pure.

Such a set is a view: the owner's set of that partition after one of its operations. It
moves by operations that follow each other without a gap, or is replaced whole. A view that missed something is
not vouched for until the owner has sent the partition anew. This peer vouches for a partition, that is says that
what it does not know is nowhere, when it has a view of every live owner, and heard of each of them lately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from p2pstore.gossip.homes.home_updates import MAX_SET_RECORDS, CheckedUpdate
from p2pstore.gossip.homes.partition_homes import PartitionConfig
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.location_index import digests_of
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS
from p2pstore.gossip.locations.views import View, who_makes_room
from p2pstore.gossip.records import LOCATION_BYTES, Member, partition_of
from p2pstore.home_messages import PartitionSet
from p2pstore.location_table import BLOCK_ROWS
from p2pstore.objects import DIGEST_BYTES

SWEPT_AT_ONCE: Final = 4_096
SWEPT_FOR_EACH: Final = 2
"""How many rows of what was dropped are freed for each new record, while there is no room."""


@dataclass(slots=True)
class _Owner:
    incarnation: int
    hidden: bool = False
    vouched_until: float = math.inf
    partitions: set[int] = field(default_factory=set)
    records: int = 0
    """In all its views."""


@dataclass(slots=True)
class _Completeness:
    until: float
    basis: tuple[int, int]
    complete: bool


class HomeViews:
    """See the module's docstring. The views are `directory.parts`; call methods that change them inside its
    `changing_rows`."""

    def __init__(self, config: PartitionConfig, directory: Directory) -> None:
        self._config = config
        self.directory = directory
        self._index = directory.index
        self._owners: dict[Member, _Owner] = {}
        self._unwanted: dict[int, float] = {}
        """Partitions that this peer is no home of, and since when."""
        self._changes = 0
        self._completeness: dict[int, _Completeness] = {}

    @property
    def record_count(self) -> int:
        return sum(known.records for known in self._owners.values())

    def _view(self, partition: int, owner: Member) -> View | None:
        return self.directory.parts.get(partition, {}).get(owner)

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
            if not self._audited(owner, partition, number, set_hash, update.sequence):
                behind[partition] = None
        if update.audit_seconds:
            known.vouched_until = now + self._config.trusted_audits * update.audit_seconds
        return list(behind)

    def _install(self, owner: Member, known: _Owner, whole: PartitionSet, sequence: int) -> bool:
        view, count = self._view(whole.partition, owner), len(whole.records) // LOCATION_BYTES
        if view is not None and not view.diverged:
            same = view.number == whole.number and self._index.hash(view.slot) == whole.set_hash
            if same or view.number > whole.number:
                return True  # it comes again, or late
        replaced = 0 if view is None else self._index.count(view.slot)
        if count > MAX_SET_RECORDS or (count and not self._make_room(owner, count, replaced)):
            return False
        view = self.directory.open_part(whole.partition, owner, known.incarnation, hidden=known.hidden)
        view.number, view.sequence = whole.number, sequence
        if count:
            self._index.load(view.slot, whole.records)
            self.directory.watched.heard_of_all(view.slot)
        known.records += count - replaced
        known.partitions.add(whole.partition)
        self._changes += 1
        return True

    def _apply(
        self, owner: Member, known: _Owner, partition: int, number: int, sequence: int, operation: bytes
    ) -> bool:
        """Whether the view is at that operation, or past it, now."""
        view, index = self._view(partition, owner), self._index
        if view is None and number == 1:
            view = self.directory.open_part(partition, owner, known.incarnation, hidden=known.hidden)
            known.partitions.add(partition)
            self._changes += 1
        if view is None or view.diverged:
            return False
        if number <= view.number:
            return True
        if number > view.number + 1 or not self._make_room(owner, 1):
            view.diverged = True
            self._changes += 1
            return False
        before = index.record_count
        index.apply(view.slot, operation)
        known.records += index.record_count - before
        view.number, view.sequence = number, sequence
        self.directory.watched.heard_of({operation[:DIGEST_BYTES]})
        return True

    def _audited(self, owner: Member, partition: int, number: int, set_hash: int, sequence: int) -> bool:
        """Whether the view is as the owner says that it should be."""
        view = self._view(partition, owner)
        if view is None or view.diverged:
            return False
        if view.number > number:
            return True  # the audit comes late
        if view.number == number and self._index.hash(view.slot) == set_hash:
            view.sequence = max(view.sequence, sequence)
            return True
        view.diverged = True
        self._changes += 1
        return False

    def _make_room(self, owner: Member, count: int, replaced: int = 0) -> bool:
        """Whether there is room for `count` more records of the owner. Owners that have more make room."""
        index, has_room = self._index, self.directory.has_room
        wanted = self._owners[owner].records + count - replaced
        if wanted > MAX_OWN_RECORDS:
            return False
        if not has_room(count) and not index.any_discarded:
            counts = {member: known.records for member, known in self._owners.items()}
            for member in who_makes_room(counts, owner, wanted, count):
                self.drop(member)
        if not has_room(count):
            index.sweep(SWEPT_FOR_EACH * (count + BLOCK_ROWS))
        return has_room(count)

    def contested(self, sets: Iterable[PartitionSet]) -> list[bytes]:
        """Keys of these sets that several owners hold."""
        found: list[bytes] = []
        for whole in sets:
            if whole.records:
                rows = digests_of(whole.records)
                queries = self._index.table.find_many(b"".join(rows)).queries
                counts = np.bincount(queries, minlength=len(rows))
                found += [rows[place] for place in np.flatnonzero(counts > 1).tolist()]
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
        views = self.directory.parts.get(partition, {})
        for member, incarnation in owners:
            view, owner = views.get(member), self._owners.get(member)
            if view is None or owner is None or view.diverged:
                return False
            if owner.incarnation < incarnation or owner.vouched_until <= now:
                return False
        return True

    def hide(self, owner: Member) -> None:
        """The owner is believed dead. What it says once it is back must show that nothing was missed."""
        known = self._set_hidden(owner, True)
        if known is not None:
            known.vouched_until = -math.inf
            self._changes += 1

    def show(self, owner: Member) -> None:
        self._set_hidden(owner, False)

    def _set_hidden(self, owner: Member, hidden: bool) -> _Owner | None:
        known = self._owners.get(owner)
        if known is not None:
            known.hidden = hidden
            for partition in known.partitions:
                self.directory.parts[partition][owner].hidden = hidden
        return known

    def owners(self) -> list[Member]:
        return list(self._owners)

    def drop(self, owner: Member) -> None:
        """Forget all that the owner said."""
        known = self._owners.pop(owner, None)
        for partition in () if known is None else known.partitions:
            self.directory.close_part(partition, owner)
        self._changes += 1

    def clear(self) -> None:
        for owner in self.owners():
            self.drop(owner)
        self._completeness.clear()

    def housekeep(self, wanted: Iterable[int], now: float) -> None:
        """Forget partitions that this peer has not been a home of for a while (`wanted` are those it is a home
        of), and free some memory of what was forgotten."""
        unwanted = self.directory.parts.keys() - set(wanted)
        self._unwanted = {partition: self._unwanted.get(partition, now) for partition in unwanted}
        for partition, since in list(self._unwanted.items()):
            if since + 3 * self._config.former_home_seconds <= now:
                self._forget_partition(partition)
        self._completeness = {
            partition: each for partition, each in self._completeness.items() if each.until > now
        }
        self._index.sweep(SWEPT_AT_ONCE)

    def _forget_partition(self, partition: int) -> None:
        for owner, view in list(self.directory.parts[partition].items()):
            known = self._owners[owner]
            known.records -= self._index.count(view.slot)
            known.partitions.discard(partition)
            self.directory.close_part(partition, owner)
        del self._unwanted[partition]
        self._changes += 1
