"""An object's payload by RDMA: several chunks under way, each verified before it counts. Under trio."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from p2pstore.objects import chunk_bounds, chunk_sum
from p2pstore.transfer.rdma_reads import Line, Read, ReadEngine
from p2pstore.transfer.rdma_staging import Block, BlockPool, address_of
from p2pstore.transfer.rdma_verbs import Region
from p2pstore.transfer.trace import ReadWatch
from p2pstore.transfer.transport import PullFailed
from p2pstore.wire import Code

CHUNKS_UNDER_WAY: Final = 8
"""Of one object; more of them hardly fill a path better, and take blocks away from others."""


MEASURED_UNDER_WAY: Final = 4
MEASURED_READ_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Payload:
    """What to read from where: `offset` is in the other side's memory, `sums` are those of its chunks."""

    line: Line
    offset: int
    length_bytes: int
    sums: Sequence[int]
    progress_seconds: float


async def read_directly(
    engine: ReadEngine, payload: Payload, view: memoryview, region: Region, watch: ReadWatch | None
) -> None:
    """Read straight into `view`, which is inside `region`. Nothing writes to it when this has returned or raised.

    Raises `PullFailed` (STALE) for a chunk that does not match, `ReadFailed`, `DeadlineExceeded`.
    """
    bounds = list(chunk_bounds(payload.length_bytes))
    address = address_of(view)
    under_way: deque[Read] = deque()
    begun = 0
    try:
        for number, (start, end) in enumerate(bounds):
            while begun < len(bounds) and len(under_way) < CHUNKS_UNDER_WAY:
                first, last = bounds[begun]
                at = payload.offset + first
                size = last - first
                read = await engine.read(payload.line, at, size, region, address + first)
                under_way.append(read)
                begun += 1
            await under_way[0].wait(payload.progress_seconds)
            under_way.popleft()
            verify_chunk(view[start:end], payload.sums[number], number, watch)
            tell(watch, end, len(view))
    finally:
        if under_way:
            await engine.settle(payload.line, under_way)


async def read_staged(
    engine: ReadEngine, payload: Payload, view: memoryview, pool: BlockPool, watch: ReadWatch | None
) -> None:
    """Read into registered blocks and copy what was verified on to `view`. Raises like `read_directly`.

    When this ends early, the blocks stay with the reads that still fill them; `view` is touched no more.
    """
    bounds = list(chunk_bounds(payload.length_bytes))
    under_way: deque[tuple[Read, Block]] = deque()
    begun = 0
    try:
        for number, (start, end) in enumerate(bounds):
            while begun < len(bounds) and len(under_way) < CHUNKS_UNDER_WAY:
                # Blocks may be scarce: who has some under way does not wait for more.
                block = pool.take_nowait() if under_way else await pool.take()
                if block is None:
                    break
                first, last = bounds[begun]
                at = payload.offset + first
                under_way.append(await _begin(engine, payload.line, at, last - first, block))
                begun += 1
            read, block = under_way[0]
            await read.wait(payload.progress_seconds)
            under_way.popleft()
            try:
                chunk = block.view[: end - start]
                verify_chunk(chunk, payload.sums[number], number, watch)
                np.copyto(np.frombuffer(view[start:end], np.uint8), np.frombuffer(chunk, np.uint8))
            finally:
                block.give_back()
            tell(watch, end, len(view))
    finally:
        for read, block in under_way:
            read.when_ended(block.give_back)


async def _begin(
    engine: ReadEngine, line: Line, at: int, size: int, block: Block
) -> tuple[Read, Block]:
    try:
        return await engine.read(line, at, size, block.pool.region, block.address), block
    except BaseException:
        block.give_back()
        raise


async def read_for(
    engine: ReadEngine, line: Line, pool: BlockPool, seconds: float
) -> tuple[int, float]:
    """Read the beginning of the other side's memory again and again, for so long, into blocks that nobody looks at:
    (bytes, seconds). Raises `ReadFailed`, `DeadlineExceeded`."""
    size = min(pool.block_bytes, line.memory.length_bytes)
    under_way: deque[tuple[Read, Block]] = deque()
    moved, begin = 0, trio.current_time()
    try:
        while True:
            while len(under_way) < MEASURED_UNDER_WAY:
                under_way.append(await _begin(engine, line, 0, size, await pool.take()))
            read, block = under_way[0]
            await read.wait(MEASURED_READ_SECONDS)
            under_way.popleft()
            block.give_back()
            moved += size
            elapsed = trio.current_time() - begin
            if elapsed >= seconds:
                return moved, elapsed
    finally:
        for read, block in under_way:
            read.when_ended(block.give_back)


def verify_chunk(chunk: memoryview, expected: int, number: int, watch: ReadWatch | None) -> None:
    """Raise `PullFailed` (STALE) unless the chunk is what it must be."""
    began = 0.0 if watch is None else watch.clock()
    if chunk_sum(chunk) != expected:
        raise PullFailed(
            Code.STALE, f"chunk {number} of the object arrived damaged; nothing was delivered"
        )
    if watch is not None:
        watch.verified(watch.clock() - began)


def tell(watch: ReadWatch | None, done_bytes: int, total_bytes: int) -> None:
    """Tell whoever watches how far it is."""
    if watch is not None:
        watch.advanced(done_bytes, total_bytes)
