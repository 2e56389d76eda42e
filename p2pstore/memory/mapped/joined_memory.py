"""Several memories side by side, as one: a peer's segment over DRAM of several NUMA nodes, CXL and persistent memory.
Shell.

The segment does not know where one memory ends: an extent may lie in two.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapped_memory import SharedMemory, check_descriptor
from p2pstore.memory.mapped.mapping import HUGE_PAGE_BYTES, map_aligned

PIECE_BYTES: Final = HUGE_PAGE_BYTES
"""Memories begin at multiples of this, as those of huge pages must."""
MAX_PIECES: Final = 8


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
