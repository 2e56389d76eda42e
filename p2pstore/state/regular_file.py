"""Opening files that somebody else may have put there, without waiting for anybody. Shell."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from p2pstore.errors import ConfigError

SAFELY: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags of whatever is opened by a path: opening a named pipe would wait for its other end, and a terminal would become
this process's."""


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
    for a link that somebody else may have put there: it could lead to any file of this user."""
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
