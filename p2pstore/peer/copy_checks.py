"""Hashing objects in memory beside the event loop, to compare them with their checksums."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.memory.entries import ObjectEntry
from p2pstore.objects import chunk_sums
from p2pstore.runtime.side_by_side import PIECE_BYTES

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

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
