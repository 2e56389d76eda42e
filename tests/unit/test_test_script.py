"""`scripts/test` over programs that only note that they ran: its lanes, its exit status, its end by Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test"
FILES = [str(each.relative_to(ROOT)) for each in ROOT.glob("tests/**/test_*.py")]
LANES = ("waiting", "connecting", "simulating", "computing", "mypy")

PROGRAM = r"""#!/usr/bin/env bash
# Waits for what $MEET names, if that stands in its arguments or in `rest`, and fails where $FAIL says so.
name=${0##*/}
lane=computing
[[ " $* " == *" tests/cluster/"* ]] && lane=waiting
[[ " $* " == *" tests/contract "* ]] && lane=connecting
[[ " $* " == *" tests/simulation "* ]] && lane=simulating
[[ " $* " == *" tests/rdma "* ]] && lane=rdma
[[ $name == python ]] || lane=$name
[[ $lane == rdma_vm && $1 == --ready ]] && exit "${NOT_READY:-0}"
ignored=$(sed -n 's/^SigIgn:\s*//p' /proc/self/status)
printf '%s %s ignored=%s\n' "$lane" "$*" "$((0x$ignored >> 1 & 1))" >>"$NOTES"
printf 'said by %s\n' "$lane"
trap 'printf "%s ended\n" "$lane" >>"$NOTES"; exit 2' INT
if [[ -n ${MEET:-} && " waiting connecting simulating " == *" $lane "* ]]; then
    touch "$NOTES.$lane"
    for _ in {1..1000}; do
        [[ -e $NOTES.waiting && -e $NOTES.connecting && -e $NOTES.simulating && $MEET != never ]] && exit 0
        sleep 0.02
    done
    exit 9
fi
[[ " ${FAIL:-} " == *" $lane "* ]] && exit 1
exit 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of the script and empty tests, where each program notes that it ran."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for each in FILES:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "test")
    for name in ("scripts/setup", "scripts/rdma_vm", *(f".venv/bin/{n}" for n in PROGRAMS)):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    return tmp_path


PROGRAMS = ("ruff", "mypy", "python")


def start(project: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(project / "scripts" / "test"), *arguments],
        env={"PATH": os.environ["PATH"], "NOTES": str(project / "notes"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(project: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    with start(project, *arguments, **environment) as script:
        output, _ = script.communicate(timeout=60)
        return script.returncode, output


def notes(project: Path) -> str:
    path = project / "notes"
    return path.read_text() if path.exists() else ""


def test_lanes_run_at_once_and_their_output_does_not_mix(project: Path) -> None:
    status, output = run(project, MEET="each other")
    assert status == 0, output
    said = re.findall(r"== tests that wait for (\w+).*\nsaid by (\w+)\n", output)
    assert {("processes", "waiting"), ("connections", "connecting")} <= set(said)
    assert {*LANES, "rdma_vm"} <= set(re.findall(r"said by (\w+)", output))
    assert output.endswith("== all passed\n")


def test_every_test_is_run_exactly_once(project: Path) -> None:
    run(project)
    named = re.findall(r" (tests/[\w/.]+)", notes(project))
    run_of = {each: [name for name in named if f"{each}/".startswith(f"{name}/")] for each in FILES}
    assert {each: names for each, names in run_of.items() if len(names) != 1} == {}


@pytest.mark.parametrize(
    "failing", ["waiting", "connecting", "simulating", "computing", "mypy", "rdma_vm", "waiting mypy"]
)
def test_a_lane_that_fails_fails_the_whole_after_the_others_have_ended(
    project: Path, failing: str
) -> None:
    status, output = run(project, FAIL=failing)
    assert status == 1
    assert "== all passed" not in output
    assert "== FAILED: " in output
    assert {*LANES, "rdma_vm"} <= set(re.findall(r"said by (\w+)", output))


def test_no_program_ignores_an_interrupt(project: Path) -> None:
    """As the shell has those do that it starts in the background: the peers that they start would, too."""
    run(project)
    assert "ignored=0" in notes(project)
    assert "ignored=1" not in notes(project)


def test_an_interrupt_ends_all_lanes(project: Path) -> None:
    with start(project, MEET="never") as script:
        lanes = ("waiting", "connecting", "simulating")
        eventually(lambda: all((project / f"notes.{each}").exists() for each in lanes))
        os.killpg(script.pid, signal.SIGINT)
        output, _ = script.communicate(timeout=30)
    assert script.returncode == 130
    assert {f"{each} ended" for each in lanes} <= set(notes(project).splitlines())
    assert "said by simulating" in output
    assert "computing" not in notes(project)


def test_fast_runs_each_unit_test_once_and_nothing_else(project: Path) -> None:
    status, output = run(project, "--fast")
    assert status == 0, output
    units = sorted(each for each in FILES if each.startswith("tests/unit/"))
    assert sorted(re.findall(r"tests/\S+", notes(project))) == units
    assert {"ruff", "mypy"} <= set(re.findall(r"said by (\w+)", output))


def test_arguments_choose_tests_in_one_lane(project: Path) -> None:
    status, output = run(project, "-m", "not slow")
    assert status == 0
    assert "computing -m pytest -m not slow " in notes(project)
    assert "\nrdma_vm " not in notes(project)
    assert "skipped: rdma" in output


def test_without_the_virtual_machine_rdma_is_skipped_or_required(project: Path) -> None:
    status, output = run(project, NOT_READY="1")
    assert status == 0
    assert "== skipped: " in output
    assert "\nrdma_vm " not in notes(project)
    run(project, NOT_READY="1", P2PSTORE_REQUIRE_RDMA="1")
    assert "\nrdma_vm " in notes(project)
