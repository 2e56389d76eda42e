"""When to give up waiting for a log's operations and fetch the owner's whole set. Pure.

Two things are watched: views that are behind their owners' signed heads, and views that are ahead of them for
longer than a head takes to follow its operations. A relay made those operations up; the owner would never send
what the view believes to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.members.membership import MemberState
from p2pstore.gossip.records import Member

MAX_IN_FLIGHT: Final = 4
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0
UNSIGNED_SECONDS: Final = 5.0
"""How long operations may wait for a signed head that covers them, beyond twice the time that owners take to sign
one (`GossipConfig.head_interval_seconds`)."""


@dataclass(slots=True)
class _Behind:
    sequence: int
    since: float
    retry_seconds: float = FIRST_RETRY_SECONDS
    retry_at: float = -math.inf


@dataclass(slots=True)
class _Ahead:
    """A view was at `sequence` at `since`; no head has covered that yet."""

    sequence: int
    since: float


class CatchUp:
    """Watches the views that differ from their owners' signed heads.

    A snapshot is due when a view has stood still for `patience_seconds`, and at once when it is further
    behind than the owner's ring reaches or was fed wrong operations.
    """

    def __init__(
        self,
        directory: Directory,
        ring_limit: int,
        patience_seconds: float,
        head_interval_seconds: Callable[[int], float] = lambda members: 0.0,
    ) -> None:
        self._directory = directory
        self._ring_limit = ring_limit
        self._patience_seconds = patience_seconds
        self._head_interval_seconds = head_interval_seconds
        self._behind: dict[Member, _Behind] = {}
        self._ahead: dict[Member, _Ahead] = {}

    def due(
        self, owners: Sequence[MemberState], fetching: set[Member], now: float
    ) -> list[MemberState]:
        """Owners whose snapshots to fetch now; `fetching` are under way. Call it a few times a second."""
        behind: dict[Member, _Behind] = {}
        chosen: list[MemberState] = []
        unsettled = self._directory.unsettled
        watched = [owner for owner in owners if owner.member in unsettled] if unsettled else []
        self._distrust_unsigned(
            watched, UNSIGNED_SECONDS + 2 * self._head_interval_seconds(len(owners) + 1), now
        )
        for owner in watched:
            member = owner.member
            lag, diverged = self._directory.lag(member), self._directory.diverged(member)
            if not (lag or diverged) or self._directory.staging(member):
                continue
            sequence = self._directory.position(member)[1]
            entry = behind[member] = self._behind.get(member) or _Behind(sequence, now)
            if entry.sequence != sequence:
                entry.sequence, entry.since = sequence, now
            patient = now < entry.since + self._patience_seconds
            if patient and not diverged and lag <= self._ring_limit:
                continue
            if (
                member not in fetching
                and entry.retry_at <= now
                and len(fetching) + len(chosen) < MAX_IN_FLIGHT
                and self._directory.may_take(member, self._directory.head(member).count)
            ):
                chosen.append(owner)
        self._behind = behind
        return chosen

    def _distrust_unsigned(
        self, owners: Sequence[MemberState], patience_seconds: float, now: float
    ) -> None:
        """Drop the views whose operations no head came to cover."""
        ahead: dict[Member, _Ahead] = {}
        for owner in owners:
            member = owner.member
            signed, position = (
                self._directory.head(member).sequence,
                self._directory.position(member)[1],
            )
            if position <= signed:
                continue
            entry = self._ahead.get(member)
            if entry is None or signed >= entry.sequence:
                entry = _Ahead(position, now)
            if now < entry.since + patience_seconds:
                ahead[member] = entry
            else:
                self._directory.distrust(member)
        self._ahead = ahead

    def failed(self, member: Member, now: float) -> None:
        """A snapshot did not arrive, or was wrong: wait before the next, longer each time."""
        entry = self._behind.get(member)
        if entry is not None:
            entry.retry_at = now + entry.retry_seconds
            entry.retry_seconds = min(2 * entry.retry_seconds, LAST_RETRY_SECONDS)
