"""The order of eviction: by rank, and within a rank by the policy. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final

from p2pstore.memory.entries import ObjectEntry, unlink
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, SlotState
from p2pstore.objects import MIB

CANDIDATES_PER_RANK: Final = 8
CANDIDATES_FOR_LARGE: Final = 32
LARGE_BYTES: Final = 1 * MIB
"""Where windows are large, it matters more which one is taken, and choosing takes little beside the copy: with 8
candidates values of all sizes up to a sixteenth of the segment keep 94.6 % of it in use, with 16 96 %, with 32 98 %."""

SECOND_TOUCH_HITS: Final = 2
"""Reads after which an object that came from the SSD, or went there, is worth as much as others."""

SET_ASIDE_PER_STEP: Final = 512
"""Entries set aside, or put back, in one step, at a microsecond each."""

KNOWN_SECONDS: Final = 10.0
"""Looking up who else holds an object takes about as long as evicting it, and those that are cold are weighed again
and again."""

FIRST_GROUP: Final = (0,)
"""All there is, where nothing is queued apart."""

WhoKeeps = Callable[[Sequence[ObjectEntry], float], Sequence[bool]]
"""(entries, now in Unix seconds) -> of each whether another peer holds a copy, and is to keep it before this one."""

_CHEAP, _NORMAL, _SOFT_PINNED = range(3)
_QUEUED_STATES: Final = (SlotState.LIVE, SlotState.RETURNED)
_RANK_WEIGHTS: Final = (1e-9, 1.0, 1e9)
"""Factors of 1e9, so that a window is cheap only when it holds no object of a higher rank."""


def rank_of(entry: ObjectEntry) -> int | None:
    """Lower ranks are evicted first; None means not at all. Soft replicas go first, also those of pinned objects (the
    pin is for the firm copies), and objects on the SSD with few reads: so a scan of many cold objects does not evict
    the objects in use."""
    if entry.references or entry.state not in _QUEUED_STATES:
        return None
    if entry.soft:
        return _CHEAP
    if entry.pin:
        return _SOFT_PINNED if entry.pin is Pin.SOFT else None
    seldom_read = entry.on_ssd and entry.hits < SECOND_TOUCH_HITS
    return _CHEAP if seldom_read else _NORMAL


class EvictionOrder:
    """The entries that may be evicted, by their offset in the segment.

    Leased and hard-pinned entries are not among them, so that finding candidates never walks past them. For the same
    reason entries that may go for some namespaces only are queued apart: in the group that `entry.group` names.
    """

    def __init__(self, policy: EvictionPolicy, group_count: int = 1) -> None:
        self.policy = policy
        self.are_kept_elsewhere: WhoKeeps = lambda entries, now: [False] * len(entries)
        """Tells of each entry whether another peer keeps a copy; such entries go before others."""
        self.on_evictable: Callable[[int], None] | None = None
        """Is told the offset of each entry that may be evicted from now on."""
        self._evictable_bytes = [0] * group_count
        self._cheap_bytes = [0] * group_count
        """Of these, those of the lowest rank."""
        self._groups = [tuple(policy.new_queue() for _ in range(3)) for _ in range(group_count)]
        self._at: dict[int, ObjectEntry] = {}
        """By the number of the granule, as `ExtentAllocator` has it."""
        self._held: set[int] = set()
        self.aside: dict[ObjectEntry, None] = {}
        """Entries that are to go for one large value, and are no candidates for others."""
        self.to_end_aside: deque[ObjectEntry] = deque()
        """Of these, those that stay after all: `end_some_aside` puts them back."""

    def __contains__(self, entry: ObjectEntry) -> bool:
        return entry.rank is not None and entry.offset not in self._held

    def evictable_bytes(self, groups: Sequence[int] | None = None) -> int:
        """Bytes of what may be evicted of these groups, or of all."""
        by_group = self._evictable_bytes
        return sum(by_group) if groups is None else sum([by_group[each] for each in groups])

    @property
    def cheap_bytes(self) -> int:
        """Bytes of what may be evicted and is of the lowest rank."""
        return sum(self._cheap_bytes)

    def admit(self, entries: Sequence[ObjectEntry], now: float) -> None:
        """Take in new entries."""
        self.policy.admitted(entries, now)
        self.update(*entries)

    def follow(self, entry: ObjectEntry, before: ObjectEntry | None) -> None:
        """A new entry follows another one of its chain, if that is here."""
        if before is not None and before is not entry:
            entry.follows = before
            before.followers += 1

    def update(self, *entries: ObjectEntry) -> None:
        """Take in that the entries' references, pins or states changed; they count as just used, in this order."""
        by_queue: dict[tuple[int, int], list[ObjectEntry]] = {}
        some: list[ObjectEntry] = []
        last: tuple[int, int] | None = None
        for entry in entries:
            if entry.rank is not None:
                self.discard(entry)
            entry.rank = rank = rank_of(entry)
            if rank is None:
                continue
            group = entry.group
            self._at[entry.offset // GRANULE_BYTES] = entry
            self._evictable_bytes[group] += entry.extent_bytes
            if rank == _CHEAP:
                self._cheap_bytes[group] += entry.extent_bytes
            if last is None or last[0] != group or last[1] != rank:
                last = group, rank
                some = by_queue.setdefault(last, [])
            some.append(entry)
            if self.on_evictable is not None:
                self.on_evictable(entry.offset)
        for (group, rank), some in by_queue.items():
            self.policy.queued += len(some)
            self._groups[group][rank].add(*some)

    def hold(self, entry: ObjectEntry) -> None:
        """An entry that is not used, but looked at, may not be evicted until `put_back`; it keeps its place."""
        self._held.add(entry.offset)
        self._count(entry, -entry.extent_bytes)

    def put_back(self, entry: ObjectEntry) -> None:
        """The end of `hold`. Where its rank is another one by now, the entry is the last there."""
        if entry.offset in self._held:
            self._held.discard(entry.offset)
            self._count(entry, entry.extent_bytes)
            if self.on_evictable is not None:
                self.on_evictable(entry.offset)
        if entry.rank != rank_of(entry):
            self.update(entry)

    def discard(self, *entries: ObjectEntry) -> None:
        """The entries may not be evicted for now."""
        queued = [entry for entry in entries if entry.rank is not None]
        for entry in queued:
            offset, group = entry.offset, entry.group
            if offset in self._held:
                self._held.discard(offset)
            else:
                self._evictable_bytes[group] -= entry.extent_bytes
                if entry.rank == _CHEAP:
                    self._cheap_bytes[group] -= entry.extent_bytes
            entry.rank = None
            del self._at[offset // GRANULE_BYTES]
        unlink(*queued)
        self.policy.queued -= len(queued)

    def _count(self, entry: ObjectEntry, more_bytes: int) -> None:
        self._evictable_bytes[entry.group] += more_bytes
        if entry.rank == _CHEAP:
            self._cheap_bytes[entry.group] += more_bytes

    def set_aside(self, offset: int) -> ObjectEntry:
        """Take the evictable entry there out of the order for one large value, until it is `gone` or `to_end_aside`."""
        entry = self._at[offset // GRANULE_BYTES]
        self.discard(entry)
        self.aside[entry] = None
        return entry

    def end_some_aside(self) -> None:
        """Put up to 512 entries back into the order."""
        for _ in range(min(SET_ASIDE_PER_STEP, len(self.to_end_aside))):
            entry = self.to_end_aside.popleft()
            self.aside.pop(entry, None)
            if entry not in self:
                self.update(entry)

    def gone(self, *entries: ObjectEntry, evicted: bool) -> None:
        """The entries were withdrawn: for others that needed their room (`evicted`), or for another reason."""
        self.discard(*entries)
        if self.aside:
            for entry in entries:
                self.aside.pop(entry, None)
        for entry in entries:
            if entry.follows is not None:
                entry.follows.followers -= 1
                entry.follows = None
        if evicted:
            self.policy.evicted(entries)

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """The entry is read `count` times just now."""
        self.policy.read(entry, count, now)
        entry.hits += count
        entry.last_access = now
        if entry.rank is None:
            return
        if entry.rank == _CHEAP and entry.on_ssd and entry.offset not in self._held:
            self.update(entry)  # it may be worth more by now
        else:
            self._groups[entry.group][entry.rank].used(entry)

    def coldest(self, *, cheap: bool = True) -> Iterator[ObjectEntry]:
        """Entries in the order of eviction, by rank and policy; without `cheap`, the lowest rank is left out. Groups
        give the same share each. The order must not change during the iteration."""
        ranks = range(_CHEAP if cheap else _NORMAL, 3)
        if len(self._groups) == 1:
            for rank in ranks:
                yield from self._groups[0][rank].coldest()
            return
        gone = [0] * len(self._groups) if cheap else self._cheap_bytes
        shares = [part / max(1, all_) for part, all_ in zip(gone, self._evictable_bytes, strict=True)]
        for rank in ranks:
            yield from self._coldest_of_rank(rank, shares)

    def coldest_of(self, group: int) -> Iterator[ObjectEntry]:
        """The same for one group. Nothing may change the order meanwhile."""
        for rank in range(_CHEAP, 3):
            yield from self._groups[group][rank].coldest()

    def _coldest_of_rank(self, rank: int, shares: list[float]) -> Iterator[ObjectEntry]:
        """Always the next of the group that has had the smallest share of its bytes in `shares`, which grow."""
        heap: list[tuple[float, int, ObjectEntry, Iterator[ObjectEntry]]] = []
        for number, group in enumerate(self._groups):
            queue = group[rank].coldest()
            if (first := next(queue, None)) is not None:
                heap.append((shares[number], number, first, queue))
        heapify(heap)
        while heap:
            share, number, entry, queue = heap[0]
            yield entry
            shares[number] = share + entry.extent_bytes / max(1, self._evictable_bytes[number])
            if (following := next(queue, None)) is not None:
                heapreplace(heap, (shares[number], number, following, queue))
            else:
                heappop(heap)

    def at(self, *offsets: int) -> list[ObjectEntry]:
        """The evictable entries that begin there, without those that may not go any more."""
        at, held = self._at, self._held
        found = [at.get(offset // GRANULE_BYTES) for offset in offsets]
        return [entry for entry in found if entry is not None and entry.offset not in held]

    def cost_at(self, offset: int, now: float, groups: Container[int] = FIRST_GROUP) -> float | None:
        """The cost of evicting the entry at `offset`; None when no evictable entry of these groups begins there."""
        entry = self._at.get(offset // GRANULE_BYTES)
        if entry is None or entry.group not in groups or offset in self._held:
            return None
        assert entry.rank is not None
        if now >= entry.known_until:
            self._look_up([entry], now)
        return self.policy.cost(entry, now) * _RANK_WEIGHTS[entry.rank]

    def costs(self, entries: Sequence[ObjectEntry], now: float) -> list[float]:
        """The cost of evicting each of these `candidates`."""
        cost = self.policy.cost
        return [cost(entry, now) * _RANK_WEIGHTS[entry.rank or _CHEAP] for entry in entries]

    def _look_up(self, entries: Sequence[ObjectEntry], now: float) -> None:
        """Ask which of these another peer keeps, unless that is known."""
        due = [entry for entry in entries if now >= entry.known_until]
        if due:
            for entry, kept in zip(due, self.are_kept_elsewhere(due, now), strict=True):
                entry.is_kept_elsewhere = kept
                entry.known_until = now + KNOWN_SECONDS

    def may_go(self, offset: int, groups: Container[int]) -> bool:
        """Whether an evictable entry of one of these groups begins at `offset`."""
        entry = self._at.get(offset // GRANULE_BYTES)
        return entry is not None and entry.group in groups and offset not in self._held

    def candidates(
        self, needed_bytes: int, groups: Sequence[int], now: float, share: int = 1, windows: int = 1
    ) -> list[ObjectEntry]:
        """The entries of each rank that would go first, the lowest rank first: at least `windows`, more of them for
        large `needed_bytes`, and fewer of each group where `share` places divide the work."""
        count = CANDIDATES_PER_RANK if needed_bytes < LARGE_BYTES else CANDIDATES_FOR_LARGE
        count = max(count, windows)
        entries: list[ObjectEntry] = []
        for rank in range(3):
            for group in groups:
                entries += islice(self._groups[group][rank].coldest(), -(-count // share))
        if self._held:
            entries = [entry for entry in entries if entry.offset not in self._held]
        self._look_up(entries, now)
        return entries
