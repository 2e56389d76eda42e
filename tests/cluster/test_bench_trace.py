"""`bench trace` on real peers: they hit what the simulation hits, and every block is the right one."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mooncake_p2p.output import ExitCode
from p2pstore.local import peer_processes
from tests.command_line import Cli
from tests.forked import COMMAND, Forked
from tests.unit.trace_requests import conversations


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: Sequence[str], process_group: int, **options: Any) -> Forked:
        return Forked([*COMMAND, *command[command.index("join") :]], **options)

    parts = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(peer_processes, "subprocess", parts)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(each) for each in conversations(80)))
    return str(file)


@pytest.mark.parametrize("routing", ["round-robin", "affine"])
def test_real_peers_hit_what_simulated_ones_hit(trace: str, routing: str, cli: Cli) -> None:
    arguments = ["--peers", "3", "--memory", "80blocks", "--policy", "lru", "--routing", routing]
    results = {
        each["name"]: each for each in cli("bench", "trace", trace, *arguments, "--json").json["results"]
    }
    hits = results["hit rate"]
    assert hits["baseline"] > 0.1
    assert hits["value"] == pytest.approx(hits["baseline"], abs=0.03)
    assert results["prefill tokens reused"]["value"] > 0
    assert results["read by own memory"]["value"] > 0


def test_peers_are_killed_and_come_back_meanwhile(trace: str, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "growth.png"
    arguments = ["--peers", "3", "--memory", "60blocks", "--ssd", "250blocks"]
    arguments += ["--kill-every", "0.2", "--down", "0.1", "--json", "--plot", str(picture)]
    results = {
        each["name"]: each["value"] for each in cli("bench", "trace", trace, *arguments).json["results"]
    }
    assert results["peers killed"] >= 1
    assert results["of these, a living peer had"] == 0
    assert results["hit rate"] > 0.1
    assert "read by SSD to memory" in results
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [("--ssd", "1blocks"), ("--block-bytes", "5000")])
def test_what_cannot_be_replayed_is_said(trace: str, wrong: tuple[str, str], cli: Cli) -> None:
    printed = cli("bench", "trace", trace, "--memory", "100blocks", *wrong, status=ExitCode.USAGE)
    assert wrong[0] in printed.err
