"""Objects of an earlier life, in memory and on the SSD: held back, checked, and published again in steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Final

from p2pstore.core.operation import CheckReturned, ColdObject, ColdSorted
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import MIB, Version

if TYPE_CHECKING:
    from p2pstore.core.operation import Operation
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry

COLD_PER_STEP: Final = 64
"""Looking at one costs some 10 us, and announcing it 20."""
OBJECTS_PER_BATCH: Final = 64
"""Publishing and announcing one costs some 50 us."""
BYTES_PER_BATCH: Final = 64 * MIB
"""Bytes that a thread checks at a time; a single object may be larger."""
FATES: Final = ("returned", "damaged", "discarded")
"""Fates of objects of an earlier life: published again, bytes damaged, or possibly removed meanwhile."""
BATCHES_UNDER_WAY: Final = 2
"""One is checked while another one is published."""


class MemoryReturn:
    """The objects that are left to be looked at, the oldest first: so those put last are the last to be evicted."""

    def __init__(self, core: PeerCore, entries: Iterable[ObjectEntry]) -> None:
        self._core = core
        self._left = deque(entries)
        self._under_way = 0

    @property
    def wants_a_step(self) -> bool:
        """Whether there is something for `step`. The last step, with nothing left, ends it."""
        return self._under_way < BATCHES_UNDER_WAY and (bool(self._left) or not self._under_way)

    @property
    def is_over(self) -> bool:
        return not self._left and not self._under_way

    def step(self, is_good: Callable[[ObjectEntry], bool]) -> None:
        """Have some checked, of those that no floor forbids; drop the others."""
        batch: list[ObjectEntry] = []
        batch_bytes = 0
        looked_at = 0
        while self._left and looked_at < 4 * OBJECTS_PER_BATCH:
            looked_at += 1
            if len(batch) == OBJECTS_PER_BATCH or (
                batch and batch_bytes + self._left[0].length > BYTES_PER_BATCH
            ):
                break
            entry = self._left.popleft()
            if entry.state is not SlotState.RETURNED:
                continue  # its room was needed
            if is_good(entry):
                batch.append(entry)
                batch_bytes += entry.length
            else:
                self._drop(entry, "discarded")
        if batch:
            self._under_way += 1
            self._core.emit(CheckReturned(tuple(batch)))

    def checked(
        self,
        entries: Sequence[ObjectEntry],
        whole: Sequence[bool],
        is_good: Callable[[ObjectEntry], bool],
        now: float,
    ) -> None:
        """Of a batch, which are what they were put as. Floors may have come meanwhile."""
        core, unix = self._core, self._core.unix(now)
        self._under_way -= 1
        for entry, is_whole in zip(entries, whole, strict=True):
            if not is_whole:
                self._drop(entry, "damaged")
            elif not is_good(entry):
                self._drop(entry, "discarded")
            elif core.segment.returned.publish(entry, unix):
                self._count(entry, "returned")
                entry.verified = True
                core.cold.came_to_memory(entry)
                core.objects.announce(entry, now)
                # A newer version may have been put meanwhile.
                core.gossip.directory.watched.touch(entry.digest)
        core.objects.announce_withdrawn(now)

    def _drop(self, entry: ObjectEntry, fate: str) -> None:
        if entry.state is SlotState.RETURNED:
            self._core.segment.returned.drop(entry)
            self._count(entry, fate)

    def _count(self, entry: ObjectEntry, fate: str) -> None:
        self._core.counters[f"kept_objects_{fate}"] += 1
        self._core.counters[f"kept_bytes_{fate}"] += entry.length


class EarlierLife:
    """Objects of an earlier life, held back until all floors made meanwhile are known here; and the clock up to which
    copies are distrusted, as floors that are gone may have forbidden them."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records.floors
        self._sync = core.gossip.floors
        self._clock_at_start = core.clock.latest
        self._last_alive: int | None = None
        """When this peer was last there, until it is judged whether that is too long ago."""
        self._waits_for_clock = False
        self._distrusted_before = 0
        self._trusted_operation = 0
        """Operations with lower numbers began before the last time that older copies were distrusted."""
        self._cold: Iterator[ColdObject] | None = None
        """Those that are held back: they may be many more than fit in memory at once."""
        self._memory: MemoryReturn | None = None
        self._unsettled = 0
        self._seen_before_cold: Stamps | None = None
        self._seen_before_sweep: Stamps | None = None

    def tick(self, now: float) -> None:
        if self._last_alive is not None:
            self._judge_absence(now)
        if self._cold_may_be_sorted:
            self._sort_cold(now)
        if self._memory_may_be_looked_at:
            self._look_at_memory(now)

    @property
    def due_at(self) -> float:
        judges = self._last_alive is not None and self._sync.synchronised
        busy = (
            self._cold_may_be_sorted
            or self._memory_may_be_looked_at
            or (judges and not self._waits_for_clock)
        )
        return -math.inf if busy else math.inf

    def distrust(self, clock: int) -> None:
        """Distrust all copies up to this clock, also those that operations under way bring."""
        self._distrusted_before = max(self._distrusted_before, clock)
        self._trusted_operation = self._core.operations.next_number

    @property
    def returning(self) -> bool:
        """Whether objects of an earlier life are still held back."""
        return self._cold is not None or self._memory is not None

    def return_with(self, objects: Iterable[ColdObject], newest_clock: int, now: float) -> None:
        """This peer has objects of an earlier life, on its SSD; `newest_clock` is that of the newest. Call it before
        the first tick, once.

        They are not to be served or announced before `ColdSorted` says so, which it does when this peer
        has heard of every floor made while it was away. What a floor forbids by then is to be discarded,
        and what floors that are gone may have forbidden. Objects that a floor forbade in the earlier
        life must have been discarded then, durably: that floor may be gone as well.
        """
        self._cold = iter(objects)
        self._hold_back(newest_clock, now)

    def return_with_memory(self, now: float) -> None:
        """As `return_with`, for the segment's objects of an earlier life: those that no floor forbids are
        checked (`CheckReturned`), then published and announced."""
        returned = self._core.segment.returned.entries()
        self._memory = MemoryReturn(self._core, returned)
        newest_clock = max((entry.version.clock for entry in returned), default=0)
        self._hold_back(newest_clock, now)

    def _hold_back(self, newest_clock: int, now: float) -> None:
        self._unsettled += 1
        self._sync.has_older_copies |= newest_clock > 0
        core = self._core
        core.timekeeping.found(newest_clock)
        if self._seen_before_cold is None:
            self._seen_before_cold = dict(self._sync.seen)
        self._last_alive = core.timekeeping.newest_found
        if core.clock.accepts(self._clock_at_start, core.unix(now)):
            self._last_alive = max(self._last_alive, self._clock_at_start)

    def _judge_absence(self, now: float) -> None:
        """Distrust all kept objects where this peer was away for too long. Where its clock is ahead of the others', it
        may have been away for a moment: that is judged when the clock is right."""
        core, last_alive = self._core, self._last_alive
        if last_alive is None or not self._sync.synchronised:
            return
        was_away = self._sync.was_away_too_long(last_alive, now)
        self._waits_for_clock = was_away and core.gossip.time.view(now).lead < 0
        if self._waits_for_clock:
            return
        if was_away:  # all that it kept; puts since the start are above that
            self._distrusted_before = max(self._distrusted_before, last_alive)
        self._last_alive = None

    @property
    def seen_to_save(self) -> Stamps:
        """Up to where floors were seen, for the state directory. While objects are held back, or are still to be
        withdrawn, it stays as it was: a crash must not make those that come back look checked."""
        if self._seen_before_cold is not None:
            return dict(self._seen_before_cold)
        if not self._core.floors.sweep.pending or self._seen_before_sweep is None:
            self._seen_before_sweep = dict(self._sync.seen)
        return dict(self._seen_before_sweep)

    def cold_settled(self) -> None:
        """The discarded objects of `ColdSorted` are gone for good."""
        self._unsettled -= 1
        if not self._unsettled:
            self._seen_before_cold = None

    def holds_back(self, digest: bytes, namespace: bytes, version: Version) -> bool:
        """Whether an object on the SSD may not be shown yet, as it may be of an earlier life."""
        if self._cold is None and self._memory is None:
            return False
        return not (self._is_settled and self._is_good(ColdObject(digest, namespace, version)))

    def distrusts(self, operation: Operation, version: Version) -> bool:
        """Whether what this operation fetched may come from a holder that had missed a floor."""
        return version.clock <= self._distrusted_before and operation.number < self._trusted_operation

    @property
    def _is_settled(self) -> bool:
        """Whether this peer has heard of all floors of the time when it was away, and knows how long that was."""
        return self._sync.synchronised and self._last_alive is None

    @property
    def _cold_may_be_sorted(self) -> bool:
        return self._cold is not None and self._is_settled

    def _sort_cold(self, now: float) -> None:
        assert self._cold is not None
        some = list(islice(self._cold, COLD_PER_STEP))
        good = tuple(filter(self._is_good, some))
        discarded = tuple(filterfalse(self._is_good, some))
        self._core.counters["objects_distrusted"] += sum(
            each.version.clock <= self._distrusted_before for each in discarded
        )
        last = len(some) < COLD_PER_STEP
        self._core.emit(ColdSorted(good, discarded, last))
        if last:
            self._cold = None
            self._core.repair.look_later(now)  # holders of other copies may be gone for good

    @property
    def _memory_may_be_looked_at(self) -> bool:
        memory = self._memory
        return memory is not None and memory.wants_a_step and self._is_settled

    def _look_at_memory(self, now: float) -> None:
        assert self._memory is not None
        self._memory.step(self._is_good_in_memory)
        self._memory_looked_at(now)

    def returned_checked(
        self, entries: Sequence[ObjectEntry], whole: Sequence[bool], now: float
    ) -> None:
        """The outcome of a `CheckReturned`: whether the bytes of each object are what they were put as."""
        assert self._memory is not None
        self._memory.checked(entries, whole, self._is_good_in_memory, now)
        self._memory_looked_at(now)

    def _memory_looked_at(self, now: float) -> None:
        if self._memory is not None and self._memory.is_over:
            self._memory = None
            self.cold_settled()
            self._core.repair.look_later(now)

    def _is_good_in_memory(self, entry: ObjectEntry) -> bool:
        distrusted = entry.version.clock <= self._distrusted_before
        self._core.counters["objects_distrusted"] += distrusted
        namespace = self._core.namespace_digest(entry.namespace)
        return self._is_good(ColdObject(entry.digest, namespace, entry.version))

    def _is_good(self, cold: ColdObject) -> bool:
        return cold.version.clock > self._distrusted_before and not self._records.forbids(
            cold.digest, cold.namespace, cold.version
        )
