"""The demo, as a newcomer runs it: it works, and whatever happens to it, nothing of it remains."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.objects import MIB
from tests.waiting import eventually

DEMO = [sys.executable, "-m", "mooncake_p2p", "demo"]
DEMO_SECONDS = 90.0


class Traces:
    """The left-overs of a demo: processes marked by a variable in their environment, and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"P2P_DEMO_TEST={folder}"
        name, _, value = self._mark.partition("=")
        self.environment = {**os.environ, name: value, "TMPDIR": str(folder)}

    def processes(self) -> list[int]:
        """Ids of processes that descend from the demo, and the demo's own."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def files(self) -> list[Path]:
        return list(self.folder.rglob("*"))


@pytest.fixture
def traces() -> Iterator[Traces]:
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        traces = Traces(Path(folder))
        yield traces
        for process_id in traces.processes():  # only when the test has failed
            os.kill(process_id, signal.SIGKILL)


def test_the_demo_works_and_cleans_up(traces: Traces) -> None:
    result = subprocess.run(
        [*DEMO, "--json", "--blocks", "4", "--memory", "64MiB"],
        capture_output=True,
        env=traces.environment,
        timeout=DEMO_SECONDS,
    )
    assert result.returncode == 0, result.stderr.decode()
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["object"] == {"model": "LLaMA3-70B", "token_bytes": 320 * 1024, "bytes": 5 * MIB}
    moved = [step["bytes"] for step in document["steps"]]
    assert moved == [0, *[20 * MIB] * 4, 0, 20 * MIB]
    assert all(step["seconds"] > 0 for step in document["steps"])
    assert traces.processes() == []
    assert traces.files() == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "one process"),
        (signal.SIGTERM, "two processes"),
        (signal.SIGHUP, "four processes"),
        (signal.SIGTERM, "get them on beta"),  # and now replicas are being put
        (signal.SIGINT, "kill -9 gamma"),  # and now it is being started again
    ],
)
def test_an_interrupted_demo_leaves_nothing(number: int, moment: str, traces: Traces) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--blocks", "4", "--memory", "64MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=traces.environment,
    )
    assert demo.stdout is not None
    assert demo.stderr is not None
    count, _, unit = moment.partition(" ")
    if unit.startswith("process"):
        wanted = ["one", "two", "three", "four"].index(count) + 1
        eventually(lambda: bool(traces.files()) and len(traces.processes()) >= wanted)
    else:
        assert any(moment in line.decode() for line in demo.stdout)
    demo.send_signal(number)
    _, complaint = demo.communicate(timeout=20)
    assert demo.returncode == 128 + number
    assert complaint == b""
    assert traces.processes() == []
    assert traces.files() == []


def test_a_demo_that_nobody_watches_any_more_ends(traces: Traces) -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=traces.environment)
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith(b"Three peers")
    demo.stdout.close()
    assert demo.stderr is not None
    assert demo.stderr.read() == b""
    demo.stderr.close()
    assert demo.wait(60) == 1
    assert traces.processes() == []
    assert traces.files() == []


def test_no_peer_outlives_a_demo_that_is_killed(traces: Traces) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--blocks", "4", "--memory", "64MiB"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=traces.environment,
    )
    eventually(lambda: len(traces.processes()) > 1)
    demo.kill()
    demo.wait()
    eventually(lambda: traces.processes() == [])


def test_a_demo_that_fails_shows_the_log_and_cleans_up(traces: Traces) -> None:
    result = subprocess.run(
        [*DEMO, "--memory", "1000000TiB", "--json"],
        capture_output=True,
        env=traces.environment,
        timeout=DEMO_SECONDS,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: start alpha")
    assert b"last lines of alpha's log" in result.stderr
    assert traces.processes() == []
    assert traces.files() == []
