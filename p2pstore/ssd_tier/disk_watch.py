"""One task that looks after the disk itself: whether it is still where the next start will look for it."""

from __future__ import annotations

from typing import Final

import trio

from p2pstore.ssd_tier.cold_log import ColdLog

INSPECT_SECONDS: Final = 2.0


class DiskWatch:
    """Nothing fails when the log's file is deleted, moved or replaced: it has to be looked for."""

    def __init__(self, log: ColdLog) -> None:
        self._log = log

    async def run(self) -> None:
        """While the tier writes at all."""
        log = self._log
        while log.is_writable:
            await log.disk.inspect()
            log.is_in_place()
            await trio.sleep(INSPECT_SECONDS)
