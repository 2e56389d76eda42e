"""Peers in processes of their own, started by the command, and commands that talk to them. For tests."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from tests.forked import COMMAND, ready_document, run, start, unconfigured

COMMAND_SECONDS = 120.0


class Peer:
    """A `mooncake-p2p join` in its own process."""

    def __init__(self, machine: Machine, name: str, *options: str) -> None:
        self.machine = machine
        self.name = name
        self.log = machine.folder / f"{name}.log"
        self.ready: dict[str, Any] = {}
        self._client: BlockingClient | None = None
        with self.log.open("ab") as log:
            self.process = start(
                [*COMMAND, "join", "--name", name, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env=machine.environment,
            )
        machine.peers.append(self)

    def wait_until_ready(self) -> Peer:
        self.ready = ready_document(self.process.stdout, self.log)
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

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
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
        self.environment = unconfigured(
            HOME=str(folder / "home"),
            XDG_RUNTIME_DIR=str(folder / "run"),
            XDG_STATE_HOME=str(folder / "home"),
            MOONCAKE_P2P_CLUSTER=f"test-{folder.name}",
            MOONCAKE_P2P_MEMORY="64MiB",
            MOONCAKE_P2P_LISTEN="127.0.0.1:0",
        )

    def join(self, name: str, *options: str) -> Peer:
        """A peer that serves."""
        return Peer(self, name, *options).wait_until_ready()

    def run(
        self, *arguments: str, socket: str | None = None, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """A command, with `input` on its stdin."""
        extra = {"MOONCAKE_P2P_SOCKET": socket} if socket else {}
        environment = {**self.environment, **extra}
        return run(*arguments, seconds=COMMAND_SECONDS, env=environment, input=input)


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
