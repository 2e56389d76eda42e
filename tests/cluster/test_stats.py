"""`stats` in all its forms, and `peers`, against real peers: rates, slow operations, a terminal, a peer that goes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import IO, Any

import pytest

from p2pstore import blocking
from p2pstore.objects import MIB
from tests.cluster.machines import Machine, Peer, done, failed, new_machine
from tests.forked import COMMAND, start
from tests.waiting import eventually

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    """Two peers that know each other, for which everything over 1 ms is slow, and which move bytes by TCP."""
    with new_machine() as machine:
        options = ("--slow-operation", "1ms", "--transport", "tcp")
        first = machine.join("first", *options)
        second = machine.join("second", *options, "--bootstrap", first.ready["control"])
        eventually(lambda: first.alive() == second.alive() == 2)
        yield first, second


def statistics(peer: Peer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done(peer.run("stats", "--json")).stdout)
    return document


def line_of(stream: IO[bytes], seconds: float = 20.0) -> bytes:
    """The next line of an unbuffered stream: what a buffer holds, `select` does not see."""
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"no line came, only {line!r}"
        piece = stream.read(1)
        assert piece, f"the stream ended after {line!r}"
        line += piece
    return line


def watching(peer: Peer, *options: str, **settings: Any) -> subprocess.Popen[bytes]:
    return start(
        [*COMMAND, "stats", "--watch", "--interval", "0.2", *options],
        env={**peer.machine.environment, "MOONCAKE_P2P_SOCKET": peer.ready["socket"]},
        bufsize=0,
        **settings,
    )


def test_puts_gets_and_bytes_are_counted_where_they_happen(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    before = statistics(second)["peer"]
    first.client.put("counted", b"x" * MIB)
    eventually(lambda: second.client.contains("counted"))
    with blocking.connect(second.ready["socket"]) as client:
        with pytest.raises(KeyError):
            client.get("counted/not")
        assert client.get("counted") == b"x" * MIB  # told as the client closes, at once
    eventually(lambda: "tcp" in statistics(second)["peer"]["received"])
    after = statistics(second)["peer"]

    def grown(name: str) -> int:
        return int(after["counters"].get(name, 0) - before["counters"].get(name, 0))

    assert grown("client_reads_elsewhere") == 1
    assert grown("client_misses") == 1
    assert after["received"]["tcp"]["bytes"] >= MIB
    holder = statistics(first)["peer"]
    assert holder["counters"]["client_puts"] >= 1
    assert holder["counters"]["client_put_bytes"] >= MIB
    assert holder["served"]["tcp"]["bytes"] >= MIB
    (seen,) = [each for each in second.client.peers() if each.name == "first"]
    assert seen.transports["tcp"]["objects"] >= 1
    eventually(lambda: any(each.round_trip_seconds for each in second.client.peers()))
    table = done(second.run("peers")).stdout.decode().splitlines()
    assert " ".join(table[0].split()) == "NAME STATUS RTT HEARD USED LOAD CONTROL READ BY PEER ID"
    (row,) = [line for line in table if line.startswith("first")]
    assert " tcp " in row
    assert max(map(len, table)) <= 80


def test_every_get_is_counted_once(pair: tuple[Peer, Peer]) -> None:
    """Large and small, here and elsewhere, alone and in batches, awaited, leased, by the command that asks for
    the length first."""
    first, second = pair
    names = [f"once/{number}" for number in range(6)]
    for name in names:
        first.client.put(name, b"x" * (3 * MIB if name == names[0] else 1000))
    second.client.put("once/here", bytes(MIB))
    eventually(lambda: all(second.client.contains_many(names)))
    counters = ("client_reads", "client_leases", "client_reads_elsewhere", "client_misses")

    def read() -> list[int]:
        counted = statistics(second)["peer"]["counters"]
        return [counted.get(name, 0) for name in counters]

    before = read()
    with blocking.connect(second.ready["socket"]) as client:
        for name in names[:2]:
            assert client.get(name)  # elsewhere: 2
        client.get("once/here")  # here: 1
        buffers = [bytearray(1000) for _ in names[1:]]
        results = client.get_many_into(
            [*zip(names[1:], buffers, strict=True), ("once/none", bytearray(1))]
        )
        assert [each.ok for each in results] == [True] * 5 + [False]  # elsewhere: 5, misses: 1
        with pytest.raises(KeyError):
            client.get("once/none", wait=0.2)  # misses: 1
        with pytest.raises(KeyError):
            client.take_lease("once/none")  # misses: 1
        client.take_lease("once/here")  # leases: 1
        client.take_lease(names[1])  # elsewhere: 1
        client.get(names[1])  # here by now: 1
    folder = second.machine.folder
    for name in (names[0], "once/here"):  # elsewhere: 1, here: 1
        done(second.run("get", name, "-o", str(folder / "once")))
    grown = [3, 1, 9, 3]

    def told() -> bool:
        return [after - was for after, was in zip(read(), before, strict=True)] == grown

    eventually(told)


def test_slow_operations_are_kept_with_where_the_time_went(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    result = first.client.put("slow/put", os.urandom(16 * MIB), replicas=2)
    assert result.copies == 2
    slow = json.loads(done(first.run("stats", "--slow", "--json")).stdout)
    assert slow["threshold_seconds"] == 0.001
    (put,) = [each for each in slow["operations"] if each["key"] == "slow/put"]
    assert put["what"] == "commit"
    assert put["outcome"] == "ok"
    (stage,) = [each for each in put["stages"] if each["what"] == "replicate"]
    assert (stage["peer"], stage["outcome"]) == ("second", "ok")
    assert 0 < stage["seconds"] <= put["seconds"] + 0.01
    assert put["waiting_seconds"] <= put["seconds"] - 0.5 * stage["seconds"]
    shown = done(first.run("stats", "--slow")).stdout.decode()
    assert "slow/put" in shown
    assert "from second" in shown
    assert max(map(len, shown.splitlines())) <= 80
    # One line in ten seconds: of this operation, or of one before it.
    assert re.search(r"slow \w+ of .*: \d+\.\d+ s, waiting \d+\.\d+ s", first.log.read_text())


def test_a_slow_pull_is_told_by_what_its_time_went_to(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.client.put("slow/lease", os.urandom(32 * MIB))
    eventually(lambda: second.client.contains("slow/lease"))
    with second.client.lease("slow/lease", here=True) as view:
        assert len(view) == 32 * MIB
    slow = json.loads(done(second.run("stats", "--slow", "--json")).stdout)
    leases = [each for each in slow["operations"] if each["key"] == "slow/lease"]
    (pull,) = [stage for each in leases for stage in each["stages"] if stage["what"] == "pull"]
    assert (pull["peer"], pull["transport"]) == ("first", "tcp")
    assert pull["parts"].keys() == {"queue", "transfer", "verify"}
    assert 0 < sum(pull["parts"].values()) <= pull["seconds"]
    assert "(queue " in done(second.run("stats", "--slow")).stdout.decode()
    (seen,) = [each for each in second.client.peers() if each.name == "first"]
    assert seen.transports["tcp"]["p99_microseconds"] >= 1_000
    header, *rows = done(second.run("peers", "--reads")).stdout.decode().splitlines()
    assert header.split()[:4] == ["NAME", "TRANSPORT", "OBJECTS", "BYTES"]
    assert re.match(r"first +tcp +\d+ +[\d.]+ MiB +[\d.]+ m?s +[\d.]+ m?s +0 ", rows[0])
    assert len(rows) == 1


def test_a_slow_read_from_another_peer_is_told_by_the_client(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.client.put("slow/get", bytes(48 * MIB // 4), overwrite=True)
    eventually(lambda: second.client.contains("slow/get"))
    first.process.send_signal(signal.SIGSTOP)
    reader = start(
        [*COMMAND, "get", "slow/get", "-o", str(first.machine.folder / "slow")],
        env={**second.machine.environment, "MOONCAKE_P2P_SOCKET": second.ready["socket"]},
        stderr=subprocess.DEVNULL,
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(1.0)
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert reader.wait(20) == 0

    def told() -> list[dict[str, Any]]:
        slow = json.loads(done(second.run("stats", "--slow", "--json")).stdout)
        return [
            each for each in slow["operations"] if (each["what"], each["key"]) == ("get", "slow/get")
        ]

    eventually(lambda: "event loop stalled for" in first.log.read_text())
    eventually(lambda: bool(told()))
    (stage,) = told()[0]["stages"]
    assert (stage["what"], stage["peer"], stage["transport"]) == ("pull", "first", "tcp")
    assert stage["seconds"] > 0.05
    eventually(lambda: first.alive() == second.alive() == 2)


def test_watch_into_a_pipe_gives_a_line_of_json_per_interval(machine: Machine) -> None:
    peer = machine.join("watched", "--slow-operation", "250ms")
    failed(peer.run("get", "never/put", "--wait", "600ms"), 3)  # a wait that was asked for is not slow
    assert statistics(peer)["peer"]["slow"] == {"threshold_seconds": 0.25, "total": 0, "operations": []}
    process = watching(peer, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        before = json.loads(line_of(process.stdout))
        assert before["rates"] is None
        for number in range(5):
            peer.client.put(f"k{number}", b"v" * 1000)
        puts, deadline = 0, time.monotonic() + 20
        while puts < 5:  # in one interval or over several
            assert time.monotonic() < deadline, puts
            after = json.loads(line_of(process.stdout))
            total = after["peer"]["counters"]["client_puts"]
            assert (after["rates"]["puts_per_second"] > 0) == (total > puts)
            assert after["rates"]["failed_puts_per_second"] == 0
            puts = total
        assert peer.stop(signal.SIGKILL) == -signal.SIGKILL
        rest = process.stderr.read()
        assert process.wait(60) == 4
        assert rest.startswith(b"error: ")


def read_until(terminal: int, wanted: bytes, seconds: float = 20.0) -> bytes:
    """The terminal's output up to a text; fails when that does not come."""
    shown, deadline = b"", time.monotonic() + seconds
    while wanted not in shown:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, shown[-500:]
        shown += os.read(terminal, 65_536)
    return shown


def test_watch_on_a_terminal_outlives_the_peer_and_leaves_it_clean(machine: Machine) -> None:
    peer = machine.join("watched")
    terminal, end = pty.openpty()
    size = struct.pack("HHHH", 24, 80, 0, 0)
    fcntl.ioctl(end, termios.TIOCSWINSZ, size)
    environment = {**peer.machine.environment, "TERM": "xterm-256color"}
    environment["MOONCAKE_P2P_SOCKET"] = peer.ready["socket"]
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [*COMMAND, "stats", "--watch", "--interval", "0.2"],
        stdin=end,
        stdout=end,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    os.close(end)
    assert process.stderr is not None
    try:
        shown = read_until(terminal, b"Ctrl-C ends")
        assert ENTER_SCREEN in shown
        assert HIDE_CURSOR in shown
        assert b"PER SECOND" in read_until(terminal, b"PER SECOND")
        peer.stop(signal.SIGKILL)
        read_until(terminal, b"trying again")
        again = machine.join("watched")
        assert again.ready["socket"] == peer.ready["socket"]
        read_until(terminal, b"Ctrl-C ends")
        process.send_signal(signal.SIGINT)
        left = read_until(terminal, LEAVE_SCREEN)
        left += (
            read_until(terminal, b"PEER ID")
            if b"PEER ID" not in left.rpartition(LEAVE_SCREEN)[2]
            else b""
        )
        assert SHOW_CURSOR in left
        assert process.wait(60) == 130
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(terminal)


def test_watching_costs_the_peer_little(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair

    def busy_seconds() -> float:
        with open(f"/proc/{first.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    first.client.statistics()
    begin, asked = busy_seconds(), 200
    for _ in range(asked):
        first.client.statistics()
    assert (busy_seconds() - begin) / asked < 0.01  # asked once a second: under 1 % of a core
