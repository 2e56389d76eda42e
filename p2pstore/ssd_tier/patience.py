"""How long who wants an object waits for a disk that does not answer. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2pstore.ssd_tier.disk_protocol import Waits

PATIENCE_SECONDS: Final = 4.0
"""Less than the 5 s for which readers elsewhere wait without progress: so they hear of it, and go elsewhere."""

Overdue = Callable[[str], None]
"""Told, once, that an object is not to be waited for any more, and why. It may come all the same."""


@dataclass(slots=True, eq=False)
class Waiting:
    """Somebody waits for an object, for at most `patience_seconds` without anything of it."""

    moved: float
    """When something of it came; at first, when it was asked for."""
    patience_seconds: float
    overdue: Overdue
    told: bool = False

    def judge(self, waits: Waits, now: float) -> None:
        """Say that it is overdue, if so. Who only waits for others before him, on a disk that works, is not."""
        seconds = min(now - self.moved, waits.longest_seconds)
        if not self.told and seconds >= self.patience_seconds:
            self.told = True
            self.overdue(f"the SSD did not answer within {self.patience_seconds:g} s")
