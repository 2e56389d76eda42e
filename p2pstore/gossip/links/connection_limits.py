"""Which connections to close: those unused for long, and the longest unused when there are too many. Pure.

A connection is kept open for as long as the other end is a neighbour. Others are opened for a purpose (a
probe, a contact), and stay open for a while because opening costs much and holding costs only memory. Who opened a
connection closes it; so it is closed only when its opener has no use for it, and if the other side has, that
one opens its own. Over the limit both sides close: of the host and the member that have most of them, so that who
takes many takes them from himself. One with requests under way is never closed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SPARE_AFTER_SECONDS: Final = 1.0
"""Before this a connection is not idle: who opened it is about to use it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`idle_seconds` is above the time of one round of probes at 100 members: there nothing is closed and opened
    again all the time, and all are connected. `max_open` bounds memory, some 50 kB a connection."""

    idle_seconds: float = 120.0
    max_open: int = 192


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one connection."""

    kept: bool
    """Whether its other end is a neighbour."""
    opened_here: bool
    busy: bool
    """Whether requests are under way on it, in either direction."""
    used_at: float
    host: str = ""
    """Where the other end is (`strangers.host_group`)."""
    member: bytes = b""
    """Who it is."""


def idle(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those that this side opened and has no more use for."""
    return [
        place
        for place, use in enumerate(uses)
        if _is_closable(use) and use.used_at + limits.idle_seconds <= now
    ]


def surplus(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those to close because there are too many: the longest unused ones of the member that has most, of
    those at the host that has most; too few when the others are in use."""
    spare = {
        place
        for place, use in enumerate(uses)
        if not use.kept and not use.busy and use.used_at + SPARE_AFTER_SECONDS <= now
    }
    hosts = Counter(use.host for use in uses)
    members = Counter(use.member for use in uses)
    chosen: list[int] = []
    while spare and len(uses) - len(chosen) > limits.max_open:
        place = min(
            spare,
            key=lambda each: (
                -hosts[uses[each].host],
                -members[uses[each].member],
                uses[each].used_at,
                each,
            ),
        )
        spare.remove(place)
        chosen.append(place)
        hosts[uses[place].host] -= 1
        members[uses[place].member] -= 1
    return chosen


def next_due(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> float:
    """When to look again, if nothing is opened or closed before; infinity for never."""
    due = min(
        (
            (now if use.busy else use.used_at) + limits.idle_seconds
            for use in uses
            if use.opened_here and not use.kept
        ),
        default=math.inf,
    )
    if len(uses) > limits.max_open:
        due = min(due, now + SPARE_AFTER_SECONDS)
    return due


def _is_closable(use: Use) -> bool:
    return use.opened_here and not use.kept and not use.busy
