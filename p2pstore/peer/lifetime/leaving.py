"""Leaving: hand over, write to the SSD, say goodbye, save. Shell."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.core.copies.hand_over import HandedOver, HandOverOperation
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.objects import counted, format_bytes

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

FAREWELL_SECONDS: Final = 1.0
TELL_SECONDS: Final = 0.5
"""How long a peer that was asked to leave waits for a client to ask how that went."""


class Leaving:
    """The end of one peer. `drained` is set when the last operation has ended."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self.drained = trio.Event()
        self._hand_over: HandOverOperation | None = None
        self._all_handed_over = False
        self._told = trio.Event()

    @property
    def handed_over(self) -> HandedOver | None:
        """Progress of the hand-over; None before it begins."""
        return None if self._hand_over is None else self._hand_over.handed_over

    def document(self) -> dict[str, Any] | None:
        """For the statistics; once it is known how that ended, and was asked for, this peer ends."""
        handed = self.handed_over
        if handed is None:
            return None
        if self._all_handed_over:
            self._told.set()
        return {**asdict(handed), "done": self._all_handed_over}

    async def run(self) -> None:
        """Take no new work, finish what is under way, hand over to others what this peer alone holds and write to the
        SSD what memory has (at most `drain_seconds` for all of it), tell the others, keep what must survive.

        A peer whose memory is kept comes back with all of it: it hands nothing over and writes nothing to the SSD,
        unless it was asked to leave, which is for good. Then nothing is kept."""
        stays = self._node.kept_memory is not None and not self._node.leave_requested.is_set()
        if self._node.kept_memory is not None and not stays:
            self._node.kept_memory.is_kept = False
        self._core.closing = True
        self._hand_over = HandOverOperation(self._core)
        self._node.process()
        with trio.move_on_after(self._node.drain_seconds):
            async with trio.open_nursery() as nursery:
                if (
                    self._node.running
                    and self._node.failure is None
                    and self._node.drain_seconds > 0
                    and not stays
                ):
                    nursery.start_soon(
                        self._node.settle, self._core.operations.start(self._hand_over, self._node.now)
                    )
                if self._node.ssd is not None and not stays:
                    nursery.start_soon(self._node.ssd.keep_memory)
                if self._core.operations_under_way:
                    await self.drained.wait()
            if self._node.ssd is not None and not stays:  # objects put by operations under way
                await self._node.ssd.keep_memory()
        self._log_handed_over()
        if stays and self._node.kept_memory is not None:
            logger.info(
                "%s objects (%s) stay in %s for the next start",
                f"{self._core.segment.object_count:,}",
                format_bytes(self._core.segment.used_bytes),
                self._node.kept_memory.path,
                extra={"event": "memory_kept", "path": str(self._node.kept_memory.path)},
            )
        await self._say_goodbye()

    def _log_handed_over(self) -> None:
        self._all_handed_over = True
        handed = self.handed_over
        if handed is not None and (handed.objects or handed.left_objects):
            logger.info(
                "handed over %s (%s) that only this peer held; left behind %s (%s)",
                counted(handed.objects, "object"),
                format_bytes(handed.bytes),
                counted(handed.left_objects, "object"),
                format_bytes(handed.left_bytes),
                extra={"event": "handed_over", **asdict(handed)},
            )

    async def _say_goodbye(self) -> None:
        if self._node.leave_requested.is_set():
            with trio.move_on_after(TELL_SECONDS):
                await self._told.wait()
        asks = [effect for effect in self._core.gossip.leave(self._node.now) if isinstance(effect, Ask)]
        with trio.move_on_after(FAREWELL_SECONDS):
            async with trio.open_nursery() as nursery:
                for ask in asks:
                    nursery.start_soon(self._node.control.ask, ask)
        if self._node.saver is not None:
            await self._node.saver.save()
