"""Commands of `mooncake-p2p` as forks of one process that has imported what they need.

A peer starts in a tenth of the processor time, and tests start hundreds. What the start itself promises (imports,
signals before the first line, terminals) is tested with `subprocess.Popen`, which people's shells are closer to.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

COMMAND: Final = (sys.executable, "-m", "mooncake_p2p")
REQUEST_BYTES: Final = 1 << 18
READY_SECONDS: Final = 90.0


class Forked(subprocess.Popen[bytes]):
    """A `Popen` of `COMMAND`. It ends with the process that started it at the latest."""

    _close_pipe_fds: Any
    _handle_exitstatus: Any
    _waitpid_lock: Any

    def _execute_child(self, *arguments: Any) -> None:
        """Has the server fork the command and report its process id, then its status, in a line each."""
        command, (folder, environment), pipes = arguments[0], arguments[5:7], arguments[10:16]
        assert tuple(command[:3]) == COMMAND, command
        outlet, inlet = os.pipe()
        ends = [pipe if pipe != -1 else number for number, pipe in enumerate((pipes[0], *pipes[3::2]))]
        wanted = command[3:], folder or os.getcwd(), dict(environment or os.environ)
        socket.send_fds(_server(), [pickle.dumps(wanted)], [*ends, inlet])
        os.close(inlet)
        self._reports = os.fdopen(outlet, "rb", buffering=0)
        self.pid = int(self._reports.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        there = select.poll()
        there.register(self._reports, select.POLLIN)
        if not there.poll(0 if flags & os.WNOHANG else None):
            return 0, 0
        with self._reports:
            return self.pid, int(self._reports.readline() or signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                process, status = self._try_wait(os.WNOHANG)
                if process:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def start(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
    """A fork, if it is one of `COMMAND` and of this version, else a process that starts from the beginning."""
    environment = options.get("env") or os.environ
    same = environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    return (Forked if same and tuple(command[:3]) == COMMAND else subprocess.Popen)(command, **options)


def run(*arguments: str, seconds: float, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`subprocess.run` of a command, with its output captured."""
    given = options.pop("input", None)
    pipe = subprocess.PIPE
    with Forked([*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            output, errors = process.communicate(given, seconds)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def ready_document(
    output: IO[bytes] | None, log: Path, seconds: float = READY_SECONDS
) -> dict[str, Any]:
    """The line that a peer prints when it serves; fails with the end of its log when it does not."""
    assert output is not None
    readable, _, _ = select.select([output], [], [], seconds)
    line = output.readline() if readable else b""
    assert line.startswith(b"ready "), f"{log.name}: {log.read_text()[-4000:]}"
    document: dict[str, Any] = json.loads(line.removeprefix(b"ready "))
    return document


def unconfigured(**changes: str) -> dict[str, str]:
    """This process's environment without the settings of a peer, but with these changes."""
    return {key: value for key, value in os.environ.items() if "MOONCAKE_P2P_" not in key} | changes


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that forks; its end ends that process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-m", "tests.forked", str(there.fileno())]
        root = Path(__file__).parents[1]
        process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()]
        )
        process.returncode = 0  # it is not waited for
    atexit.register(here.close)
    return here


def _serve(requests: socket.socket) -> None:
    """Fork for each request; returns in each command's process."""
    from mooncake_p2p.manual import COMMANDS
    from mooncake_p2p.options import BLAS_THREADS

    os.environ[BLAS_THREADS] = "1"  # else a fork would lack threads that libraries count on
    import_module("p2pstore.peer")
    for module, _ in COMMANDS.values():
        import_module(f"mooncake_p2p.commands.{module}")
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, ends, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 4)
        if not request:
            sys.exit()
        if not os.fork():
            requests.close()
            _become(ends, *pickle.loads(request))
            return
        for end in ends:
            os.close(end)


def _become(ends: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Fork the command, and report on it from a process between."""
    from mooncake_p2p.tied import die_with_parent

    *standard, reports = ends
    die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    between = os.getpid()
    child = os.fork()
    if child:
        os.write(reports, b"%d\n" % child)
        for end in (*standard, 0, 1, 2):
            os.close(end)
        os.write(reports, b"%d\n" % os.waitpid(child, 0)[1])
        os._exit(0)
    die_with_parent(between)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, end in enumerate(standard):
        os.dup2(end, number)
    for end in ends:
        os.close(end)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["mooncake-p2p", *arguments]


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from mooncake_p2p.main import main

    main()
