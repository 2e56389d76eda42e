"""A synthetic trace of conversations: turns that extend one another, behind a prompt that all share."""

import itertools
from collections.abc import Iterable
from random import Random

from p2pstore.trace.one_cache import TOKENS_PER_BLOCK, BlockCache, HitCounts, Request, leading_hits


def conversations(requests: int, seed: int = 1) -> list[Request]:
    """A trace of `requests` requests. Each second a conversation begins, or goes on after one to ten minutes."""
    rng = Random(seed)
    fresh = itertools.count(1)
    due: list[tuple[float, list[int]]] = []
    made: list[Request] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(1.0)
        due.sort()
        blocks = due.pop(0)[1] if due and due[0][0] <= now else [0]
        blocks = blocks + [next(fresh) for _ in range(int(rng.expovariate(1 / 6)) + 1)]
        if rng.random() < 0.5:
            due.append((now + rng.uniform(60, 600), blocks))
        tokens = len(blocks) * TOKENS_PER_BLOCK - rng.randrange(TOKENS_PER_BLOCK)
        made.append(Request(int(now * 1000), tokens, rng.randrange(1, 500), blocks))
    return made


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
