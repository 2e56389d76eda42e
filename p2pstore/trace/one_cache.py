"""Requests of a trace, and one cache of their blocks: with the segment's own order of eviction, and nothing else of a
segment. Pure. A trace is as published with the Mooncake paper (FAST '25): one JSON object a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from p2pstore.errors import ConfigError
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, SlotState
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.ssd_tier.log_segments import KEPT_SHARE, Candidate, choose_kept

TOKENS_PER_BLOCK: Final = 512
MAX_LINE_BYTES: Final = 16 * 2**20
MAX_REQUESTS: Final = 10_000_000
_MAX_TOKENS: Final = 2**32

BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
Block = TypeVar("Block")
SEGMENTS: Final = 64
OPEN_SEGMENTS: Final = 2
"""One for new blocks, one for those that reclaim keeps."""
_MIN_SEGMENT: Final = int(1 / KEPT_SHARE)
MIN_BLOCKS: Final = _MIN_SEGMENT * (OPEN_SEGMENTS + 1)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. `timestamp` is in milliseconds from the beginning; lengths are tokens. `hash_ids` are its prefix
    blocks of 512 tokens, from the head on: equal ids stand for equal KVCache. The last block may not be full."""

    timestamp: Annotated[int, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]

    @property
    def seconds(self) -> float:
        return self.timestamp / 1000

    def tokens_in(self, blocks: int) -> int:
        return min(self.input_length, blocks * TOKENS_PER_BLOCK)


def read_requests(lines: Iterable[bytes]) -> Iterator[Request]:
    """The requests of a trace, line by line; empty lines are passed over.

    Raises `ConfigError`, which names the line, for what is no request, whose blocks are not as many as its tokens take,
    that names a block twice, that comes before the one before it, or that is too long; and for a trace without any
    request, or with more than ten million.
    """
    decoder = msgspec.json.Decoder(Request)
    latest = count = 0
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise _wrong(number, f"it has more than {MAX_LINE_BYTES:,} bytes")
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:  # also for what is not JSON at all
            raise _wrong(number, str(error)) from None
        _check(request, number, latest)
        latest, count = request.timestamp, count + 1
        if count > MAX_REQUESTS:
            raise _wrong(number, f"a trace has at most {MAX_REQUESTS:,} requests")
        yield request
    if not count:
        raise ConfigError("the trace has no requests")


def _check(request: Request, number: int, latest: int) -> None:
    blocks = -(-request.input_length // TOKENS_PER_BLOCK)
    if len(request.hash_ids) != blocks:
        raise _wrong(
            number,
            f"{len(request.hash_ids):,} hash_ids; {request.input_length:,} tokens are {blocks:,} blocks",
        )
    if len(set(request.hash_ids)) != blocks:
        raise _wrong(number, "it names a block twice")
    if request.timestamp < latest:
        raise _wrong(
            number, f"its timestamp {request.timestamp:,} is before {latest:,} of an earlier line"
        )


def _wrong(number: int, problem: str) -> ConfigError:
    return ConfigError(f"line {number:,} of the trace is no request that can be replayed: {problem}")


def leading_hits(blocks: Sequence[Block], is_there: Callable[[Block], object]) -> int:
    """How many blocks, from the head on, are there without a gap."""
    for place, block in enumerate(blocks):
        if not is_there(block):
            return place
    return len(blocks)


@dataclass(frozen=True, slots=True)
class Model:
    """The cost of prefill, as in Eq. 1 of the Mooncake paper: `layers * (a n^2 d + b n d^2)` for n tokens, where
    `dimension` is the hidden size d, `attention` and `linear` are a and b. `kv_bytes_per_token` is the size of a
    token's KVCache."""

    layers: int = 80
    dimension: int = 8192
    attention: int = 4
    linear: int = 22
    kv_bytes_per_token: int = 320 * 1024

    @property
    def block_bytes(self) -> int:
        return TOKENS_PER_BLOCK * self.kv_bytes_per_token

    def prefill_operations(self, tokens: int, reused: int = 0) -> int:
        """Floating-point operations of a prefill whose first `reused` tokens have KVCache."""
        return self._whole(tokens) - self._whole(reused)

    def _whole(self, tokens: int) -> int:
        quadratic = self.attention * tokens * tokens * self.dimension
        return self.layers * (quadratic + self.linear * tokens * self.dimension**2)


LLAMA3_70B: Final = Model()


@dataclass(slots=True)
class HitCounts:
    """Sums over requests; a prefill that takes no compute for what was hit."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    operations: int = 0
    operations_left: int = 0

    def count(self, request: Request, hits: int, model: Model = LLAMA3_70B) -> None:
        reused = request.tokens_in(hits)
        self.requests += 1
        self.blocks += len(request.hash_ids)
        self.hits += hits
        self.tokens += request.input_length
        self.reused_tokens += reused
        self.operations += model.prefill_operations(request.input_length)
        self.operations_left += model.prefill_operations(request.input_length, reused)

    @property
    def ratio(self) -> float:
        """Blocks that were hit, of all that were referred to."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def compute_saved(self) -> float:
        """The share of prefill operations that need not be done."""
        return 1 - self.operations_left / self.operations if self.operations else 0.0


# --- one cache ------------------------------------------------------------------------------------

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
        return self._entries.get(block)

    def read(self, block: int, now: float) -> None:
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
        self.order.follow(entry, None if before is None else self._entries.get(before))
        self.order.admit([entry], now)
        return gone

    def set_soft(self, block: int, soft: bool) -> None:
        """A soft copy is the last one now, or there is a firm one elsewhere."""
        entry = self._entries[block]
        entry.soft = soft
        self.order.update(entry)

    def left_ssd(self, block: int) -> None:
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


class ColdBlocks:
    """Room for `capacity` blocks of one size. Segments are written one after the other; when there is no other room the
    oldest one is reclaimed: up to a fifth of it is written again, the rest is gone."""

    def __init__(self, capacity: int) -> None:
        self._segment_blocks = max(_MIN_SEGMENT, capacity // SEGMENTS)
        self._most_sealed = capacity // self._segment_blocks - OPEN_SEGMENTS
        if self._most_sealed < 1:
            raise ValueError(f"an SSD has room for {MIN_BLOCKS} blocks at least")
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
