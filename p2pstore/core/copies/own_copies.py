"""Walks, in steps, over the objects that this peer holds; and the copies of them that other peers hold.

A peer's own log says what it has in memory and on its SSD, as it says it to the others. So nothing has to be kept for
going through it but a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from p2pstore.core.operation import CheckObject, KnownCopy, Operation
from p2pstore.gossip.homes.partition_homes import weight
from p2pstore.gossip.locations.location_index import digests_of
from p2pstore.gossip.records import Tier
from p2pstore.location_table import RECORD
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import KIB, chunk_sums, root_checksum
from p2pstore.transfer.peer_messages import CopyChecked

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry
    from p2pstore.ssd_tier.index import ColdEntry

LOOKED_AT: Final = 256
"""Copies at a time: finding the other holders of one takes some 10 us."""
PASSED_OVER: Final = 64
"""Ranges of `LOOKED_AT` records that one step skips while none is wanted, at 0.1 us a record."""
_SOFT: Final = 0x04
_MORE_REPLICAS: Final = 0x18
"""In the flags of a location record: not 0 when more than one copy is wanted."""


class OwnCopies:
    """One walk over the firm copies that this peer holds when the walk begins. Objects added meanwhile are left out,
    objects removed meanwhile may still be returned, and no other object is missed."""

    def __init__(self, core: PeerCore, *, replicated_only: bool) -> None:
        self._log = core.gossip.log
        self._replicated_only = replicated_only
        self._left = self._log.count

    @property
    def done(self) -> bool:
        return self._left == 0

    def end(self) -> None:
        self._left = 0

    def step(self, count: int = LOOKED_AT) -> list[bytes]:
        """The digests of some more copies, at most `count`. None may be left although it is not `done`."""
        for _ in range(PASSED_OVER):
            found = self._next(count)
            if found or self.done:
                return found
        return []

    def _next(self, count: int) -> list[bytes]:
        """The wanted ones among the next `count` records, from the last to the first: a removed record is replaced by
        the last one, which the walk has passed."""
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
    """The entry that this peer serves under a digest, from memory or from its SSD."""
    return core.objects.find(digest, now) or core.cold.find(digest, now)


def are_kept_elsewhere(core: PeerCore, entries: Sequence[ObjectEntry]) -> list[bool]:
    """Of each object whether a living peer holds a firm copy of the same version in memory, and comes before this one
    in rendezvous order: of those that hold it, one does not give it up because of the others."""
    mentioned = core.gossip.directory.mentioned({entry.digest for entry in entries})
    return [entry.digest in mentioned and _is_kept_elsewhere(core, entry) for entry in entries]


def _is_kept_elsewhere(core: PeerCore, entry: ObjectEntry) -> bool:
    mine = (entry.version.clock, entry.version.writer)
    my_weight = -1
    for holding in core.gossip.directory.holders(entry.digest):
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
    """Copies of an own object that other peers mean to keep, unreachable peers included. None when a peer announces a
    newer version: then this one goes."""
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


INLINE_BYTES: Final = 4 * KIB
"""Values up to this are compared at once, in about 3 us; longer ones by the shell, in a thread."""


class CheckOperation(Operation):
    """Compare an object's bytes in memory with its checksums, unless it was found good (`again`: always), and withdraw
    it when they differ. The result is `CopyChecked`: whether there is a good copy, as one on the SSD alone counts."""

    def __init__(self, core: PeerCore, digest: bytes, *, again: bool = False) -> None:
        super().__init__(core)
        self._digest = digest
        self._again = again

    def start(self, now: float) -> None:
        entry = self.core.objects.find(self._digest, now)
        if entry is None or (entry.verified and not self._again):
            self.checked(now)
            return
        self._again = False
        self.core.checks.begin(self, entry, now)

    def checked(self, now: float) -> None:
        """The comparison has ended; a damaged object is removed by now."""
        core = self.core
        good = core.copies.own_location(self._digest, now) is not None
        self.finish(CopyChecked(good, core.incarnation, core.gossip.log.sequence), now)


class Checks:
    """Comparisons under way. Each object is compared by one at a time, however many wait for it."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._waiting: dict[int, list[CheckOperation]] = {}
        """By slot number: the object in it is held until it is compared."""

    def begin(self, operation: CheckOperation, entry: ObjectEntry, now: float) -> None:
        """Compare; `operation.checked` is called at the end."""
        if entry.length <= INLINE_BYTES:
            payload = self._core.segment.payload(entry)
            self.judge(entry, chunk_sums(payload), now)
            operation.checked(now)
            return
        waiting = self._waiting.get(entry.slot)
        if waiting is not None:
            waiting.append(operation)
            return
        self._waiting[entry.slot] = [operation]
        self._core.segment.references.acquire(entry)
        self._core.emit(CheckObject(entry))

    def ended(self, entry: ObjectEntry, sums: bytes, now: float) -> None:
        """The outcome of a `CheckObject`: the checksums that the bytes give."""
        self._core.segment.references.let_go(entry, was_used=False)
        self.judge(entry, sums, now)
        for operation in self._waiting.pop(entry.slot):
            if not operation.done:
                operation.checked(now)

    def judge(self, entry: ObjectEntry, sums: bytes, now: float) -> None:
        """Compare the checksums of an object's bytes. A good object stays, and its slot and trailer are restored where
        a client wrote over them; a damaged one is withdrawn."""
        live = entry.state is SlotState.LIVE
        good = root_checksum(entry.length, sums) == entry.version.root
        if good and (not live or self._core.segment.restoring.object(entry, sums)):
            entry.verified = True
        elif live:
            self._core.notes.add(
                "spoilt",
                f"the bytes of {entry.key!r} are spoilt in this peer's memory, or were put with false checksums: this "
                "copy is given up",
                is_error=True,
            )
            self._core.objects.drop_spoilt(entry, now)
