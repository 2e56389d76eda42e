"""Eviction for chains of blocks: tails before heads, and blocks with repeated reads last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain
from typing import Final

from p2pstore.memory.entries import EntryList, ObjectEntry, unlink
from p2pstore.memory.policies.interface import NEW_SHARE, EvictionPolicy, EvictionQueue, Ghosts, worth
from p2pstore.memory.segment_layout import SlotState

MAX_CREDITS: Final = 3
CORRELATED_SECONDS: Final = 1.0
"""Reads within this time after the last use are part of it: by several ranks of one engine, or by the writer."""
GAP_WEIGHT: Final = 0.002
"""Of one more observation in the geometric mean, which a few very long gaps hardly move: it follows some hundred
requests of some blocks each."""
BURST_SECONDS: Final = 2.0
"""A block used within this time after the block before it counts as used together with it."""
MAX_ANCESTORS: Final = 1_024
FOLLOWED: Final = 2.0
"""Factor on the cost of losing a block that later blocks of its chain build on. Below `extent_allocator.MUCH_MORE`, so
that such a block can still go ahead of need, with those later ones."""


class PrefixAware(EvictionPolicy):
    """For chains of blocks that are read from their heads: each repeated read keeps a block for one more typical gap.

    *Credits*: the pause between two turns of a conversation is longer than small caches keep anything, but typical of
    the load. An object that was read again before is more likely to be read once more, so each such read (up to three)
    lets it stay for as long as the gap that was typical lately: it goes when its last use, plus that gap for each
    credit, lies furthest back. Credits and gaps are also learned from what comes back after it was evicted, and so
    also where everything goes before it could be read again. A tenth of the room is for objects without credit.

    *Chains*: a block is worth nothing without those before it. A block is queued just before the block that it follows,
    when both were used together, so that tails go first; and its use is a use of those before it, although the reader
    may have them already. (The caller sets `follows` where it knows the chain; without it, blocks are ordered alone.)
    """

    def __init__(self) -> None:
        self.gap_seconds = 0.0
        """The typical time between two uses of an object."""
        self._ghosts = Ghosts()

    def new_queue(self) -> EvictionQueue:
        return _CreditQueue(self)

    def stays_until(self, entry: ObjectEntry) -> float:
        return entry.last_access + entry.standing * self.gap_seconds

    def cost(self, entry: ObjectEntry, now: float) -> float:
        idle = (MAX_CREDITS - entry.standing) * self.gap_seconds
        if now > entry.last_access:
            idle += now - entry.last_access
        return worth(entry) * (FOLLOWED if entry.followers else 1.0) / (1.0 + idle)

    def admitted(self, entries: Sequence[ObjectEntry], now: float) -> None:
        for entry, credits, last_access in self._ghosts.take(entries):
            entry.standing = self._earned(credits, now - last_access)

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        if count:
            entry.standing = self._earned(entry.standing, now - entry.last_access)

    def evicted(self, entries: Sequence[ObjectEntry]) -> None:
        self._ghosts.add(entries, self.queued)

    def _earned(self, credits: int, gap: float) -> int:
        """Credits after one more use, `gap` seconds after the one before."""
        if gap < CORRELATED_SECONDS:
            return credits
        if credits < MAX_CREDITS:  # shared by all, as a system prompt is: read all the time
            usual = self.gap_seconds or gap
            self.gap_seconds = usual * (gap / usual) ** GAP_WEIGHT
        return min(MAX_CREDITS, credits + 1)


class _CreditQueue(EvictionQueue):
    """A list for each number of credits; each of them in order of last use."""

    def __init__(self, policy: PrefixAware) -> None:
        self._policy = policy
        self._lists = tuple(EntryList() for _ in range(MAX_CREDITS + 1))

    def add(self, *entries: ObjectEntry) -> None:
        if any(entry.standing or entry.follows is not None for entry in entries):
            for entry in entries:
                self._place(entry)
        else:
            self._lists[0].append(*entries)

    def used(self, entry: ObjectEntry) -> None:
        unlink(entry)
        self._place(entry)

    def coldest(self) -> Iterator[ObjectEntry]:
        new, again = self._lists[0], self._lists[1:]
        if self._spares_new:
            return chain(self._in_order(again), new)
        return self._in_order(self._lists)

    def _in_order(self, lists: Iterable[EntryList]) -> Iterator[ObjectEntry]:
        filled = [each for each in lists if each.coldest is not None]
        return iter(filled[0]) if len(filled) == 1 else merge(*filled, key=self._policy.stays_until)

    @property
    def _spares_new(self) -> bool:
        """Whether what was not read again has so little room that it could not be. But what others build on does not
        go for that: those would be among the new ones, and worth nothing."""
        new, again = self._lists[0], self._lists[1:]
        coldest = [each.coldest for each in again if each.coldest is not None]
        if not coldest or new.bytes >= NEW_SHARE * sum(each.bytes for each in self._lists):
            return False
        return not min(coldest, key=self._policy.stays_until).followers

    def _place(self, entry: ObjectEntry) -> None:
        queue, before = self._lists[entry.standing], entry.follows
        if before is None:
            queue.append(entry)
        elif before.within is queue and _together(before, entry):
            queue.insert_before(entry, before)
        else:
            queue.append(entry)
            self._raise_ancestors(entry)

    def _raise_ancestors(self, entry: ObjectEntry) -> None:
        """Those before a block stay as long as it does. Once done, it need not be done again within the burst."""
        block = entry
        for _ in range(MAX_ANCESTORS):
            ancestor = block.follows
            if ancestor is None:
                return
            if ancestor.state is not SlotState.LIVE:
                block.follows = None
                return
            if ancestor.standing >= entry.standing and _together(ancestor, entry):
                return
            ancestor.standing = max(ancestor.standing, entry.standing)
            ancestor.last_access = max(ancestor.last_access, entry.last_access)
            if ancestor.within in self._lists:
                unlink(ancestor)
                self._lists[ancestor.standing].append(ancestor)
            block = ancestor


def _together(before: ObjectEntry, entry: ObjectEntry) -> bool:
    return before.last_access >= entry.last_access - BURST_SECONDS
