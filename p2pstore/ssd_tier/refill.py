"""Which of the records found in a log count, and putting these into the index. Pure.

Dead marks are obeyed. The highest version of an object that has all its parts wins: one that was being written must not
take the one before with it. Of equal versions the record counts that was written first, because a copy made by reclaim
need not be durable yet. Whatever loses is marked dead: otherwise it could come back when what it lost to is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pstore.ssd_tier.index import ColdIndex
from p2pstore.ssd_tier.recovery import FoundSegment
from p2pstore.ssd_tier.rows import ROW, Rows, parts_of

Which = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Refilled:
    """`next_sequence` is above that of any record. The rest are counts of records that are not in the index: dead
    before, of a lower version or there twice, of an incomplete object, too many for it."""

    next_sequence: int
    dead: int
    superseded: int
    incomplete: int
    too_many: int


def refill(index: ColdIndex, found: Sequence[FoundSegment]) -> Refilled:
    """Fill an empty index with what counts, and mark the rest dead in the segments that were found: these marks are
    to be written like any others. When there are too many records for the index, those written first are left out.

    A second or two for a million records: not for the event loop's thread.
    """
    names: dict[str, int] = {}
    alive = [~each.marks.dead_of(each.footer.rows["number"]) for each in found]
    rows = _joined([each.footer.rows[which] for each, which in zip(found, alive, strict=True)], ROW)
    owners = np.repeat(np.arange(len(found)), [int(which.sum()) for which in alive])
    namespaces = _joined(
        [_namespaces(each, names)[which] for each, which in zip(found, alive, strict=True)],
        np.dtype(np.uint32),
    )
    order = _best_first(rows)
    rows, owners, namespaces = rows[order], owners[order], namespaces[order]

    whole, won = _winners(rows)
    kept = _newest(rows, won, index.max_records)
    for owner, number in zip(owners[~kept].tolist(), rows["number"][~kept].tolist(), strict=True):
        found[owner].marks.mark(number)
    if not kept.all():
        rows, owners, namespaces = rows[kept], owners[kept], namespaces[kept]
    segments = np.array([each.segment for each in found], np.uint32)
    index.load(
        rows,
        segments[owners],
        namespaces,
        list(names),
        {found[owner].segment: found[owner].footer.keys for owner in np.unique(owners).tolist()},
        {each.segment: each.generation for each in found},
    )
    sequences = [int(each.footer.rows["sequence"].max(initial=0)) for each in found]
    return Refilled(
        next_sequence=max(sequences, default=0) + 1,
        dead=sum(int((~which).sum()) for which in alive),
        superseded=int((whole & ~won).sum()),
        incomplete=int((~whole).sum()),
        too_many=int((won & ~kept).sum()),
    )


def _joined(pieces: list[npt.NDArray[np.generic]], dtype: np.dtype[np.generic]) -> Rows:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _namespaces(found: FoundSegment, names: dict[str, int]) -> npt.NDArray[np.uint32]:
    """For each row of the segment which of all `names` it is in; names that are new are added to them."""
    numbers = [names.setdefault(name, len(names)) for name in found.footer.namespaces]
    return np.take(np.array(numbers, np.uint32), found.footer.rows["namespace"])


def _best_first(rows: Rows) -> npt.NDArray[np.intp]:
    """The order of digests; of each the highest version first, its parts in order, of each the oldest record first."""
    return np.lexsort(
        (
            rows["sequence"],
            rows["part"],
            ~rows["root"],
            ~rows["writer"],
            ~rows["clock"],
            rows["digest"][:, 1],
            rows["digest"][:, 0],
        )
    )


def _winners(rows: Rows) -> tuple[Which, Which]:
    """For rows in that order: which belong to a version that has all its parts; and which are the first record of a
    part of the highest such version."""
    new_object = _differ(rows["digest"][:, 0]) | _differ(rows["digest"][:, 1])
    new_version = new_object.copy()
    for name in ("clock", "writer", "root"):
        new_version |= _differ(rows[name])
    new_part = new_version | _differ(rows["part"])
    # Numbers of versions and objects, counted from 0: of each row, and of each version the object's.
    version = np.cumsum(new_version) - 1
    first = np.flatnonzero(new_version)
    objects = (np.cumsum(new_object) - 1)[first]
    whole = np.bincount(version, new_part, len(first)) == parts_of(rows[first])
    chosen = np.zeros(len(first), bool)
    _, highest = np.unique(objects[whole], return_index=True)
    chosen[np.flatnonzero(whole)[highest]] = True
    return whole[version], chosen[version] & new_part


def _differ(column: npt.NDArray[np.generic]) -> Which:
    """Which values are not the one before them."""
    differ = np.ones(len(column), bool)
    differ[1:] = column[1:] != column[:-1]
    return differ


def _newest(rows: Rows, kept: Which, limit: int) -> Which:
    """Of the objects that are kept those written last, as many as have no more records than `limit`."""
    if int(kept.sum()) <= limit:
        return kept
    places = np.flatnonzero(kept)
    which = np.cumsum(rows["part"][places] == 0) - 1
    sequences = np.zeros(which[-1] + 1, np.uint64)
    np.maximum.at(sequences, which, rows["sequence"][places])
    newest_first = np.argsort(~sequences)
    fitting = np.cumsum(np.bincount(which)[newest_first]) <= limit
    chosen = np.zeros(len(sequences), bool)
    chosen[newest_first[fitting]] = True
    found = np.zeros(len(rows), bool)
    found[places] = chosen[which]
    return found
