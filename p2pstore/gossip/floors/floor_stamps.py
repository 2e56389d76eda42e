"""How far floors are known, writer by writer: a stamp of the hybrid clock for each. Pure.

Two such tables exist in every peer. *Seen*: it knew, at some time, every floor that the writer made up
to the stamp. *Horizon*: floors that the writer made up to the stamp were dropped, and no peer takes them
in again. Both only rise, and two peers' tables meet by the higher stamp of each writer.

One stamp for all writers would not do. Two halves of a split cluster are each in perfect agreement
within, and after the split each lacks floors of the other's writers: that shows only writer by
writer. So it is with writers whose clocks are slow, or who were away with a floor that no other peer has heard of.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
import xxhash

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import Member

Stamps = dict[Member, int]
"""Writer -> stamp. A writer that is not named stands at 0."""

MAX_WRITERS: Final = 16_384
"""More than a cluster has members: those of a month of restarts without a state directory are among them."""
MAX_PACKED_BYTES: Final = MAX_WRITERS * 16
_ENTRY: Final = struct.Struct("<QQ")
_LIMIT: Final = 1 << 64


def raise_stamps(stamps: Stamps, others: Mapping[Member, int]) -> bool:
    """Raise `stamps` to the higher ones of `others`, leaving out the oldest beyond 16,384. Whether that changed any."""
    raised = {member: stamp for member, stamp in others.items() if stamp > stamps.get(member, 0)}
    if not raised:
        return False
    if len(stamps) + len(raised) <= MAX_WRITERS:
        stamps.update(raised)
        return True
    merged = without_older({**stamps, **raised}, 0)
    if merged == stamps:
        return False
    stamps.clear()
    stamps.update(merged)
    return True


def lower_stamps(stamps: Mapping[Member, int], limit: int, by: int) -> Stamps:
    """The same with `by` taken from stamps above `limit`, and none above it left."""
    return {
        member: min(limit, max(0, stamp - by)) if stamp > limit else stamp
        for member, stamp in stamps.items()
    }


def newest_unseen(horizon: Mapping[Member, int], seen: Mapping[Member, int]) -> int:
    """The highest clock that a floor may have which was dropped (`horizon`) before it was seen; 0 when
    none can exist. Copies whose versions are not above it may have been removed."""
    return max((stamp for member, stamp in horizon.items() if stamp > seen.get(member, 0)), default=0)


def without_older(stamps: Mapping[Member, int], oldest: int) -> Stamps:
    """The stamps above `oldest`; of more than 16,384 the newest, the same ones in every peer."""
    kept = {member: stamp for member, stamp in stamps.items() if stamp > oldest}
    if len(kept) > MAX_WRITERS:
        newest = sorted(kept.items(), key=lambda item: (item[1], item[0]), reverse=True)
        kept = dict(newest[:MAX_WRITERS])
    return kept


def pack_stamps(stamps: Mapping[Member, int]) -> bytes:
    """16 bytes a writer, in order of the writers: equal tables give equal bytes."""
    table = np.empty((len(stamps), 2), "<u8")
    table[:, 0] = np.fromiter(stamps.keys(), np.uint64, len(stamps))
    table[:, 1] = np.fromiter(stamps.values(), np.uint64, len(stamps))
    return table[np.argsort(table[:, 0])].tobytes()


def unpack_stamps(packed: bytes) -> Stamps:
    """Raises `ProtocolError` for too many entries, or entries that are not whole."""
    if len(packed) > MAX_PACKED_BYTES or len(packed) % _ENTRY.size:
        raise ProtocolError(f"a table of floor stamps of {len(packed):,} bytes")
    return dict(_ENTRY.iter_unpack(packed))


def hash_stamps(stamps: Mapping[Member, int]) -> int:
    """A hash of the table, whatever its order; 0 for an empty one."""
    return xxhash.xxh3_64_intdigest(pack_stamps(stamps)) if stamps else 0


def stamps_as_text(stamps: Mapping[Member, int]) -> dict[str, int]:
    """For a JSON file: writers in hexadecimal."""
    return {f"{member:016x}": stamp for member, stamp in sorted(stamps.items())}


def stamps_from_text(text: Mapping[str, int]) -> Stamps:
    """The reverse. Raises `ValueError` for what `stamps_as_text` never wrote."""
    stamps = {int(member, 16): stamp for member, stamp in text.items()}
    if any(not (0 <= member < _LIMIT and 0 <= stamps[member] < _LIMIT) for member in stamps):
        raise ValueError("a floor stamp is out of range")
    return stamps
