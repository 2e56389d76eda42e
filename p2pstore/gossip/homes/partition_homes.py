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
CELLS_AT_ONCE: Final = 1 << 19
"""Weights in one go: some MiB of memory while a table is made."""

Words = NDArray[numpy.uint64]

_OFFSETS: Final[Words] = numpy.arange(1, PARTITION_COUNT + 1, dtype=numpy.uint64) * numpy.uint64(
    0x9E3779B97F4A7C15
)
_FIRST: Final = numpy.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = numpy.uint64(0x94D049BB133111EB)


def weights_of(members: Words, partitions: NDArray[numpy.intp] | None = None) -> Words:
    """A row for each member, a column for each partition (all of them unless some are named)."""
    offsets = _OFFSETS if partitions is None else _OFFSETS[partitions]
    mixed: Words = members[:, None] ^ offsets[None, :]
    mixed ^= mixed >> numpy.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> numpy.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> numpy.uint64(31)
    return mixed


class HomeTable:
    """The homes of all partitions for one set of live members. Made by `table_of` and `changed`."""

    def __init__(self, members: frozenset[Member], names: Words, weights: Words) -> None:
        self.members = members
        self._names = names
        self._weights = weights

    @cached_property
    def _chosen(self) -> Words:
        names, weights = self._names[:CANDIDATES], self._weights[:CANDIDATES]
        return choose_homes(names, weights, HOME_COUNT, len(self.members))

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
        rows = max(len(self._names), min(CANDIDATES + SPARE, len(members)))
        names, weights = _with_rows(self._names, rows), _with_rows(self._weights, rows)
        if left:
            _take_out(names, weights, _words(left))
        if joined:
            stayed = len(members) - len(joined)
            _insert(names, weights, _words(joined), _EVERY, _lowest(weights, stayed))
        lacking = numpy.nonzero(_counts(weights) < min(CANDIDATES, len(members)))[0]
        if lacking.size:
            names[:, lacking] = weights[:, lacking] = 0
            _insert(names, weights, _words(members), lacking, _lowest(weights[:, lacking], 0))
        rows = min(CANDIDATES + SPARE, len(members))
        return HomeTable(members, names[:rows], weights[:rows])


def _counts(weights: Words) -> NDArray[numpy.intp]:
    """How many members each partition's column has."""
    counts: NDArray[numpy.intp] = numpy.count_nonzero(weights, axis=0)
    return counts


def _lowest(weights: Words, member_count: int) -> Words:
    """The weight above which a member belongs in each partition's column: that of its last one, or none where the
    column has all of the members."""
    counts = _counts(weights)
    last = weights[counts - 1, numpy.arange(counts.size)]  # of none: the last row, which is empty
    return numpy.where(counts == member_count, numpy.uint64(0), last)


def _take_out(names: Words, weights: Words, members: Words) -> None:
    """Members have left: those that come after them move up."""
    gone = numpy.isin(names, members)
    columns = numpy.nonzero(gone.any(axis=0))[0]
    kept = numpy.where(gone[:, columns], numpy.uint64(0), weights[:, columns])
    order = numpy.argsort(kept, axis=0)[::-1]
    weights[:, columns] = numpy.take_along_axis(kept, order, axis=0)
    names[:, columns] = numpy.take_along_axis(names[:, columns], order, axis=0)
    names[weights == 0] = 0


def _with_rows(table: Words, rows: int) -> Words:
    """A copy with at least so many rows."""
    more = numpy.zeros((max(0, rows - len(table)), PARTITION_COUNT), numpy.uint64)
    return numpy.concatenate([table, more])


def _words(members: Iterable[Member]) -> Words:
    return numpy.fromiter(members, dtype=numpy.uint64)


def _insert(
    names: Words, weights: Words, members: Words, columns: NDArray[numpy.intp], above: Words
) -> None:
    """Have these members compete for these partitions with those that are in the table, where their weight is above
    the partition's."""
    if not len(columns):
        return
    at_once = max(1, CELLS_AT_ONCE // len(columns))
    for start in range(0, len(members), at_once):
        some = members[start : start + at_once]
        offered = weights_of(some, columns)
        offered[offered <= above] = 0
        both = numpy.concatenate([weights[:, columns], offered])
        who = numpy.concatenate(
            [names[:, columns], numpy.broadcast_to(some[:, None], (len(some), len(columns)))]
        )
        best = numpy.argpartition(both, len(both) - len(weights), axis=0)[-len(weights) :]
        chosen = numpy.take_along_axis(both, best, axis=0)
        order = numpy.argsort(chosen, axis=0)[::-1]
        weights[:, columns] = numpy.take_along_axis(chosen, order, axis=0)
        names[:, columns] = numpy.take_along_axis(
            numpy.take_along_axis(who, best, axis=0), order, axis=0
        )
    names[weights == 0] = 0


_EVERY: Final = numpy.arange(PARTITION_COUNT)
_NOBODY: Final[Words] = numpy.zeros((0, PARTITION_COUNT), numpy.uint64)
NO_HOMES: Final = HomeTable(frozenset(), _NOBODY, _NOBODY)
"""The table of a cluster without members, from which others are made."""

_tables: WeakValueDictionary[frozenset[Member], HomeTable] = WeakValueDictionary()
"""Tables in use in this process, by their members: a simulated cluster needs few."""


def table_of(members: Iterable[Member]) -> HomeTable:
    """The table for these members."""
    return NO_HOMES.changed(frozenset(members))
