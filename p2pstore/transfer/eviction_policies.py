"""Which of many objects are worth keeping: three policies behind one interface. Pure.

A policy says in which order the objects of one rank would go, and what losing one costs. Which of them do go, the
allocator's windows decide; what may not go at all, and which rank goes first, is for `eviction` to say. Every step
takes constant time, and what a policy remembers of objects that are gone is bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from typing import Final, Literal

from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.entry_list import EntryList
from p2pstore.transfer.layout import SlotState

PolicyName = Literal["prefix", "lru", "s3-fifo"]

LOST_FOR_GOOD: Final = 4.0
"""So much more does it cost to lose what is not on the SSD as well."""


class EvictionQueue(ABC):
    """The objects of one rank."""

    @abstractmethod
    def add(self, entry: ObjectEntry) -> None:
        """Queue an entry that is in no queue, as one that was used at its `last_access`."""

    @abstractmethod
    def remove(self, entry: ObjectEntry) -> None:
        """Take out an entry of this queue."""

    @abstractmethod
    def used(self, entry: ObjectEntry) -> None:
        """An entry of this queue was used at its `last_access`."""

    @abstractmethod
    def coldest(self) -> Iterator[ObjectEntry]:
        """What would go first. Nothing may change the queue until the last one was taken."""


class EvictionPolicy(ABC):
    """What one segment knows of the worth of its objects. All times are Unix seconds."""

    @abstractmethod
    def new_queue(self) -> EvictionQueue:
        """A queue for one rank."""

    @abstractmethod
    def cost(self, entry: ObjectEntry, now: float) -> float:
        """What losing the entry costs, above 0; compared within a rank, and summed over windows."""

    @abstractmethod
    def admitted(self, entry: ObjectEntry, now: float) -> None:
        """A new entry, before it is queued."""

    @abstractmethod
    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """An entry is read `count` times, queued or not; its `last_access` is still that of the use before."""

    @abstractmethod
    def evicted(self, entry: ObjectEntry) -> None:
        """An entry had to go for others."""


def _worth(entry: ObjectEntry) -> float:
    """Bytes lost, and less lost where the SSD has them."""
    return (1.0 if entry.on_ssd else LOST_FOR_GOOD) * entry.extent_bytes


# --- least recently used -------------------------------------------------------------------------


class LeastRecentlyUsed(EvictionPolicy):
    """What nobody asked for longest goes first."""

    def new_queue(self) -> EvictionQueue:
        return _RecencyQueue()

    def cost(self, entry: ObjectEntry, now: float) -> float:
        return _worth(entry) / (1.0 + max(0.0, now - entry.last_access))

    def admitted(self, entry: ObjectEntry, now: float) -> None:
        """It is the one used last, as every entry that is queued."""

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        """How often does not matter."""

    def evicted(self, entry: ObjectEntry) -> None:
        """Nothing is remembered of it."""


class _RecencyQueue(EvictionQueue):
    def __init__(self) -> None:
        self._entries = EntryList()

    def add(self, entry: ObjectEntry) -> None:
        self._entries.append(entry)

    def remove(self, entry: ObjectEntry) -> None:
        self._entries.remove(entry)

    def used(self, entry: ObjectEntry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def coldest(self) -> Iterator[ObjectEntry]:
        return iter(self._entries)


# --- what is remembered of objects that are gone -------------------------------------------------

LEAST_GHOSTS: Final = 65_536
"""So many are remembered at least: 12 MB. A peer with few large objects evicts them long before they would be asked
for again, and only a memory longer than its own contents tells it which are."""
MOST_FORGOTTEN: Final = 16
"""In one step, when much was removed at once."""


class Ghosts:
    """What was thought of objects that were evicted, by digest; the oldest are forgotten."""

    def __init__(self, least: int = LEAST_GHOSTS) -> None:
        self._least = least
        self._kept: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, entry: ObjectEntry, live: int) -> None:
        """Remember an entry; as many as there are live objects, or the least, but some more for a while when there are
        far fewer live objects all of a sudden."""
        self._kept.pop(entry.digest, None)
        self._kept[entry.digest] = (entry.standing, entry.last_access)
        too_many = len(self._kept) - max(self._least, live)
        for _ in range(min(too_many, MOST_FORGOTTEN)):
            self._kept.popitem(last=False)

    def take(self, digest: bytes) -> tuple[int, float] | None:
        """Its standing and last access when it was evicted, once; None for what is not remembered."""
        return self._kept.pop(digest, None)


# --- S3-FIFO -------------------------------------------------------------------------------------

SMALL_SHARE: Final = 0.1
"""Of a rank's bytes: so much may be new; beyond it, what is new goes first. (In `PrefixAware` too.)"""
MOST_READS_COUNTED: Final = 3
READS_TO_STAY: Final = 2
"""What was read so often while it was new joins the main queue."""
MOST_PROMOTED: Final = 1_024
"""In one step: half a millisecond. Where even more were read since room was needed last, one of them goes."""
_MAIN: Final = 4
"""The bit of `standing` that says in which of both queues an entry is; the lower two count its reads."""


class S3Fifo(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): new objects pass a small queue, and only those that are read there, or come
    back soon after they were evicted from it, take room for long. Queues are measured in bytes, as objects differ.

    An entry that is leased leaves its queue, and comes back at its end.
    """

    def __init__(self) -> None:
        self._ghosts = Ghosts(least=0)
        self._queued = 0

    def new_queue(self) -> EvictionQueue:
        return _SmallAndMain(self)

    def cost(self, entry: ObjectEntry, now: float) -> float:
        reads = (entry.standing & MOST_READS_COUNTED) + (entry.standing & _MAIN)
        return _worth(entry) * (1 + reads) / (1.0 + max(0.0, now - entry.last_access))

    def admitted(self, entry: ObjectEntry, now: float) -> None:
        entry.standing = 0 if self._ghosts.take(entry.digest) is None else _MAIN

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        reads = min(MOST_READS_COUNTED, (entry.standing & MOST_READS_COUNTED) + count)
        entry.standing = (entry.standing & _MAIN) | reads

    def evicted(self, entry: ObjectEntry) -> None:
        if not entry.standing & _MAIN:
            self._ghosts.add(entry, int(self._queued * (1 - SMALL_SHARE)))

    def queued(self, by: int) -> None:
        """So many more entries are in queues: as many ghosts are kept as main queues have room for."""
        self._queued += by


class _SmallAndMain(EvictionQueue):
    def __init__(self, policy: S3Fifo) -> None:
        self._policy = policy
        self._small, self._main = EntryList(), EntryList()

    def add(self, entry: ObjectEntry) -> None:
        self._policy.queued(1)
        (self._main if entry.standing & _MAIN else self._small).append(entry)

    def remove(self, entry: ObjectEntry) -> None:
        self._policy.queued(-1)
        (self._main if entry.within is self._main else self._small).remove(entry)

    def used(self, entry: ObjectEntry) -> None:
        """Reads were counted; nothing moves before room is needed."""

    def coldest(self) -> Iterator[ObjectEntry]:
        self._promote()
        yield from self._small if self._takes_small else self._main
        yield from self._main if self._takes_small else self._small

    @property
    def _takes_small(self) -> bool:
        everything = self._small.bytes + self._main.bytes
        return self._small.bytes > SMALL_SHARE * everything or self._main.coldest is None

    def _promote(self) -> None:
        """Until the first one that would go has not been read: those before it stay. Each read pays for one step."""
        for _ in range(MOST_PROMOTED):
            entry = self._small.coldest if self._takes_small else self._main.coldest
            if entry is None:
                return
            if entry.within is self._small:
                if entry.standing < READS_TO_STAY:
                    return
                self._small.remove(entry)
                entry.standing = _MAIN
                self._main.append(entry)
            else:
                if entry.standing == _MAIN:
                    return
                self._main.remove(entry)
                entry.standing -= 1
                self._main.append(entry)


# --- aware of prefixes ---------------------------------------------------------------------------

MOST_CREDITS: Final = 3
CORRELATED_SECONDS: Final = 1.0
"""Reads so soon after the last use are part of it: of several ranks of one engine, or of who just wrote it."""
GAP_WEIGHT: Final = 0.002
"""Of one more observation in the geometric mean, which a few very long gaps hardly move: it follows some hundred
requests of some blocks each."""
BURST_SECONDS: Final = 2.0
"""A block that is used so soon after the one before it is used together with that."""
MOST_ANCESTORS: Final = 1_024
FOLLOWED: Final = 2.0
"""So much more does it cost to lose a block that others of its chain build on: less than what keeps it from going
ahead of need, with those others (`allocator.MUCH_MORE`)."""


class PrefixAware(EvictionPolicy):
    """For chains of blocks that are read from their heads: what is read again stays for one typical gap longer.

    *Credits*: the pause between two turns of a conversation is longer than small caches keep anything, but typical of
    the load. An object that was read again before is more likely to be read once more, so each such read (up to three)
    lets it stay for as long as the gap that was typical lately: it goes when its last use, plus that gap for each
    credit, lies furthest back. Credits and gaps are also learned from what comes back after it was evicted, and so
    also where everything goes before it could be read again. A tenth of the room is for objects without credit.

    *Chains*: a block is worth nothing without those before it. A block is queued just before the block that it follows,
    when both were used together, so that tails go first; and its use is a use of those before it, although whoever
    reads it may have them already. (`follows` is set by who knows the chain; without it, blocks are ordered alone.)
    """

    def __init__(self) -> None:
        self.gap_seconds = 0.0
        """The typical time between two uses of an object."""
        self._ghosts = Ghosts()
        self._queued = 0

    def new_queue(self) -> EvictionQueue:
        return _CreditQueue(self)

    def stays_until(self, entry: ObjectEntry) -> float:
        """The larger, the longer it stays; of the dimension of Unix seconds."""
        return entry.last_access + entry.standing * self.gap_seconds

    def cost(self, entry: ObjectEntry, now: float) -> float:
        age = max(0.0, now - entry.last_access)
        idle = age + (MOST_CREDITS - entry.standing) * self.gap_seconds
        return _worth(entry) * (FOLLOWED if entry.followers else 1.0) / (1.0 + idle)

    def admitted(self, entry: ObjectEntry, now: float) -> None:
        known = self._ghosts.take(entry.digest)
        if known is None:
            entry.standing = 0
            return
        credits, last_access = known
        entry.standing = self._earned(credits, now - last_access)

    def read(self, entry: ObjectEntry, count: int, now: float) -> None:
        if count:
            entry.standing = self._earned(entry.standing, now - entry.last_access)

    def evicted(self, entry: ObjectEntry) -> None:
        self._ghosts.add(entry, self._queued)

    def queued(self, by: int) -> None:
        """So many more entries are in queues: as many ghosts are kept."""
        self._queued += by

    def _earned(self, credits: int, gap: float) -> int:
        """Credits after one more use, `gap` seconds after the one before."""
        if gap < CORRELATED_SECONDS:
            return credits
        if credits < MOST_CREDITS:  # what all share, such as a system prompt, is read all the time
            usual = self.gap_seconds or gap
            self.gap_seconds = usual * (gap / usual) ** GAP_WEIGHT
        return min(MOST_CREDITS, credits + 1)


class _CreditQueue(EvictionQueue):
    """A list for each number of credits; each of them in order of last use."""

    def __init__(self, policy: PrefixAware) -> None:
        self._policy = policy
        self._lists = tuple(EntryList() for _ in range(MOST_CREDITS + 1))

    def add(self, entry: ObjectEntry) -> None:
        self._policy.queued(1)
        self._place(entry)

    def remove(self, entry: ObjectEntry) -> None:
        self._policy.queued(-1)
        assert entry.within is not None
        entry.within.remove(entry)

    def used(self, entry: ObjectEntry) -> None:
        assert entry.within is not None
        entry.within.remove(entry)
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
        if not coldest or new.bytes >= SMALL_SHARE * sum(each.bytes for each in self._lists):
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
        for _ in range(MOST_ANCESTORS):
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
                ancestor.within.remove(ancestor)
                self._lists[ancestor.standing].append(ancestor)
            block = ancestor


def _together(before: ObjectEntry, entry: ObjectEntry) -> bool:
    return before.last_access >= entry.last_access - BURST_SECONDS


# --- by name ---------------------------------------------------------------------------------------

DEFAULT_POLICY: Final[PolicyName] = "prefix"


def make_policy(name: PolicyName = DEFAULT_POLICY) -> EvictionPolicy:
    """A new policy, for one segment."""
    return _POLICIES[name]()


_POLICIES: Final[dict[PolicyName, type[EvictionPolicy]]] = {
    "prefix": PrefixAware,
    "lru": LeastRecentlyUsed,
    "s3-fifo": S3Fifo,
}
