"""Replaying a trace on many peers at once: who has which block is known to all at once, and nothing takes time. Pure.

A request goes to one peer. The blocks of its prefix that are anywhere in the pool are read there; the rest is computed
by that peer and put into its memory. What memory evicts goes to the peer's SSD. The order of eviction is that of the
real segments, with their ranks; what the SSD keeps is for the rule of the real tier to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from p2pstore.trace.block_cache import BlockCache, block_of
from p2pstore.trace.cold_blocks import ColdBlocks
from p2pstore.trace.prefix_hits import LLAMA3_70B, HitCounts, Model, leading_hits
from p2pstore.trace.requests import Request
from p2pstore.trace.routing import DEFAULT_LOAD_BOUND, RoutingName, make_router
from p2pstore.transfer.entries import ObjectEntry
from p2pstore.transfer.eviction_policies import DEFAULT_POLICY, PolicyName, make_policy


class Source(StrEnum):
    """Where a block was read."""

    LOCAL_MEMORY = "local memory"
    REMOTE_MEMORY = "remote memory"
    LOCAL_SSD = "local SSD"
    REMOTE_SSD = "remote SSD"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """`memory_blocks` and `ssd_blocks` are those of each peer. Unless `shared`, each uses what it has alone.
    `keep_after`: a reader keeps a soft copy of a block that its holder has served so often; 0: never."""

    peers: int = 10
    memory_blocks: int
    ssd_blocks: int = 0
    policy: PolicyName = DEFAULT_POLICY
    routing: RoutingName = "round-robin"
    load_bound: float = DEFAULT_LOAD_BOUND
    shared: bool = True
    keep_after: int = 10
    seed: int = 1


@dataclass(slots=True)
class PoolOutcome:
    """What a replay came to."""

    counts: HitCounts = field(default_factory=HitCounts)
    tokens_from: Counter[Source] = field(default_factory=Counter)
    copies_made: int = 0
    """Soft ones."""
    blocks_lost: int = 0
    """Last copies that were evicted, from memory or from the SSD."""
    ssd_blocks_written: int = 0


class _Peer:
    def __init__(self, settings: PoolSettings) -> None:
        self.memory = BlockCache(make_policy(settings.policy), settings.memory_blocks)
        self.ssd = ColdBlocks(settings.ssd_blocks) if settings.ssd_blocks else None


class Pool:
    """Peers and what they hold. `replay` once."""

    def __init__(self, settings: PoolSettings, model: Model = LLAMA3_70B) -> None:
        if settings.peers < 1:
            raise ValueError("a pool has one peer at least")
        self._settings = settings
        self._model = model
        self._rng = Random(settings.seed)
        self._peers = [_Peer(settings) for _ in range(settings.peers)]
        self._router = make_router(settings.routing, settings.load_bound, self._rng)
        self._in_memory: dict[int, list[int]] = {}
        self._on_ssd: dict[int, list[int]] = {}
        self.outcome = PoolOutcome()

    def replay(self, requests: Iterable[Request]) -> PoolOutcome:
        """Take the requests as they come."""
        for request in requests:
            self._serve(request)
        self.outcome.ssd_blocks_written = sum(
            peer.ssd.written for peer in self._peers if peer.ssd is not None
        )
        return self.outcome

    def _serve(self, request: Request) -> None:
        blocks, now = request.hash_ids, request.seconds
        reader = self._router.choose(self._local_blocks(blocks))
        hits = leading_hits(blocks, lambda block: self._is_found(block, reader))
        self.outcome.counts.count(request, hits, self._model)
        for place, block in enumerate(blocks):
            before = blocks[place - 1] if place else None
            if self._is_found(block, reader):
                source = self._read(block, before, reader, now)
                if place < hits:
                    tokens = request.tokens_in(place + 1) - request.tokens_in(place)
                    self.outcome.tokens_from[source] += tokens
            else:
                self._put(block, before, reader, now)

    # --- where blocks are ------------------------------------------------------------------------

    def _local_blocks(self, blocks: Sequence[int]) -> list[int]:
        """How much of the prefix each peer has in its memory: without a gap, unless others could fill it."""
        if not self._settings.shared:
            return [leading_hits(blocks, peer.memory.get) for peer in self._peers]
        local = [0] * len(self._peers)
        for block in blocks:
            holders = self._in_memory.get(block, ())
            if not holders and block not in self._on_ssd:
                break
            for holder in holders:
                local[holder] += 1
        return local

    def _is_found(self, block: int, reader: int) -> bool:
        if self._settings.shared:
            return block in self._in_memory or block in self._on_ssd
        peer = self._peers[reader]
        return block in peer.memory or (peer.ssd is not None and block in peer.ssd)

    def _choose(self, holders: list[int], reader: int) -> int:
        """The reader itself where it can, else any."""
        if reader in holders or len(holders) == 1:
            return reader if reader in holders else holders[0]
        return self._rng.choice(holders)

    # --- reading and putting ---------------------------------------------------------------------

    def _read(self, block: int, before: int | None, reader: int, now: float) -> Source:
        alone = [] if self._settings.shared else [reader]
        in_memory = self._in_memory.get(block)
        if in_memory and (self._settings.shared or reader in in_memory):
            holder = self._choose(alone or in_memory, reader)
            self._peers[holder].memory.read(block, now)
            if holder == reader:
                return Source.LOCAL_MEMORY
            self._keep_copy(block, before, holder, reader, now)
            return Source.REMOTE_MEMORY
        holder = self._choose(alone or self._on_ssd[block], reader)
        self._bring(block, before, holder, now)
        return Source.LOCAL_SSD if holder == reader else Source.REMOTE_SSD

    def _keep_copy(
        self, block: int, before: int | None, holder: int, reader: int, now: float
    ) -> None:
        entry = self._peers[holder].memory.get(block)
        after = self._settings.keep_after
        if after and entry is not None and entry.hits >= after:
            self.outcome.copies_made += 1
            self._put(block, before, reader, now, soft=True)

    def _bring(self, block: int, before: int | None, holder: int, now: float) -> None:
        """From the holder's SSD to its memory, where it is read."""
        ssd = self._peers[holder].ssd
        assert ssd is not None
        ssd.read(block)
        self._put(block, before, holder, now, on_ssd=True)
        self._peers[holder].memory.read(block, now)

    def _put(
        self,
        block: int,
        before: int | None,
        number: int,
        now: float,
        *,
        soft: bool = False,
        on_ssd: bool = False,
    ) -> None:
        memory = self._peers[number].memory
        self._in_memory.setdefault(block, []).append(number)
        for gone in memory.put(block, now, before, soft=soft, on_ssd=on_ssd):
            self._evicted(gone, number)

    # --- what had to go --------------------------------------------------------------------------

    def _evicted(self, entry: ObjectEntry, number: int) -> None:
        block, ssd = block_of(entry), self._peers[number].ssd
        left = self._in_memory[block]
        left.remove(number)
        if left:
            holder = self._peers[left[0]].memory
            if not entry.soft and all(self._is_soft(block, each) for each in left):
                holder.strengthen(block)
        else:
            del self._in_memory[block]
        if ssd is not None and not entry.soft and block not in ssd:
            self._on_ssd.setdefault(block, []).append(number)
            for other in ssd.put(block):
                self._lost_on_ssd(other, number)
        if block not in self._in_memory and block not in self._on_ssd:
            self.outcome.blocks_lost += 1

    def _is_soft(self, block: int, number: int) -> bool:
        entry = self._peers[number].memory.get(block)
        return entry is not None and entry.soft

    def _lost_on_ssd(self, block: int, number: int) -> None:
        left = self._on_ssd[block]
        left.remove(number)
        if not left:
            del self._on_ssd[block]
        if number in self._in_memory.get(block, ()):
            self._peers[number].memory.left_ssd(block)
        elif block not in self._in_memory and block not in self._on_ssd:
            self.outcome.blocks_lost += 1
