"""The command line against real peers: separate processes, real sockets, real signals."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from p2pstore.objects import MIB
from tests.cluster.machines import COMMAND_SECONDS, Machine, Peer, done, failed
from tests.forked import COMMAND, start
from tests.waiting import eventually


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
    assert again.process.wait(60) == 0
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
    assert done(second.run("get", "stream", "--namespace", "streams", "--wait", "5")).stdout == value
    failed(second.run("get", "stream"), 3)
    done(first.run("put", "empty", input=b""))
    assert done(second.run("get", "empty", "-o", "-", "--wait", "5")).stdout == b""


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
    process = start(
        [*COMMAND, "get", "long", "--socket", first.ready["socket"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=first.machine.environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"\0"
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_too_large_for_the_peer(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    big = first.machine.folder / "big"
    with big.open("wb") as file:
        file.truncate(100 * MIB)
    failed(first.run("put", "big", str(big)), 1)
    big.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_peer_cleanly(number: int, machine: Machine) -> None:
    stays = machine.join("stays")
    goes = machine.join("goes", "--bootstrap", stays.ready["control"])
    socket = Path(goes.ready["socket"])
    assert socket.exists()
    eventually(lambda: stays.alive() == goes.alive() == 2)
    assert goes.stop(number) == 0
    assert not socket.exists()
    assert "Traceback" not in goes.log.read_text()
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
        (["--max-objects", "0"], "--max-objects: 0 must be at least 1"),
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
