"""Which objects are said to be read most, against a plain count of everything."""

from collections import Counter
from random import Random

import pytest

from p2pstore.memory.segment_objects import COUNTED, HALF_LIFE_SECONDS, MostRead


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_steady_rate_is_told_as_it_is() -> None:
    reads = MostRead()
    for tick in range(int(10 * HALF_LIFE_SECONDS) * 10):
        reads.read(digest(1), 3, tick / 10)
        reads.read(digest(2), 1, tick / 10)
    (first, rate), (second, other) = reads.most(5, 10 * HALF_LIFE_SECONDS)
    assert (first, second) == (digest(1), digest(2))
    assert rate == pytest.approx(30, rel=0.02)
    assert other == pytest.approx(10, rel=0.02)


def test_what_was_read_long_ago_counts_less() -> None:
    reads = MostRead()
    reads.read(digest(1), 100, 1000.0)
    later = 1000.0 + 4 * HALF_LIFE_SECONDS
    reads.read(digest(2), 10, later)
    (first, rate), (second, other) = reads.most(2, later)
    assert (first, second) == (digest(2), digest(1))
    assert rate / other == pytest.approx(10 / (100 / 16))
    assert reads.most(2, later + 1e6) == []


def test_the_hottest_stand_out_of_any_number_of_others() -> None:
    """Half of a million reads go to a few; the others never come twice. Memory stays bounded."""
    rng, reads, real = Random(5), MostRead(256), Counter[int]()
    for step in range(200_000):
        hot = rng.random() < 0.5
        number = int(rng.expovariate(0.3)) if hot else 1000 + step
        real[number] += 1
        reads.read(digest(number), 1, step / 100_000)
        assert len(reads) <= 256
    told = [int.from_bytes(each, "big") for each, _ in reads.most(8, 2.0)]
    assert told == [number for number, _ in real.most_common(8)]


def test_one_pass_over_all_objects_leaves_the_hot_ones() -> None:
    reads = MostRead()
    for _ in range(200):
        reads.read(digest(1), 1, 1.0)
    for number in range(2, 100 * COUNTED):
        reads.read(digest(number), 1, 1.0)
    assert reads.most(1, 1.0)[0][0] == digest(1)


def test_years_and_a_clock_that_is_set_back_do_no_harm() -> None:
    reads = MostRead()
    for day in range(40):
        reads.read(digest(day % 3), 1, day * 3000.0)  # 50 half-lives each
    assert reads.most(1, 40 * 3000.0)[0][0] == digest(39 % 3)
    reads.read(digest(7), 1, 5.0)
    reads.read(digest(7), 1, 5.0 + HALF_LIFE_SECONDS)
    found, rate = reads.most(1, 5.0 + HALF_LIFE_SECONDS)[0]
    assert found == digest(7)
    assert rate == pytest.approx(1.5 * 0.693 / HALF_LIFE_SECONDS, rel=0.01)
