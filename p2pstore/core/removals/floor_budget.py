"""The rate at which this peer may write floors, so that compaction comes before the limit does. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from p2pstore.errors import CapacityExceeded
from p2pstore.gossip.floors.floor_set import COMPACT_ABOVE

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

WAIT_SECONDS: Final = 4.0
"""An operation waits for room among the floors for so long: clients wait for its answer for ten seconds."""
WAIT_STEP_SECONDS: Final = 0.05
PACE_ABOVE: Final = 0.8
"""Share of the limit of floors above which removals are slowed down."""
BURST_SECONDS: Final = 2.0
PACE_SECONDS: Final = 10.0
"""Longer than compaction takes in a small cluster whose members are all well: some seven seconds."""


class FloorBudget:
    """How many keys this peer may forbid now, and the error when it may forbid none."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records.floors
        self._allowance = 0.0
        self._allowed_at = 0.0
        self._slowed = False
        self.notes: list[str] = []
        """For the log: `Floors.take_notes` takes them."""

    def may_write(self, wanted: int, now: float) -> int:
        """How many keys of `wanted` this peer may forbid now. Floors of others are heard of a second later: so all
        writers together fill at most half of what is free in a second, and a tenth of it when floors are crowded, so
        that compaction comes before the limit does."""
        floors = self._records
        crowding = floors.crowding
        free = float(floors.limit - floors.count)
        if crowding > 0.0:
            free = min(free, floors.count * (1.0 / crowding - 1.0))
        fill_seconds = PACE_SECONDS if crowding >= PACE_ABOVE else BURST_SECONDS
        rate = max(0.0, free) / (fill_seconds * (1 + len(floors.writers)))
        elapsed, self._allowed_at = now - self._allowed_at, now
        self._allowance = min(max(1.0, rate), self._allowance + elapsed * rate)
        allowed = min(wanted, int(self._allowance))
        self._allowance -= allowed
        self._note_pace(slowed=allowed < wanted and crowding >= PACE_ABOVE, crowding=crowding)
        return allowed

    def _note_pace(self, *, slowed: bool, crowding: float) -> None:
        if slowed:
            self._core.counters["removals_slowed"] += 1
            if not self._slowed:
                self.notes.append(f"removals are slowed down: {self._room_text()}")
        self._slowed = slowed or (self._slowed and crowding > COMPACT_ABOVE)

    @property
    def full(self) -> bool:
        """Whether no further key may be forbidden."""
        return self._records.crowding >= 1.0

    def no_room(self) -> CapacityExceeded:
        """The error of an operation that may not write a floor."""
        return CapacityExceeded(
            f"too many removals and overwrites: {self._room_text()}. Try again in some seconds; "
            "`mooncake-p2p doctor` tells more"
        )

    def _room_text(self) -> str:
        waits_for = self._core.floors.waits_for()
        names = f"; {', '.join(waits_for[:3])} did not confirm that yet" if waits_for else ""
        return (
            f"{self._records.count:,} removed keys are remembered until all living peers have heard of them, which is "
            f"{100 * self._records.crowding:.0f} % of what there is room for{names}"
        )
