"""A memory of blocks with the segment's own order of eviction, and nothing else of a segment. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, SlotState
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.ssd_tier.log_segments import KEPT_SHARE, Candidate, choose_kept
from p2pstore.trace.trace_requests import HitCounts, Request, leading_hits

OWN: Final = Version(1, 1)
OFFERED: Final = Version(1, 2)
"""Of a block that came from another peer."""


class BlockCache:
    """Up to `capacity` blocks of one size. `EvictionOrder` chooses the victims, as in a `Segment`; as blocks are of one
    size, the cheapest window is the coldest block."""

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

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def get(self, block: int) -> ObjectEntry | None:
        """The entry of a block that is here."""
        return self._entries.get(block)

    def read(self, block: int, now: float) -> None:
        """A block that is here is read."""
        self.order.read(self._entries[block], 1, now)

    def put(
        self,
        block: int,
        now: float,
        before: int | None = None,
        *,
        soft: bool = False,
        on_ssd: bool = False,
        version: Version = OWN,
    ) -> list[ObjectEntry]:
        """Take in a block, which follows `before` in its chain; returns the victims."""
        gone = [self._evict() for _ in range(len(self._entries) + 1 - self.capacity)]
        entry = _entry(block, self._placed, now, soft, on_ssd, version)
        self._placed += GRANULE_BYTES
        self._entries[block] = entry
        self.order.admit(entry, now, None if before is None else self._entries.get(before))
        return gone

    def set_soft(self, block: int, soft: bool) -> None:
        """A soft copy is the last one now, or there is a firm one elsewhere."""
        entry = self._entries[block]
        entry.soft = soft
        self.order.update(entry)

    def left_ssd(self, block: int) -> None:
        """The SSD has a block no longer, and memory still has it."""
        entry = self._entries[block]
        entry.on_ssd = False
        self.order.update(entry)

    def _evict(self) -> ObjectEntry:
        entry = next(self.order.coldest())
        self.order.gone(entry, evicted=True)
        entry.state = SlotState.FREE
        del self._entries[block_of(entry)]
        return entry


def block_of(entry: ObjectEntry) -> int:
    """Which block an entry of a `BlockCache` is."""
    return int.from_bytes(entry.digest, "little")


def _entry(
    block: int, offset: int, now: float, soft: bool, on_ssd: bool, version: Version
) -> ObjectEntry:
    return ObjectEntry(
        digest=block.to_bytes(DIGEST_BYTES, "little"),
        version=version,
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
        on_ssd=on_ssd,
    )


def replay_one_cache(requests: Iterable[Request], cache: BlockCache) -> HitCounts:
    """One cache that all requests share: the hits of each, then all of its blocks are read or put, from the head on."""
    counts = HitCounts()
    for request in requests:
        counts.count(request, leading_hits(request.hash_ids, cache.get))
        before = None
        for block in request.hash_ids:
            if block in cache:
                cache.read(block, request.seconds)
            else:
                cache.put(block, request.seconds, before)
            before = block
    return counts


SEGMENTS: Final = 64
OPEN_SEGMENTS: Final = 2
"""One for new blocks, one for those that reclaim keeps."""
_LEAST_SEGMENT: Final = int(1 / KEPT_SHARE)
LEAST_BLOCKS: Final = _LEAST_SEGMENT * (OPEN_SEGMENTS + 1)


class ColdBlocks:
    """Room for `capacity` blocks of one size. Segments are written one after the other; when there is no other room the
    oldest one is reclaimed: up to a fifth of it is written again, the rest is gone."""

    def __init__(self, capacity: int) -> None:
        self._segment_blocks = max(_LEAST_SEGMENT, capacity // SEGMENTS)
        self._most_sealed = capacity // self._segment_blocks - OPEN_SEGMENTS
        if self._most_sealed < 1:
            raise ValueError(f"an SSD has room for {LEAST_BLOCKS} blocks at least")
        self._sealed: deque[list[int]] = deque()
        self._new: list[int] = []
        self._kept: list[int] = []
        self._hits: dict[int, int] = {}
        self.written = 0
        """Blocks, those that were written again among them."""

    def __len__(self) -> int:
        return len(self._hits)

    def __contains__(self, block: int) -> bool:
        return block in self._hits

    def __iter__(self) -> Iterator[int]:
        return iter(self._hits)

    def read(self, block: int) -> None:
        """A block that is here is read."""
        self._hits[block] += 1

    def put(self, block: int) -> list[int]:
        """Write a block that is not here; returns the victims."""
        self._hits[block] = 0
        self.written += 1
        self._new.append(block)
        if len(self._new) == self._segment_blocks:
            self._sealed.append(self._new)
            self._new = []
        gone: list[int] = []
        while len(self._sealed) > self._most_sealed:
            gone += self._reclaim()
        return gone

    def _reclaim(self) -> list[int]:
        oldest = self._sealed.popleft()
        # The writer evicted these blocks, so most are nowhere else; the others are not looked up.
        candidates = [Candidate(block, 1, self._hits[block], True) for block in oldest]
        kept = [each.record for each in choose_kept(candidates, self._segment_blocks)]
        for block in oldest:
            del self._hits[block]
        self._hits |= dict.fromkeys(kept, 0)
        self._kept += kept
        self.written += len(kept)
        if len(self._kept) >= self._segment_blocks:
            self._sealed.append(self._kept[: self._segment_blocks])
            self._kept = self._kept[self._segment_blocks :]
        return [block for block in oldest if block not in self._hits]
