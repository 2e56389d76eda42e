"""Replaying a trace on many peers: all know each block's holders at once, and nothing takes time. Beside the pool: what
it is compared with, caches that know nothing of each other, and one with all memory. Pure.

A request goes to one peer. The blocks of its prefix that are anywhere in the pool are read there; the rest is computed
by that peer and put into its memory. Blocks evicted from memory go to the peer's SSD. The order of eviction is that of
the real segments, with their ranks; the SSD keeps blocks by the rule of the real tier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, islice
from math import inf
from random import Random
from typing import Final, Literal

from p2pstore.core.copies.hand_over import (
    READY_PART,
    ROOMS_SECONDS,
    PeerMemories,
    PeerMemory,
    choose_offers,
)
from p2pstore.core.copies.write_back import WRITTEN_SHARE
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.policies import DEFAULT_POLICY, PolicyName, make_policy
from p2pstore.memory.segment_layout import GRANULE_BYTES
from p2pstore.objects import Version
from p2pstore.trace.one_cache import (
    LLAMA3_70B,
    OFFERED,
    OWN,
    BlockCache,
    ColdBlocks,
    HitCounts,
    Model,
    Request,
    block_of,
    leading_hits,
)

DEFAULT_LOAD_BOUND: Final = 1.05
"""With a looser bound the first holders get most new conversations, and the memory of others is not used."""

UNEQUAL_TENTHS: Final = 7
"""Of the requests, with unequal load, that the first peer serves."""
PRIVATE: Final = "each peer alone"
ONE_CACHE: Final = "one cache of all memory"
ENDLESS: Final = "one cache without end"
SCALES: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the memory that was asked for, in `by_memory`."""


class Source(StrEnum):
    """Where a block was read."""

    LOCAL_MEMORY = "local memory"
    REMOTE_MEMORY = "remote memory"
    LOCAL_SSD = "local SSD"
    REMOTE_SSD = "remote SSD"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """`memory_blocks` and `ssd_blocks` are those of each peer. Unless `shared`, each uses what it has alone.
    `keep_after`: times that a holder served a block after which the reader keeps a soft copy; 0: never. `offers`: last
    copies are offered to peers with room before they are evicted."""

    peers: int = 10
    memory_blocks: int
    ssd_blocks: int = 0
    policy: PolicyName = DEFAULT_POLICY
    routing: RoutingName = "round-robin"
    load_bound: float = DEFAULT_LOAD_BOUND
    shared: bool = True
    keep_after: int = 10
    offers: bool = True
    seed: int = 1


@dataclass(slots=True)
class PoolOutcome:
    """The result of a replay."""

    counts: HitCounts = field(default_factory=HitCounts)
    tokens_from: Counter[Source] = field(default_factory=Counter)
    copies_made: int = 0
    """Soft ones."""
    blocks_lost: int = 0
    """Last copies that were evicted, from memory or from the SSD."""
    ssd_blocks_written: int = 0


class _Peer:
    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self.memory = self._empty_memory()
        self.ssd = ColdBlocks(settings.ssd_blocks) if settings.ssd_blocks else None
        self.up = True

    def _empty_memory(self) -> BlockCache:
        return BlockCache(make_policy(self._settings.policy), self._settings.memory_blocks)

    def die(self) -> None:
        """Memory is gone; the SSD is not."""
        self.memory, self.up = self._empty_memory(), False


def _room_of(peer: _Peer, number: int) -> PeerMemory[int]:
    memory = peer.memory
    first = next(memory.order.coldest(cheap=False), None)
    free = memory.capacity - len(memory)
    coldest = 0.0 if first is None else memory.order.policy.stays_until(first)
    return PeerMemory(number, memory.capacity * GRANULE_BYTES, free * GRANULE_BYTES, coldest)


class Pool:
    """Peers and their blocks. `replay` once."""

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
        self._rooms: dict[int, PeerMemories[int]] = {}
        self._rooms_told_at = -inf
        self.outcome = PoolOutcome()

    def replay(self, requests: Iterable[Request], changes: Iterable[PeerChange] = ()) -> PoolOutcome:
        """Take the requests as they come. `changes`, in order, say which peer dies or returns before which of them;
        what would go to a dead peer goes to the next one."""
        coming = deque(changes)
        for number, request in enumerate(requests):
            while coming and coming[0].request <= number:
                self._change(coming.popleft())
            self._serve(request)
        self.outcome.ssd_blocks_written = sum(
            peer.ssd.written for peer in self._peers if peer.ssd is not None
        )
        return self.outcome

    def _serve(self, request: Request) -> None:
        blocks, now = request.hash_ids, request.seconds
        chosen = self._router(self._local_blocks(blocks))
        reader = next_up(chosen, [peer.up for peer in self._peers])
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
        if self._settings.offers and self._settings.shared and not self._settings.ssd_blocks:
            for number, peer in enumerate(self._peers):
                while peer.up and self._offer(peer.memory, number, now):
                    pass

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

    def _keep_copy(self, block: int, before: int | None, holder: int, reader: int, now: float) -> None:
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
        version: Version = OWN,
    ) -> None:
        memory = self._peers[number].memory
        self._in_memory.setdefault(block, []).append(number)
        for gone in memory.put(block, now, before, soft=soft, on_ssd=on_ssd, version=version):
            self._evicted(gone, number)

    # --- what is offered -------------------------------------------------------------------------

    def _offer(self, memory: BlockCache, number: int, now: float) -> bool:
        """A step of the real peers' offers, without their bound on bytes. Whether there may be more."""
        free = memory.capacity - len(memory)
        short_bytes = (memory.capacity // READY_PART - free) * GRANULE_BYTES
        short_bytes -= memory.order.cheap_bytes
        if short_bytes <= 0:
            return False
        if now >= self._rooms_told_at + ROOMS_SECONDS:
            self._rooms_told_at = now
            self._rooms.clear()
        if number not in self._rooms:
            others = enumerate(self._peers)
            rooms = [_room_of(peer, other) for other, peer in others if other != number and peer.up]
            self._rooms[number] = PeerMemories(rooms, self._rng)
        coldest = memory.order.coldest(cheap=False)
        offers = choose_offers(
            coldest, short_bytes, self._is_last, self._rooms[number], memory.order.policy, now
        )
        for entry, room in offers:
            block = block_of(entry)
            self._put(block, None, room.peer, now, version=OFFERED)
            memory.set_soft(block, True)
        return bool(offers)

    def _is_last(self, entry: ObjectEntry) -> bool:
        unread = entry.version == OFFERED and not entry.hits
        return not unread and len(self._in_memory[block_of(entry)]) == 1

    # --- who dies and returns --------------------------------------------------------------------

    def _change(self, change: PeerChange) -> None:
        peer, number = self._peers[change.peer], change.peer
        if change.up and not peer.up:
            peer.up = True
            for block in peer.ssd or ():
                self._on_ssd.setdefault(block, []).append(number)
        elif peer.up and not change.up:
            self._write_back(peer, number)
            # Its blocks in memory are lost; those on its SSD can be read again when it returns.
            for block in peer.memory:
                self._no_longer(self._in_memory, block, number)
                self._keep_a_firm_copy(block)
            for block in peer.ssd or ():
                self._no_longer(self._on_ssd, block, number)
            peer.die()

    def _write_back(self, peer: _Peer, number: int) -> None:
        """The coldest part of a memory has been written all along; only a peer that dies has anything of it."""
        for entry in islice(peer.memory.order.coldest(), peer.memory.capacity // WRITTEN_SHARE):
            self._to_ssd(entry, number)

    @staticmethod
    def _no_longer(where: dict[int, list[int]], block: int, number: int) -> None:
        left = where[block]
        left.remove(number)
        if not left:
            del where[block]

    def _keep_a_firm_copy(self, block: int) -> None:
        left = self._in_memory.get(block)
        if left and all(self._is_soft(block, each) for each in left):
            self._peers[left[0]].memory.set_soft(block, False)

    # --- what had to go --------------------------------------------------------------------------

    def _evicted(self, entry: ObjectEntry, number: int) -> None:
        block = block_of(entry)
        self._no_longer(self._in_memory, block, number)
        self._keep_a_firm_copy(block)
        self._to_ssd(entry, number)
        if block not in self._in_memory and block not in self._on_ssd:
            self.outcome.blocks_lost += 1

    def _to_ssd(self, entry: ObjectEntry, number: int) -> None:
        """Soft copies are not worth a write."""
        block, ssd = block_of(entry), self._peers[number].ssd
        if ssd is not None and not entry.soft and block not in ssd:
            self._on_ssd.setdefault(block, []).append(number)
            for other in ssd.put(block):
                self._lost_on_ssd(other, number)

    def _is_soft(self, block: int, number: int) -> bool:
        entry = self._peers[number].memory.get(block)
        return entry is not None and entry.soft

    def _lost_on_ssd(self, block: int, number: int) -> None:
        self._no_longer(self._on_ssd, block, number)
        if number in self._in_memory.get(block, ()):
            self._peers[number].memory.left_ssd(block)
        elif block not in self._in_memory and block not in self._on_ssd:
            self.outcome.blocks_lost += 1


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A peer was killed (`up` is false) or came back, before the request of this number (from 0), or during it."""

    request: int
    peer: int
    up: bool


def next_up(chosen: int, up: Sequence[bool]) -> int:
    """The peer that takes what `chosen` would: itself, or the next one up. Raises `ValueError` when none is."""
    for step in range(len(up)):
        peer = (chosen + step) % len(up)
        if up[peer]:
            return peer
    raise ValueError("no peer is up")


RoutingName = Literal["round-robin", "random", "affine", "unequal"]

Router = Callable[[Sequence[int]], int]
"""The peer for a request, by its number, of whose prefix each peer n has `local[n]` blocks in its own memory."""


def _unequal(turn: int, peers: int) -> int:
    return 0 if turn % 10 < UNEQUAL_TENTHS or peers == 1 else 1 + turn % (peers - 1)


class PrefixAffine:
    """The peer that has most of the prefix, among those that were sent less than `load_bound` times the mean of all
    requests so far, this one among them. Without a bound one peer would get all, since all share their first block."""

    def __init__(self, load_bound: float) -> None:
        if load_bound < 1:
            raise ValueError("the load bound is 1 at least: the mean")
        self._load_bound = load_bound
        self._sent: list[int] = []

    def choose(self, local: Sequence[int]) -> int:
        sent = self._sent = self._sent or [0] * len(local)
        most = self._load_bound * (sum(sent) + 1) / len(sent)
        free = [peer for peer, count in enumerate(sent) if count < most]
        chosen = max(free, key=lambda peer: (local[peer], -sent[peer]))
        sent[chosen] += 1
        return chosen


def make_router(name: RoutingName, load_bound: float, rng: Random) -> Router:
    if name == "affine":
        return PrefixAffine(load_bound).choose
    if name == "random":
        return lambda local: rng.randrange(len(local))
    turns = count()
    if name == "unequal":
        return lambda local: _unequal(next(turns) + 1, len(local))
    return lambda local: next(turns) % len(local)


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    name: str
    settings: PoolSettings


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a case."""

    case: Case
    outcome: PoolOutcome


def cases(settings: PoolSettings, blocks: int) -> list[Case]:
    """The cases to replay for a pool with these settings, the baseline first; `blocks` is the number in the trace."""
    memory = replace(settings, ssd_blocks=0)
    one = replace(memory, peers=1, shared=True)
    found = [
        Case(PRIVATE, replace(memory, shared=False)),
        Case("pool", memory),
        Case(ONE_CACHE, replace(one, memory_blocks=settings.peers * settings.memory_blocks)),
        Case(ENDLESS, replace(one, memory_blocks=max(1, blocks))),
    ]
    if settings.ssd_blocks:
        alone = Case(f"{PRIVATE}, with SSDs", replace(settings, shared=False))
        found[2:2] = [alone, Case("pool with SSDs", settings)]
    return found


def compare(requests: Sequence[Request], compared: Iterable[Case], model: Model) -> Iterator[Replayed]:
    for case in compared:
        yield Replayed(case, Pool(case.settings, model).replay(requests))


def by_memory(
    requests: Sequence[Request], settings: PoolSettings, model: Model
) -> dict[str, list[tuple[float, float]]]:
    """For a picture: (blocks, hit rate) over the memory of each peer, scaled up and down, by name of the curve."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for scale in SCALES:
        memory = max(1, round(settings.memory_blocks * scale))
        scaled = replace(settings, memory_blocks=memory)
        for name, shared in ((PRIVATE, False), ("pool", True)):
            outcome = Pool(replace(scaled, shared=shared), model).replay(requests)
            curves.setdefault(name, []).append((memory, outcome.counts.ratio))
    return curves
