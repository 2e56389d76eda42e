"""`doctor` against real peers: healthy, locked, stopped, of another cluster or version, and no peers at all."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import machines
from tests.cluster.machines import Machine, Peer, done, failed, new_machine
from tests.waiting import eventually

QUICK = ("--seconds", "0.3")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    """Two peers with a cluster key that know each other."""
    with new_machine() as machine:
        done(machine.run("keygen", str(machine.folder / "key")))
        key = ("--cluster-key-file", str(machine.folder / "key"))
        first = machine.join("first", *key)
        second = machine.join("second", *key, "--bootstrap", first.ready["control"][0:])
        eventually(lambda: first.alive() == second.alive() == 2)
        yield first, second


def examine(peer: Peer, *options: str, keyed: bool = True) -> subprocess.CompletedProcess[bytes]:
    """`doctor --peer` of a peer, with its cluster's name and key."""
    machine = peer.machine
    key = ("--cluster-key-file", str(machine.folder / "key")) if keyed else ()
    return machine.run("doctor", "--peer", peer.ready["control"], *QUICK, *key, *options)


def findings(result: subprocess.CompletedProcess[bytes]) -> dict[str, dict[str, Any]]:
    """By name, of a command that ran with --json."""
    document = json.loads(result.stdout)
    assert document["fine"] is (result.returncode == 0)
    return {each["name"]: each for each in document["findings"]}


def last(result: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """The finding that ended the examination."""
    found: dict[str, Any] = json.loads(result.stdout)["findings"][-1]
    return found


def patched_peer(monkeypatch: pytest.MonkeyPatch, machine: Machine, patch: str, *options: str) -> Peer:
    """A peer in a process of its own in which `patch` ran first."""
    script = f"{patch}\nfrom mooncake_p2p.main import main\nmain()"
    with monkeypatch.context() as context:
        context.setattr(machines, "COMMAND", [sys.executable, "-c", script])
        return machine.join("patched", *options)


def test_a_healthy_way_is_measured_both_ways_without_joining(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    found = findings(done(examine(first, "--json")))
    assert {each["status"] for each in found.values()} <= {"ok", "warning", "skipped"}
    assert first.ready["peer_id"] in found["peer"]["value"]
    assert "knows 2 members" in found["peer"]["value"]
    for name in ("tcp from it", "tcp to it", "shm from it"):
        assert found[name]["measured"]["bytes_per_second"] > 10e6, name
    assert found["path MTU"]["measured"]["mtu_bytes"] > 1000
    assert abs(found["clock skew"]["measured"]["offset_seconds"]) < 1
    assert 0 < found["data round trip"]["measured"]["best_seconds"] < 1
    assert found["rdma from it"]["status"] == "skipped"
    for peer in pair:
        assert {member.name for member in peer.client.peers(everyone=True)} == {"first", "second"}
    shown = done(examine(second)).stdout.decode()
    assert max(map(len, shown.splitlines())) <= 80


def test_without_the_key_there_is_no_way_in(pair: tuple[Peer, Peer]) -> None:
    result = examine(pair[0], "--json", keyed=False)
    assert "wrong cluster key" in failed(result, 1)
    refused = last(result)
    assert (refused["name"], refused["failure"]) == ("admission", "broken")
    assert refused["cure"].startswith("give the cluster's key with --cluster-key-file")


def test_another_key_is_refused(pair: tuple[Peer, Peer]) -> None:
    machine = pair[0].machine
    other = str(machine.folder / "other")
    done(machine.run("keygen", other))
    result = examine(pair[0], "--json", "--cluster-key-file", other, keyed=False)
    assert "different keys" in failed(result, 1)
    assert last(result)["cure"].startswith("copy the cluster's key file")


def test_another_cluster_is_named(pair: tuple[Peer, Peer]) -> None:
    result = examine(pair[0], "--json", "--cluster", "elsewhere")
    assert "'elsewhere'" in failed(result, 1)
    assert "--cluster" in last(result)["cure"]


def test_text_for_people_names_cause_and_cure(pair: tuple[Peer, Peer]) -> None:
    result = examine(pair[0], "--cluster", "elsewhere")
    assert result.returncode == 1
    shown = result.stdout.decode()
    assert "broken  admission" in shown
    assert "        cause: " in shown
    assert "        cure:  give the cluster's name" in shown
    assert "1 broken" in result.stderr.decode()


def test_a_stopped_peer_ends_at_the_deadline(pair: tuple[Peer, Peer]) -> None:
    second = pair[1]
    second.process.send_signal(signal.SIGSTOP)
    try:
        result = examine(second, "--json", "--timeout", "0.5")
        assert "stopped" in failed(result, 5)
        assert (last(result)["name"], last(result)["failure"]) == ("noise", "deadline")
        machine = second.machine.run("doctor", "--json", socket=second.ready["socket"])
        assert machine.returncode == 1
        assert "no answer" in findings(machine)[f"peer at {second.ready['socket']}"]["value"]
    finally:
        second.process.send_signal(signal.SIGCONT)
    eventually(lambda: pair[0].alive() == 2)


def test_a_data_port_is_not_a_control_port(pair: tuple[Peer, Peer]) -> None:
    first = pair[0]
    result = first.machine.run("doctor", "--peer", first.ready["data"][0], "--json")
    assert "not a peer's control port" in failed(result, 1)
    assert "not its data or metrics port" in last(result)["cure"]


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Something else that listens: it sends `answer` to each connection, or (None) never accepts."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ended = threading.Event()

        def serve() -> None:
            sock.settimeout(0.05)
            kept = []
            while not ended.is_set():
                try:
                    accepted, _ = sock.accept()
                except TimeoutError:
                    continue
                kept.append(accepted)
                accepted.sendall(answer or b"")
            for each in kept:
                each.close()

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        try:
            yield f"127.0.0.1:{sock.getsockname()[1]}"
        finally:
            ended.set()
            if answer is not None:
                thread.join()


@pytest.mark.parametrize(
    ("answer", "status", "failure"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", 1, "broken"),
        (b"\x13/multistream/1.0.0\n" + bytes(4096), 1, "broken"),
        (None, 5, "deadline"),
    ],
    ids=["ssh", "zeros", "never accepts"],
)
def test_something_else_listens(
    answer: bytes | None, status: int, failure: str, machine: Machine
) -> None:
    with listener(answer) as address:
        result = machine.run("doctor", "--peer", address, "--json", "--timeout", "0.7")
    assert ("'SSH-2.0-OpenSSH_9.6'" in failed(result, status)) is (answer or b"").startswith(b"SSH")
    assert (last(result)["name"], last(result)["failure"]) == ("noise", failure)


def test_a_port_without_listener_and_no_such_host(machine: Machine) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for address, name in ((f"127.0.0.1:{port}", "tcp"), ("nowhere.invalid:1", "name")):
        result = machine.run("doctor", "--peer", address, "--json")
        failed(result, 4)
        assert (last(result)["name"], last(result)["failure"]) == (name, "unreachable")


def test_another_version_is_told_and_does_not_stop_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = (
        "import p2pstore; p2pstore.__version__ = '9.9.9'\n"
        "from p2pstore.transfer import data_messages as messages\n"
        "del messages.REQUESTS[messages.DataKind.MEASURE]"
    )
    newer = patched_peer(monkeypatch, machine, patch)
    found = findings(done(examine(newer, "--json", keyed=False)))
    assert found["peer"]["status"] == "warning"
    assert "9.9.9" in found["peer"]["value"]
    assert found["tcp"]["status"] == "skipped"  # it does not know MEASURE
    assert found["shm from it"]["status"] in ("ok", "warning")
    here = findings(machine.run("doctor", "--json"))
    assert here["peer patched: this command"]["status"] == "warning"


def test_no_common_protocol_is_broken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = "from p2pstore import wire\nwire.MIN_CONTROL_VERSION = wire.MAX_CONTROL_VERSION = 9"
    newer = patched_peer(monkeypatch, machine, patch)
    result = examine(newer, "--json", keyed=False)
    failed(result, 1)
    assert last(result)["name"] == "admission"
    assert "upgrade" in last(result)["cure"]


def test_a_lonely_peer_and_a_used_port_are_found(machine: Machine) -> None:
    with listener(b"") as nowhere:
        lonely = machine.join("lonely", "--bootstrap", nowhere, "--join-timeout", "0", "--cluster", "c")
        result = machine.run("doctor", "--json")
        assert "it has not heard from its bootstrap peer" in failed(result, 1)
        found = findings(result)["peer lonely: alone"]
        assert found["status"] == "broken"
        assert f"doctor --peer {nowhere}" in found["cure"]
        told = machine.run("stats", socket=lonely.ready["socket"]).stdout.decode()
        assert found["value"] in told
        assert nowhere in told
        assert lonely.stop() == 0
        ended = machine.run("doctor", "--json", socket=lonely.ready["socket"])
        found = findings(ended)[f"peer at {lonely.ready['socket']}"]
        assert (found["value"], found["status"]) == ("none to talk to", "broken")


"""A bundle about a peer that hangs waits for it a few times."""
ENCODED = "a ticket's secret in base64: "
TICKET = bytes(range(7, 250, 5))


def gathered(peer: Peer, path: Path, *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The command's output, and the files in the bundle."""
    result = done(peer.run("support-bundle", "-o", str(path), "--json", *options))
    assert path.stat().st_mode & 0o077 == 0
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            assert member.isfile()
            file = archive.extractfile(member)
            assert file is not None
            _, _, name = member.name.partition("/")
            files[name] = file.read().decode()
    said: dict[str, Any] = json.loads(result.stdout)
    assert sorted([*said["parts"], "problems.json"]) == sorted(files)
    return said, files


def test_a_bundle_has_what_helps_and_no_secrets() -> None:
    with new_machine() as machine:
        key_file, log, state = (machine.folder / name for name in ("key", "log", "state"))
        done(machine.run("keygen", str(key_file)))
        key = key_file.read_text().split()[-1]
        options = ["--cluster-key-file", str(key_file), "--log-file", str(log)]
        peer = machine.join("first", *options, "--state-dir", str(state), "--slow-operation", "0.000001")
        invite = done(peer.run("invite")).stdout.decode().split()[-1]
        assert invite.startswith("p2pstore1:")
        seed = (state / "identity.key").read_text().split()[-1]
        secrets = [key, invite, seed, base64.b64encode(bytes.fromhex(key)).decode().rstrip("=")]
        peer.client.put(f"object {invite}", b"value", overwrite=True)
        peer.client.put("plain", b"value")
        for _ in range(3):
            peer.client.get("plain")
        eventually(lambda: bool(peer.client.statistics()["peer"]["hottest"]))
        with log.open("a") as file:
            file.writelines(f"what {secret} is\n" for secret in secrets)
            file.write(f"{ENCODED}{base64.b64encode(TICKET).decode()}\n")
        other = machine.folder / "other.log"
        other.write_text(f"another log: {key.upper()}\n")
        machine.environment["MOONCAKE_P2P_INVITE"] = invite

        said, files = gathered(peer, machine.folder / "a.tar.gz", "--log", str(other))
        text = "\n".join(f"{name}\n{content}" for name, content in files.items())
        for secret in [*secrets, invite[12:], base64.b64encode(TICKET).decode()]:
            assert secret.lower() not in text.lower()
        assert "another log: (removed)" in files["logs/0-other.log"]
        assert ENCODED in files["peers/first/log"]
        assert said["problems"] == {}
        settings = json.loads(files["peers/first/settings.json"])
        assert settings["state_dir"] == str(state)
        statistics = json.loads(files["peers/first/statistics.json"])
        assert statistics["peer"]["peer_id"] == peer.ready["peer_id"]
        assert statistics["peer"]["problems"] == []
        assert "plain" not in files["peers/first/statistics.json"]
        assert statistics["peer"]["hottest"][0]["bytes"] == 5
        slow = json.loads(files["peers/first/slow.json"])
        assert "plain" in {each["key"] for each in slow["operations"]}
        (member,) = json.loads(files["peers/first/members.json"])
        assert member["name"] == "first"
        assert "started" in files["peers/first/log"]
        assert json.loads(files["doctor.json"])["summary"]["ok"] > 5
        versions = json.loads(files["versions.json"])
        assert versions["libraries"]["trio"]
        assert "MOONCAKE_P2P_INVITE" in versions["variables"]

        peer.process.send_signal(signal.SIGSTOP)
        try:
            said, files = gathered(peer, machine.folder / "b.tar.gz", "--log", str(log))
        finally:
            peer.process.send_signal(signal.SIGCONT)
        assert "hangs" in said["problems"]["peers/first/statistics.json"]
        assert "silent" in files["doctor.json"] or "no answer" in files["doctor.json"]
        assert key not in files["logs/0-log"]
