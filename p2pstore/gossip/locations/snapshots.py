"""Whole sets of locations as they travel: checked, all at once, before any of it counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.location_index import digests_of, hash_of
from p2pstore.gossip.locations.log import (
    MAX_OWN_RECORDS,
    MAX_STAMP,
    REMOVED,
    check_run,
    newest_clock,
)
from p2pstore.gossip.records import LOCATION_BYTES
from p2pstore.location_table import RECORD, WHOLE

_PIECE: Final = 4_096
"""Records that are hashed before other threads may run."""

_FEW: Final = 64
UNSIGNED_RECORDS: Final = 65_536
"""More than its owner's signed head counts: it may have put so many since it signed that."""

Packed = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class CheckedSnapshot:
    """Packed records, each of another digest and none withdrawn, the XOR of their hashes, and the highest clock of
    their versions: to look for it again would hold the event loop for 13 ms with a million."""

    packed: Packed
    count: int
    set_hash: int
    newest_clock: int


def most_snapshot_bytes(signed_count: int) -> int:
    """How long the snapshot of an owner may be whose signed head counts so many records."""
    return (min(signed_count, MAX_OWN_RECORDS) + UNSIGNED_RECORDS) * LOCATION_BYTES


def check_snapshot(packed: Packed) -> CheckedSnapshot:
    """Check a snapshot. May run in a worker thread: a million records take a quarter of a second, most of
    it without the interpreter's lock.

    `packed` must not change any more. Raises `ProtocolError` for records that are not whole, repeated or
    withdrawn.
    """
    count = check_run(packed)
    whole = np.frombuffer(packed, WHOLE)
    if count <= _FEW:
        repeated = len(set(digests_of(packed))) < count
        withdrawn = any(record[-1] & REMOVED for record in whole.tolist())
    else:
        fields = np.frombuffer(packed, RECORD)
        repeated = _repeats(fields)
        withdrawn = bool((fields["flags"] >= REMOVED).any())
    if repeated:
        raise ProtocolError("a snapshot of locations names a key twice")
    if withdrawn:
        raise ProtocolError("a snapshot of locations holds a withdrawn record")
    set_hash = 0
    for start in range(0, count, _PIECE):
        set_hash ^= hash_of(whole[start : start + _PIECE].tolist())
    return CheckedSnapshot(packed, count, set_hash, newest_clock(packed, MAX_STAMP))


def _repeats(fields: npt.NDArray[np.void]) -> bool:
    """Whether two of these records have the same digest."""
    first = fields["first"].copy()
    order = np.argsort(first)
    alike = np.flatnonzero(first[order[1:]] == first[order[:-1]])
    if not alike.size:
        return False
    # Halves that are alike, by chance or because the digests are.
    suspects = fields[np.unique(np.concatenate((order[alike], order[alike + 1])))]
    pairs = np.stack((suspects["first"], suspects["second"]), axis=1)
    return len(np.unique(pairs, axis=0)) < len(pairs)
