"""A peer's own memory: where it is, as the settings say, and its checks beside the event loop. Shell."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.config import MemoryPiece, PeerConfig
from p2pstore.core.copies.earlier_life import FATES
from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.operation import CheckReturned
from p2pstore.errors import ConfigError
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.kept_memory import Expected, Kept, checksum_of, checksum_of_quotas
from p2pstore.memory.mapped.kept_file import KeptMemory, boot_id, create_file_memory, open_kept_memory
from p2pstore.memory.mapped.mapped_memory import (
    PIECE_BYTES,
    JoinedMemory,
    SharedMemory,
    advise_huge_pages,
    create_memory,
    prefault,
)
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import plan_geometry, round_up
from p2pstore.objects import chunk_sums, format_bytes, root_checksum
from p2pstore.runtime.side_by_side import PIECE_BYTES as HASHED_AT_ONCE

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

SegmentMemory = SharedMemory | JoinedMemory


def create_segment_memory(config: PeerConfig, last_segment_id: bytes = b"") -> SegmentMemory:
    """Memory for the segment of a peer with these settings, whose last life had the segment of that id. Raises
    `ConfigError` when it cannot be as they say, or there is not enough of it."""
    geometry = plan_geometry(config.memory_bytes, config.max_objects)
    if config.keep_memory:
        assert config.memory_path is not None, "checked with the settings"
        expected = Expected(
            geometry,
            last_segment_id,
            boot_id(),
            checksum_of(config.cluster),
            checksum_of_quotas(config.quotas),
        )
        return open_kept_memory(Path(config.memory_path), expected)
    total_bytes = geometry.total_bytes
    pieces = config.memory_pieces
    if not pieces:
        return _first(config, total_bytes)
    first_bytes = round_up(total_bytes - sum(each.size for each in pieces), PIECE_BYTES)
    with ExitStack() as stack:
        memories = [_first(config, first_bytes)]
        stack.callback(memories[0].close)
        besides_bytes = 0 if config.memory_path is not None else first_bytes
        for each in pieces:
            memories.append(_further(config, each, besides_bytes))
            stack.callback(memories[-1].close)
            besides_bytes += 0 if each.path is not None else each.size
        joined = JoinedMemory(memories, total_bytes)
        stack.pop_all()
    if config.huge_pages != "never":
        advise_huge_pages(joined.view)  # advice on the memories is of their own mappings
    return joined


def _first(config: PeerConfig, size: int) -> SharedMemory:
    if config.memory_path is not None:
        return create_file_memory(Path(config.memory_path), size)
    return create_memory(size, "p2pstore", huge_pages=config.huge_pages, numa_node=config.numa_node)


def _further(config: PeerConfig, piece: MemoryPiece, besides_bytes: int) -> SharedMemory:
    try:
        if piece.path is not None:
            return create_file_memory(Path(piece.path), piece.size, marked_after=True)
        return create_memory(
            piece.size,
            "p2pstore",
            huge_pages=config.huge_pages,
            numa_node=piece.node,
            besides_bytes=besides_bytes,
        )
    except ConfigError as error:
        setting, _, problem = str(error).partition(": ")
        if setting in ("memory_path", "numa_node"):
            raise ConfigError(f"more_memory: {problem}") from error
        raise


PAUSE_SECONDS: Final = 0.001


async def provide_pages(memory: SegmentMemory, config: PeerConfig) -> None:
    """Have the kernel provide the memory, on a thread: fresh pages fill at 1.3 GB/s, used ones at 13. Stops early
    when there is no more memory to give."""
    stopped = False
    # A file has all its pages from the start. They would have to be copied.
    huge_pages = config.huge_pages != "never" and config.memory_path is None

    def run() -> None:
        prefault(memory.view, lambda: stopped, lambda: time.sleep(PAUSE_SECONDS), huge_pages=huge_pages)

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


LOOK_SECONDS: Final = 1.0


def begin_with_kept(node: Node, memory: KeptMemory) -> None:
    """Have the core look at what an earlier life left. Call it before the node runs."""
    node.kept_memory = memory
    memory.is_kept = True
    memory.kept = Kept()  # the segment has it all by now
    segment = node.core.segment
    if len(segment.returned):
        node.core.earlier_life.return_with_memory(node.now)
        logger.info(
            "memory: checking %s objects from earlier runs in %s",
            f"{len(segment.returned):,}",
            memory.path,
            extra={"event": "memory_open", "path": str(memory.path)},
        )


async def tell_what_returned(node: Node) -> None:
    """Log what became of what an earlier life left, when all of it was looked at."""
    while len(node.core.segment.returned):  # noqa: ASYNC110  # no event: the core is pure
        await trio.sleep(LOOK_SECONDS)
    counted = node.core.counters
    objects = {fate: counted[f"kept_objects_{fate}"] for fate in FATES}
    if any(objects.values()):
        logger.log(
            logging.WARNING if objects["damaged"] else logging.INFO,
            "memory: of what was kept, %s objects (%s) are back, %s were damaged, %s may have been removed meanwhile",
            f"{objects['returned']:,}",
            format_bytes(counted["kept_bytes_returned"]),
            f"{objects['damaged']:,}",
            f"{objects['discarded']:,}",
            extra={"event": "memory_returned", **objects},
        )


async def watch_earlier_clients(segment: Segment, memory: KeptMemory) -> None:
    """Keep extents of earlier clients until these have unmapped the memory."""
    while segment.returned.has_earlier_clients and memory.is_used_by_earlier():  # noqa: ASYNC110
        await trio.sleep(LOOK_SECONDS)
    segment.returned.end_earlier_clients()


RESTORE_SECONDS: Final = 1.0
RESTORE_COUNT: Final = 256
"""Index entries and slots that are looked at in one step, which takes up to 1 ms."""
MAX_TOGETHER: Final = 64
"""Objects that are hashed by one visit to a thread, of `HASHED_AT_ONCE` together: their puts go on in one step."""


class CopyChecks:
    """Carries out `CheckObject`: short objects together, and long ones one after the other in pieces of 4 MiB, beside
    the short ones. One thread each at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._short: deque[ObjectEntry] = deque()
        self._long: deque[ObjectEntry] = deque()
        self._running: set[int] = set()

    def add(self, entry: ObjectEntry) -> None:
        """Hash the object, and tell the core its checksums."""
        queue = self._short if entry.length <= HASHED_AT_ONCE else self._long
        queue.append(entry)
        if id(queue) not in self._running:
            self._running.add(id(queue))
            self._node.start_soon(partial(self._work_off, queue))

    async def are_good(self, entry: ObjectEntry) -> bool:
        """Whether an object's bytes give its checksums; hashed at once, unless they are known to. The caller holds the
        bytes. An object with wrong bytes is withdrawn."""
        if not entry.verified:
            (sums,) = await self.sums([entry])
            self._node.core.checks.judge(entry, sums, self._node.now)
        return entry.verified

    async def _work_off(self, queue: deque[ObjectEntry]) -> None:
        try:
            while queue:
                entries = _take(queue)
                found = await self.sums(entries)
                for entry, sums in zip(entries, found, strict=True):
                    self._node.core.checks.ended(entry, sums, self._node.now)
                self._node.process()
        finally:
            self._running.discard(id(queue))

    async def sums(self, entries: Sequence[ObjectEntry]) -> list[bytes]:
        """The checksums that the bytes of objects in memory give; one alone is hashed in pieces."""
        payload_of = self._node.core.segment.payload
        if len(entries) == 1 and entries[0].length > HASHED_AT_ONCE:
            entry, sums = entries[0], []
            for start in range(0, entry.length, HASHED_AT_ONCE):
                piece = payload_of(entry)[start : start + HASHED_AT_ONCE]
                sums.append(await trio.to_thread.run_sync(chunk_sums, piece))
                del piece
            return [b"".join(sums)]
        payloads = [payload_of(entry) for entry in entries]
        return await trio.to_thread.run_sync(lambda: list(map(chunk_sums, payloads)))


def _take(queue: deque[ObjectEntry]) -> list[ObjectEntry]:
    """The next ones, of at most 4 MiB together, or a longer one."""
    taken = [queue.popleft()]
    total = taken[0].length
    while queue and len(taken) < MAX_TOGETHER and total + queue[0].length <= HASHED_AT_ONCE:
        taken.append(queue.popleft())
        total += taken[-1].length
    return taken


class MemoryGuard:
    """Keeps the parts of this peer's memory intact that only the peer may write: clients may write anywhere."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core

    def doubt_own_copy(self, digest: bytes) -> None:
        """A client found this peer's own copy spoilt: check it, and withdraw it if so. `process` is to follow."""
        self._core.operations.start(CheckOperation(self._core, digest, again=True), self._node.now)

    def restore_header(self) -> None:
        """Before a client maps this peer's memory: no client must keep others out."""
        if self._core.segment.restoring.header():
            self._say_restored(1)

    async def watch(self) -> None:
        """Go over what only this peer may write in its memory, in small steps, as clients may write anywhere."""
        while True:
            await trio.sleep(RESTORE_SECONDS)
            restored, damaged = self._core.segment.restoring.some(RESTORE_COUNT)
            for entry in damaged:
                self.doubt_own_copy(entry.digest)
            if restored or damaged:
                self._say_restored(restored + len(damaged))

    def _say_restored(self, count: int) -> None:
        counters = self._core.counters
        if not counters["memory_restored"]:
            logger.error(
                "a client wrote into the part of this peer's memory that only the peer may write: it was restored, and "
                "will be again, without a word. A program that has this memory mapped writes where it should not",
                extra={"event": "memory_restored"},
            )
        counters["memory_restored"] += count

    async def check_returned(self, effect: CheckReturned) -> None:
        sums = await self._node.copy_checks.sums(effect.entries)
        whole = [
            root_checksum(entry.length, some) == entry.version.root
            for some, entry in zip(sums, effect.entries, strict=True)
        ]
        self._core.earlier_life.returned_checked(effect.entries, whole, self._node.now)
        self._node.process()
