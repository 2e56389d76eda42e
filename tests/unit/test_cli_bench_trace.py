"""`bench trace`: what it prints, its mistakes; and the figures of `bench`."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_p2p.commands import bench_trace
from mooncake_p2p.commands.bench import MIN_SAMPLES, Figure, document, medians_in_turns
from mooncake_p2p.main import run
from mooncake_p2p.output import ExitCode
from p2pstore.trace.pool import PoolSettings, cases
from tests.command_line import Cli
from tests.unit.trace_requests import conversations


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    lines = [msgspec.json.encode(each) for each in conversations(600)]
    file.write_bytes(b"\n".join(lines))
    return str(file)


SMALL = ("--simulate", "--peers", "4", "--memory", "500blocks")


def replayed(cli: Cli, *arguments: str) -> dict[str, Any]:
    results = cli("bench", "trace", *arguments, "--json").json["results"]
    return {each["name"]: each for each in results}


def test_a_pool_beside_private_caches_and_one_cache(trace: str, cli: Cli) -> None:
    results = replayed(cli, trace, *SMALL, "--ssd", "4000blocks")
    hits = {name: each["value"] for name, each in results.items() if name.endswith("hit rate")}
    assert hits["pool: hit rate"] > 1.1 * hits["each peer alone: hit rate"]
    assert hits["each peer alone, with SSDs: hit rate"] < hits["pool with SSDs: hit rate"]
    assert hits["pool with SSDs: hit rate"] == hits["one cache without end: hit rate"]
    pool = results["pool: hit rate"]
    assert pool["against"] == "each peer alone"
    assert pool["ratio"] == pytest.approx(pool["value"] / pool["baseline"])
    assert results["pool with SSDs: read from remote SSD"]["value"] > 0
    assert results["pool: written to SSDs"]["value"] == 0
    assert 0 < results["pool: compute saved"]["value"] < pool["value"] + 0.1


def test_sizes_may_be_bytes(trace: str, cli: Cli) -> None:
    blocks = replayed(cli, trace, *SMALL)
    memory = ("--memory", "500MiB", "--token-bytes", "2KiB")
    sized = replayed(cli, trace, *SMALL[:3], *memory)
    assert sized["pool: hit rate"] == blocks["pool: hit rate"]
    read = "pool: read from remote memory"
    assert sized[read]["value"] * 160 == blocks[read]["value"]


def test_policy_and_routing_make_a_difference(trace: str, cli: Cli) -> None:
    usual = replayed(cli, trace, *SMALL)
    other = replayed(cli, trace, *SMALL, "--policy", "s3-fifo")
    affine = replayed(cli, trace, *SMALL, "--routing", "affine", "--load-bound", "1.1")
    assert other["pool: hit rate"] != usual["pool: hit rate"]
    local = "pool: read from local memory"
    assert affine[local]["value"] > 1.5 * usual[local]["value"]


def test_people_get_a_table(trace: str, cli: Cli) -> None:
    shown = cli("bench", "trace", trace, *SMALL)
    header, *rows = shown.out.splitlines()
    assert header.split("  ")[0] == "WHAT"
    assert "COMPUTE SAVED" in header
    assert "SSD" not in header
    assert len(rows) == 4
    assert shown.err.startswith("600 requests, ")


def test_a_picture_shows_the_hit_rate_by_memory(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    assert run(["bench", "trace", trace, *SMALL, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_trace_is_a_mistake(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "no.jsonl"
    file.write_text('{"timestamp": 1}\n')
    printed = cli("bench", "trace", file, "--simulate", status=ExitCode.USAGE)
    assert "line 1 of the trace" in printed.err
    printed = cli("bench", "trace", tmp_path / "none", "--simulate", status=ExitCode.FAILED)
    assert "none" in printed.err


def test_only_what_was_asked_for_has_ssds() -> None:
    settings = PoolSettings(memory_blocks=10, ssd_blocks=40)
    found = {each.name: each.settings for each in cases(settings, 77)}
    assert found["pool"].ssd_blocks == 0
    assert found["pool with SSDs"] == settings
    assert not found["each peer alone"].shared
    assert found["one cache of all memory"].memory_blocks == 100
    assert found["one cache without end"].memory_blocks == 77
    assert "pool with SSDs" not in {each.name for each in cases(PoolSettings(memory_blocks=10), 77)}


@pytest.mark.parametrize("simulate", [True, False])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_replayed(
    simulate: bool, trace: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench_trace, "_read", lambda file: pytest.fail("the trace was read"))
    options = ["--simulate"] if simulate else []
    printed = cli("bench", "trace", trace, *options, "--plot", "p.png", status=ExitCode.FAILED)
    assert "pip install matplotlib" in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "missing argument 'FILE'"),
        (["f", "--simulate", "--memory", "1KiB"], "--memory: '1KiB' is less"),
        (["f", "--simulate", "--ssd", "14blocks"], "--ssd: '14blocks' is less"),
        (["f", "--simulate", "--load-bound", "0.5"], "--load-bound: 0.5 is below"),
        (["f", "--simulate", "--token-bytes", "0"], "--token-bytes"),
        (["f", "--simulate", "--peers", "0"], "'--peers': must be at least 1"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], said: str, cli: Cli) -> None:
    assert said.lower() in cli("bench", "trace", *arguments, status=ExitCode.USAGE).err.lower()


def test_a_figure_becomes_a_median_and_a_rate() -> None:
    median, rate = Figure("put, 1 B", 1000, 0.002, "copy", 0.001).results()
    assert (median.name, median.value, median.unit) == ("put, 1 B, median", 2000.0, "us")
    assert (median.against, median.baseline, median.ratio) == ("copy", 1000.0, 2.0)
    assert (rate.name, rate.unit, rate.ratio) == ("put, 1 B, rate", "GB/s", 0.5)
    assert abs(rate.value - 0.0005) < 1e-9
    (alone,) = Figure("contains", 0, 0.001).results()
    assert (alone.against, alone.baseline, alone.ratio) == ("", None, None)


def test_the_document_has_the_shape_of_the_scripts() -> None:
    made = json.loads(json.dumps(document([Figure("put", 8, 0.1, "copy", 0.1)])))
    assert set(made) == {"results", "machine"}
    wanted = {"name", "value", "unit", "against", "baseline", "ratio"}
    assert [set(each) for each in made["results"]] == [wanted, wanted]
    assert made["machine"]["cores"] > 0


def test_turns_alternate_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str, first: float, later: float) -> float:
        order.append(name)
        return first if order.count(name) == 1 else later

    taken = medians_in_turns(lambda: turn("a", 99, 2), lambda: turn("b", 99, 1), seconds=0.0)
    assert taken == (2, 1)
    assert order == ["a", "b"] * (1 + MIN_SAMPLES)
