"""Which members are the homes of each partition: rendezvous hashing (Thaler and Ravishankar 1998). Pure.

All peers that know the same live members have the same table. Of each partition the members with the highest
weights are candidates; `choose_homes` takes its homes of them, so that none has too many. A member
that joins or leaves changes the partitions that it wins or gave, and few others.

The weight of a member for a partition is `mix(member XOR (partition + 1) * 0x9E3779B97F4A7C15)` in 64
bits, where `mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014). It is a bijection, so two
members never tie. Tables are shared by all peers that know the same members: they never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakValueDictionary

import numpy as np
import xxhash
from numpy.typing import NDArray

from p2pstore.gossip.locations.log import MAX_OWN_RECORDS
from p2pstore.gossip.records import PARTITION_COUNT, Member
from p2pstore.objects import MIB

HOME_COUNT: Final = 3
CANDIDATES: Final = 32
"""Of each partition. Where many are full, as many may have to be asked."""
SPARE: Final = 24
"""Members of each partition that are known to come after the candidates: they follow those that leave, and all members
are compared for a partition only when it has none left."""
CELLS_AT_ONCE: Final = 1 << 16
"""Weights in one go: they stay in a processor's cache."""

ROOM: Final = 1.25
"""Places for partitions in the whole cluster, in proportion to how many are needed."""
PAIRS_AT_ONCE: Final = 2048
"""Most are never looked at: the heaviest find homes for all partitions."""

Words = NDArray[np.uint64]

_OFFSETS: Final[Words] = np.arange(1, PARTITION_COUNT + 1, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)

if TYPE_CHECKING:
    from p2pstore.gossip.members.member_table import MemberState
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_UNDO_FIRST: Final = pow(_FIRST, -1, 1 << 64)
_UNDO_SECOND: Final = pow(_SECOND, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """Timing and bounds of the partitioned directory."""

    push_seconds: float = 0.02
    """Shortest time between two batches of operations to homes."""
    push_timeout_seconds: float = 0.5
    push_resend_seconds: float = 0.15
    """Shortest time after which operations that a home did not answer are sent once more."""
    push_retry_seconds: float = 0.05
    push_longest_retry_seconds: float = 2.0
    syncs_per_second: float = 200.0
    sync_bytes_per_second: float = 8.0 * MIB
    """How fast whole partitions go to homes that are new."""
    sync_spread_seconds: float = 0.002
    """For each member: within what time after a change the owners begin with that."""
    audit_seconds: float = 10.0
    """Each home is told once in this time what it should have,"""
    audit_pause_seconds: float = 0.02
    """or, where there are many, one after the other with this pause."""
    trusted_audits: float = 2.5
    """A home vouches for an owner whose audit it has heard within this multiple of that time."""
    former_home_seconds: float = 10.0
    """How long a member that is home no longer is told of operations, and keeps what it has."""
    complete_seconds: float = 0.25
    """How long a home goes by what it found when it looked whether all owners had told it."""


def weight(member: Member, digest: bytes) -> int:
    """Its weight for a key: xxh3-64 of the short name (8 bytes, little-endian) and the digest."""
    return xxhash.xxh3_64_intdigest(member.to_bytes(8, "little") + digest)


def rank(digest: bytes, members: Iterable[Member]) -> list[Member]:
    """All members, highest weight first."""
    return sorted(members, key=lambda member: weight(member, digest), reverse=True)


def weights_of(members: Words, partitions: NDArray[np.intp]) -> Words:
    """A row for each of these partitions, a column for each member."""
    mixed: Words = members[None, :] ^ _OFFSETS[partitions, None]
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _members_of(weights: Words) -> Words:
    """The members with these weights: a row for each partition. 0 where the weight is 0."""
    mixed: Words = weights ^ (weights >> np.uint64(31)) ^ (weights >> np.uint64(62))
    mixed *= np.uint64(_UNDO_SECOND)
    mixed ^= (mixed >> np.uint64(27)) ^ (mixed >> np.uint64(54))
    mixed *= np.uint64(_UNDO_FIRST)
    mixed ^= (mixed >> np.uint64(30)) ^ (mixed >> np.uint64(60))
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
        return [int(partition) for partition in np.nonzero(unlike.any(axis=0))[0]]

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
            weights[np.isin(_members_of(weights), _words(left))] = 0
            weights.sort(axis=1)
        stayed = len(members) - len(joined)
        weights = _with(weights, _words(joined), _EVERY, _lowest(weights, stayed), width)
        counts = np.count_nonzero(weights, axis=1)
        lacking = np.nonzero(counts < min(CANDIDATES, len(members)))[0]
        if lacking.size:
            nobody = np.zeros((lacking.size, 0), np.uint64)
            weights[lacking] = _with(nobody, _words(members), lacking, _lowest(nobody, 0), width)
        return HomeTable(members, weights)


def _lowest(weights: Words, member_count: int) -> Words:
    """The weight above which a member belongs in each row: that of its last one; none where the row has all members."""
    counts = np.count_nonzero(weights, axis=1)
    if not member_count:
        return np.zeros(len(weights), np.uint64)
    width = weights.shape[1]
    last = weights[np.arange(len(weights)), np.minimum(width - counts, width - 1)]
    return np.where(counts == member_count, np.uint64(0), last)


def _with_rows(table: Words, rows: int) -> Words:
    """A copy with at least `rows` rows."""
    more = np.zeros((max(0, rows - len(table)), PARTITION_COUNT), np.uint64)
    return np.concatenate([table, more])


def _words(members: Iterable[Member]) -> Words:
    return np.fromiter(members, dtype=np.uint64)


def _with(
    weights: Words, members: Words, partitions: NDArray[np.intp], above: Words, width: int
) -> Words:
    """The rows of these partitions, `width` weights wide, when these members compete for them as well, each where its
    weight is above the partition's."""
    at_once = max(width, CELLS_AT_ONCE // len(partitions))
    for start in range(0, len(members), at_once):
        offered = weights_of(members[start : start + at_once], partitions)
        offered[offered <= above[:, None]] = 0
        weights = np.concatenate([weights, offered], axis=1)
        if weights.shape[1] > width:
            weights.partition(weights.shape[1] - width, axis=1)
            weights = weights[:, -width:]
    missing = np.zeros((len(weights), max(0, width - weights.shape[1])), np.uint64)
    weights = np.concatenate([missing, weights], axis=1)
    weights.sort(axis=1)
    return weights[:, -width:]


_EVERY: Final = np.arange(PARTITION_COUNT)
NO_HOMES: Final = HomeTable(frozenset(), np.zeros((PARTITION_COUNT, 0), np.uint64))
"""The table of a cluster without members, from which others are made."""

_tables: WeakValueDictionary[frozenset[Member], HomeTable] = WeakValueDictionary()
"""Tables in use in this process, by their members: a simulated cluster needs few."""


def table_of(members: Iterable[Member]) -> HomeTable:
    """The table for these members."""
    return NO_HOMES.changed(frozenset(members))


def places_of(members: Words, member_count: int, needed: int) -> NDArray[np.intp]:
    """How many partitions each member may be home to, at least one, when all together have to be `needed` times."""
    rounding = members.astype(np.float64) / 2.0**64
    places = (ROOM * needed / member_count + rounding).astype(np.intp)
    return np.maximum(places, 1)


def choose_homes(names: Words, weights: Words, home_count: int, member_count: int) -> Words:
    """`home_count` homes for each partition, or all members when they are fewer; the first row has the best. `names`
    and `weights` have a column for each partition, its candidates by weight. Where too few of them have room, the best
    of the others are taken besides."""
    best = names[:home_count]
    if not member_count:
        return best
    needed = best.size
    members, shares = np.unique(best, return_counts=True)
    if (shares <= places_of(members, member_count, needed)).all():
        return best
    held, missing = _assign(names, weights, len(best), member_count)
    held |= ~held & (np.cumsum(~held, axis=0) <= missing)
    homes = np.zeros_like(best)
    row, column = np.nonzero(held)
    homes[np.cumsum(held, axis=0)[row, column] - 1, column] = names[row, column]
    return homes


def _assign(
    names: Words, weights: Words, home_count: int, member_count: int
) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    depth, partition_count = names.shape
    needed = home_count * partition_count
    order = np.argsort(weights, axis=None)[::-1]
    free: dict[int, int] = {}
    wanted = [home_count] * partition_count
    held = np.zeros(depth * partition_count, np.bool_)
    for start in range(0, order.size, PAIRS_AT_ONCE):
        some = order[start : start + PAIRS_AT_ONCE]
        members = names.ravel()[some]
        places = places_of(members, member_count, home_count * partition_count).tolist()
        partitions = (some % partition_count).tolist()
        for pair, member, place, partition in zip(
            some.tolist(), members.tolist(), places, partitions, strict=True
        ):
            if wanted[partition] and (room := free.get(member, place)):
                wanted[partition] -= 1
                free[member] = room - 1
                held[pair] = True
                needed -= 1
        if not needed:
            break
    return held.reshape(names.shape), np.array(wanted, np.intp)


DirectorySetting = Literal["auto", "full", "partitioned"]

RECORD_BYTES: Final = 40
"""Memory of one location in a full directory."""
RATE_SAMPLE_SECONDS: Final = 10.0
RATE_SMOOTHING: Final = 0.3
"""Weight of the newest sample."""


class KeptDirectory(IntEnum):
    """Mode of a peer's directory, as in its record. Numbers are never used twice; one that is not known reads as
    FULL."""

    FULL = 0
    PARTITIONED = 1


def kept_name(number: int) -> str:
    """The word for a record's `directory`; empty for a number that is not known."""
    return KeptDirectory(number).name.lower() if number in KeptDirectory.__members__.values() else ""


@dataclass(frozen=True, slots=True)
class ModeLimits:
    """Above these a peer does not keep the full directory."""

    index_bytes: int = 1 << 30
    changes_per_second: float = 200_000.0
    members: int = 1_000
    return_at: float = 0.8
    """Share of the limits below which it does so again."""
    dwell_seconds: float = 60.0
    """Shortest time between two changes of mode."""
    overlap_seconds: float = 120.0
    """How long a peer keeps both at most before it lets go of the full directory."""


class Phase(Enum):
    FULL = "full"
    NARROWING = "narrowing"
    """Full until the partitions that it is a home of are complete."""
    PARTITIONED = "partitioned"
    WIDENING = "widening"
    """Partitioned until it has followed all logs."""


class DirectoryMode:
    """Which part of the directory this peer keeps. `tick` moves the state machine.

    In `full` mode a peer has a view of every other's log; in `partitioned` mode it has what homes have, and asks the
    homes of other partitions. Every peer decides for itself and says so in its record; both kinds work together. In
    between it does both, so that it can answer for its partitions at every moment: it says that it is partitioned, is
    told what homes are told, and follows the logs as well.
    """

    def __init__(self, setting: DirectorySetting, limits: ModeLimits) -> None:
        self.phase = Phase.PARTITIONED if setting == "partitioned" else Phase.FULL
        self.setting = setting
        self._limits = limits
        self._since = -math.inf
        """Of the last change of mode: a peer that starts decides at once."""

    @property
    def shown(self) -> KeptDirectory:
        """For the peer's record."""
        return KeptDirectory.FULL if self.phase is Phase.FULL else KeptDirectory.PARTITIONED

    @property
    def follows_logs(self) -> bool:
        """Whether gossip is to bring the logs of others."""
        return self.phase is not Phase.PARTITIONED

    @property
    def knows_all(self) -> bool:
        """Whether keys unknown here are most likely nowhere, so that no home need be asked before saying so."""
        return self.phase in (Phase.FULL, Phase.NARROWING)

    def tick(self, load: float, *, views_complete: bool, homes_complete: bool, now: float) -> bool:
        """Go on as the load (share of the limits) asks. Whether the phase is another now. `views_complete`: all logs
        were followed; `homes_complete`: all owners have told what this peer is home of."""
        before = self.phase
        waited = now - self._since
        match self.phase:
            case Phase.FULL:
                if self.setting == "auto" and load > 1.0 and waited >= self._limits.dwell_seconds:
                    # A peer that has not followed the logs yet does not begin with it.
                    self.phase = Phase.NARROWING if views_complete else Phase.PARTITIONED
            case Phase.NARROWING:
                if homes_complete or waited >= self._limits.overlap_seconds:
                    self.phase = Phase.PARTITIONED
            case Phase.PARTITIONED:
                if (
                    self.setting == "auto"
                    and load < self._limits.return_at
                    and waited >= self._limits.dwell_seconds
                ):
                    self.phase = Phase.WIDENING
            case Phase.WIDENING:
                if load > 1.0:
                    self.phase = Phase.PARTITIONED
                elif views_complete:
                    self.phase = Phase.FULL
        began = {Phase.NARROWING, Phase.WIDENING}
        if self.phase is not before and (self.phase in began or before not in began):
            self._since = now
        return self.phase is not before


class ClusterLoad:
    """How much a full directory would have to hold and to follow, from what records say."""

    def __init__(self, limits: ModeLimits) -> None:
        self._limits = limits
        self._heads: dict[Member, tuple[int, int]] = {}
        self._sampled_at = -math.inf
        self.changes_per_second = 0.0

    def of(self, live: Iterable[MemberState], now: float) -> float:
        """Share of the limits: above 1 a full directory is too large."""
        states = [state for state in live if state.signed is not None]
        if now >= self._sampled_at + RATE_SAMPLE_SECONDS:
            self._sample(states, now)
        counts = (state.location_count for state in states)
        locations = sum(count for count in counts if count <= MAX_OWN_RECORDS)  # others are refused
        limits = self._limits
        return max(
            locations * RECORD_BYTES / limits.index_bytes,
            self.changes_per_second / limits.changes_per_second,
            len(states) / limits.members,
        )

    def _sample(self, states: list[MemberState], now: float) -> None:
        heads = {state.member: (state.record_incarnation, state.log_sequence) for state in states}
        changes = 0
        for member, (incarnation, sequence) in heads.items():
            known = self._heads.get(member)
            if known is not None and known[0] == incarnation:
                changes += max(0, sequence - known[1])
        if self._heads and math.isfinite(self._sampled_at):
            rate = changes / (now - self._sampled_at)
            self.changes_per_second += RATE_SMOOTHING * (rate - self.changes_per_second)
        self._heads, self._sampled_at = heads, now
