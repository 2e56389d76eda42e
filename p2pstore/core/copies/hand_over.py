"""Last copies go to peers with room for them: before memory is short (`Offers`), and before this peer leaves. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from p2pstore.core.copies.own_copies import OwnCopies, held_here, other_firm_copies
from p2pstore.core.copies.replicate import ReplicateOperation
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId
from p2pstore.memory.entries import ObjectEntry
from p2pstore.memory.policies.interface import EvictionPolicy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import GRANULE_BYTES, Pin, SlotState, round_up
from p2pstore.objects import MIB

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.ssd_tier.index import ColdEntry

READY_PART: Final = 32
"""This part of memory is to be free, or such that losing it costs nothing."""
MUCH_OLDER: Final = 2.0
"""Factor on the time since the last use. With 1.25 peers of equal load offer one another half of what they evict."""
MAX_OLDEST: Final = 16
"""Peers whose victims are the oldest, among which a target is chosen."""
MAX_OFFERED: Final = 64
MAX_OFFERED_BYTES: Final = 16 * MIB
"""At a time; a larger object goes alone."""
WEIGHED: Final = 256
"""Objects that one look weighs, at a few microseconds each."""
LOOK_SECONDS: Final = 0.25
"""Between two looks while there is nothing to offer."""
SPREAD_SECONDS: Final = 0.5
"""Time in which gossip tells nearly all peers of a new holder."""
ROOMS_SECONDS: Final = 1.0
"""Time for which the memory announced by other peers is trusted."""


PeerName = TypeVar("PeerName")


@dataclass(slots=True, eq=False)
class PeerMemory(Generic[PeerName]):
    """A peer's memory as it told last (`said` stands for when), less what it was given since. Of what would go there,
    the first was used last at `coldest` (Unix seconds, 0: not told)."""

    peer: PeerName
    capacity_bytes: int
    free_bytes: int
    coldest: float = 0.0
    said: tuple[int, int] = (0, 0)
    displaced_bytes: int = 0

    @property
    def spare_bytes(self) -> int:
        """Free memory beyond the reserve of the peer itself."""
        return self.free_bytes - self.capacity_bytes // READY_PART

    @property
    def older_bytes(self) -> int:
        """How much may be displaced there before the peer tells anew."""
        return self.capacity_bytes // READY_PART - self.displaced_bytes if self.coldest else 0

    def refused(self) -> None:
        """It takes nothing before it tells anew."""
        self.free_bytes, self.displaced_bytes = 0, self.capacity_bytes


class PeerMemories(Generic[PeerName]):
    """Chooses among the rooms of other peers."""

    def __init__(self, rooms: Iterable[PeerMemory[PeerName]], rng: Random) -> None:
        known = list(rooms)
        self._rng = rng
        self._spacious = [room for room in known if room.spare_bytes > 0]
        told = (room for room in known if room.older_bytes > 0)
        self._oldest = heapq.nsmallest(MAX_OLDEST, told, key=lambda room: room.coldest)

    def __bool__(self) -> bool:
        return bool(self._spacious or self._oldest)

    def take(self, length: int, idle_seconds: float, unix: float) -> PeerMemory[PeerName] | None:
        """A peer with room for an object of this idle time: the better of two at random, since other peers choose as
        well."""
        while self._spacious:
            room = max(self._two(self._spacious), key=lambda each: each.spare_bytes)
            if room.spare_bytes >= length:
                room.free_bytes -= length
                return room
            self._spacious.remove(room)
        before = unix - MUCH_OLDER * max(0.0, idle_seconds)
        older = [r for r in self._oldest if r.coldest < before and r.older_bytes >= length]
        if not older:
            return None
        room = min(self._two(older), key=lambda each: each.coldest)
        room.displaced_bytes += length
        return room

    def _two(self, rooms: list[PeerMemory[PeerName]]) -> list[PeerMemory[PeerName]]:
        return self._rng.sample(rooms, min(2, len(rooms)))


def choose_offers(
    coldest: Iterable[ObjectEntry],
    short_bytes: int,
    is_last: Callable[[ObjectEntry], bool],
    rooms: PeerMemories[PeerName],
    policy: EvictionPolicy,
    unix: float,
) -> list[tuple[ObjectEntry, PeerMemory[PeerName]]]:
    """The objects to offer, and where to, among those that would go when `short_bytes` more are needed. `coldest`: all
    in the order of eviction. `is_last`: whether an object is a last copy that may be offered."""
    chosen: list[tuple[ObjectEntry, PeerMemory[PeerName]]] = []
    chosen_bytes = 0
    for entry in coldest:
        if short_bytes <= 0 or len(chosen) == MAX_OFFERED:
            break
        short_bytes -= entry.extent_bytes
        if not is_last(entry):
            continue
        if chosen and chosen_bytes + entry.extent_bytes > MAX_OFFERED_BYTES:
            break
        room = rooms.take(entry.extent_bytes, unix - policy.stays_until(entry), unix)
        if room is not None:
            chosen.append((entry, room))
            chosen_bytes += entry.extent_bytes
    return chosen


def coldest_use(segment: Segment) -> int:
    """The worth of the object that would go first, of those that are no copies of others: about when it was used last,
    in Unix seconds, as the policy has it. 0 when there is none."""
    first = next(segment.room.coldest(cheap=False), None)
    if first is None or first.pin is not Pin.NONE:
        return 0
    return int(segment.objects.order.policy.stays_until(first))


class MemberRooms:
    """The memory of the other members, as they announce it."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._rooms: dict[PeerId, PeerMemory[PeerId]] = {}
        self._read_at = -math.inf

    def all(self, now: float) -> dict[PeerId, PeerMemory[PeerId]]:
        """By peer: of all that offer memory."""
        if now >= self._read_at + ROOMS_SECONDS:
            self._read_at, known, self._rooms = now, self._rooms, {}
            for state in self._core.gossip.membership.others():
                said = state.record_incarnation, state.record_sequence
                room = known.get(state.peer_id)
                if state.memory_capacity and (room is None or room.said != said):
                    free = state.memory_capacity - state.memory_used
                    coldest = state.memory_coldest
                    room = PeerMemory(state.peer_id, state.memory_capacity, free, coldest, said)
                if room is not None and state.memory_capacity:
                    self._rooms[state.peer_id] = room
        return self._rooms

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


class Offers:
    """Offers last copies to other peers before memory needs their room; `bytes_per_second` bounds what is copied.

    A put never waits for another peer. A last copy goes to a peer with free memory, else to one whose own victims were
    unused for much longer, where it displaces these. That peer pulls, verifies and announces it; then the copy here is
    a soft one, which goes first. A copy that came from another peer is not offered until it was read: none travels on
    unread.
    """

    def __init__(self, core: PeerCore, bytes_per_second: float) -> None:
        self._core = core
        self._bytes_per_second = bytes_per_second
        self._members = MemberRooms(core)
        self._told: dict[PeerId, PeerMemory[PeerId]] = {}
        self._rooms: PeerMemories[PeerId] = PeerMemories((), core.rng)
        self._under_way = 0
        self._taken: dict[ObjectEntry, float] = {}
        """Copied elsewhere; until then, as not all peers have heard of that, the copies here are firm."""
        self._is_short = False
        self._next_look = self._rested_at = 0.0

    @property
    def due_at(self) -> float:
        """A shortage is found with any tick."""
        look = self._next_look if self._is_short and not self._under_way else math.inf
        return min(look, next(iter(self._taken.values()), math.inf))

    def tick(self, now: float) -> None:
        while self._taken and now >= next(iter(self._taken.values())):
            self._end(next(iter(self._taken)), now)
        segment = self._core.segment
        short_bytes = segment.data_bytes // READY_PART - segment.free_bytes
        if short_bytes <= 0 or self._under_way or now < self._next_look or self._core.closing:
            self._is_short &= short_bytes > 0
            return
        short_bytes -= segment.room.cheap_bytes
        self._is_short = short_bytes > 0
        self._next_look = now + LOOK_SECONDS
        if not self._is_short:
            self._next_look = now
            return
        self._rested_at = now
        rooms = self._rooms_now(now)
        if not rooms:
            return
        coldest = islice(segment.room.coldest(cheap=False), WEIGHED)
        is_last = partial(self._is_last, now=now)
        policy, unix = segment.objects.order.policy, self._core.unix(now)
        for entry, room in choose_offers(coldest, short_bytes, is_last, rooms, policy, unix):
            self._offer(entry, room, now)

    def _rooms_now(self, now: float) -> PeerMemories[PeerId]:
        told = self._members.all(now)
        if told is not self._told:
            self._told, self._rooms = told, PeerMemories(told.values(), self._core.rng)
        return self._rooms

    def _is_last(self, entry: ObjectEntry, now: float) -> bool:
        """Whether losing the object would lose it for all, and it may be offered. Not offered are:

        1. Objects that the SSD or a peer has just taken, and those in use: being written to the SSD, for example.
        2. Pinned ones, as they are to stay here.
        3. Copies that came from another peer and were not read since.
        4. Objects of which another peer keeps a copy, or a newer version.
        """
        if entry in self._taken or entry.on_ssd or entry.references or entry.pin is not Pin.NONE:
            return False
        if not entry.hits and not self._core.is_own(entry.version):
            return False
        return not self._is_kept_elsewhere(entry, now)

    def _offer(self, entry: ObjectEntry, room: PeerMemory[PeerId], now: float) -> None:
        core = self._core
        core.segment.references.acquire_unused(entry)  # it keeps its place in the order
        core.counters["copies_offered"] += 1
        self._under_way += 1
        ended = partial(self._answered, entry, room)
        core.operations.start(ReplicateOperation(core, entry, 2, candidates=[room.peer]), now, ended)

    def _answered(self, entry: ObjectEntry, room: PeerMemory[PeerId], copies: Any, now: float) -> None:
        core = self._core
        core.segment.references.let_go(entry, was_used=False)
        if isinstance(copies, int) and copies > 1:
            self._taken[entry] = now + SPREAD_SECONDS
            self._rested_at += entry.length / self._bytes_per_second
            core.counters["offered_bytes"] += entry.length
        else:
            core.counters["offers_refused"] += 1
            room.refused()
        self._under_way -= 1
        if not self._under_way:
            self._next_look = max(now, self._rested_at)

    def _end(self, entry: ObjectEntry, now: float) -> None:
        """The others have heard of the copy: the one here goes first, unless no announcement is known here."""
        core = self._core
        del self._taken[entry]
        if entry.state is not SlotState.LIVE or entry.pin is not Pin.NONE:
            return
        if core.gossip.partitions.mode.knows_all and not self._is_kept_elsewhere(entry, now):
            core.counters["offers_refused"] += 1
            return
        core.counters["offers_taken"] += 1
        core.segment.objects.set_soft(entry, True)
        core.objects.announce(entry, now)

    def _is_kept_elsewhere(self, entry: ObjectEntry, now: float) -> bool:
        if not self._core.gossip.directory.mentioned({entry.digest}):
            return False
        others = other_firm_copies(self._core, entry, now)
        return others is None or any(copy.reachable for copy in others)


AT_ONCE: Final = 8
BEGUN_PER_STEP: Final = 2
"""To find a peer for an object takes 2 ms among 5,000 members."""
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
        self._rooms = MemberRooms(core)
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

    def _look_on(self, now: float) -> None:
        """Look for some more last copies."""
        core = self.core
        digests = self._walk.step()
        if core.gossip.partitions.mode.knows_all or not digests:
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
