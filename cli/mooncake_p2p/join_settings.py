"""Settings of `join` and `config show` from options, environment, file and invite; and `join --detach`."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import typer

from mooncake_p2p.options import connected
from mooncake_p2p.output import CommandFailed, ExitCode, Interrupts, progress, remark
from p2pstore.errors import P2PStoreError
from p2pstore.runtime.linux import read_line

if TYPE_CHECKING:
    from p2pstore.access.invite import Invite
    from p2pstore.settings import Settings

CONFIG_VARIABLE: Final = "MOONCAKE_P2P_CONFIG"
INVITE_VARIABLE: Final = "MOONCAKE_P2P_INVITE"
MAX_LINE: Final = 64 * 1024
DETACHED_VARIABLE: Final = "MOONCAKE_P2P_DETACHED"
"""Set for the process that is to serve on its own."""
START_SECONDS: Final = 60.0
"""Until a peer serves, beside the time it may take to join."""
STOP_SECONDS: Final = 5.0


def gather(given: Mapping[str, Any]) -> tuple[Settings, Invite | None]:
    """The settings with their origins, name and state directory among them, and the invite that was given.

    `given` holds `join`'s options, without those that were not given. Raises `ConfigError` naming origin,
    value and what is allowed.
    """
    from p2pstore.access.invite import parse_invite
    from p2pstore.settings import load_settings, refuse_empty
    from p2pstore.state.places import settle

    for name, variable in (("config", CONFIG_VARIABLE), ("invite", INVITE_VARIABLE)):
        refuse_empty(given.get(name), f"--{name}")
        refuse_empty(os.environ.get(variable), variable)
    flags = {name: value for name, value in given.items() if name not in ("config", "invite")}
    toml_path = given.get("config") or os.environ.get(CONFIG_VARIABLE)
    settings = load_settings(toml_path, os.environ, flags)
    line = given.get("invite") or os.environ.get(INVITE_VARIABLE)
    invite = parse_invite(read_line_of_invite() if line == "-" else line) if line else None
    return settle(settings, invite), invite


_from_stdin: list[str] = []


def read_line_of_invite() -> str:
    """The first 64 KiB of stdin; the same text on later calls."""
    if not _from_stdin:
        _from_stdin.append(sys.stdin.read(MAX_LINE))
    return _from_stdin[0]


@contextmanager
def spelled_as_given(settings: Settings) -> Iterator[None]:
    """Errors of the peer name a setting; people named an option, a variable or a line of a file."""
    from p2pstore.errors import AuthenticationFailed, ConfigError
    from p2pstore.settings import option_of

    try:
        yield
    except AuthenticationFailed as error:
        kept = {n: o for n, o in settings.origins.items() if o.startswith("the invite kept in")}
        if not kept:
            raise
        options = ", ".join(map(option_of, sorted(kept)))
        raise AuthenticationFailed(
            f"{error}; {next(iter(kept.values()))} says {options}: give other ones, or another --invite"
        ) from None
    except ConfigError as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in type(settings.config()).__struct_fields__:
            raise
        origin = settings.origins.get(name, "default")
        said = option_of(name) if origin.startswith("default") else origin
        raise ConfigError(f"{said}: {rest}") from None


def refuse_name_of_another(settings: Settings) -> None:
    """Raise `ConfigError` when a peer that runs has the name that was given. Say so on stderr when it has this host's
    name, so that this peer takes another one."""
    from p2pstore.state.places import HOST_NAME, chose_name, name_in_use

    problem = name_in_use(settings)
    if problem is not None:
        raise problem
    if chose_name(settings) and settings.origins["name"] != HOST_NAME:
        remark(
            f"a peer with this host's name runs here already; this one is called {settings.values['name']}, with an "
            "identity of its own"
        )


def refuse_socket_of_another(settings: Settings) -> None:
    """Raise `ConfigError` when environment or file name the socket of a peer that runs: a client's setting."""
    from p2pstore.errors import ConfigError
    from p2pstore.local.socket_paths import answers

    origin, path = settings.origins.get("socket"), settings.values.get("socket")
    if path and origin != "--socket" and answers(path):
        raise ConfigError(
            f"another peer already serves local clients at {path}, which {origin} names: unset it, or give "
            "this peer a --socket of its own"
        )


def ready_for_people(ready: Mapping[str, Any]) -> str:
    """The news that a peer serves, its addresses, and what to try: for a terminal."""
    from p2pstore.addresses import is_wildcard, split_address

    page = "none; `join --http 9946` has one"
    if ready["metrics"]:
        host, port = split_address(ready["metrics"], "metrics")
        host = "127.0.0.1" if is_wildcard(host) else f"[{host}]" if ":" in host else host
        page = f"http://{host}:{port}/"
    others = ready["peers"] - 1
    with_whom = f"{others:,} other{'s' if others > 1 else ''}" if others else "no other peer yet"
    choice = _choice_of(ready["socket"])
    return f"""\
peer {ready["name"]} serves, with {with_whom}
  programs here  {ready["socket"]}
  other peers    {ready["control"]}
  bulk data      {", ".join(ready["data"])}
  status page    {page}
try in another terminal:
  echo hello | mooncake-p2p put greeting{choice}
  mooncake-p2p get greeting -o -{choice}
  mooncake-p2p stats --watch{choice}"""


def _choice_of(socket: str) -> str:
    """The option that names the peer of this socket; empty where commands find it by themselves."""
    from p2pstore.local.socket_paths import SOCKET_VARIABLE, live_sockets

    live = live_sockets()
    path = Path(socket)
    if os.environ.get(SOCKET_VARIABLE) == socket or live == [path]:
        return ""
    return f" -p {shlex.quote(path.stem)}" if path in live else f" --socket {shlex.quote(socket)}"


def start_detached(given: Mapping[str, Any], for_people: bool) -> None:
    """Start `join` with these options in the background, and print its `ready` line, or the same for people.
    Says at once for which bootstrap peers it waits and how long, and at the end why none was joined.

    Ends with the peer's own complaint and exit status when it does not get ready. Ctrl-C meanwhile ends the
    peer as well.
    """
    settings, _ = gather(given)
    refuse_name_of_another(settings)
    config = settings.checked()
    deadline = time.monotonic() + START_SECONDS + config.join_timeout
    wanted = ", ".join(config.bootstrap)
    if wanted:
        remark(f"joining by {wanted}: waiting for at most {config.join_timeout:g} s (--join-timeout)")
    line_of_invite = read_line_of_invite() if given.get("invite") == "-" else given.get("invite")
    with Interrupts() as interrupts, tempfile.TemporaryFile() as complaints:
        process: subprocess.Popen[bytes] | None = None
        try:
            with interrupts.allowed():
                with interrupts.held():  # else a signal could leave the new process behind
                    process = _start(given, line_of_invite, complaints)
                with progress(f"joining by {wanted}" if wanted else "starting"):
                    line = _wait_until_ready(process, complaints, deadline)
        except BaseException:
            if process is not None:
                _end(process)
            raise
    ready = json.loads(line.removeprefix("ready "))
    sys.stdout.write(f"{ready_for_people(ready)}\n" if for_people else line)
    socket = ready["socket"]
    if wanted and not ready["joined"]:
        remark(f"warning: {_why_alone(socket, config.join_timeout)}")
    remark(
        f"the peer runs as process {process.pid}; "
        f"`mooncake-p2p leave --socket {shlex.quote(socket)}` ends it"
    )


def _why_alone(socket: str, seconds: float) -> str:
    text = f"the peer joined no other within {seconds:g} s"
    with contextlib.suppress(P2PStoreError), connected(socket) as client:
        for problem in client.statistics(cluster=False)["peer"]["problems"]:
            if problem["name"] == "alone":
                return f"{text}: {problem['cause']}. It keeps trying; {problem['cure']}"
    return f"{text}, and keeps trying"


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
            yield from (f"{option}={one}" for one in (value if isinstance(value, list) else [value]))


def _wait_until_ready(process: subprocess.Popen[bytes], complaints: IO[bytes], deadline: float) -> str:
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
        f"the peer was ended by {signal.Signals(-status).name}" if status else "the peer ended at once"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
