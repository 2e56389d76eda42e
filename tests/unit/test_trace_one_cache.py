"""Replaying a trace in one cache: against an oracle, against a real segment, and the published trace's figures."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import pytest

from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.policies import PolicyName, make_policy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import GRANULE_BYTES, TrailerBody
from p2pstore.objects import key_digest
from p2pstore.trace.one_cache import (
    LLAMA3_70B,
    BlockCache,
    HitCounts,
    Request,
    leading_hits,
    read_requests,
)
from simulation.segment_checks import check_segment
from tests.stored import stored
from tests.unit.test_segment import new_segment
from tests.unit.trace_requests import conversations, replay_one_cache

SIZES = (1_000, 5_859, 10_000, 30_000, 50_000, 58_590, 100_000)


def hit_ratio(requests: Iterable[Request], policy: PolicyName, capacity: int) -> float:
    return replay_one_cache(requests, BlockCache(make_policy(policy), capacity)).ratio


def oracle(requests: Iterable[Request], capacity: int) -> float:
    """Exact LRU, in ten lines."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = blocks = 0
    for request in requests:
        missing = [place for place, block in enumerate(request.hash_ids) if block not in kept]
        hits += missing[0] if missing else len(request.hash_ids)
        blocks += len(request.hash_ids)
        for block in request.hash_ids:
            kept[block] = None
            kept.move_to_end(block)
            if len(kept) > capacity:
                kept.popitem(last=False)
    return hits / blocks


# --- a synthetic trace -------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [50, 300, 1000, 3000, 10**6])
def test_lru_hits_what_an_exact_lru_hits(capacity: int) -> None:
    requests = conversations(1500)
    assert hit_ratio(requests, "lru", capacity) == oracle(requests, capacity)


@pytest.mark.parametrize("policy", ["s3-fifo", "prefix"])
def test_a_cache_that_holds_everything_hits_all_that_came_before(policy: PolicyName) -> None:
    requests = conversations(1500)
    assert hit_ratio(requests, policy, 10**6) == oracle(requests, 10**6)


@pytest.mark.parametrize("capacity", [300, 1000, 3000])
def test_the_default_beats_both_on_conversations(capacity: int) -> None:
    requests = conversations(4000)
    better = max(hit_ratio(requests, "lru", capacity), hit_ratio(requests, "s3-fifo", capacity))
    assert hit_ratio(requests, "prefix", capacity) >= better - 0.003


class WatchedCache(BlockCache):
    """Counts the blocks that went although others that were there built on them."""

    heads_first = evicted = 0

    def _evict(self) -> ObjectEntry:
        self.evicted += 1
        self.heads_first += next(self.order.coldest()).followers > 0
        return super()._evict()


@pytest.mark.parametrize("capacity", [50, 300, 1000])
def test_no_block_goes_before_those_that_build_on_it(capacity: int) -> None:
    watched = WatchedCache(make_policy("prefix"), capacity)
    replay_one_cache(conversations(4000), watched)
    assert watched.evicted > 10_000
    assert watched.heads_first == 0


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "prefix"])
def test_a_segment_hits_what_the_replay_says(policy: PolicyName) -> None:
    """The real thing, with slots, extents and windows, one granule a block."""
    requests = conversations(1200)
    segment, _ = new_segment(1000, policy=policy)
    counts = HitCounts()
    for request in requests:
        now = 1000 + request.seconds
        digests = [key_digest(str(block)) for block in request.hash_ids]
        hits = leading_hits(digests, partial(segment.find, now=now))
        counts.count(request, hits)
        before = b""
        for block, digest in zip(request.hash_ids, digests, strict=True):
            if segment.find(digest, now) is None:
                put_block(segment, block, now, before)
            else:
                segment.objects.touch(digest, 1, now)
            before = digest
    check_segment(segment)
    assert counts.ratio == pytest.approx(hit_ratio(requests, policy, 1000), abs=0.005)


def put_block(segment: Segment, block: int, now: float, before: bytes) -> None:
    length = GRANULE_BYTES // 2
    trailer = TrailerBody("default", str(block), bytes(8))
    stored(segment, trailer, length, now=now, follows=before)


def test_what_is_reused_need_not_be_computed() -> None:
    counts = HitCounts()
    counts.count(Request(0, 1000, 1, [0, 1]), 0)
    assert (counts.compute_saved, counts.ratio, counts.reused_tokens) == (0, 0, 0)
    counts.count(Request(0, 1000, 1, [0, 1]), 2)
    assert (counts.compute_saved, counts.ratio, counts.reused_tokens) == (0.5, 0.5, 1000)
    per_token = LLAMA3_70B.prefill_operations(1) - LLAMA3_70B.prefill_operations(0)
    assert per_token == 80 * (4 * 8192 + 22 * 8192**2)
    assert LLAMA3_70B.prefill_operations(1000, 1000) == 0
    assert LLAMA3_70B.prefill_operations(1000, 999) > per_token, "later tokens cost more"


# --- the published trace -------------------------------------------------------------------------

published = pytest.mark.skipif(
    not os.environ.get("P2PSTORE_TRACE"),
    reason="P2PSTORE_TRACE=FILE names no conversation trace of Mooncake's FAST '25 release",
)


@cache
def conversation_trace() -> list[Request]:
    with Path(os.environ["P2PSTORE_TRACE"]).open("rb") as lines:
        return list(read_requests(lines))


@cache
def ratio_of_published(policy: PolicyName, capacity: int) -> float:
    return hit_ratio(conversation_trace(), policy, capacity)


@published
@pytest.mark.parametrize(
    ("capacity", "ratio"),
    [
        *[(1_000, 0.0445), (5_859, 0.1355), (10_000, 0.2112), (30_000, 0.3257)],
        *[(50_000, 0.3546), (58_590, 0.3588), (100_000, 0.3637), (10**9, 0.3664)],
    ],
)
def test_lru_on_the_published_trace(capacity: int, ratio: float) -> None:
    assert ratio_of_published("lru", capacity) == pytest.approx(ratio, abs=0.0005)


@published
@pytest.mark.parametrize(
    ("capacity", "ratio"),
    [
        *[(1_000, 0.0556), (5_859, 0.1519), (10_000, 0.1952), (30_000, 0.3039)],
        *[(50_000, 0.3490), (58_590, 0.3550), (100_000, 0.3624)],
    ],
)
def test_s3_fifo_on_the_published_trace(capacity: int, ratio: float) -> None:
    assert ratio_of_published("s3-fifo", capacity) == pytest.approx(ratio, abs=0.0005)


@published
@pytest.mark.parametrize("capacity", SIZES)
def test_the_default_on_the_published_trace(capacity: int) -> None:
    better = max(ratio_of_published("lru", capacity), ratio_of_published("s3-fifo", capacity))
    assert ratio_of_published("prefix", capacity) >= better - 0.003
    if capacity <= 50_000:
        assert ratio_of_published("prefix", capacity) > better
