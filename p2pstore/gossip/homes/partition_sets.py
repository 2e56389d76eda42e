"""What this peer holds of each partition, for homes. Pure.

Operations are counted all the time. The sets cost as much memory again as the log, so they are made only while
somebody keeps partitions: from the log's set, once sorted by partition, each when it is needed.
"""

from __future__ import annotations

from typing import Final

import numpy

from p2pstore.gossip.homes.partitions import PARTITION_COUNT
from p2pstore.gossip.locations.location_index import LocationIndex
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, OwnLog
from p2pstore.gossip.records import LOCATION_BYTES
from p2pstore.location_table import WHOLE

_PARTITION_BITS: Final = 10


class PartitionSets:
    """See the module's docstring. `log` has carried out an operation when `note` is told of it."""

    def __init__(self, log: OwnLog) -> None:
        self._log = log
        self._numbers = [0] * PARTITION_COUNT
        self._index: LocationIndex | None = None
        self._slots: dict[int, int] = {}
        """Of the partitions whose sets are made."""
        self._sorted = b""
        """What the log held when the first set was needed, by partition."""
        self._begins: list[int] = []
        """Where each partition begins there, in records; and the end."""

    def note(self, partition: int, operation: bytes) -> int:
        """The log's next operation, of a key of that partition. Its number there."""
        if self._index is not None and partition in self._slots:
            self._index.apply(self._slots[partition], operation)
        elif self._index is not None:
            self._index.apply(self._slot(partition), operation)
        self._numbers[partition] += 1
        return self._numbers[partition]

    def forget(self) -> None:
        """Nobody keeps partitions: free the sets. The numbers stay."""
        self._index = None
        self._slots.clear()
        self._sorted, self._begins = b"", []

    @property
    def any_made(self) -> bool:
        """Whether there is something to `forget`."""
        return self._index is not None

    def number(self, partition: int) -> int:
        """How many operations there were of keys of the partition."""
        return self._numbers[partition]

    def set_hash(self, partition: int) -> int:
        """XOR of xxh3-64 over what is held of it."""
        slot = self._slot(partition)
        return self._made().hash(slot)

    def size_bytes(self, partition: int) -> int:
        """How long `pack` is."""
        slot = self._slot(partition)
        return LOCATION_BYTES * self._made().count(slot)

    def pack(self, partition: int) -> bytes:
        """What is held of it: packed location records."""
        slot = self._slot(partition)
        return self._made().pack(slot)

    # --- inside ------------------------------------------------------------------------------

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
        first = numpy.frombuffer(packed, numpy.uint8).reshape(-1, LOCATION_BYTES)[:, :2]
        words = numpy.ascontiguousarray(first).view(">u2").ravel()
        partitions = (words >> (16 - _PARTITION_BITS)).astype(numpy.uint16)
        order = numpy.argsort(partitions, kind="stable")
        self._sorted = numpy.frombuffer(packed, WHOLE)[order].tobytes()
        bounds = numpy.searchsorted(partitions[order], numpy.arange(PARTITION_COUNT + 1))
        self._begins = bounds.tolist()
