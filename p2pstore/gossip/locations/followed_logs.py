"""Whether the views of all members' logs are complete, but for what is less than a second old. Pure.

Only views that are not where their heads are have to be looked at: in a cluster at rest there are none, however
many members it has.
"""

from __future__ import annotations

import math
from typing import Final

from p2pstore.gossip.locations.directory import Directory, Position
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import Member

MARK_SECONDS: Final = 0.5
"""A view that has not come to where its owner's head was so long ago has something missing."""
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
