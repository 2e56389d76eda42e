"""Other users of a peer's machine: loopback ports are open to them, and nothing else is."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import COMMAND_SECONDS, Machine, done, failed
from tests.forked import COMMAND

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def home_of_nobody() -> Iterator[Path]:
    """A directory of the user nobody, for state, sockets and results."""
    folder = Path(tempfile.mkdtemp(prefix="p2p-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


HOSTILE_CLIENT = """
import mmap, os, socket, sys
from p2pstore.local.local_protocol import Hello, LocalKind
from p2pstore.wire import PREFACE_LOCAL, encode_frame
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
hello = Hello(1, 1, "default", 1, os.getpid(), location_table=True)
sock.sendall(PREFACE_LOCAL + encode_frame(LocalKind.HELLO, 0, hello))
errors = []
for descriptor in socket.recv_fds(sock, 65536, 16)[1]:
    try:
        mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        errors.append(error.errno)
    else:
        errors.append(0)
print(errors)
"""
"""Asks for write access by the protocol's own codecs, and tries to map writable whatever it is given."""


def as_nobody(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A command of the program that the user nobody runs."""
    return run_as_nobody(folder, [*COMMAND, *arguments])


def run_as_nobody(folder: Path, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "MOONCAKE_P2P_MEMORY": "16MiB",
    }
    return subprocess.run(
        command,
        capture_output=True,
        timeout=COMMAND_SECONDS,
        env=environment,
        cwd=folder,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )


@needs_root
def test_another_user_is_not_let_in_by_a_keyless_peer(machine: Machine, home_of_nobody: Path) -> None:
    first = machine.join("first")
    second = machine.join("second", "--bootstrap", first.ready["control"])
    assert second.ready["joined"], "peers of one user need no option"
    secret = machine.folder / "secret"
    secret.write_bytes(b"root's own")
    done(first.run("put", "secret", str(secret)))
    cluster = machine.environment["MOONCAKE_P2P_CLUSTER"]
    join = ["join", "--cluster", cluster, "--bootstrap", first.ready["control"]]
    log = ["--log-file", str(home_of_nobody / "log")]
    said = failed(as_nobody(home_of_nobody, *join, *log), 1)
    assert "of another user" in said
    assert "--cluster-key-file" in said
    assert "keygen" in said
    assert cluster not in said.replace(f"cluster '{cluster}'", "")
    assert done(second.run("get", "secret", "--wait", "5")).stdout == b"root's own"


@needs_root
def test_insecure_lets_every_user_in_and_says_so(machine: Machine, home_of_nobody: Path) -> None:
    log = machine.folder / "log"
    first = machine.join("first", "--insecure", "--log-file", str(log))
    assert "--insecure without a cluster key: every user" in log.read_text()
    cluster = machine.environment["MOONCAKE_P2P_CLUSTER"]
    join = ["join", "--detach", "--insecure", "--cluster", cluster]
    try:
        done(as_nobody(home_of_nobody, *join, "--bootstrap", first.ready["control"]))
    finally:
        as_nobody(home_of_nobody, "leave", "--drain", "0s")


@needs_root
def test_a_key_that_another_user_planted_is_refused(machine: Machine) -> None:
    key = machine.folder / "home" / "mooncake-p2p" / "user.key"
    key.parent.mkdir(mode=0o700, parents=True)
    key.write_text("ab" * 32 + "\n")
    key.chmod(0o600)
    os.chown(key, NOBODY, NOBODY)
    assert "user.key belongs to another user" in failed(machine.run("join"), 2)


@needs_root
def test_others_may_read_at_the_socket_and_change_nothing(
    machine: Machine, home_of_nobody: Path
) -> None:
    """Their mapping is read-only as well: a writable mapping of the peer's memory would change everything."""
    place = Path(tempfile.mkdtemp(prefix="p2p-socket-"))
    place.chmod(0o755)
    socket = place / "peer.sock"
    try:
        options = ["--socket", str(socket), "--socket-mode", "0666", "--socket-others", "read"]
        peer = machine.join("first", *options)
        value = machine.folder / "value"
        value.write_bytes(b"root's own")
        done(peer.run("put", "k", str(value)))
        at = ["--socket", str(socket)]
        assert done(as_nobody(home_of_nobody, "get", "k", *at)).stdout == b"root's own"
        mine = home_of_nobody / "mine"
        mine.write_bytes(b"another's")
        mine.chmod(0o644)
        for command in (["put", "k2", str(mine)], ["rm", "k"], ["leave"]):
            said = failed(as_nobody(home_of_nobody, *command, *at), 1)
            assert "--socket-others read" in said, command
        script = [sys.executable, "-c", HOSTILE_CLIENT, str(socket)]
        told = done(run_as_nobody(home_of_nobody, script))
        assert told.stdout == b"[13, 13]\n", "EACCES for the memory, and the table of locations"
        assert done(peer.run("get", "k")).stdout == b"root's own"
    finally:
        shutil.rmtree(place)
