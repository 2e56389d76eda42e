"""What other members keep that is stamped over 10 s ahead of this peer's clock: it is left out, and remembered. Pure.

Where nobody can tell whose clock is wrong (`members.peer_clocks`), a write below such a stamp would be lost when the
clocks are right again.
"""

from __future__ import annotations

from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import (
    SCOPE_KEY,
    SCOPE_NAMESPACE,
    ClusterRecord,
    ClusterRecordKind,
    keys_of_floor,
)

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
