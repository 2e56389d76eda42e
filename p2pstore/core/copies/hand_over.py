"""Handing over what a peer alone holds, before it leaves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.coldest import SPREAD_SECONDS, MemberRooms
from p2pstore.core.copies.own_copies import OwnCopies, held_here, other_firm_copies
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.segment_layout import GRANULE_BYTES, round_up
from p2pstore.objects import MIB

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.ssd_tier.index import ColdEntry

AT_ONCE: Final = 8
BEGUN_PER_STEP: Final = 2
"""To find whom to give an object to takes 2 ms among 5,000 members."""
UNDER_WAY_BYTES: Final = 256 * MIB
"""At most, of all that are being handed over; a single object may be larger."""
MAX_ORDERED: Final = 32_768
"""More than a leave ever has time for; of more than twice as many the last in order are left out."""
MAX_TARGETS: Final = 4
"""Peers that are asked to take an object, one after the other."""


@dataclass(slots=True)
class HandedOver:
    """Counts of the objects handed over and of those that this peer alone still holds, with their bytes."""

    objects: int = 0
    bytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0


class HandOverOperation(Operation):
    """Have the last copies that this peer holds copied by others. The result is a `HandedOver`, also when the
    operation is cancelled: then it says how far it came.

    Last copies are those that no other reachable peer means to keep. Pinned objects go first, then objects in memory,
    the most read ones first, then those on the SSD alone. Targets are peers with free memory, in rendezvous order;
    else other peers, which must evict. An object on the SSD alone evicts nothing.
    """

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core)
        self._rooms = _Rooms(core)
        self._walk = OwnCopies(core, replicated_only=False)
        self._order: list[tuple[int, bool, float, bytes, int]] = []
        """A heap of the objects to hand over; digest and length are the last fields."""
        self._under_way: dict[bytes, int] = {}
        self.handed_over = HandedOver()
        """How far it is."""
        self._beginning = False
        self._spread_at = 0.0

    def start(self, now: float) -> None:
        if not self._rooms.all(now):
            self.handed_over.left_objects = self.core.gossip.log.count
            self.handed_over.left_bytes = self.core.segment.used_bytes
            self.finish(self.handed_over, now)
            return
        self._look_on(now)

    def wake(self, now: float) -> None:
        if not self._walk.done:
            self._look_on(now)
        else:
            self._go_on(now)

    def cancel(self, now: float) -> None:
        """End at the deadline or without a waiting caller: the remaining objects are not handed over."""
        self.finish(self.handed_over, now)

    # --- what there is -----------------------------------------------------------------------

    def _look_on(self, now: float) -> None:
        """Look for some more last copies."""
        core = self.core
        digests = self._walk.step()
        if core.gossip.partitions.knows_all or not digests:
            self._looked(digests, None, now)
            return
        lookup = LookupOperation(core, digests, ask_always=True)
        self.run(lookup, partial(self._looked, digests), now)

    def _looked(self, digests: list[bytes], result: Any, now: float) -> None:
        for digest in digests:
            held = held_here(self.core, digest, now)
            if held is not None and self._is_last_copy(held, now):
                heapq.heappush(self._order, self._place_of(held, now))
                self.handed_over.left_objects += 1
                self.handed_over.left_bytes += held.length
        if len(self._order) > 2 * MAX_ORDERED:
            self._order = heapq.nsmallest(MAX_ORDERED, self._order)  # sorted, and so a heap
        self.set_alarm(now)

    def _is_last_copy(self, held: ObjectEntry | ColdEntry, now: float) -> bool:
        if held.soft:
            return False
        others = other_firm_copies(self.core, held, now)
        return others is not None and not any(copy.reachable for copy in others)

    def _place_of(
        self, held: ObjectEntry | ColdEntry, now: float
    ) -> tuple[int, bool, float, bytes, int]:
        if isinstance(held, ObjectEntry):
            unused_seconds = max(0.0, self.core.unix(now) - held.last_access)
            heat = (1 + held.hits) / (1.0 + unused_seconds)
        else:
            heat = float(held.hits)
        only_on_ssd = not isinstance(held, ObjectEntry)
        return -int(held.pin), only_on_ssd, -heat, held.digest, held.length

    # --- handing over ------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        if self._beginning or self.done:  # one of those that begin ended at once
            return
        self._beginning = True
        for _ in range(BEGUN_PER_STEP):
            if not self._order or self._is_full:
                break
            self._begin(*heapq.heappop(self._order)[-2:], now)
        self._beginning = False
        if self._order and not self._is_full:
            self.set_alarm(now)
        if self._order or self._under_way:
            return
        if now >= self._spread_at:
            self.finish(self.handed_over, now)
        else:
            self.set_alarm(self._spread_at)

    @property
    def _is_full(self) -> bool:
        under_way_bytes = sum(self._under_way.values())
        return len(self._under_way) >= AT_ONCE or under_way_bytes >= UNDER_WAY_BYTES

    def _begin(self, digest: bytes, length: int, now: float) -> None:
        held = held_here(self.core, digest, now)
        if held is None or not self._is_last_copy(held, now):
            self._count_off(length)
            return
        only_on_ssd = not isinstance(held, ObjectEntry)
        targets = self._rooms.choose(digest, length, now, only_free=only_on_ssd)
        if not targets:
            return
        self._under_way[digest] = length
        if isinstance(held, ObjectEntry):
            self._replicate(targets, held, now)
        else:
            load = FetchOperation(self.core, digest, only_here=True)
            self.run(load, partial(self._loaded, digest, targets), now)

    def _loaded(self, digest: bytes, targets: list[PeerId], result: Any, now: float) -> None:
        if isinstance(result, ObjectEntry):
            self._replicate(targets, result, now)
        else:
            del self._under_way[digest]
            self._go_on(now)

    def _replicate(self, targets: list[PeerId], entry: ObjectEntry, now: float) -> None:
        operation = ReplicateOperation(self.core, entry, 2, candidates=targets)

        def replicated(result: Any, at: float) -> None:
            del self._under_way[entry.digest]
            if isinstance(result, int) and result > 1:
                self.handed_over.objects += 1
                self.handed_over.bytes += entry.length
                self._count_off(entry.length)
                self._spread_at = at + SPREAD_SECONDS
            self._go_on(at)

        self.run(operation, replicated, now)

    def _count_off(self, length: int) -> None:
        self.handed_over.left_objects -= 1
        self.handed_over.left_bytes -= length


class _Rooms(MemberRooms):
    """Chooses among them."""

    def choose(self, digest: bytes, length: int, now: float, *, only_free: bool) -> list[PeerId]:
        """Targets for an object of that length, best first; its bytes are taken off the first one's free memory."""
        rooms = self.all(now)
        needed = round_up(length, GRANULE_BYTES) + GRANULE_BYTES  # with a trailer, as a rule
        ranked = [
            room
            for peer_id in self._core.gossip.rank(digest)
            if (room := rooms.get(peer_id)) is not None and room.capacity_bytes >= needed
        ]
        chosen = [room for room in ranked if room.free_bytes >= needed]
        if not only_free:
            chosen += [room for room in ranked if room.free_bytes < needed]
        if chosen:
            chosen[0].free_bytes -= needed
        return [room.peer for room in chosen[:MAX_TARGETS]]
