"""A peer's log of what it holds: operations, numbered from 1, and the set that they add up to.
Pure.

Every operation is one 42-byte location record; `removed` marks a withdrawal. A peer is the only
writer of its own log, and every reader applies the same operations in the same order, so a reader's
state is told by one number. A ring keeps the recent operations; a reader that is behind the ring
takes the whole set instead. So nothing of a removed key has to be remembered, and no removed key
comes back.

Runs of operations that their owner signed: only those count of another peer's log.

A relay passes runs on whole, with their signatures, so no member can speak for the log of another. A signature costs
64 bytes and a check of 0.07 ms at every reader. The owner signs what it wrote since its last signature when it is
about to tell of it: a lone operation at once, and many of them together.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord, LogHead, PeerId
from p2pstore.location_table import RECORD, WHOLE
from p2pstore.objects import DIGEST_BYTES, MIB, Version
from p2pstore.runtime.stepping import Steps
from p2pstore.wire import Signer, Verifier

DEFAULT_RING_LIMIT: Final = 65_536
Position = tuple[int, int]
"""(incarnation, sequence): a place in a member's log."""

MAX_STAMP: Final = (1 << 64) - 1
MAX_LATE: Final = 1_024
"""Operations that the index takes in as one: 0.3 us each, alone 5 us."""
MAX_OWN_RECORDS: Final = 1 << 22
"""As many as a segment has slots."""
REMOVED: Final = 0x80
"""In the flags of a withdrawal, which are the record's last byte."""
_FEW: Final = 64
_STAMPED: Final = struct.Struct("<QH")
"""Clock and writer of a record's version."""
_WITHDRAWAL: Final = struct.Struct("<16sQHQ7xB")
"""Digest, version, `REMOVED`."""
_CLOCK_ONLY: Final = struct.Struct(f"<{DIGEST_BYTES}xQ{LOCATION_BYTES - DIGEST_BYTES - 8}x")


def check_run(packed: bytes | bytearray | memoryview) -> int:
    """How many records a packed run has. Raises `ProtocolError` when they are not whole."""
    count, rest = divmod(len(packed), LOCATION_BYTES)
    if rest:
        raise ProtocolError(
            f"a run of location records has {len(packed)} bytes, not a multiple of {LOCATION_BYTES}"
        )
    return count


def newest_clock(packed: bytes | bytearray | memoryview, limit: int) -> int:
    """The highest clock of the versions in a packed run that is at most `limit`; 0 when there is none."""
    if len(packed) <= _FEW * LOCATION_BYTES:
        return max((clock for (clock,) in _CLOCK_ONLY.iter_unpack(packed) if clock <= limit), default=0)
    clocks = np.frombuffer(packed, RECORD)["clock"]
    return int(clocks[clocks <= limit].max(initial=0))


class OperationRing:
    """The most recent operations of one log, packed and contiguous, with their owner's signatures of runs; the newest
    are not signed yet. Holds the last `limit` operations, or a quarter as many runs, and at most a quarter more and a
    run: cutting now and then makes an append O(1) on average, and a run is passed on whole or not at all."""

    def __init__(self, limit: int, last: int = 0) -> None:
        self.limit = limit
        self.last = last
        """Sequence number of the newest operation."""
        self._packed = bytearray()
        self._ends: list[int] = []
        """Sequence numbers of the last operations of the runs."""
        self._signatures = bytearray()

    @property
    def first(self) -> int:
        """Sequence number of the oldest operation that is still here (`last + 1` when none is)."""
        return self.last + 1 - len(self._packed) // LOCATION_BYTES

    @property
    def signed(self) -> int:
        """Sequence number of the last operation that is signed, or went."""
        return self._ends[-1] if self._ends else self.first - 1

    def after(self, sequence: int) -> bytes | None:
        """The operations after `sequence`, signed or not; None where some of them are not here."""
        if not self.first - 1 <= sequence <= self.last:
            return None
        return bytes(self._packed[(sequence + 1 - self.first) * LOCATION_BYTES :])

    def extend(self, packed: bytes) -> None:
        """Append operations that follow `last` and are not signed yet."""
        self._packed += packed
        self.last += len(packed) // LOCATION_BYTES
        self._cut()

    def unsigned(self, limit: int) -> bytes:
        """The first operations that are not signed yet."""
        start = (self.signed + 1 - self.first) * LOCATION_BYTES
        return bytes(self._packed[start : start + limit * LOCATION_BYTES])

    def sign(self, count: int, signature: bytes) -> None:
        """The first `count` operations that were not signed are a run now."""
        assert len(signature) == SIGNATURE_BYTES
        self._ends.append(self.signed + count)
        self._signatures += signature
        self._cut()

    def _cut(self) -> None:
        if len(self._packed) > (self.limit + self.limit // 4) * LOCATION_BYTES:
            self.resize(self.limit)
        most = max(_FEW, self.limit // 4)
        if len(self._ends) > most + most // 4:
            self._drop_runs(len(self._ends) - most)

    def append(self, run: SignedRun) -> None:
        """A run that brings news. When it does not begin where the last one ended, those before it go."""
        if run.first_sequence != self.last + 1:
            self._drop_runs(len(self._ends))
            self._packed.clear()
            self.last = run.first_sequence - 1
        self._packed += run.operations
        self.last = run.last_sequence
        self.sign(len(run.operations) // LOCATION_BYTES, run.signature)

    def resize(self, limit: int) -> None:
        """Keep the last `limit` from now on, and what else is in a run with them."""
        self.limit = limit
        surplus = len(self._packed) // LOCATION_BYTES - limit
        if surplus <= 0:
            return
        last = self.first + surplus - 1
        all_runs = last >= self.signed
        self._drop_runs(bisect_right(self._ends, last))
        if all_runs:
            del self._packed[: (last + 1 - self.first) * LOCATION_BYTES]

    def since(self, sequence: int, limit_bytes: int) -> list[SignedRun]:
        """The runs with the operations after `sequence`, in at most `limit_bytes` of operations. None where nothing
        newer is signed, or the log is cut behind there."""
        place, first = bisect_right(self._ends, sequence), self.first
        runs: list[SignedRun] = []
        if sequence + 1 < first:
            return runs
        begin = self._ends[place - 1] + 1 if place else first
        for at in range(place, len(self._ends)):
            end = self._ends[at] + 1
            limit_bytes -= (end - begin) * LOCATION_BYTES
            if limit_bytes < 0:
                break
            operations = self._packed[(begin - first) * LOCATION_BYTES : (end - first) * LOCATION_BYTES]
            signature = self._signatures[at * SIGNATURE_BYTES : (at + 1) * SIGNATURE_BYTES]
            runs.append(SignedRun(begin, bytes(operations), bytes(signature)))
            begin = end
        return runs

    def _drop_runs(self, count: int) -> None:
        if count:
            del self._packed[: (self._ends[count - 1] + 1 - self.first) * LOCATION_BYTES]
            del self._ends[:count]
            del self._signatures[: count * SIGNATURE_BYTES]


class OwnLog:
    """This peer's own log. `incarnation` is that of the process's start (see `membership`)."""

    def __init__(self, incarnation: int, ring_limit: int = DEFAULT_RING_LIMIT) -> None:
        self.incarnation = incarnation
        self._index = LocationIndex(MAX_OWN_RECORDS)
        self._slot = self._index.open()
        self._late: list[bytes] = []
        """The last operations, which the index has not taken in yet."""
        self._ring = OperationRing(ring_limit)
        self._touched: list[set[bytes]] = []
        """Of each copy under way: digests whose records came, went or moved since it began."""

    @property
    def sequence(self) -> int:
        """Number of the last operation; 0 before the first."""
        return self._ring.last

    @property
    def signed(self) -> int:
        """Up to where the operations are signed: more is not told of."""
        return self._ring.signed

    @property
    def _records(self) -> LocationIndex:
        """The index, up to date."""
        if self._late:
            late, self._late = self._late, []
            self._index.apply(self._slot, b"".join(late))
        return self._index

    @property
    def head(self) -> LogHead:
        """Sequence, count and set hash, as the signed peer record carries them."""
        return LogHead(self.sequence, self.count, self._records.hash(self._slot))

    def add(self, record: LocationRecord) -> bytes | None:
        """Note that this peer holds `record`. The packed operation; None when nothing changed."""
        operation = record.encode()
        if not self._records.put(self._slot, operation):
            return None
        for touched in self._touched:
            touched.add(record.digest)
        self._ring.extend(operation)
        return operation

    def add_many(self, operations: Sequence[bytes]) -> None:
        """`add` of many packed records of digests that are not held."""
        for touched in self._touched:
            touched.update(operation[:DIGEST_BYTES] for operation in operations)
        self._append(operations)

    def remove_many(self, gone: Iterable[tuple[bytes, Version]]) -> list[bytes]:
        """Note that this peer no longer holds these versions, each of another digest. The packed operations: one that
        withdraws a version that is not held (any more) changes nothing."""
        pack = _WITHDRAWAL.pack
        operations = [
            pack(digest, clock, writer, root, REMOVED) for digest, (clock, writer, root) in gone
        ]
        if self._touched:  # the last record fills the gap of each that goes
            for operation in operations:
                self._note_removal(operation[:DIGEST_BYTES])
                self._append([operation])
        else:
            self._append(operations)
        return operations

    def _append(self, operations: Sequence[bytes]) -> None:
        self._ring.extend(b"".join(operations))
        self._late += operations
        if len(self._late) >= MAX_LATE or self._touched:
            _ = self._records

    def sign(self, signer: Signer) -> None:
        """Sign the next operations that are not signed yet, some thousands of them."""
        for _ in range(SIGNED_AT_ONCE):
            operations = self._ring.unsigned(MAX_SIGNED_OPERATIONS)
            if not operations:
                return
            signature = sign_run(signer, self.incarnation, self.signed + 1, operations)
            self._ring.sign(len(operations) // LOCATION_BYTES, signature)

    def since(self, sequence: int, limit_bytes: int) -> list[SignedRun]:
        """Signed runs with the operations after `sequence`; none when the ring no longer has them."""
        return self._ring.since(sequence, limit_bytes)

    def after(self, sequence: int) -> bytes | None:
        """The operations after `sequence`, signed or not; None when the ring no longer has them."""
        return self._ring.after(sequence)

    def snapshot(self) -> bytes:
        """All held records, packed: the set at `head`. 20 ms for a million: see `copy_in_steps`."""
        return self._records.pack(self._slot)

    def copy_in_steps(self) -> Steps[LogCopy]:
        """A `snapshot`, half a millisecond of it a step; the log may change in between."""
        touched: set[bytes] = set()
        self._touched.append(touched)
        parts, left = [], self.count
        try:
            while left:
                stop = min(left, self.count)
                left = max(0, stop - COPIED_PER_STEP)
                if stop:  # else all of them went
                    parts.append(self.records(left, stop))
                if left:
                    yield
        finally:
            self._touched = [each for each in self._touched if each is not touched]
        head, incarnation = self.head, self.incarnation
        last = b"".join(record for digest in touched if (record := self.held(digest)) is not None)
        for place, part in enumerate(parts if touched else ()):
            yield
            parts[place] = _without(part, touched)
        return LogCopy(incarnation, head, [*parts, last])

    def held(self, digest: bytes) -> bytes | None:
        """The packed record of a digest."""
        return self._records.get(self._slot, digest)

    def holds(self, digest: bytes, version: Version) -> bool:
        """Whether this version of a digest is held; its root does not count."""
        held = self.held(digest)
        return held is not None and _STAMPED.unpack_from(held, DIGEST_BYTES) == version[:2]

    @property
    def count(self) -> int:
        """How many records are held."""
        return self._records.count(self._slot)

    def records(self, start: int, stop: int) -> bytes:
        """Packed held records at these positions, 0 to `count` - 1. A record keeps its position, or takes that of
        another that went: the last one fills the gap."""
        return self._records.records(self._slot, start, stop)

    def restart(self, incarnation: int) -> None:
        """Begin a new log under another incarnation, holding the same records."""
        self.incarnation = incarnation
        self._ring = OperationRing(self._ring.limit)
        self._ring.extend(self.snapshot())

    def _note_removal(self, digest: bytes) -> None:
        """The digest's record is about to go, and the last one to fill its place."""
        count = self.count
        moving = self._records.digests(self._slot, count - 1, count)
        for touched in self._touched:
            touched.update((digest, *moving))


COPIED_PER_STEP: Final = 16_384


@dataclass(frozen=True, slots=True)
class LogCopy:
    """All records that a log held when it stood at `head`, packed, in no particular order."""

    incarnation: int
    head: LogHead
    parts: list[bytes]


def _without(part: bytes, digests: Set[bytes]) -> bytes:
    """Packed records without those of these digests."""
    fields = np.frombuffer(part, RECORD)
    first = np.frombuffer(b"".join(digest[:8] for digest in digests), "<u8")
    kept = np.ones(fields.size, np.bool_)
    for place in np.flatnonzero(np.isin(fields["first"], first)).tolist():
        start = place * LOCATION_BYTES
        kept[place] = part[start : start + DIGEST_BYTES] not in digests
    return part if kept.all() else np.frombuffer(part, WHOLE)[kept].tobytes()


SIGNATURE_BYTES: Final = 64
MAX_SIGNED_OPERATIONS: Final = 1_800
"""In one run. Two of them are as much work as one delta brings, and fit into it."""
SIGNED_AT_ONCE: Final = 4
"""Runs that are signed in one step, at 0.05 to 0.2 ms each."""
RUNS_PER_SECOND: Final = 150.0
"""Of all owners together, about: 1 % of a core for their readers."""
MIN_SECONDS: Final = 0.05
MIN_SECONDS_UNDER_LOAD: Final = 0.4
"""Shortest time between two signatures: under load their bytes are to stay few beside those of operations."""
MAX_SECONDS: Final = 2.0
"""Owners wait no longer than that, however many there are."""

_CONTEXT: Final = b"p2pstore log run 1\0"
_PLACE: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class SignedRun:
    """Packed operations of one log, contiguous from `first_sequence`, and their owner's signature."""

    first_sequence: int
    operations: bytes
    signature: bytes

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.operations) // LOCATION_BYTES - 1


def sign_run(signer: Signer, incarnation: int, first_sequence: int, operations: bytes) -> bytes:
    """The owner's signature of operations at this place of its log."""
    return signer.sign(_message(incarnation, first_sequence, operations))


def is_signed(verifier: Verifier, owner: PeerId, incarnation: int, run: SignedRun) -> bool:
    """Whether the owner signed the run, at that place of that log."""
    message = _message(incarnation, run.first_sequence, run.operations)
    return verifier.verify(owner, message, run.signature)


def _message(incarnation: int, first_sequence: int, operations: bytes) -> bytes:
    return _CONTEXT + _PLACE.pack(incarnation, first_sequence) + operations


class SigningPace:
    """When an owner may sign a run again."""

    def __init__(self, is_loaded: Callable[[], bool], writers: Callable[[], int]) -> None:
        """`writers`: about how many owners write just now, this one included."""
        self._is_loaded = is_loaded
        self._writers = writers
        self._signed_at = -math.inf

    def may_sign(self, now: float) -> bool:
        """Whether it is time; then say that it was done with `signed`."""
        return now >= self._signed_at + self._interval_seconds()

    def signed(self, now: float) -> None:
        self._signed_at = now

    def _interval_seconds(self) -> float:
        least = MIN_SECONDS_UNDER_LOAD if self._is_loaded() else MIN_SECONDS
        return min(MAX_SECONDS, max(least, self._writers() / RUNS_PER_SECOND))


MIN_PACKED: Final = 3
MAX_OPERATION_BYTES: Final = 4 * MIB
"""Of all that one message brings, unpacked."""
MASK_BYTES: Final = (LOCATION_BYTES + 7) // 8
_NO_BITS: Final = -1 << LOCATION_BYTES


def pack_operations(operations: bytes) -> bytes:
    """The packed form of a run of whole records."""
    count = len(operations) // LOCATION_BYTES
    if count < MIN_PACKED:
        return operations
    rows = np.frombuffer(operations, np.uint8).reshape(count, LOCATION_BYTES)
    shared: NDArray[np.bool_] = (rows == rows[0]).all(axis=0)
    mask = np.packbits(shared, bitorder="little").tobytes()
    return b"".join((mask, rows[0][shared].tobytes(), rows[:, ~shared].tobytes()))


def unpack_operations(packed: bytes, start: int, count: int) -> tuple[bytes, int]:
    """The operations of a run of `count` whose packed form begins at `start`, and where that ends. Raises
    `ProtocolError` when it is cut short, or no such form."""
    if count < MIN_PACKED:
        end = start + count * LOCATION_BYTES
        return _whole(packed, start, end), end
    begin = start + MASK_BYTES
    bits = int.from_bytes(_whole(packed, start, begin), "little")
    if bits & _NO_BITS:
        raise ProtocolError("a mask of more bytes than a location record has")
    shared = np.unpackbits(
        np.frombuffer(packed, np.uint8, MASK_BYTES, start), count=LOCATION_BYTES, bitorder="little"
    ).astype(np.bool_)
    in_common = bits.bit_count()
    middle = begin + in_common
    end = middle + (LOCATION_BYTES - in_common) * count
    rest: NDArray[Any] = np.frombuffer(_whole(packed, begin, end), np.uint8)
    rows = np.empty((count, LOCATION_BYTES), np.uint8)
    rows[:, shared] = rest[:in_common]
    rows[:, ~shared] = rest[in_common:].reshape(count, -1)
    return rows.tobytes(), end


def _whole(packed: bytes, start: int, end: int) -> bytes:
    if end > len(packed):
        raise ProtocolError("packed operations that are cut short")
    return packed[start:end]
