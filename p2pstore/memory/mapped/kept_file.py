"""A segment's memory in a file that outlives its peer, so that the peer's next life begins with it. Shell.

The file stays the same one. What clients of earlier lives have mapped is theirs as long as they do: each life gives
away descriptors with a lock of its own on them, at a place far behind the file's end that stands for this life. Such a
lock is the open file's, and ends with the last process that has it open or mapped, however that process ends.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import uuid
from contextlib import ExitStack
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
from p2pstore.memory.mapped.mapped_memory import SharedMemory
from p2pstore.memory.mapped.memory_file import (
    allocate,
    block_bytes_of,
    claim_left,
    claim_new,
    map_file,
    remove,
)
from p2pstore.memory.segment_layout import GRANULE_BYTES, Geometry, round_up
from p2pstore.objects import format_bytes

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
        note = Note(
            geometry.slots, expected.boot, expected.cluster, expected.quotas, lives=self._life
        )
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
        """As of any shared memory; whoever maps it is one of this life's clients."""
        descriptor = super().read_only_descriptor()
        try:
            _lock_life(descriptor, self._life)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_used_by_earlier(self) -> bool:
        """Whether anybody still has mapped what a client of an earlier life was given."""
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
        return "parts of it are missing"  # who touches one when the file system is full, dies
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
    fcntl.fcntl(
        descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, 0, _LIVES_BEGIN + life, 1, 0)
    )


def _has_users(lock: int, life: int | None) -> bool:
    """Whether there is a client of a life before `life`, or of any when that is None."""
    length = 0 if life is None else life  # 0: to the end
    asked = _LOCK.pack(fcntl.F_WRLCK, 0, _LIVES_BEGIN, length, 0)
    found: int = _LOCK.unpack(fcntl.fcntl(lock, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK
