"""A peer whose memory outlives it: what it begins with, and clients of earlier lives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.core.copies.memory_return import FATES
from p2pstore.memory.kept_memory import Kept
from p2pstore.memory.mapped.kept_file import KeptMemory
from p2pstore.memory.segment import Segment
from p2pstore.objects import format_bytes

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

LOOK_SECONDS: Final = 1.0


def begin_with_kept(node: Node, memory: KeptMemory) -> None:
    """Have the core look at what an earlier life left. Call it before the node runs."""
    node.kept_memory = memory
    memory.is_kept = True
    memory.kept = Kept()  # the segment has it all by now
    segment = node.core.segment
    if len(segment.returned):
        node.core.floors.return_with_memory(node.now)
        logger.info(
            "memory: %s objects of earlier are in %s, and are checked",
            f"{len(segment.returned):,}",
            memory.path,
            extra={"event": "memory_open", "path": str(memory.path)},
        )


async def tell_what_returned(node: Node) -> None:
    """Log what became of what an earlier life left, when all of it was looked at."""
    while True:
        if not len(node.core.segment.returned):
            _log_what_returned(node.core.counters)
            return
        await trio.sleep(LOOK_SECONDS)


def _log_what_returned(counted: Mapping[str, int]) -> None:
    objects = {fate: counted.get(f"kept_objects_{fate}", 0) for fate in FATES}
    if any(objects.values()):
        logger.log(
            logging.WARNING if objects["damaged"] else logging.INFO,
            "memory: of what was kept, %s objects (%s) are back, %s were damaged, %s may have been removed meanwhile",
            f"{objects['returned']:,}",
            format_bytes(counted.get("kept_bytes_returned", 0)),
            f"{objects['damaged']:,}",
            f"{objects['discarded']:,}",
            extra={"event": "memory_returned", **objects},
        )


async def watch_earlier_clients(segment: Segment, memory: KeptMemory) -> None:
    """What clients of earlier lives look at, or may write to, stays until they have let go of the memory."""
    while segment.returned.has_earlier_clients:
        if not memory.is_used_by_earlier():
            segment.returned.end_earlier_clients()
            return
        await trio.sleep(LOOK_SECONDS)
