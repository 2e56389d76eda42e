"""Taking a file or a block device for the log: made where there is no log, extended where there is room, and read."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import trio

from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, format_bytes
from p2pstore.runtime.linux import file_system, lock_owner, mount_point, user_name
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES, Disk
from p2pstore.ssd_tier.footer import footer_pages
from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.log_layout import (
    FILE_NAME,
    MAX_RECORDS_PER_SEGMENT,
    PAGE_BYTES,
    STORE_ID_BYTES,
    SUPERBLOCK_MAGIC,
    DamagedRecord,
    Superblock,
    cluster_mark,
    decode_superblock,
    first_writes,
    segments_that_fit,
)
from p2pstore.ssd_tier.log_segments import SegmentState, SegmentTable
from p2pstore.ssd_tier.recovery import FoundSegment, FoundState, read_segment, refill

INSPECTED_BYTES: Final = MIB
"""At both ends: there is where file systems, partition tables, RAID and volume managers sign."""

IN_MEMORY: Final = ("tmpfs", "ramfs")
"""File systems that are no disk, though some kernels give direct I/O there."""

_HOW: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK

logger = logging.getLogger("p2pstore.ssd_tier")
_GONE = (FileNotFoundError, NotADirectoryError)
MIN_SEGMENTS: Final = 4
"""Two that are open, and two free."""
REQUESTS_AT_ONCE: Final = 16
WINDOW_BYTES: Final = 1 << 20
_UNKNOWN_GENERATIONS_BITS: Final = 48


@dataclass(frozen=True, slots=True)
class OpenPlace:
    """An open and locked file or block device, of which the first `size_bytes` are there to be used."""

    path: Path
    descriptor: int
    size_bytes: int
    direct: bool = False
    """Whether reads and writes pass the page cache by."""

    def close(self) -> None:
        os.close(self.descriptor)


def open_place(
    path: str | os.PathLike[str], capacity_bytes: int | None, *, direct: bool, overwrite: bool
) -> OpenPlace:
    """As `p2pstore.ssd_tier.disk.open_disk` says."""
    where = Path(path)
    if capacity_bytes is not None:
        capacity_bytes -= capacity_bytes % ALIGNMENT_BYTES
        if capacity_bytes <= 0:
            raise ConfigError(f"the SSD tier at {where} needs a capacity: say how much it may take")
    try:
        mode = where.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the SSD tier's directory {where} cannot be used ({error.strerror}): make it, on the disk that is "
            "meant; if that is to be mounted there, see whether it is"
        ) from None
    with ExitStack() as stack:
        if stat.S_ISDIR(mode):
            place = _open_file(where, capacity_bytes, overwrite, stack)
        elif stat.S_ISBLK(mode):
            place = _open_device(where, capacity_bytes, overwrite, stack)
        else:
            raise ConfigError(
                f"the SSD tier's place {where} is no directory and no block device: name one of them"
            )
        if file_system(os.fstat(place.descriptor).st_dev) in IN_MEMORY:
            logger.warning(
                "the SSD tier at %s is in memory, not on a disk: it takes memory, and a restart of this machine "
                "ends it; name a directory on a local SSD",
                place.path,
                extra={"event": "ssd_in_memory", "path": str(place.path)},
            )
        if direct:
            _use_direct_io(place)
        else:
            logger.warning(
                "the SSD tier at %s goes through the page cache: slower, and its memory is counted as this "
                "process's; a directory on ext4 or XFS takes direct I/O",
                place.path,
                extra={"event": "ssd_buffered", "path": str(place.path)},
            )
        stack.pop_all()
    return replace(place, direct=direct)


# --- a file in a directory ---------------------------------------------------------------------------


def _open_file(
    directory: Path, capacity_bytes: int | None, overwrite: bool, stack: ExitStack
) -> OpenPlace:
    path = directory / FILE_NAME
    if capacity_bytes is None:
        raise ConfigError(f"the SSD tier in {directory} needs a capacity: say how much it may take")
    created = True
    try:
        try:
            descriptor = os.open(path, _HOW | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            created = False
            descriptor = os.open(path, _HOW)
    except OSError as error:
        raise _unusable(path, error) from None
    stack.callback(_close, descriptor)
    if created:
        stack.callback(_remove, path)
    _lock(path, descriptor)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no file: remove it, or name another directory")
    try:
        _refuse_strangers_data(path, descriptor, status.st_size, overwrite)
        _allocate(path, descriptor, status, capacity_bytes)
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
        _sync_directory(directory)
    except OSError as error:
        raise _unusable(path, error) from error
    return OpenPlace(path.absolute(), descriptor, capacity_bytes)


def _allocate(path: Path, descriptor: int, status: os.stat_result, capacity_bytes: int) -> None:
    """Have the file system set aside every byte now, so that no write fails for want of room later."""
    if capacity_bytes < status.st_size:
        raise ConfigError(
            f"{path} has {format_bytes(status.st_size)}, more than the {format_bytes(capacity_bytes)} asked for: it "
            "cannot shrink. Ask for at least as much, or remove the file: what is in it is then gone"
        )
    found = os.fstatvfs(descriptor)
    free_bytes = found.f_bavail * found.f_frsize
    needed_bytes = capacity_bytes - status.st_blocks * 512
    no_space = ConfigError(
        f"{path} needs {format_bytes(max(0, needed_bytes))} more to have {format_bytes(capacity_bytes)}, its file "
        f"system has {format_bytes(free_bytes)} free: choose a smaller --ssd-capacity or another disk"
    )
    if needed_bytes > free_bytes:
        raise no_space
    try:
        os.posix_fallocate(descriptor, 0, capacity_bytes)
    except OSError as error:
        os.ftruncate(descriptor, status.st_size)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise no_space from error
        raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    with suppress(OSError):  # what went wrong before is what is to be said
        os.unlink(path)


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


# --- a block device ----------------------------------------------------------------------------------


def _open_device(path: Path, capacity_bytes: int | None, overwrite: bool, stack: ExitStack) -> OpenPlace:
    path = path.resolve()
    try:
        # Of a block device O_EXCL means: no other process has it so, and it is not mounted, swap or part of a volume.
        descriptor = os.open(path, _HOW | os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _device_in_use(path) from None
        raise _unusable(path, error) from None
    stack.callback(_close, descriptor)
    _lock(path, descriptor)  # so that others can be told its user
    try:
        size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        _refuse_strangers_data(path, descriptor, size_bytes, overwrite)
    except OSError as error:
        raise _unusable(path, error) from error
    if capacity_bytes is not None and capacity_bytes > size_bytes:
        raise ConfigError(
            f"{path} has {format_bytes(size_bytes)}, less than the {format_bytes(capacity_bytes)} asked for: choose a "
            "smaller --ssd-capacity, or none for the whole device"
        )
    usable_bytes = size_bytes if capacity_bytes is None else capacity_bytes
    return OpenPlace(path, descriptor, usable_bytes - usable_bytes % ALIGNMENT_BYTES)


def _device_in_use(path: Path) -> ConfigError:
    mounted = mount_point(os.stat(path).st_rdev)
    owner = lock_owner(os.stat(path))
    if mounted is not None:
        how = f"mounted at {mounted}: name a directory there, or unmount it"
    elif owner is not None:
        how = f"in use by {owner}: stop that, or name another device"
    else:
        how = f"in use, itself or a part of it: `lsblk {path}` and `fuser -v {path}` may say by whom"
    return ConfigError(f"the SSD tier's device {path} is {how}")


# --- both --------------------------------------------------------------------------------------------


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock_owner(os.fstat(descriptor)) or f"another process (`fuser -v {path}` says which)"
        raise ConfigError(
            f"{path} is in use by {owner}: each peer has an SSD directory of its own. Stop that one, or name another"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked ({error.strerror}): choose a local disk for the SSD tier"
        ) from None


def _refuse_strangers_data(path: Path, descriptor: int, size_bytes: int, overwrite: bool) -> None:
    """Raises `ConfigError` when something else than a log lies there."""
    if overwrite:
        return
    for position in (0, max(0, size_bytes - INSPECTED_BYTES)):
        content = os.pread(descriptor, INSPECTED_BYTES, position)
        if position == 0 and content.startswith(SUPERBLOCK_MAGIC):
            return
        if content.count(0) != len(content):
            raise ConfigError(
                f"{path} holds something that is no log of p2pstore: if that may be lost, clear it "
                f"(`wipefs -a` for a device, `rm` for a file), else name another place"
            )


def _use_direct_io(place: OpenPlace) -> None:
    """From now on past the page cache. Raises `ConfigError` where that does not work."""
    try:
        flags = fcntl.fcntl(place.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(place.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        # Only a read tells whether pages are large enough for it.
        os.preadv(place.descriptor, [aligned_buffer(ALIGNMENT_BYTES)], 0)
    except OSError as error:
        raise ConfigError(
            f"{place.path} takes no direct I/O in pages of {ALIGNMENT_BYTES} bytes ({error.strerror}): choose a "
            "directory on ext4 or XFS, or a block device; buffered I/O would work, and is slower"
        ) from None


def _unusable(path: Path, error: OSError) -> ConfigError:
    match error.errno:
        case errno.EACCES | errno.EPERM:
            me = user_name(os.geteuid())
            cure = f"{_owner_of(path)}; give it to the user that runs this peer ({me}), or name another"
        case errno.EROFS:
            cure = "its file system is mounted read-only: mount it for writing, or name another"
        case errno.ELOOP:
            cure = "it is a symbolic link: name the directory in which the file itself is"
        case errno.EISDIR:
            cure = "there is a directory where the log's file should be: remove it, or name another"
        case _:
            cure = "it must be there to be read and written by this user"
    return ConfigError(f"the SSD tier cannot use {path} ({error.strerror}): {cure}")


def _owner_of(path: Path) -> str:
    """The owner of a file, or of the directory in which it cannot even be seen."""
    for each in (path, path.parent):
        with suppress(OSError):
            return f"{each} belongs to {user_name(each.stat().st_uid)}"
    return "it is somewhere where this user may not look"


def why_misplaced(path: Path, descriptor: int, size_bytes: int) -> str:
    """Why what is written there now would be lost, for people; empty when nothing speaks against it. `size_bytes` are
    what it must have. Some microseconds, unless the disk hangs. Raises `OSError` when the descriptor is closed."""
    opened = os.fstat(descriptor)
    is_file = stat.S_ISREG(opened.st_mode)
    if is_file and opened.st_nlink == 0:
        return f"{path} was deleted"
    if is_file and opened.st_size < size_bytes:
        return f"{path} was cut to {format_bytes(opened.st_size)} of {format_bytes(size_bytes)}"
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY and is_file:
        return f"the file system of {path} is mounted read-only now"
    try:
        named = os.stat(path)
    except _GONE:
        return (
            f"{path} is not there any more: it, or a directory above it, was moved, removed or unmounted"
        )
    except OSError:  # it may well be there: only who may look has changed, or the path does not answer
        return ""
    if is_file and (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
        return f"another file is at {path} now, or something was mounted over it"
    if not is_file and named.st_rdev != opened.st_rdev:
        return f"another device is at {path} now"
    return ""


async def open_superblock(disk: Disk, segment_bytes: int, cluster: str = "") -> Superblock:
    """The log on this disk. `segment_bytes` is for a new one: an older one keeps its own. A log belongs to the first
    cluster that opens it; without a name, to whichever it did.

    Raises `ConfigError` when the disk is too small, or holds something else, or another cluster's log; and `OSError`.
    """
    mark = cluster_mark(cluster) if cluster else 0
    page = aligned_buffer(PAGE_BYTES)
    await disk.read_into(0, [page])
    if not any(page):
        return await _make(disk, segment_bytes, mark)
    try:
        superblock = decode_superblock(page)
    except DamagedRecord as error:
        raise ConfigError(
            f"{error}; name another directory or device, or remove what is there"
        ) from error
    if mark and superblock.cluster_mark not in (0, mark):
        raise ConfigError(
            f"the log of cold objects belongs to another cluster than {cluster!r}: name another directory or device "
            "for this one, or remove that log: what is in it is then gone"
        )
    if superblock.total_bytes > disk.size_bytes:
        raise ConfigError(
            f"the log of cold objects has {format_bytes(superblock.total_bytes)}, but there are only "
            f"{format_bytes(disk.size_bytes)}: a log cannot shrink; give it its old size (a file "
            "that was cut short becomes as long again, without what was cut off), or remove it"
        )
    fitting = segments_that_fit(disk.size_bytes, superblock.segment_bytes)
    wanted = replace(
        superblock,
        segments=max(fitting, superblock.segments),
        cluster_mark=mark or superblock.cluster_mark,
    )
    if wanted != superblock:
        await _write_first(disk, wanted, superblock.segments)
    return wanted


async def _make(disk: Disk, segment_bytes: int, mark: int) -> Superblock:
    segments = segments_that_fit(disk.size_bytes, segment_bytes)
    if segments < MIN_SEGMENTS:
        needed = Superblock(bytes(STORE_ID_BYTES), MIN_SEGMENTS, segment_bytes).total_bytes
        raise ConfigError(
            f"{format_bytes(disk.size_bytes)} are too little for cold objects: give the SSD tier at least "
            f"{format_bytes(needed)}"
        )
    superblock = Superblock(secrets.token_bytes(STORE_ID_BYTES), segments, segment_bytes, mark)
    await _write_first(disk, superblock, 0)
    return superblock


async def _write_first(disk: Disk, superblock: Superblock, have_segments: int) -> None:
    """The superblock comes last: until it is there, nothing of the rest counts."""
    writes = first_writes(superblock, have_segments)
    left = superblock.segments - have_segments
    while left > 0:
        async with trio.open_nursery() as nursery:
            for position, content in islice(writes, min(left, REQUESTS_AT_ONCE)):
                nursery.start_soon(disk.write_from, position, [content])
        left -= REQUESTS_AT_ONCE
    await disk.sync()
    for position, content in writes:
        await disk.write_from(position, [content])
    await disk.sync()


async def read_log(disk: Disk, superblock: Superblock) -> list[FoundSegment]:
    """Read all segments. Unreadable parts are missing."""
    found: dict[int, FoundSegment] = {}
    numbers = iter(range(superblock.segments))
    async with trio.open_nursery() as nursery:
        for _ in range(REQUESTS_AT_ONCE):
            nursery.start_soon(_read_some, disk, superblock, numbers, found)
    return [found[number] for number in range(superblock.segments)]


async def _read_some(
    disk: Disk, superblock: Superblock, numbers: Iterator[int], found: dict[int, FoundSegment]
) -> None:
    memory = aligned_buffer(WINDOW_BYTES)
    for number in numbers:
        reading = read_segment(superblock, number)
        content: bytes | None = None
        try:
            wanted = next(reading)
            while True:
                if wanted.length > len(memory):
                    memory = aligned_buffer(wanted.length)
                window = memory[: wanted.length]
                try:
                    await disk.read_into(wanted.position, [window])
                    content = bytes(window)
                except OSError:
                    content = None
                wanted = reading.send(content)
        except StopIteration as stop:
            found[number] = stop.value


def restore(
    superblock: Superblock, found: list[FoundSegment], max_records: int, namespaces: Sequence[str] = ()
) -> tuple[SegmentTable, ColdIndex]:
    """Table and index of a log that was read. Works through all records: not for the event loop's thread."""
    index = ColdIndex(superblock.segments, max_records, secrets.randbits(63), namespaces)
    for each in found:
        if each.state is FoundState.UNSEALED and len(each.footer.rows):
            _mark_unknown(each)
    next_sequence = refill(index, found)
    table = SegmentTable(superblock.segments, superblock.segment_bytes, footer_pages, next_sequence)
    for each in found:
        _restore_segment(table, each)
    return table, index


def unsafe_segments(found: list[FoundSegment]) -> list[int]:
    """Segments in which nothing was found, although something may be there: it could be found after the next start,
    when it was long discarded. To be given a new generation before anything else."""
    return [
        each.segment
        for each in found
        if each.state is FoundState.DAMAGED
        or (each.state is FoundState.UNSEALED and not len(each.footer.rows))
    ]


def _mark_unknown(found: FoundSegment) -> None:
    """Of a segment without a footer, what was not found now may be found after the next start: as above."""
    known = set(found.footer.rows["number"].tolist())
    for number in range(MAX_RECORDS_PER_SEGMENT):
        if number not in known:
            found.marks.mark(number)


def _restore_segment(table: SegmentTable, found: FoundSegment) -> None:
    rows = found.footer.rows
    generation, state = found.generation, SegmentState.EMPTY
    if found.state is FoundState.DAMAGED:
        # Above all that was ever there, even where that could not be read.
        generation += 1 + secrets.randbits(_UNKNOWN_GENERATIONS_BITS)
    elif found.state is FoundState.SEALED:
        state = SegmentState.SEALED
    elif len(rows):
        state = SegmentState.SEALING
    first_sequence = int(rows["sequence"].min()) if len(rows) else 0
    table.restore(found.segment, generation, state, first_sequence)
