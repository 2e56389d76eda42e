"""`scripts/soak`: a minute of it, and what is left when it is interrupted."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.hosts import why_not
from tests.commands import ran
from tests.long_runs import only_in_long_runs
from tests.soak.ledger import KEPT, OWN_CHANGES, RIGHT_BYTES
from tests.soak.stage import PREFIX, remove_left_overs
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
WHY_NOT = why_not()
END_SECONDS = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def soak(output: Path, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "soak"), "--output", str(output), *options]


def left_overs() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


@only_in_long_runs
def test_a_minute_of_it(tmp_path: Path) -> None:
    before = left_overs()
    done = ran(soak(tmp_path, "--minutes", "1", "--patience", "5", "--seed", "1"), 900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["passed"]
    for name in (RIGHT_BYTES, OWN_CHANGES, KEPT):
        assert document["invariants"][name]["checked"] > 20, name
    assert len(document["faults"]) >= 3
    assert "**passed: 8 peers" in (tmp_path / "soak.md").read_text()
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    assert left_overs() <= before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_left_when_it_is_ended(tmp_path: Path, number: int) -> None:
    """Nothing; of one that is killed an empty directory, which the next run removes."""
    before = left_overs()
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(soak(tmp_path / "output"), stdout=said, stderr=said)
    eventually(lambda: (tmp_path / "output" / "logs" / "peer7.log").exists(), END_SECONDS)
    (folder,) = left_overs() - before
    assert running(folder), "peers"
    process.send_signal(number)
    assert process.wait(END_SECONDS) == (128 + number if number == signal.SIGTERM else -number)
    eventually(lambda: not running(folder), END_SECONDS)
    assert folder.exists() == (number == signal.SIGKILL)
    remove_left_overs()
    assert not folder.exists()


def running(folder: Path) -> list[str]:
    """Processes that were told of the folder."""
    numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in numbers if str(folder).encode() in command_line(pid)]


def command_line(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""
