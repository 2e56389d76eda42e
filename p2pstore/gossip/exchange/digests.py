"""Digests: a peer's knowledge of each member, as columns, and its form on the wire. Pure.

Written in full a digest names each member: 28 bytes. Two peers that know the same members at the same
incarnations, which a hash tells, can leave the names out: 9 bytes a member, in the members' order; or 4 where
no member follows logs (`partition_homes`). And runs of operations name their member by its place in that order, in 9
bytes where a `LogChunk` takes some 27: a loaded peer is sent a few operations of each member thirty times a second.

Columns are numpy's, so that a digest of a thousand members is compared in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import LogChunk
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.log import (
    MAX_OPERATION_BYTES,
    SIGNATURE_BYTES,
    OwnLog,
    SignedRun,
    pack_operations,
    unpack_operations,
)
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import LOCATION_BYTES, Member
from p2pstore.objects import put_newest

Column = NDArray[np.uint64]

MAX_DIGEST_ENTRIES: Final = 16_384
MAX_PACKED_SEQUENCE: Final = (1 << 40) - 1
"""Higher ones travel in full only. At 10,000 operations a second a log gets there in 3.5 years."""

_ENTRY: Final = np.dtype(
    [("member", "<u8"), ("incarnation", "<u8"), ("record_sequence", "<u4"), ("log_sequence", "<u8")]
)
_POSITION: Final = np.dtype([("record_sequence", "<u4"), ("log_low", "<u4"), ("log_high", "u1")])
_RUN: Final = np.dtype([("place", "<u2"), ("count", "<u2"), ("first_low", "<u4"), ("first_high", "u1")])
DIGEST_ENTRY_BYTES: Final = _ENTRY.itemsize
POSITION_BYTES: Final = _POSITION.itemsize
RECORD_POSITION_BYTES: Final = 4
RUN_BYTES: Final = _RUN.itemsize
assert (DIGEST_ENTRY_BYTES, POSITION_BYTES, RUN_BYTES) == (28, 9, 9)

_LOW: Final = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT: Final = np.uint64(32)


class MemberSet:
    """Which members a peer knows, and at which incarnations: columns in ascending order of member."""

    def __init__(self, members: Column, incarnations: Column) -> None:
        self.members = members
        self.incarnations = incarnations
        packed = np.column_stack((members, incarnations)).astype("<u8").tobytes()
        self.hash: int = xxhash.xxh3_64_intdigest(packed) or 1
        """xxh3-64 over `u64 member | u64 incarnation` of each in order; never 0, which stands for none."""

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Digest:
    """The knowledge of a peer, a row a member of `of`: how far it is in that member's peer records and log."""

    of: MemberSet
    record_sequences: Column
    log_sequences: Column

    def along(self, members: Column) -> tuple[NDArray[np.bool_], Column, Column, Column]:
        """(named, incarnations, record and log sequences) of other members, in their order; zeros for unnamed ones."""
        if self._names_just(members):
            named = np.ones(len(members), np.bool_)
            return named, self.of.incarnations, self.record_sequences, self.log_sequences
        if not len(self.of):
            zeros = np.zeros(len(members), np.uint64)
            return zeros.astype(np.bool_), zeros, zeros, zeros
        places = np.searchsorted(self.of.members, members)
        places[places == len(self.of)] = 0
        named = self.of.members[places] == members
        return (
            named,
            np.where(named, self.of.incarnations[places], 0),
            np.where(named, self.record_sequences[places], 0),
            np.where(named, self.log_sequences[places], 0),
        )

    def beside(self, members: Column) -> list[int]:
        """The members named here and not among `members`, which ascend."""
        mine = self.of.members
        if not len(mine) or self._names_just(members):
            return []
        if len(members):
            places = np.searchsorted(members, mine)
            places[places == len(members)] = 0
            mine = mine[members[places] != mine]
        others: list[int] = mine.tolist()
        return others

    def _names_just(self, members: Column) -> bool:
        mine = self.of.members
        return members is mine or (len(members) == len(mine) and bool((members == mine).all()))


# --- in full ---------------------------------------------------------------------------------


def pack_digest(digest: Digest) -> bytes:
    """28 bytes a member."""
    rows = np.empty(len(digest.of), _ENTRY)
    rows["member"] = digest.of.members
    rows["incarnation"] = digest.of.incarnations
    rows["record_sequence"] = digest.record_sequences
    rows["log_sequence"] = digest.log_sequences
    return rows.tobytes()


def unpack_digest(packed: bytes) -> Digest:
    """Raises `ProtocolError` when the bytes are not whole entries, or too many."""
    rows = _rows(packed, _ENTRY, "a digest")
    names = rows["member"]
    if len(rows) > 1 and not (names[1:] > names[:-1]).all():
        _, last = np.unique(names[::-1], return_index=True)
        rows = rows[::-1][last]  # ascending; of equal members the last one counts
    members, incarnations, records, logs = (
        rows[name].astype(np.uint64)
        for name in ("member", "incarnation", "record_sequence", "log_sequence")
    )
    return Digest(MemberSet(members, incarnations), records, logs)


# --- among those who know the same members ---------------------------------------------------


def pack_positions(digest: Digest) -> bytes | None:
    """9 bytes a member; None when a log is too long for them."""
    logs = digest.log_sequences
    if len(logs) and int(logs.max()) > MAX_PACKED_SEQUENCE:
        return None
    rows = np.empty(len(logs), _POSITION)
    rows["record_sequence"] = digest.record_sequences
    rows["log_low"] = logs & _LOW
    rows["log_high"] = logs >> _HIGH_SHIFT
    return rows.tobytes()


def pack_record_positions(digest: Digest) -> bytes:
    """4 bytes a member: of a member that wants no logs, among others that want none."""
    return digest.record_sequences.astype("<u4").tobytes()


def unpack_positions(packed: bytes, of: MemberSet) -> Digest:
    """The digest of a peer with these members, with logs or without. Raises `ProtocolError` for another size."""
    if len(of) and len(packed) == RECORD_POSITION_BYTES * len(of):
        records = np.frombuffer(packed, "<u4").astype(np.uint64)
        return Digest(of, records, np.full(len(of), MAX_PACKED_SEQUENCE, np.uint64))
    rows = _rows(packed, _POSITION, "the positions of members")
    if len(rows) != len(of):
        raise ProtocolError(f"the positions of {len(rows):,} members, who are {len(of):,}")
    logs = rows["log_low"].astype(np.uint64) | rows["log_high"].astype(np.uint64) << _HIGH_SHIFT
    return Digest(of, rows["record_sequence"].astype(np.uint64), logs)


@dataclass(frozen=True, slots=True)
class Run:
    """A signed run of the log of the member at a place in a `MemberSet`."""

    place: int
    signed: SignedRun


def pack_runs(runs: list[Run]) -> tuple[bytes, bytes, bytes]:
    """(9 bytes a run, their packed operations one after the other, 64 bytes of signature a run)."""
    rows = np.empty(len(runs), _RUN)
    rows["place"] = [run.place for run in runs]
    rows["count"] = [len(run.signed.operations) // LOCATION_BYTES for run in runs]
    first = np.array([run.signed.first_sequence for run in runs], np.uint64)
    rows["first_low"] = first & _LOW
    rows["first_high"] = first >> _HIGH_SHIFT
    return (
        rows.tobytes(),
        b"".join(pack_operations(run.signed.operations) for run in runs),
        b"".join(run.signed.signature for run in runs),
    )


def check_runs(packed: bytes, operations: bytes, signatures: bytes) -> tuple[NDArray[Any], bytes]:
    """The runs as rows, and their unpacked operations. Raises `ProtocolError` when they make no sense."""
    rows = _rows(packed, _RUN, "a list of runs")
    if len(signatures) not in (0, SIGNATURE_BYTES * len(rows)):  # older peers send none
        raise ProtocolError(f"{len(signatures):,} bytes of signatures for {len(rows):,} runs")
    counts = rows["count"]
    if int(counts.sum(dtype=np.uint64)) * LOCATION_BYTES > MAX_OPERATION_BYTES:
        raise ProtocolError("runs of more operations than go together")
    if len(rows) and not int(counts.min()):
        raise ProtocolError("a run of no operations")
    if np.any((rows["first_low"] == 0) & (rows["first_high"] == 0)):
        raise ProtocolError("a run that begins with operation 0; logs begin with 1")
    plain, end = [], 0
    for count in counts.tolist():
        some, end = unpack_operations(operations, end, count)
        plain.append(some)
    if end != len(operations):
        raise ProtocolError(
            f"{len(operations):,} bytes of operations for runs of another length altogether"
        )
    return rows, b"".join(plain)


def read_runs(
    rows: NDArray[Any], operations: bytes, signatures: bytes, of: MemberSet
) -> Iterator[LogChunk]:
    """The runs by member. Raises `ProtocolError` when there are places beyond the last member."""
    places = rows["place"]
    if len(places) and int(places.max()) >= len(of):
        raise ProtocolError(f"operations of member {int(places.max())} of {len(of):,}")
    first = rows["first_low"].astype(np.uint64) | rows["first_high"].astype(np.uint64) << _HIGH_SHIFT
    ends = np.cumsum(rows["count"], dtype=np.int64) * LOCATION_BYTES
    begin = 0
    for at, (member, incarnation, sequence, end) in enumerate(
        zip(
            of.members[places].tolist(),
            of.incarnations[places].tolist(),
            first.tolist(),
            ends.tolist(),
            strict=True,
        )
    ):
        signature = signatures[at * SIGNATURE_BYTES : (at + 1) * SIGNATURE_BYTES]
        yield LogChunk(member, incarnation, sequence, operations[begin:end], signature)
        begin = end


def _rows(packed: bytes, row: np.dtype[Any], what: str) -> NDArray[Any]:
    count, rest = divmod(len(packed), row.itemsize)
    if rest:
        raise ProtocolError(f"{what} of {len(packed)} bytes, not a multiple of {row.itemsize}")
    if count > MAX_DIGEST_ENTRIES:
        raise ProtocolError(f"{what} with {count:,} entries; at most {MAX_DIGEST_ENTRIES:,}")
    return np.frombuffer(packed, row)


REMEMBERED_SETS: Final = 8
"""Answers that refer to one of these sets of members are understood."""


class DigestTable:
    """See the module's docstring."""

    def __init__(self, membership: Membership, directory: Directory, log: OwnLog) -> None:
        self.follows_logs = True
        """Whether operations of others' logs are wanted."""
        self.logs_are_read = True
        """Whether any other member wants them."""
        self.states: list[MemberState] = []
        """The members, a row each. Call `current` first."""
        self.membership = membership
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
        """This peer's digest now. Its columns change with the next call of any method: keep none."""
        if self._seen_version != self.membership.version:
            self._rebuild()
        own = self.membership.own
        if self._own_place >= 0 and own.signed is not None:
            if int(self._of.incarnations[self._own_place]) != own.record_incarnation:
                self._rebuild()
            self._records[self._own_place] = own.record_sequence
            self._logs[self._own_place] = self._log.signed
        return Digest(self._of, self._records, self._logs)

    def told(self) -> Digest:
        """The digest for other peers: of logs that this peer does not follow, it wants nothing."""
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
        if place is None or self._seen_version != self.membership.version:
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
        if state is self.membership.own:
            return self._log.signed
        return self._directory.wanted_after(state.member, state.record_incarnation, state.log_sequence)

    def _rebuild(self) -> None:
        """4 ms with 10,000 members."""
        self._seen_version = self.membership.version
        live = self.membership.live()
        members = np.array([state.member for state in live], np.uint64)
        order = np.argsort(members)
        self.states = [live[place] for place in order.tolist()]
        self._places = {state.member: place for place, state in enumerate(self.states)}
        self._own_place = self._places.get(self.membership.own.member, -1)
        self._of = MemberSet(
            members[order], np.array([state.record_incarnation for state in self.states], np.uint64)
        )
        self._records = np.array([state.record_sequence for state in self.states], np.uint64)
        self._logs = np.array([self.position(state) for state in self.states], np.uint64)
        self._rows_made += len(live)
        put_newest(self._sets, self._of.hash, self._of, REMEMBERED_SETS)
