"""Something that changes, for who looks now and then, or waits for the next change."""

from __future__ import annotations

from typing import Final

import trio

LONGEST_WAIT_SECONDS: Final = 30.0


class News:
    """`number` grows with each change."""

    def __init__(self) -> None:
        self.number = 1
        self.ended = False
        self._changed = trio.Event()

    def changed(self) -> None:
        """Wake who waits for news."""
        self.number += 1
        self._changed.set()
        self._changed = trio.Event()

    def end(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self.changed()

    async def wait(self, seen: int, seconds: float) -> None:
        """Until something differs from what it was at number `seen`, or for so long."""
        with trio.move_on_after(min(seconds, LONGEST_WAIT_SECONDS)):
            while self.number == seen:
                await self._changed.wait()
