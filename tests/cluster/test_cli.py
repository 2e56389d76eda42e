"""The command line against real peers: separate processes, real sockets, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.objects import MIB

COMMAND = [sys.executable, "-m", "mooncake_p2p"]
READY_SECONDS = 30.0
COMMAND_SECONDS = 30.0


class Peer:
    """A `mooncake-p2p join` in its own process."""

    def __init__(self, machine: Machine, name: str, *options: str) -> None:
        self.machine = machine
        self.name = name
        self.log = machine.folder / f"{name}.log"
        self.ready: dict[str, Any] = {}
        self._client: BlockingClient | None = None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "join", "--name", name, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env=machine.environment,
            )
        machine.peers.append(self)

    def wait_until_ready(self) -> Peer:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        assert line.startswith(b"ready "), self.log.read_text()
        self.ready = json.loads(line.removeprefix(b"ready "))
        return self

    def run(self, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A command that talks to this peer."""
        return self.machine.run(*arguments, socket=self.ready["socket"], input=input)

    @property
    def client(self) -> BlockingClient:
        """To prepare and to wait, where the command is not what is tested."""
        if self._client is None:
            self._client = blocking.connect(self.ready["socket"])
        return self._client

    def alive(self) -> int:
        """How many live members this peer sees."""
        return sum(member.status == "alive" for member in self.client.peers())

    def stop(self, number: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


class Machine:
    """A home, state and runtime directory of its own, and the peers that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[Peer] = []
        for name in ("run", "home"):
            (folder / name).mkdir(mode=0o700)
        kept = {key: value for key, value in os.environ.items() if "MOONCAKE_P2P_" not in key}
        self.environment = {
            **kept,
            "HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "home"),
            "MOONCAKE_P2P_CLUSTER": f"test-{folder.name}",
            "MOONCAKE_P2P_MEMORY": "64MiB",
            "MOONCAKE_P2P_LISTEN": "127.0.0.1:0",
        }

    def join(self, name: str, *options: str) -> Peer:
        """A peer that serves."""
        return Peer(self, name, *options).wait_until_ready()

    def run(
        self, *arguments: str, socket: str | None = None, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """A command, with `input` on its stdin."""
        extra = {"MOONCAKE_P2P_SOCKET": socket} if socket else {}
        return subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            timeout=COMMAND_SECONDS,
            env={**self.environment, **extra},
            input=input,
        )


@contextlib.contextmanager
def new_machine() -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="p2p-"))
    machine = Machine(folder)
    try:
        yield machine
    finally:
        for peer in machine.peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.stop(signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with new_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    """Two peers that know each other, for tests that leave them as they are."""
    with new_machine() as machine:
        first = machine.join("first")
        second = machine.join("second", "--bootstrap", first.ready["control"])
        eventually(lambda: first.alive() == second.alive() == 2)
        yield first, second


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not become so in time"
        time.sleep(0.02)


def done(result: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[bytes]:
    assert result.returncode == 0, result.stderr.decode()
    return result


def failed(result: subprocess.CompletedProcess[bytes], status: int) -> str:
    """The one line on stderr of a command that ended with `status`."""
    text = result.stderr.decode()
    assert result.returncode == status, text
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def test_three_peers_by_hand(machine: Machine) -> None:
    value = machine.folder / "value"
    value.write_bytes(os.urandom(5 * MIB + 123))
    alpha = machine.join("alpha")
    bootstrap = ["--bootstrap", alpha.ready["control"]]
    beta, gamma = (Peer(machine, name, *bootstrap) for name in ("beta", "gamma"))
    for peer in (beta, gamma):
        assert peer.wait_until_ready().ready["joined"] is True
    eventually(lambda: alpha.alive() == beta.alive() == gamma.alive() == 3)

    put = done(alpha.run("put", "one", str(value)))
    assert b"created one: 5.0 MiB in " in put.stderr
    out = machine.folder / "out"
    done(beta.run("get", "one", "-o", str(out), "--wait", "5"))
    assert out.read_bytes() == value.read_bytes()

    put = done(gamma.run("put", "two", str(value), "--replicas", "2", "--json"))
    assert json.loads(put.stdout)["copies"] == 2
    gamma.stop(signal.SIGKILL)
    for peer in (alpha, beta):
        assert done(peer.run("get", "two")).stdout == value.read_bytes()

    again = machine.join("gamma", *bootstrap)
    assert again.ready["peer_id"] == gamma.ready["peer_id"]
    eventually(lambda: alpha.alive() == again.alive() == 3)
    assert done(again.run("get", "one", "--wait", "5")).stdout == value.read_bytes()

    done(again.run("leave", "--drain", "5s"))
    assert alpha.alive() == 2  # at once: the command returns when the peer has said goodbye
    assert again.process.wait(10) == 0
    left = json.loads(done(alpha.run("peers", "--all", "--json")).stdout)
    (gamma,) = [member for member in left if member["name"] == "gamma"]
    assert (gamma["status"], gamma["leaving"]) == ("left", False)
    (row,) = [
        line
        for line in done(alpha.run("peers", "--all")).stdout.decode().splitlines()
        if "gamma" in line
    ]
    assert row.split()[1] == "left"


def test_stats(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.client.put("stats/key", b"x" * 5000)
    document = json.loads(done(first.run("stats", "--json")).stdout)
    assert document["peer"]["peer_id"] == first.ready["peer_id"]
    assert document["peer"]["objects"] >= 1
    assert document["cluster"]["peers"] == 2
    shown = done(first.run("stats")).stdout.decode()
    assert first.ready["peer_id"] in shown
    assert "second" in shown
    assert max(map(len, shown.splitlines())) <= 80
    table = done(first.run("peers")).stdout.decode().splitlines()
    assert {line.split()[0] for line in table} == {"NAME", "first", "second"}


def test_ls_locate_and_rm(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    for number in range(3):
        first.client.put(f"list/{number}", b"v")
    second.client.put("list/3", b"v")
    eventually(lambda: len(first.client.list_keys("list/").keys) == 4)
    page = done(first.run("ls", "list/", "--limit", "2"))
    assert [line.split()[0] for line in page.stdout.splitlines()] == [b"KEY", b"list/0", b"list/1"]
    assert page.stderr == b"more keys follow: add --after list/1\n"
    local = json.loads(done(second.run("ls", "list/", "--local", "--json")).stdout)
    assert [entry["key"] for entry in local["keys"]] == ["list/3"]
    copies = json.loads(done(first.run("locate", "list/3", "--json")).stdout)["copies"]
    assert [copy["peer"] for copy in copies] == ["second"]
    removed = first.run("rm", "list/0", "list/3", "list/none")
    assert removed.returncode == 3
    assert removed.stderr == b"removed 2 of 3 keys\nerror: no such key: list/none\n"
    eventually(lambda: not second.client.contains("list/3"))
    failed(first.run("rm", "list/none"), 3)
    failed(first.run("locate", "list/none"), 3)


def test_streams(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    value = os.urandom(2 * MIB + 1)
    done(first.run("put", "stream", "-", "--namespace", "streams", input=value))
    assert (
        done(second.run("get", "stream", "--namespace", "streams", "--wait", "5")).stdout == value
    )
    failed(second.run("get", "stream"), 3)
    done(first.run("put", "empty", input=b""))
    assert done(second.run("get", "empty", "-o", "-", "--wait", "5")).stdout == b""


def test_put_keeps_what_is_there(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.client.put("kept", b"one")
    assert b"unchanged" in done(first.run("put", "kept", input=b"one")).stderr
    assert "--overwrite" in failed(first.run("put", "kept", input=b"two"), 1)
    assert first.client.get("kept") == b"one"
    done(first.run("put", "kept", "--overwrite", input=b"two"))
    assert first.client.get("kept") == b"two"


def test_a_ttl_passes(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    done(first.run("put", "brief", "--ttl", "300ms", input=b"v"))
    eventually(lambda: not first.client.contains("brief"))


def test_a_missing_key(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    out = first.machine.folder / "missing"
    assert "nothing/here" in failed(first.run("get", "nothing/here", "-o", str(out)), 3)
    assert not out.exists()
    assert not list(first.machine.folder.glob(".*.part"))


def test_no_peer(machine: Machine) -> None:
    nowhere = str(machine.folder / "nowhere.sock")
    for arguments in (["stats"], ["put", "k", "/dev/null"]):
        assert "mooncake-p2p join" in failed(machine.run(*arguments, socket=nowhere), 4)


def test_several_peers_must_be_told_apart(pair: tuple[Peer, Peer]) -> None:
    message = failed(pair[0].machine.run("stats"), 4)
    for peer in pair:
        assert peer.ready["socket"] in message


def test_a_reader_that_stops_reading(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.client.put("long", bytes(4 * MIB))
    process = subprocess.Popen(
        [*COMMAND, "get", "long", "--socket", first.ready["socket"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=first.machine.environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"\0"
    process.stdout.close()
    assert process.wait(10) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_destination_that_cannot_be_written(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.client.put("somewhere", b"v")
    path = first.machine.folder / "none" / "out"
    assert "cannot write" in failed(first.run("get", "somewhere", "-o", str(path)), 1)


def test_too_large_for_the_peer(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    big = first.machine.folder / "big"
    with big.open("wb") as file:
        file.truncate(100 * MIB)
    failed(first.run("put", "big", str(big)), 1)
    big.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_peer_cleanly(number: int, machine: Machine) -> None:
    peer = machine.join("lone")
    socket = Path(peer.ready["socket"])
    assert socket.exists()
    begin = time.monotonic()
    assert peer.stop(number) == 0
    assert time.monotonic() - begin < 3.0
    assert not socket.exists()
    assert "Traceback" not in peer.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_ended_by_a_signal_has_left(number: int, machine: Machine) -> None:
    stays = machine.join("stays")
    goes = machine.join("goes", "--bootstrap", stays.ready["control"])
    eventually(lambda: stays.alive() == goes.alive() == 2)
    assert goes.stop(number) == 0
    statuses = {member.name: member.status for member in stays.client.peers(everyone=True)}
    assert statuses == {"stays": "alive", "goes": "left"}


def test_a_full_disk_leaves_no_file(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.client.put("fits not", bytes(MIB))
    full = first.machine.folder / "full"
    result = subprocess.run(
        ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *COMMAND, "get", "fits not", "-o", full],
        capture_output=True,
        timeout=COMMAND_SECONDS,
        env={**first.machine.environment, "MOONCAKE_P2P_SOCKET": first.ready["socket"]},
    )
    assert "no room for 1,048,576 bytes" in failed(result, 1)
    assert not full.exists()
    assert not list(first.machine.folder.glob(".*.part"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--name", ".."], "name"),
        (["--max-objects", "0"], "--max-objects: 0 must be at least 1"),
        (["--memory", "lots"], "memory"),
        (["--bootstrap", "nowhere"], "bootstrap"),
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "203.0.113.9:0", "--insecure"], "error: --listen: 203.0.113.9: "),
        (["--log-file", "/nonexistent/log"], "error: --log-file: /nonexistent/log cannot be"),
        (["--cluster-key-file", "/nonexistent"], "/nonexistent"),
    ],
)
def test_settings_that_cannot_be(options: list[str], complaint: str, machine: Machine) -> None:
    assert complaint in failed(machine.run("join", *options), 2)


def test_peers_with_a_key_meet_and_strangers_stay_out(machine: Machine) -> None:
    keys = [machine.folder / "key", machine.folder / "other"]
    for key in keys:
        done(machine.run("keygen", str(key)))
    first = machine.join("first", "--cluster-key-file", str(keys[0]))
    bootstrap = ["--bootstrap", first.ready["control"]]
    friend = Peer(machine, "friend", "--cluster-key-file", str(keys[0]), *bootstrap)
    log = ["--log-file", str(machine.folder / "stranger.log")]
    stranger = machine.run("join", "--cluster-key-file", str(keys[1]), *bootstrap, *log)
    assert "--cluster-key-file" in failed(stranger, 1)
    logged = (machine.folder / "stranger.log").read_text()
    assert logged.count("wrong cluster key") == 1  # once there, once here
    stranger = machine.run("join", "--cluster-key-file", str(keys[1]), *bootstrap)
    assert stranger.stderr.count(b"wrong cluster key") == 1
    assert friend.wait_until_ready().ready["joined"] is True
    eventually(lambda: first.alive() == friend.alive() == 2)
    names = {member.name for member in first.client.peers(everyone=True)}
    assert names == {"first", "friend"}
