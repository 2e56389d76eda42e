"""Memory by address: views of it, registered regions, allocated memory, and scratch memory that is used again."""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import threading
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from p2pstore.values import RegisteredBuffer

MAX_ADDRESS: Final = 2**47
"""Above is no memory of a process."""
_WRITABLE: Final = 0x200

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object


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
    """`view_at` of each. All are slices of one view, which takes a third of the time; the bytes in between are
    not read."""
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


class Registrations:
    """The regions that a program has registered. They may not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, RegisteredBuffer] = {}
        self._starts: list[int] = []

    def add(self, address: int, size: int) -> bool:
        """Register a region: its pages are provided, so that the first read into it does not wait for the kernel.
        Returns False when a part of it is registered already. Raises `ValueError` for no memory."""
        view = view_at(address, size)
        if not size:
            raise ValueError("a registered buffer has at least one byte")
        with self._lock:
            place = bisect_right(self._starts, address)
            if place and address < self._starts[place - 1] + len(
                self._regions[self._starts[place - 1]]
            ):
                return False
            if place < len(self._starts) and address + size > self._starts[place]:
                return False
            self._regions[address] = RegisteredBuffer(view)
            insort(self._starts, address)
        return True

    def drop(self, address: int) -> bool:
        """Forget the region that begins at `address`; False when there is none."""
        with self._lock:
            region = self._regions.pop(address, None)
            if region is None:
                return False
            self._starts.remove(address)
        region.close()
        return True

    def size_at(self, address: int) -> int | None:
        """How much of a registered region lies at and behind `address`; None when it is in none."""
        with self._lock:
            place = bisect_right(self._starts, address)
            if not place:
                return None
            start = self._starts[place - 1]
            left = start + len(self._regions[start]) - address
            return left if left > 0 else None

    def clear(self) -> None:
        """Forget all of them."""
        for address in list(self._regions):
            self.drop(address)


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
    """A handle that keeps a leased view."""
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


KEPT_BYTES: Final = 64 * 1024 * 1024
SMALL_BYTES: Final = 64 * 1024


class Scratch:
    """Room for what is gathered or scattered. Any thread may take some; one piece is kept for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: memoryview | None = None

    @contextmanager
    def room(self, size: int) -> Iterator[memoryview]:
        """`size` bytes, whatever they are, for the length of the block."""
        with self._lock:
            memory, self._kept = self._kept, None
        if memory is None or len(memory) < size:
            memory = np.empty(max(size, 1), np.uint8).data
        try:
            yield memory[:size]
        finally:
            if len(memory) <= KEPT_BYTES:
                with self._lock:
                    self._kept = memory


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without the interpreter's lock."""
    if len(source) <= SMALL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy the beginning of `source` to the first part, what follows to the next, and so on, as far as it goes."""
    at = 0
    for part in parts:
        count = min(len(part), len(source) - at)
        copy(part[:count], source[at : at + count])
        at += count
