"""How all members are in figures, and which of them are shown: those that something is wrong with, then others. Pure.

A cluster may have thousands. So all are looked at by what stands in their `MemberState`, and only of those that are
shown is the record read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, Final

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.status.text import shown

MAX_SHOWN: Final = 100
MAX_WRONG: Final = 60
"""Of each state."""
STATES: Final = ("dead", "suspect", "leaving", "alive")
"""In this order; members that left on purpose are counted alone."""


@dataclass(slots=True)
class Survey:
    """Of all members. `by_state` has those to be shown, those first that came into their state last. Sizes in bytes,
    over the living."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*STATES, "left"), 0))
    by_state: dict[str, list[MemberState]] = field(default_factory=dict)
    memory_capacity: int = 0
    memory_used: int = 0
    ssd_capacity: int = 0
    ssd_used: int = 0
    copies: int = 0

    @property
    def live(self) -> int:
        """How many are members now."""
        return self.counts["alive"] + self.counts["suspect"] + self.counts["leaving"]

    @property
    def shown(self) -> list[tuple[str, MemberState]]:
        """With their states, in the order to show them; at most `MAX_SHOWN`."""
        chosen = [(state, each) for state in STATES for each in self.by_state.get(state, ())]
        return chosen[:MAX_SHOWN]


def state_of(member: MemberState) -> str:
    """The word for how it is."""
    if member.status is Status.DEAD:
        return "dead"
    if member.status is Status.LEFT:
        return "left"
    if member.leaving:
        return "leaving"
    return "suspect" if member.status is Status.SUSPECT else "alive"


def survey(members: Iterable[MemberState], me: PeerId) -> Survey:
    """Look at all members, this one included. Of whom nothing is known but claims of others does not count."""
    found = Survey()
    by_state: dict[str, list[MemberState]] = {state: [] for state in STATES}
    for member in members:
        if member.signed is None:
            continue
        state = state_of(member)
        found.counts[state] += 1
        if state in by_state:
            by_state[state].append(member)
        if member.alive:
            found.memory_capacity += member.memory_capacity
            found.memory_used += member.memory_used
            found.ssd_capacity += member.ssd_capacity
            found.ssd_used += member.ssd_used
            found.copies += member.location_count
    for state in ("dead", "suspect", "leaving"):
        found.by_state[state] = nlargest(
            MAX_WRONG, by_state[state], key=lambda member: (member.status_since, member.peer_id)
        )
    own = [member for member in by_state["alive"] if member.peer_id == me]
    others = [member for member in by_state["alive"][: MAX_SHOWN + 1] if member.peer_id != me]
    found.by_state["alive"] = [*own, *sorted(others[: MAX_SHOWN - len(own)], key=name_of)]
    return found


def name_of(member: MemberState) -> str:
    """As it calls itself, fit to be shown."""
    record = member.record
    return shown(record.name) if record is not None else f"{member.member:016x}"


def member_document(
    member: MemberState, state: str, now: float, round_trip_seconds: float | None
) -> dict[str, Any]:
    """One member as the page shows it. Its addresses are not for everybody. `now` is monotonic."""
    record = member.record
    assert record is not None, "who has no record is not shown"
    return {
        "name": shown(record.name),
        "id": format_peer_id(member.peer_id)[-8:],
        "state": state,
        "state_seconds": _ago(member.status_since, now),
        "memory_capacity_bytes": record.memory_capacity,
        "memory_used_bytes": record.memory_used,
        "ssd_capacity_bytes": record.ssd_capacity,
        "ssd_used_bytes": record.ssd_used,
        "objects": record.head.count,
        "load_permille": record.load_permille,
        "round_trip_seconds": round_trip_seconds and round(round_trip_seconds, 6),
        "software": shown(record.software, 40),
    }


def versions_of(members: Sequence[MemberState]) -> list[str]:
    """What they run."""
    records = [record for member in members if (record := member.record) is not None]
    return sorted({shown(record.software, 40) for record in records if record.software})


def _ago(then: float, now: float) -> float | None:
    """None for minus infinity: as long as this peer knows."""
    return None if then == float("-inf") else round(max(0.0, now - then), 1)
