"""A peer that has no descriptors left says so, to its log and to those who connect, and goes on when it has some."""

import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import time
from pathlib import Path

import pytest

from p2pstore import blocking, errors
from p2pstore.blocking import BlockingClient
from p2pstore.local.socket_paths import answers
from p2pstore.runtime.linux import is_ready, read_line
from tests.contract.worlds import peer_process


def limit(process: subprocess.Popen[bytes], spare: int) -> None:
    """Let it have `spare` more descriptors above its highest one, and the free ones below that."""
    highest = max(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 1 + spare, 4096))


def test_a_peer_without_descriptors_says_so_and_recovers(tmp_path: Path) -> None:
    with peer_process(tmp_path, "p") as peer, contextlib.ExitStack() as stack:
        limit(peer.process, 3)
        clients: list[BlockingClient] = []
        with pytest.raises(errors.P2PStoreError, match="descriptors"):
            while True:
                clients.append(stack.enter_context(blocking.connect(peer.socket, timeout=60)))
        for _ in range(20):
            with pytest.raises(errors.P2PStoreError, match=r"descriptors.*ulimit -n") as told:
                blocking.connect(peer.socket, timeout=60)
            assert not isinstance(told.value, errors.DeadlineExceeded)
            assert "hangs" not in str(told.value)
        log = (tmp_path / "p.log").read_text()
        assert log.count("local clients cannot connect now: this process has all of the") <= 1
        assert log.count("\n") < 20, log
        for client in clients:
            client.put("k", b"value", overwrite=True)
        limit(peer.process, 100)
        with blocking.connect(peer.socket, timeout=60) as client:
            assert client.get("k") == b"value"


def test_a_client_without_descriptors_is_told_that_it_has_none(tmp_path: Path) -> None:
    with peer_process(tmp_path, "p") as peer:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        held: list[socket.socket] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(socket.socket())
            with pytest.raises(errors.NoLocalPeer, match=r"this process.*ulimit -n"):
                blocking.connect(peer.socket, timeout=5)
            with pytest.raises(errors.NoLocalPeer, match=r"this process.*ulimit -n"):
                answers(peer.socket)
        finally:
            for each in held:
                each.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with blocking.connect(peer.socket, timeout=5) as client:
            client.put("k", b"x")


def test_waiting_for_a_descriptor_with_a_high_number() -> None:
    """An API server has thousands; `select` takes none above 1,023."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this user may not have so many descriptors")
    reading, writing = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        with os.fdopen(fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 1500), "rb") as high:
            assert not is_ready(high.fileno(), 0)
            os.write(writing, b"ready {}\n")
            assert is_ready(high.fileno(), 5)
            assert read_line(high, time.monotonic() + 5) == b"ready {}\n"
            assert read_line(high, time.monotonic()) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(reading)
        os.close(writing)
