"""Memory for direct I/O."""

from __future__ import annotations

import ctypes
import mmap

from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES, memory_address


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory at an address that direct I/O takes, given back when the last view of it is gone: `size` bytes,
    and room up to the next multiple of 4,096 after them. Raises `ValueError` unless `size` is positive."""
    if size <= 0:
        raise ValueError(f"a buffer of {size} bytes")
    return memoryview(mmap.mmap(-1, -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES))[:size]


def fast_address(buffer: memoryview) -> int:
    """`memory_address` in a fifth of the time, for memory that can be written."""
    if buffer.readonly:
        return memory_address(buffer)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
