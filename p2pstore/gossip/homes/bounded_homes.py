"""Homes chosen such that none answers for much more than its share: consistent hashing with bounded loads
(Mirrokni, Thorup and Zadimoghaddam 2016), as a stable assignment (Gale and Shapley 1962). Pure.

By weight alone, of thousands of members a few are home to several partitions where most have one or none; and every
change in each of these is a message to its home, so such members drown first. Therefore a member has places for 1.25
times its share. A partition wants the members with the highest weights for it, a member the partitions for which it
has the highest: then the heaviest pair that both still have room for belongs together, and so on.

The share is hardly ever a whole number: each member rounds it up or down by its own name, so that one member more
takes a place from few of them.
"""

from __future__ import annotations

from typing import Final

import numpy
from numpy.typing import NDArray

ROOM: Final = 1.25
"""Places for partitions in the whole cluster, in proportion to how many are needed."""
PAIRS_AT_ONCE: Final = 2048
"""Most are never looked at: the heaviest find homes for all partitions."""
Words = NDArray[numpy.uint64]


def places_of(members: Words, member_count: int, needed: int) -> NDArray[numpy.intp]:
    """How many partitions each of these members may be home to, when all `member_count` members have to be `needed`
    times, together: at least one."""
    rounding = members.astype(numpy.float64) / 2.0**64
    places = (ROOM * needed / member_count + rounding).astype(numpy.intp)
    return numpy.maximum(places, 1)


def choose_homes(names: Words, weights: Words, home_count: int, member_count: int) -> Words:
    """`home_count` homes for each partition, or all members when they are fewer; the first row has the best.

    `names` and `weights` have a column for each partition: its candidates in the order of weight, at least so many.
    A partition with too few candidates that have room has the best of the others besides.
    """
    best = names[:home_count]
    if not member_count:
        return best
    needed = best.size
    members, shares = numpy.unique(best, return_counts=True)
    if (shares <= places_of(members, member_count, needed)).all():
        return best
    held, missing = _assign(names, weights, len(best), member_count)
    held |= ~held & (numpy.cumsum(~held, axis=0) <= missing)
    homes = numpy.zeros_like(best)
    row, column = numpy.nonzero(held)
    homes[numpy.cumsum(held, axis=0)[row, column] - 1, column] = names[row, column]
    return homes


def _assign(
    names: Words, weights: Words, home_count: int, member_count: int
) -> tuple[NDArray[numpy.bool_], NDArray[numpy.intp]]:
    """Which candidates are homes, and how many homes each partition lacks."""
    depth, partition_count = names.shape
    needed = home_count * partition_count
    order = numpy.argsort(weights, axis=None)[::-1]
    free: dict[int, int] = {}
    wanted = [home_count] * partition_count
    held = numpy.zeros(depth * partition_count, numpy.bool_)
    for start in range(0, order.size, PAIRS_AT_ONCE):
        some = order[start : start + PAIRS_AT_ONCE]
        members = names.ravel()[some]
        places = places_of(members, member_count, home_count * partition_count).tolist()
        partitions = (some % partition_count).tolist()
        for pair, member, place, partition in zip(
            some.tolist(), members.tolist(), places, partitions, strict=True
        ):
            if wanted[partition] and (room := free.get(member, place)):
                wanted[partition] -= 1
                free[member] = room - 1
                held[pair] = True
                needed -= 1
        if not needed:
            break
    return held.reshape(names.shape), numpy.array(wanted, numpy.intp)
