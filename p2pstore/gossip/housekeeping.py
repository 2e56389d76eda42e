"""What gossip does a few times a second, besides exchanges and probes. Pure."""

from __future__ import annotations

import math
from typing import Final

from p2pstore.gossip.gossip_effects import Ask, Effect
from p2pstore.gossip.gossip_state import GossipState
from p2pstore.gossip.homes.directory_mode import Phase
from p2pstore.gossip.locations.catch_up import CatchUp
from p2pstore.gossip.locations.snapshots import most_snapshot_bytes
from p2pstore.gossip.records import Member

HOUSEKEEPING_SECONDS: Final = 0.25
PURGING_SECONDS: Final = 0.05
"""While floors are dropped, step by step."""


class Housekeeping:
    """Forgets what is old, follows modes and floors, and fetches the snapshots that are due."""

    def __init__(self, state: GossipState) -> None:
        self._state = state
        self._membership = state.membership
        config = state.config
        self.catch_up = CatchUp(state.directory, config.ring_limit, config.behind_seconds)
        self.due = -math.inf
        """When `work` has something to do."""
        self._forget_at: dict[Member, float] = {}

    def gone(self, member: Member, now: float) -> None:
        """The member is believed dead: what it held is forgotten after a while."""
        self._forget_at[member] = now + self._state.config.forget_seconds

    def back(self, member: Member) -> None:
        """The member is back, or was forgotten already."""
        self._forget_at.pop(member, None)

    def work(self, now: float) -> list[Effect]:
        """Do all of it when it is due; what to ask others then."""
        if now < self.due:
            return []
        effects = self._work(now)
        purging = self._state.cluster_records.floors.purging
        self.due = now + (PURGING_SECONDS if purging else HOUSEKEEPING_SECONDS)
        return effects

    def _work(self, now: float) -> list[Effect]:
        for state in self._membership.expire(now):
            self._state.partitions.drop(state.member)
            record = None if state.leaving or self._membership.others() else state.record
            if record is not None:
                # Without this a peer that was cut off for long would stay alone for good.
                self._state.contacts.add(
                    record.control, state.peer_id, bootstrap=False, in_book=True
                )
        self._state.directory.expire_early(now)
        if self._state.partitions.housekeep(now, agreed=self._state.exchanges.agreed):
            self._state.own_record.changed()
        self._state.knowledge.table.follows_logs = self._state.partitions.mode.follows_logs
        self._state.knowledge.table.logs_are_read = self._state.partitions.current.logs_are_read
        self._state.knowledge.table.read_anew()
        overdue = [member for member, due in self._forget_at.items() if due <= now]
        if overdue:  # a dictionary that was large once stays so: a smaller one takes its place
            self._forget_at = {m: due for m, due in self._forget_at.items() if due > now}
        for member in overdue:
            self._state.partitions.drop(member)
        self._state.floors.housekeep(
            now, alone=self._alone_by_configuration(), members=self._membership.others()
        )
        for peer_id in self._state.peer_ids(self._state.floors.take_to_ask(now)):
            if self._membership.is_live(peer_id):
                self._state.exchanges.want(peer_id)
        self._state.questions.give_up_lost(now)
        self._vouch(now)
        return [*self._doubt_the_late(now), *self._fetch_snapshots(now)]

    def _alone_by_configuration(self) -> bool:
        """Whether there is no other member, none that was, and no address to try."""
        return self._state.contacts.is_empty and len(self._membership) == 1

    def _vouch(self, now: float) -> None:
        """Let clients answer from the table by themselves for a while, or not."""
        if self._state.published is None:
            return
        if self._state.partitions.mode.phase is Phase.FULL:
            self._state.published.vouch(now, self._state.time.newest_accepted(now))
        else:
            self._state.published.withdraw()

    def _doubt_the_late(self, now: float) -> list[Ask]:
        patience = (
            self._state.config.membership.probe_timeout_seconds * self._membership.health.multiplier
        )
        late = self._state.questions.overdue(self._membership.resumed_at, now - patience)
        return self._state.probing.doubt(late, now)

    def _fetch_snapshots(self, now: float) -> list[Effect]:
        if not self._state.partitions.mode.follows_logs:
            return []
        owners = self.catch_up.due(self._membership.others(), self._state.questions.fetching(), now)
        return [
            self._state.questions.fetch_snapshot(
                state.peer_id,
                state.member,
                most_snapshot_bytes(self._state.directory.head(state.member).count),
                now,
            )
            for state in owners
        ]
