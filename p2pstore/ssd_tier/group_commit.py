"""Waiting for events, and for durability: one sync for all tasks that wait for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from p2pstore.ssd_tier.disk_protocol import Disk


class Signal:
    """Wakes one waiting task. A signal sent while none waits is kept for the next `wait`."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def send(self) -> None:
        """Something happened."""
        self._event.set()

    async def wait(self) -> None:
        """Returns when something happened since the last `wait` returned. For one task."""
        await self._event.wait()
        self._event = trio.Event()


class Condition:
    """Wakes all tasks that wait now; each checks for itself whether its condition holds."""

    def __init__(self) -> None:
        self._lot = trio.lowlevel.ParkingLot()

    def changed(self) -> None:
        """Something changed."""
        self._lot.unpark_all()

    async def wait(self) -> None:
        """Returns at the next change."""
        await self._lot.park()


_CLOSED: Final = "the tier was closed before this was durable"


@dataclass(slots=True, eq=False)
class _Round:
    """One sync of the disk, to come or under way."""

    over: trio.Event = field(default_factory=trio.Event)
    error: OSError | None = None


class GroupCommit:
    """A caller waits for the next sync that begins: all that come while one runs share the one after it.

    `failed` is called once for each failed sync, before its waiting tasks continue. Syncs run in `nursery`, so a
    cancelled caller does not affect the others.
    """

    def __init__(
        self, disk: Disk, nursery: trio.Nursery, failed: Callable[[OSError, set[int]], None]
    ) -> None:
        self.syncs = 0
        self._disk = disk
        self._nursery = nursery
        self._failed = failed
        self._unsynced: set[int] = set()
        self._next: _Round | None = None
        self._running = False

    def wrote(self, segment: int) -> None:
        """A write to this segment returned: the next sync that begins makes it durable, or loses it."""
        self._unsynced.add(segment)

    async def sync(self) -> None:
        """Returns when all that was written before this call is durable.

        Raises the `OSError` of the disk when it is unknown whether it is: it stays so.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._next is None:
            self._next = _Round()
        this = self._next
        if not self._running:
            self._running = True
            self._nursery.start_soon(self._run)
        await this.over.wait()
        if this.error is not None:
            raise OSError(*this.error.args) from this.error

    async def sync_writes(self) -> None:
        """The same, for records and the like alone: without a sync when all that `wrote` was told of is durable."""
        if self._unsynced or self._running:
            await self.sync()

    async def _run(self) -> None:
        try:
            while self._next is not None:
                this, self._next = self._next, None
                covered, self._unsynced = self._unsynced, set()
                await self._sync_once(this, covered)
        finally:
            self._running = False
            if self._next is not None:  # the tier is closed
                self._next.error = OSError(_CLOSED)
                self._next.over.set()

    async def _sync_once(self, this: _Round, covered: set[int]) -> None:
        this.error = OSError(_CLOSED)
        try:
            await self._disk.sync()
            self.syncs += 1
            this.error = None
        except OSError as error:
            # Writes that returned while it ran are in doubt as well.
            in_doubt, self._unsynced = covered | self._unsynced, set()
            this.error = error
            self._failed(error, in_doubt)
        finally:
            this.over.set()
