"""When to give up waiting for a log's operations and fetch the owner's whole set. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.views import Position
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import Member

MAX_IN_FLIGHT: Final = 4
MAX_RECORDS_IN_FLIGHT: Final = 1 << 20
"""Of all snapshots that are fetched at a time, if they are several: some 40 MB."""
FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Behind:
    sequence: int
    since: float
    retry_seconds: float = FIRST_RETRY_SECONDS
    retry_at: float = -math.inf


class CatchUp:
    """Watches the views that differ from their owners' signed heads.

    A snapshot is due when a view has stood still for `patience_seconds`, and at once when it is further
    behind than the owner's ring reaches or does not have the hash that the owner signed.
    """

    def __init__(self, directory: Directory, ring_limit: int, patience_seconds: float) -> None:
        self._directory = directory
        self._ring_limit = ring_limit
        self._patience_seconds = patience_seconds
        self._behind: dict[Member, _Behind] = {}

    def due(self, owners: Sequence[MemberState], fetching: set[Member], now: float) -> list[MemberState]:
        """Owners whose snapshots to fetch now; `fetching` are under way. Call it a few times a second."""
        behind: dict[Member, _Behind] = {}
        chosen: list[MemberState] = []
        coming = sum(self._directory.head(member).count for member in fetching)
        unsettled = self._directory.unsettled
        watched = [owner for owner in owners if owner.member in unsettled] if unsettled else []
        for owner in watched:
            member = owner.member
            lag, diverged = self._directory.lag(member), self._directory.diverged(member)
            if not (lag or diverged) or self._directory.staging(member):
                continue
            sequence = self._directory.position(member)[1]
            entry = behind[member] = self._behind.get(member) or _Behind(sequence, now)
            if entry.sequence != sequence:
                entry.sequence, entry.since = sequence, now
            count = self._directory.head(member).count
            patient = now < entry.since + self._patience_seconds
            if patient and not diverged and lag <= self._ring_limit:
                continue
            if (
                member not in fetching
                and entry.retry_at <= now
                and len(fetching) + len(chosen) < MAX_IN_FLIGHT
                and (not coming or coming + count <= MAX_RECORDS_IN_FLIGHT)
                and self._directory.may_take(member, count)
            ):
                chosen.append(owner)
                coming += count
        self._behind = behind
        return chosen

    def failed(self, member: Member, now: float) -> None:
        """A snapshot did not arrive, or was wrong: wait before the next, longer each time."""
        entry = self._behind.get(member)
        if entry is not None:
            entry.retry_at = now + entry.retry_seconds
            entry.retry_seconds = min(2 * entry.retry_seconds, LAST_RETRY_SECONDS)


MARK_SECONDS: Final = 0.5
"""A view that has not come to where its owner's head was this long ago has something missing."""
KEPT_SECONDS: Final = 0.25
"""How long an answer holds."""


class FollowedLogs:
    """Call `mark` a few times a second."""

    def __init__(self, membership: Membership, directory: Directory) -> None:
        self._membership = membership
        self._directory = directory
        self._before: dict[Member, Position] = {}
        """Where the heads were at the last mark, of those that moved since."""
        self._marked_at = -math.inf
        self._complete = False
        self._complete_until = -math.inf

    def moved(self, member: Member, before: Position, now: float) -> None:
        """A member's head, which was at `before`, is elsewhere now."""
        if now < self._marked_at + 2 * MARK_SECONDS:
            self._before.setdefault(member, before)

    def mark(self, now: float) -> None:
        """Note where the heads are."""
        if now >= self._marked_at + MARK_SECONDS:
            self.complete(now)  # by the marks before
            self._marked_at = now
            self._before = {}

    def begin_anew(self) -> None:
        """The logs were not followed until now."""
        self._before = {}
        self._complete_until = -math.inf

    def complete(self, now: float) -> bool:
        """Whether the view of every live member's log is where its head was half a second ago; of a member that
        is new, where its head is."""
        if self._complete_until <= now:
            self._complete_until = now + KEPT_SECONDS
            self._complete = all(map(self._is_followed, self._directory.unsettled))
        return self._complete

    def _is_followed(self, member: Member) -> bool:
        """Of a member whose view is not where its head is: whether it is at least where that was."""
        state = self._membership.resolve(member)
        if state is None or not state.live or state is self._membership.own:
            return True
        head = state.record_incarnation, state.log_sequence
        return self._directory.position(member) >= self._before.get(member, head)
