"""Replaying a trace on a pool of simulated peers."""

import functools
from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from p2pstore.errors import ConfigError
from p2pstore.memory.policies import PolicyName, make_policy
from p2pstore.trace import one_cache
from p2pstore.trace.one_cache import MAX_LINE_BYTES, BlockCache, ColdBlocks, Request, read_requests
from p2pstore.trace.pool import (
    PeerChange,
    Pool,
    PoolOutcome,
    PoolSettings,
    PrefixAffine,
    RoutingName,
    Source,
    make_router,
    next_up,
)
from tests.unit.test_trace_one_cache import conversation_trace, oracle, published
from tests.unit.trace_requests import conversations, replay_one_cache


def replay(requests: Sequence[Request], **settings: Any) -> PoolOutcome:
    return Pool(PoolSettings(**settings)).replay(requests)


synthetic = functools.cache(conversations)


@functools.cache
def of_eight(**settings: Any) -> PoolOutcome:
    """Replays that several tests look at."""
    return replay(synthetic(1500), peers=8, memory_blocks=500, **settings)


# --- the pool against one cache, and against caches that know nothing of each other ---------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_pool_of_one_is_one_cache(policy: PolicyName, shared: bool) -> None:
    requests = synthetic(1500)
    outcome = replay(requests, peers=1, memory_blocks=500, policy=policy, shared=shared)
    cache = BlockCache(make_policy(policy), 500)
    assert outcome.counts == replay_one_cache(requests, cache)
    assert outcome.tokens_from == {Source.LOCAL_MEMORY: outcome.counts.reused_tokens}


def test_private_caches_are_caches_of_every_nth_request() -> None:
    requests = synthetic(1500)
    outcome = replay(requests, peers=3, memory_blocks=400, policy="lru", shared=False)
    parts = [requests[number::3] for number in range(3)]
    hits = sum(oracle(part, 400) * sum(len(each.hash_ids) for each in part) for part in parts)
    assert outcome.counts.hits == round(hits)


def test_a_pool_hits_nearly_what_one_large_cache_does_and_far_more_than_private_caches() -> None:
    pool, alone = of_eight(), of_eight(shared=False)
    assert pool.counts.ratio == pytest.approx(oracle(synthetic(1500), 4000), abs=0.03)
    assert pool.counts.ratio > 2 * alone.counts.ratio
    assert pool.counts.compute_saved > 2 * alone.counts.compute_saved
    assert sum(pool.tokens_from.values()) == pool.counts.reused_tokens


def test_an_affine_router_reads_at_home() -> None:
    blind, affine = of_eight(), of_eight(routing="affine")
    for outcome, least, most in ((blind, 0.0, 0.3), (affine, 0.7, 1.0)):
        at_home = outcome.tokens_from[Source.LOCAL_MEMORY] / outcome.counts.reused_tokens
        assert least < at_home < most
    alone = of_eight(routing="affine", shared=False)
    assert alone.counts.ratio > 0.8 * affine.counts.ratio


# --- what is known of copies -----------------------------------------------------------------


class CheckedPool(Pool):
    """Compares what is said of blocks with what peers hold, after each request."""

    def _serve(self, request: Request) -> None:
        super()._serve(request)
        memory: dict[int, list[int]] = {}
        ssd: dict[int, list[int]] = {}
        for number, peer in enumerate(self._peers):
            assert len(peer.memory) <= self._settings.memory_blocks
            for block in peer.memory:
                memory.setdefault(block, []).append(number)
            for block in (peer.ssd or ()) if peer.up else ():
                ssd.setdefault(block, []).append(number)
        assert memory == {block: sorted(held) for block, held in self._in_memory.items()}
        assert ssd == {block: sorted(held) for block, held in self._on_ssd.items()}
        for block, held in memory.items():
            entries = [self._peers[number].memory.get(block) for number in held]
            firm = sum(entry is not None and not entry.soft for entry in entries)
            assert firm >= 1, "all copies are soft"
            for number, entry in zip(held, entries, strict=True):
                assert entry is not None
                assert entry.on_ssd == (number in ssd.get(block, ()))


@pytest.mark.parametrize("routing", get_args(RoutingName))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ssd_blocks", [0, 60])
def test_what_is_known_of_blocks_is_true(routing: RoutingName, shared: bool, ssd_blocks: int) -> None:
    settings = PoolSettings(
        peers=4, memory_blocks=30, ssd_blocks=ssd_blocks, routing=routing, shared=shared, keep_after=2
    )
    outcome = CheckedPool(settings).replay(conversations(400))
    assert outcome.blocks_lost > 100
    assert bool(outcome.copies_made) == shared
    assert bool(outcome.ssd_blocks_written) == bool(ssd_blocks)


def test_soft_copies_bring_hot_blocks_near_and_cost_no_hits() -> None:
    none, some = of_eight(keep_after=0), of_eight(keep_after=3)
    assert none.copies_made == 0 < some.copies_made
    assert some.tokens_from[Source.LOCAL_MEMORY] > none.tokens_from[Source.LOCAL_MEMORY]
    assert some.counts.ratio == pytest.approx(none.counts.ratio, abs=0.003)


# --- SSD ---------------------------------------------------------------------------------------


def test_an_ssd_adds_what_memory_has_no_room_for() -> None:
    requests = synthetic(1500)
    without = replay(requests, peers=4, memory_blocks=100)
    small = replay(requests, peers=4, memory_blocks=100, ssd_blocks=400)
    large = replay(requests, peers=4, memory_blocks=100, ssd_blocks=100_000)
    assert without.counts.ratio < small.counts.ratio < large.counts.ratio
    assert large.counts.ratio == oracle(requests, 10**6)
    assert large.blocks_lost == 0
    assert large.tokens_from[Source.LOCAL_SSD]
    assert large.tokens_from[Source.REMOTE_SSD] > large.tokens_from[Source.LOCAL_SSD]


def test_reclaim_keeps_what_was_read_and_lets_the_rest_go() -> None:
    cold = ColdBlocks(640)
    gone: list[int] = []
    for block in range(5000):
        gone += cold.put(block)
        if 7 in cold:
            cold.read(7)
        assert len(cold) <= 640
    assert 7 in cold
    assert sorted([*gone, *cold]) == list(range(5000))
    assert 5000 < cold.written <= 5000 * 1.25


def test_an_ssd_has_room_for_some_segments() -> None:
    with pytest.raises(ValueError, match="15 blocks at least"):
        ColdBlocks(14)
    ColdBlocks(15)


# --- routers -----------------------------------------------------------------------------------


def test_blind_routers_spread_requests() -> None:
    for name in ("round-robin", "random"):
        router = make_router(name, 1.0, Random(1))
        chosen = [router([0, 5, 0]) for _ in range(3000)]
        assert all(
            abs(chosen.count(peer) - 1000) <= (100 if name == "random" else 0) for peer in range(3)
        )


@pytest.mark.parametrize("bound", [1.0, 1.05, 2.0])
def test_an_affine_router_keeps_its_bound(bound: float) -> None:
    router = PrefixAffine(bound)
    sent = [0, 0, 0, 0]
    for _ in range(1000):
        sent[router.choose([1, 9, 1, 5])] += 1
    assert max(sent) <= bound * 250 + 1
    assert sent[1] == max(sent), "as long as it may, it takes the one with most"
    with pytest.raises(ValueError, match="1 at least"):
        PrefixAffine(0.9)


# --- the published trace -------------------------------------------------------------------------


@published
@pytest.mark.parametrize(("routing", "ratio"), [("round-robin", 0.104), ("random", 0.102)])
def test_private_caches_on_the_published_trace(routing: RoutingName, ratio: float) -> None:
    outcome = replay(
        conversation_trace(), memory_blocks=5859, policy="lru", routing=routing, shared=False
    )
    assert outcome.counts.ratio == pytest.approx(ratio, abs=0.0015)


@published
@pytest.mark.parametrize("routing", get_args(RoutingName))
def test_the_pool_on_the_published_trace(routing: RoutingName) -> None:
    outcome = replay(conversation_trace(), memory_blocks=5859, routing=routing)
    assert outcome.counts.ratio >= 0.348
    assert outcome.counts.compute_saved >= 0.33
    cold = replay(conversation_trace(), memory_blocks=5859, ssd_blocks=4 * 5859, routing=routing)
    assert cold.counts.ratio >= 0.364


@published
def test_unequal_load_uses_the_memory_of_all_on_the_published_trace() -> None:
    requests = conversation_trace()
    one = replay(requests, peers=1, memory_blocks=4 * 5859).counts.ratio
    alone = replay(requests, peers=4, memory_blocks=5859, routing="unequal", offers=False)
    offering = replay(requests, peers=4, memory_blocks=5859, routing="unequal")
    assert alone.counts.ratio < 0.93 * one
    assert offering.counts.ratio > 0.975 * one


# --- who dies and returns ------------------------------------------------------------------------


def kills(requests: int, peers: int, *, every: int = 40, away: int = 15) -> list[PeerChange]:
    """One peer after the other."""
    changes = []
    for number, at in enumerate(range(every, requests - away, every)):
        changes.append(PeerChange(at, number % peers, up=False))
        changes.append(PeerChange(at + away, number % peers, up=True))
    return changes


@pytest.mark.parametrize("ssd_blocks", [0, 60])
def test_what_is_known_of_blocks_is_true_while_peers_die_and_return(ssd_blocks: int) -> None:
    settings = PoolSettings(peers=4, memory_blocks=30, ssd_blocks=ssd_blocks, keep_after=2)
    CheckedPool(settings).replay(conversations(400), kills(400, 4))


def test_the_dead_lose_their_memory_and_keep_their_ssd() -> None:
    requests = synthetic(1500)
    changes = kills(1500, 8)
    rates = {}
    for ssd_blocks in (0, 4000):
        settings = PoolSettings(peers=8, memory_blocks=300, ssd_blocks=ssd_blocks, keep_after=0)
        calm = Pool(settings).replay(requests).counts.ratio
        rates[ssd_blocks] = Pool(settings).replay(requests, changes).counts.ratio
        assert rates[ssd_blocks] < calm
    assert rates[4000] > rates[0]


def test_a_request_goes_to_the_next_peer_that_is_up() -> None:
    assert [next_up(peer, [True, False, False]) for peer in range(3)] == [0, 0, 0]
    assert next_up(1, [True, True]) == 1
    with pytest.raises(ValueError, match="no peer"):
        next_up(0, [False])


LINE = b'{"timestamp": 27, "input_length": 600, "output_length": 1, "hash_ids": [0, 4]}\n'


def test_a_request_is_what_its_line_says() -> None:
    line = LINE[:-2] + b', "more": true}\n'
    assert list(read_requests([line, b"\n", LINE])) == [Request(27, 600, 1, [0, 4])] * 2
    request = next(read_requests([LINE]))
    assert request.seconds == 0.027
    assert [request.tokens_in(blocks) for blocks in range(3)] == [0, 512, 600]


def test_what_was_written_is_read() -> None:
    written = conversations(50)
    lines = [msgspec.json.encode(each) + b"\n" for each in written]
    assert list(read_requests(lines)) == written


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "malformed"),
        (b"[1]", "Expected `object`"),
        (LINE.replace(b"timestamp", b"time"), "missing required field `timestamp`"),
        (LINE.replace(b"27", b"-1"), ">= 0"),
        (LINE.replace(b"600", b'"600"'), r"Expected `int`, got `str` - at `\$.input_length`"),
        (LINE.replace(b"[0, 4]", b"[0, 4.5]"), r"\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0, -4]"), r">= 0 - at `\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0, 9223372036854775808]"), r"\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0]"), "1 hash_ids; 600 tokens are 2 blocks"),
        (LINE.replace(b"[0, 4]", b"[4, 4]"), "a block twice"),
        (LINE.replace(b"27", b"26"), "26 is before 27"),
        (LINE.replace(b"600", b"99999999999"), "<= 4294967296"),
        (b" " * (MAX_LINE_BYTES + 1), "more than 16,777,216 bytes"),
        (b"\xff\xfe", "malformed"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^line 2 of the trace .*{problem}"):
        list(read_requests([LINE, line]))


def test_a_trace_has_requests_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        list(read_requests([b"\n"]))
    monkeypatch.setattr(one_cache, "MAX_REQUESTS", 3)
    assert len(list(read_requests([LINE] * 3))) == 3
    with pytest.raises(ConfigError, match=r"line 4 .*at most 3"):
        list(read_requests([LINE] * 4))
