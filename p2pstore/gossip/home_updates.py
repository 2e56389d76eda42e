"""What owners tell homes, and what may be wrong with it. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from p2pstore.errors import ProtocolError
from p2pstore.gossip.log import check_run
from p2pstore.gossip.membership import MAX_INCARNATION
from p2pstore.gossip.partitions import PARTITION_COUNT, partition_of
from p2pstore.gossip.records import LOCATION_BYTES
from p2pstore.gossip.snapshots import check_snapshot

AUDIT_ENTRY: Final = struct.Struct("<HIQ")
"""Partition, number, XOR hash of the set."""
MAX_AUDIT_SECONDS: Final = 24 * 3600


class WholePartition(Protocol):
    """What a partition held after one operation; see `effects.PartitionSet`."""

    @property
    def partition(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def set_hash(self) -> int: ...
    @property
    def records(self) -> bytes: ...


class HomeUpdate(Protocol):
    """What an owner tells a home; see `effects.Push`."""

    @property
    def incarnation(self) -> int: ...
    @property
    def sequences(self) -> list[int]: ...
    @property
    def operations(self) -> bytes: ...
    @property
    def numbers(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...
    @property
    def sets(self) -> Sequence[WholePartition]: ...
    @property
    def audit(self) -> bytes: ...
    @property
    def audit_seconds(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """An update whose every part is well formed."""

    incarnation: int
    operations: list[tuple[int, int, bytes]]
    """(number in the partition, log sequence, operation)."""
    sets: list[WholePartition]
    audit: list[tuple[int, int, int]]
    """(partition, number, set hash)."""
    sequence: int
    audit_seconds: int


def check_update(update: HomeUpdate) -> CheckedUpdate:
    """Raises `ProtocolError` for nonsense."""
    count = check_run(update.operations)
    if count != len(update.sequences) or len(update.numbers) not in (0, 4 * count):
        raise ProtocolError("a push has not one sequence number and number per location record")
    numbers: Iterable[int] = (
        struct.unpack(f"<{count}I", update.numbers) if update.numbers else [0] * count
    )
    places = [update.incarnation, update.sequence, *update.sequences]
    if min(places) < 0 or max(places) >= MAX_INCARNATION:
        raise ProtocolError("a push of an impossible place in a log")
    if len(update.audit) % AUDIT_ENTRY.size or not 0 <= update.audit_seconds <= MAX_AUDIT_SECONDS:
        raise ProtocolError(f"an audit of {len(update.audit)} bytes, {update.audit_seconds} s")
    audit = list(AUDIT_ENTRY.iter_unpack(update.audit))
    for partition, _, _ in audit:
        _check_partition(partition)
    for each in update.sets:
        _check_partition(each.partition)
        _check_set(each)
    operations = [
        (number, sequence, update.operations[start : start + LOCATION_BYTES])
        for number, sequence, start in zip(
            numbers,
            update.sequences,
            range(0, len(update.operations), LOCATION_BYTES),
            strict=True,
        )
    ]
    return CheckedUpdate(
        update.incarnation,
        operations,
        list(update.sets),
        audit,
        update.sequence,
        update.audit_seconds,
    )


def _check_partition(partition: int) -> None:
    if not 0 <= partition < PARTITION_COUNT:
        raise ProtocolError(f"a partition {partition}")


def _check_set(whole: WholePartition) -> None:
    if not 0 <= whole.number < 1 << 32:
        raise ProtocolError(f"a partition after operation {whole.number}")
    if check_snapshot(whole.records).set_hash != whole.set_hash:
        raise ProtocolError("a whole partition does not have the hash that came with it")
    for start in range(0, len(whole.records), LOCATION_BYTES):
        if partition_of(whole.records[start : start + 2]) != whole.partition:
            raise ProtocolError("a whole partition holds keys of another one")
