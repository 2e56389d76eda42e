"""The local socket as a file: one peer at a path, its mode and group."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.local.paths import answers

MAX_CONNECTIONS: Final = 1024


def listen_at(path: Path, mode: int, group: str | None) -> socket.socket:
    """A listening socket at `path`, after removing one that a dead peer left there.

    Raises `ConfigError` when another peer serves there, or the socket cannot be made, or not given to the
    group; nothing is left behind then.
    """
    group_id = None if group is None else _group_id(group)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _one_peer_at_a_time(path.parent):
            if path.is_socket():
                if answers(path):
                    raise ConfigError(
                        f"another peer already serves local clients at {path}: "
                        "give this one another --name or --socket"
                    )
                path.unlink()
            os.fchmod(listener.fileno(), mode)  # bind makes the file with this mode, less the umask
            listener.bind(os.fspath(path))
            try:
                path.chmod(mode)
                if group_id is not None:
                    _give_to(path, group_id, group)
                listener.listen(MAX_CONNECTIONS)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen for local clients at {path}: {error.strerror}; choose another --socket"
        ) from error
    except BaseException:
        listener.close()
        raise
    return listener


def file_identity(path: Path) -> tuple[int, int] | None:
    """Which file is at `path`, if any."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: there is no group {group!r} on this machine") from None


def _give_to(path: Path, group_id: int, group: str | None) -> None:
    try:
        os.chown(path, -1, group_id)
    except PermissionError:
        raise ConfigError(
            f"socket_group: this user may not give the socket to the group {group!r}: be a member of it, or "
            "name another group"
        ) from None


@contextlib.contextmanager
def _one_peer_at_a_time(directory: Path) -> Iterator[None]:
    """Two peers that start together must not take each other's fresh socket for a stale one."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
