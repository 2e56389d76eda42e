"""Values between files, pipes and memory, copied as seldom as possible; files that appear when complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mooncake_p2p.output import CommandFailed, ExitCode, progress
from p2pstore.objects import MAX_OBJECT_BYTES, MIB, check_object_length
from p2pstore.runtime.linux import is_ready, take_lock

PIECE_BYTES: Final = MIB

SMALL_PAGES_BYTES: Final = 2 * MIB

Advance = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""
NO_UNNAMED_FILES: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""How file systems and kernels say that they have no files without a name."""
NO_LOCKS: Final = frozenset({errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS})
TAKEOVERS: Final = 8


@contextmanager
def open_source(path: str | None) -> Iterator[int]:
    """A descriptor to read the value from; `None` and `-` mean standard input."""
    if path is None or path == "-":
        if sys.stdin is None:
            raise CommandFailed("standard input is closed; name a file", ExitCode.USAGE)
        if sys.stdin.isatty():
            raise CommandFailed(
                "standard input is a terminal; name a file or pipe the value in", ExitCode.USAGE
            )
        yield sys.stdin.fileno()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise CommandFailed(f"{path}: is a directory; put its files one by one")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def value_of(descriptor: int) -> Iterator[memoryview]:
    """All bytes from the descriptor's position to its end.

    A regular file is mapped, not read. Anything else has no length to reserve memory for, so it is
    first spooled to a temporary file. Raises `ObjectTooLarge` above 4 GiB. When another process shortens
    the file meanwhile, the process ends (SIGBUS) and nothing is stored.
    """
    status = os.fstat(descriptor)
    # Files of /proc and the like say 0 and have content.
    if stat.S_ISREG(status.st_mode) and status.st_size:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        with mapped(descriptor, status.st_size, mmap.PROT_READ) as view:
            check_object_length(len(view) - start)
            yield view[start:]
        return
    with tempfile.TemporaryFile(prefix="mooncake-p2p-") as spool:
        with progress("reading") as bar:
            length = _spool(descriptor, spool.fileno(), bar.advance)
        with mapped(spool.fileno(), length, mmap.PROT_READ) as view:
            yield view


def _spool(source: int, spool: int, advance: Advance) -> int:
    length = 0
    while piece := _read(source):
        length += len(piece)
        if length > MAX_OBJECT_BYTES:
            check_object_length(length)
        try:
            write_all(spool, memoryview(piece))
        except OSError as error:
            raise CommandFailed(
                f"standard input does not fit into {tempfile.gettempdir()} ({error.strerror}): "
                "set TMPDIR to a place with room, or put a file"
            ) from error
        advance(len(piece))
    return length


def _read(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, PIECE_BYTES)
        except BlockingIOError:  # a pipe that its other users made non-blocking
            is_ready(descriptor, None)


def memory_for(length: int) -> memoryview:
    """`length` bytes of new memory, of which only what is written to costs anything. Behind the first
    2 MiB in large pages where the kernel has them: a quarter of the time of filling small ones.
    Freed with the last view."""
    if not length:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length > SMALL_PAGES_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES_BYTES)
    return memoryview(memory)


@contextmanager
def mapped(descriptor: int, length: int, protection: int) -> Iterator[memoryview]:
    """`length` bytes of a file as memory, let go at the end."""
    if not length:
        yield memoryview(bytearray())
        return
    mapping = mmap.mmap(descriptor, length, prot=protection)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # An error's traceback may still hold slices of the view; the map then goes with them.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()


def write_all(descriptor: int, view: memoryview, advance: Advance = lambda count: None) -> None:
    """Write everything, in pieces, also to pipes that are not in blocking mode."""
    position = 0
    while position < len(view):
        try:
            count = os.write(descriptor, view[position : position + PIECE_BYTES])
        except BlockingIOError:
            is_ready(descriptor, None, to_write=True)
            continue
        position += count
        advance(count)


def is_stream(path: str) -> bool:
    """Whether a path must be written to as it is: it exists and is no regular file or directory."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def standard_output(*, binary_to_terminal: bool) -> int:
    """The descriptor of stdout. Raises `CommandFailed` when binary must not go there."""
    if sys.stdout.isatty() and not binary_to_terminal:
        raise CommandFailed(
            "stdout is a terminal and the value may be binary; use -o FILE, or -o - to see it",
            ExitCode.USAGE,
        )
    return sys.stdout.fileno()


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
            raise CommandFailed(f"{path}: there is no such directory; make it, and name a file in it")
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
        raise CommandFailed(f"another get is writing {self.path}; wait for it, or name another file")

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
    """A new locked file, or None when another process writes it. One left by an ended process is removed."""
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
        return take_lock(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True
