"""Fetch or recompute: decisions by estimates, on a trace of requests over links that change, against an oracle.

Each block stays where it was computed first. A request reads the blocks of its prefix from their holders, computes the
rest, and its peer learns from the reads that it made. The oracle knows the true time of each read of each request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from p2pstore.core.gets.fetch_estimates import ReadRates
from p2pstore.results import FetchEstimate, FetchSource, SourceKind
from p2pstore.routing import worth_fetching
from p2pstore.trace.one_cache import LLAMA3_70B, TOKENS_PER_BLOCK, Request, leading_hits
from simulation.measures.figures import Case, Figure, Measured

SIZES: Final = (10,)
OPERATIONS_PER_SECOND: Final = 1.2e15
"""Of eight accelerators, as a prefill has them: 0.05 s a block of 512 tokens, so that 3.3 GB/s are as fast."""
PARTS_PER_BLOCK: Final = 32
"""Engines cache in blocks of 16 tokens."""
PART_TOKENS: Final = TOKENS_PER_BLOCK // PARTS_PER_BLOCK
PART_BYTES: Final = LLAMA3_70B.block_bytes // PARTS_PER_BLOCK
MEMORY_RATE: Final = 20e9
LATENCY_SECONDS: Final = 0.001
JITTER: Final = 0.15
"""Standard deviation of the logarithm of the time of a read."""
MAX_WORSE: Final = 0.02
GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of the peers' links in bytes a second, of which each peer has one at a time, and the mean time until it has
    another one."""

    rates: tuple[float, ...]
    change_seconds: float = math.inf
    most_regret: float | None = 0.10
    """Limit of the regret; None where reads are too rare to tell of a change in time."""


PARTS: Final = {
    "fast": Links((12.5 * GB,)),
    "slow": Links((0.3 * GB,)),
    "even": Links((3.1 * GB,)),
    "different": Links((12.5 * GB, 6 * GB, 3 * GB, 1.2 * GB, 0.3 * GB)),
    "changing": Links((12.5 * GB, 6 * GB, 3 * GB, 1.2 * GB), 600.0),
    "unsteady": Links((12.5 * GB, 1.2 * GB), 120.0, None),
}


def measure(case: Case) -> Measured:
    """Figures of one kind of links."""
    links = PARTS[case.part]
    requests = case.requests[: len(case.requests) // 8] if case.quick else case.requests
    outcome = replay(requests, links, peers=case.peers, seed=case.seed)
    label = f"fetch or recompute, {case.part} links: "
    return Measured(
        [
            Figure(label + "regret against an oracle", outcome.regret, "", links.most_regret),
            Figure(label + "worse than always fetching", outcome.worse, "", MAX_WORSE),
            Figure(label + "requests", outcome.requests, "", 1, at_least=True),
        ]
    )


@dataclass(slots=True)
class Outcome:
    """Seconds until first tokens, over all requests: by each way to decide."""

    requests: int = 0
    always: float = 0.0
    estimated: float = 0.0
    oracle: float = 0.0

    @property
    def regret(self) -> float:
        """Share that the decisions by estimates take longer than the oracle's."""
        return self.estimated / self.oracle - 1

    @property
    def worse(self) -> float:
        """Share that they take longer than fetching whatever is there."""
        return self.estimated / self.always - 1


class _Rates:
    """The rate of each peer's link over time; asked in the order of time."""

    def __init__(self, links: Links, peers: int, rng: Random) -> None:
        self._links = links
        self._rng = rng
        order = rng.sample(range(peers), peers)
        self._now = [links.rates[number % len(links.rates)] for number in order]
        self._changes = [self._next(0.0) for _ in range(peers)]

    def _next(self, now: float) -> float:
        seconds = self._links.change_seconds
        return now + self._rng.expovariate(1 / seconds) if seconds < math.inf else math.inf

    def at(self, peer: int, now: float) -> float:
        while self._changes[peer] <= now:
            self._now[peer] = self._rng.choice(self._links.rates)
            self._changes[peer] = self._next(self._changes[peer])
        return self._now[peer]


@dataclass(slots=True)
class _Peer:
    rates: ReadRates
    coming: list[tuple[float, int, SourceKind, int, float]] = field(default_factory=list)
    """Reads under way, by their end: it is then that they are learnt from."""

    def learn(self, now: float) -> None:
        while self.coming and self.coming[0][0] <= now:
            end, holder, kind, length, seconds = heapq.heappop(self.coming)
            self.rates.observe(holder, kind, 1, length, seconds, end, LATENCY_SECONDS)


def replay(requests: Iterable[Request], links: Links, *, peers: int = 10, seed: int = 1) -> Outcome:
    """The trace with one request after the other to a random peer."""
    rng, outcome = Random(seed), Outcome()
    rates = _Rates(links, peers, rng)
    world = [_Peer(ReadRates(number)) for number in range(peers)]
    holders: dict[int, int] = {}
    for request in requests:
        reader, now = rng.randrange(peers), request.seconds
        blocks = request.hash_ids[: leading_hits(request.hash_ids, holders.__contains__)]
        if blocks:
            parts = -(-request.tokens_in(len(blocks)) // PART_TOKENS)
            chain = [holders[block] for block in blocks for _ in range(PARTS_PER_BLOCK)][:parts]
            slowness = {
                holder: math.exp(rng.gauss(0.0, JITTER))
                / (
                    MEMORY_RATE
                    if holder == reader
                    else min(rates.at(reader, now), rates.at(holder, now))
                )
                for holder in dict.fromkeys(chain)
            }
            prefill = [_prefill_seconds(request, place) for place in range(parts)]
            whole = [*_times(chain, slowness, prefill)]
            peer = world[reader]
            peer.learn(now)
            cut = worth_fetching(_estimate(peer.rates, reader, chain, now), prefill)
            for holder, length, seconds in _reads(chain[:cut], slowness):
                kind: SourceKind = "memory" if holder == reader else "remote"
                heapq.heappush(peer.coming, (now + seconds, holder, kind, length, seconds))
            outcome.always += whole[-1]
            outcome.estimated += whole[cut]
            outcome.oracle += min(whole)
            outcome.requests += 1
        for block in request.hash_ids:
            holders.setdefault(block, reader)
    return outcome


def _prefill_seconds(request: Request, place: int) -> float:
    begin = place * PART_TOKENS
    end = min(begin + PART_TOKENS, request.input_length)
    return LLAMA3_70B.prefill_operations(end, begin) / OPERATIONS_PER_SECOND


def _reads(chain: Sequence[int], slowness: dict[int, float]) -> Iterator[tuple[int, int, float]]:
    for holder in dict.fromkeys(chain):
        length = chain.count(holder) * PART_BYTES
        yield holder, length, LATENCY_SECONDS + length * slowness[holder]


def _times(
    chain: Sequence[int], slowness: dict[int, float], prefill: Sequence[float]
) -> Iterator[float]:
    """Time of a prefix whose first 0, 1, 2 ... blocks are fetched, and the others computed."""
    seconds, seen = sum(prefill), set[int]()
    yield seconds
    for holder, computed in zip(chain, prefill, strict=True):
        seconds += PART_BYTES * slowness[holder] - computed
        seconds += 0.0 if holder in seen else LATENCY_SECONDS
        seen.add(holder)
        yield seconds


def _estimate(rates: ReadRates, reader: int, chain: Sequence[int], now: float) -> FetchEstimate:
    places = {holder: place for place, holder in enumerate(dict.fromkeys(chain))}
    sources = []
    for holder in places:
        kind: SourceKind = "memory" if holder == reader else "remote"
        blocks = chain.count(holder)
        length = blocks * PART_BYTES
        expected = rates.expect(holder, kind, 1, length, now, 0.0, LATENCY_SECONDS)
        name = str(holder)
        sources.append(FetchSource(name, name, kind, blocks, length, expected.seconds, expected.spread))
    return FetchEstimate.of(sources, [places[holder] for holder in chain])
