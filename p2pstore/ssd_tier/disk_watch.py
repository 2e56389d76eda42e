"""Looking after the disk itself: whether it answers, and is still where the next start will look for it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import trio

from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.patience import PATIENCE_SECONDS

INSPECT_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.5

logger = logging.getLogger("p2pstore.ssd_tier")


class DiskWatch:
    """Two tasks. What a disk that hangs holds is held on to until it answers; nobody waits so long."""

    def __init__(self, log: ColdLog, nursery: trio.Nursery) -> None:
        self._log = log
        self._nursery = nursery
        self._probing = False

    async def watch_place(self) -> None:
        """While the tier writes at all. Nothing fails when the log's file is deleted, moved or replaced: it has to be
        looked for."""
        log = self._log
        while log.is_writable:
            await log.disk.inspect()
            log.is_in_place()
            await trio.sleep(INSPECT_SECONDS)

    async def watch_answers(self) -> None:
        """Until the tier is off."""
        log = self._log
        while not log.is_off:
            await trio.sleep(LOOK_SECONDS)
            waits = log.disk.waits
            self._note(waits.silent_seconds)
            log.health.waited(waits)
            log.state_may_be_worse()
            now = trio.current_time()
            for waiting in list(log.waiting):
                waiting.judge(waits, now)

    def _note(self, silent_seconds: float) -> None:
        """From the first silence until the disk answers again, it is asked only whether it does."""
        log, silent = self._log, silent_seconds >= PATIENCE_SECONDS
        if silent and not log.is_silent:
            logger.warning(
                "the SSD has not answered for %.0f s: nothing is read there until it does",
                silent_seconds,
                extra={"event": "ssd_silent"},
            )
        elif log.is_silent and not silent:
            logger.info("the SSD answers again", extra={"event": "ssd_answers"})
        log.is_silent = silent
        if silent and not self._probing:
            self._probing = True
            self._nursery.start_soon(self._probe)

    async def _probe(self) -> None:
        """Any answer will do: it ends the silence. What hangs may be one request, and nobody asks for more."""
        try:
            with self._log.scratch.page() as page, suppress(OSError):
                await self._log.disk.read_into(0, [page])
        finally:
            self._probing = False
