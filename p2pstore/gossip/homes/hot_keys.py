"""Hot keys: their locations are passed on into others' caches, so that their homes are not asked by all members. Pure.

Each peer counts what it is asked for and looks for; counts are halved every few seconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.homes.known_locations import KnownLocations, Word
from p2pstore.gossip.homes.partition_homes import DirectoryMode
from p2pstore.gossip.locations.views import Location, Position
from p2pstore.gossip.members.member_table import MAX_INCARNATION, MemberTable
from p2pstore.gossip.records import LOCATION_BYTES, Member, PeerId, member_of

HOT_SECONDS: Final = 0.5

HOT_AGAIN_SECONDS: Final = 10.0
"""Shortest time between two messages that tell of hot keys, and between two that tell one peer."""
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
        """The key was looked for, and found."""
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


class HotKeyNews:
    """Tells others of hot keys, and learns of theirs. Nothing happens while this peer follows all logs."""

    def __init__(
        self,
        mode: DirectoryMode,
        members: MemberTable,
        known: KnownLocations,
        keeps_partitions: Callable[[Member], bool],
    ) -> None:
        self.keys = HotKeys()
        self._mode = mode
        self._members = members
        self._known = known
        self._keeps_partitions = keeps_partitions
        self._told_at = -math.inf
        self._told: dict[PeerId, float] = {}

    def used(self, digest: bytes, now: float) -> None:
        """A key was looked for, here or by asking this peer, and found."""
        if not self._mode.follows_logs:
            self.keys.note(digest, now)

    def tell(self, peer_id: PeerId, now: float) -> bytes:
        """News of hot keys for a peer."""
        due = max(self._told_at + HOT_SECONDS, self._told.get(peer_id, -math.inf) + HOT_AGAIN_SECONDS)
        if self._mode.follows_logs or now < due or not self._keeps_partitions(member_of(peer_id)):
            return b""
        found: list[Location] = []
        for digest in self.keys.hottest():
            found += self._known.first_hand(digest, now)[:HOLDERS_OF_EACH]
        if found:
            self._told_at = now
            self._told = {each: at for each, at in self._told.items() if at + HOT_AGAIN_SECONDS > now}
            self._told[peer_id] = now
        return pack_hot(found[:MAX_HOT])

    def learn(self, hot: Iterable[tuple[Member, Position, bytes]], now: float) -> None:
        """Take in what another peer tells of hot keys."""
        if self._mode.follows_logs:
            return
        for member, position, record in hot:
            state = self._members.resolve(member)
            if state is not None and state.alive and member != self._members.own.member:
                self._known.heard(member, position, record, now, word=Word.HEARSAY)
