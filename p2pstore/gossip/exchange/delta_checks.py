"""Checking deltas: whole, before anything of them is taken in. Pure.

Nothing here may hold the loop for more than some 5 ms. A signature takes 0.1 ms to check, and holds the interpreter
while it does, in whatever thread; an operation takes up to 9 us to carry out. So of one delta a bounded number of
either is taken; the rest is as if it had not come, and the next digests ask for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.digests import DigestTable, check_runs, read_runs
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.gossip_messages import MAX_CLAIMS, MAX_RECORDS, Claim, Delta, LogChunk
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import (
    MAX_OPERATION_BYTES,
    MAX_SIGNED_OPERATIONS,
    Position,
    SignedRun,
    check_run,
    is_signed,
    pack_operations,
    unpack_operations,
)
from p2pstore.gossip.members.member_table import MAX_INCARNATION, check_claim
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    Member,
    NewerFormat,
    PeerId,
    PeerRecord,
    SignedRecord,
    format_peer_id,
    keys_of_floor,
    member_of,
    open_cluster_record,
    open_peer_record,
    read_cluster_record,
    read_peer_record,
)
from p2pstore.objects import put_newest
from p2pstore.wire import Verifier

MAX_CHECKS: Final = 40
"""Signatures of one delta that are checked: 4 ms."""

MAX_CLUSTER_BYTES: Final = 24 * 1024
"""Of cluster records in one delta that are taken in, and sent: 1,300 keys of floors, each 2 to 3 us of work."""

MAX_READ_RECORDS: Final = 160
"""Peer records, and cluster records, of one delta that are looked at: 2 ms."""

TAKE_MICROSECONDS: Final = 6_000
"""... and up to which it takes them of one delta."""

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


class DeltaChecks:
    """Checks what others send, against what this peer knows. `accepts_clock(clock, now)` raises this peer's clock."""

    def __init__(
        self,
        cluster: str,
        table: DigestTable,
        directory: Directory,
        cluster_records: ClusterRecords,
        verifier: Verifier,
        accepts_clock: Callable[[int, float], bool],
        accepts_peer: Callable[[PeerId], bool],
        newest_accepted: Callable[[float], int],
        future: FutureRecords,
    ) -> None:
        self.verifier = verifier
        self.accepts_peer = accepts_peer
        self.wrong_runs = WrongRuns()
        self._cluster = cluster
        self._table = table
        self._membership = table.membership
        self._directory = directory
        self._cluster_records = cluster_records
        self._accepts_clock = accepts_clock
        self._newest_accepted = newest_accepted
        self._future = future

    def check(self, delta: Delta, now: float, sender: PeerId | None = None) -> CheckedDelta:
        """Check all of a delta; known parts are left out. Raises `ProtocolError`."""
        if max(len(delta.records), len(delta.cluster_records)) > MAX_RECORDS:
            raise ProtocolError(f"a delta with over {MAX_RECORDS:,} records")
        if len(delta.logs) > self._membership.config.max_members:
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
        of = self._table.known_set(delta.members_hash)
        # Members that were this peer's some sets ago: the next digest asks again.
        runs = [] if of is None else read_runs(rows[:MAX_READ_RUNS], operations, delta.signatures, of)
        records, cluster_records = self._check_signed(delta, now)
        logs = self._check_runs([*chunks, *runs], [record for record, _ in records], sender)
        return CheckedDelta(records, logs, cluster_records, list(delta.claims))

    def _check_runs(
        self, chunks: list[LogChunk], records: list[PeerRecord], sender: PeerId | None
    ) -> list[LogChunk]:
        """Those that bring news, that their owners signed and that can be carried out without holding up everything
        else. Raises `ProtocolError` for one that its owner did not sign, and takes none from that sender any more."""
        taken: list[LogChunk] = []
        if not self._table.follows_logs or self.wrong_runs.come_from(self._life_of(sender)):
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
        """The owner of a log, and the position of its view after the record that comes along; None when it is not
        wanted."""
        state = self._membership.resolve(member)
        position = self._directory.position(member)
        if member == self._membership.own.member:
            return None
        if coming is not None and coming.incarnation > position[0]:
            return coming.peer_id, (coming.incarnation, 0)
        if state is None or self._directory.diverged(member):
            return None
        return state.peer_id, position

    def _life_of(self, sender: PeerId | None) -> Life:
        state = None if sender is None else self._membership.get(sender)
        return sender or b"", 0 if state is None else state.incarnation

    def _check_signed(
        self, delta: Delta, now: float
    ) -> tuple[list[tuple[PeerRecord, SignedRecord]], list[tuple[ClusterRecord, SignedRecord]]]:
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
        future: the rest of its delta is taken all the same. Raises `ProtocolError`."""
        try:
            record = read_cluster_record(signed)
        except NewerFormat:
            return None
        if not self._cluster_records.wants(record, signed):
            return None
        # Before its signature costs anything: a refused record comes again and again.
        if record.clock > self._newest_accepted(now) and not self._accepts_clock(record.clock, now):
            self._future.note_record(record)
            return None
        record = open_cluster_record(signed, self.verifier)
        return record if self._accepts_clock(record.clock, now) else None

    def check_record(self, signed: SignedRecord) -> tuple[PeerRecord, SignedRecord] | None:
        """A right peer record that is newer than the known one, recognised before its signature costs anything; None
        for a known one, or of an unknown format. Raises `ProtocolError`."""
        try:
            record = read_peer_record(signed)
        except NewerFormat:
            return None
        if not self.accepts_peer(record.peer_id):
            return None  # a relay whose allow list is another may still know it
        state = self._membership.get(record.peer_id)
        if state is not None and state.signed is not None:
            known = state.record_incarnation, state.record_sequence
            if (record.incarnation, record.sequence) <= known:
                return None
        record = open_peer_record(signed, self.verifier)
        if record.cluster != self._cluster:
            raise ProtocolError(
                f"a peer of cluster {record.cluster!r}; this is cluster {self._cluster!r}"
            )
        if not 0 < record.incarnation < MAX_INCARNATION:
            raise ProtocolError(f"a peer record of incarnation {record.incarnation}")
        if not 0 <= record.sequence <= MAX_RECORD_SEQUENCE:
            raise ProtocolError(f"a peer record with sequence {record.sequence}")
        if not 0 <= record.head.sequence <= MAX_SEQUENCE:
            raise ProtocolError(f"a log head with sequence {record.head.sequence}")
        return record, signed


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
    """A received chunk, with its operations as they were before `chunk_of`. Raises `ProtocolError`."""
    if not chunk.count:
        return chunk
    if chunk.count > MAX_SIGNED_OPERATIONS:
        raise ProtocolError(f"a run of {chunk.count:,} operations")
    operations, end = unpack_operations(chunk.operations, 0, chunk.count)
    if end != len(chunk.operations):
        raise ProtocolError("a run of operations that is longer than it says")
    return replace(chunk, operations=operations, count=0)


def run_of(chunk: LogChunk) -> SignedRun:
    """The signed run of a received chunk."""
    return SignedRun(chunk.first_sequence, chunk.operations, chunk.signature)


def work_microseconds(operations: int) -> int:
    """About how long it takes to check and carry out a run: few operations one by one, many side by side."""
    return CHECK_MICROSECONDS + min(OPERATION_MICROSECONDS * operations, RUN_MICROSECONDS + operations)


def check_claims(claims: list[Claim]) -> None:
    """Raise `ProtocolError` for too many claims or for one that makes no sense."""
    if len(claims) > MAX_CLAIMS:
        raise ProtocolError(f"a message with {len(claims):,} claims; at most {MAX_CLAIMS:,}")
    for claim in claims:
        check_claim(claim)


MAX_FLOORS: Final = 4096
"""Names of floors that are remembered. Beyond it every key counts as one of them."""


class FutureRecords:
    """Only the highest stamps are kept. They mean nothing any more when the clock has reached them."""

    def __init__(self) -> None:
        self.newest = 0
        """The highest stamp of all, of locations and of cluster records."""
        self._floors: dict[tuple[int, bytes], int] = {}
        self._beyond = 0
        """The highest stamp of floors whose names had no room."""

    def note(self, clock: int) -> None:
        """Something of this stamp was left out."""
        self.newest = max(self.newest, clock)

    def note_record(self, record: ClusterRecord) -> None:
        """A cluster record was left out."""
        self.note(record.clock)
        if record.kind != ClusterRecordKind.FLOOR:
            return
        scope = SCOPE_NAMESPACE if record.scope == SCOPE_NAMESPACE else SCOPE_KEY
        for digest in _digests(record):
            name = scope, digest
            if name in self._floors or len(self._floors) < MAX_FLOORS:
                self._floors[name] = max(record.clock, self._floors.get(name, 0))
            else:
                self._beyond = max(self._beyond, record.clock)

    def has_floor_of(self, digest: bytes, namespace: bytes, above: int) -> bool:
        """Whether a floor above this stamp was left out that forbids what is written of the key now."""
        names = ((SCOPE_KEY, digest), (SCOPE_NAMESPACE, namespace))
        return max(self._beyond, *(self._floors.get(name, 0) for name in names)) > above


def _digests(record: ClusterRecord) -> tuple[bytes, ...]:
    try:
        return keys_of_floor(record)
    except ProtocolError:  # its signature was not checked: it may say anything
        return ()


MAX_SENDERS: Final = 1_024

Life = tuple[PeerId, int]
"""A peer, and its incarnation as it is known."""


class WrongRuns:
    """Peers that passed on a run of a log that its owner did not sign. Nothing is taken from them until they
    restart."""

    def __init__(self) -> None:
        self._senders: OrderedDict[PeerId, int] = OrderedDict()
        self._news: dict[PeerId, PeerId] = {}

    def come_from(self, sender: Life) -> bool:
        """Whether nothing is taken from this sender."""
        peer_id, incarnation = sender
        return incarnation <= self._senders.get(peer_id, -1)

    def note(self, sender: Life, owner: PeerId) -> None:
        """The sender passed on what the owner did not sign."""
        peer_id, incarnation = sender
        put_newest(self._senders, peer_id, incarnation, MAX_SENDERS)
        if len(self._news) < MAX_SENDERS:
            self._news[peer_id] = owner

    def take_news(self) -> dict[PeerId, PeerId]:
        """Senders of wrong operations since the last call, each with the owner of the log."""
        news, self._news = self._news, {}
        return news
