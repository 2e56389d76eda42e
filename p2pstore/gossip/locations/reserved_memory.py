"""Memory of this process alone, for tables that never move. No I/O, so pure modules may use it.

A table for the largest number of entries is reserved at once. A page counts only when something is written
to it, so a table costs what its entries cost, and it is never copied to grow.
"""

from __future__ import annotations

import mmap
from typing import Final

_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""`MAP_NORESERVE` on Linux; Python names it since 3.13."""


def reserve(length_bytes: int) -> mmap.mmap:
    """Zeroed anonymous memory that costs nothing until it is written. Raises `MemoryError` past a limit."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, length_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(
            f"cannot reserve {length_bytes:,} bytes of address space ({error.strerror}): raise the limit "
            "(`ulimit -v`, vm.overcommit_memory) or lower the number of locations a peer may know"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # With huge pages, the first entry of each table would cost 2 MiB.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
