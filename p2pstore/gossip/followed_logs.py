"""Whether the views of all members' logs are complete, but for what is less than a second old. Pure."""

from __future__ import annotations

import math
from typing import Final

from p2pstore.gossip.directory import Directory, Position
from p2pstore.gossip.membership import Membership
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
        self._heads: dict[Member, Position] = {}
        """Where the heads were at the last mark."""
        self._marked_at = -math.inf
        self._complete = False
        self._complete_until = -math.inf

    def mark(self, now: float) -> None:
        """Note where the heads are."""
        if now >= self._marked_at + MARK_SECONDS:
            self.complete(now)  # by the marks before
            self._marked_at = now
            self._heads = {
                state.member: (state.record.incarnation, state.record.head.sequence)
                for state in self._membership.others()
                if state.record is not None
            }

    def begin_anew(self) -> None:
        """The logs were not followed until now."""
        self._heads.clear()
        self._complete_until = -math.inf

    def complete(self, now: float) -> bool:
        """Whether the view of every live member's log is where its head was half a second ago; of a member that
        is new, where its head is."""
        if self._complete_until <= now:
            self._complete_until = now + KEPT_SECONDS
            self._complete = all(
                self._directory.position(state.member)
                >= self._heads.get(
                    state.member, (state.record.incarnation, state.record.head.sequence)
                )
                for state in self._membership.others()
                if state.record is not None
            )
        return self._complete
