"""A peer whose memory outlives it: what it begins with, and clients of earlier lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.transfer.kept import Kept
from p2pstore.transfer.kept_file import KeptMemory
from p2pstore.transfer.segment import Segment

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

LOOK_SECONDS: Final = 1.0


def begin_with_kept(node: Node, memory: KeptMemory) -> None:
    """Have the core look at what an earlier life left. Call it before the node runs."""
    node.kept_memory = memory
    memory.kept = Kept()  # the segment has it all by now
    segment = node.core.segment
    if segment.returned_count:
        node.core.floors.return_with_memory(node.now)
        logger.info(
            "memory: %s objects of earlier are in %s, and are checked",
            f"{segment.returned_count:,}",
            memory.path,
            extra={"event": "memory_open", "path": str(memory.path)},
        )


async def watch_earlier_clients(segment: Segment, memory: KeptMemory) -> None:
    """What clients of earlier lives look at, or may write to, stays until they have let go of the memory."""
    while segment.is_used_by_earlier:
        if not memory.is_used_by_earlier():
            segment.release_earlier()
            return
        await trio.sleep(LOOK_SECONDS)
