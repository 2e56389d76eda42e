"""What two peers tell each other so that both know the same: digests, and deltas made from them.
Pure.

Scuttlebutt (van Renesse et al. 2008) in three legs: A sends its digest, B answers with what A lacks
and its own digest, A sends what B lacks. A delta is checked whole before any of it is taken in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.cluster_records import ClusterRecords
from p2pstore.gossip.directory import Directory, Outcome
from p2pstore.gossip.log import OwnLog, check_run
from p2pstore.gossip.membership import MAX_INCARNATION, Membership, MemberState, check_claim
from p2pstore.gossip.messages import (
    CLUSTER_BUCKETS,
    MAX_CLAIMS,
    MAX_RECORDS,
    Claim,
    Delta,
    DigestEntry,
    LogChunk,
    pack_digest,
    unpack_digest,
)
from p2pstore.gossip.records import (
    ClusterRecord,
    Member,
    NewerFormat,
    PeerId,
    PeerRecord,
    SignedRecord,
    Verifier,
    open_cluster_record,
    open_peer_record,
    read_cluster_record,
    read_peer_record,
)

SEND_RECORDS: Final = 64
"""At most this many of each are sent in one delta: each costs its receiver a signature check."""
MAX_SEQUENCE: Final = 1 << 62
MAX_RECORD_SEQUENCE: Final = (1 << 32) - 1
_BUCKETS: Final = struct.Struct(f"<{CLUSTER_BUCKETS}Q")

Digest = dict[Member, DigestEntry]


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
    ) -> None:
        self.cluster = cluster
        self.membership = membership
        self.directory = directory
        self.log = log
        self.cluster_records = cluster_records
        self.verifier = verifier
        self.accepts_clock = accepts_clock
        self.accepts_peer = accepts_peer
        self._rng = rng

    # --- digests -----------------------------------------------------------------------------

    def digest(self) -> bytes:
        """What this peer knows of each live member."""
        return pack_digest(self._entries())

    def _entries(self) -> Iterable[DigestEntry]:
        for state in self.membership.live():
            record = state.record
            assert record is not None
            sequence = self.position(state)
            if self.directory.diverged(state.member):
                # Fed wrong operations: take no more from relays, wait for the owner's snapshot.
                sequence = max(sequence, record.head.sequence)
            yield DigestEntry(state.member, record.incarnation, record.sequence, sequence)

    def position(self, state: MemberState) -> int:
        """How far this peer is in the member's current log."""
        assert state.record is not None
        if state is self.membership.own:
            return self.log.sequence
        incarnation, sequence = self.directory.position(state.member)
        return sequence if incarnation == state.record.incarnation else 0

    def operations_since(self, member: Member, sequence: int, limit_bytes: int) -> bytes | None:
        """Operations of any member's log after `sequence`, this peer's own included."""
        if member == self.membership.own.member:
            return self.log.since(sequence, limit_bytes)
        return self.directory.since(member, sequence, limit_bytes)

    # --- making deltas -----------------------------------------------------------------------

    def delta_for(self, theirs: Digest, limit_bytes: int, buckets: list[int] | None) -> Delta:
        """What somebody with this digest (and these bucket hashes, when given) lacks."""
        records: list[SignedRecord] = []
        behind: list[tuple[int, int, MemberState]] = []
        for state in self.membership.live():
            record, signed = state.record, state.signed
            assert record is not None
            assert signed is not None
            entry = theirs.get(state.member)
            theirs_at = (entry.incarnation, entry.record_sequence) if entry else (0, 0)
            if theirs_at < (record.incarnation, record.sequence):
                if len(records) < SEND_RECORDS and limit_bytes > len(signed.body):
                    records.append(signed)
                    limit_bytes -= len(signed.body) + len(signed.signature)
                elif theirs_at[0] < record.incarnation:
                    continue
            # Who does not name the member may hold it dead: its log waits for the next exchange.
            if entry is None and state is not self.membership.own:
                continue
            if theirs_at[0] <= record.incarnation:
                known = (
                    entry.log_sequence if entry and entry.incarnation == record.incarnation else 0
                )
                missing = self.position(state) - known
                if missing > 0:
                    behind.append((missing, known, state))
        behind.sort(key=lambda item: item[0], reverse=True)
        logs = []
        for _, known, state in behind:
            operations = self.operations_since(state.member, known, limit_bytes)
            if operations and state.record is not None:
                limit_bytes -= len(operations)
                logs.append(LogChunk(state.member, state.record.incarnation, known + 1, operations))
        cluster_records = self._differing_records(buckets, limit_bytes) if buckets else []
        named = (self.membership.resolve(member) for member in theirs)
        about = [state.peer_id for state in named if state is not None and not state.alive]
        return Delta(
            records, logs, cluster_records, self.membership.claims(about[: MAX_CLAIMS // 2])
        )

    def _differing_records(self, theirs: list[int], limit_bytes: int) -> list[SignedRecord]:
        mine = self.cluster_records.bucket_hashes
        differing = [number for number in range(CLUSTER_BUCKETS) if mine[number] != theirs[number]]
        self._rng.shuffle(differing)
        candidates: list[SignedRecord] = []
        for number in differing:
            candidates += self.cluster_records.bucket(number)
            if len(candidates) >= 16 * SEND_RECORDS:
                break
        if len(candidates) > SEND_RECORDS:
            # Which of them the other side lacks is not known: a random choice gets to all of them.
            candidates = self._rng.sample(candidates, SEND_RECORDS)
        chosen = []
        for signed in candidates:
            limit_bytes -= len(signed.body) + len(signed.signature)
            if limit_bytes < 0:
                break
            chosen.append(signed)
        return chosen

    # --- taking in ---------------------------------------------------------------------------

    def check(self, delta: Delta, now: float) -> CheckedDelta:
        """Check all of a delta; what is known already is left out. Raises `ProtocolError`."""
        if max(len(delta.records), len(delta.cluster_records)) > MAX_RECORDS:
            raise ProtocolError(f"a delta with over {MAX_RECORDS:,} records")
        if len(delta.logs) > self.membership.config.max_members:
            raise ProtocolError("a delta with more logs than a cluster may have members")
        for chunk in delta.logs:
            if not 1 <= chunk.first_sequence <= MAX_SEQUENCE:
                raise ProtocolError(f"operations numbered from {chunk.first_sequence}")
            check_run(chunk.operations)
        check_claims(delta.claims)
        records = [pair for signed in delta.records if (pair := self.check_record(signed))]
        cluster_records = []
        for signed in delta.cluster_records:
            try:
                wanted = self.cluster_records.wants(read_cluster_record(signed))
            except NewerFormat:
                continue
            if wanted:
                record = open_cluster_record(signed, self.verifier)
                if not self.accepts_clock(record.clock, now):
                    raise ProtocolError("a cluster record from the future: check the hosts' clocks")
                cluster_records.append((record, signed))
        return CheckedDelta(records, list(delta.logs), cluster_records, list(delta.claims))

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
        if state is not None and state.record is not None:
            known = state.record
            if (record.incarnation, record.sequence) <= (known.incarnation, known.sequence):
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

    def apply(self, delta: CheckedDelta, now: float) -> News:
        """Take in a checked delta: records, then claims, then operations, then cluster records."""
        news = News()
        for record, signed in delta.records:
            self._apply_record(record, signed, news, now)
        self.membership.observe_claims(delta.claims, now)
        for chunk in delta.logs:
            if chunk.member == self.membership.own.member:
                continue
            _, before = self.directory.position(chunk.member)
            applied = self.directory.apply(
                chunk.member, chunk.incarnation, chunk.first_sequence, chunk.operations
            )
            if applied.outcome is Outcome.APPLIED:
                news.logs.setdefault(chunk.member, before + 1)
                news.anything = True
        for cluster_record, signed in delta.cluster_records:
            if self.cluster_records.offer(cluster_record, signed):
                news.cluster_records.append((cluster_record, signed))
                news.anything = True
        return news

    def _apply_record(
        self, record: PeerRecord, signed: SignedRecord, news: News, now: float
    ) -> None:
        if record.peer_id == self.membership.me:
            news.own.append(record)
            return
        known = self.membership.get(record.peer_id)
        before = known.record if known else None
        if not self.membership.observe_record(record, signed, now):
            return
        state = self.membership.get(record.peer_id)
        assert state is not None
        self.directory.observe_head(state.member, record.incarnation, record.head)
        if not state.alive:
            self.directory.hide(state.member)
        news.anything = True
        if (
            before is None
            or before.incarnation != record.incarnation
            or before.leaving != record.leaving
        ):
            news.records.append(record.peer_id)


def check_claims(claims: list[Claim]) -> None:
    """Raise `ProtocolError` for too many claims or for one that makes no sense."""
    if len(claims) > MAX_CLAIMS:
        raise ProtocolError(f"a message with {len(claims):,} claims; at most {MAX_CLAIMS:,}")
    for claim in claims:
        check_claim(claim)


def read_digest(packed: bytes) -> Digest:
    """A digest by member. Raises `ProtocolError` when it is malformed."""
    return {entry.member: entry for entry in unpack_digest(packed)}


def pack_buckets(hashes: list[int]) -> bytes:
    """64 bucket hashes as they travel."""
    return _BUCKETS.pack(*hashes)


def read_buckets(packed: bytes) -> list[int] | None:
    """Bucket hashes; None when there are none. Raises `ProtocolError` when they are not 64."""
    if not packed:
        return None
    if len(packed) != _BUCKETS.size:
        raise ProtocolError(f"cluster record buckets of {len(packed)} bytes")
    return list(_BUCKETS.unpack(packed))
