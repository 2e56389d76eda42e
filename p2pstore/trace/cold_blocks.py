"""The SSD of one simulated peer: blocks in a log of segments, with the real tier's rule of what reclaim keeps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from p2pstore.ssd_tier.log_segments import KEPT_SHARE, Candidate, choose_kept

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
        """Write a block that is not here; what had to go for it."""
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
        # Who wrote it had evicted it, so most are nowhere else; which of them are is not looked up.
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
