"""A memory of blocks with the segment's own order of eviction, and nothing else of a segment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.trace.prefix_hits import HitCounts, leading_hits
from p2pstore.trace.requests import Request
from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.eviction import EvictionOrder
from p2pstore.transfer.eviction_policies import EvictionPolicy
from p2pstore.transfer.layout import GRANULE_BYTES, Pin, SlotState

_VERSION = Version(1, 1)


class BlockCache:
    """Up to `capacity` blocks of one size. What goes first is for `EvictionOrder` to say, as in a `Segment`; as blocks
    are of one size, the cheapest window is the coldest block."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a cache has room for one block at least")
        self.capacity = capacity
        self.order = EvictionOrder(policy)
        self._entries: dict[int, ObjectEntry] = {}
        self._placed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def get(self, block: int) -> ObjectEntry | None:
        """What is known of a block that is here."""
        return self._entries.get(block)

    def read(self, block: int, now: float) -> None:
        """A block that is here is read."""
        self.order.read(self._entries[block], 1, now)

    def put(
        self, block: int, now: float, before: int | None = None, *, soft: bool = False
    ) -> list[int]:
        """Take in a block, which follows `before` in its chain; what had to go for it."""
        gone = [self._evict() for _ in range(len(self._entries) + 1 - self.capacity)]
        entry = _entry(block, self._placed, now, soft)
        self._placed += GRANULE_BYTES
        self._entries[block] = entry
        self.order.admit(entry, now, None if before is None else self._entries.get(before))
        return gone

    def coldest(self) -> Iterator[int]:
        """Blocks in the order in which they would go."""
        return (int.from_bytes(entry.digest, "little") for entry in self.order.coldest())

    def _evict(self) -> int:
        entry = next(self.order.coldest())
        self.order.gone(entry, evicted=True)
        entry.state = SlotState.FREE
        block = int.from_bytes(entry.digest, "little")
        del self._entries[block]
        return block


def _entry(block: int, offset: int, now: float, soft: bool) -> ObjectEntry:
    return ObjectEntry(
        digest=block.to_bytes(DIGEST_BYTES, "little"),
        version=_VERSION,
        slot=0,
        offset=offset,
        length=GRANULE_BYTES,
        trailer_length=0,
        extent_bytes=GRANULE_BYTES,
        namespace="",
        key="",
        expires_unix_ms=0,
        replicas=1,
        pin=Pin.NONE,
        pin_until=0.0,
        soft=soft,
        dtype="",
        shape=(),
        last_access=now,
    )


def replay_one_cache(requests: Iterable[Request], cache: BlockCache) -> HitCounts:
    """One cache that all requests share: the hits of each, then all of its blocks are read or put, from the head on."""
    counts = HitCounts()
    for request in requests:
        counts.count(request, leading_hits(request.hash_ids, cache.get))
        take_in(cache, request)
    return counts


def take_in(cache: BlockCache, request: Request) -> list[int]:
    """Read the request's blocks that are there and put the others, from the head on; what had to go."""
    gone: list[int] = []
    before = None
    for block in request.hash_ids:
        if block in cache:
            cache.read(block, request.seconds)
        else:
            gone += cache.put(block, request.seconds, before)
        before = block
    return gone
