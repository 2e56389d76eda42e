"""What this peer holds, gone through in steps; and which copies of it others hold.

A peer's own log says what it has in memory and on its SSD, as it says it to the others. So nothing has to be kept for
going through it but a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from p2pstore.core.core_effects import KnownCopy
from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.gossip.locations.location_index import digests_of
from p2pstore.gossip.records import Tier
from p2pstore.location_table import RECORD

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry
    from p2pstore.ssd_tier.index import ColdEntry

LOOKED_AT: Final = 256
"""Copies at a time: who else holds one takes some 10 us to find out."""
PASSED_OVER: Final = 64
"""As many times that many records that are not looked for are passed over at a time, at 0.1 us each."""
_SOFT: Final = 0x04
_MORE_REPLICAS: Final = 0x18
"""In the flags of a location record: not 0 when more than one copy is wanted."""


class OwnCopies:
    """One walk through the firm copies that this peer holds when it begins. What comes meanwhile is left out, what
    goes may be met all the same, and nothing else is missed."""

    def __init__(self, core: PeerCore, *, replicated_only: bool) -> None:
        self._log = core.gossip.log
        self._replicated_only = replicated_only
        self._left = self._log.count

    @property
    def done(self) -> bool:
        """Whether there is nothing left."""
        return self._left == 0

    def end(self) -> None:
        """Leave out the rest."""
        self._left = 0

    def step(self, count: int = LOOKED_AT) -> list[bytes]:
        """The digests of some more copies, at most `count`. None may be left although it is not `done`."""
        for _ in range(PASSED_OVER):
            found = self._next(count)
            if found or self.done:
                return found
        return []

    def _next(self, count: int) -> list[bytes]:
        """Those among the next records. From the last to the first: what goes is replaced by the last record, which
        was met."""
        stop = min(self._left, self._log.count)
        self._left = max(0, stop - count)
        packed = self._log.records(self._left, stop)
        flags = np.frombuffer(packed, RECORD)["flags"]
        wanted = (flags & _SOFT) == 0
        if self._replicated_only:
            wanted &= (flags & _MORE_REPLICAS) != 0
        digests = digests_of(packed)
        return [digests[place] for place in np.flatnonzero(wanted).tolist()]


def held_here(core: PeerCore, digest: bytes, now: float) -> ObjectEntry | ColdEntry | None:
    """What this peer serves under a digest, from memory or from its SSD."""
    return core.objects.find(digest, now) or core.cold.find(digest, now)


def are_kept_elsewhere(core: PeerCore, entries: Sequence[ObjectEntry], now: float) -> list[bool]:
    """Of each object whether a living peer holds a firm copy of the same version in memory, and comes before this one
    in rendezvous order: of those that hold it, one does not give it up because of the others."""
    mentioned = core.gossip.locations.mentioned({entry.digest for entry in entries})
    return [entry.digest in mentioned and _is_kept_elsewhere(core, entry, now) for entry in entries]


def _is_kept_elsewhere(core: PeerCore, entry: ObjectEntry, now: float) -> bool:
    mine = (entry.version.clock, entry.version.writer)
    my_weight = -1
    for holding in core.gossip.holders(entry.digest, now):
        record = holding.record
        same = (record.version.clock, record.version.writer) == mine
        away = holding.hidden or holding.hearsay
        if not same or record.soft or away or record.tier is Tier.SSD:
            continue
        if my_weight < 0:
            my_weight = weight(core.member, entry.digest)
        if weight(holding.member, entry.digest) > my_weight:
            return True
    return False


def other_firm_copies(
    core: PeerCore, held: ObjectEntry | ColdEntry, now: float
) -> list[KnownCopy] | None:
    """Copies of what this peer holds that others mean to keep, those that cannot be reached among them. None when
    somebody says to have a newer version: then this one goes."""
    namespace = core.namespace_digest(held.namespace)
    mine = (held.version.clock, held.version.writer)
    others = [
        (copy, (copy.record.version.clock, copy.record.version.writer))
        for copy in core.copies.known(held.digest, now, namespace)
        if not copy.local
    ]
    newer = (copy for copy, version in others if version > mine and copy.reachable)
    if any(copy.proved and not copy.hearsay for copy in newer):
        return None
    return [copy for copy, version in others if version == mine and not copy.record.soft]
