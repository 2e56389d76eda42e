"""This peer's own digest, kept up to date row by row. Pure.

Who is a member is read anew when that changes, which is seldom. How far this peer is in a member's log changes
all the time: who moves a view by a delta says so (`moved`); views also change by snapshots, or are forgotten,
which `read_anew` asks the directory for a few times a second. A digest that is behind by that much asks for
what is here already, and nothing else comes of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from p2pstore.gossip.exchange.digests import MAX_PACKED_SEQUENCE, Column, Digest, MemberSet
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.members.membership import Membership, MemberState
from p2pstore.gossip.records import Member

REMEMBERED_SETS: Final = 8
"""What was asked of one of these sets of members is understood while the answer is under way."""


class DigestTable:
    """See the module's docstring."""

    def __init__(self, membership: Membership, directory: Directory, log: OwnLog) -> None:
        self.follows_logs = True
        """Whether operations of others' logs are wanted."""
        self.logs_are_read = True
        """Whether anybody else wants them."""
        self.states: list[MemberState] = []
        """The members, a row each. Call `current` first."""
        self._membership = membership
        self._directory = directory
        self._log = log
        self._seen_version = -1
        self._places: dict[Member, int] = {}
        self._own_place = -1
        self._of = MemberSet(np.empty(0, np.uint64), np.empty(0, np.uint64))
        self._records: Column = np.empty(0, np.uint64)
        self._logs: Column = np.empty(0, np.uint64)
        self._sets: OrderedDict[int, MemberSet] = OrderedDict()
        self._rows_made = 0

    def take_rows_made(self) -> int:
        """How many rows were made anew since the last call: 1,000 take 0.4 ms."""
        made, self._rows_made = self._rows_made, 0
        return made

    def current(self) -> Digest:
        """What this peer knows now. Its columns change with the next call of any method: keep none."""
        if self._seen_version != self._membership.version:
            self._rebuild()
        own = self._membership.own
        if self._own_place >= 0 and own.signed is not None:
            if int(self._of.incarnations[self._own_place]) != own.record_incarnation:
                self._rebuild()
            self._records[self._own_place] = own.record_sequence
            self._logs[self._own_place] = self._log.signed
        return Digest(self._of, self._records, self._logs)

    def told(self) -> Digest:
        """What to tell others that this peer knows: of logs that it does not follow, that it wants nothing."""
        known = self.current()
        if self.follows_logs:
            return known
        logs = np.full(len(known.log_sequences), MAX_PACKED_SEQUENCE, np.uint64)
        if self._own_place >= 0:
            logs[self._own_place] = self._log.signed
        return Digest(known.of, known.record_sequences, logs)

    def known_set(self, members_hash: int) -> MemberSet | None:
        """The set of members with this hash, when it is this peer's or was so lately."""
        return self._sets.get(members_hash)

    def moved(self, member: Member) -> None:
        """The member's record is another, or its view moved."""
        place = self._places.get(member)
        if place is None or self._seen_version != self._membership.version:
            return
        state = self.states[place]
        if int(self._of.incarnations[place]) != state.record_incarnation:
            self._seen_version = -1
            return
        self._records[place] = state.record_sequence
        self._logs[place] = self.position(state)

    def read_anew(self) -> None:
        """Find the views that changed without `moved`. Call it a few times a second."""
        for member in self._directory.take_moved():
            self.moved(member)

    def position(self, state: MemberState) -> int:
        """Up to where this peer wants no operations of the member's current log."""
        if state is self._membership.own:
            return self._log.signed
        return self._directory.wanted_after(
            state.member, state.record_incarnation, state.log_sequence
        )

    def _rebuild(self) -> None:
        """4 ms with 10,000 members."""
        self._seen_version = self._membership.version
        live = self._membership.live()
        members = np.array([state.member for state in live], np.uint64)
        order = np.argsort(members)
        self.states = [live[place] for place in order.tolist()]
        self._places = {state.member: place for place, state in enumerate(self.states)}
        self._own_place = self._places.get(self._membership.own.member, -1)
        self._of = MemberSet(
            members[order],
            np.array([state.record_incarnation for state in self.states], np.uint64),
        )
        self._records = np.array([state.record_sequence for state in self.states], np.uint64)
        self._logs = np.array([self.position(state) for state in self.states], np.uint64)
        self._rows_made += len(live)
        self._sets[self._of.hash] = self._of
        self._sets.move_to_end(self._of.hash)
        if len(self._sets) > REMEMBERED_SETS:
            self._sets.popitem(last=False)
