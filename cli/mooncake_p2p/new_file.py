"""A file that appears under its name when it is complete, and not before."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from mooncake_p2p.exit_errors import CommandFailed

NO_UNNAMED_FILES: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""How file systems and kernels say that they have no files without a name."""
NO_LOCKS: Final = frozenset({errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS})
TAKEOVERS: Final = 8


class NewFile:
    """A new file for `path` that takes that name only with `commit`.

    Until then `path` is untouched and the file has no name at all, so that nothing is left whatever ends
    the process. Where the file system has no such files, it is called `.mooncake-p2p-....part` beside
    `path`; one that a killed process left is replaced by the next. `descriptor` is open for writing. A path
    that exists and is no regular file (a FIFO, /dev/null) has no such choice.
    """

    def __init__(self, path: str) -> None:
        """Raises `CommandFailed` when a file cannot be made there, before any byte moves."""
        self.path = Path(os.path.realpath(path))  # a symbolic link stays; what it names is replaced
        if self.path.is_dir():
            raise CommandFailed(f"{path}: is a directory; name a file in it")
        if path.endswith("/"):
            raise CommandFailed(
                f"{path}: there is no such directory; make it, and name a file in it"
            )
        self._part: Path | None = None
        try:
            self.descriptor = self._create()
        except OSError as error:
            raise CommandFailed(f"cannot write {path}: {error.strerror}") from error
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(self.descriptor, stat.S_IMODE(self.path.stat().st_mode))
        except BaseException:
            self.close()
            raise

    def _create(self) -> int:
        try:
            flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
            return os.open(self.path.parent, flags, 0o666)
        except OSError as error:
            if error.errno not in NO_UNNAMED_FILES or not self.path.parent.is_dir():
                raise
        name = hashlib.blake2b(os.fsencode(self.path.name), digest_size=8).hexdigest()
        self._part = self.path.with_name(f".mooncake-p2p-{name}.part")
        for _ in range(TAKEOVERS):
            descriptor = _create_locked(self._part)
            if descriptor is not None:
                return descriptor
        raise CommandFailed(
            f"another get is writing {self.path}; wait for it, or name another file"
        )

    def resize(self, length: int) -> None:
        """Make the file `length` bytes long and its room on the disk certain."""
        try:
            os.ftruncate(self.descriptor, length)
            if length:
                os.posix_fallocate(self.descriptor, 0, length)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return
            raise CommandFailed(
                f"no room for {length:,} bytes at {self.path}: {error.strerror}"
            ) from error

    def commit(self) -> None:
        """Give the file its name, replacing what had it."""
        if self._part is None:
            try:
                _link(self.descriptor, self.path)
                return
            except FileExistsError:  # a link replaces nothing, a rename does
                self._part = self.path.with_name(f".mooncake-p2p-{secrets.token_hex(8)}.part")
                _link(self.descriptor, self._part)
        os.rename(self._part, self.path)
        self._part = None

    def close(self) -> None:
        """Let go of the file; without `commit` it is gone."""
        if self._part is not None:  # before the lock on it ends
            with contextlib.suppress(FileNotFoundError):
                self._part.unlink()
        os.close(self.descriptor)


def _link(descriptor: int, path: Path) -> None:
    """Give a file without a name one. Raises `FileExistsError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _create_locked(path: Path) -> int | None:
    """A new file that is ours alone, or None when another process is at it. What a process that is gone
    left under this name is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        _remove_leftover(path)
        return None
    if _lock(descriptor) and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)  # taken for a leftover by another, before the lock was on it
    return None


def _remove_leftover(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _lock(descriptor) and os.fstat(descriptor).st_nlink:
            path.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether the file is locked by us now. Where there are no locks it counts as locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True
