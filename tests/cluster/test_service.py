"""A peer as a service: its messages to the manager, from start to end, and the unit that says how to run it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.commands import ran
from tests.forked import unconfigured

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
WAIT_SECONDS = 100.0


def hear(listener: socket.socket, wanted: str) -> list[str]:
    """Everything that is told until a line begins with this; signs of life are left out before it."""
    deadline = time.monotonic() + WAIT_SECONDS
    heard: list[str] = []
    while not any(line.startswith(wanted) for line in heard):
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        heard += listener.recv(4096).decode().splitlines()
    return [line for line in heard if not line.startswith("WATCHDOG")] or heard[-1:]


def test_the_manager_hears_of_start_reload_and_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        command = [sys.executable, "-m", "mooncake_p2p", "join", "--name", "service"]
        command += ["--listen", "127.0.0.1:0", "--memory", "1MiB", "--drain-timeout", "7"]
        command += ["--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path / "state")]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        environment |= {"WATCHDOG_USEC": "900000"}
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        try:
            assert hear(listener, "READY=1") == ["READY=1", f"STATUS=serving {tmp_path / 's'}"]
            assert hear(listener, "WATCHDOG=1") == ["WATCHDOG=1"]
            process.send_signal(signal.SIGHUP)
            assert hear(listener, "RELOADING=1")[0] == "RELOADING=1"
            hear(listener, "READY=1")
            process.send_signal(signal.SIGTERM)
            told = hear(listener, "STOPPING=1")
            assert "EXTEND_TIMEOUT_USEC=22000000" in told
            assert process.wait(WAIT_SECONDS) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait(WAIT_SECONDS)


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    """With the program where this environment has it, and all messages taken for errors."""
    verify = shutil.which("systemd-analyze")
    if verify is None and not os.environ.get("P2PSTORE_REQUIRE_DEPLOY"):
        pytest.skip("systemd-analyze is not installed")
    assert verify is not None, "systemd-analyze is not installed"
    unit = tmp_path / "mooncake-p2p.service"
    text = (UNITS / unit.name).read_text()
    program = Path(sysconfig.get_path("scripts")) / "mooncake-p2p"
    assert program.exists()
    assert "/opt/p2pstore/bin/mooncake-p2p " in text
    unit.write_text(text.replace("/opt/p2pstore/bin/mooncake-p2p", str(program)))
    command = [verify, "--man=no", "--recursive-errors=no", "verify", str(unit)]
    done = ran(command, 120)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("/opt/p2pstore/bin/mooncake-p2p", str(program)) + "Watchdog=3\n")
    done = ran(command, 120)
    assert "Watchdog" in done.stderr, "mistakes are not told: the test has lost its power"
    score = ran([verify, "security", "--offline=yes", "--threshold=25", "--no-pager", str(unit)], 120)
    assert score.returncode == 0, score.stdout


def test_the_settings_beside_it_are_ones_that_a_peer_takes() -> None:
    command = [sys.executable, "-m", "mooncake_p2p", "config", "show", "--json"]
    command += ["--config", str(UNITS / "peer.toml")]
    done = ran(command, env=unconfigured())
    assert done.returncode == 0, done.stderr
    assert '"/dev/shm/mooncake-p2p.memory"' in done.stdout
