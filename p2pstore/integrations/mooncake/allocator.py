"""Memory of its own for programs that ask by address, and NUMA nodes to have it on."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path


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
