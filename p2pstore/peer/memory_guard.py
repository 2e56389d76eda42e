"""Checks of this peer's own memory, beside the event loop: checksums of objects, and what clients overwrote. Shell."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.core.copies.own_copies import CheckOperation
from p2pstore.core.core_effects import CheckReturned
from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import chunk_sums, root_checksum
from p2pstore.runtime.side_by_side import PIECE_BYTES

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

RESTORE_SECONDS: Final = 1.0
RESTORE_COUNT: Final = 256
"""Index entries and slots that are looked at in one step, which takes up to 1 ms."""
MAX_TOGETHER: Final = 64
"""Objects that are hashed by one visit to a thread, of `PIECE_BYTES` together: their puts go on in one step."""


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
        queue = self._short if entry.length <= PIECE_BYTES else self._long
        queue.append(entry)
        if id(queue) not in self._running:
            self._running.add(id(queue))
            self._node.start_soon(partial(self._work_off, queue))

    async def are_good(self, entry: ObjectEntry) -> bool:
        """Whether an object's bytes give its checksums; hashed at once, unless they are known to. The caller holds the
        bytes. What is wrong is withdrawn."""
        if not entry.verified:
            (sums,) = await self._sums([entry])
            self._node.core.checks.judge(entry, sums, self._node.now)
        return entry.verified

    async def _work_off(self, queue: deque[ObjectEntry]) -> None:
        try:
            while queue:
                entries = _take(queue)
                found = await self._sums(entries)
                for entry, sums in zip(entries, found, strict=True):
                    self._node.core.checks.ended(entry, sums, self._node.now)
                self._node.process()
        finally:
            self._running.discard(id(queue))

    async def _sums(self, entries: list[ObjectEntry]) -> list[bytes]:
        payload_of = self._node.core.segment.payload
        if len(entries) == 1 and entries[0].length > PIECE_BYTES:
            entry, sums = entries[0], []
            for start in range(0, entry.length, PIECE_BYTES):
                piece = payload_of(entry)[start : start + PIECE_BYTES]
                sums.append(await trio.to_thread.run_sync(chunk_sums, piece))
                del piece
            return [b"".join(sums)]
        return await trio.to_thread.run_sync(_sums_of, [payload_of(entry) for entry in entries])


def _take(queue: deque[ObjectEntry]) -> list[ObjectEntry]:
    """The next ones, of at most 4 MiB together, or a longer one."""
    taken = [queue.popleft()]
    total = taken[0].length
    while queue and len(taken) < MAX_TOGETHER and total + queue[0].length <= PIECE_BYTES:
        taken.append(queue.popleft())
        total += taken[-1].length
    return taken


def _sums_of(payloads: list[memoryview]) -> list[bytes]:
    return [chunk_sums(payload) for payload in payloads]


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
        payloads = [self._core.segment.payload(entry) for entry in effect.entries]
        roots = await trio.to_thread.run_sync(_roots_of, payloads)
        del payloads
        whole = [
            root == entry.version.root for root, entry in zip(roots, effect.entries, strict=True)
        ]
        self._core.earlier_life.returned_checked(effect.entries, whole, self._node.now)
        self._node.process()


def _roots_of(payloads: Sequence[memoryview]) -> list[int]:
    return [root_checksum(len(each), chunk_sums(each)) for each in payloads]
