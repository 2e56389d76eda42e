"""Memory by address: its kind, views of it, registered regions, allocated memory, and scratch memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import operator
import os
import threading
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from p2pstore.errors import GpuCopyFailed
from p2pstore.integrations.mooncake.cuda_memory import DeviceMemory, Place, loaded_driver
from p2pstore.integrations.mooncake.mooncake_types import alike
from p2pstore.values import RegisteredBuffer

MAX_ADDRESS: Final = 2**47
"""Above is no memory of a process."""
_WRITABLE: Final = 0x200
_MAX_VECTORS: Final = 1024
"""The kernel's limit of one call (IOV_MAX)."""
_BIN: Final = ctypes.create_string_buffer(_MAX_VECTORS)

_read_memory = ctypes.CDLL(None, use_errno=True).process_vm_readv
_read_memory.restype = ctypes.c_ssize_t
_read_memory.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
KEPT_BYTES: Final = 64 * 1024 * 1024
KEPT_PIECES: Final = 4
GROUP_BYTES: Final = 64 * 1024 * 1024
"""Most bytes gathered or scattered at one time."""


def view_at(address: int, size: int) -> memoryview:
    """The `size` bytes at `address`, writable, in place. Raises `ValueError` for what cannot be an address or a size,
    `TypeError` for negative ones; that there is memory is the caller's word."""
    if address < 0 or size < 0:
        raise TypeError(f"an address and a size are not negative: {address}, {size}")
    if not 0 < address < MAX_ADDRESS or size >= MAX_ADDRESS:
        raise ValueError(f"{size} bytes at {address}: no memory can be there")
    try:
        view: memoryview = _view_of_memory(address, size, _WRITABLE)
    except ctypes.ArgumentError:  # numpy's integers; anything else is a TypeError here
        return view_at(operator.index(address), operator.index(size))
    return view


def views_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """`view_at` of each: slices of one view, in a third of the time; the bytes in between are not read."""
    if not len(addresses):
        return []
    ends = map(operator.add, addresses, sizes)
    low, high = operator.index(min(addresses)), operator.index(max(ends))
    if not 0 < low <= high < MAX_ADDRESS or min(sizes) < 0:
        return [view_at(*each) for each in zip(addresses, sizes, strict=True)]  # says what is wrong
    whole = view_at(low, high - low)
    return [
        whole[address - low : address - low + size]
        for address, size in zip(addresses, sizes, strict=True)
    ]


def is_listed(address: int, size: int, rights: bytes) -> bool:
    """Whether the kernel lists all of these bytes as memory of this process with `rights` (`r`, `rw`). A few
    milliseconds in an engine's process, which has thousands of mappings."""
    end = address + size
    try:
        with open("/proc/self/maps", "rb") as mappings:
            for line in mappings:
                span, flags = line.split(b" ", 2)[:2]
                first, last = (int(each, 16) for each in span.split(b"-"))
                if last <= address:
                    continue
                if first > address or not flags.startswith(rights):
                    return False
                address = last
                if address >= end:
                    return True
    except OSError:
        return True  # no kernel that tells: the caller's word counts
    return False


def are_readable(addresses: Sequence[int], sizes: Sequence[int]) -> bool | None:
    """Whether the first and the last byte of all these places can be read: about 2 us, and 0.4 us a place. A GPU's
    memory cannot be, and some that a driver mapped. None where the kernel does not tell."""
    ends = zip(addresses, sizes, strict=True)
    try:
        wanted = array("Q", [x for at, size in ends for x in (at, 1, at + max(size, 1) - 1, 1)])
    except OverflowError:  # no address; view_at says why
        return False
    for start in range(0, len(wanted), 2 * _MAX_VECTORS):
        some = wanted[start : start + 2 * _MAX_VECTORS]
        count = len(some) // 2
        into = array("Q", (ctypes.addressof(_BIN), count))
        pointers = into.buffer_info()[0], some.buffer_info()[0]
        if _read_memory(os.getpid(), pointers[0], 1, pointers[1], count, 0) != count:
            return False if ctypes.get_errno() in (0, errno.EFAULT) else None
    return True


def place_at(address: int, size: int, *, writes: bool) -> Place:
    """The memory at an unregistered address: of this process, or of a GPU. Raises `ValueError`, and as `view_at`."""
    view = view_at(address, size)
    address, size = operator.index(address), operator.index(size)
    told = are_readable([address], [size]) if size else True
    if told:
        return view
    driver = loaded_driver()
    device = None if driver is None else driver.memory_at(address, size)
    if device is not None:
        return device
    if told is None or is_listed(address, size, b"rw" if writes else b"r"):
        return view
    raise ValueError(f"{size} bytes at {address:#x} are neither memory of this process nor of a GPU")


Region = RegisteredBuffer | DeviceMemory | memoryview
"""Registered memory: writable of this process, of a GPU, and read-only of this process."""


class Registrations:
    """The regions that a program has registered. They may not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []
        """Replaced, never changed: calls read it without the lock."""

    def add(self, address: int, size: int) -> Region | None:
        """Register a region: its pages are provided, so that the first read into it does not wait for the kernel.
        None when a part of it is registered already. Raises `ValueError` for neither this process's nor a
        GPU's memory."""
        view_at(address, size)
        address, size = operator.index(address), operator.index(size)
        if not size:
            raise ValueError("a registered buffer has at least one byte")
        with self._lock:
            if self._overlaps(address, size):
                return None
            region = self._regions[address] = _region_at(address, size)
            starts = [*self._starts]
            insort(starts, address)
            self._starts = starts
        return region

    def _overlaps(self, address: int, size: int) -> bool:
        place = bisect_right(self._starts, address)
        if place:
            before = self._starts[place - 1]
            if address < before + len(self._regions[before]):
                return True
        return place < len(self._starts) and address + size > self._starts[place]

    def place(self, address: int, size: int, *, writes: bool = False) -> Place:
        """The memory at an address, to be read from, or written to with `writes`. Raises as `place_at`; for registered
        memory nothing is asked of the kernel or of a driver."""
        region, start = self._around(address, size)
        match region:
            case RegisteredBuffer():
                return view_at(address, size)
            case memoryview() if writes:
                raise ValueError(f"{address:#x} is registered, and read-only")
            case memoryview():
                return view_at(address, size)
            case DeviceMemory():
                return region[address - start : address - start + size]
        return place_at(address, size, writes=writes)

    def places(
        self, addresses: Sequence[int], sizes: Sequence[int], *, writes: bool = False
    ) -> list[Place]:
        """`place` of each; faster where all are in one region, or none in any."""
        if len(addresses) > 1:
            low, high = min(addresses), max(map(operator.add, addresses, sizes))
            if min(sizes) >= 0 and isinstance(self._around(low, high - low)[0], RegisteredBuffer):
                return list(views_at(addresses, sizes))
            known = any(self._around(*each)[0] for each in zip(addresses, sizes, strict=True))
            if not known and are_readable(addresses, sizes):
                return list(views_at(addresses, sizes))
        return [self.place(*each, writes=writes) for each in zip(addresses, sizes, strict=True)]

    def several(
        self,
        all_pointers: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        *,
        writes: bool = False,
    ) -> dict[int, list[Place]]:
        """The places of each object, by its number; those of objects that were named wrongly are missing."""
        some = range(len(all_pointers))
        try:
            flat = list(chain(*all_pointers)), list(chain(*all_sizes))
            places = iter(self.places(*flat, writes=writes))
            if [*map(len, all_pointers)] == [*map(len, all_sizes)] and all(map(len, all_sizes)):
                return {number: list(islice(places, len(all_sizes[number]))) for number in some}
        except (ValueError, TypeError):
            pass
        found = {}
        for number in some:
            pointers, sizes = all_pointers[number], all_sizes[number]
            with suppress(ValueError, TypeError):
                if alike(pointers, sizes) and len(pointers):
                    found[number] = self.places(pointers, sizes, writes=writes)
        return found

    def pairs(
        self,
        whole: memoryview | None,
        pointers: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        writes: bool = False,
    ) -> list[tuple[Place, memoryview]] | None:
        """Pairs of the caller's memory and the object's part. None when one of them cannot be, or without an object."""
        try:
            if whole is None or not alike(pointers, sizes, offsets):
                return None
            parts = [whole[at : at + size] for size, at in zip(sizes, offsets, strict=True)]
            if list(map(len, parts)) != list(sizes) or min(offsets, default=0) < 0:
                return None
            return list(zip(self.places(pointers, sizes, writes=writes), parts, strict=True))
        except (ValueError, TypeError):
            return None

    def host(self, address: int, size: int, *, writes: bool = False) -> memoryview:
        """`place`, for calls that read or write headers there. Raises `ValueError` also for memory of a GPU."""
        place = self.place(address, size, writes=writes)
        if isinstance(place, DeviceMemory):
            raise ValueError(f"{address:#x} is on a GPU: this call is for memory of this process")
        return place

    def _around(self, address: int, size: int) -> tuple[Region | None, int]:
        """The region that all of these bytes are in, and where it begins."""
        starts = self._starts
        number = bisect_right(starts, address)
        if not number:
            return None, 0
        start = starts[number - 1]
        region = self._regions.get(start)
        return (region if region and address + size <= start + len(region) else None), start

    def drop(self, address: int) -> bool:
        """Forget the region that begins at `address`; False when there is none."""
        with self._lock:
            region = self._regions.pop(address, None)
            if region is None:
                return False
            self._starts = [start for start in self._starts if start != address]
        if isinstance(region, RegisteredBuffer):
            region.close()
        return True

    def size_at(self, address: int) -> int | None:
        """How much of a registered region lies at and behind `address`; None when it is in none."""
        region, start = self._around(address, 1)
        return None if region is None else start + len(region) - address

    def pinned(self, size: int) -> memoryview | None:
        """Page-locked memory, where a GPU's memory is registered; None where it is not, or there is no such memory."""
        for region in list(self._regions.values()):
            if isinstance(region, DeviceMemory):
                with suppress(GpuCopyFailed):
                    return region.driver.pinned(region.context, size)
        return None

    def clear(self) -> None:
        for address in list(self._regions):
            self.drop(address)


def _region_at(address: int, size: int) -> Region:
    view = view_at(address, size)
    if is_listed(address, size, b"rw"):
        return RegisteredBuffer(view)
    if is_listed(address, size, b"r"):
        return view.toreadonly()
    place = place_at(address, size, writes=False)
    if isinstance(place, DeviceMemory):
        return place
    raise ValueError(f"the {size} bytes at {address:#x} are not memory of this process throughout")


class BufferHandle(np.ndarray[Any, Any]):
    """The bytes of an object in the store's memory, in place and read-only: they stay as they are as long as this, or
    anything made from it, is there. A buffer of signed bytes, with `len`, `size()` and `ptr()`."""

    def ptr(self) -> int:
        """The address of the first byte."""
        return int(self.ctypes.data)

    def size(self) -> int:  # type: ignore[override] # what numpy has as an attribute is a method in Mooncake
        """The length in bytes."""
        return len(self)

    def __repr__(self) -> str:
        return f"BufferHandle({len(self)} bytes)"

    __str__ = __repr__


def handle_of(view: memoryview) -> BufferHandle:
    values = np.frombuffer(view, np.int8) if len(view) else np.empty(0, np.int8)
    return values.view(BufferHandle)


class MooncakeHostMemAllocator:
    """Gives out page-aligned memory by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """The address of `size` new bytes. Raises `ValueError` for less than one, `OSError` when there is no memory."""
        if size < 1:
            raise ValueError(f"cannot allocate {size} bytes")
        try:
            memory = mmap.mmap(-1, size)
        except OverflowError as error:
            raise ValueError(f"cannot allocate {size} bytes") from error
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        with self._lock:
            self._memory[address] = memory
        return address

    def free(self, address: int) -> int:
        """Give memory back; 0, or -1 when it is not from here."""
        with self._lock:
            memory = self._memory.pop(address, None)
        return -1 if memory is None else 0

    def close(self) -> None:
        """Give all of it back."""
        with self._lock:
            self._memory.clear()


def bind_to_numa_node(node: int) -> None:
    """Run the calling thread on the processors of a NUMA node, whose memory the kernel then prefers. Raises
    `ValueError` when the machine has no such node."""
    try:
        text = Path(f"/sys/devices/system/node/node{int(node)}/cpulist").read_text()
    except OSError:
        raise ValueError(f"this machine has no NUMA node {node}") from None
    processors: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            processors.update(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, processors)


class Scratch:
    """Room for what is gathered or scattered. Any thread may take some; a few pieces are kept for the next. `pinned`
    makes page-locked memory, which takes long, or None."""

    def __init__(self, pinned: Callable[[int], memoryview | None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._pinned = pinned
        self._kept: list[memoryview] = []

    @contextmanager
    def room(self, size: int, *, for_gpu: bool = False) -> Iterator[memoryview]:
        """`size` bytes, whatever they are, for the length of the block."""
        with self._lock:
            memory = self._kept.pop() if self._kept and size <= KEPT_BYTES else None
        if memory is None or len(memory) < size:
            locked = self._pinned(max(size, KEPT_BYTES)) if for_gpu else None
            memory = np.empty(max(size, 1), np.uint8).data if locked is None else locked
        try:
            yield memory[:size]
        finally:
            with self._lock:
                if len(memory) <= KEPT_BYTES and len(self._kept) < KEPT_PIECES:
                    self._kept.append(memory)


def scattered(source: memoryview, parts: Sequence[Place]) -> Iterator[tuple[Place, memoryview]]:
    """Copies of the beginning of `source` to the first part, of what follows to the next, as far as it goes."""
    at = 0
    for part in parts:
        count = min(len(part), len(source) - at)
        if count:
            yield part[:count], source[at : at + count]
        at += count


def in_groups(lengths: dict[int, int]) -> list[list[int]]:
    """The numbers, cut into runs of at most 64 MiB, or one."""
    groups: list[list[int]] = []
    total = 0
    for number, length in lengths.items():
        if not groups or total + length > GROUP_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(number)
        total += length
    return groups
