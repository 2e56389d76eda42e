"""A peer's log of what it holds: operations, numbered from 1, and the set that they add up to.
Pure.

Every operation is one 34-byte location record; `removed` marks a withdrawal. A peer is the only
writer of its own log, and every reader applies the same operations in the same order, so a reader's
state is told by one number. A ring keeps the recent operations; a reader that is behind the ring
takes the whole set instead. So nothing of a removed key has to be remembered, and no removed key
comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    LocationRecord,
    LogHead,
    decode_location,
    location_hash,
)
from p2pstore.objects import DIGEST_BYTES, Version

DEFAULT_RING_LIMIT: Final = 65_536
_FLAGS: Final = LOCATION_BYTES - 1
_REMOVED: Final = 0x80
_VERSION: Final = slice(DIGEST_BYTES, DIGEST_BYTES + 10)
_CLOCK_ONLY: Final = struct.Struct(f"<{DIGEST_BYTES}xQ{LOCATION_BYTES - DIGEST_BYTES - 8}x")


def check_run(packed: bytes) -> int:
    """How many records a packed run has. Raises `ProtocolError` when they are not whole."""
    count, rest = divmod(len(packed), LOCATION_BYTES)
    if rest:
        raise ProtocolError(
            f"a run of location records has {len(packed)} bytes, not a multiple of 34"
        )
    return count


def newest_clock(packed: bytes, limit: int) -> int:
    """The highest clock of the versions in a packed run that is at most `limit`; 0 when there is none."""
    return max((clock for (clock,) in _CLOCK_ONLY.iter_unpack(packed) if clock <= limit), default=0)


class LocationSet:
    """The records that a log's operations leave: one per digest, the last one written.

    `hash` is the XOR of xxh3-64 over the held records, so owner and readers can compare their sets.
    """

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        """Digest -> packed record."""
        self.hash = 0

    def __len__(self) -> int:
        return len(self.records)

    def apply(self, operation: bytes) -> None:
        """Carry out one packed operation. A withdrawal counts only for the version that is held."""
        digest = operation[:DIGEST_BYTES]
        held = self.records.get(digest)
        if operation[_FLAGS] & _REMOVED:
            if held is None or held[_VERSION] != operation[_VERSION]:
                return
            del self.records[digest]
        else:
            self.records[digest] = operation
            self.hash ^= location_hash(operation)
        if held is not None:
            self.hash ^= location_hash(held)

    def pack(self) -> bytes:
        """All held records, one after the other."""
        return b"".join(self.records.values())


def unpack_set(packed: bytes) -> LocationSet:
    """The set that `LocationSet.pack` wrote. May run in a worker thread: it touches nothing else.

    Raises `ProtocolError` for records that are not whole, repeated or withdrawn.
    """
    count = check_run(packed)
    result = LocationSet()
    records, total = result.records, 0
    for start in range(0, len(packed), LOCATION_BYTES):
        record = packed[start : start + LOCATION_BYTES]
        if record[_FLAGS] & _REMOVED:
            raise ProtocolError("a snapshot of locations holds a withdrawn record")
        records[record[:DIGEST_BYTES]] = record
        total ^= location_hash(record)
    if len(records) != count:
        raise ProtocolError("a snapshot of locations names a key twice")
    result.hash = total
    return result


class OperationRing:
    """The most recent operations of one log, packed. Sequence numbers are contiguous.

    Holds at least the last `limit` of them and at most twice as many: cutting in halves makes an
    append O(1) on average.
    """

    def __init__(self, limit: int, last: int = 0) -> None:
        self.limit = limit
        self.last = last
        """Sequence number of the newest operation."""
        self._packed = bytearray()

    @property
    def first(self) -> int:
        """Sequence number of the oldest operation that is still here (`last + 1` when none is)."""
        return self.last + 1 - len(self._packed) // LOCATION_BYTES

    def extend(self, packed: bytes) -> None:
        """Append a run of operations that follow `last`."""
        self._packed += packed
        self.last += len(packed) // LOCATION_BYTES
        if len(self._packed) > 2 * self.limit * LOCATION_BYTES:
            del self._packed[: len(self._packed) - self.limit * LOCATION_BYTES]

    def since(self, sequence: int, limit_bytes: int) -> bytes | None:
        """Operations after `sequence` in at most `limit_bytes`; None when behind the ring."""
        if sequence + 1 < self.first or sequence > self.last:
            return None
        start = (sequence + 1 - self.first) * LOCATION_BYTES
        return bytes(self._packed[start : start + limit_bytes // LOCATION_BYTES * LOCATION_BYTES])


class OwnLog:
    """This peer's own log. `incarnation` is that of the process's start (see `membership`)."""

    def __init__(self, incarnation: int, ring_limit: int = DEFAULT_RING_LIMIT) -> None:
        self.incarnation = incarnation
        self._set = LocationSet()
        self._ring = OperationRing(ring_limit)

    @property
    def sequence(self) -> int:
        """Number of the last operation; 0 before the first."""
        return self._ring.last

    @property
    def head(self) -> LogHead:
        """Sequence, count and set hash, as the signed peer record carries them."""
        return LogHead(self.sequence, len(self._set), self._set.hash)

    def add(self, record: LocationRecord) -> bytes | None:
        """Note that this peer holds `record`. The packed operation; None when nothing changed."""
        operation = record.encode()
        if self._set.records.get(record.digest) == operation:
            return None
        return self._append(operation)

    def remove(self, digest: bytes, version: Version) -> bytes | None:
        """Note that this peer no longer holds the version. None when it did not (any more)."""
        held = self._set.records.get(digest)
        if held is None:
            return None
        record = decode_location(held)
        if (record.version.clock, record.version.writer) != (version.clock, version.writer):
            return None
        return self._append(held[:_FLAGS] + bytes((held[_FLAGS] | _REMOVED,)))

    def since(self, sequence: int, limit_bytes: int) -> bytes | None:
        """Packed operations after `sequence`; None when the ring no longer has them."""
        return self._ring.since(sequence, limit_bytes)

    def snapshot(self) -> bytes:
        """All held records, packed: the set at `head`."""
        return self._set.pack()

    def held(self, digest: bytes) -> bytes | None:
        """The packed record of a digest."""
        return self._set.records.get(digest)

    def restart(self, incarnation: int) -> None:
        """Begin a new log under another incarnation, holding the same records."""
        records: Iterable[bytes] = self._set.records.values()
        self.incarnation = incarnation
        self._ring = OperationRing(self._ring.limit)
        self._ring.extend(b"".join(records))

    def _append(self, operation: bytes) -> bytes:
        self._set.apply(operation)
        self._ring.extend(operation)
        return operation
