"""Having the kernel provide a peer's memory before somebody writes to it."""

from __future__ import annotations

import time
from typing import Final

import trio

from p2pstore.config import PeerConfig
from p2pstore.memory.mapped.mapped_memory import prefault
from p2pstore.peer.segment_memory import SegmentMemory

PAUSE_SECONDS: Final = 0.001


async def provide_pages(memory: SegmentMemory, config: PeerConfig) -> None:
    """Have the kernel provide the memory, on a thread: fresh pages fill at 1.3 GB/s, used ones at 13. Stops early
    when there is no more memory to give."""
    stopped = False
    # A file has all its pages from the start. They would have to be copied.
    huge_pages = config.huge_pages != "never" and config.memory_path is None

    def run() -> None:
        prefault(
            memory.view,
            lambda: stopped,
            lambda: time.sleep(PAUSE_SECONDS),
            huge_pages=huge_pages,
        )

    async with trio.open_nursery() as nursery:

        async def stop_when_cancelled() -> None:
            nonlocal stopped
            try:
                await trio.sleep_forever()
            finally:
                stopped = True

        nursery.start_soon(stop_when_cancelled)
        await trio.to_thread.run_sync(run)
        nursery.cancel_scope.cancel()
