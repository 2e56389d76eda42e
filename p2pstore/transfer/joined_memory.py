"""Several memories side by side, as one: a peer's segment over DRAM of several NUMA nodes, CXL and persistent memory.
Shell.

Addresses for all of it are reserved first, and each memory is mapped over its part. What is in the segment need not
know where one memory ends: an extent may lie in two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.objects import format_bytes
from p2pstore.transfer.layout import round_up
from p2pstore.transfer.memory import HUGE_PAGE_BYTES, SharedMemory, address_of, check_descriptor

PIECE_BYTES: Final = HUGE_PAGE_BYTES
"""Memories begin at multiples of this, as those of huge pages must."""
MAX_PIECES: Final = 8
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10


class JoinedMemory:
    """Like `SharedMemory`, over several of them, each of a multiple of 2 MiB, which end with it.

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
    or that somebody could shrink (other than `trusted_user`), and when there are no addresses for them.
    """
    _check_pieces(pieces, length)
    for descriptor, size in zip(descriptors, pieces, strict=True):
        check_descriptor(descriptor, size, trusted_user)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    total = sum(pieces)
    try:
        # Its end unmaps all of it, whatever is mapped over it by then.
        reserved = mmap.mmap(
            -1,
            total + PIECE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            prot=protection,
        )
    except OSError as error:
        raise _no_addresses(total, error.strerror) from error
    begin = address_of(memoryview(reserved))
    start = round_up(begin, PIECE_BYTES) - begin
    at = begin + start
    for descriptor, size in zip(descriptors, pieces, strict=True):
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(at, size, protection, flags, descriptor, 0) != at:
            raise _no_addresses(total, os.strerror(ctypes.get_errno()))
        at += size
    return memoryview(reserved)[start : start + length]


def _check_pieces(pieces: Sequence[int], length: int) -> None:
    aligned = all(size > 0 and size % PIECE_BYTES == 0 for size in pieces)
    few = 0 < len(pieces) <= MAX_PIECES
    if not few or not aligned or not sum(pieces[:-1]) < length <= sum(pieces):
        raise ConfigError(
            f"memories of {', '.join(f'{size:,}' for size in pieces[: MAX_PIECES + 1])} bytes cannot be a segment of "
            f"{length:,}"
        )


def _no_addresses(total: int, reason: str | None) -> ConfigError:
    return ConfigError(
        f"cannot map {format_bytes(total)} of memory side by side ({reason}): raise the limit (`ulimit -v`), or choose "
        "a smaller --memory"
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    ctypes.c_size_t,
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
