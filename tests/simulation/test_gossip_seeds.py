"""Clusters of 3 to 32 gossip machines under random faults. A failing seed is named with what replays it."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from p2pstore.gossip.locations import directory as directory_module
from simulation.gossip_run import GossipOutcome, GossipScenario, run_gossip_seed
from tests.long_runs import only_in_long_runs

SEEDS = range(1000, 1200)
BLOCKS = [
    pytest.param(SEEDS[start : start + 25], marks=only_in_long_runs if start >= 100 else ())
    for start in range(0, len(SEEDS), 25)
]
SCENARIO = GossipScenario()
USUAL = ("snapshots", "denials", "deaths", "false_deaths", "checks")
"""Events that must happen in every block of seeds, or it shows nothing."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")  # a fork would take pytest's threads' locks along
    with ProcessPoolExecutor(os.cpu_count(), spawn) as executor:
        yield executor


def run(seed: int) -> GossipOutcome:
    return run_gossip_seed(seed, SCENARIO)


def complaint(outcome: GossipOutcome) -> str:
    command = f"scripts/simulate --seed {outcome.seed} --seeds 1"
    return "\n  ".join([f"seed {outcome.seed}; again: {command}", *outcome.problems[:5]])


@pytest.mark.parametrize("seeds", BLOCKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_all_agree_after_healing_and_nobody_ever_sees_a_ghost(
    pool: ProcessPoolExecutor, seeds: range
) -> None:
    outcomes = list(pool.map(run, seeds))
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, "\n".join(complaint(outcome) for outcome in failed)
    happened = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in USUAL}
    assert all(happened.values()), happened
    assert max(outcome.peers for outcome in outcomes) > 10


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = GossipScenario(4, 4, 3.0, faults="hard")
    first = run_gossip_seed(7, scenario)
    assert first == run_gossip_seed(7, scenario)
    assert first.trace_hash != run_gossip_seed(8, scenario).trace_hash


def test_snapshots_that_are_put_in_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only large ones are; so here all count as large."""
    monkeypatch.setattr(directory_module, "STEP_RECORDS", 2)
    scenario, snapshots = replace(SCENARIO, most_peers=8, seconds=4.0), 0
    for seed in range(12):
        outcome = run_gossip_seed(seed, scenario)
        assert not outcome.problems, complaint(outcome)
        snapshots += outcome.snapshots
    assert snapshots > 10
