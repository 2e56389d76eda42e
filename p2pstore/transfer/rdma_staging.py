"""Registered memory to read into, for destinations that are not registered themselves. Under trio."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from p2pstore.objects import CHUNK_BYTES, KIB, MIB
from p2pstore.transfer.rdma_verbs import Device

SMALL_BLOCK_BYTES: Final = 128 * KIB
"""Payload and trailer of an object up to here come by one read. No trailer alone is longer."""
SMALL_BLOCKS: Final = 64
DEFAULT_STAGING_BYTES: Final = 32 * MIB


def address_of(view: memoryview) -> int:
    """Where writable memory is, in this process."""
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address


class Block:
    """Registered memory that one read at a time goes to."""

    def __init__(self, view: memoryview, address: int, pool: BlockPool) -> None:
        self.view = view
        self.address = address
        self.pool = pool

    def give_back(self) -> None:
        """The end of `BlockPool.take`; nothing may write to it any more."""
        self.pool.give_back(self)


class BlockPool:
    """Blocks of registered memory to read into, for destinations that are not registered."""

    def __init__(self, device: Device, block_bytes: int, count: int) -> None:
        memory = memoryview(mmap.mmap(-1, block_bytes * count))
        start = address_of(memory)
        self.region = device.register(start, len(memory), remote_read=False)
        self.block_bytes = block_bytes
        self._free = [
            Block(memory[at : at + block_bytes], start + at, self)
            for at in range(0, len(memory), block_bytes)
        ]
        self.count = count
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def taken(self) -> int:
        """Blocks in use."""
        return self.count - len(self._free)

    def take_nowait(self) -> Block | None:
        """A free block, if there is one and nobody waits for it."""
        return self._free.pop() if self._free and not self._waiting else None

    async def take(self) -> Block:
        """A free block, in the order of asking."""
        while not self._free:
            await self._waiting.park()
        return self._free.pop()

    def give_back(self, block: Block) -> None:
        self._free.append(block)
        self._waiting.unpark()


@dataclass(frozen=True, slots=True)
class Staging:
    """Blocks for slots, trailers and small objects, and blocks for chunks."""

    small: BlockPool
    large: BlockPool

    @classmethod
    def on(cls, device: Device, total_bytes: int = DEFAULT_STAGING_BYTES) -> Staging:
        """Register blocks with a device, chunks of `total_bytes` (at least two)."""
        chunks = max(2, total_bytes // CHUNK_BYTES)
        return cls(
            BlockPool(device, SMALL_BLOCK_BYTES, SMALL_BLOCKS),
            BlockPool(device, CHUNK_BYTES, chunks),
        )
