"""The doctor's checks of this machine: none hangs, none needs root, none leaves anything behind."""

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from mooncake_p2p.main import run
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped import numa
from p2pstore.objects import MIB
from p2pstore.status.doctor import readings
from p2pstore.status.doctor import readings as speed
from p2pstore.status.doctor.checks import Check, examine_machine, run_check
from p2pstore.status.doctor.finding import Finding, Status, fine
from tests.command_line import Cli
from tests.waiting import eventually


def test_a_check_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hang() -> list[Finding]:
        release.wait(30)
        return []

    begin = time.monotonic()
    (finding,) = run_check(Check("hangs", hang, 0.05))
    assert time.monotonic() - begin < 5
    assert finding.status is Status.WARNING
    assert "0.05 s" in finding.cause
    release.set()


def test_what_cannot_be_read_is_skipped_and_a_fault_of_the_check_is_told() -> None:
    def unreadable() -> list[Finding]:
        raise PermissionError(errno.EACCES, "Permission denied", "/sys/secret")

    def refused() -> list[Finding]:
        raise ConfigError("no such socket")

    def faulty() -> list[Finding]:
        raise KeyError("MemTotal")

    (skipped,) = run_check(Check("a", unreadable))
    assert (skipped.status, skipped.cause) == (Status.SKIPPED, "/sys/secret: Permission denied")
    (told,) = run_check(Check("b", refused))
    assert (told.status, told.cause) == (Status.BROKEN, "no such socket")
    (fault,) = run_check(Check("c", faulty))
    assert fault.status is Status.BROKEN
    assert "KeyError" in fault.cause
    assert run_check(Check("d", lambda: [fine("d", "v")])) == [fine("d", "v")]


def test_every_check_says_something_about_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET", raising=False)
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "DISK_BYTES", 4 * MIB)
    examined = examine_machine(directory=str(tmp_path), rdma_topology="{}")
    found = {each.name: each for each in examined}
    expected = {
        *("python", "kernel", "libraries", "clock", "memory", "huge pages", "numa"),
        "shared memory",
        *("/dev/shm", "locked memory", "open files", "socket directory", "state directory"),
        *("port 17946", "port 17947", "congestion control", "somaxconn", "gpus"),
        *("memory copy", "checksums", "disk"),
    }
    assert expected <= found.keys()
    assert not [each for each in found.values() if "check itself failed" in each.cause]
    for name in ("python", "kernel", "libraries", "shared memory", "state directory"):
        assert found[name].status in (Status.OK, Status.WARNING), found[name]
    assert "rdma_topology: not an object" in found["rdma topology"].cause
    assert str(tmp_path) in found["state directory"].value
    assert list(tmp_path.iterdir()) == []  # nothing was made, nothing stays


def test_readings_are_of_the_right_size() -> None:
    memory = readings.read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert readings.read_clock().maximum_error_seconds >= 0
    default, used = readings.read_congestion_control()
    assert default
    assert used
    assert readings.try_memfd() == ""
    assert speed.measure_copy() > 1e7
    assert speed.measure_hash() > 1e7


@pytest.mark.skipif(not numa.read_nodes(), reason="this kernel has no NUMA nodes")
def test_binding_is_tried_where_there_are_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    number, node = next(iter(numa.read_nodes().items()))
    for nodes, problem in (
        ({number: node}, ""),
        ({number: node, 999: node}, ""),
        ({999: node, number: node}, "the kernel does not bind memory to node 999"),
    ):
        monkeypatch.setattr(numa, "read_nodes", lambda nodes=nodes: nodes)
        available, found = readings.read_numa()
        assert available.keys() == nodes.keys()
        assert found.startswith(problem)
        assert bool(found) == bool(problem)


def test_a_port_in_use_is_seen() -> None:
    def try_before_and_after() -> str:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            assert readings.try_port(port) == os.strerror(errno.EADDRINUSE)
        return readings.try_port(port)

    eventually(lambda: try_before_and_after() == "")  # another process may have got the port at once


def test_a_directory_that_cannot_be_made_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert readings.read_directory(tmp_path / "a" / "b")[0] == ""
    file = tmp_path / "file"
    file.write_text("")
    problem, free_bytes = readings.read_directory(file / "below")
    assert "not a directory" in problem
    assert free_bytes > 0


def test_a_disk_that_cannot_be_written_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET", raising=False)
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    run(["doctor", "--json", "--directory", "/proc"])
    document = json.loads(capsys.readouterr().out)
    disk = next(each for each in document["findings"] if each["name"] == "disk")
    assert disk["status"] == "skipped"
    assert "No such file or directory" in disk["cause"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--peer", "nowhere"], "--peer: 'nowhere' is not HOST:PORT"),
        (["--peer", "h:1", "--directory", "/tmp"], "choose one"),
        (["--directory", "/nonexistent"], "--directory: /nonexistent is no directory"),
        (["--peer", "h:1", "--seconds", "1h"], "--seconds: '1h' is above 60"),
        (["--peer", "h:1", "--seconds", "0"], "--seconds"),
        (["--peer", "h:1", "--cluster-key-file", "/nonexistent"], "/nonexistent"),
        (["--timeout", "x"], "--timeout"),
        (["--seconds", "1"], "--seconds is for --peer"),
        (["--cluster-key-file", "k"], "--cluster-key-file is for --peer"),
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, cli: Cli) -> None:
    captured = cli("doctor", *arguments, status=2)
    assert captured.out == ""
    assert complaint in captured.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--watch", "--slow"], "choose one"),
        (["--interval", "0.01"], "--interval: '0.01' is below 0.1 seconds"),
        (["--interval", "x"], "--interval"),
    ],
)
def test_wrong_arguments_of_stats(arguments: list[str], complaint: str, cli: Cli) -> None:
    assert complaint in cli("stats", *arguments, status=2).err
