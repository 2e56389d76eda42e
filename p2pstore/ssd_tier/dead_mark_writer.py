"""Dead marks on their way to the disk."""

from __future__ import annotations

from typing import Final

import trio

from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.health import TierOff
from p2pstore.ssd_tier.log_layout import PAGE_BYTES
from p2pstore.ssd_tier.waking import Signal

GATHER_SECONDS: Final = 0.5
"""Marks wait so long for others: discards are durable within a second."""
RETRY_SECONDS: Final = 1.0
WRITES_AT_ONCE: Final = 16


class DeadMarkWriter:
    """Writes pages of marks and syncs, in rounds. What failed is written again, until the tier is off.

    A page is written whole and anew each time, so a sync that follows speaks for it, whatever became of the last one.
    """

    def __init__(self, log: ColdLog) -> None:
        self._log = log
        self._begun = 0
        self._done = 0
        """The last round that worked: all marks made before it began are durable."""
        self._hurry = Signal()

    async def durable(self) -> None:
        """Returns when all records marked dead so far stay so whatever happens. Raises `TierOff`."""
        log = self._log
        if not log.dirty and self._begun == self._done:
            await trio.lowlevel.checkpoint()
            return
        wanted = self._begun + 1
        while self._done < wanted:
            if log.is_off:
                raise TierOff(f"discards cannot be written: {log.health.why}")
            self._hurry.send()
            log.marked.send()
            await log.marks_moved.wait()

    async def run(self) -> None:
        """Until the tier is off."""
        log = self._log
        while not log.is_off:
            await log.marked.wait()
            with trio.move_on_after(GATHER_SECONDS):
                await self._hurry.wait()
            while not await self._round():
                if log.is_off:
                    break
                await trio.sleep(RETRY_SECONDS)
            log.marks_moved.changed()

    async def _round(self) -> bool:
        """Whether all marks made before are durable."""
        log = self._log
        self._begun += 1
        # The pages as they are now: what dies while this waits lost to records that the first sync does not cover.
        this, pages = self._begun, {number: log.marks[number].encode() for number in log.dirty}
        log.dirty.clear()
        try:
            if pages:
                # First what the dead records lost to: a crash in between must leave one of them.
                await log.commit.sync_writes()
                await self._write(pages)
                await log.commit.sync()
        except OSError as error:
            log.dirty.update(pages)
            log.health.discards_failed(error)
            log.state_may_have_changed()
            return False
        log.health.discards_worked()
        self._done = this
        return True

    async def _write(self, pages: dict[int, bytes]) -> None:
        errors: list[OSError] = []
        limit = trio.CapacityLimiter(WRITES_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for number, page in pages.items():
                nursery.start_soon(self._write_page, number, page, limit, errors)
        if errors:
            raise errors[0]

    async def _write_page(
        self, number: int, page: bytes, limit: trio.CapacityLimiter, errors: list[OSError]
    ) -> None:
        log = self._log
        async with limit:
            position = log.segment_position(log.table[number]) + PAGE_BYTES
            try:
                await log.disk.write_from(position, [page])
            except OSError as error:
                errors.append(error)
            else:
                log.measures.written.add(PAGE_BYTES, log.unix())
