"""Broadcasts in virtual time, small ones: `scripts/simulate_broadcast` has the figures."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2pstore.checkpoint.swarm.selection import SwarmConfig
from simulation.broadcast import Broadcast, BroadcastOutcome, BroadcastScenario
from tests.commands import ran

ROOT = Path(__file__).parents[2]


def broadcast(scenario: BroadcastScenario, seed: int = 1) -> BroadcastOutcome:
    return Broadcast(scenario, seed).run()


@pytest.mark.parametrize(("receivers", "most"), [(1, 1.03), (8, 1.05), (64, 1.08)])
def test_a_broadcast_over_equal_links_takes_little_more_than_it_must(
    receivers: int, most: float
) -> None:
    outcome = broadcast(BroadcastScenario(receivers))
    assert 1.0 <= outcome.last <= most
    assert outcome.source_copies <= 1.1
    assert outcome.most_copies_per_host <= 1.02
    assert outcome.pieces_arrived <= 1.01 * 256 * receivers


def test_slow_receivers_delay_the_others_little() -> None:
    outcome = broadcast(BroadcastScenario(32, slow_share=0.1))
    assert outcome.last <= 1.15
    assert outcome.last_slow > 1.15


def test_receivers_that_die_midway_delay_the_others_little() -> None:
    assert broadcast(BroadcastScenario(32, dying_share=0.1)).last <= 1.15


def test_pieces_that_take_no_longer_than_a_few_messages_keep_links_busy_as_well() -> None:
    scenario = BroadcastScenario(16, 512, piece_bytes=1 << 19, latency=0.0003)
    assert broadcast(scenario).last <= 1.06
    two_slots = replace(scenario, config=SwarmConfig(upload_slots=2))
    assert broadcast(two_slots).last > 1.3


def test_a_sender_of_wrong_bytes_is_banned_and_the_others_get_the_right_ones() -> None:
    scenario = BroadcastScenario(32, pieces=128, hostile_share=0.1)
    outcomes = [broadcast(scenario, seed) for seed in range(1, 4)]
    for outcome in outcomes:
        assert outcome.last <= 1.4
        assert outcome.wrongly_banned == 0
        assert outcome.bad_pieces <= 28 * 4 * 3
    # Of the four in each; those that could send one bad piece only may be left alone.
    assert 5 <= sum(outcome.banned for outcome in outcomes) <= 12


def test_who_offers_and_sends_nothing_delays_others_little() -> None:
    outcome = broadcast(BroadcastScenario(32, silent_share=0.2))
    assert outcome.last <= 1.5
    assert outcome.wrongly_banned == 0


def test_late_joiners_are_let_in_and_need_no_longer() -> None:
    outcome = broadcast(BroadcastScenario(40, pieces=128, joining_over=2.0))
    assert outcome.last <= 1.15
    assert outcome.source_copies < 5


def test_the_source_may_leave_when_each_piece_is_in_the_swarm() -> None:
    outcome = broadcast(BroadcastScenario(24, source_leaves=True))
    assert outcome.source_left_at <= 1.05
    assert outcome.last <= 1.08


def test_a_host_fetches_each_piece_once_however_many_receivers_it_has() -> None:
    outcome = broadcast(BroadcastScenario(16, pieces=128, receivers_per_host=4))
    assert outcome.most_copies_per_host <= 1.03
    assert outcome.last <= 1.4


def test_who_needs_a_part_gets_that_part_from_those_who_have_it_and_nothing_else() -> None:
    outcome = broadcast(BroadcastScenario(64, parts=4))
    assert outcome.last <= 1.08
    assert outcome.source_copies <= 1.1
    assert outcome.copies_per_host <= 0.255
    assert outcome.pieces_arrived <= 1.01 * 256 / 4 * 64
    many = broadcast(BroadcastScenario(100, parts=10))  # most neighbours are of no use
    assert many.last <= 2.5
    assert many.copies_per_host <= 0.11


def test_everything_at_once() -> None:
    """Every healthy receiver completes in every scenario."""
    scenario = BroadcastScenario(
        48,
        pieces=64,
        slow_share=0.1,
        dying_share=0.3,
        hostile_share=0.1,
        joining_over=1.0,
        receivers_per_host=2,
    )
    for seed in range(4):
        outcome = broadcast(scenario, seed)
        assert outcome.last < math.inf
        assert outcome.wrongly_banned == 0


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = BroadcastScenario(12, pieces=32, slow_share=0.2, dying_share=0.2)
    assert broadcast(scenario, 5) == broadcast(scenario, 5)
    assert broadcast(scenario, 5) != broadcast(scenario, 6)


def run_script(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "simulate_broadcast"), *options]
    return ran(command, 120)


def test_the_script_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "broadcast.json"
    done = run_script("--receivers", "8", "--case", "slow", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "slow, 8 receivers: last" in done.stdout
    results = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    last = results["slow, 8 receivers: last"]
    assert 1.0 <= last["value"] == last["ratio"] <= 1.15
    assert last["against"] == "shortest possible"


@pytest.mark.parametrize("options", [["--receivers", "1001"], ["--case", "x"]])
def test_options_that_make_no_sense_end_with_status_2(options: list[str]) -> None:
    assert run_script(*options).returncode == 2
