"""Peers as forks of the tests' process: to import everything anew takes each half a minute in the VM."""

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
CLONE_NEWNS: Final = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


class ForkedPeer:
    """A `Started` process that serves as if alone on a machine; the file `machine` holds its boot id, else peers see
    that they share one, and read by shared memory."""

    def __init__(
        self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], machine: Path
    ) -> None:
        outlet, inlet = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(outlet, "rb")
        self.returncode: int | None = None
        arguments = command[command.index("join") :]
        self._process = multiprocessing.get_context("fork").Process(
            target=_live, args=(arguments, environment, inlet, log.fileno(), machine, os.getpid())
        )
        self._process.start()
        os.close(inlet)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `TimeoutExpired`."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("join", timeout or 0.0)
        return status

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, unless it was seen to end."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


def load() -> None:
    """Import what a peer needs, once for all forks."""
    import p2pstore.peer  # noqa: F401  # for the forks


def _live(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    log: int,
    machine: Path,
    parent: int,
) -> None:
    """Be a peer: nothing of the tests' process is left but what it imported."""
    from mooncake_p2p.main import main
    from mooncake_p2p.tied import die_with_parent

    die_with_parent(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, log)):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    os.environ.clear()
    os.environ.update(environment)
    _move_to(machine)
    sys.argv = ["mooncake-p2p", *arguments]
    main()


def _move_to(machine: Path) -> None:
    """See this boot id from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(bytes(machine), BOOT_ID.encode(), None, MS_BIND, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "a mount namespace of its own")
