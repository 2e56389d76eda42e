"""The local socket as a file: one peer at a path, its mode and group."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from p2pstore.errors import ConfigError
from p2pstore.local.local_protocol import LocalBackend, LocalKind, RequestObserver
from p2pstore.local.server import _Connection, logger
from p2pstore.local.socket_paths import answers, check_socket_path, not_a_socket
from p2pstore.runtime.linux import lock_owner, take_lock
from p2pstore.runtime.trio_streams import Accepting
from p2pstore.wire import Code, encode_failure

MAX_CONNECTIONS: Final = 1024
LOCK_SECONDS: Final = 10.0
"""How long another peer that starts may have the directory's lock: it needs some milliseconds, or a second where a peer
that hangs has a socket."""
LOCK_PAUSE_SECONDS: Final = 0.02


async def listen_at(path: Path, mode: int, group: str | None) -> socket.socket:
    """A listening socket at `path`, after removing one that a dead peer left there.

    Raises `ConfigError` when another peer serves there, another process holds the lock of the directory, or the socket
    cannot be made or given to the group; nothing is left behind then.
    """
    group_id = None if group is None else _group_id(group)
    async with _one_peer_at_a_time(path.parent):
        return await trio.to_thread.run_sync(_listen, path, mode, group, group_id)


def _listen(path: Path, mode: int, group: str | None, group_id: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if answers(path):
                raise ConfigError(
                    f"another peer already serves local clients at {path}: "
                    "give this one another --name or --socket"
                )
            path.unlink()
        elif what := not_a_socket(path):
            raise ConfigError(f"socket: {path} is {what}: remove it, or name a path at which nothing is")
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
        raise _cannot_listen(path, error) from error
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
        os.chown(path, -1, group_id, follow_symlinks=False)
    except PermissionError:
        raise ConfigError(
            f"socket_group: this user may not give the socket to the group {group!r}: be a member of it, or "
            "name another group"
        ) from None


@asynccontextmanager
async def _one_peer_at_a_time(directory: Path) -> AsyncIterator[None]:
    """Two peers that start together must not take each other's fresh socket for a stale one. Any user who can read the
    directory can hold its lock: the wait for it is short, and can be cancelled."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_listen(directory, error) from error
    try:
        give_up_at = trio.current_time() + LOCK_SECONDS
        while not take_lock(descriptor):
            if trio.current_time() >= give_up_at:
                owner = lock_owner(os.fstat(descriptor)) or "another process"
                raise ConfigError(
                    f"socket: {owner} has held the lock (flock) of {directory} for {LOCK_SECONDS:g} s, so that no peer "
                    "can start there: end it, or choose another --socket"
                )
            await trio.sleep(LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _cannot_listen(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen for local clients at {path}: {error.strerror}; choose another --socket"
    )


async def serve_local(
    path: str | os.PathLike[str],
    backend: LocalBackend,
    *,
    observer: RequestObserver | None = None,
    mode: int = 0o600,
    group: str | None = None,
    others_read_only: bool = False,
    # libp2p brings stubs of an older trio, which do not know it
    task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined, unused-ignore]
) -> None:
    """Serve clients at `path` until cancelled; for `nursery.start`, which returns once clients can
    connect. `others_read_only`: processes of other users, root's excepted, may only read. Raises `ConfigError` when
    another peer serves there or the socket cannot be made."""
    where = check_socket_path(os.fspath(path))
    listener = await listen_at(where, mode, group)
    identity = file_identity(where)
    try:
        task_status.started(where)
        await _accept_forever(listener, partial(_Connection, backend, observer, others_read_only))
    finally:
        listener.close()
        if file_identity(where) == identity:  # it was not removed or replaced meanwhile
            where.unlink(missing_ok=True)


async def _accept_forever(
    listener: socket.socket, connection: Callable[[socket.socket], _Connection]
) -> None:
    with contextlib.closing(Accepting(logger, "local clients", _turn_away)) as accepting:
        async with trio.open_nursery() as nursery:
            while True:
                sock, _ = await accepting.accept(listener)
                connections = len(nursery.child_tasks)
                if connections >= MAX_CONNECTIONS:
                    logger.warning("refused a local client: %d are connected", connections)
                    _refuse(
                        sock, f"the peer already serves {MAX_CONNECTIONS:,} local clients: close some"
                    )
                    continue
                nursery.start_soon(connection(sock).run)


def _turn_away(sock: socket.socket, reason: str) -> None:
    _refuse(sock, f"the peer cannot take another client: {reason}".replace("this process", "it"))


def _refuse(sock: socket.socket, text: str) -> None:
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(encode_failure(LocalKind.HELLO, 0, Code.BUSY, text))
