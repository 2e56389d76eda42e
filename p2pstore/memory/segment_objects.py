"""Every object of a segment, by digest and by slot: from publishing until its bytes are free. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Final

from p2pstore.errors import StoreClosed
from p2pstore.memory.areas import Areas
from p2pstore.memory.entries import ObjectEntry, Reservation
from p2pstore.memory.eviction import EvictionOrder
from p2pstore.memory.key_listing import KeyListing
from p2pstore.memory.object_table import ObjectTable
from p2pstore.memory.references import References
from p2pstore.memory.segment_layout import Geometry, Pin, SlotState
from p2pstore.objects import Version

SOFT_PIN_SECONDS: Final = 30 * 60.0

EXPIRED_PER_STEP: Final = 32
"""Objects withdrawn in one step of `expire`, at 20 us each."""


class SegmentObjects:
    """The states of objects: LIVE (published), RETURNED (of an earlier life, not yet published), DOOMED (withdrawn,
    still referenced), FREE. Keeps table, listing, order of eviction, timers and areas in step. Times are Unix seconds.

    `held`: slot number -> its object or reservation. `live` and `returned`: digest -> object.
    """

    def __init__(
        self,
        geometry: Geometry,
        areas: Areas,
        table: ObjectTable,
        order: EvictionOrder,
        held: dict[int, ObjectEntry | Reservation],
        references: References,
    ) -> None:
        self.areas = areas
        self.table = table
        self.order = order
        self.held = held
        self.references = references
        self.live: dict[bytes, ObjectEntry] = {}
        self.returned: dict[bytes, ObjectEntry] = {}
        self.listing = KeyListing(at_once=bool(areas.uses))
        self.timers = ExpiryTimers()
        self.most_read = MostRead()
        """Of all readers whose reads the owner hears of."""
        self._data_offset = geometry.data_offset
        self.is_closed = False
        self._withdrawn: list[ObjectEntry] = []
        references.on_unused = self.free

    def check_open(self) -> None:
        """Raise `StoreClosed` once the segment was closed."""
        if self.is_closed:
            raise StoreClosed("this peer's memory was closed: the peer is shutting down")

    # --- appearing ---------------------------------------------------------------------------

    def publish(
        self,
        new: Mapping[bytes, ObjectEntry],
        trailers: Iterable[bytes],
        follows: Mapping[bytes, bytes],
        now: float,
        keep: Callable[[Callable[[], None]], None],
    ) -> None:
        """Make filled extents the objects of their digests, in place of older ones. `trailers` are packed, in order.
        `follows`: the digest of the block before it, of those that follow one. `keep`: see `Segment.commit_new`."""
        if not new:
            return
        live, areas, held, entries = self.live, self.areas, self.held, list(new.values())
        replaced = [] if live.keys().isdisjoint(new) else [live[each] for each in new if each in live]
        self.table.publish(entries, trailers, new=not replaced)
        if areas.uses:
            for entry in entries:
                entry.group = areas.at(entry.offset - self._data_offset).group_of(entry.namespace)
                areas.count(entry, 1)
        live.update(new)
        for entry in entries:
            held[entry.slot] = entry
            if entry.expires_unix_ms or entry.pin_until:
                self.timers.set(entry)
        if replaced:
            self._replaced(replaced)
        keep(partial(self._admit, entries, follows, now))

    def _admit(self, entries: Sequence[ObjectEntry], follows: Mapping[bytes, bytes], now: float) -> None:
        self.listing.add(*entries)
        for digest, before in follows.items():
            self.order.follow(self.live[digest], self.live.get(before))
        self.order.admit(entries, now)

    def return_object(self, entry: ObjectEntry, now: float) -> None:
        """Take in an object of an earlier life, which readers do not find until `publish_returned`."""
        entry.state = SlotState.RETURNED
        area = self.areas.at(entry.offset - self._data_offset)
        entry.group = area.group_of(entry.namespace)
        self.table.write_slots(entry)
        self.held[entry.slot] = entry
        self.returned[entry.digest] = entry
        self.areas.count(entry, 1)
        self.order.admit([entry], now)

    def publish_returned(self, entry: ObjectEntry, now: float) -> bool:
        """Let readers find a returned object, which is known to be good. False when it is gone: evicted meanwhile,
        expired, or replaced by a version that is not older."""
        if entry.state is not SlotState.RETURNED:
            return False
        existing = self.live.get(entry.digest)
        if entry.expired(now) or (
            existing is not None and existing.version >= entry.version and not existing.expired(now)
        ):
            self.withdraw(entry)
            return False
        del self.returned[entry.digest]
        entry.state = SlotState.LIVE
        self.table.publish([entry])
        self.live[entry.digest] = entry
        if existing is not None:
            self._replaced([existing])
        self.listing.add(entry)
        self.timers.set(entry)
        return True

    def _replaced(self, entries: Sequence[ObjectEntry]) -> None:
        for existing in entries:
            self.listing.remove(existing)
        self._doom(*entries)
        self._withdrawn += entries

    # --- looking -----------------------------------------------------------------------------

    def in_slots(self, first_slot: int, count: int) -> list[ObjectEntry]:
        """The live objects in a range of slots, in order. Slot by slot all objects can be passed in steps, while
        others come and go."""
        found = map(self.held.get, range(first_slot, first_slot + count))
        return [held for held in found if isinstance(held, ObjectEntry) and held.state is SlotState.LIVE]

    def touch(self, digest: bytes, count: int, now: float) -> None:
        """Take in that a live object, if it is one, was read `count` times."""
        entry = self.live.get(digest)
        if entry is not None:
            self.used(entry, count, now)

    def used(self, entry: ObjectEntry, count: int, now: float) -> None:
        """`touch` for an entry at hand. A `count` of 0 is a read that goes on."""
        self.order.read(entry, count, now)
        if count:
            self.most_read.read(entry.digest, count, now)

    # --- changing ----------------------------------------------------------------------------

    def set_pin(self, entry: ObjectEntry, pin: Pin, until: float) -> None:
        """Change a live entry's pin, in its trailer too. `until` is when it ends; 0 for never."""
        _check_live(entry)
        entry.pin = pin
        entry.pin_until = until if pin is not Pin.NONE else 0.0
        self.table.write_care(entry)
        self.order.update(entry)
        self.timers.set(entry)

    def set_expiry(self, entry: ObjectEntry, expires_unix_ms: int) -> None:
        """Change when a live entry's time to live ends, in its trailer too. 0: it has no end."""
        _check_live(entry)
        entry.expires_unix_ms = expires_unix_ms
        self.table.write_care(entry)
        self.timers.set(entry)

    def strengthen(self, entry: ObjectEntry, *, pin: Pin, replicas: int, now: float) -> None:
        """Make a live entry a firm copy with this pin and replica count."""
        entry.soft = False
        entry.replicas = replicas
        self.table.write_slots(entry)
        self.set_pin(entry, pin, now + SOFT_PIN_SECONDS if pin is Pin.SOFT else 0.0)

    def set_soft(self, entry: ObjectEntry, soft: bool) -> None:
        """Make a copy a soft or a firm one."""
        entry.soft = soft
        self.table.write_slots(entry)
        self.order.update(entry)

    def renew_version(self, entry: ObjectEntry, version: Version) -> None:
        """Give a live entry another version of the same bytes. A record on the SSD keeps the old one."""
        if entry.state is not SlotState.LIVE or version.root != entry.version.root:
            raise ValueError(f"{entry.key!r} was withdrawn, or the version is of other bytes")
        entry.version = version
        self.table.write_slots(entry)
        self.set_on_ssd(entry, False)

    def set_proof(self, entry: ObjectEntry, proof: bytes) -> None:
        """Put the writer's proof into a live entry's trailer, where the extent has room for it."""
        if entry.state is SlotState.LIVE:
            self.table.write_proof(entry, proof)

    def set_on_ssd(self, entry: ObjectEntry, on_ssd: bool) -> None:
        """Take in whether the SSD has a live entry's version as well."""
        if entry.on_ssd != on_ssd and entry.state is SlotState.LIVE:
            entry.on_ssd = on_ssd
            if entry in self.order:
                self.order.update(entry)

    # --- going -------------------------------------------------------------------------------

    def expire(self, now: float) -> list[ObjectEntry]:
        """Withdraw up to 32 objects past their time to live and return them (`take_withdrawn` has them, too); end pins
        that have run out. `expires_on` says whether there are more."""
        self.references.settle()
        self.order.end_some_aside()
        gone: list[ObjectEntry] = []
        for entry in islice(self.timers.due(now), EXPIRED_PER_STEP):
            if entry.state is not SlotState.LIVE:
                continue
            if entry.expired(now):
                self.withdraw(entry)
                gone.append(entry)
            elif 0 < entry.pin_until <= now:
                self.set_pin(entry, Pin.NONE, 0.0)
            else:
                self.timers.set(entry)
        self._withdrawn += gone
        return gone

    def expires_on(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        return self.timers.any_due(now) or bool(self.order.to_end_aside)

    def evict(self, entries: list[ObjectEntry]) -> None:
        """Withdraw objects for the room they take."""
        self._withdrawn += [entry for entry in entries if entry.state is SlotState.LIVE]
        self.withdraw(*entries, evicted=True)

    def take_withdrawn(self) -> list[ObjectEntry]:
        """The objects evicted, expired or replaced since the last call: their locations are to be withdrawn."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def withdraw(self, *entries: ObjectEntry, evicted: bool = False) -> None:
        """Hide live or returned objects from readers; each is freed when nothing refers to it."""
        live: Sequence[ObjectEntry] = entries
        if self.returned:
            live = [entry for entry in entries if entry.state is not SlotState.RETURNED]
            for entry in entries:
                if entry.state is SlotState.RETURNED:
                    del self.returned[entry.digest]
        for entry in live:
            del self.live[entry.digest]
        self.table.withdraw(live)
        self.listing.remove(*live)
        self._doom(*entries, evicted=evicted)

    def _doom(self, *entries: ObjectEntry, evicted: bool = False) -> None:
        """LIVE -> DOOMED, and on to FREE when nothing refers to it."""
        doomed = SlotState.DOOMED
        self.order.gone(*entries, evicted=evicted)
        for entry in entries:
            if entry.timer is not None:
                self.timers.drop(entry)
            if self.areas.uses:
                self.areas.count(entry, -1)
            entry.state = doomed
        if self.references.hazards:
            self.table.spoil(entries)
        self.references.settle_withdrawn(entries)
        unused = []
        for entry in entries:
            if entry.references:
                self.table.write_slots(entry)
            elif entry.state is doomed:  # else its last reference ended in this moment
                unused.append(entry)
        self.free(*unused)

    def free(self, *held: ObjectEntry | Reservation) -> None:
        """Give slots and extents of withdrawn objects or ended reservations back."""
        free = SlotState.FREE
        for each in held:
            if isinstance(each, ObjectEntry):
                each.state = free
            del self.held[each.slot]
        self.table.free_slots([each.slot for each in held])
        self.areas.free(*[each.offset - self._data_offset for each in held])


def _check_live(entry: ObjectEntry) -> None:
    if entry.state is not SlotState.LIVE:
        raise ValueError(f"{entry.key!r} was withdrawn: look it up again")


class ExpiryTimers:
    """The next time of each entry that has one, as a binary heap in which each entry knows its place (`timer`): so an
    entry that goes takes its time with it, and nothing is left to be cleared away, all at once, later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, ObjectEntry]] = []

    def set(self, entry: ObjectEntry) -> None:
        """Look at the entry when its time to live ends, and when its pin does."""
        self.drop(entry)
        times = [time for time in (entry.expires_unix_ms / 1000, entry.pin_until) if time]
        if times:
            self._heap.append((min(times), entry))
            self._rise(len(self._heap) - 1)

    def drop(self, entry: ObjectEntry) -> None:
        """The entry is gone, or has no times any more."""
        place = entry.timer
        if place is None:
            return
        entry.timer = None
        last = self._heap.pop()
        if last[1] is not entry:
            self._heap[place] = last
            self._sink(place)
            self._rise(last[1].timer or 0)

    def due(self, now: float) -> Iterator[ObjectEntry]:
        """Entries whose time has come, whose timers are over with that."""
        while self.any_due(now):
            entry = self._heap[0][1]
            self.drop(entry)
            yield entry

    def any_due(self, now: float) -> bool:
        """Whether `due` would give an entry."""
        return bool(self._heap) and self._heap[0][0] <= now

    def __len__(self) -> int:
        return len(self._heap)

    def _rise(self, place: int) -> None:
        heap = self._heap
        timer = heap[place]
        while place and timer[0] < heap[parent := (place - 1) // 2][0]:
            heap[place] = heap[parent]
            heap[place][1].timer = place
            place = parent
        heap[place] = timer
        timer[1].timer = place

    def _sink(self, place: int) -> None:
        heap = self._heap
        timer = heap[place]
        while (child := 2 * place + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1][0] < heap[child][0]:
                child += 1
            if timer[0] <= heap[child][0]:
                break
            heap[place] = heap[child]
            heap[place][1].timer = place
            place = child
        heap[place] = timer
        timer[1].timer = place


HALF_LIFE_SECONDS: Final = 60.0
COUNTED: Final = 1024
"""Objects that are counted at once."""
WEIGHT_SECONDS: Final = 1.0
"""How long reads weigh the same: working out weights for each would cost more than counting."""
HIGHEST_WEIGHT: Final = 2.0**40


class MostRead:
    """The objects read most of late: counts with a half-life of 60 s, of at most 1,024 objects. For one more, the
    median is subtracted from all counts, and an object with none left is forgotten. Times are seconds; a clock that
    was set back does no harm."""

    def __init__(self, counted: int = COUNTED, half_life_seconds: float = HALF_LIFE_SECONDS) -> None:
        self._counted = counted
        self._half_life = half_life_seconds
        self._counts: dict[bytes, float] = {}
        self._weight = 1.0
        """Of a read just now. It grows, instead of all counts being made smaller."""
        self._weighed_at = -math.inf
        self._weigh_at = -math.inf

    def __len__(self) -> int:
        """How many objects are counted."""
        return len(self._counts)

    def read(self, digest: bytes, count: int, now: float) -> None:
        """Count `count` reads of an object at `now`."""
        if not self._weighed_at <= now < self._weigh_at:
            self._weigh(now)
        counts = self._counts
        counts[digest] = counts.get(digest, 0.0) + count * self._weight
        if len(counts) > self._counted:
            self._make_room()

    def most(self, number: int, now: float) -> list[tuple[bytes, float]]:
        """The objects read most, and how many times a second of late; those read most come first."""
        self._weigh(now)
        per_second = math.log(2) / (self._half_life * self._weight)
        found = nlargest(number, self._counts.items(), key=lambda item: (item[1], item[0]))
        return [(digest, count * per_second) for digest, count in found]

    def _weigh(self, now: float) -> None:
        passed = max(0.0, now - self._weighed_at) if self._counts else 0.0
        self._weighed_at, self._weigh_at = now, now + WEIGHT_SECONDS
        if passed > 64 * self._half_life:  # nothing of it would be left
            self._counts, self._weight = {}, 1.0
            return
        self._weight *= 2.0 ** (passed / self._half_life)
        if self._weight > HIGHEST_WEIGHT:
            self._counts = {digest: count / self._weight for digest, count in self._counts.items()}
            self._weight = 1.0

    def _make_room(self) -> None:
        ordered = sorted(self._counts.values())
        median = ordered[len(ordered) // 2]
        self._counts = {
            digest: count - median for digest, count in self._counts.items() if count > median
        }
