"""What two peers tell each other so that both know the same: digests, and deltas made from them.
Pure.

Scuttlebutt (van Renesse et al. 2008) in three legs: A sends its digest, B answers with what A lacks
and its own digest, A sends what B lacks. A delta is checked whole before any of it is taken in.

Nothing here may hold the loop for more than some 5 ms. A signature takes 0.1 ms to check, and holds the
interpreter while it does, in whatever thread; an operation takes up to 9 us to carry out. So of one delta a
bounded number of either is taken; the rest is as if it had not come, and the next digests ask for it.
"""

from __future__ import annotations

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
from p2pstore.gossip.floors.cluster_records import ClusterRecords, TheirRecords, records_for
from p2pstore.gossip.gossip_messages import MAX_CLAIMS, Delta
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog, SignedRun
from p2pstore.gossip.locations.views import Outcome
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
    """What a delta brought that was not known."""

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

    # --- making deltas -----------------------------------------------------------------------

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

        # Who does not name the member may hold it dead: its log waits for the next exchange.
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

    # --- taking in ---------------------------------------------------------------------------

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
