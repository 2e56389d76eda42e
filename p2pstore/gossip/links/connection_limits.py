"""Which connections to close: those that nobody used for long, and the longest unused when there are too many. Pure.

A connection is kept open for as long as the other end is a neighbour. Others are opened for a purpose (a
probe, a contact), and stay open for a while because opening costs much and holding costs only memory. Who opened a
connection closes it; so it is closed only when its opener has no use for it, and if the other side has, that
one opens its own. Over the limit both sides close. One with requests under way is never closed.
"""

from __future__ import annotations

import math
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
    """What is known of one connection."""

    kept: bool
    """Whether its other end is a neighbour."""
    opened_here: bool
    busy: bool
    """Whether requests are under way on it, in either direction."""
    used_at: float


def idle(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those that this side opened and has no more use for."""
    return [
        place
        for place, use in enumerate(uses)
        if _is_closable(use) and use.used_at + limits.idle_seconds <= now
    ]


def surplus(uses: Sequence[Use], now: float, limits: ConnectionLimits) -> list[int]:
    """The places of those to close because there are too many, the longest unused ones; too few when the
    others are in use."""
    spare = [
        place
        for place, use in enumerate(uses)
        if not use.kept and not use.busy and use.used_at + SPARE_AFTER_SECONDS <= now
    ]
    spare.sort(key=lambda place: uses[place].used_at)
    return spare[: max(0, len(uses) - limits.max_open)]


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
