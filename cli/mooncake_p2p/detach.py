"""`join --detach`: start a peer in a session of its own, and stay until it serves."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import typer

from mooncake_p2p.exit_errors import CommandFailed, ExitCode
from mooncake_p2p.interrupts import Interrupts
from mooncake_p2p.join_settings import gather, read_line_of_invite, refuse_name_of_another
from mooncake_p2p.options import connected
from mooncake_p2p.output import progress, remark
from p2pstore.errors import P2PStoreError
from p2pstore.runtime.linux import read_line

DETACHED_VARIABLE: Final = "MOONCAKE_P2P_DETACHED"
"""Set for the process that is to serve on its own."""
START_SECONDS: Final = 60.0
"""Until a peer serves, beside the time it may take to join."""
STOP_SECONDS: Final = 5.0


def start_detached(given: Mapping[str, Any]) -> None:
    """Start `join` with these options in the background, and print its `ready` line. Says at once for which bootstrap
    peers it waits and how long, and at the end why none was joined.

    Ends with the peer's own complaint and exit status when it does not get ready. Ctrl-C meanwhile ends the
    peer as well.
    """
    settings, _ = gather(given)
    refuse_name_of_another(settings)
    config = settings.checked()
    deadline = time.monotonic() + START_SECONDS + config.join_timeout
    wanted = ", ".join(config.bootstrap)
    if wanted:
        remark(
            f"joining by {wanted}: waiting for at most {config.join_timeout:g} s (--join-timeout)"
        )
    line_of_invite = read_line_of_invite() if given.get("invite") == "-" else given.get("invite")
    with Interrupts() as interrupts, tempfile.TemporaryFile() as complaints:
        process: subprocess.Popen[bytes] | None = None
        try:
            with interrupts.allowed():
                with interrupts.held():  # no moment at which a process runs that nobody knows of
                    process = _start(given, line_of_invite, complaints)
                with progress(f"joining by {wanted}" if wanted else "starting"):
                    line = _wait_until_ready(process, complaints, deadline)
        except BaseException:
            if process is not None:
                _end(process)
            raise
    sys.stdout.write(line)
    ready = json.loads(line.removeprefix("ready "))
    socket = ready["socket"]
    if wanted and not ready["joined"]:
        remark(f"warning: {_why_alone(socket, config.join_timeout)}")
    remark(
        f"the peer runs as process {process.pid}; "
        f"`mooncake-p2p leave --socket {shlex.quote(socket)}` ends it"
    )


def _why_alone(socket: str, seconds: float) -> str:
    """Why a peer that serves has joined nobody, as it says itself."""
    text = f"the peer joined nobody within {seconds:g} s"
    with contextlib.suppress(P2PStoreError), connected(socket) as client:
        for problem in client.statistics(cluster=False)["peer"]["problems"]:
            if problem["name"] == "alone":
                return f"{text}: {problem['cause']}. It tries on; {problem['cure']}"
    return f"{text}, and tries on"


def _start(
    given: Mapping[str, Any], line_of_invite: str | None, complaints: IO[bytes]
) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as invite:  # on stdin, where no other user sees it
        invite.write((line_of_invite or "").encode())
        invite.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "mooncake_p2p", "join", *_arguments(given)],
            stdin=invite,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**os.environ, DETACHED_VARIABLE: "1"},
            start_new_session=True,
            preexec_fn=_ignore_hangups,
        )


def _ignore_hangups() -> None:
    """In the new process, until it takes the signal: so it cannot come too early. No terminal is there to go."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _arguments(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if name == "invite":
            yield f"{option}=-"
        elif isinstance(value, bool):
            yield option
        else:
            yield from (
                f"{option}={one}" for one in (value if isinstance(value, list) else [value])
            )


def _wait_until_ready(
    process: subprocess.Popen[bytes], complaints: IO[bytes], deadline: float
) -> str:
    assert process.stdout is not None
    with process.stdout:
        line = read_line(process.stdout, deadline)
    if line.startswith(b"ready "):
        return line.decode()
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CommandFailed(
            "the peer did not get ready in time: see its log", ExitCode.DEADLINE
        ) from None
    complaints.seek(0)
    sys.stderr.flush()
    shutil.copyfileobj(complaints, sys.stderr.buffer)
    sys.stderr.flush()
    if status > 0:
        raise typer.Exit(status)
    raise CommandFailed(
        f"the peer was ended by {signal.Signals(-status).name}"
        if status
        else "the peer ended at once"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
