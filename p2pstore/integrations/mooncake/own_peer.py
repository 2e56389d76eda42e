"""A peer of a program's own: a process that lives as long as the program does, or shorter."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from p2pstore.errors import ConfigError, DeadlineExceeded, P2PStoreError
from p2pstore.runtime.linux import read_line
from p2pstore.ssd_tier.log_layout import FILE_NAME

READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 15.0
LOG_LINES: Final = 5
MAX_FOLDERS: Final = 256
LONGEST_FOLDER: Final = 60
"""A socket's path has at most 107 bytes."""


class OwnPeer:
    """One `mooncake-p2p join` in a folder of its own. The kernel ends it when the program ends, however that is; its
    socket is not in the usual places, as it may end at any moment.

    A thread starts the process and waits for its end: the kernel's tie is to the thread that started it, so that one
    must last.
    """

    def __init__(self, options: Sequence[str], *, inherited: int | None = None) -> None:
        """`inherited` is a descriptor that stays open in the peer. Raises `P2PStoreError` or `OSError`."""
        self._inherited = () if inherited is None else (inherited,)
        self._made_by = os.getpid()
        place = tempfile.gettempdir()
        self.folder = Path(
            tempfile.mkdtemp(prefix="p2pstore-", dir=place if len(place) <= LONGEST_FOLDER else "/tmp")
        )
        self.socket = self.folder / "peer.sock"
        self._log = self.folder / "peer.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._problem: BaseException | None = None
        self.ready: dict[str, Any] = {}
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _start(self, options: Sequence[str]) -> None:
        command = [
            *(sys.executable, "-P", "-m", "mooncake_p2p.tied", str(os.getpid()), "join"),
            *("--state-dir", str(self.folder / "state"), "--socket", str(self.socket)),
            *options,
        ]
        threading.Thread(
            target=self._keep, args=(command,), name="p2pstore-own-peer", daemon=True
        ).start()
        self._started.wait(READY_SECONDS)
        if self._problem is not None:
            raise P2PStoreError(f"no peer could be started: {self._problem}") from self._problem
        if self._process is None or self._process.stdout is None:
            raise DeadlineExceeded(f"no peer was started within {READY_SECONDS:g} s")
        line = read_line(self._process.stdout, time.monotonic() + READY_SECONDS)
        if not line.startswith(b"ready "):
            raise P2PStoreError(f"the peer that setup() started did not get ready: {self.last_words()}")
        self.ready = json.loads(line.removeprefix(b"ready "))

    def _keep(self, command: list[str]) -> None:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    pass_fds=self._inherited,
                    process_group=0,  # Ctrl-C in the terminal is for the program, which then closes it
                )
        except OSError as error:
            self._problem = error
            return
        finally:
            self._started.set()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the process ended without `close`."""
        return self._process is not None and self._process.poll() is not None

    def last_words(self) -> str:
        """The end of what the peer logged, as one line."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return " / ".join(lines[-LOG_LINES:]) or "it logged nothing"

    def close(self) -> None:
        """End the peer, with a farewell to the others, and remove its folder; may be called twice. A forked child
        does nothing: the peer is its parent's."""
        if os.getpid() != self._made_by:
            return
        atexit.unregister(self.close)
        process = self._process
        if process is not None:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ssd_folder(path: str) -> Iterator[tuple[str, int | None]]:
    """Where under `path` a peer may have its SSD tier, and the descriptor of a lock for it to keep: a folder of its own
    for each of the peers that are told one path, the first one that no living peer has. A path that is no directory,
    such as a device, is taken as it is; "" stays "". Raises `ConfigError`."""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        yield path, None
        return
    descriptor = -1
    try:
        for number in range(MAX_FOLDERS):
            folder = Path(path)
            if number or not (folder / FILE_NAME).exists():  # one that an earlier version made
                folder /= f"store-{number}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(
                    folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                descriptor = -1
                continue
            except OSError as error:
                raise ConfigError(
                    f"ssd_offload_path: {folder} cannot be used ({error.strerror}): name a directory that this "
                    "program may write to"
                ) from error
            yield str(folder), descriptor
            return
        raise ConfigError(f"ssd_offload_path: {path} is used by {MAX_FOLDERS} peers already")
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the peer's own copy keeps the lock
