"""Other users of a peer's machine: loopback ports are open to them, and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_cli import COMMAND, COMMAND_SECONDS, Machine, done, failed, machine

__all__ = ["machine"]

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def home_of_nobody() -> Iterator[Path]:
    """A directory of the user nobody, for state, sockets and results."""
    folder = Path(tempfile.mkdtemp(prefix="p2p-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def as_nobody(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A command that the user nobody runs."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "MOONCAKE_P2P_MEMORY": "16MiB",
    }
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        timeout=COMMAND_SECONDS,
        env=environment,
        cwd=folder,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )


@needs_root
def test_another_user_is_not_let_in_by_a_keyless_peer(
    machine: Machine, home_of_nobody: Path
) -> None:
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
