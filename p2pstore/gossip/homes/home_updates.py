"""The updates that owners send to homes, and their checks. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import LocationIndex
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OwnLog, check_run
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.records import LOCATION_BYTES, PARTITION_COUNT, Member, partition_of
from p2pstore.home_messages import PartitionSet, Push
from p2pstore.location_table import WHOLE

AUDIT_ENTRY: Final = struct.Struct("<HIQ")
"""Partition, number, XOR hash of the set."""
MAX_AUDIT_SECONDS: Final = 24 * 3600
MAX_SET_RECORDS: Final = 5_000
"""Larger whole partitions are neither sent nor kept. Of the four million records of a peer a partition has some 4,096,
and more only when keys are chosen for it; its homes then do not vouch for it, and are asked in vain."""
STEP_COST: Final = 1_280
"""Of what is taken in at once, in units of 2 us: an empty partition or an entry of an audit costs one. A step may
be longer for one large partition, and takes 4 ms then."""
OPERATION_COST: Final = 10
"""Asks for other holders of the key as well."""
SET_COST: Final = 50
RECORD_COST_PERCENT: Final = 40
CHECKED_AT_ONCE: Final = 4_096
"""Records whose sum is made in one step: 0.3 us each."""


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """An update, or a part of one, that is well formed."""

    incarnation: int
    operations: list[tuple[int, int, bytes]]
    """(number in the partition, log sequence, operation)."""
    sets: list[PartitionSet]
    audit: list[tuple[int, int, int]]
    """(partition, number, set hash)."""
    sequence: int
    audit_seconds: int
    last: bool = True
    """Whether this is all of it, or the last part."""

    @property
    def packed_operations(self) -> bytes:
        return b"".join(operation for _, _, operation in self.operations)


def in_steps(update: Push) -> Iterator[CheckedUpdate | None]:
    """An update in parts, each of which takes a few milliseconds to check and to take in, in their order. None:
    go on; the check is still under way. Raises `ProtocolError` for nonsense before the first part."""
    _check_form(update)
    room = CHECKED_AT_ONCE
    for whole in update.sets:
        _check_set(whole)
        room -= len(whole.records) // LOCATION_BYTES
        if room <= 0:
            yield None
            room = CHECKED_AT_ONCE
    sets: list[PartitionSet] = []
    room = STEP_COST
    for whole in update.sets:
        cost = _cost(whole)
        if sets and cost > room:
            yield _part(update, sets=sets)
            sets, room = [], STEP_COST
        sets.append(whole)
        room -= cost
    start, count = 0, len(update.sequences)
    audit_cost = len(update.audit) // AUDIT_ENTRY.size
    while OPERATION_COST * (count - start) + audit_cost > room:
        stop = min(count, start + max(0, room // OPERATION_COST))
        yield _part(update, operations=_operations(update, start, stop), sets=sets)
        start, sets, room = stop, [], STEP_COST
    yield _part(update, operations=_operations(update, start, count), sets=sets, last=True)


def _cost(whole: PartitionSet) -> int:
    count = len(whole.records) // LOCATION_BYTES
    return SET_COST + count * RECORD_COST_PERCENT // 100 if count else 1


def _part(
    update: Push,
    *,
    operations: list[tuple[int, int, bytes]] | None = None,
    sets: list[PartitionSet] | None = None,
    last: bool = False,
) -> CheckedUpdate:
    return CheckedUpdate(
        update.incarnation,
        operations or [],
        sets or [],
        list(AUDIT_ENTRY.iter_unpack(update.audit)) if last else [],
        update.sequence,
        update.audit_seconds if last else 0,
        last,
    )


def _operations(update: Push, start: int, stop: int) -> list[tuple[int, int, bytes]]:
    sequences = update.sequences[start:stop]
    count = len(sequences)
    numbers = (
        struct.unpack_from(f"<{count}I", update.numbers, 4 * start) if update.numbers else (0,) * count
    )
    places = range(start * LOCATION_BYTES, (start + count) * LOCATION_BYTES, LOCATION_BYTES)
    return [
        (number, sequence, update.operations[place : place + LOCATION_BYTES])
        for number, sequence, place in zip(numbers, sequences, places, strict=True)
    ]


def _check_form(update: Push) -> None:
    """Everything but what is in whole partitions."""
    count = check_run(update.operations)
    if count != len(update.sequences) or len(update.numbers) not in (0, 4 * count):
        raise ProtocolError("a push has not one sequence number and number per location record")
    places = [update.incarnation, update.sequence, *update.sequences]
    if min(places) < 0 or max(places) >= MAX_INCARNATION:
        raise ProtocolError("a push of an impossible place in a log")
    count, rest = divmod(len(update.audit), AUDIT_ENTRY.size)
    if rest or count > PARTITION_COUNT or not 0 <= update.audit_seconds <= MAX_AUDIT_SECONDS:
        raise ProtocolError(f"an audit of {len(update.audit)} bytes, {update.audit_seconds} s")
    for partition, _, _ in AUDIT_ENTRY.iter_unpack(update.audit):
        _check_partition(partition)


def _check_partition(partition: int) -> None:
    if not 0 <= partition < PARTITION_COUNT:
        raise ProtocolError(f"a partition {partition}")


def _check_set(whole: PartitionSet) -> None:
    _check_partition(whole.partition)
    if not 0 <= whole.number < 1 << 32:
        raise ProtocolError(f"a partition after operation {whole.number}")
    if len(whole.records) > MAX_SET_RECORDS * LOCATION_BYTES:
        return  # it is not kept: see `home_views`
    set_hash = check_snapshot(whole.records).set_hash if whole.records else 0
    if set_hash != whole.set_hash:
        raise ProtocolError("a whole partition does not have the hash that came with it")
    for start in range(0, len(whole.records), LOCATION_BYTES):
        if partition_of(whole.records[start : start + 2]) != whole.partition:
            raise ProtocolError("a whole partition holds keys of another one")


MAX_RIVALS: Final = 64

TakePart = Callable[[Member, CheckedUpdate, int, float], tuple[list[int], list[Location]]]
"""Takes in a part of what an owner says. What to answer: partitions that it should send whole, and at most so
many other versions, at others, of what it pushed."""


class PushIntake:
    """One push. Call `step`, of a few milliseconds, until all was taken in; then `behind` and `rivals` are the answer.
    Between two steps anything may happen: each part is taken in as if it had come by itself."""

    def __init__(self, owner: Member, update: Push, take: TakePart) -> None:
        self.behind: list[int] = []
        """Partitions that the owner should send whole."""
        self.rivals: list[Location] = []
        """Other versions, at others, of what it pushed."""
        self._owner = owner
        self._take = take
        self._parts = in_steps(update)

    def step(self, now: float) -> bool:
        """Go on. Whether all was taken in. Raises `ProtocolError`, before anything was, for nonsense."""
        part = next(self._parts, None)
        if part is None:
            return False
        behind, rivals = self._take(self._owner, part, MAX_RIVALS - len(self.rivals), now)
        self.behind = list(dict.fromkeys([*self.behind, *behind]))
        self.rivals += rivals
        return part.last


_PARTITION_BITS: Final = 10


class PartitionSets:
    """This peer's own log, split by partition: number and set of each. `log` has carried out an operation when `note`
    is told of it."""

    def __init__(self, log: OwnLog) -> None:
        self._log = log
        self._numbers = [0] * PARTITION_COUNT
        self._index: LocationIndex | None = None
        self._slots: dict[int, int] = {}
        """Of the partitions whose sets are made."""
        self._sorted = b""
        """Records of the log when the first set was needed, by partition."""
        self._begins: list[int] = []
        """Where each partition begins there, in records; and the end."""

    def note(self, partitions: Sequence[int], operations: Sequence[bytes]) -> list[int]:
        """The log's next operations, of keys of these partitions. Their numbers there."""
        if self._index is not None:
            for partition, operation in zip(partitions, operations, strict=True):
                slot = self._slots.get(partition)
                self._index.apply(self._slot(partition) if slot is None else slot, operation)
        numbers, found = self._numbers, []
        for partition in partitions:
            numbers[partition] = number = numbers[partition] + 1
            found.append(number)
        return found

    def forget(self) -> None:
        """No member keeps partitions: free the sets. The numbers stay."""
        self._index = None
        self._slots.clear()
        self._sorted, self._begins = b"", []

    @property
    def any_made(self) -> bool:
        return self._index is not None

    def number(self, partition: int) -> int:
        """How many operations there were of keys of the partition."""
        return self._numbers[partition]

    def set_hash(self, partition: int) -> int:
        """XOR of xxh3-64 over what is held of it."""
        return self._made().hash(self._slot(partition))

    def size_bytes(self, partition: int) -> int:
        return LOCATION_BYTES * self._made().count(self._slot(partition))

    def pack(self, partition: int) -> bytes:
        """The packed location records held of it."""
        return self._made().pack(self._slot(partition))

    def _made(self) -> LocationIndex:
        if self._index is None:
            self._index = LocationIndex(MAX_OWN_RECORDS)
            self._sort()
        return self._index

    def _slot(self, partition: int) -> int:
        slot = self._slots.get(partition)
        if slot is None:
            index = self._made()
            slot = self._slots[partition] = index.open()
            begin, end = self._begins[partition], self._begins[partition + 1]
            if end > begin:
                index.load(slot, self._sorted[begin * LOCATION_BYTES : end * LOCATION_BYTES])
            if len(self._slots) == PARTITION_COUNT:
                self._sorted, self._begins = b"", []
        return slot

    def _sort(self) -> None:
        packed = self._log.snapshot()
        first = np.frombuffer(packed, np.uint8).reshape(-1, LOCATION_BYTES)[:, :2]
        words = np.ascontiguousarray(first).view(">u2").ravel()
        partitions = (words >> (16 - _PARTITION_BITS)).astype(np.uint16)
        order = np.argsort(partitions, kind="stable")
        self._sorted = np.frombuffer(packed, WHOLE)[order].tobytes()
        bounds = np.searchsorted(partitions[order], np.arange(PARTITION_COUNT + 1))
        self._begins = bounds.tolist()
