"""Shared memory: a sealed memfd, mapped by its owner and by processes that got a descriptor.

`p2pstore.memory.mapped.kept_file` makes memory in a file instead; it is mapped, filled with pages and
given away in the same way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

import numpy as np

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped import numa
from p2pstore.memory.mapped.mapping import HUGE_PAGE_BYTES, address_of, map_aligned
from p2pstore.memory.segment_layout import round_up
from p2pstore.objects import MIB, format_bytes
from p2pstore.runtime.linux import memory_limits, text_of

HugePages = Literal["auto", "never", "require"]

PREFAULT_PIECE_BYTES: Final = 4 * MIB
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: fault pages in for writing without changing them. Not in the mmap module yet."""
_MADV_COLLAPSE: Final = 25
"""Linux 6.1: make huge pages of what is there, whatever shmem_enabled says (but `deny`). Not in the mmap module."""

_MFD_HUGE_2MB: Final = 21 << 26
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1. Not in the fcntl module yet."""
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Mapped memory: `view` is writable, `descriptor` is for processes that may write.

    It begins at `start` in the mapping. Closing the descriptor or the mapping here takes nothing from those who have
    mapped it too. `on_close` is called then, once.
    """

    def __init__(
        self,
        descriptor: int,
        mapping: mmap.mmap,
        length: int,
        on_close: Callable[[], None] = lambda: None,
        *,
        start: int = 0,
    ) -> None:
        self.descriptor = descriptor
        self.length = length
        self.view = memoryview(mapping)[start : start + length]
        self._mapping = mapping
        self._on_close = on_close
        self._is_closed = False

    @property
    def mapping(self) -> mmap.mmap:
        """The mapping itself: slices of it are bytes."""
        return self._mapping

    @property
    def descriptors(self) -> list[int]:
        """All that there are of this memory: one."""
        return [self.descriptor]

    @property
    def pieces(self) -> list[int]:
        """The sizes of the memories that this one is made of: none, as it is a single one."""
        return []

    def read_only_descriptors(self) -> list[int]:
        """`read_only_descriptor` of all `descriptors`."""
        return [self.read_only_descriptor()]

    def read_only_descriptor(self) -> int:
        """A new descriptor of the same memory, only good for reading; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close_descriptor(self) -> None:
        """Close the descriptor alone: no further process can get it. The mapping stays. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the descriptor and give up the mapping. Where views of it are still in use, the
        mapping lives until the last of them is collected. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.close_descriptor()
        self._on_close()
        self.view.release()
        try:
            self._mapping.close()
        except BufferError:
            del self._mapping  # the views keep it, and end it


def create_memory(
    total_bytes: int,
    name: str,
    *,
    huge_pages: HugePages = "auto",
    numa_node: int | None = None,
    besides_bytes: int = 0,
) -> SharedMemory:
    """Zeroed shared memory of `total_bytes` that cannot be shrunk; `name` is for /proc/PID/maps.

    With `huge_pages="auto"`, reserved huge pages are used when there are enough, otherwise transparent ones are asked
    for; `"require"` insists on reserved ones. With `numa_node`, all of it comes from that node. `besides_bytes` are
    promised already, though not touched yet. Raises `ConfigError` when the host, the node, or this process's cgroup
    has less memory left than both together, or the kernel refuses to bind it.
    """
    node = None if numa_node is None else numa.chosen_node(numa_node)
    free_huge = _free_huge_page_bytes(node)
    reserved = huge_pages != "never" and free_huge >= round_up(total_bytes, HUGE_PAGE_BYTES)
    if huge_pages == "require" and not reserved:
        raise ConfigError(
            f"huge_pages: {format_bytes(total_bytes)} of huge pages were required, "
            f"{format_bytes(free_huge)} are free: reserve more (vm.nr_hugepages) or do not require them"
        )
    if reserved:
        try:
            return _create_reserved(total_bytes, name, node)
        except (OSError, ConfigError) as error:  # others took them meanwhile, or a cgroup limits
            if huge_pages == "require":
                size = format_bytes(total_bytes)
                raise ConfigError(f"huge_pages: {size} of them cannot be had: {error}") from error
    available, source = available_memory()
    limits = [(available - besides_bytes, source)]
    if node is not None:
        limits.append((node.available_bytes, f"NUMA node {node.number}"))
    available, source = min(limits)
    if total_bytes > available:
        raise ConfigError(
            f"{format_bytes(total_bytes)} of memory were asked for, {source} has "
            f"{format_bytes(max(0, available))} left: choose a smaller --memory or raise the limit"
        )
    memory = _create(total_bytes, name, 0, mmap.PAGESIZE, aligned=True)
    if node is not None:
        _bind(memory, node)
    if huge_pages != "never":
        advise_huge_pages(memory.view)
    return memory


def advise_huge_pages(view: memoryview) -> None:
    """Ask for transparent huge pages."""
    _advise(view, 0, len(view), mmap.MADV_HUGEPAGE)  # only advice: failing is fine


def _create_reserved(total_bytes: int, name: str, node: numa.Node | None) -> SharedMemory:
    """Memory of reserved huge pages. Raises `OSError` when there are too few after all."""
    memory = _create(total_bytes, name, os.MFD_HUGETLB | _MFD_HUGE_2MB, HUGE_PAGE_BYTES, aligned=True)
    if node is not None:
        _bind(memory, node)
    # Reserved pages may be of any node, and a cgroup counts pages only when they are touched: touching one above its
    # limit ends the process.
    try:
        os.posix_fallocate(memory.descriptor, 0, round_up(total_bytes, HUGE_PAGE_BYTES))
    except OSError:
        memory.close()
        raise
    return memory


def _bind(memory: SharedMemory, node: numa.Node) -> None:
    try:
        size = os.fstat(memory.descriptor).st_size
        numa.bind(address_of(memory.view), size, node.number)
    except ConfigError:
        memory.close()
        raise


def create_page(length: int, name: str) -> SharedMemory:
    """One zeroed shared page that cannot be shrunk. Raises `OSError` where the system gives no more."""
    return _create(length, name, 0, mmap.PAGESIZE)


def create_table_memory(total_bytes: int, name: str) -> SharedMemory:
    """Zeroed shared memory that only this process can write, also when others have a descriptor. A page counts only
    once it is written, so the memory may be far larger than the host has left.

    Raises `ConfigError` where the system does not let a process reserve that much, or cannot seal memory so.
    """
    try:
        memory = _create(total_bytes, name, 0, mmap.PAGESIZE, sealed=False)
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {format_bytes(total_bytes)} of address space ({error.strerror}): raise the limit "
            "(`ulimit -v`, `ulimit -f`) or lower the number of locations a peer may know"
        ) from error
    try:
        # After its own mapping was made: this one stays writable.
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, _SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        memory.close()
        raise ConfigError(
            f"this kernel cannot keep others from writing to shared memory ({error.strerror}): Linux 5.1 or "
            "newer can"
        ) from error
    _advise(memory.view, 0, total_bytes, mmap.MADV_NOHUGEPAGE)  # a page per entry would be 2 MiB
    return memory


def _create(
    total_bytes: int,
    name: str,
    flags: int,
    page_bytes: int,
    *,
    sealed: bool = True,
    aligned: bool = False,
) -> SharedMemory:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(
            descriptor, 0o600
        )  # a process with a read-only descriptor cannot reopen it for writing
        size = round_up(total_bytes, page_bytes)
        os.ftruncate(descriptor, size)
        if sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        if not aligned:
            return SharedMemory(descriptor, mmap.mmap(descriptor, 0), total_bytes)
        mapping, start = map_aligned([descriptor], [size], _READ_WRITE)
        return SharedMemory(descriptor, mapping, total_bytes, start=start)
    except BaseException:
        os.close(descriptor)
        raise


def map_read_only(descriptor: int, length: int, *, trusted_user: int | None = None) -> memoryview:
    """A read-only view of the first `length` bytes; the mapping lives as long as views of it.

    The caller keeps its descriptor and may close it. Raises `ConfigError` for memory that is too
    short, or that a user other than this one, root and `trusted_user` could shrink: touching a page that is
    gone would end this process.
    """
    return _view(descriptor, length, mmap.PROT_READ, trusted_user)


def map_writable(descriptor: int, length: int, *, trusted_user: int | None = None) -> memoryview:
    """Like `map_read_only`, for writing."""
    return _view(descriptor, length, _READ_WRITE, trusted_user)


def map_table(descriptor: int, length: int) -> mmap.mmap:
    """Like `map_read_only`, but the mapping: slices of it are bytes."""
    check_descriptor(descriptor, length)
    return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)


def _view(descriptor: int, length: int, protection: int, trusted_user: int | None) -> memoryview:
    check_descriptor(descriptor, length, trusted_user)
    if length < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(descriptor, 0, prot=protection))[:length]
    size = min(os.fstat(descriptor).st_size, round_up(length, HUGE_PAGE_BYTES))
    mapping, start = map_aligned([descriptor], [size], protection)
    return memoryview(mapping)[start : start + length]


def check_descriptor(descriptor: int, length: int, trusted_user: int | None = None) -> None:
    """Raise `ConfigError` unless `length` bytes of it can be mapped, and no other user than this one, root and
    `trusted_user` can shrink it."""
    actual = os.fstat(descriptor).st_size
    problem = _why_it_may_shrink(descriptor, trusted_user)
    if not 0 < length <= actual or problem:
        raise ConfigError(
            f"the peer's shared memory has {actual:,} bytes ({problem or 'sealed'}), {length:,} were announced: "
            "this is not a memory segment that can be mapped safely"
        )


def _why_it_may_shrink(descriptor: int, trusted_user: int | None) -> str:
    """Nothing for sealed memory, and for a file that only the trusted user, this one or root can change: the last two
    can end this process anyway."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return ""
    except OSError:  # neither a memfd nor a file on tmpfs
        pass
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "not sealed, and no file"
    if status.st_uid not in (0, os.geteuid(), trusted_user) or status.st_mode & 0o022:
        return "not sealed, and a file that another user can shrink"
    return ""


def prefault(
    view: memoryview,
    should_stop: Callable[[], bool],
    pause: Callable[[], None],
    *,
    huge_pages: bool = False,
) -> int:
    """Have the kernel provide the pages of a writable mapping now, not at the first write to each.

    With `huge_pages`, transparent ones where it has them: these take an eighth of the time, and save other processes a
    page fault for each 4 KiB that was filled. Works in pieces of 4 MiB, asks `should_stop` before each and calls
    `pause` after it; run it on a thread. Concurrent writes by others are kept. Returns the bytes done; stops
    early, without an error, when the kernel has no more memory to give.
    """
    done = 0
    while done < len(view) and not should_stop():
        piece = min(PREFAULT_PIECE_BYTES, len(view) - done)
        if huge_pages:
            _collapse(view, done, piece)  # the pages it leaves out are populated next
        code = _advise(view, done, piece, _MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # an older kernel: reading a page provides it as well
            np.frombuffer(view, np.uint8)[done : done + piece : mmap.PAGESIZE].max()
        elif code:
            break
        done += piece
        pause()
    return done


def makes_huge_pages() -> bool:
    """Whether the kernel makes transparent huge pages of a segment's memory. Tries it."""
    try:
        memory = create_memory(HUGE_PAGE_BYTES, "p2pstore-trial", huge_pages="auto")
    except (OSError, ConfigError):
        return False
    try:
        return _collapse(memory.view, 0, HUGE_PAGE_BYTES)
    finally:
        memory.close()


def _collapse(view: memoryview, start: int, length: int) -> bool:
    """Huge pages for what lies there, with what is in it; whether the kernel made them. It makes none where there is
    not one page yet. With one, it takes 0.1 ms, with 512 that have to be copied, 6."""
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for at in range(start, start + whole, HUGE_PAGE_BYTES):
        _advise(view, at, 1, _MADV_POPULATE_WRITE)
    return whole > 0 and _advise(view, start, whole, _MADV_COLLAPSE) == 0


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _advise(view: memoryview, start: int, length: int, advice: int) -> int:
    """madvise without the interpreter lock (mmap.madvise holds it). Returns 0 or the errno."""
    address = address_of(view) + start
    return 0 if _libc.madvise(address, length, advice) == 0 else ctypes.get_errno()


# --- how much memory there is ------------------------------------------------------------------


def available_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Bytes that this process may still use, and the source of the limit: the host, or a cgroup."""
    best = (_meminfo(proc, "MemAvailable"), "this host")
    for limit, used in memory_limits(proc, cgroups):
        best = min(best, (max(0, limit - used), f"the cgroup (limit {format_bytes(limit)})"))
    return best


def _free_huge_page_bytes(node: numa.Node | None = None) -> int:
    """Bytes of reserved 2 MiB pages that are not in use, on that node or anywhere."""
    folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    counts = [text_of(folder / name).strip() for name in ("free_hugepages", "resv_hugepages")]
    if not all(count.isdigit() for count in counts):
        return 0
    free_bytes = max(0, int(counts[0]) - int(counts[1])) * HUGE_PAGE_BYTES
    return free_bytes if node is None else min(free_bytes, node.free_huge_page_bytes)


def _meminfo(proc: Path, name: str) -> int:
    for line in text_of(proc / "meminfo").splitlines():
        label, _, rest = line.partition(":")
        if label == name:
            return int(rest.split()[0]) * 1024
    raise ConfigError(f"{proc / 'meminfo'} does not say {name}: is /proc mounted?")


PIECE_BYTES: Final = HUGE_PAGE_BYTES
"""Memories begin at multiples of this, as those of huge pages must."""
MAX_PIECES: Final = 8


class JoinedMemory:
    """Like `SharedMemory`, over several of them side by side, such as DRAM of several NUMA nodes, CXL and persistent
    memory: each of a multiple of 2 MiB, which end with it. An extent of the segment may lie in two.

    Raises `ConfigError` when the system lets this process have no addresses for them.
    """

    def __init__(self, memories: Sequence[SharedMemory], length: int) -> None:
        with ExitStack() as stack:
            for memory in memories:
                stack.callback(memory.close)
            self.pieces = [memory.length for memory in memories]
            self.descriptors = [memory.descriptor for memory in memories]
            self.length = length
            self.view = map_joined(self.descriptors, self.pieces, length, writable=True)
            self._memories = memories
            self._closing = stack.pop_all()

    def read_only_descriptors(self) -> list[int]:
        """New descriptors of the same memories, only good for reading; the caller closes them."""
        found: list[int] = []
        try:
            for memory in self._memories:
                found += memory.read_only_descriptors()
        except BaseException:
            for descriptor in found:
                os.close(descriptor)
            raise
        return found

    def close(self) -> None:
        """As `SharedMemory.close`."""
        if self.descriptors:
            self.descriptors = []
            self.view.release()
            self._closing.close()


def map_joined(
    descriptors: Sequence[int],
    pieces: Sequence[int],
    length: int,
    *,
    writable: bool,
    trusted_user: int | None = None,
) -> memoryview:
    """The first `length` bytes of several memories side by side, `pieces` bytes of each; the mapping lives as long as
    views of it.

    The caller keeps its descriptors and may close them. Raises `ConfigError` for memories that are too short for that,
    or that a user other than `trusted_user` could shrink, and when there are no addresses for them.
    """
    _check_pieces(pieces, length)
    for descriptor, size in zip(descriptors, pieces, strict=True):
        check_descriptor(descriptor, size, trusted_user)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping, start = map_aligned(descriptors, pieces, protection)
    return memoryview(mapping)[start : start + length]


def _check_pieces(pieces: Sequence[int], length: int) -> None:
    aligned = all(size > 0 and size % PIECE_BYTES == 0 for size in pieces)
    few = 0 < len(pieces) <= MAX_PIECES
    if not few or not aligned or not sum(pieces[:-1]) < length <= sum(pieces):
        raise ConfigError(
            f"memories of {', '.join(f'{size:,}' for size in pieces[: MAX_PIECES + 1])} bytes cannot be a segment of "
            f"{length:,}"
        )
