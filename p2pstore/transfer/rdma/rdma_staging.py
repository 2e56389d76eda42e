"""Registered memory to read into, for destinations that are not registered themselves. Under trio."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from p2pstore.memory.mapped.mapping import address_of
from p2pstore.memory.segment_layout import MAX_TRAILER_BYTES
from p2pstore.objects import CHUNK_BYTES, MIB
from p2pstore.transfer.rdma.rdma_verbs import Device, Region

SMALL_BLOCK_BYTES: Final = MAX_TRAILER_BYTES + 1
LARGE_BLOCK_BYTES: Final = CHUNK_BYTES + SMALL_BLOCK_BYTES
"""Whole pages, with room for an object of one chunk and any trailer."""
SMALL_BLOCKS: Final = 64
DEFAULT_STAGING_BYTES: Final = 32 * MIB


class Registered:
    """Memory that several devices know, each by a region of its own: `regions[n]` is that of device n."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = regions

    @classmethod
    def with_all(cls, devices: Sequence[Device], view: memoryview, *, remote_read: bool) -> Registered:
        """Register memory with each of these devices. Raises what `Device.register` raises."""
        address = address_of(view)
        return cls([each.register(address, len(view), remote_read=remote_read) for each in devices])

    def holds(self, address: int, length_bytes: int) -> bool:
        """Whether all of that memory is inside."""
        return self.regions[0].holds(address, length_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Registered memory that one read at a time goes to. `give_back` when nothing writes to it any more."""

    view: memoryview
    address: int
    memory: Registered
    release: Callable[[Block], None] | None = None

    def give_back(self) -> None:
        """The end of `BlockPool.take`; nothing may write to it any more."""
        if self.release is not None:
            self.release(self)


class BlockPool:
    """Blocks of registered memory to read into, for destinations that are not registered."""

    def __init__(self, devices: Sequence[Device], block_bytes: int, count: int) -> None:
        memory = memoryview(mmap.mmap(-1, block_bytes * count))
        start = address_of(memory)
        self.memory = Registered.with_all(devices, memory, remote_read=False)
        self.block_bytes = block_bytes
        self._free = [
            Block(memory[at : at + block_bytes], start + at, self.memory, self.give_back)
            for at in range(0, len(memory), block_bytes)
        ]
        self.count = count
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def taken(self) -> int:
        """Blocks in use."""
        return self.count - len(self._free)

    def take_nowait(self) -> Block | None:
        """A free block, if there is one and no task waits for it."""
        return self._free.pop() if self._free and not self._waiting else None

    async def take(self) -> Block:
        """A free block, in the order of asking."""
        while not self._free:
            await self._waiting.park()
        return self._free.pop()

    def give_back(self, block: Block) -> None:
        """The end of `take`."""
        self._free.append(block)
        self._waiting.unpark()


@dataclass(frozen=True, slots=True)
class Staging:
    """Blocks for slots and trailers, and blocks for chunks, or whole objects of one chunk."""

    small: BlockPool
    large: BlockPool

    @classmethod
    def on(cls, devices: Sequence[Device], total_bytes: int = DEFAULT_STAGING_BYTES) -> Staging:
        """Register blocks with devices, for chunks of `total_bytes` (at least two)."""
        chunks = max(2, total_bytes // CHUNK_BYTES)
        return cls(
            BlockPool(devices, SMALL_BLOCK_BYTES, SMALL_BLOCKS),
            BlockPool(devices, LARGE_BLOCK_BYTES, chunks),
        )
