"""Traces of requests, as published with the Mooncake paper (FAST '25): one JSON object a line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from p2pstore.errors import ConfigError

TOKENS_PER_BLOCK: Final = 512
MAX_LINE_BYTES: Final = 16 * 2**20
MAX_REQUESTS: Final = 10_000_000
_MAX_TOKENS: Final = 2**32

BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. `timestamp` is in milliseconds from the beginning; lengths are tokens. `hash_ids` are its prefix
    blocks of 512 tokens, from the head on: equal ids stand for equal KVCache. The last block may not be full."""

    timestamp: Annotated[int, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]

    @property
    def seconds(self) -> float:
        """When it came."""
        return self.timestamp / 1000

    def tokens_in(self, blocks: int) -> int:
        """Tokens of its first blocks."""
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
        """Of a full block."""
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
        """Take in a request whose first `hits` blocks were there."""
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


Block = TypeVar("Block")
