"""What a peer's memory has of an earlier life: sorted, checked, and shown again, some at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from p2pstore.core.core_effects import CheckReturned, ColdObject, ColdSorted
from p2pstore.memory.segment_layout import SlotState
from p2pstore.objects import MIB

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry

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
        """Whether all of them are published, or gone."""
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
                core.gossip.directory.touch(
                    entry.digest
                )  # a newer version may have been put meanwhile
        core.objects.announce_withdrawn(now)

    def _drop(self, entry: ObjectEntry, fate: str) -> None:
        if entry.state is SlotState.RETURNED:
            self._core.segment.returned.drop(entry)
            self._count(entry, fate)

    def _count(self, entry: ObjectEntry, fate: str) -> None:
        """`fate` is one of `FATES`."""
        self._core.counters[f"kept_objects_{fate}"] += 1
        self._core.counters[f"kept_bytes_{fate}"] += entry.length


class ColdReturn:
    """The objects that are held back, and how they are told apart, some at a time."""

    def __init__(self, objects: Iterable[ColdObject], newest_clock: int) -> None:
        self.newest_clock = newest_clock
        self._objects = iter(objects)  # they may be many more than fit in memory at once

    def sort(self, count: int, is_good: Callable[[ColdObject], bool]) -> ColdSorted:
        """Up to `count` of those left."""
        some = list(islice(self._objects, count))
        good = {each for each in some if is_good(each)}
        return ColdSorted(
            tuple(each for each in some if each in good),
            tuple(each for each in some if each not in good),
            last=len(some) < count,
        )
