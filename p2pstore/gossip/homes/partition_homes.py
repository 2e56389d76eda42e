"""Which members are the homes of each partition: rendezvous hashing (Thaler and Ravishankar 1998). Pure.

Everybody who knows the same live members has the same table. Of each partition the members with the highest
weights are candidates; which of them are its homes, so that none has too many, is said in `bounded_homes`. A member
that joins or leaves changes the partitions that it wins or gave, and few others.

The weight of a member for a partition is `mix(member XOR (partition + 1) * 0x9E3779B97F4A7C15)` in 64
bits, where `mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014). It is a bijection, so two
members never tie. Tables are shared by all who know the same members: they never change.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final
from weakref import WeakValueDictionary

import numpy
from numpy.typing import NDArray

from p2pstore.gossip.homes.bounded_homes import choose_homes
from p2pstore.gossip.homes.partitions import PARTITION_COUNT
from p2pstore.gossip.records import Member

HOME_COUNT: Final = 3
CANDIDATES: Final = 32
"""Of each partition. Where many are full, as many may have to be asked."""
SPARE: Final = 24
"""Members of each partition that are known to come after the candidates: they follow those that leave, and all members
are compared for a partition only when it has none left."""
CELLS_AT_ONCE: Final = 1 << 16
"""Weights in one go: they stay in a processor's cache."""

Words = NDArray[numpy.uint64]

_OFFSETS: Final[Words] = numpy.arange(1, PARTITION_COUNT + 1, dtype=numpy.uint64) * numpy.uint64(
    0x9E3779B97F4A7C15
)
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_UNDO_FIRST: Final = pow(_FIRST, -1, 1 << 64)
_UNDO_SECOND: Final = pow(_SECOND, -1, 1 << 64)


def weights_of(members: Words, partitions: NDArray[numpy.intp]) -> Words:
    """A row for each of these partitions, a column for each member."""
    mixed: Words = members[None, :] ^ _OFFSETS[partitions, None]
    mixed ^= mixed >> numpy.uint64(30)
    mixed *= numpy.uint64(_FIRST)
    mixed ^= mixed >> numpy.uint64(27)
    mixed *= numpy.uint64(_SECOND)
    mixed ^= mixed >> numpy.uint64(31)
    return mixed


def _members_of(weights: Words) -> Words:
    """Whose weights these are: a row for each partition. 0 where the weight is 0."""
    mixed: Words = weights ^ (weights >> numpy.uint64(31)) ^ (weights >> numpy.uint64(62))
    mixed *= numpy.uint64(_UNDO_SECOND)
    mixed ^= (mixed >> numpy.uint64(27)) ^ (mixed >> numpy.uint64(54))
    mixed *= numpy.uint64(_UNDO_FIRST)
    mixed ^= (mixed >> numpy.uint64(30)) ^ (mixed >> numpy.uint64(60))
    mixed ^= _OFFSETS[:, None]
    mixed[weights == 0] = 0
    return mixed


class HomeTable:
    """The homes of all partitions for one set of live members. Made by `table_of` and `changed`."""

    def __init__(self, members: frozenset[Member], weights: Words) -> None:
        self.members = members
        self._weights = weights
        """A row for each partition with the highest weights in it, the highest last; 0 where there are fewer."""

    @cached_property
    def _chosen(self) -> Words:
        best = self._weights[:, : -CANDIDATES - 1 : -1]
        return choose_homes(_members_of(best).T, best.T, HOME_COUNT, len(self.members))

    @cached_property
    def homes(self) -> list[tuple[Member, ...]]:
        """For each partition its homes, best first: fewer than three when there are fewer members. Choosing them
        takes some ms where members are many, when it is asked for the first time."""
        if not self.members:
            return [()] * PARTITION_COUNT
        return list(zip(*self._chosen.tolist(), strict=True))

    @cached_property
    def by_home(self) -> dict[Member, list[int]]:
        """The partitions that each home answers for."""
        found: dict[Member, list[int]] = {}
        for partition, homes in enumerate(self.homes):
            for member in homes:
                found.setdefault(member, []).append(partition)
        return found

    def differing(self, other: HomeTable) -> list[int]:
        """The partitions whose homes are not the same, in the same order, in both tables."""
        rows = max(len(self._chosen), len(other._chosen))
        unlike = _with_rows(self._chosen, rows) != _with_rows(other._chosen, rows)
        return [int(partition) for partition in numpy.nonzero(unlike.any(axis=0))[0]]

    def changed(self, members: frozenset[Member]) -> HomeTable:
        """The table for these members, made from this one. O(1,024) for each that joined, and O(members) for each
        partition that has no spare candidate left."""
        if members == self.members:
            return self
        known = _tables.get(members)
        if known is None:
            known = _tables[members] = self._made_for(members)
        return known

    def _made_for(self, members: frozenset[Member]) -> HomeTable:
        joined, left = members - self.members, self.members - members
        width = min(CANDIDATES + SPARE, len(members))
        weights = self._weights.copy()
        if left:
            weights[numpy.isin(_members_of(weights), _words(left))] = 0
            weights.sort(axis=1)
        stayed = len(members) - len(joined)
        weights = _with(weights, _words(joined), _EVERY, _lowest(weights, stayed), width)
        counts = numpy.count_nonzero(weights, axis=1)
        lacking = numpy.nonzero(counts < min(CANDIDATES, len(members)))[0]
        if lacking.size:
            nobody = numpy.zeros((lacking.size, 0), numpy.uint64)
            weights[lacking] = _with(nobody, _words(members), lacking, _lowest(nobody, 0), width)
        return HomeTable(members, weights)


def _lowest(weights: Words, member_count: int) -> Words:
    """The weight above which a member belongs in each partition's row: that of its last one, or none where the row has
    all of the members."""
    counts = numpy.count_nonzero(weights, axis=1)
    if not member_count:
        return numpy.zeros(len(weights), numpy.uint64)
    width = weights.shape[1]
    last = weights[numpy.arange(len(weights)), numpy.minimum(width - counts, width - 1)]
    return numpy.where(counts == member_count, numpy.uint64(0), last)


def _with_rows(table: Words, rows: int) -> Words:
    """A copy with at least so many rows."""
    more = numpy.zeros((max(0, rows - len(table)), PARTITION_COUNT), numpy.uint64)
    return numpy.concatenate([table, more])


def _words(members: Iterable[Member]) -> Words:
    return numpy.fromiter(members, dtype=numpy.uint64)


def _with(
    weights: Words, members: Words, partitions: NDArray[numpy.intp], above: Words, width: int
) -> Words:
    """The rows of these partitions, `width` weights wide, when these members compete for them as well, each where its
    weight is above the partition's."""
    at_once = max(width, CELLS_AT_ONCE // len(partitions))
    for start in range(0, len(members), at_once):
        offered = weights_of(members[start : start + at_once], partitions)
        offered[offered <= above[:, None]] = 0
        weights = numpy.concatenate([weights, offered], axis=1)
        if weights.shape[1] > width:
            weights.partition(weights.shape[1] - width, axis=1)
            weights = weights[:, -width:]
    missing = numpy.zeros((len(weights), max(0, width - weights.shape[1])), numpy.uint64)
    weights = numpy.concatenate([missing, weights], axis=1)
    weights.sort(axis=1)
    return weights[:, -width:]


_EVERY: Final = numpy.arange(PARTITION_COUNT)
NO_HOMES: Final = HomeTable(frozenset(), numpy.zeros((PARTITION_COUNT, 0), numpy.uint64))
"""The table of a cluster without members, from which others are made."""

_tables: WeakValueDictionary[frozenset[Member], HomeTable] = WeakValueDictionary()
"""Tables in use in this process, by their members: a simulated cluster needs few."""


def table_of(members: Iterable[Member]) -> HomeTable:
    """The table for these members."""
    return NO_HOMES.changed(frozenset(members))
