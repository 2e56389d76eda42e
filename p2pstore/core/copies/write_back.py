"""The coldest part of memory is written to the SSD before puts need its room. Pure."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Final

from p2pstore.core.operation import WriteObject
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import MIB

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

WRITTEN_SHARE: Final = 4
"""This part of memory, from the coldest on, is to be free or written."""
UNDER_WAY_BYTES: Final = 256 * MIB
UNDER_WAY_SHARE: Final = 8
"""Of memory, at most, as what is being written cannot be evicted."""
MAX_UNDER_WAY: Final = 256
LOOKED_AT: Final = 512
"""Objects a step looks at: half a millisecond."""
INTERVAL_SECONDS: Final = 0.02
"""Between two steps."""


class WriteBack:
    """Writes to the SSD tier, where there is one (`core.cold.store`): the coldest part of memory is kept written, as an
    operating system does with its page cache. A put never waits for that. An object that is not written in time, since
    the SSD or its budget cannot keep up, is evicted all the same, and lost here."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._under_way = 0
        self._under_way_bytes = 0
        self.due_at = math.inf
        self._last_step = -math.inf

    @property
    def _wanted_bytes(self) -> int:
        return self._core.segment.data_bytes // WRITTEN_SHARE

    @property
    def _most_bytes(self) -> int:
        return min(UNDER_WAY_BYTES, self._core.segment.data_bytes // UNDER_WAY_SHARE)

    def memory_taken(self, now: float) -> None:
        """Something took room in front of an SSD."""
        if self._core.segment.free_bytes < self._wanted_bytes:
            self.due_at = min(self.due_at, max(now, self._last_step + INTERVAL_SECONDS))

    def tick(self, now: float) -> None:
        if now < self.due_at:
            return
        self.due_at, self._last_step = math.inf, now
        for entry in self._choose(self._core.unix(now)):
            self._core.segment.references.acquire_unused(entry)
            self._under_way += 1
            self._under_way_bytes += entry.extent_bytes
            self._core.emit(WriteObject(entry))

    def _choose(self, unix: float) -> list[ObjectEntry]:
        # Cheap bytes are on the SSD or at another peer: they are counted, not walked past, as they may be many.
        segment = self._core.segment
        ready_bytes = segment.free_bytes + segment.room.cheap_bytes + self._under_way_bytes
        chosen: list[ObjectEntry] = []
        chosen_bytes = 0
        for entry in islice(segment.room.coldest(cheap=False), LOOKED_AT):
            if (
                ready_bytes >= self._wanted_bytes
                or self._under_way + len(chosen) >= MAX_UNDER_WAY
                or self._under_way_bytes + chosen_bytes >= self._most_bytes
            ):
                break
            if entry.references:  # it is being written
                continue
            ready_bytes += entry.extent_bytes
            # A soft copy has a firm one elsewhere.
            if not entry.on_ssd and not entry.soft and entry.not_written_before <= unix:
                chosen.append(entry)
                chosen_bytes += entry.extent_bytes
        return chosen

    def ended(self, entry: ObjectEntry, written: bool, retry_seconds: float, now: float) -> None:
        """The outcome of a `WriteObject`; when it was refused, it is asked for again after that time."""
        core = self._core
        self._under_way -= 1
        self._under_way_bytes -= entry.extent_bytes
        if written:
            core.cold.written(entry, now)
        elif entry.state is SlotState.LIVE:
            entry.not_written_before = core.unix(now) + retry_seconds
        core.segment.references.let_go(entry, was_used=False)
        self.memory_taken(now)
