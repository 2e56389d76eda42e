"""`join` as an operator meets it: in the background, several on a host, its log, invites, who may connect."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstore import blocking
from tests.commands import ran
from tests.forked import COMMAND, unconfigured
from tests.waiting import eventually

COMMAND_SECONDS = 60.0


class Machine:
    """Directories of its own for state and sockets. Whatever runs in them at the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "mooncake-p2p"
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = unconfigured(
            XDG_RUNTIME_DIR=str(folder),
            XDG_STATE_HOME=str(folder),
            MOONCAKE_P2P_CLUSTER=folder.name,
            MOONCAKE_P2P_MEMORY="16MiB",
        )

    def run(self, *arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
        return ran(
            [*COMMAND, *arguments], COMMAND_SECONDS, env=self.environment, cwd=self.folder, input=input
        )

    def done(self, *arguments: str, input: str = "") -> str:
        result = self.run(*arguments, input=input)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def failed(self, status: int, *arguments: str) -> str:
        """The one line on stderr of a command that ended with `status`."""
        result = self.run(*arguments)
        assert result.returncode == status, (result.stdout, result.stderr)
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """A command that goes on."""
        process = subprocess.Popen(
            [*COMMAND, *arguments], env=self.environment, cwd=self.folder, **options
        )
        self.started.append(process)
        return process

    def join(self, *options: str) -> dict[str, Any]:
        """The `ready` document of a peer in the background."""
        line = self.done("join", "--detach", *options)
        assert line.count("\n") == 1
        document: dict[str, Any] = json.loads(line.removeprefix("ready "))
        return document

    def process_id(self, name: str) -> int:
        return int((self.state / name / "lock").read_text())

    def log(self, name: str) -> str:
        return (self.state / name / "peer.log").read_text()

    def close(self) -> None:
        for process in self.started:
            with process:  # closes its pipes, also after a test that failed half-way
                process.kill()
        for lock in self.state.glob("*/lock"):
            with contextlib.suppress(OSError, ValueError):
                number = int(lock.read_text())
                if b"mooncake_p2p\0join" in Path(f"/proc/{number}/cmdline").read_bytes():
                    os.kill(number, signal.SIGKILL)
        shutil.rmtree(self.folder)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with contextlib.closing(Machine(Path(tempfile.mkdtemp(prefix="p2p-")))) as machine:
        yield machine


def exists(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


def test_in_the_background(machine: Machine) -> None:
    ready = machine.join("--name", "a")
    assert set(ready) == {
        *("peer_id", "name", "control", "data", "socket", "metrics", "joined", "peers")
    }
    number = machine.process_id("a")
    assert os.getsid(number) == number
    eventually(lambda: os.readlink(f"/proc/{number}/cwd") == "/")  # its last step, after its line
    log = str(machine.state / "a" / "peer.log")
    targets = [os.readlink(f"/proc/{number}/fd/{each}") for each in (0, 1, 2)]
    assert targets[1:] == ["/dev/null", log]
    assert "(deleted)" in targets[0]  # the file that held the invite, if there was one
    with pytest.raises(AssertionError, match=f"in use by process {number}: stop that peer"):
        machine.join("--state-dir", str(machine.state / "a"))
    message = machine.failed(2, "join", "--detach", "--name", "a")
    assert "--name: a peer named a runs on this machine already" in message
    assert f"leave --socket {ready['socket']}`" in message
    second = machine.join("--name", "b", "--bootstrap", ready["control"])
    assert (second["name"], second["joined"]) == ("b", True)
    message = machine.failed(4, "stats")
    assert ready["socket"] in message
    assert second["socket"] in message
    machine.done("put", "k", "-", "--socket", ready["socket"], input="value")
    assert machine.done("get", "k", "--wait", "10", "--socket", second["socket"]) == "value"
    for document in (ready, second):
        machine.done("leave", "--socket", document["socket"])
    eventually(lambda: not exists(number))
    events = ("started", "listening", "joined the cluster", "leaving", "stopped")
    assert [event for event in events if event in machine.log("a")] == [*events[:2], *events[3:]]
    assert not list(machine.folder.glob("mooncake-p2p/*.sock"))


def test_what_fails_in_the_background_is_told(machine: Machine) -> None:
    (machine.folder / "http.py").write_text("raise SystemExit('not what was meant')")
    assert "--memory: 'lots'" in machine.failed(2, "join", "--detach", "--memory", "lots")
    taken = machine.join("--name", "a")
    message = machine.failed(2, "join", "--detach", "--name", "b", "--listen", taken["control"])
    assert "Address already in use" in message
    assert not exists(machine.process_id("b"))
    machine.environment["MOONCAKE_P2P_CLUSTER"] = "another"
    other = machine.run("join", "--detach", "--name", "c", "--bootstrap", taken["control"])
    assert other.returncode == 1
    waiting, error = other.stderr.splitlines()
    assert waiting == f"joining by {taken['control']}: waiting for at most 5 s (--join-timeout)"
    assert error.startswith("error: ")
    assert "of another name; this peer is of cluster 'another'" in error
    assert machine.folder.name not in error, "strangers are told no names"
    assert "stranger_refused" not in machine.log("a")
    assert re.search("WARNING .*another cluster|WARNING .*cluster 'another'", machine.log("a"))


def test_who_joins_nobody_in_the_background_is_told_why(machine: Machine) -> None:
    options = ("--bootstrap", "127.0.0.1:1", "--join-timeout", "0.2")
    result = machine.run("join", "--detach", *options)
    waiting, warning, runs = result.stderr.splitlines()
    assert waiting == "joining by 127.0.0.1:1: waiting for at most 0.2 s (--join-timeout)"
    assert warning.startswith("warning: the peer joined no other within 0.2 s: ")
    assert "cannot reach 127.0.0.1:1: Connection refused. It keeps trying; " in warning
    assert "the peer runs as process" in runs
    assert result.returncode == 0
    assert '"joined": false' in result.stdout


def test_who_stops_waiting_leaves_no_peer_behind(machine: Machine) -> None:
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = machine.start(
            *("join", "--detach", "--name", "a", "--join-timeout", "1h"),
            *("--bootstrap", "127.0.0.1:1"),
            stdout=subprocess.DEVNULL,
        )
        eventually(lambda: "listening" in _text(machine.state / "a" / "peer.log"))
        peer = machine.process_id("a")
        process.send_signal(number)
        assert process.wait(60) == status
        assert not exists(peer)
        (machine.state / "a" / "peer.log").unlink()


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_peers_that_start_at_once_share_nothing(machine: Machine) -> None:
    starts = [machine.start("join", "--detach", stdout=subprocess.PIPE) for _ in range(3)]
    documents = []
    for process in starts:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 0
        documents.append(json.loads(output.removeprefix(b"ready ")))
    for field in ("name", "peer_id", "control", "socket"):
        assert len({document[field] for document in documents}) == 3


def test_of_peers_that_start_at_once_one_gets_the_name_that_was_said(machine: Machine) -> None:
    starts = [machine.start("join", "--detach", "--name", "n", stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=COMMAND_SECONDS)[0] for process in starts]
    assert sorted(process.returncode for process in starts) == [0, 2]
    assert sorted(bool(output) for output in outputs) == [False, True]


def test_the_log_is_json_that_names_events(machine: Machine) -> None:
    first = machine.join("--name", "a", "--log-format", "json", "--log-level", "debug")
    machine.join("--name", "b", "--bootstrap", first["control"])
    with blocking.connect(first["socket"]) as client:
        eventually(lambda: len(client.peers()) == 2)
    number = machine.process_id("a")
    log = machine.state / "a" / "peer.log"
    log.rename(machine.state / "a" / "old.log")
    os.kill(number, signal.SIGHUP)
    eventually(log.exists)
    os.kill(machine.process_id("b"), signal.SIGKILL)
    eventually(lambda: "peer_dead" in log.read_text())
    machine.join("--name", "b", "--bootstrap", first["control"])
    eventually(lambda: "peer_back" in log.read_text() or "is alive" in log.read_text())
    os.kill(number, signal.SIGTERM)
    eventually(lambda: not exists(number))
    lines = [*(machine.state / "a" / "old.log").read_text().splitlines(), *log.read_text().splitlines()]
    documents = [json.loads(line) for line in lines]
    for document in documents:
        assert {"time", "level", "event", "part", "message"} <= document.keys()
    events = [document["event"] for document in documents if document["event"]]
    for event in ("started", "listening", "peer_joined", "peer_suspect", "peer_dead", "leaving"):
        assert event in events
    assert events[-1] == "stopped"


def test_joining_takes_no_longer_than_it_may_and_goes_on(machine: Machine) -> None:
    port = machine.join("--name", "probe")["control"]
    machine.done("leave")
    eventually(lambda: not exists(machine.process_id("probe")))
    lonely = machine.join(
        "--name", "a", "--bootstrap", port, "--join-timeout", "100ms", "--listen", "127.0.0.1:0"
    )
    assert (lonely["joined"], lonely["peers"]) == (False, 1)
    assert "no bootstrap peer answered within 0.1 s: serving alone, and trying on" in machine.log("a")
    machine.join("--name", "b", "--listen", port)
    eventually(lambda: "joined through" in machine.log("a"))


def test_a_closed_terminal_ends_a_peer_in_the_foreground(machine: Machine) -> None:
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.execve(sys.executable, [*COMMAND, "join", "--name", "a"], machine.environment)
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        if select.select([terminal], [], [], 0)[0]:
            seen += os.read(terminal, 4096)
        return text in seen

    try:
        eventually(lambda: shows(b"mooncake-p2p stats --watch"))  # for people, and no `ready {`
        assert b"ready {" not in seen
        os.kill(process_id, signal.SIGHUP)  # the terminal is still there: read files again
        eventually(lambda: shows(b"read again"))
        os.close(terminal)
        eventually(lambda: state_of(process_id) == "Z")
    finally:
        os.kill(process_id, signal.SIGKILL)
        _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def state_of(process_id: int) -> str:
    """`Z` once it ended and was not waited for."""
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_invite_for_this_machine(machine: Machine) -> None:
    first = machine.join("--name", "a")
    result = machine.run("invite")
    assert "it works on this machine only" in result.stderr
    ready = machine.join("--name", "b", "--invite", result.stdout.split()[-1])
    assert ready["joined"] is True
    document = json.loads(machine.done("invite", "--json", "--socket", ready["socket"]))
    assert document["bootstrap"] == [ready["control"], first["control"]]
    assert (document["with_key"], document["cluster"]) == (False, machine.folder.name)


def test_an_invite_without_the_key(machine: Machine) -> None:
    key = machine.folder / "key"
    machine.done("keygen", str(key))
    machine.join("--name", "a", "--cluster-key-file", "key")
    command = machine.run("invite", "--without-key")
    assert command.stdout.split()[-2:] == ["--cluster-key-file", str(key)]
    assert f"copy {key} to the next machine first" in command.stderr
    _, _, *arguments = command.stdout.split()
    assert machine.join("--name", "b", *arguments)["joined"] is True
    key.chmod(0o644)
    assert "others may read it" in machine.failed(
        2, "invite", "--socket", str(machine.folder / "mooncake-p2p" / "a.sock")
    )


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_another_user_gets_in_when_the_socket_lets_him(machine: Machine) -> None:
    def as_stranger(*arguments: str) -> subprocess.CompletedProcess[str]:
        return ran(
            [*COMMAND, *arguments],
            COMMAND_SECONDS,
            env={**machine.environment, "PYTHONDONTWRITEBYTECODE": "1"},
            user=65534,
            group=65534,
            extra_groups=[],
        )

    machine.folder.chmod(0o755)
    closed = machine.join("--name", "closed")
    refused = as_stranger("stats", "--socket", closed["socket"])
    assert refused.returncode == 4
    assert "permission" in refused.stderr.lower()
    socket = str(machine.folder / "open.sock")
    opened = machine.join("--name", "open", "--socket", socket, "--socket-group", "nogroup")
    assert as_stranger("stats", "--socket", opened["socket"]).returncode == 0
    hidden = machine.folder / "hidden"
    hidden.mkdir(mode=0o700)
    machine.join("--name", "hidden", "--socket", str(hidden / "s.sock"), "--socket-mode", "0666")
    assert f"but {hidden} keeps them out" in machine.log("hidden")


def test_a_ready_line_that_cannot_be_written_ends_nothing(machine: Machine) -> None:
    with open("/dev/full", "wb") as full, open(machine.folder / "errors", "wb") as errors:
        peer = machine.start("join", "--name", "a", stdout=full, stderr=errors)
    eventually(lambda: "the ready line was not printed" in _text(machine.folder / "errors"))
    with blocking.connect(machine.folder / "mooncake-p2p" / "a.sock") as client:
        client.put("k", b"v")
    peer.terminate()
    assert peer.wait(COMMAND_SECONDS) == 0
    said = _text(machine.folder / "errors")
    assert "No space left" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_hangup_while_starting_ends_nothing(machine: Machine) -> None:
    options = ("join", "--name", "a", "--invite", "-")
    peer = machine.start(
        *options,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert peer.stdin is not None
    # It waits for its invite, long before it can take a signal as a peer does.
    eventually(lambda: _is_caught(peer.pid, signal.SIGHUP))
    os.kill(peer.pid, signal.SIGHUP)
    _, complaint = peer.communicate(b"no invite", timeout=COMMAND_SECONDS)
    assert peer.returncode == 2
    assert complaint.startswith(b"error: that is no invite")


def _is_caught(process_id: int, number: int) -> bool:
    status = Path(f"/proc/{process_id}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)
