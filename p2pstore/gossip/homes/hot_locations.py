"""Keys that many look for just now: where they are is passed on, so that their homes are not asked by everybody.
Pure.

Each peer counts what it is asked for, and what it looks for itself. Counts are halved every few seconds; a key
with enough of them is hot. What is passed on goes into the receiver's cache (`location_cache`), like the answer
of a home.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.locations.views import Location, Position
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.records import LOCATION_BYTES, Member

HALVING_SECONDS: Final = 5.0
HOT_USES: Final = 8
MAX_COUNTED: Final = 10_000
MAX_HOT: Final = 64
"""Locations in one message."""
HOLDERS_OF_EACH: Final = 4

_REMOVED: Final = 0x80
_ROW: Final = struct.Struct(f"<QQQ{LOCATION_BYTES}s")


class HotKeys:
    """Counts uses of keys."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._halved_at = -math.inf

    def note(self, digest: bytes, now: float) -> None:
        """Somebody looked for the key, and it was found."""
        if now >= self._halved_at + HALVING_SECONDS:
            self._halved_at = now
            self._uses = {key: uses >> 1 for key, uses in self._uses.items() if uses > 1}
        if digest in self._uses:
            self._uses[digest] += 1
        elif len(self._uses) < MAX_COUNTED:
            self._uses[digest] = 1

    def hottest(self) -> list[bytes]:
        """The hot ones, hottest first; no more than fit into a message."""
        hot = [(uses, digest) for digest, uses in self._uses.items() if uses >= HOT_USES]
        return [digest for _, digest in sorted(hot, reverse=True)[:MAX_HOT]]


def pack_hot(locations: Iterable[Location]) -> bytes:
    """66 bytes each: `u64 member | u64 incarnation | u64 sequence | location record`."""
    return b"".join(
        _ROW.pack(each.member, each.incarnation, each.sequence, each.record.encode())
        for each in locations
    )


def unpack_hot(packed: bytes) -> Iterator[tuple[Member, Position, bytes]]:
    """(member, place in its log, packed record). Raises `ProtocolError` for nonsense, before the first."""
    count, rest = divmod(len(packed), _ROW.size)
    if rest or count > MAX_HOT:
        raise ProtocolError(f"hot locations of {len(packed)} bytes")
    rows = list(_ROW.iter_unpack(packed))
    for _, incarnation, sequence, record in rows:
        if record[-1] & _REMOVED:
            raise ProtocolError("a hot location that is none any more")
        if max(incarnation, sequence) >= MAX_INCARNATION:
            raise ProtocolError("a hot location at an impossible place of a log")
    return ((member, (first, second), record) for member, first, second, record in rows)
