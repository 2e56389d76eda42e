"""Whole peers under faults, many seeds. A failing seed is printed and replays exactly."""

import os
import sys
from pathlib import Path

import pytest

from simulation.kernel import Faults
from simulation.workload import Scenario, run_seed
from tests.commands import ran

LOSSY = Faults(loss=0.05, duplication=0.02, slow=0.05, slow_latency=0.4)
VERY_LOSSY = Faults(loss=0.2, duplication=0.05, slow=0.1, slow_latency=1.0)


def check(seed: int, scenario: Scenario) -> None:
    outcome = run_seed(seed, scenario)
    assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"
    assert outcome.delivered, f"seed {seed}: no get delivered anything"


@pytest.mark.parametrize("seed", range(6))
def test_calm_clusters_agree(seed: int) -> None:
    check(seed, Scenario(peers=3 + seed % 4, seconds=10.0, crashes=0, partitions=0))


@pytest.mark.parametrize("seed", [*range(100, 106), 1044])
def test_faulty_clusters_agree_after_healing(seed: int) -> None:
    check(seed, Scenario(peers=3 + seed % 6, seconds=12.0, faults=LOSSY))


@pytest.mark.parametrize("seed", range(200, 204))
def test_very_faulty_clusters_agree_after_healing(seed: int) -> None:
    check(seed, Scenario(peers=5, seconds=15.0, crashes=4, partitions=4, faults=VERY_LOSSY))


def test_memory_is_reused_under_readers_and_they_notice() -> None:
    """Little memory, slow pulls: extents are evicted and filled again while they are being read."""
    scenario = Scenario(
        peers=4, seconds=10.0, memory_bytes=512 * 1024, crashes=1, pull_seconds=0.3, faults=LOSSY
    )
    refused = 0
    for seed in range(300, 306):
        outcome = run_seed(seed, scenario)
        assert not outcome.problems, f"seed {seed}: {outcome.problems[:5]}"
        refused += outcome.refused_copies
    assert refused, "no copy was ever torn: the test has lost its power"


def test_the_same_seed_gives_the_same_run_in_another_process() -> None:
    """Sets of bytes are in another order there: where that matters, no failure can be replayed."""
    program = (
        "from tests.simulation.test_whole_peers import VERY_LOSSY, Scenario, run_seed\n"
        "print(run_seed(7, Scenario(seconds=6.0, keys=20, faults=VERY_LOSSY)).trace_hash)"
    )
    printed = {
        ran(
            [sys.executable, "-c", program],
            120,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(printed) == 1
