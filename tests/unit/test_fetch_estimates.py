"""Expected times of fetches: lessons of reads, and the share of each holder."""

import math
from random import Random

import pytest

from p2pstore.core.gets.fetch_estimates import PRIORS, Estimator, ReadRates
from p2pstore.core.gets.key_pages import holdings_here
from p2pstore.objects import MIB, namespace_digest
from p2pstore.results import FetchEstimate, FetchSource, total_time
from tests.unit.core_harness import NAMESPACE, Harness, digest_of

OWN, HOLDER, OTHER = 1, 2, 3


def seconds_of(requests: int, length: int, rate: float, latency: float) -> float:
    return requests * latency + length / rate


def test_a_source_that_was_never_read_is_as_its_kind_usually_is() -> None:
    rates = ReadRates(OWN)
    latency, slowness = PRIORS["remote"]
    first = rates.expect(HOLDER, "remote", 1, 100 * MIB, 0.0)
    assert first.seconds == pytest.approx(latency + 100 * MIB * slowness)
    assert first.spread == pytest.approx(1.0, abs=0.1)
    for step in range(10):
        rates.observe(HOLDER, "remote", 1, 8 * MIB, seconds_of(1, 8 * MIB, 1e8, 0.001), float(step))
    learnt = rates.expect(OTHER, "remote", 1, 100 * MIB, 10.0)
    assert learnt.seconds == pytest.approx(100 * MIB / 1e8, rel=0.1)
    assert learnt.spread > rates.expect(HOLDER, "remote", 1, 100 * MIB, 10.0).spread
    assert rates.expect(HOLDER, "neighbour", 1, 100 * MIB, 10.0).seconds < 0.1 * learnt.seconds


def test_both_parts_are_learnt_from_small_and_large_reads() -> None:
    rates, rng = ReadRates(OWN), Random(1)
    for step in range(60):
        requests, length = rng.choice([(3, 12_288), (1, 40 * MIB)])
        seconds = seconds_of(requests, length, 2e8, 0.02) * math.exp(rng.gauss(0, 0.1))
        rates.observe(HOLDER, "remote", requests, length, seconds, step * 0.1)
    for requests, length in [(1, 4096), (1, MIB), (1, 400 * MIB), (10, 10 * MIB)]:
        expected = rates.expect(HOLDER, "remote", requests, length, 6.0)
        truth = seconds_of(requests, length, 2e8, 0.02)
        assert expected.seconds == pytest.approx(truth, rel=0.15), (requests, length)
        assert 0.05 < expected.spread < 0.4


def test_a_new_speed_is_learnt_within_three_reads_and_one_hiccup_changes_little() -> None:
    rates, now = ReadRates(OWN), 0.0

    def read(seconds: float) -> float:
        nonlocal now
        now += 0.5
        rates.observe(HOLDER, "remote", 1, 100 * MIB, seconds, now)
        return rates.expect(HOLDER, "remote", 1, 100 * MIB, now).seconds

    for number in range(20):
        usual = read(1.0 + 0.05 * (-1) ** number)
    assert usual == pytest.approx(1.0, abs=0.1)
    assert read(20.0) < 2.0
    assert read(1.0) < 1.6
    for _ in range(3):
        changed = read(10.0)
    assert changed == pytest.approx(10.0, rel=0.25)
    late = rates.expect(HOLDER, "remote", 1, 100 * MIB, now + 1000.0)
    assert late.seconds == pytest.approx(changed)
    assert late.spread > 1.0


def test_what_cannot_be_is_not_learnt() -> None:
    rates = ReadRates(OWN)
    before = rates.expect(HOLDER, "remote", 1, MIB, 0.0)
    for requests, length, seconds in [
        *((0, 1, 1.0), (1, 0, 1.0), (1, -1, 1.0), (1, 1, 0.0), (1, 1, -1.0)),
        *((1, 1, math.inf), (1, 1, math.nan), (-1, 1, 1.0)),
    ]:
        rates.observe(HOLDER, "remote", requests, length, seconds, 0.0)
    assert rates.expect(HOLDER, "remote", 1, MIB, 0.0) == before
    rates.observe(HOLDER, "remote", 1 << 60, 1 << 60, 1e-6, 0.0)
    rates.observe(HOLDER, "remote", 1, 1, 1e300, 0.0)
    assert math.isfinite(rates.expect(HOLDER, "remote", 1, MIB, 0.0).seconds)


def test_load_counts_until_the_speed_was_measured_under_it() -> None:
    rates = ReadRates(OWN)
    idle = rates.expect(HOLDER, "remote", 1, 100 * MIB, 0.0)
    busy = rates.expect(HOLDER, "remote", 1, 100 * MIB, 0.0, load=1.0)
    assert busy.seconds == pytest.approx(2 * idle.seconds, rel=0.01)
    for step in range(5):
        rates.observe(HOLDER, "remote", 1, 100 * MIB, 1.0, float(step))
    busy = rates.expect(HOLDER, "remote", 1, 100 * MIB, 5.0, load=1.0)
    assert busy.seconds == pytest.approx(1.0, rel=0.1)


def sources_of(estimator: Estimator, world: Harness, keys: str) -> list[tuple[int, str, list[int]]]:
    digests = [digest_of(key) for key in keys]
    found = holdings_here(world.core, digests, world.now, namespace_digest(NAMESPACE))
    assert found is not None
    return [
        (
            [world.core.peer_id, *(each.peer_id for each in world.others)].index(each.peer_id),
            each.kind,
            each.places.tolist(),
        )
        for each in estimator.estimate(digests, found, world.now)
    ]


def test_each_key_comes_from_the_nearest_holder_and_holders_share() -> None:
    world = Harness(others=2)
    first, second = world.others
    world.stored("a", b"1")
    for key in "abcd":
        world.hold(first, key, b"2" * 5000)
    for key in "cdef":
        world.hold(second, key, b"2" * 5000)
    estimator = Estimator(world.core, b"here", lambda _: None)
    places = sources_of(estimator, world, "abcdefg")
    assert places == [(0, "memory", [0]), (1, "remote", [1, 2]), (2, "remote", [3, 4, 5])]
    world.stored("own", b"1" * 5000)
    found = holdings_here(world.core, [digest_of("own")], world.now, namespace_digest(NAMESPACE))
    assert found is not None
    assert [each.length_bytes for each in estimator.estimate([digest_of("own")], found, world.now)] == [
        5000
    ]
    assert estimator.estimate([], {}, world.now) == []


def test_a_slow_round_trip_is_the_first_guess_at_the_latency() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "a", b"2")
    digests = [digest_of("a")]
    found = holdings_here(world.core, digests, world.now, namespace_digest(NAMESPACE))
    assert found is not None
    (source,) = Estimator(world.core, b"here", lambda _: 0.08).estimate(digests, found, world.now)
    assert source.expected.seconds == pytest.approx(0.08, rel=0.01)


def test_sums_of_sources() -> None:
    sources = [
        FetchSource("a", "a", "remote", 3, 300, 3.0, 0.4),
        FetchSource("b", "b", "remote", 1, 100, 4.0, 0.4),
    ]
    estimate = FetchEstimate.of(sources, [0, 0, 0, 1, -1])
    assert (estimate.seconds, estimate.bytes, estimate.blocks) == (7.0, 400, 4)
    assert estimate.spread == pytest.approx(0.4 * 5 / 7)
    assert estimate.p90_seconds == pytest.approx(7.0 * math.exp(1.2816 * estimate.spread))
    assert total_time([]) == (0, 0.0)
