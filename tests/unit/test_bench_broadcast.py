"""`scripts/bench_broadcast`: its arithmetics, what it tells tc, its options; and a small broadcast for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_broadcast"


@pytest.fixture(scope="module")
def shaped() -> ModuleType:
    return _module("shaped_hosts")


def _module(name: str) -> ModuleType:
    kept = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return __import__(name)
    finally:
        sys.path[:] = kept


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "1"], "there must be two hosts"),
        (["--size", "much"], "--size"),
        (["--case", "deaths", "--hosts", "3"], "the case deaths needs"),
    ],
)
def test_options_that_make_no_sense_are_said(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("tc") is None or shutil.which("unshare") is None,
    reason="network namespaces with shaped links need root, `tc` and `unshare`",
)
def test_a_small_broadcast_for_real_leaves_nothing_behind(tmp_path: Path) -> None:
    before = sorted(os.listdir("/tmp"))
    results = tmp_path / "results.json"
    picture = tmp_path / "progress.png"
    size = ("--hosts", "4", "--size", "8MiB", "--repeat", "1")
    done = run("--case", "equal", *size, "--json", str(results), "--plot", str(picture))
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), (
        done.stderr
    )  # how long it takes depends on who else is at work
    rows = {row["name"]: row for row in json.loads(results.read_text())["results"]}
    assert 80 < rows["a plain socket over one link (B)"]["value"] < 100
    assert 1.0 < rows["last of 3"]["ratio"] < 20
    assert 0.9 < rows["last of 3: the source sends"]["value"] < 3.1
    assert picture.stat().st_size > 10_000
    assert not [
        name
        for name in sorted(os.listdir("/tmp"))
        if name.startswith("shaped-") and name not in before
    ]
