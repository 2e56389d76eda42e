"""Messages by which the owner of a log tells the homes of its keys' partitions what it holds. Pure.

Gossip makes them and takes them in; data connections carry them.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from p2pstore.wire import Message

MAX_PUSHED_OPERATIONS: Final = 32_768
MAX_PUSHED_SETS: Final = 1_024
MAX_RIVALS: Final = 64


class Holding(Message, frozen=True):
    """One holder: its short name, its log's (incarnation, sequence) at that time, a location record."""

    member: int
    incarnation: int
    sequence: int
    record: bytes


class PartitionSet(Message, frozen=True):
    """All that the sender holds of a partition after its operation `number`: packed location records."""

    partition: int
    number: int
    set_hash: int
    records: bytes


class Push(Message, frozen=True):
    """News of the sender's log for the receiver, as a home of some partitions.

    Fresh operations: sequences in the log and records. For peers in partitioned mode also `numbers`, packed
    u32, one an operation, in the log of its partition (0: the receiver is no home of it); whole partitions;
    and now and then an `audit`: `u16 partition | u32 number | u64 set hash` of each that the receiver should
    have, the next of which comes within `audit_seconds`. `sequence` is where the log is, when there are sets
    or an audit.
    """

    incarnation: int
    sequences: Annotated[list[int], Meta(max_length=MAX_PUSHED_OPERATIONS)]
    operations: bytes
    numbers: bytes = b""
    sequence: int = 0
    sets: Annotated[list[PartitionSet], Meta(max_length=MAX_PUSHED_SETS)] = []
    audit: bytes = b""
    audit_seconds: int = 0


class Pushed(Message, frozen=True):
    """Partitions that the receiver has not, and wants whole; and other versions, at others, of keys that were
    pushed."""

    behind: Annotated[list[int], Meta(max_length=MAX_PUSHED_SETS)] = []
    rivals: Annotated[list[Holding], Meta(max_length=MAX_RIVALS)] = []
