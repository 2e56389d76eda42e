"""Where the local sockets are, and which one to talk to."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2pstore.errors import AmbiguousLocalPeer, ConfigError, NoLocalPeer
from p2pstore.runtime.linux import shortage

SOCKET_VARIABLE: Final = "MOONCAKE_P2P_SOCKET"
CHOICES: Final = f"-p NAME, --socket, {SOCKET_VARIABLE} or connect(socket=...)"
"""How people choose a peer: on the command line, for all programs, in Python."""
DIRECTORY_NAME: Final = "mooncake-p2p"
SYSTEM_DIRECTORY: Final = Path("/run") / DIRECTORY_NAME
DIRECTORY_MODE: Final = 0o755
MAX_PATH_BYTES: Final = 107
"""Size of a socket address's path (sun_path) less its final zero byte."""
PROBE_SECONDS: Final = 1.0


def socket_directories(*, shared: bool = False) -> list[Path]:
    """Where sockets may be, best first: of the session, of the system, of this user. `shared` puts places that
    others cannot get into, such as a session's runtime directory, behind the others."""
    directories = [SYSTEM_DIRECTORY, own_directory()]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        directories.insert(0, Path(runtime) / DIRECTORY_NAME)
    if shared:
        directories.sort(key=lambda directory: not _others_may_enter(directory.parent))
    return directories


def own_directory() -> Path:
    """A place that every user has, for as long as the machine runs."""
    return Path(tempfile.gettempdir()) / f"{DIRECTORY_NAME}-{os.getuid()}"


def default_socket_path(name: str, *, shared: bool = False) -> Path:
    """Where a peer of this name listens; makes the directory, which others may enter but not write to: who
    may connect is for the socket's own mode to say. `shared` is for one that lets others connect.

    Raises `ConfigError` when no directory can be made, or every path is too long for a socket.
    """
    reasons = []
    for directory in socket_directories(shared=shared):
        try:
            _make(directory)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            continue
        path = directory / f"{name}.sock"
        if reason := distrust(directory):
            reasons.append(f"{directory}: {reason}")
        elif not os.access(directory, os.W_OK | os.X_OK):
            reasons.append(f"{directory}: not writable")
        elif len(os.fsencode(path)) > MAX_PATH_BYTES:
            reasons.append(f"{path}: longer than {MAX_PATH_BYTES} bytes")
        else:
            return path
    raise ConfigError(
        f"there is no directory for the local socket ({'; '.join(reasons)}): name one with "
        "--socket, or PeerConfig(socket=...)"
    )


def _make(directory: Path) -> None:
    """Make the directory for sockets, or leave the one that is there as it is, but for earlier versions'."""
    try:
        directory.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        status = os.lstat(directory)
        closed = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
        if not (closed and status.st_uid == os.getuid()):
            return
    directory.chmod(DIRECTORY_MODE)  # whatever the umask


def _others_may_enter(directory: Path) -> bool:
    """Whether every user can get to what is in this directory."""
    try:
        return all(each.stat().st_mode & stat.S_IXOTH for each in (directory, *directory.parents))
    except OSError:
        return False


def unreachable_by_others(path: Path) -> Path | None:
    """The directory that keeps other users from a socket, if any."""
    for directory in reversed(path.absolute().parents):
        if not directory.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP):
            return directory
    return None


def distrust(directory: Path) -> str | None:
    """Why another user could have put a socket into this directory, or None.

    It must be this user's or root's, or stand where only root decides whose it is, such as `/run`; and no user
    but its owner may write to it.
    """
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid not in (os.getuid(), 0) and not _appointed_by_root(directory):
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is open to other users"
    return None


def _appointed_by_root(directory: Path) -> bool:
    parent = os.lstat(directory.parent)
    return parent.st_uid == 0 and not parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def check_socket_path(path: Path | str) -> Path:
    """The path. Raises `ConfigError` when it is longer than a socket's address can be."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket's path {str(path)!r} is longer than {MAX_PATH_BYTES} bytes: "
            f"choose a shorter one with {CHOICES}"
        )
    return Path(path)


def find_socket(explicit: str | os.PathLike[str] | None = None) -> Path:
    """The socket of the local peer: `explicit`, else `MOONCAKE_P2P_SOCKET`, else the only live one.

    Raises `NoLocalPeer` when none answers and `AmbiguousLocalPeer` when several do. A path that was
    named is taken as it is: connecting to it says what is wrong.
    """
    if explicit is not None:
        return check_socket_path(os.fspath(explicit))
    if named := os.environ.get(SOCKET_VARIABLE):
        return check_socket_path(named)
    live = live_sockets()
    if not live:
        searched = ", ".join(map(str, socket_directories()))
        raise NoLocalPeer(
            f"no peer runs on this machine (looked in {searched}): start one with "
            f"`mooncake-p2p join`, or name its socket with {CHOICES}"
        )
    if len(live) > 1:
        raise AmbiguousLocalPeer(
            f"several peers run on this machine ({', '.join(map(str, live))}): choose one with {CHOICES}"
        )
    return live[0]


def socket_of(name: str) -> Path:
    """The socket of the peer of this machine with this name. Raises `NoLocalPeer` naming those that run."""
    live = live_sockets()
    for path in live:
        if path.stem == name:
            return path
    running = ", ".join(path.stem for path in live)
    raise NoLocalPeer(
        f"no peer called {name!r} runs on this machine: "
        + (f"these do: {running}" if running else "none does; `mooncake-p2p join` starts one")
        + "; --socket names the socket of a peer elsewhere"
    )


def live_sockets() -> list[Path]:
    """The sockets in the usual places at which a process accepts connections."""
    return [path for path in _candidates() if answers(path)]


def _candidates() -> Iterator[Path]:
    for directory in socket_directories():
        with contextlib.suppress(OSError):
            if distrust(directory) is None:
                owners = (os.getuid(), 0, os.lstat(directory).st_uid)
                for path in sorted(directory.glob("*.sock")):
                    with contextlib.suppress(FileNotFoundError):  # its peer ends just now
                        if os.lstat(path).st_uid in owners:
                            yield path


def not_a_socket(path: Path | str) -> str:
    """Name what is no socket at `path`; empty for a socket, and where nothing is, or can be seen."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISSOCK(mode) else "a directory" if stat.S_ISDIR(mode) else "a file"


def answers(path: Path | str) -> bool:
    """Whether a process accepts connections at `path`; a file that a dead peer left does not. Raises `NoLocalPeer` when
    this process cannot look."""
    try:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise NoLocalPeer(f"this process cannot connect to any peer: {shortage(error)}") from error
    with probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (BlockingIOError, TimeoutError):
            return True  # alive, with a full backlog
        except OSError:
            return False
        return True
