"""Peers as processes of this machine, on loopback, that are gone without a trace at the end."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mooncake_p2p.output import CommandFailed, Interrupts
from p2pstore.errors import PeerNotInstalled
from p2pstore.runtime.linux import is_ready, read_line

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05
MAX_FOLDER_CHARACTERS: Final = 60  # a socket's path has at most 107 bytes


class PeerProcess:
    """One `mooncake-p2p join`. It may be killed and started again with the same identity."""

    def __init__(self, name: str, folder: Path, arguments: list[str]) -> None:
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.ready: dict[str, Any] = {}
        self._log = folder / f"{name}.log"
        self._arguments = [
            *("--name", name),
            *("--data-listen", "127.0.0.1:0"),
            *("--state-dir", str(folder / f"{name}.state")),
            *("--socket", str(self.socket)),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.address = "127.0.0.1:0"
        """Where it listens; port 0: any."""

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, bootstrap: str | None) -> None:
        """Start the process. `wait_until_ready` says when it serves."""
        arguments = [*self._arguments, "--listen", self.address]
        arguments += ["--bootstrap", bootstrap] if bootstrap else []
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("MOONCAKE_P2P_")
        }
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()  # of its life before
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mooncake_p2p.tied", str(os.getpid()), "join", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                process_group=0,  # Ctrl-C in the terminal is for us, who then end it
            )

    @property
    def has_spoken(self) -> bool:
        """Whether `wait_until_ready` need not wait: it is ready, or has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        return is_ready(self._process.stdout.fileno(), 0.0)

    def wait_until_ready(self) -> None:
        """Wait for the line `ready {...}`. Raises `CommandFailed` when it does not come."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + READY_SECONDS)
        if not line.startswith(b"ready "):
            status = self._process.poll()
            ended = "" if status is None else f" (it ended with status {status})"
            raise CommandFailed(f"peer {self.name} did not get ready{ended}")
        self.ready = json.loads(line.removeprefix(b"ready "))

    def connect(self) -> BlockingClient:
        """A client of this peer."""
        from p2pstore import blocking

        return blocking.connect(str(self.socket))

    def kill(self) -> None:
        """kill -9, and nothing more."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Send SIGTERM; `reap` waits."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def reap(self, deadline: float) -> None:
        """Wait for the end of the process until `deadline`, then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def last_log_lines(self, count: int) -> list[str]:
        """The end of what the peer logged."""
        try:
            return self._log.read_text(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []


class LocalCluster:
    """A folder, and peers that live in it, in a cluster of its own. `close` removes all of it."""

    def __init__(self, interrupts: Interrupts, memory: str, *options: str) -> None:
        if find_spec("libp2p") is None:
            raise PeerNotInstalled("libp2p")
        self._interrupts = interrupts
        place = tempfile.gettempdir()
        self.folder = Path(
            tempfile.mkdtemp(
                prefix="p2p-demo-", dir=place if len(place) <= MAX_FOLDER_CHARACTERS else "/tmp"
            )
        )
        self._arguments = ["--cluster", f"demo-{secrets.token_hex(8)}", "--memory", memory, *options]
        self.peers: list[PeerProcess] = []

    def add(self, name: str, *options: str) -> PeerProcess:
        """One more peer with options of its own, not yet started."""
        self.peers.append(PeerProcess(name, self.folder, [*self._arguments, *options]))
        return self.peers[-1]

    def start_all(self) -> None:
        """Start all peers at once, the others through the first one, and wait until all are ready."""
        first, *others = self.peers
        with socket.create_server(("127.0.0.1", 0)) as free:
            first.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.begin(first, None)
        for peer in others:
            self.begin(peer, first.address)
        for peer in self.peers:
            peer.wait_until_ready()

    def begin(self, peer: PeerProcess, bootstrap: str | None) -> None:
        """Start a peer, and wait for nothing."""
        with self._interrupts.held():  # else a signal could leave the new process behind
            peer.start(bootstrap)

    def close(self) -> None:
        """End all peers and remove the folder with their state, logs and sockets."""
        deadline = time.monotonic() + STOP_SECONDS
        for peer in self.peers:
            peer.end()
        for peer in self.peers:
            peer.reap(deadline)
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    """Ask until it is so. Raises `CommandFailed` saying `what` did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CommandFailed(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)
