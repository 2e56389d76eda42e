"""Gossip as one state machine: membership, logs, directory and cluster records kept alike everywhere. Pure.

How it is driven: whatever happens is fed in (`serve`, `answered`, `contacted`, `hold`, ...), then
`tick` does what is due. Feeding in may make something due at once, so ask `next_tick` again after
every event; and feed in everything that has arrived before `tick`, which judges timeouts. Each
`Ask`, `FetchSnapshot` and `Contact` is answered exactly once, by `answered`, `snapshot_fetched`,
and `contacted` or `contact_failed`.

How news travels. A new operation, member or cluster record goes to four random neighbours at once
(see `active_view`), and those for whom it is new do the same. What that misses, one exchange with one
random neighbour brings: every 67 ms while there are differences, once a second when there are none. A reader behind
all rings fetches a snapshot from the log's owner. A key's home peers are told of its locations directly (`pushes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import (
    Ask,
    Contact,
    ControlKind,
    Duplicate,
    Effect,
    ExchangeReply,
    Later,
    Leave,
    Ping,
    SnapshotHead,
    Status,
)
from p2pstore.gossip.gossip_state import GossipState
from p2pstore.gossip.homes.partition_homes import Phase
from p2pstore.gossip.incoming import Incoming
from p2pstore.gossip.locations.snapshots import (
    CatchUp,
    CheckedSnapshot,
    check_snapshot,
    most_snapshot_bytes,
)
from p2pstore.gossip.members.member_table import MAX_INCARNATION, MemberChange
from p2pstore.gossip.records import LOCATION_BYTES, Member, PeerId
from p2pstore.wire import Code, Failure, Message


def too_much_asked() -> Failure:
    """The answer to a peer that asks more often than its `MessageBudget` allows."""
    return Failure(int(Code.BUSY), "that peer asks too much; let it ask less often")


class Gossip(GossipState):
    """The state machine: see the module's docstring, and `GossipState` for the arguments."""

    @cached_property
    def incoming(self) -> Incoming:
        return Incoming(self)

    @cached_property
    def _housekeeping(self) -> Housekeeping:
        return Housekeeping(self)

    def take_changes(self) -> list[MemberChange]:
        """Status changes of members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def leave(self, now: float) -> list[Effect]:
        """Tell up to eight members that this peer goes. After it, `tick` starts nothing new."""
        self.own_record.leave()
        signed = self.record(now)
        told = self.view.sample(self.config.leave_fanout)
        self.membership.leave(now)
        return [
            self.questions.ask(state.peer_id, ControlKind.LEAVE, Leave(signed), now) for state in told
        ]

    def expel(self) -> list[PeerId]:
        """Forget the members, and what they hold, that `accepts_peer` does not accept any more."""
        accepts = self.checks.accepts_peer
        own = self.membership.own
        gone = [s for s in self.membership.states() if s is not own and not accepts(s.peer_id)]
        self.losses += len(gone)
        for state in gone:
            self.membership.forget(state)
            self.partitions.drop(state.member)
            self._housekeeping.back(state.member)
            self.floors.expelled(state.member)
            self.exchanges.forget(state.peer_id)
        return [state.peer_id for state in gone]

    def serve(
        self, sender: PeerId, kind: int, request: Message, now: float
    ) -> tuple[Message | Later, list[Effect]]:
        """Answer a peer's request; `Later` when another peer is asked first. Raises `ProtocolError`, and changes
        nothing, for nonsense. A peer that asks far more often than it may is told so, and nothing else."""
        if not self.questions.budget.serve(sender, now):
            self.membership.heard(sender, now)
            return too_much_asked(), []
        reply, effects = self.incoming.serve(sender, kind, request, now)
        return reply, effects + self._consequences(now)

    def serve_reader(self, sender: PeerId, kind: int, request: Message, now: float) -> Message:
        """Answer a peer that was admitted as a reader (`Incoming.serve_reader`). Raises `ProtocolError`."""
        if not self.questions.budget.serve(sender, now):
            return too_much_asked()
        return self.incoming.serve_reader(sender, kind, request, now)

    def answered(self, token: int, reply: Message | None, now: float) -> list[Effect]:
        """The outcome of an `Ask`: its reply, a `Failure`, or None when nothing came in time. Raises `ProtocolError`,
        having taken nothing in, when the reply is nonsense."""
        asked = self.questions.take(token)
        if asked is None:
            return []
        if reply is not None:
            self.contacts.admitted(asked.peer_id)
        if asked.kind in (ControlKind.PING, ControlKind.PING_REQUEST):
            self.membership.newcomers.answered(asked.peer_id)
            answers = self.incoming.probe_answered(token, asked, reply, now)
            return answers + self._consequences(now)
        if reply is None:
            self.view.failed(asked.peer_id, now)
            return self.connection_lost(asked.peer_id, now)
        if isinstance(reply, ExchangeReply):
            return [*self.incoming.exchanged(asked, reply, now), *self._consequences(now)]
        self.membership.heard(asked.peer_id, now)
        return self._consequences(now)

    def snapshot_fetched(
        self, token: int, head: SnapshotHead | None, packed: bytes | CheckedSnapshot, now: float
    ) -> None:
        """The outcome of a `FetchSnapshot` (`head` None: failed), checked in a thread, or else here. Raises
        `ProtocolError`, and changes nothing, for one that its owner did not sign; it is fetched again after a while."""
        asked = self.questions.take(token)
        if asked is None:
            return
        # A success ends this when the view is seen to have caught up.
        self._housekeeping.catch_up.failed(asked.member, now)
        if head is None:
            return
        size_bytes = (
            packed.count * LOCATION_BYTES if isinstance(packed, CheckedSnapshot) else len(packed)
        )
        if size_bytes > asked.most_bytes:
            raise ProtocolError(
                f"a snapshot of {size_bytes:,} bytes; after what its owner signed it has at most {asked.most_bytes:,}"
            )
        if not 0 <= head.sequence < MAX_INCARNATION:
            raise ProtocolError(f"a snapshot at sequence {head.sequence}")
        checked = packed if isinstance(packed, CheckedSnapshot) else check_snapshot(packed)
        if self.directory.install_snapshot(
            asked.member, head.incarnation, head.sequence, head.set_hash, checked
        ):
            self.heard_of(checked.packed, now, checked.newest_clock)
            self.exchanges.hurry()

    def contacted(self, peer_id: PeerId, addresses: Sequence[str], now: float) -> None:
        """A peer answered at these addresses: exchange everything with it, if it admits this one."""
        self.contacts.succeeded(addresses, peer_id, now)
        if peer_id != self.peer_id:
            self.exchanges.want(peer_id)

    def contact_failed(self, addresses: Sequence[str], now: float) -> None:
        """No peer answered at these addresses (exactly those of the `Contact`)."""
        self.contacts.failed(addresses, now)

    def connection_lost(self, peer_id: PeerId, now: float) -> list[Effect]:
        """A connection to the peer failed: no verdict, but a reason to probe it at once."""
        state = self.membership.get(peer_id)
        if state is None or state.status != Status.ALIVE or self.leaving:
            return []
        return [*self.probing.probe(peer_id, now)]

    def tick(self, now: float) -> list[Effect]:
        """Do what is due, after all that arrived was fed in. Timeouts are judged here only."""
        if self.leaving:
            return []
        self.membership.tick(now)
        self.record(now)
        self.view.tick(now)
        effects: list[Effect] = self._consequences(now)
        effects += self.probing.tick(now, self.view.neighbours())
        effects += map(partial(self._ping_newcomer, now=now), self.membership.newcomers.take())
        effects += self.exchanges.start(now)
        self.incoming.defer_homes_if_slow(now)
        effects += self.eager_news.spread(now)
        if self.directory.work_pending and self.directory.work():
            self.exchanges.hurry()
        effects += self._housekeeping.work(now)
        alone = not self.membership.others()
        for addresses in self.contacts.due(now, self.membership.is_live, alone):
            effects.append(Contact(addresses))
        return effects

    def next_tick(self, now: float) -> float:
        """When `tick`, or `pushes`, has something to do next."""
        if self.leaving:
            return math.inf
        if self.directory.work_pending or self.membership.newcomers.is_due:
            return now
        due = min(
            self.membership.next_tick(),
            self.probing.due(),
            self._housekeeping.due,
            self.contacts.next_due(),
            self.partitions.pushes.due(),
            self.exchanges.due(),
            self.eager_news.due(),
            self.view.due(),
        )
        return max(due, now)

    def close(self) -> None:
        """This peer ends: clients look nothing up any more, as the table's memory goes. Call nothing after it."""
        if self.published is not None:
            self.published.close()
        self.directory.close()

    def _ping_newcomer(self, peer_id: PeerId, now: float) -> Ask:
        """Ping a peer that is only told of. When it answers it is exchanged with (`_heard`)."""
        seconds = self.config.membership.probe_interval_seconds
        ping = Ping(0, [])
        return self.questions.ask(peer_id, ControlKind.PING, ping, now, timeout_seconds=seconds)

    def _react(self, now: float) -> None:
        """Follow members' changes: hide what the dead hold, show what the living do."""
        for change in self.membership.take_changes():
            self._changes.append(change)
            self.view.follow(change)
            self.probing.follow(change)
            if change.new > Status.SUSPECT:
                self.losses += change.old is not None
                if change.old is not None and change.old <= Status.SUSPECT:
                    left = (state := self.membership.get(change.peer_id)) is not None and state.leaving
                    self.floors.went(change.member, now, left=left)
                self.partitions.hide(change.member)
                self._housekeeping.gone(change.member, now)
                self.exchanges.forget(change.peer_id)
            else:
                if change.old is None or change.old > Status.SUSPECT:
                    self.floors.came(change.member, now)
                self.partitions.show(change.member)
                self._housekeeping.back(change.member)
        del self._changes[: -self.config.membership.max_members]

    def _consequences(self, now: float) -> list[Effect]:
        """Consequences of any event: members changed, this peer's identity used twice."""
        self._react(now)
        duplicate, self.own_record.duplicate = self.own_record.duplicate, None
        return [] if duplicate is None else [Duplicate(duplicate)]


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
        state = self._state
        for gone in self._membership.expire(now):
            state.partitions.drop(gone.member)
            record = None if gone.leaving or self._membership.others() else gone.record
            if record is not None:
                # Without this a peer that was cut off for long would stay alone for good.
                state.contacts.add(record.control, gone.peer_id, bootstrap=False, in_book=True)
        state.directory.expire_words(now)
        if state.partitions.housekeep(now, agreed=state.exchanges.agreed):
            state.own_record.changed()
        state.knowledge.table.follows_logs = state.partitions.mode.follows_logs
        state.knowledge.table.logs_are_read = state.partitions.current.logs_are_read
        state.knowledge.table.read_anew()
        overdue = [member for member, due in self._forget_at.items() if due <= now]
        if overdue:  # a dictionary that was large once stays so: a smaller one takes its place
            self._forget_at = {m: due for m, due in self._forget_at.items() if due > now}
        for member in overdue:
            state.partitions.drop(member)
        # No other member, none that was, and no address to try.
        alone = state.contacts.is_empty and len(self._membership) == 1
        state.floors.housekeep(now, alone=alone, members=self._membership.others())
        for peer_id in state.peer_ids(state.floors.take_to_ask(now)):
            if self._membership.is_live(peer_id):
                state.exchanges.want(peer_id)
        state.questions.give_up_lost(now)
        self._vouch(now)
        return [*self._doubt_the_late(now), *self._fetch_snapshots(now)]

    def _vouch(self, now: float) -> None:
        """Let clients answer from the table by themselves for a while, or not."""
        published = self._state.published
        if published is None:
            return
        if self._state.partitions.mode.phase is Phase.FULL:
            published.vouch(now, self._state.time.newest_accepted(now))
        else:
            published.withdraw()

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
