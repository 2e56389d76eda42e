"""Traces of requests, as published with the Mooncake paper (FAST '25): one JSON object a line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

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
    return ConfigError(
        f"line {number:,} of the trace is no request that can be replayed: {problem}"
    )
