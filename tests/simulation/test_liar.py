"""A hostile member among whole peers: no wrong byte, nothing lost, honest objects can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pstore.simulation.liar_run import LiarOutcome, LiarScenario, run_liar
from p2pstore.simulation.lies import BEHAVIOURS

SMALL = LiarScenario(
    seconds=13.0, keys=50, operations_per_second=40.0, floors_per_second=5.0, settle_seconds=15.0
)


def checked(seed: int, behaviour: str) -> LiarOutcome:
    outcome = run_liar(seed, replace(SMALL, behaviour=behaviour))
    assert not outcome.problems, (
        f"{', '.join(outcome.behaviours)}: {outcome.problems[:3]}; again, longer: "
        f"scripts/simulate --liar --seed {seed} --seeds 1 --behaviour {behaviour}"
    )
    assert outcome.reads >= 30, "too few reads to say anything"
    return outcome


@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_liar_all_holds(seed: int) -> None:
    assert checked(seed, "none").lies == 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("behaviour", [name for name in BEHAVIOURS if name != "floors"])
def test_a_liar_does_no_harm(behaviour: str, seed: int) -> None:
    assert checked(seed, behaviour).lies


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = replace(SMALL, seconds=3.0, settle_seconds=3.0, behaviour="tails")
    traces = {run_liar(seed, scenario).trace_hash for seed in (4, 4, 5)}
    assert len(traces) == 2
