"""The benchmark runs, and reports each size; its speed is not checked here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rdma.harness import cables

BENCHMARK = Path(__file__).resolve().parents[2] / "scripts" / "bench_rdma"
SECONDS = 240.0

pytestmark = pytest.mark.skipif(not cables(), reason="needs RDMA devices")


def test_the_benchmark_compares_every_size_with_bare_reads(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(results)]
    subprocess.run(command, check=True, timeout=SECONDS)
    rows = json.loads(results.read_text())["results"]
    compared = {row["name"] for row in rows if row["against"] == "bare READs" and row["ratio"] > 0}
    assert compared == {
        "get 1 MiB",
        "get 8 MiB",
        "get 64 MiB",
        "get 8 at once, 1 MiB",
        "get 1 MiB, slots never seen",
    }
