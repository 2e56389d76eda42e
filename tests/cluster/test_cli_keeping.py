"""Pinning, replicating, removing many and waiting, against real peers; some of them stopped meanwhile."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.objects import MIB
from tests.cluster.machines import Peer, done, failed, new_machine
from tests.forked import COMMAND, start
from tests.waiting import eventually


def keys_on(peer: Peer, prefix: str, *options: str) -> list[str]:
    listed = json.loads(done(peer.run("ls", prefix, "--json", *options)).stdout)
    return [entry["key"] for entry in listed["keys"]]


@contextlib.contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """The peer's process stands still."""
    peer.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        peer.process.send_signal(signal.SIGCONT)


def started(peer: Peer, *arguments: str) -> subprocess.Popen[bytes]:
    """A command that runs while the test goes on."""
    return start(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**peer.machine.environment, "MOONCAKE_P2P_SOCKET": peer.ready["socket"]},
    )


def test_pinning_brings_an_object_here_and_is_for_all_who_hold_it(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.client.put("pin/far", b"v" * 5000)
    eventually(lambda: second.client.contains("pin/far"))
    assert done(second.run("pin", "pin/far", "--pin", "hard")).stderr == b"pinned\n"
    assert keys_on(second, "pin/", "--local", "--pinned") == ["pin/far"]
    assert keys_on(first, "pin/", "--local", "--pinned") == ["pin/far"]
    done(second.run("unpin", "pin/far"))
    assert keys_on(second, "pin/", "--local", "--pinned") == []
    assert keys_on(first, "pin/", "--local", "--pinned") == []
    first.client.put("pin/there", b"v", pin="hard")
    eventually(lambda: second.client.contains("pin/there"))
    assert second.client.unpin("pin/there").copies == 1
    assert keys_on(first, "pin/there", "--local", "--pinned") == []
    assert "pin/none" in failed(second.run("pin", "pin/none"), 3)
    assert "pin/none" in failed(second.run("unpin", "pin/none"), 3)


def test_replicating_makes_copies_as_far_as_there_are_peers(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.client.put("copies", b"v" * 5000)
    assert done(first.run("replicate", "copies", "-n", "2")).stderr == b"copies 2/2\n"
    assert keys_on(second, "copies", "--local") == ["copies"]
    message = failed(first.run("replicate", "copies", "-n", "3"), 1)
    assert "copies: 2 of 3 copies: the cluster has 2 peers" in message
    failed(first.run("replicate", "none", "-n", "2"), 3)


def test_everything_with_a_prefix_and_everything_in_a_namespace(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    for number in range(3):
        first.client.put(f"many/{number}", b"v")
    second.client.put("many/there", b"v")
    second.client.put("untouched", b"v")
    eventually(lambda: len(first.client.list_keys("many/").keys) == 4)
    assert "--yes" in failed(first.run("rm", "--prefix", "many/"), 2)
    removed = done(first.run("rm", "--prefix", "many/", "--yes", "--json"))
    assert json.loads(removed.stdout)["removed"] == 4
    assert keys_on(second, "many/") == []

    done(second.run("put", "job", "--namespace", "job 17", input=b"v"))
    assert "--yes" in failed(first.run("flush", "job 17"), 2)
    done(first.run("flush", "job 17", "--yes"))
    eventually(lambda: keys_on(second, "", "--namespace", "job 17") == [])
    assert second.client.get("untouched") == b"v"


def test_waiting_for_a_key(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    begin = time.monotonic()
    failed(second.run("get", "never", "--wait", "300ms"), 3)
    assert time.monotonic() - begin < 10
    waiting = started(second, "get", "late", "--wait", "30")
    with waiting:
        try:
            eventually(lambda: any(each.startswith("socket:") for each in open_files(waiting)))
            first.client.put("late", b"value")
            assert waiting.communicate(timeout=60)[0] == b"value"
            assert waiting.returncode == 0
        finally:
            waiting.kill()


def open_files(process: subprocess.Popen[bytes]) -> list[str]:
    """The targets of a process's descriptors."""
    found = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(each))
    return found


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_get_that_is_ended_leaves_no_file(
    number: int, status: int, pair: tuple[Peer, Peer], tmp_path: Path
) -> None:
    with started(pair[0], "get", "never", "--wait", "60", "-o", str(tmp_path / "out")) as waiting:
        try:
            eventually(lambda: any(str(tmp_path) in each for each in open_files(waiting)))
            eventually(lambda: any(each.startswith("socket:") for each in open_files(waiting)))
            waiting.send_signal(number)
            assert waiting.wait(60) == status
        finally:
            waiting.kill()
    assert list(tmp_path.iterdir()) == []


def test_explaining(pair: tuple[Peer, Peer], tmp_path: Path) -> None:
    first, second = pair
    first.client.put("explained", os.urandom(2 * MIB))
    out = str(tmp_path / "out")
    shown = done(second.run("get", "explained", "-o", out, "--wait", "5", "--explain")).stderr
    assert b"source    first, dram, over shm\n" in shown
    explained = json.loads(done(first.run("get", "explained", "-o", out, "--explain", "--json")).stdout)
    assert (explained["explain"]["local"], explained["explain"]["source"]) == (True, "first")


def test_keys_are_completed(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    second.client.put("complete/there", b"v")
    first.client.put("complete/here", b"v")
    machine = first.machine
    machine.environment["COMP_CWORD"] = "2"
    machine.environment["COMP_WORDS"] = "mooncake-p2p\nget\ncompl"
    machine.environment["_MOONCAKE_P2P_COMPLETE"] = "complete_bash"
    try:
        # a busy machine may take longer than Tab waits; then the next Tab has it
        eventually(lambda: first.run().stdout == b"complete/here\ncomplete/there\n")
    finally:
        for name in ("COMP_CWORD", "COMP_WORDS", "_MOONCAKE_P2P_COMPLETE"):
            del machine.environment[name]


def test_a_peer_that_stands_still_is_named_in_time() -> None:
    with new_machine() as machine:
        first = machine.join("first")
        second = machine.join("second", "--bootstrap", first.ready["control"])
        eventually(lambda: first.alive() == second.alive() == 2)
        first.client.put("s/here", b"v")
        second.client.put("s/there", b"v")
        eventually(lambda: len(first.client.list_keys("s/").keys) == 2)
        with stopped(second):
            begin = time.monotonic()
            listed = done(first.run("ls", "s/", "--json"))
            assert time.monotonic() - begin < 5.0
            document = json.loads(listed.stdout)
            assert [entry["key"] for entry in document["keys"]] == ["s/here"]
            assert document["silent_peers"] == ["second"]
            assert listed.stderr == b"incomplete: second did not answer\n"
            removed = first.run("rm", "--prefix", "s/", "--yes")
            assert removed.returncode == 1
            assert b"removed 1 keys\nerror: incomplete: second did not answer" in removed.stderr
        eventually(lambda: first.alive() == 2)
        assert keys_on(first, "s/") == ["s/there"]
        done(first.run("rm", "--prefix", "s/", "--yes"))
        assert keys_on(second, "s/") == []


# --- bench ---------------------------------------------------------------------------------------


def test_bench_measures_and_leaves_nothing(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    before = held(first), held(second)
    arguments = ("bench", "--size", "4KiB", "--size", "16MiB", "--seconds", "0.02", "--json")
    result = done(first.run(*arguments))
    names = [each["name"] for each in json.loads(result.stdout)["results"]]
    for wanted in ("put, 4.0 KiB, median", "get, 4.0 KiB, rate", "lease, 4.0 KiB, median"):
        assert wanted in names
    assert "get from second over shm, 4.0 KiB, rate" in names
    assert not any("16.0 MiB" in name for name in names)
    assert b"left out 16.0 MiB on first: 5 % of its free memory is" in result.stderr
    eventually(lambda: (held(first), held(second)) == before)
    assert "no size fits" in first.run("bench", "--size", "1GiB").stderr.decode()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_bench_that_is_stopped_leaves_nothing(number: int, status: int, pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    before = held(first)
    with started(first, "bench", "--size", "1MiB", "--seconds", "60") as bench:
        try:
            eventually(lambda: held(first) > before)
            bench.send_signal(number)
            assert bench.wait(60) == status
        finally:
            bench.kill()
    eventually(lambda: held(first) == before)


def held(peer: Peer) -> int:
    """Objects in a peer's memory, of all namespaces."""
    return int(peer.client.statistics(cluster=False)["peer"]["objects"])
