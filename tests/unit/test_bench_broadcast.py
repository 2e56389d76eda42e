"""`scripts/bench_broadcast`: options that make no sense."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ran

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_broadcast"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, str(SCRIPT), *arguments], 200)


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
