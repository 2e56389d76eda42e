"""What two peers tell each other so that both know the same: digests, and deltas made from them.
Pure.

Scuttlebutt (van Renesse et al. 2008) in three legs: A sends its digest, B answers with what A lacks
and its own digest, A sends what B lacks. A delta is checked whole before any of it is taken in.

Nothing here may hold the loop for more than some 5 ms. A signature takes 0.1 ms to check, and holds the
interpreter while it does, in whatever thread; an operation takes up to 9 us to carry out. So of one delta a
bounded number of either is taken; what is left over is as if it had not come, and the next digests ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np
from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.digests import (
    MAX_PACKED_SEQUENCE,
    Digest,
    DigestTable,
    Run,
    check_runs,
    pack_runs,
    read_runs,
)
from p2pstore.gossip.exchange.future_records import FutureRecords
from p2pstore.gossip.exchange.wrong_runs import Life, WrongRuns
from p2pstore.gossip.floors.cluster_records import ClusterRecords, TheirRecords, records_for
from p2pstore.gossip.gossip_messages import (
    MAX_CLAIMS,
    MAX_RECORDS,
    Claim,
    Delta,
    LogChunk,
)
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import OwnLog, Position, check_run
from p2pstore.gossip.locations.signed_runs import (
    MAX_OPERATION_BYTES,
    MAX_SIGNED_OPERATIONS,
    SignedRun,
    is_signed,
    pack_operations,
    unpack_operations,
)
from p2pstore.gossip.locations.views import Outcome
from p2pstore.gossip.members.member_table import MAX_INCARNATION, MemberState, check_claim
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    ClusterRecord,
    Member,
    NewerFormat,
    PeerId,
    PeerRecord,
    SignedRecord,
    Verifier,
    format_peer_id,
    member_of,
    open_cluster_record,
    open_peer_record,
    read_cluster_record,
    read_peer_record,
)

MAX_CHECKS: Final = 40
"""Signatures of one delta that are checked: 4 ms."""
MAX_CLUSTER_BYTES: Final = 24 * 1024
"""Of cluster records in one delta that are taken in, and sent: 1,300 keys of floors, each 2 to 3 us of work."""
MAX_READ_RECORDS: Final = 160
"""Peer records, and cluster records, of one delta that are looked at: 2 ms."""
SEND_RECORDS: Final = MAX_CHECKS
"""At most this many records are sent in one delta: its receiver would check no more."""
SEND_MICROSECONDS: Final = 5_000
"""Operations are sent up to so much work for the receiver (`work_microseconds`) ..."""
TAKE_MICROSECONDS: Final = 6_000
"""... who takes no more than this of one delta."""
CHECK_MICROSECONDS: Final = 70
"""For a run's signature; twice that for one of many operations."""
RUN_MICROSECONDS: Final = 170
OPERATION_MICROSECONDS: Final = 9
MAX_READ_RUNS: Final = 500
"""Runs of one delta that are looked at, some microseconds each: most may be known already."""
MAX_SEQUENCE: Final = 1 << 62
MAX_RECORD_SEQUENCE: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CheckedDelta:
    """A delta whose every part is well formed and whose signatures are right."""

    records: list[tuple[PeerRecord, SignedRecord]]
    logs: list[LogChunk]
    cluster_records: list[tuple[ClusterRecord, SignedRecord]]
    claims: list[Claim]


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
        cluster: str,
        membership: Membership,
        directory: Directory,
        log: OwnLog,
        cluster_records: ClusterRecords,
        verifier: Verifier,
        accepts_clock: Callable[[int, float], bool],
        rng: Random,
        accepts_peer: Callable[[PeerId], bool] = lambda peer_id: True,
        *,
        newest_accepted: Callable[[float], int] = lambda now: (1 << 64) - 1,
        future: FutureRecords | None = None,
    ) -> None:
        self.cluster = cluster
        self.membership = membership
        self.directory = directory
        self.log = log
        self.cluster_records = cluster_records
        self.verifier = verifier
        self.accepts_clock = accepts_clock
        self.accepts_peer = accepts_peer
        self._newest_accepted = newest_accepted
        self._future = FutureRecords() if future is None else future
        self.table = DigestTable(membership, directory, log)
        self.wrong_runs = WrongRuns()
        self._rng = rng

    def lacks(self, theirs: Digest) -> bool:
        """Whether somebody with this digest has operations to send here. Who wants none says that it has all."""
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
        """What somebody (`to`) lacks who has this digest, and these cluster records. `as_runs`: it named this
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
            [(place, int(known[place])) for place in places.tolist() if place not in unsent],
            limit_bytes,
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
            chunk_of(
                int(mine.of.members[run.place]), int(mine.of.incarnations[run.place]), run.signed
            )
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
        return [state for state in states if state is not None and not state.alive][
            : MAX_CLAIMS // 2
        ]

    # --- taking in ---------------------------------------------------------------------------

    def check(self, delta: Delta, now: float, sender: PeerId | None = None) -> CheckedDelta:
        """Check all of a delta; what is known already is left out. Raises `ProtocolError`."""
        if max(len(delta.records), len(delta.cluster_records)) > MAX_RECORDS:
            raise ProtocolError(f"a delta with over {MAX_RECORDS:,} records")
        if len(delta.logs) > self.membership.config.max_members:
            raise ProtocolError("a delta with more logs than a cluster may have members")
        chunks = delta.logs[:MAX_READ_RUNS]
        if sum(chunk.count for chunk in chunks) * LOCATION_BYTES > MAX_OPERATION_BYTES:
            raise ProtocolError("runs of more operations than go together")
        chunks = list(map(plain_chunk, chunks))
        for chunk in chunks:
            if not 1 <= chunk.first_sequence <= MAX_SEQUENCE:
                raise ProtocolError(f"operations numbered from {chunk.first_sequence}")
            if not check_run(chunk.operations):
                raise ProtocolError("a run of no operations")
        check_claims(delta.claims)
        rows, operations = check_runs(delta.runs, delta.operations, delta.signatures)
        of = self.table.known_set(delta.members_hash)
        # Members that were this peer's some sets ago: the next digest asks again.
        runs = (
            [] if of is None else read_runs(rows[:MAX_READ_RUNS], operations, delta.signatures, of)
        )
        records, cluster_records = self._check_signed(delta, now)
        logs = self._check_runs([*chunks, *runs], [record for record, _ in records], sender)
        return CheckedDelta(records, logs, cluster_records, list(delta.claims))

    def _check_runs(
        self, chunks: list[LogChunk], records: list[PeerRecord], sender: PeerId | None
    ) -> list[LogChunk]:
        """Those that bring news, that their owners signed and that can be carried out without holding up everything
        else. Raises `ProtocolError` for one that its owner did not sign, and takes none from that sender any more."""
        taken: list[LogChunk] = []
        if not self.table.follows_logs or self.wrong_runs.come_from(self._life_of(sender)):
            return taken
        coming = {member_of(record.peer_id): record for record in records}
        stands: dict[Member, tuple[PeerId, Position] | None] = {}
        work = 0
        for chunk in chunks:
            member = chunk.member
            if member not in stands:
                stands[member] = self._stands(member, coming.get(member))
            stand, count = stands[member], len(chunk.operations) // LOCATION_BYTES
            needed = work_microseconds(count)
            if stand is None or not chunk.signature or work + needed > TAKE_MICROSECONDS:
                continue
            owner, (incarnation, sequence) = stand
            end = chunk.first_sequence + count - 1
            if chunk.incarnation != incarnation or not chunk.first_sequence <= sequence + 1 <= end:
                continue
            if not is_signed(self.verifier, owner, incarnation, run_of(chunk)):
                self.wrong_runs.note(self._life_of(sender), owner)
                raise ProtocolError(
                    f"operations of the log of {format_peer_id(owner)} that it did not sign"
                )
            work += needed
            stands[member] = owner, (incarnation, end)
            taken.append(chunk)
        return taken

    def _stands(self, member: Member, coming: PeerRecord | None) -> tuple[PeerId, Position] | None:
        """Whose log that is, and where its view will stand when the record that comes along is known; None when no
        operations of it are wanted."""
        state = self.membership.resolve(member)
        position = self.directory.position(member)
        if member == self.membership.own.member:
            return None
        if coming is not None and coming.incarnation > position[0]:
            return coming.peer_id, (coming.incarnation, 0)
        if state is None or self.directory.diverged(member):
            return None
        return state.peer_id, position

    def _life_of(self, sender: PeerId | None) -> Life:
        state = None if sender is None else self.membership.get(sender)
        return sender or b"", 0 if state is None else state.incarnation

    def _check_signed(
        self, delta: Delta, now: float
    ) -> tuple[
        list[tuple[PeerRecord, SignedRecord]],
        list[tuple[ClusterRecord, SignedRecord]],
    ]:
        """The first that are news of the records of either kind. Raises `ProtocolError`."""
        records: list[tuple[PeerRecord, SignedRecord]] = []
        cluster_records: list[tuple[ClusterRecord, SignedRecord]] = []
        for signed in delta.records[:MAX_READ_RECORDS]:
            if len(records) == MAX_CHECKS:
                break
            if (pair := self.check_record(signed)) is not None:
                records.append(pair)
        cluster_bytes = 0
        for signed in delta.cluster_records[:MAX_READ_RECORDS]:
            full = len(records) + len(cluster_records) == MAX_CHECKS
            if full or cluster_bytes > MAX_CLUSTER_BYTES:
                break
            if (record := self._check_cluster_record(signed, now)) is not None:
                cluster_records.append((record, signed))
                cluster_bytes += len(signed.body)
        return records, cluster_records

    def _check_cluster_record(self, signed: SignedRecord, now: float) -> ClusterRecord | None:
        """A cluster record that is right; None for one that is no news, of a format that is not known, or from the
        future: what came with that one is taken all the same. Raises `ProtocolError`."""
        try:
            record = read_cluster_record(signed)
        except NewerFormat:
            return None
        if not self.cluster_records.wants(record, signed):
            return None
        # Before its signature costs anything: what is refused comes again and again.
        if record.clock > self._newest_accepted(now) and not self.accepts_clock(record.clock, now):
            self._future.note_record(record)
            return None
        record = open_cluster_record(signed, self.verifier)
        return record if self.accepts_clock(record.clock, now) else None

    def check_record(self, signed: SignedRecord) -> tuple[PeerRecord, SignedRecord] | None:
        """A peer record that is right and newer than the one known; None for a known one, and for one
        of a format that is not.

        Raises `ProtocolError`. What is known is recognised first: signatures are the expensive
        part.
        """
        try:
            record = read_peer_record(signed)
        except NewerFormat:
            return None
        if not self.accepts_peer(record.peer_id):
            return None  # a relay whose allow list is another may still know it
        state = self.membership.get(record.peer_id)
        if state is not None and state.signed is not None:
            known = state.record_incarnation, state.record_sequence
            if (record.incarnation, record.sequence) <= known:
                return None
        record = open_peer_record(signed, self.verifier)
        if record.cluster != self.cluster:
            raise ProtocolError(
                f"a peer of cluster {record.cluster!r}; this is cluster {self.cluster!r}"
            )
        if not 0 < record.incarnation < MAX_INCARNATION:
            raise ProtocolError(f"a peer record of incarnation {record.incarnation}")
        if not 0 <= record.sequence <= MAX_RECORD_SEQUENCE:
            raise ProtocolError(f"a peer record with sequence {record.sequence}")
        if not 0 <= record.head.sequence <= MAX_SEQUENCE:
            raise ProtocolError(f"a log head with sequence {record.head.sequence}")
        return record, signed

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
        self,
        record: PeerRecord,
        signed: SignedRecord,
        news: News,
        now: float,
        sender: PeerId | None,
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


def chunk_of(member: Member, incarnation: int, run: SignedRun) -> LogChunk:
    """A run as it travels."""
    return LogChunk(
        member,
        incarnation,
        run.first_sequence,
        pack_operations(run.operations),
        signature=run.signature,
        count=len(run.operations) // LOCATION_BYTES,
    )


def plain_chunk(chunk: LogChunk) -> LogChunk:
    """What travelled, with its operations as they were before `chunk_of`. Raises `ProtocolError`."""
    if not chunk.count:
        return chunk
    if chunk.count > MAX_SIGNED_OPERATIONS:
        raise ProtocolError(f"a run of {chunk.count:,} operations")
    operations, end = unpack_operations(chunk.operations, 0, chunk.count)
    if end != len(chunk.operations):
        raise ProtocolError("a run of operations that is longer than it says")
    return replace(chunk, operations=operations, count=0)


def run_of(chunk: LogChunk) -> SignedRun:
    """What travelled."""
    return SignedRun(chunk.first_sequence, chunk.operations, chunk.signature)


def work_microseconds(operations: int) -> int:
    """About how long it takes to check and carry out a run: few operations one by one, many side by side."""
    return CHECK_MICROSECONDS + min(
        OPERATION_MICROSECONDS * operations, RUN_MICROSECONDS + operations
    )


def check_claims(claims: list[Claim]) -> None:
    """Raise `ProtocolError` for too many claims or for one that makes no sense."""
    if len(claims) > MAX_CLAIMS:
        raise ProtocolError(f"a message with {len(claims):,} claims; at most {MAX_CLAIMS:,}")
    for claim in claims:
        check_claim(claim)
