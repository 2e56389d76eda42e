"""Which part of the directory this peer keeps, and when that changes. Pure.

In `full` mode a peer has a view of every other's log. In `partitioned` mode it has what homes have, and asks the
homes of other partitions. Every peer decides for itself, and says in its record which it is; both kinds work
together at all times. From one to the other it goes through a time in which it does both: it says that it is
partitioned, so that owners tell it what homes are told, and follows the logs as well. So it knows enough at every
moment to answer for its partitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, Literal

from p2pstore.gossip.locations.log import MAX_OWN_RECORDS
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Member

DirectorySetting = Literal["auto", "full", "partitioned"]

RECORD_BYTES: Final = 40
"""What one location costs in a full directory's memory."""
RATE_SAMPLE_SECONDS: Final = 10.0
RATE_SMOOTHING: Final = 0.3
"""Weight of the newest sample."""


class KeptDirectory(IntEnum):
    """What a peer's record says. Numbers are never used twice; one that is not known reads as FULL."""

    FULL = 0
    PARTITIONED = 1


def kept_name(number: int) -> str:
    """What a record's `directory` says, in words; empty for a number that is not known."""
    return KeptDirectory(number).name.lower() if number in KeptDirectory.__members__.values() else ""


@dataclass(frozen=True, slots=True)
class ModeLimits:
    """Above these a peer does not keep the full directory."""

    index_bytes: int = 1 << 30
    changes_per_second: float = 200_000.0
    members: int = 1_000
    return_at: float = 0.8
    """Share of the limits below which it does so again."""
    dwell_seconds: float = 60.0
    """Shortest time between two changes of mode."""
    overlap_seconds: float = 120.0
    """How long a peer keeps both at most before it lets go of the full directory."""


class Phase(Enum):
    FULL = "full"
    NARROWING = "narrowing"
    """Full until the partitions that it is a home of are complete."""
    PARTITIONED = "partitioned"
    WIDENING = "widening"
    """Partitioned until it has followed all logs."""


class DirectoryMode:
    """The state machine. `tick` moves it; the properties say what follows from where it is."""

    def __init__(self, setting: DirectorySetting, limits: ModeLimits) -> None:
        self.phase = Phase.PARTITIONED if setting == "partitioned" else Phase.FULL
        self.setting = setting
        self._limits = limits
        self._since = -math.inf
        """Of the last change of mode: a peer that starts decides at once."""

    @property
    def shown(self) -> KeptDirectory:
        """For the peer's record."""
        return KeptDirectory.FULL if self.phase is Phase.FULL else KeptDirectory.PARTITIONED

    @property
    def follows_logs(self) -> bool:
        """Whether gossip is to bring the logs of others."""
        return self.phase is not Phase.PARTITIONED

    @property
    def knows_all(self) -> bool:
        """Whether what this peer does not know is most likely nowhere."""
        return self.phase in (Phase.FULL, Phase.NARROWING)

    def tick(self, load: float, *, views_complete: bool, homes_complete: bool, now: float) -> bool:
        """Go on as the load (share of the limits) asks for it. Whether the phase is another now.

        `views_complete`: all logs were followed; `homes_complete`: all owners have told what this peer is home
        of.
        """
        before = self.phase
        waited = now - self._since
        match self.phase:
            case Phase.FULL:
                if self.setting == "auto" and load > 1.0 and waited >= self._limits.dwell_seconds:
                    # Who has not followed the logs yet does not begin with it.
                    self.phase = Phase.NARROWING if views_complete else Phase.PARTITIONED
            case Phase.NARROWING:
                if homes_complete or waited >= self._limits.overlap_seconds:
                    self.phase = Phase.PARTITIONED
            case Phase.PARTITIONED:
                if (
                    self.setting == "auto"
                    and load < self._limits.return_at
                    and waited >= self._limits.dwell_seconds
                ):
                    self.phase = Phase.WIDENING
            case Phase.WIDENING:
                if load > 1.0:
                    self.phase = Phase.PARTITIONED
                elif views_complete:
                    self.phase = Phase.FULL
        began = {Phase.NARROWING, Phase.WIDENING}
        if self.phase is not before and (self.phase in began or before not in began):
            self._since = now
        return self.phase is not before


class ClusterLoad:
    """How much a full directory would have to hold and to follow, from what records say."""

    def __init__(self, limits: ModeLimits) -> None:
        self._limits = limits
        self._heads: dict[Member, tuple[int, int]] = {}
        self._sampled_at = -math.inf
        self.changes_per_second = 0.0

    def of(self, live: Iterable[MemberState], now: float) -> float:
        """Share of the limits: above 1 a full directory is too large."""
        states = [state for state in live if state.signed is not None]
        if now >= self._sampled_at + RATE_SAMPLE_SECONDS:
            self._sample(states, now)
        counts = (state.location_count for state in states)
        locations = sum(count for count in counts if count <= MAX_OWN_RECORDS)  # others are refused
        limits = self._limits
        return max(
            locations * RECORD_BYTES / limits.index_bytes,
            self.changes_per_second / limits.changes_per_second,
            len(states) / limits.members,
        )

    def _sample(self, states: list[MemberState], now: float) -> None:
        heads = {state.member: (state.record_incarnation, state.log_sequence) for state in states}
        changes = 0
        for member, (incarnation, sequence) in heads.items():
            known = self._heads.get(member)
            if known is not None and known[0] == incarnation:
                changes += max(0, sequence - known[1])
        if self._heads and math.isfinite(self._sampled_at):
            rate = changes / (now - self._sampled_at)
            self.changes_per_second += RATE_SMOOTHING * (rate - self.changes_per_second)
        self._heads, self._sampled_at = heads, now
