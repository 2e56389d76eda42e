"""A segment's memory in a file: on tmpfs or hugetlbfs, on the file system of CXL or persistent memory (DAX), or on
a disk. Shell.

Every peer makes a new file, so that who still maps that of a peer which died keeps what it sees; unless the file is
kept for the next life of its peer (`transfer.kept_file`). A lock tells a file in use from one that was left over; it is
on a descriptor that nobody else gets, as a lock lasts as long as anybody has its descriptor mapped.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapped_memory import SharedMemory, available_memory
from p2pstore.memory.segment_layout import SEGMENT_MAGIC, round_up
from p2pstore.objects import format_bytes

ATTEMPTS: Final = 8
_HOW: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def create_file_memory(path: Path, total_bytes: int, *, marked_after: bool = False) -> SharedMemory:
    """Zeroed shared memory of `total_bytes` in a new file of mode 0600, which is removed when it is closed.

    A file that a peer made is known by the segment's magic: at its beginning, where a segment has it, or
    (`marked_after`) in one block more, for memory that begins with something else. What a peer that died left there
    is replaced. Raises `ConfigError` when the path is in use by another peer or by something else, or the file system
    has no room for all of it or takes no files; on tmpfs also when the host or a cgroup has not as much memory left.
    """
    with ExitStack() as stack:
        lock = claim_new(path)
        stack.callback(os.close, lock)
        stack.callback(remove, path, lock)
        block_bytes = block_bytes_of(lock)
        size = round_up(total_bytes, block_bytes) + (block_bytes if marked_after else 0)
        allocate(path, lock, size)
        descriptor, mapping = map_file(path, lock, size)
        if marked_after:
            mark = size - block_bytes
            mapping[mark : mark + len(SEGMENT_MAGIC)] = SEGMENT_MAGIC
        return SharedMemory(descriptor, mapping, total_bytes, stack.pop_all().close)


def block_bytes_of(descriptor: int) -> int:
    """What the sizes of mapped files are whole numbers of, on that file system."""
    return max(mmap.PAGESIZE, os.fstat(descriptor).st_blksize)


def map_file(path: Path, lock: int, size: int) -> tuple[int, mmap.mmap]:
    """The locked file mapped, and the descriptor for those who map it as well. Raises `ConfigError`."""
    try:  # not by its path, which may mean another file by now
        descriptor = os.open(f"/proc/self/fd/{lock}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise _unusable(path, error) from error


def claim_new(path: Path) -> int:
    """A locked descriptor of a new file at `path`, marked as a peer's; what a peer that died left there is removed.
    Raises `ConfigError` when somebody else's file is there, or none can be."""
    lock = _claim(path)
    with suppress(OSError):  # hugetlbfs has no write(): the segment's header is the first to say so
        os.pwrite(lock, SEGMENT_MAGIC, 0)
    return lock


def claim_left(path: Path) -> int | None:
    """A locked descriptor of what a peer that does not run any more left at `path`; None when there is nothing. Raises
    `ConfigError` when somebody uses it, or it is something that no peer put there."""
    try:
        descriptor = os.open(path, _HOW | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"memory_path: {path} is not a regular file. Of a DAX device the kernel can make memory (`daxctl "
                "reconfigure-device --mode=system-ram`; then give --numa-node), or a file system can be on it"
            )
        if not _locked(descriptor):
            raise _in_use(path)
        if status.st_size and not _is_marked(descriptor, status):
            raise ConfigError(
                f"memory_path: {path} holds something that no peer put there, and would be lost: name a file that "
                "does not exist, or remove it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _claim(path: Path) -> int:
    """A locked descriptor of a new, empty file at `path`."""
    for _ in range(ATTEMPTS):
        try:
            descriptor = os.open(path, _HOW | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            _remove_left_over(path)
            continue
        except OSError as error:
            raise _unusable(path, error) from error
        if _locked(descriptor) and is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # another peer that starts took the empty file for a left-over
    raise _in_use(path)


def _remove_left_over(path: Path) -> None:
    """Remove the file if a peer made it that does not live any more."""
    descriptor = claim_left(path)
    if descriptor is not None:
        try:
            remove(path, descriptor)
        finally:
            os.close(descriptor)


def _is_marked(descriptor: int, status: os.stat_result) -> bool:
    """Whether a peer made the file: see `create_file_memory`."""
    block_bytes = max(mmap.PAGESIZE, status.st_blksize)
    places = (0, max(0, status.st_size - block_bytes))
    return any(os.pread(descriptor, len(SEGMENT_MAGIC), at) == SEGMENT_MAGIC for at in places)


def remove(path: Path, descriptor: int) -> None:
    """Remove the name, unless it means another file by now."""
    if is_at(path, descriptor):
        with suppress(FileNotFoundError):
            os.unlink(path)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path means this file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _locked(descriptor: int) -> bool:
    """Whether this descriptor has the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def allocate(path: Path, descriptor: int, size: int) -> None:
    """Have the file system set aside every byte: who touches a page for which it has no room, dies."""
    available, source = available_memory()
    if size > available and _is_on_tmpfs(descriptor):  # whose limit says nothing about memory
        raise ConfigError(
            f"memory_path: {path} needs {format_bytes(size)} of memory, {source} has {format_bytes(available)} left: "
            "choose a smaller --memory or raise the limit"
        )
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise _unusable(path, error) from error
        found = os.fstatvfs(descriptor)
        raise ConfigError(
            f"memory_path: {path} needs {format_bytes(size)}, its file system has "
            f"{format_bytes(found.f_bavail * found.f_frsize)} free ({error.strerror}): choose a smaller --memory or "
            "another file system"
        ) from error


def _is_on_tmpfs(descriptor: int) -> bool:
    """Whether the file's pages are memory of this host, counted by the cgroup of whoever makes them."""
    device = os.fstat(descriptor).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0] == "tmpfs"
    return False


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"memory_path: {path} cannot be made and mapped ({error.strerror}): name a file, in a directory that is "
        "there and that this user can write"
    )


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"memory_path: {path} is the memory of another peer: give each peer a file of its own"
    )
