"""The sum of a log's operations, in the simplest form: the oracle for the index of locations."""

from collections.abc import Iterator
from dataclasses import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.homes.home_updates import CheckedUpdate, in_steps
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord, decode_location, location_hash
from p2pstore.home_messages import Push
from p2pstore.objects import DIGEST_BYTES

_FLAGS = LOCATION_BYTES - 1
_REMOVED = 0x80
_VERSION = slice(DIGEST_BYTES, DIGEST_BYTES + 10)


class LocationSet:
    """One record per digest, the last one written; a withdrawal counts only for the version that is held."""

    def __init__(self, operations: bytes = b"") -> None:
        self.records: dict[bytes, bytes] = {}
        self.apply(operations)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def hash(self) -> int:
        total = 0
        for record in self.records.values():
            total ^= location_hash(record)
        return total

    def apply(self, operations: bytes) -> None:
        for start in range(0, len(operations), LOCATION_BYTES):
            operation = operations[start : start + LOCATION_BYTES]
            digest = operation[:DIGEST_BYTES]
            if not operation[_FLAGS] & _REMOVED:
                self.records[digest] = operation
            elif digest in self.records and self.records[digest][_VERSION] == operation[_VERSION]:
                del self.records[digest]


def check_update(update: Push) -> CheckedUpdate:
    """All parts of an update as one."""
    parts = [part for part in in_steps(update) if part is not None]
    return replace(
        parts[-1],
        operations=[each for part in parts for each in part.operations],
        sets=[each for part in parts for each in part.sets],
    )


def iterate_locations(packed: bytes | memoryview) -> Iterator[LocationRecord]:
    """All records of a packed run. Raises `ProtocolError` when it is not a whole number of them."""
    if len(packed) % LOCATION_BYTES:
        raise ProtocolError(
            f"a run of location records has {len(packed)} bytes, not a multiple of {LOCATION_BYTES}"
        )
    for offset in range(0, len(packed), LOCATION_BYTES):
        yield decode_location(packed, offset)
