"""`scripts/test` over programs that only note that they ran: its lanes, its exit status, its end by Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"

PROGRAM = r"""#!/usr/bin/env bash
# Waits for what $MEET names, if that stands in its arguments or in `rest`, and fails where $FAIL says so.
name=${0##*/}
lane=computing
[[ " $* " == *" tests/cluster "* ]] && lane=waiting
[[ " $* " == *" tests/contract "* ]] && lane=connecting
[[ " $* " == *" tests/simulation "* ]] && lane=simulating
[[ " $* " == *" tests/rdma "* ]] && lane=rdma
[[ $name == python ]] || lane=$name
[[ $lane == rdma_vm && $1 == --ready ]] && exit "${NOT_READY:-0}"
ignored=$(sed -n 's/^SigIgn:\s*//p' /proc/self/status)
printf '%s %s ignored=%s\n' "$lane" "$*" "$((0x$ignored >> 1 & 1))" >>"$NOTES"
printf 'said by %s\n' "$lane"
trap 'printf "%s ended\n" "$lane" >>"$NOTES"; exit 2' INT
if [[ -n ${MEET:-} && " waiting connecting computing " == *" $lane "* ]]; then
    touch "$NOTES.$lane"
    for _ in {1..1000}; do
        [[ -e $NOTES.waiting && -e $NOTES.connecting && -e $NOTES.computing && $MEET != never ]] && exit 0
        sleep 0.02
    done
    exit 9
fi
[[ " ${FAIL:-} " == *" $lane "* ]] && exit 1
exit 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of the script alone, where each program notes that it ran."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
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


def test_all_lanes_run_at_once_and_their_output_does_not_mix(project: Path) -> None:
    status, output = run(project, MEET="each other")
    assert status == 0, output
    assert re.findall(r"said by ((?!ruff|setup)\w+)", output) == [
        "waiting",
        "connecting",
        "simulating",
        "mypy",
        "computing",
        "rdma_vm",
    ]
    assert output.endswith("== all passed\n")


def test_every_folder_of_tests_is_run_exactly_once(project: Path) -> None:
    run(project)
    lanes = dict(line.split(" ", 1) for line in notes(project).splitlines())
    others = " ".join(lanes[each] for each in ("waiting", "connecting", "simulating"))
    named = re.findall(r" (tests/\w+)", others)
    in_vm = re.findall(r" (tests/\w+)", lanes["rdma_vm"])
    left_out = re.findall(r"--ignore=(\S+)", lanes["computing"])
    assert " tests " in lanes["computing"]
    assert sorted(named + in_vm) == sorted(left_out)
    assert all((SCRIPT.parents[1] / folder).is_dir() for folder in left_out)


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
    assert {"waiting", "connecting", "mypy"} <= set(re.findall(r"said by (\w+)", output))


def test_no_program_ignores_an_interrupt(project: Path) -> None:
    """As the shell has those do that it starts in the background: the peers that they start would, too."""
    run(project)
    assert "ignored=0" in notes(project)
    assert "ignored=1" not in notes(project)


def test_an_interrupt_ends_all_lanes(project: Path) -> None:
    with start(project, MEET="never") as script:
        lanes = ("waiting", "connecting", "computing")
        eventually(lambda: all((project / f"notes.{each}").exists() for each in lanes))
        os.killpg(script.pid, signal.SIGINT)
        output, _ = script.communicate(timeout=30)
    assert script.returncode == 130
    assert {f"{each} ended" for each in lanes} <= set(notes(project).splitlines())
    assert "said by computing" in output


def test_fast_runs_each_unit_test_once_and_nothing_else(project: Path) -> None:
    names = [f"tests/unit/test_{each}.py" for each in "abc"]
    (project / "tests" / "unit").mkdir(parents=True)
    for each in names:
        (project / each).touch()
    status, output = run(project, "--fast")
    assert status == 0, output
    assert sorted(re.findall(r"tests/\S+", notes(project))) == names
    assert {"ruff", "mypy"} <= set(re.findall(r"said by (\w+)", output))


def test_arguments_choose_tests_in_one_lane(project: Path) -> None:
    status, output = run(project, "-m", "not slow")
    assert status == 0
    assert "computing -m pytest -m not slow " in notes(project)
    assert "rdma_vm" not in notes(project)
    assert "skipped: rdma" in output


def test_without_the_virtual_machine_rdma_is_skipped_or_required(project: Path) -> None:
    status, output = run(project, NOT_READY="1")
    assert status == 0
    assert "== skipped: " in output
    assert "rdma_vm" not in notes(project)
    run(project, NOT_READY="1", P2PSTORE_REQUIRE_RDMA="1")
    assert "rdma_vm" in notes(project)
