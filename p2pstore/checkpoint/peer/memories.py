"""Versions that are in memory here, and who looks at them: what nobody looks at any more is given back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import trio

from p2pstore.checkpoint.peer.memory_target import MemoryTarget
from p2pstore.errors import CapacityExceeded
from p2pstore.memory.mapped.mapped_memory import available_memory
from p2pstore.objects import format_bytes

LEAVING_SECONDS: Final = 1.0
"""Until it is noticed that a client is gone; it takes a few milliseconds, unless the peer is busy."""


class Memories:
    """At most `limit_bytes` in all; None: as much as half of what is available at the time."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._targets: dict[bytes, MemoryTarget] = {}
        self._users: dict[bytes, set[int]] = {}
        """Clients, by version."""
        self._coming: dict[bytes, int] = {}
        self._turns: dict[bytes, trio.Lock] = {}
        self._given_back = trio.Event()
        self.published: dict[bytes, int] = {}
        """Bytes of versions that are published from memory."""

    @property
    def used_bytes(self) -> int:
        """Of all versions together, those that are on their way as well."""
        there = sum(target.used_bytes for target in self._targets.values())
        return there + sum(self._coming.values()) + sum(self.published.values())

    async def until_room(self, length_bytes: int) -> None:
        """A moment, when this much has no room beside what clients look at: who closes an old version and asks for a
        new one does so sooner than it is noticed."""
        with trio.move_on_after(LEAVING_SECONDS):
            while self._targets and self._room < length_bytes <= (self._limit_bytes or 0):
                await self._given_back.wait()

    @property
    def _room(self) -> int:
        if self._limit_bytes is None:
            return available_memory()[0] // 2 - sum(self._coming.values())
        return self._limit_bytes - self.used_bytes

    @contextmanager
    def room_for(self, version: bytes, length_bytes: int) -> Iterator[None]:
        """For a version that is brought in this block. Raises `CapacityExceeded` when there is none."""
        room = self._room
        if length_bytes > room:
            raise CapacityExceeded(
                f"a checkpoint of {format_bytes(length_bytes)} has no room in memory: {format_bytes(max(0, room))} "
                "may be used (--checkpoint-memory)"
            )
        self._coming[version] = length_bytes
        try:
            yield
        finally:
            del self._coming[version]

    def check_published(self, length_bytes: int) -> None:
        """Raises `CapacityExceeded` when what is to be published from memory is more than may be used. (Without a limit
        it is there already, and whoever wrote it found room.)"""
        if self._limit_bytes is not None and self.used_bytes + length_bytes > self._limit_bytes:
            room = self._limit_bytes - self.used_bytes
            raise CapacityExceeded(
                f"tensors of {format_bytes(length_bytes)} have no room in memory: {format_bytes(max(0, room))} may be "
                "used (--checkpoint-memory); publish them from files"
            )

    @asynccontextmanager
    async def turn(self, version: bytes) -> AsyncIterator[None]:
        """Of those who want one version, one brings it, and the others share what it brought."""
        lock = self._turns.setdefault(version, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._turns.pop(version, None)

    def add(self, target: MemoryTarget, user: int) -> None:
        """It is complete, and this client looks at it."""
        self._targets[target.version] = target
        self._users[target.version] = {user}

    def use(self, version: bytes, user: int) -> MemoryTarget | None:
        """The version, which this client looks at from now on; None when it is not here."""
        target = self._targets.get(version)
        if target is not None and target.closed:  # this peer takes no part in it any more
            del self._targets[version], self._users[version]
            return None
        if target is not None:
            self._users[version].add(user)
        return target

    def left(self, user: int) -> list[MemoryTarget]:
        """A client is gone; what nobody looks at any more, to be closed."""
        unused = []
        for version, users in list(self._users.items()):
            users.discard(user)
            if not users:
                del self._users[version]
                unused.append(self._targets.pop(version))
        if unused:
            self._given_back.set()
            self._given_back = trio.Event()
        return unused

    def close(self) -> None:
        """Give everything back."""
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self._users.clear()
