"""Anti-entropy between two peers: digests, deltas made from them, and eager news. Pure.

Scuttlebutt (van Renesse et al. 2008) in three legs: A sends its digest, B answers with what A lacks
and its own digest, A sends what B lacks. A delta is checked whole before any of it is taken in.

Nothing here may hold the loop for more than some 5 ms. A signature takes 0.1 ms to check, and holds the
interpreter while it does, in whatever thread; an operation takes up to 9 us to carry out. So of one delta a
bounded number of either is taken; the rest is as if it had not come, and the next digests ask for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from p2pstore.gossip.exchange.delta_checks import (
    MAX_CHECKS,
    MAX_CLUSTER_BYTES,
    CheckedDelta,
    chunk_of,
    run_of,
    work_microseconds,
)
from p2pstore.gossip.exchange.digests import MAX_PACKED_SEQUENCE, Digest, DigestTable, Run, pack_runs
from p2pstore.gossip.exchange.message_budget import MessageBudget
from p2pstore.gossip.exchange.open_requests import OpenRequests
from p2pstore.gossip.floors.cluster_records import ClusterRecords, TheirRecords, records_for
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import MAX_CLAIMS, Ask, ControlKind, Delta
from p2pstore.gossip.homes.partition_homes import KeptDirectory
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog, SignedRun
from p2pstore.gossip.locations.views import Outcome
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    ClusterRecord,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
)

SEND_RECORDS: Final = MAX_CHECKS
"""At most this many records are sent in one delta: its receiver would check no more."""
SEND_MICROSECONDS: Final = 5_000
"""Work for the receiver up to which operations are sent (`work_microseconds`) ..."""


@dataclass(slots=True)
class News:
    """The new part of a delta."""

    records: list[PeerId] = field(default_factory=list)
    """Peers that joined, restarted or left; not those whose figures merely changed."""
    logs: dict[Member, int] = field(default_factory=dict)
    """Member -> first of its new operations."""
    operations: int = 0
    """How many new ones."""
    cluster_records: list[tuple[ClusterRecord, SignedRecord]] = field(default_factory=list)
    own: list[PeerRecord] = field(default_factory=list)
    """Records signed with this peer's own key that are newer than its own."""
    anything: bool = False


class Knowledge:
    """Everything that gossip replicates, seen as one thing that has a digest and takes deltas."""

    def __init__(
        self,
        membership: Membership,
        directory: Directory,
        log: OwnLog,
        cluster_records: ClusterRecords,
        table: DigestTable,
        rng: Random,
    ) -> None:
        self.membership = membership
        self.directory = directory
        self.log = log
        self.cluster_records = cluster_records
        self.table = table
        self._rng = rng

    def lacks(self, theirs: Digest) -> bool:
        """Whether a peer with this digest has operations to send here. A peer that wants none says that it has all."""
        mine = self.table.current()
        _, incarnations, _, log_sequences = theirs.along(mine.of.members)
        same = incarnations == mine.of.incarnations
        more = (log_sequences > mine.log_sequences) & (log_sequences != MAX_PACKED_SEQUENCE)
        return bool(np.any(same & more))

    def operations_since(self, member: Member, sequence: int, limit_bytes: int) -> list[SignedRun]:
        """Runs with the operations of any member's log after `sequence`, this peer's own included."""
        if member == self.membership.own.member:
            return self.log.since(sequence, limit_bytes)
        return self.directory.since(member, sequence, limit_bytes)

    def delta_for(
        self,
        theirs: Digest,
        limit_bytes: int,
        their_records: TheirRecords | None = None,
        *,
        as_runs: bool = False,
        to: PeerId | None = None,
        rumors: bool = True,
    ) -> Delta:
        """The news for a peer (`to`) with this digest and these cluster records. `as_runs`: it named this
        peer's set of members. `rumors`: whether claims ride along that others are to hear of."""
        mine = self.table.current()
        named, incarnations, record_sequences, log_sequences = theirs.along(mine.of.members)
        older = incarnations < mine.of.incarnations
        same = incarnations == mine.of.incarnations
        lacking = older | (same & (record_sequences < mine.record_sequences))
        records, sent, limit_bytes = self._records_at(np.flatnonzero(lacking).tolist(), limit_bytes)
        gone = self._gone(theirs.beside(mine.of.members))
        farewells = [state.signed for state in gone if state.leaving and state.signed is not None]
        records += farewells[: SEND_RECORDS - len(records)]

        # A peer that does not name the member may hold it dead: its log waits for the next exchange.
        told = named | (mine.of.members == self.membership.own.member)
        known = np.where(same, log_sequences, 0)
        behind = (same | older) & told & (mine.log_sequences > known)
        places = np.flatnonzero(behind)
        missing = (mine.log_sequences[places] - known[places]).astype(np.int64)
        places = places[np.argsort(-missing, kind="stable")]
        unsent = set(np.flatnonzero(older).tolist()) - sent
        runs = self._runs_at(
            [(place, int(known[place])) for place in places.tolist() if place not in unsent], limit_bytes
        )
        limit_bytes -= sum(len(run.signed.operations) for run in runs)
        cluster_records = (
            records_for(
                self.cluster_records,
                their_records,
                SEND_RECORDS - len(records),
                min(limit_bytes, MAX_CLUSTER_BYTES),
                self._rng,
            )
            if their_records is not None
            else []
        )
        dead = [state.peer_id for state in gone if not state.leaving]
        membership = self.membership
        claims = membership.claims(dead, to) if rumors else membership.accusations(dead)
        claims += self.membership.refuted(mine.of.members[~named].tolist(), MAX_CLAIMS // 4)
        if as_runs and all(run.signed.first_sequence <= MAX_PACKED_SEQUENCE for run in runs):
            packed = pack_runs(runs)
            return Delta(records, [], cluster_records, claims, mine.of.hash, *packed)
        logs = [
            chunk_of(int(mine.of.members[run.place]), int(mine.of.incarnations[run.place]), run.signed)
            for run in runs
        ]
        return Delta(records, logs, cluster_records, claims)

    def _records_at(
        self, places: list[int], limit_bytes: int
    ) -> tuple[list[SignedRecord], set[int], int]:
        """(peer records of the members at these places, whose they are, bytes that are left)."""
        if len(places) > SEND_RECORDS:  # others send some, too: not all of us the same
            places = self._rng.sample(places, SEND_RECORDS)
        records: list[SignedRecord] = []
        sent: set[int] = set()
        for place in places:
            signed = self.table.states[place].signed
            if signed is not None and limit_bytes > len(signed.body):
                records.append(signed)
                sent.add(place)
                limit_bytes -= len(signed.body) + len(signed.signature)
        return records, sent, limit_bytes

    def _runs_at(self, places: list[tuple[int, int]], limit_bytes: int) -> list[Run]:
        """Runs of the members at these places with the operations after those that are known."""
        runs: list[Run] = []
        work = SEND_MICROSECONDS
        for place, known in places:
            if limit_bytes < LOCATION_BYTES or work <= 0:
                break
            member = self.table.states[place].member
            for signed in self.operations_since(member, known, limit_bytes):
                work -= work_microseconds(len(signed.operations) // LOCATION_BYTES)
                if work < 0 and runs:
                    break
                limit_bytes -= len(signed.operations)
                runs.append(Run(place, signed))
        return runs

    def _gone(self, members: list[Member]) -> list[MemberState]:
        """Those of them that this peer knows to be gone, to be told of it. That one left, its record says."""
        states = (self.membership.resolve(member) for member in members)
        return [state for state in states if state is not None and not state.alive][: MAX_CLAIMS // 2]

    def apply(self, delta: CheckedDelta, now: float, sender: PeerId | None = None) -> News:
        """Take in a checked delta: records, then claims, then operations, then cluster records."""
        news = News()
        for record, signed in delta.records:
            self._apply_record(record, signed, news, now, sender)
        self.membership.observe_claims(delta.claims, now, sender)
        for chunk in delta.logs:
            if chunk.member == self.membership.own.member or not self.table.follows_logs:
                continue
            _, before = self.directory.position(chunk.member)
            applied = self.directory.apply(chunk.member, chunk.incarnation, run_of(chunk))
            if applied.outcome is not Outcome.STALE:
                self.table.moved(chunk.member)
            if applied.outcome is Outcome.APPLIED:
                news.logs.setdefault(chunk.member, before + 1)
                news.operations += applied.count
                news.anything = True
        for cluster_record, signed in delta.cluster_records:
            if self.cluster_records.offer(cluster_record, signed):
                news.cluster_records.append((cluster_record, signed))
                news.anything = True
        return news

    def _apply_record(
        self, record: PeerRecord, signed: SignedRecord, news: News, now: float, sender: PeerId | None
    ) -> None:
        if record.peer_id == self.membership.me:
            news.own.append(record)
            return
        known, before = self.membership.get(record.peer_id), None
        if known is not None and known.signed is not None:
            before = known.record_incarnation, known.leaving
        if not self.membership.observe_record(record, signed, now, sender):
            return
        state = self.membership.get(record.peer_id)
        assert state is not None
        self.directory.observe_head(state.member, record.incarnation, record.head)
        self.table.moved(state.member)
        if not state.alive:
            self.directory.hide(state.member)
        news.anything = True
        if before != (record.incarnation, record.leaving):
            news.records.append(record.peer_id)


MAX_RECORDS: Final = 40
MAX_CLUSTER_RECORDS: Final = 40
"""In one message; as many as a receiver checks the signatures of (`anti_entropy`)."""
BUDGET_SHARE: Final = 0.2
"""Of the messages a second, that eager ones and their acknowledgements may be; others send as many here."""
BURST_RELAYS: Final = 4


class FreshNews:
    """Eager relay: passes recent news on at once to members that may not know it; exchanges bring what that misses.

    It brings a single put to all members within tens of milliseconds, at about four copies of everything. Under load
    the copies cost more than the time is worth: operations are left to exchanges then (`OperationRate`). New members
    and cluster records are few, and always passed on.
    """

    def __init__(
        self,
        config: GossipConfig,
        knowledge: Knowledge,
        view: ActiveView,
        questions: OpenRequests,
        rate: OperationRate,
    ) -> None:
        self._config = config
        self._knowledge = knowledge
        self._view = view
        self._questions = questions
        messages = 2 * config.eager_fanout
        self._budget = MessageBudget(BUDGET_SHARE * config.messages_per_second, BURST_RELAYS * messages)
        self._rate = rate
        self._spread_at = -math.inf
        self._logs: dict[Member, tuple[int, set[PeerId]]] = {}
        """Member -> first fresh operation, and the members that know of it already."""
        self._records: dict[PeerId, set[PeerId]] = {}

    def __bool__(self) -> bool:
        return bool(self._logs or self._records or self._knowledge.cluster_records.has_rumors)

    def add_own(self, sequence: int, count: int) -> None:
        """This peer's own log has `count` new operations, the first one with this number."""
        self._rate.add(count)
        if not self._rate.is_high:
            own = self._knowledge.membership.own
            self._logs.setdefault(own.member, (sequence, {own.peer_id}))

    def add(self, news: News, sender: PeerId) -> None:
        """`sender` brought news of others."""
        self._rate.add(news.operations)
        for peer_id in news.records:
            self._records.setdefault(peer_id, {peer_id}).add(sender)
        if self._rate.is_high:
            return
        for member, first in news.logs.items():
            known_first, known_by = self._logs.get(member, (first, set()))
            owner = self._knowledge.membership.resolve(member)
            known_by |= {sender, owner.peer_id} if owner else {sender}
            self._logs[member] = (min(first, known_first), known_by)

    def due(self) -> float:
        """When `spread` has something to send."""
        if not self or not self._knowledge.membership.others():
            return math.inf
        return max(self._spread_at, self._budget.ready_at(2 * self._config.eager_fanout))

    def spread(self, now: float) -> list[Ask]:
        """Tell a few random neighbours, each what it may not know."""
        self._rate.judge(now)
        if self._rate.is_high:
            self._logs.clear()
        if not self._knowledge.membership.others():
            self._clear()
        if now < self.due():
            return []
        self._spread_at = now + self._config.eager_seconds
        asks: list[Ask] = []
        for state in self._view.sample(self._config.active_view):
            delta = self._delta_for(state.peer_id, self._config.eager_bytes)
            if delta is not None:
                asks.append(self._questions.ask(state.peer_id, ControlKind.DELTA, delta, now))
                if len(asks) == self._config.eager_fanout:
                    break
        self._budget.take(2 * len(asks), now)
        self._clear()
        return asks

    def _clear(self) -> None:
        """It was passed on, but for own unsigned operations. Cluster records count themselves how often they were."""
        self._logs.clear()
        self._records.clear()
        log = self._knowledge.log
        if log.signed < log.sequence and not self._rate.is_high:
            own = self._knowledge.membership.own
            self._logs[own.member] = log.signed + 1, {own.peer_id}

    def _delta_for(self, peer_id: PeerId, limit_bytes: int) -> Delta | None:
        """The part of it that a member may not know; None when there is nothing."""
        membership = self._knowledge.membership
        records = [
            state.signed
            for fresh, known_by in self._records.items()
            if peer_id not in known_by
            and (state := membership.get(fresh)) is not None
            and state.signed is not None
        ]
        logs = []
        to = membership.get(peer_id)
        follows = to is None or to.signed is None or to.directory == KeptDirectory.FULL
        for member, (first, known_by) in self._logs.items():
            state = membership.resolve(member)
            if peer_id in known_by or not follows or state is None or state.signed is None:
                continue
            for run in self._knowledge.operations_since(member, first - 1, limit_bytes):
                limit_bytes -= len(run.operations)
                logs.append(chunk_of(member, state.record_incarnation, run))
        rumors = self._knowledge.cluster_records.rumors(
            MAX_CLUSTER_RECORDS, limit_bytes, membership.retransmit_limit()
        )
        if not (records or logs or rumors):
            return None
        # Not before it is sure that they go: each is told a bounded number of times.
        claims = membership.claims((peer_id,), peer_id)
        return Delta(records[:MAX_RECORDS], logs, rumors, claims)


RATE_SECONDS: Final = 0.25
"""Time between two judgements of the rate ..."""
RATE_MEMORY_SECONDS: Final = 1.0
"""... which is averaged over about this time."""


class OperationRate:
    """Whether operations come faster than `limit` a second; once they did, until there are less than half as many."""

    def __init__(self, limit: float) -> None:
        self.is_high = False
        self._limit = limit
        self._count = 0
        self._rate = 0.0
        self._since = -math.inf

    def add(self, count: int) -> None:
        """This number of operations was seen."""
        self._count += count

    def judge(self, now: float) -> None:
        """Call it a few times a second."""
        elapsed = now - self._since
        if elapsed < RATE_SECONDS:
            return
        self._since = now
        if math.isfinite(elapsed):
            weight = 1.0 - math.exp(-elapsed / RATE_MEMORY_SECONDS)
            self._rate += weight * (self._count / elapsed - self._rate)
        self._count = 0
        self.is_high = self._rate > (self._limit / 2 if self.is_high else self._limit)
