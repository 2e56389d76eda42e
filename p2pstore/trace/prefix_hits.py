"""What counts as a hit, and what it saves. Pure.

A block of KVCache can be used only with all blocks before it: the hits of a request are the blocks up to the first one
that is missing, whatever is found behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from p2pstore.trace.trace_requests import TOKENS_PER_BLOCK, Request

Block = TypeVar("Block")


def leading_hits(blocks: Sequence[Block], is_there: Callable[[Block], object]) -> int:
    """How many blocks, from the head on, are there without a gap."""
    for place, block in enumerate(blocks):
        if not is_there(block):
            return place
    return len(blocks)


@dataclass(frozen=True, slots=True)
class Model:
    """What prefill costs, as in Eq. 1 of the Mooncake paper: `layers * (a n^2 d + b n d^2)` for n tokens, where
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
