"""Memories mapped side by side, at multiples of a huge page: elsewhere the kernel maps 4 KiB at a time, whatever the
pages are, and the first touch of each of those costs 0.7 us. Shell.

Addresses for all of it are reserved first, and each memory is mapped over its part.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, format_bytes

HUGE_PAGE_BYTES: Final = 2 * MIB
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10


def address_of(view: memoryview) -> int:
    """Where the view's memory begins in this process."""
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address


def map_aligned(
    descriptors: Sequence[int], sizes: Sequence[int], protection: int
) -> tuple[mmap.mmap, int]:
    """Map the first `sizes` bytes of each memory, all but the last a multiple of 2 MiB. Returns what holds the mapping,
    and where in it the first memory begins.

    The caller keeps its descriptors and may close them. Raises `ConfigError` when a memory may not be mapped so, or the
    system lets this process have no addresses for them.
    """
    total = sum(sizes)
    try:
        # Its end unmaps all of it, whatever is mapped over it by then.
        reserved = mmap.mmap(
            -1,
            total + HUGE_PAGE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            prot=protection,
        )
    except OSError as error:
        raise _cannot_map(total, error) from error
    start = -address_of(memoryview(reserved)) % HUGE_PAGE_BYTES
    at = address_of(memoryview(reserved)) + start
    for descriptor, size in zip(descriptors, sizes, strict=True):
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(at, size, protection, flags, descriptor, 0) != at:
            code = ctypes.get_errno()
            raise _cannot_map(total, OSError(code, os.strerror(code)))
        at += size
    return reserved, start


def _cannot_map(total: int, error: OSError) -> ConfigError:
    text = f"cannot map {format_bytes(total)} of shared memory ({error.strerror})"
    if error.errno != errno.ENOMEM:
        return ConfigError(text)
    return ConfigError(f"{text}: raise the limit (`ulimit -v`), or choose a smaller --memory")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_size_t,
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
