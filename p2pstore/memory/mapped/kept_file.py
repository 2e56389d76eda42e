"""A segment's memory in a file that outlives its peer, so that the peer's next life begins with it. Shell.

The file stays the same one. Memory that clients of earlier lives have mapped stays unchanged while they do: each life
gives away descriptors with a lock of its own, at a place far behind the file's end that stands for this life. Such a
lock is the open file's, and ends with the last process that has it open or mapped, however that process ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.memory.kept_memory import (
    Expected,
    Kept,
    KeptElsewhere,
    Note,
    encode_note,
    read_kept,
    tail_bytes,
    tail_offset,
)
from p2pstore.memory.mapped.mapped_memory import SharedMemory, available_memory
from p2pstore.memory.segment_layout import GRANULE_BYTES, SEGMENT_MAGIC, Geometry, round_up
from p2pstore.objects import format_bytes
from p2pstore.runtime.linux import take_lock

logger = logging.getLogger("p2pstore.transfer")

_LOCK: Final = struct.Struct("hhqqi4x")
"""The kernel's struct flock: type, whence, start, length, process."""
_LIVES_BEGIN: Final = 1 << 60
"""The place of life 0."""


class KeptMemory(SharedMemory):
    """Shared memory in a file that is there for the next life of its peer, if `is_kept` at the end: as it was before,
    or as the peer says.

    `kept` is what this life begins with, `marks` the bytes behind the segment for `Segment`.
    """

    def __init__(
        self, path: Path, lock: int, file: tuple[int, mmap.mmap], expected: Expected, kept: Kept
    ) -> None:
        self.kept = kept
        self.is_kept = kept.lives > 0  # of a peer that never ran, nothing stays
        self._path = path
        self._lock = lock
        self._life = kept.lives + 1
        descriptor, mapping = file
        _lock_life(descriptor, self._life)
        geometry = expected.geometry
        begin = tail_offset(geometry)
        note = Note(geometry.slots, expected.boot, expected.cluster, expected.quotas, lives=self._life)
        packed = encode_note(note)
        mapping[begin : begin + len(packed)] = packed
        marks_begin = begin + GRANULE_BYTES
        self.marks = memoryview(mapping)[marks_begin : marks_begin + geometry.slots]
        super().__init__(descriptor, mapping, geometry.total_bytes, self._end)

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._path

    def read_only_descriptor(self) -> int:
        """As of any shared memory; its lock marks a process that maps it as a client of this life."""
        descriptor = super().read_only_descriptor()
        try:
            _lock_life(descriptor, self._life)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_used_by_earlier(self) -> bool:
        """Whether a process still maps a descriptor given away in an earlier life."""
        return _has_users(self._lock, self._life)

    def _end(self) -> None:
        self.marks.release()
        if not self.is_kept:
            remove(self._path, self._lock)
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class _Left:
    """The file of an earlier life, as it was found."""

    lock: int
    file: tuple[int, mmap.mmap]
    kept: Kept


def open_kept_memory(path: Path, expected: Expected) -> KeptMemory:
    """Memory for a segment as `expected`, in a file of mode 0600 that stays when it is closed: that of this peer's last
    life when it is good, else a new one. Why it is a new one is logged.

    Raises `ConfigError` as `create_file_memory` does, and when the file is kept for a peer of another cluster, or by a
    newer version.
    """
    try:
        return _open(path, expected)
    except OSError as error:
        raise ConfigError(
            f"memory_path: {path} cannot be locked for who has it mapped ({error.strerror}): keep memory on a file "
            "system of this machine"
        ) from error


def _open(path: Path, expected: Expected) -> KeptMemory:
    left = _take_left(path, expected)
    if left is not None:
        try:
            return KeptMemory(path, left.lock, left.file, expected, left.kept)
        except BaseException:
            _close(left.lock, left.file)
            raise
    with ExitStack() as stack:
        lock = claim_new(path)
        stack.callback(os.close, lock)
        stack.callback(remove, path, lock)
        size = _file_bytes(expected.geometry, lock)
        allocate(path, lock, size)
        descriptor, mapping = map_file(path, lock, size)
        stack.callback(os.close, descriptor)
        stack.callback(mapping.close)
        memory = KeptMemory(path, lock, (descriptor, mapping), expected, Kept())
        stack.pop_all()
        return memory


def boot_id() -> bytes:
    """16 bytes that are others after each start of this machine."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def _file_bytes(geometry: Geometry, descriptor: int) -> int:
    return round_up(tail_offset(geometry) + tail_bytes(geometry), block_bytes_of(descriptor))


def _take_left(path: Path, expected: Expected) -> _Left | None:
    """The file of this peer's last life, if it can begin with that; else it is removed, if it was any peer's."""
    lock = claim_left(path)
    if lock is None:
        return None
    size = os.fstat(lock).st_size
    if size < GRANULE_BYTES:
        remove(path, lock)
        os.close(lock)
        return None
    try:
        file = map_file(path, lock, size)
    except BaseException:
        os.close(lock)
        raise
    try:
        kept = _judge(path, lock, file[1], expected)
    except BaseException:
        _close(lock, file)
        raise
    if isinstance(kept, Kept):
        return _Left(lock, file, kept)
    logger.warning(
        "memory begins empty: %s (%s) is not used again: %s",
        path,
        format_bytes(size),
        kept,
        extra={"event": "memory_not_kept"},
    )
    remove(path, lock)
    _close(lock, file)
    return None


def _judge(path: Path, lock: int, mapping: mmap.mmap, expected: Expected) -> Kept | str:
    wanted_bytes = _file_bytes(expected.geometry, lock)
    if os.fstat(lock).st_blocks * 512 < min(len(mapping), wanted_bytes):
        return "parts of it are missing"  # touching one with the file system full ends the process
    with memoryview(mapping) as view:
        try:
            return read_kept(view, expected, has_users=_has_users(lock, None))
        except KeptElsewhere as error:
            raise ConfigError(
                f"memory_path: {path} is kept memory that this peer cannot use: {error}. Name another file, or "
                "remove this one"
            ) from None


def _close(lock: int, file: tuple[int, mmap.mmap]) -> None:
    os.close(lock)
    os.close(file[0])
    file[1].close()


def _lock_life(descriptor: int, life: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, 0, _LIVES_BEGIN + life, 1, 0))


def _has_users(lock: int, life: int | None) -> bool:
    """Whether there is a client of a life before `life`, or of any when that is None."""
    length = 0 if life is None else life  # 0: to the end
    asked = _LOCK.pack(fcntl.F_WRLCK, 0, _LIVES_BEGIN, length, 0)
    found: int = _LOCK.unpack(fcntl.fcntl(lock, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


ATTEMPTS: Final = 8
_HOW: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def create_file_memory(path: Path, total_bytes: int, *, marked_after: bool = False) -> SharedMemory:
    """Zeroed shared memory of `total_bytes` in a new file of mode 0600, which is removed when it is closed.

    A file that a peer made is known by the segment's magic: at its beginning, where a segment has it, or
    (`marked_after`) in one block more, for memory that begins with something else. The file of a dead peer is
    replaced. Raises `ConfigError` when the path is in use by another peer or program, or the file system has no room
    for all of it or takes no files; on tmpfs also when the host or a cgroup has less memory left than that.
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
    """The unit of sizes of mapped files on that file system, in bytes."""
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
    """A locked descriptor of a new file at `path`, marked as a peer's; the file of a dead peer is removed first.
    Raises `ConfigError` when a file of another owner is there, or none can be made."""
    lock = _claim(path)
    with suppress(OSError):  # hugetlbfs has no write(): the segment's header is the first to say so
        os.pwrite(lock, SEGMENT_MAGIC, 0)
    return lock


def claim_left(path: Path) -> int | None:
    """A locked descriptor of the file that an ended peer left at `path`; None when there is none. Raises `ConfigError`
    when the file is in use, or no peer made it."""
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
        if not take_lock(descriptor):
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
        if take_lock(descriptor) and is_at(path, descriptor):
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


def allocate(path: Path, descriptor: int, size: int) -> None:
    """Have the file system set aside every byte: touching a page for which it has no room ends the process."""
    available, source = available_memory()
    if size > available and _is_on_tmpfs(descriptor):  # whose limit says nothing about memory
        raise ConfigError(
            f"memory_path: {path} needs {format_bytes(size)} of memory, {source} has {format_bytes(available)} left: "
            "choose a smaller --memory or raise the limit"
        )
    system = os.fstatvfs(descriptor)
    free = system.f_bavail * system.f_frsize
    missing = size - os.fstat(descriptor).st_blocks * 512
    try:
        if system.f_blocks and missing > free:  # the kernel would fill the disk before it finds that out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise _unusable(path, error) from error
        raise ConfigError(
            f"memory_path: {path} needs {format_bytes(size)}, its file system has {format_bytes(free)} free "
            f"({error.strerror}): choose a smaller --memory or another file system"
        ) from error


def _is_on_tmpfs(descriptor: int) -> bool:
    """Whether the file's pages are memory of this host, counted by the cgroup of the process that makes them."""
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
