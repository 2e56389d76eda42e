"""A directory whose files this process reads and replaces by name, though others may have planted something there.
Shell.

Every access goes by the directory's descriptor, and a link is never followed: another user who can write to the
directory could point it at a file of this process's user. Opening never waits, as it would for a named pipe.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, TypeVar

import msgspec

from p2pstore.access.keyring import KeyRing, parse_cluster_keys, reader_keys
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import format_peer_id
from p2pstore.runtime.linux import is_shortage, shortage, user_name

if TYPE_CHECKING:
    from p2pstore.gossip.links.identity import Identity

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """An open directory. Methods take the names of its files; they raise `OSError`, and `ConfigError` for what is not a
    regular file. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _DIRECTORY)

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> os.stat_result:
        """Owner and permissions of the directory."""
        return os.fstat(self._descriptor)

    def owner(self, name: str) -> int:
        """The user of a file, or of a link itself."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_uid

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of a regular file."""
        try:
            descriptor = os.open(name, flags | SAFELY | os.O_NOFOLLOW, mode, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise not_regular(self.path / name, "link") from None
            if error.errno in (errno.EISDIR, errno.ENXIO):  # opened for writing
                what = "directory" if error.errno == errno.EISDIR else "pipe or a device"
                raise not_regular(self.path / name, what) from None
            raise
        try:
            check_regular(descriptor, self.path / name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, limit_bytes: int = -1) -> bytes:
        """The content, or its first bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(limit_bytes)

    def replace(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Make `data` the content of a file, new or not, durably; or leave the file as it was."""
        temporary = f"{name}.new"
        try:
            self._write(temporary, data, mode)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                self._unlink(temporary)
            raise

    def create_once(self, name: str, data: bytes) -> None:
        """Make a file of this content (0600), durably and at once, unless there is one already."""
        temporary = f"{name}.{secrets.token_hex(8)}.new"
        here = {"src_dir_fd": self._descriptor, "dst_dir_fd": self._descriptor}
        try:
            self._write(temporary, data)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, name, follow_symlinks=False, **here)
            os.fsync(self._descriptor)
        finally:
            self.remove(temporary)

    def _write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        with os.fdopen(self.create(name, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def create(self, name: str, mode: int = 0o600) -> int:
        """A descriptor of a new file, to be written to. Removes an earlier file of that name: a killed process left it,
        or another user planted it."""
        self.remove(name)
        return self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._unlink(name)

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """A directory in this one; made (0700) if need be, where that is wanted."""
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        inner = Folder.__new__(Folder)
        inner.path = self.path / name
        inner._descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        return inner

    def names(self) -> list[str]:
        """All there is, those first that were changed first."""
        with os.scandir(self._descriptor) as found:
            entries = [(each.stat(follow_symlinks=False).st_mtime_ns, each.name) for each in found]
        return [name for _, name in sorted(entries)]

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except IsADirectoryError:  # a directory of that name is put aside
            aside = f"{name}.{secrets.token_hex(4)}"
            os.rename(name, aside, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` the content of a file, new or not, durably; or leave the file as it was. A link is replaced, not
    followed. Raises `OSError`, and `ConfigError` for what is not a regular file."""
    with Folder(path.parent) as folder:
        folder.replace(path.name, data, 0o666)


def refuse_folder_of_another(folder: Folder) -> None:
    """Raise `ConfigError` when a user other than this process's and root owns it, and could change it."""
    _refuse_owner(folder.status().st_uid, folder.path, "could exchange what is in it")


def refuse_files_of_others(folder: Folder) -> None:
    """Raise `ConfigError` when something in the directory belongs to such a user, who may have planted it."""
    for name in folder.names():
        _refuse_owner(folder.owner(name), folder.path / name, "may have planted it")


def _refuse_owner(owner: int, path: Path, what: str) -> None:
    own = os.geteuid()
    if owner not in (own, 0):
        raise ConfigError(
            f"state_dir: {path} belongs to {user_name(owner)}, who {what}, while this process runs as "
            f"{user_name(own)}: run it as that user, or `chown {own} {path}`, or choose another directory"
        )


SAFELY: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""For everything opened by a path: a named pipe would wait, and a terminal would become this process's."""


def open_regular_file(path: Path) -> BinaryIO:
    """The file, open for reading. Raises `OSError`, and `ConfigError` for what is not a regular file: opening a
    named pipe waits for a writer, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | SAFELY)
    try:
        check_regular(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: Path) -> bytes:
    """The file's content; raises as `open_regular_file`."""
    with open_regular_file(path) as file:
        return file.read()


def check_regular(descriptor: int, path: Path) -> None:
    """Raise `ConfigError` when an open file is not a regular one."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        what = "directory" if stat.S_ISDIR(mode) else "pipe or a device"
        raise not_regular(path, what)


def not_regular(path: Path, what: str) -> ConfigError:
    """The error for something else at the path of a file."""
    return ConfigError(f"{path} is not a regular file but a {what}: put a file in its place")


def open_log_file(path: Path) -> int:
    """A descriptor that appends to the file at `path`, which is made if need be. Raises `OSError`, and `ConfigError`
    for a link that another user may have put there: it could lead to any file of this user."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | SAFELY
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError:
        if not path.is_symlink():
            raise
        if not _is_trusted_link(path):
            raise ConfigError(
                f"{path} is a link that another user may have put there: name the file itself, or one in a directory "
                "that only this user can write to"
            ) from None
        descriptor = os.open(path, flags, 0o644)
    return descriptor


def _is_trusted_link(path: Path) -> bool:
    """Whether only this user and root could have put a link there, and can exchange it."""
    trusted = (os.geteuid(), 0)
    link, folder = os.lstat(path), os.stat(path.parent)
    others = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not folder.st_mode & stat.S_ISVTX
    return link.st_uid in trusted and folder.st_uid in trusted and not others


logger = logging.getLogger("p2pstore.state.state_directory")

T = TypeVar("T")

MAX_DAMAGE: Final = 20


class _FormatOnly(msgspec.Struct):
    format: int


class StateFiles:
    """The files of an open state directory: JSON, identity, cluster keys; and damage that is found in them. Methods
    raise `OSError` and `ConfigError` as `StateDirectory` does."""

    def __init__(self, folder: Folder) -> None:
        self.path = folder.path
        self.folder = folder
        self.damage: list[str] = []
        """Damage found so far, and its consequences; without paths; at most 20 texts."""

    def note(self, what: str, error: Exception | None = None) -> None:
        """Note damage in the log and for this peer's problems."""
        logger.error(
            "the state directory %s is damaged: %s%s",
            self.path,
            what,
            f" ({error})" if error is not None else "",
            extra={"event": "state_damaged"},
        )
        if len(self.damage) < MAX_DAMAGE:
            self.damage.append(what)

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the file's content, or leave the file as it was."""
        try:
            self.folder.replace(name, data)
        except OSError as error:
            fail(self.path / name, "written", error)

    def content(self, name: str) -> bytes | None:
        """The file's bytes; None when it cannot be read."""
        try:
            return self.folder.read(name)
        except (OSError, ConfigError):
            return None

    def load_json(self, name: str, kind: type[T]) -> T | None:
        """The file's content decoded; None when there is no file."""
        path = self.path / name
        try:
            data = self.folder.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            fail(path, "read", error)
        try:
            check_format(path, msgspec.json.decode(data, type=_FormatOnly).format)
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise damaged(path, error) from None


def fail(path: Path, what: str, error: OSError) -> NoReturn:
    """Raise an `OSError` that says what could not be done and what to do."""
    advice = {
        errno.ENOSPC: "free some space on that disk",
        errno.EDQUOT: "free some space, or raise this user's quota",
        errno.EROFS: "the disk is mounted read-only",
        errno.EACCES: "give this user access, or choose another --state-dir",
    }.get(error.errno or 0, shortage(error) if is_shortage(error) else "check that disk")
    raise OSError(
        error.errno, f"{path} cannot be {what}: {os.strerror(error.errno or 0)}; {advice}"
    ) from None


def damaged(path: Path, error: Exception) -> ConfigError:
    """The error of a file that cannot be decoded."""
    return ConfigError(
        f"{path} is damaged ({error}): move it away; the peer then starts without what it held"
    )


FORMAT: Final = 1


def check_format(path: Path, version: int) -> None:
    if version > FORMAT:
        raise ConfigError(
            f"{path} has format {version}, this program knows up to {FORMAT}: upgrade it, or use "
            "another --state-dir"
        )
    if version < 1:
        raise ConfigError(f"{path} has format {version}, which never existed: move it away")


IDENTITY_HEADER: Final = "p2pstore identity "
_MAX_KEY_FILE_BYTES: Final = 64 * 1024


def ephemeral() -> Identity:
    """A new identity that is kept nowhere: for a peer without a state directory."""
    from p2pstore.gossip.links.identity import (  # late: it needs the peer's libraries
        SEED_BYTES,
        Identity,
    )

    return Identity(secrets.token_bytes(SEED_BYTES))


def load_cluster_key_file(path: str | os.PathLike[str]) -> KeyRing:
    """The cluster's keys: one in hexadecimal a line, the first one proves, `#` comments.

    Raises `ConfigError` when the file cannot be read, may be read by others, or holds something else.
    """
    where = Path(path)
    try:
        text = read_private(where, "is the cluster's key")
    except FileNotFoundError:
        raise ConfigError(
            f"the cluster key file {where} does not exist; `mooncake-p2p keygen {where}` makes one"
        ) from None
    return parse_cluster_keys(text, str(where))


def load_token_file(path: str | os.PathLike[str]) -> str:
    """The token in a file of its own. Raises `ConfigError` when the file cannot be read, may be read by others, or
    holds no line of 16 to 1,024 printable characters."""
    where = Path(path)
    try:
        token = read_private(where, "holds a token").strip()
    except FileNotFoundError:
        raise ConfigError(f"the token file {where} does not exist") from None
    if not 16 <= len(token) <= 1024 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where}: one line of 16 to 1,024 printable ASCII characters is wanted")
    return token


def readers_key_file(path: str | os.PathLike[str], namespaces: Sequence[str] = ()) -> str:
    """The text of the key file for readers, or for writers of `namespaces`, that goes with a cluster key file. Raises
    as `load_cluster_key_file` and `reader_keys`."""
    from p2pstore.gossip.links.identity import Identity

    ring = load_cluster_key_file(path)
    return reader_keys(ring, lambda seed: format_peer_id(Identity(seed).peer_id), namespaces)


def read_private(path: Path, what: str, folder: Folder | None = None) -> str:
    """The text of a file with a secret in it, which lies in that folder or where a user said. Raises
    `FileNotFoundError`, and `ConfigError` for the rest."""
    try:
        with (
            open_regular_file(path)
            if folder is None
            else os.fdopen(folder.open(path.name, os.O_RDONLY), "rb")
        ) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path} {what}, but others may read it (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"run `chmod 600 {path}`; if it was exposed, make a new one"
                )
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{path} is too long to be a key file")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


def parse_identity(path: Path, text: str) -> bytes:
    from p2pstore.gossip.links.identity import SEED_BYTES

    header, _, rest = text.partition("\n")
    version = header.removeprefix(IDENTITY_HEADER)
    if header.startswith(IDENTITY_HEADER) and version.isdigit():
        check_format(path, int(version))
        with contextlib.suppress(ValueError):
            seed = bytes.fromhex(rest.strip())
            if len(seed) == SEED_BYTES:
                return seed
    raise ConfigError(
        f'{path} is not an identity ("{IDENTITY_HEADER}{FORMAT}" and 64 hexadecimal digits): restore '
        "it from a backup, or move it away and this peer starts as a new one"
    )
