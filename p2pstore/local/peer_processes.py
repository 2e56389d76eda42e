"""Peers as child processes, which do not outlive the program that started them: one, or a cluster on loopback."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from p2pstore.errors import P2PStoreError, PeerNotInstalled
from p2pstore.runtime.linux import is_ready, read_line

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05
LOG_LINES: Final = 5
MAX_FOLDER_CHARACTERS: Final = 60
"""A socket's path has at most 107 bytes."""


class PeerProcess:
    """One `mooncake-p2p join`, whose socket, state and log are in a folder. It may be killed and started again with
    the same identity. The kernel kills it when the thread that started it ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.ready: dict[str, Any] = {}
        """The document of its line `ready {...}`."""
        self._state = folder / f"{name}.state"
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it was started, and does not run any more."""
        return self._process is not None and self._process.poll() is not None

    def start(
        self,
        options: Sequence[str],
        *,
        around: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start it with these options of `join`; `wait_until_ready` says when it serves. `around` is a command that
        runs it, `inherited` are descriptors that stay open in it. Raises `OSError`."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()  # of its life before
        command = [
            *(*around, sys.executable, "-P", "-m", "mooncake_p2p.tied", str(os.getpid()), "join"),
            *("--state-dir", str(self._state), "--socket", str(self.socket)),
            *options,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                pass_fds=inherited,
                process_group=0,  # Ctrl-C in the terminal is for this program, which then ends the peer
            )

    @property
    def has_spoken(self) -> bool:
        """Whether `wait_until_ready` need not wait: it is ready, or has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        return is_ready(self._process.stdout.fileno(), 0.0)

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until it serves. Raises `P2PStoreError`, with the end of its log."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + seconds)
        if not line.startswith(b"ready "):
            status = self._process.poll()
            ended = "" if status is None else f" (it ended with status {status})"
            raise P2PStoreError(f"peer {self.name} did not get ready{ended}: {self.last_words()}")
        self.ready = json.loads(line.removeprefix(b"ready "))

    def connect(self) -> BlockingClient:
        """A client of this peer."""
        from p2pstore import blocking

        return blocking.connect(str(self.socket))

    def wait(self) -> None:
        """Wait for its end."""
        assert self._process is not None
        self._process.wait()

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
        """Wait for the end of the process until `deadline` (`time.monotonic`), then kill it."""
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
        except OSError:
            return []

    def last_words(self) -> str:
        """The end of what the peer logged, as one line."""
        return " / ".join(self.last_log_lines(LOG_LINES)) or "it logged nothing"


def new_folder(prefix: str) -> Path:
    """A temporary folder whose path is short enough for sockets in it."""
    place = tempfile.gettempdir()
    short = place if len(place) <= MAX_FOLDER_CHARACTERS else "/tmp"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=short))


def environment_without_settings() -> dict[str, str]:
    """This process's environment, without what it says of a peer's settings."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MOONCAKE_P2P_")}


class LocalCluster:
    """A folder, and peers that live in it, in a cluster of its own. `close` removes all of it."""

    def __init__(
        self, held: Callable[[], AbstractContextManager[None]], memory: str, *options: str
    ) -> None:
        """`held`: signals wait within this, or one could leave a new process behind."""
        if find_spec("libp2p") is None:
            raise PeerNotInstalled("libp2p")
        self._held = held
        self.folder = new_folder("p2p-demo-")
        self._options = ["--cluster", f"demo-{secrets.token_hex(8)}", "--memory", memory, *options]
        self._options_of: dict[PeerProcess, tuple[str, ...]] = {}

    @property
    def peers(self) -> list[PeerProcess]:
        """All peers, started or not."""
        return list(self._options_of)

    def add(self, name: str, *options: str) -> PeerProcess:
        """One more peer with options of its own, not yet started."""
        peer = PeerProcess(self.folder, name)
        self._options_of[peer] = options
        return peer

    def start_all(self) -> None:
        """Start all peers at once, the others through the first one, and wait until all are ready."""
        first, *others = self.peers
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._options_of[first] += ("--listen", address)
        self.begin(first, None)
        for peer in others:
            self.begin(peer, address)
        for peer in self.peers:
            peer.wait_until_ready()

    def begin(self, peer: PeerProcess, bootstrap: str | None) -> None:
        """Start a peer, and wait for nothing."""
        options = ["--name", peer.name, "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0"]
        options += [*self._options, *self._options_of[peer]]
        options += ["--bootstrap", bootstrap] if bootstrap else []
        with self._held():
            peer.start(options, environment=environment_without_settings())

    def close(self) -> None:
        """End all peers and remove the folder with their state, logs and sockets."""
        deadline = time.monotonic() + STOP_SECONDS
        for peer in self.peers:
            peer.end()
        for peer in self.peers:
            peer.reap(deadline)
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    """Ask until it is so. Raises `P2PStoreError` saying `what` did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise P2PStoreError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)
