"""Members whose copies may have been removed while they were away. Pure.

A member that has just come (back) and whose record does not show this peer's horizon may still hold copies that dropped
floors forbade. Until it shows that horizon, or an answer of its says that it has seen all of it, this peer does not
believe its locations of such versions. The same goes for a member that was here and has stayed at another horizon for a
minute. One that has just taken another horizon over is ahead, not behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.floors.floor_comparison import ShownFloors
from p2pstore.gossip.floors.floor_set import FloorSet
from p2pstore.gossip.floors.floor_stamps import (
    newest_unseen,
)
from p2pstore.gossip.records import Member

CATCH_UP_SECONDS: Final = 60.0
"""How long a member that was here all the time may take to follow a horizon."""


@dataclass(frozen=True, slots=True)
class _OtherHorizon:
    """A member's record shows another horizon than this peer's: its hash, and since when."""

    shown: int
    since: float


class DoubtedMembers:
    """See the module's docstring. `floors` tells clients whether any member is doubted."""

    def __init__(self, floors: FloorSet) -> None:
        self._floors = floors
        self._unproven: set[Member] = set()
        self._others: dict[Member, _OtherHorizon] = {}
        self._saw_all: dict[Member, int] = {}
        """Doubted members that said to have seen all of this peer's horizon, and its hash at that time."""

    def note_proof(self, sender: Member, seen: Mapping[Member, int]) -> None:
        """A member says what it has seen. Its copies are what it says of them, as with the horizon in its record."""
        doubted = sender in self._unproven or sender in self._others
        if doubted and newest_unseen(self._floors.horizon, seen) == 0:
            self._saw_all[sender] = self._floors.horizon_hash

    def came(self, member: Member) -> None:
        """A member has just come, or come back."""
        self._unproven.add(member)
        self._saw_all.pop(member, None)
        self._floors.doubt_members(True)

    def went(self, member: Member) -> None:
        """A member is gone."""
        self._unproven.discard(member)
        self._saw_all.pop(member, None)

    def look(self, members: Sequence[ShownFloors], now: float) -> None:
        """Note which members show another horizon, and tell clients whether any member is doubted."""
        mine = self._floors.horizon_hash
        if not mine:
            self._unproven.clear()
            self._others.clear()
            self._saw_all.clear()
            return
        others: dict[Member, _OtherHorizon] = {}
        for shown in members:
            if shown.floors_horizon == mine or self._saw_all.get(shown.member) == mine:
                self._unproven.discard(shown.member)
                continue
            known = self._others.get(shown.member)
            if known is None or known.shown != shown.floors_horizon:
                known = _OtherHorizon(shown.floors_horizon, now)
            others[shown.member] = known
        self._others = others
        late = any(now > other.since + CATCH_UP_SECONDS for other in others.values())
        self._floors.doubt_members(bool(self._unproven) or late)

    def up_to(self, member: Member, shown: int | None, now: float) -> int:
        """The member's copies of versions up to this clock may have been removed while it was away; -1 when
        all of them are believed. `shown` is the horizon's hash in its record, None without one."""
        mine = self._floors.horizon_hash
        if shown == mine or self._saw_all.get(member) == mine:
            return -1
        other = self._others.get(member)
        stays = other is not None and other.shown == shown and now > other.since + CATCH_UP_SECONDS
        return self._floors.compacted_before if stays or member in self._unproven else -1
