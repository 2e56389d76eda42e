"""Which cluster records two peers do not share, found in two steps. Pure.

First 64 bucket hashes are compared, then the 64 cells of some buckets that differ. At the bound of 100,000
records a cell holds about 24, so that one missing record costs a few kilobytes, and a peer that has none is sent
whole cells, each record once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.floors.cluster_records import ClusterRecords
from p2pstore.gossip.gossip_messages import CLUSTER_BUCKETS, CLUSTER_CELLS
from p2pstore.gossip.records import SignedRecord

COMPARED_BUCKETS: Final = 4
"""Of so many the cells are compared at a time: 2 KiB."""
_BUCKETS: Final = struct.Struct(f"<{CLUSTER_BUCKETS}Q")
_CELLS: Final = struct.Struct(f"<B{CLUSTER_CELLS}Q")

Cells = Mapping[int, tuple[int, ...]]
"""Bucket -> hashes of its cells."""


@dataclass(frozen=True, slots=True)
class TheirRecords:
    """What another peer says of its cluster records. `buckets` is None when it did not say; `knows_cells`:
    it can be asked of them."""

    buckets: list[int] | None = None
    cells: Cells = field(default_factory=dict)
    knows_cells: bool = False


def pack_buckets(hashes: Iterable[int]) -> bytes:
    """64 bucket hashes as they travel."""
    return _BUCKETS.pack(*hashes)


def read_buckets(packed: bytes) -> list[int] | None:
    """Bucket hashes; None when there are none. Raises `ProtocolError` when they are not 64."""
    if not packed:
        return None
    if len(packed) != _BUCKETS.size:
        raise ProtocolError(f"cluster record buckets of {len(packed)} bytes")
    return list(_BUCKETS.unpack(packed))


def pack_cells(records: ClusterRecords, buckets: Iterable[int]) -> bytes:
    """The cells of some buckets."""
    return b"".join(_CELLS.pack(bucket, *records.cell_hashes(bucket)) for bucket in buckets)


def read_cells(packed: bytes) -> Cells:
    """Raises `ProtocolError` when they are not whole, too many, or of no bucket."""
    count, rest = divmod(len(packed), _CELLS.size)
    if rest or count > COMPARED_BUCKETS:
        raise ProtocolError(f"cluster record cells of {len(packed)} bytes")
    cells = {row[0]: row[1:] for row in _CELLS.iter_unpack(packed)}
    if any(bucket >= CLUSTER_BUCKETS for bucket in cells):
        raise ProtocolError(f"cells of bucket {max(cells)} of {CLUSTER_BUCKETS}")
    return cells


def differing_buckets(records: ClusterRecords, theirs: list[int]) -> list[int]:
    """The numbers of those whose hashes are not the same."""
    mine = records.bucket_hashes
    return [number for number in range(CLUSTER_BUCKETS) if mine[number] != theirs[number]]


def records_for(
    records: ClusterRecords, theirs: TheirRecords, limit_count: int, limit_bytes: int, rng: Random
) -> list[SignedRecord]:
    """Records that the other side may lack: of the cells that differ, else of buckets that hold few.

    A peer that does not know of cells is sent some of the differing buckets at random, since which of them
    it lacks is not known.
    """
    if theirs.cells:
        candidates = _of_cells(records, theirs.cells, limit_count, rng)
    elif theirs.buckets is not None:
        differing = differing_buckets(records, theirs.buckets)
        few = sum(records.bucket_size(bucket) for bucket in differing) <= limit_count
        if theirs.knows_cells and not few:
            return []
        candidates = _of_buckets(records, differing, limit_count, rng)
    else:
        return []
    chosen = []
    for signed in candidates:
        limit_bytes -= len(signed.body) + len(signed.signature)
        if limit_bytes < 0:
            break
        chosen.append(signed)
    return chosen


def _of_cells(
    records: ClusterRecords, theirs: Cells, limit_count: int, rng: Random
) -> list[SignedRecord]:
    differing = [
        (bucket, cell)
        for bucket, hashes in theirs.items()
        for cell, (mine, other) in enumerate(zip(records.cell_hashes(bucket), hashes, strict=True))
        if mine != other
    ]
    rng.shuffle(differing)
    cells = (records.cell(*place) for place in differing)
    # Shuffled, so that in the end all of a cell go that holds more than may.
    found = (signed for cell in cells for signed in rng.sample(cell, len(cell)))
    return list(islice(found, limit_count))


def _of_buckets(
    records: ClusterRecords, differing: list[int], limit_count: int, rng: Random
) -> list[SignedRecord]:
    rng.shuffle(differing)
    candidates: list[SignedRecord] = []
    for number in differing:
        for cell in range(CLUSTER_CELLS):
            candidates += records.cell(number, cell)
        if len(candidates) >= 16 * limit_count:
            break
    return rng.sample(candidates, min(limit_count, len(candidates)))
