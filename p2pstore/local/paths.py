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

SOCKET_VARIABLE: Final = "MOONCAKE_P2P_SOCKET"
DIRECTORY_NAME: Final = "mooncake-p2p"
SYSTEM_DIRECTORY: Final = Path("/run") / DIRECTORY_NAME
MAX_PATH_BYTES: Final = 107
"""What fits into `sockaddr_un.sun_path` with its final zero byte."""
PROBE_SECONDS: Final = 1.0


def socket_directories() -> list[Path]:
    """Where sockets may be, best first: of the session, of the system, of this user."""
    directories = [SYSTEM_DIRECTORY, _own_directory()]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        directories.insert(0, Path(runtime) / DIRECTORY_NAME)
    return directories


def _own_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"{DIRECTORY_NAME}-{os.getuid()}"


def default_socket_path(name: str) -> Path:
    """Where a peer of this name listens; makes the directory (mode 0700).

    Raises `ConfigError` when no directory can be made, or the path is too long for a socket.
    """
    reasons = []
    for directory in socket_directories():
        try:
            directory.mkdir(mode=0o700, parents=False, exist_ok=True)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            continue
        if reason := _distrust(directory):
            reasons.append(f"{directory}: {reason}")
        elif not os.access(directory, os.W_OK | os.X_OK):
            reasons.append(f"{directory}: not writable")
        else:
            return check_socket_path(directory / f"{name}.sock")
    raise ConfigError(
        f"there is no directory for the local socket ({'; '.join(reasons)}): name one with --socket"
    )


def _distrust(directory: Path) -> str | None:
    """Why somebody else could have put a socket into this directory, or None."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        return "not a directory"
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    if directory == _own_directory() and status.st_mode & 0o077:
        return "open to other users"
    return None


def check_socket_path(path: Path | str) -> Path:
    """The path. Raises `ConfigError` when it is longer than a socket's address can be."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket's path {str(path)!r} is longer than {MAX_PATH_BYTES} bytes: "
            "choose a shorter one with --socket"
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
    live = [path for path in _candidates() if answers(path)]
    if not live:
        searched = ", ".join(map(str, socket_directories()))
        raise NoLocalPeer(
            f"no peer runs on this machine (looked in {searched}): start one with "
            f"`mooncake-p2p join`, or name its socket with --socket or {SOCKET_VARIABLE}"
        )
    if len(live) > 1:
        raise AmbiguousLocalPeer(
            f"several peers run on this machine ({', '.join(map(str, live))}): choose one with "
            f"--socket or {SOCKET_VARIABLE}"
        )
    return live[0]


def _candidates() -> Iterator[Path]:
    for directory in socket_directories():
        with contextlib.suppress(OSError):
            if _distrust(directory) is None:
                yield from sorted(directory.glob("*.sock"))


def answers(path: Path | str) -> bool:
    """Whether somebody accepts connections at `path`; a file that a dead peer left does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (BlockingIOError, TimeoutError):
            return True  # alive, with a full backlog
        except OSError:
            return False
        return True
