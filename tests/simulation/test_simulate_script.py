"""`scripts/simulate`: options, replaying, JSON, figures and pictures, exit statuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ran

ROOT = Path(__file__).parents[2]


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    """Run it in a small way."""
    command = [sys.executable, str(ROOT / "scripts" / "simulate"), "--processes", "1", *options]
    return ran(command, 120)


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_seed_replays_exactly_by_the_command_that_is_printed_for_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = simulate("--peers", "4", "--seed", "5", "--seeds", "2", "--quick", "--json", str(first))
    assert done.returncode == 0, done.stderr
    seed = document(first)["seeds"][1]
    again = re.split(r"\s+", seed["replay"])[1:]
    done = simulate(*again, "--json", str(second))
    assert done.returncode == 0, done.stderr
    assert f"trace {seed['trace_hash']}" in done.stdout
    assert document(second)["seeds"] == [seed]


def test_a_seed_with_a_liar_replays(tmp_path: Path) -> None:
    file = tmp_path / "liar.json"
    options = ("--liar", "--behaviour", "replays", "--seeds", "1", "--seconds", "2")
    done = simulate(*options, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (seed,) = document(file)["seeds"]
    assert seed["behaviours"] == ["replays 0.0-2.0 s"]
    assert seed["replay"].endswith("--seeds 1 --seconds 2 --faults none --behaviour replays")


def test_figures_are_measured_compared_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "spread.png"
    done = simulate("--measure", "spread", "--peers", "12", "--quick", "--plot", str(picture))
    assert done.returncode == 0, done.stdout
    assert "12 peers, loss 5%: 99 % know, median" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "index, p99" in line or "it, p99" in line]
    assert [line.count("pass") for line in rows] == [1, 1, 1, 1], (
        "news and removals are soon in every index"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_part_of_a_figure_is_taken_alone(tmp_path: Path) -> None:
    file = tmp_path / "heal.json"
    options = ("--measure", "heal", "--part", "one alone", "--peers", "5", "--quick")
    done = simulate(*options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    (taken,) = document(file)["measures"]
    assert taken["part"] == "one alone"
    assert taken["peak_bytes"] > 1e7
    assert "one alone: " in done.stderr
    values = {each["name"].split(": ")[-1]: each["value"] for each in taken["measured"]["figures"]}
    assert values["given up before"] == 1.0
    assert values["full membership"] <= 5.0


def test_a_partitioned_cluster_that_is_settled_at_once_goes_on_as_one_does(tmp_path: Path) -> None:
    file = tmp_path / "partitioned.json"
    done = simulate("--measure", "partitioned", "--peers", "20", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (taken,) = document(file)["measures"]
    values = {each["name"].split(": ")[-1]: each["value"] for each in taken["measured"]["figures"]}
    assert values["lookups answered at the first home"] == 1.0
    assert values["keys that are nowhere, known at the first home"] == 1.0
    assert 200 < values["home pushes sent"] < 900


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--whole", "--absences"], "exclude each other"),
        (["--measure", "spread", "--whole"], "is about gossip"),
        (["--measure", "heal", "--part", "thirds"], "its parts: halves, one alone"),
        (["--peers", "1"], "2 to 5,000"),
    ],
)
def test_options_that_make_no_sense_end_with_status_2(options: list[str], complaint: str) -> None:
    done = simulate(*options)
    assert done.returncode == 2
    assert complaint in done.stderr
