"""The state that all parts of the tier share: the disk, its index, and the writes under way.

Every record on the disk is in the index, or marked dead, or under way: there is no fourth case. Therefore a discard,
which marks what the index has and what is under way, covers everything that could come back after a crash.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from p2pstore.objects import MIB, Version
from p2pstore.ssd_tier.aligned_memory import ScratchMemory
from p2pstore.ssd_tier.disk_protocol import Disk
from p2pstore.ssd_tier.health import Health, Measures, TierState, Waiting
from p2pstore.ssd_tier.index import ColdEntry, ColdIndex
from p2pstore.ssd_tier.log_layout import (
    DeadMarks,
    RecordPlace,
    Superblock,
    record_position,
    segment_position,
)
from p2pstore.ssd_tier.log_segments import Segment, SegmentState, SegmentTable
from p2pstore.ssd_tier.write_admission import Admission, Shares, no_shares

_TRUSTED: Final = (SegmentState.OPEN, SegmentState.SEALING, SegmentState.SEALED)
INLINE_BYTES: Final = MIB
"""Hashing 1 MiB takes some 0.1 ms, about as long as a switch to a thread and back."""
WORKERS: Final = 4
"""Threads that hash and compress at the same time."""

Result = TypeVar("Result")
logger = logging.getLogger("p2pstore.ssd_tier")
_CLOSED: Final = "the tier was closed before this was durable"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHooks:
    """The tier's questions to its owner, and what it tells the owner. All are called in the trio loop."""

    withdraw: Callable[[Sequence[ColdEntry]], None]
    """Told of objects that the tier gives up by its own decision, before their bytes go."""
    is_last_copy: Callable[[bytes], bool]
    """Whether no other peer is known to hold the object of this digest."""
    state_changed: Callable[[Health], None] = lambda health: None
    """Told when the tier becomes read-only or off."""
    unix: Callable[[], float] = time.time
    """Unix time in seconds."""
    shares: Shares = no_shares
    """The shares of namespaces; which namespaces have one does not change."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """An object (or a record of it that is kept) on its way to the disk."""

    digest: bytes
    version: Version
    places: list[RecordPlace] = field(default_factory=list)
    discarded: bool = False
    """It was discarded meanwhile, or a newer one came: its records are marked dead already."""


class Workers:
    """Hashes and compresses: short work at once, longer work in one of `WORKERS` threads."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(WORKERS)

    async def run(self, length: int, work: Callable[..., Result], *arguments: object) -> Result:
        """Do work on `length` bytes. A cancelled call waits for it, so its memory is free when this returns."""
        if length <= INLINE_BYTES:
            return work(*arguments)
        return await trio.to_thread.run_sync(work, *arguments, limiter=self._limiter)


class ColdLog:
    """State, and the steps that keep it consistent. No step waits."""

    def __init__(
        self,
        disk: Disk,
        superblock: Superblock,
        table: SegmentTable,
        index: ColdIndex,
        marks: list[DeadMarks],
        admission: Admission,
        nursery: trio.Nursery,
        hooks: TierHooks,
    ) -> None:
        self.disk = disk
        self.superblock = superblock
        self.table = table
        self.index = index
        self.marks = marks
        self.admission = admission
        self.unix = hooks.unix
        self.shares = hooks.shares
        self.is_last_copy = hooks.is_last_copy
        self.health = Health()
        self.measures = Measures()
        self.scratch = ScratchMemory()
        self.workers = Workers()
        self.commit = GroupCommit(disk, nursery, self._sync_failed)
        self.dirty = {each.number for each in table.segments if marks[each.number].dirty}
        """Segments with dead marks that are not on their way to the disk."""
        self.marked = Signal()
        """There are new dead marks."""
        self.work = Signal()
        """A segment may have to be sealed, reclaimed or started."""
        self.room = trio.lowlevel.ParkingLot()
        """There may be room for records, or never any more."""
        self.drained = trio.lowlevel.ParkingLot()
        """Reads ended in segments that drain."""
        self.marks_moved = trio.lowlevel.ParkingLot()
        """Dead marks became durable, or perhaps never will."""
        self.waiting: set[Waiting] = set()
        """For objects that are being read."""
        self.is_silent = False
        """The disk has not answered for `PATIENCE_SECONDS`: until it does, only probes are sent."""
        self._withdraw = hooks.withdraw
        self._state_changed = hooks.state_changed
        self._told = TierState.OK
        self._under_way: dict[bytes, list[UnderWay]] = {}

    @property
    def store_id(self) -> bytes:
        return self.superblock.store_id

    @property
    def segment_bytes(self) -> int:
        return self.superblock.segment_bytes

    def position(self, place: RecordPlace) -> int:
        return record_position(place, self.segment_bytes)

    def segment_position(self, segment: Segment) -> int:
        return segment_position(segment.number, self.segment_bytes)

    # Records.

    @contextmanager
    def under_way(self, digest: bytes, version: Version) -> Iterator[UnderWay]:
        """While the block runs, discards cover the records in `places`, and their segments are not sealed.

        Those that the index does not have when the block ends, however that happens, are marked dead. The block adds
        to `places` what the table gave it.
        """
        job = UnderWay(digest, version)
        self._under_way.setdefault(digest, []).append(job)
        try:
            yield job
        finally:
            jobs = self._under_way[digest]
            jobs.remove(job)
            if not jobs:
                del self._under_way[digest]
            entry = self.index.find(digest)
            known = entry.places if entry is not None else ()
            self.mark_dead(place for place in job.places if place not in known)
            for place in job.places:
                self.table.written(place)
            self.work.send()

    def is_trusted(self, place: RecordPlace) -> bool:
        """Whether the segment of what was written there still takes part in the log."""
        segment = self.table[place.segment]
        return segment.generation == place.generation and segment.state in _TRUSTED

    def end_reads(self, segments: Iterable[int]) -> None:
        ended = [self.table.end_read(number) for number in segments]
        if any(ended):
            self.drained.unpark_all()

    def mark_dead(self, places: Iterable[RecordPlace]) -> None:
        """These records do not count any more: soon on the disk as well."""
        for place in places:
            marks = self.marks[place.segment]
            if self.table[place.segment].generation == place.generation:
                marks.mark(place.number)
                if marks.dirty:
                    self.dirty.add(place.segment)
                    self.marked.send()

    def outdate(self, digest: bytes, version: Version) -> None:
        """This version of the object is stored: lower versions under way must not be published after it, even if it
        is dropped before they end."""
        for job in self._under_way.get(digest, ()):
            if job.version < version:
                self._give_up(job)

    def _give_up(self, job: UnderWay) -> None:
        job.discarded = True
        self.mark_dead(job.places)

    def discard(self, digest: bytes, up_to: Version) -> bool:
        """The object does not count any more unless it is newer. Whether it was there."""
        for job in self._under_way.get(digest, ()):
            if up_to.covers(job.version):
                self._give_up(job)
        entry = self.index.find(digest)
        if entry is None or not up_to.covers(entry.version):
            return False
        self.mark_dead(self.index.drop(digest))
        if self.table.free_count == 0:
            self.work.send()
        return True

    def is_expired(self, entry: ColdEntry) -> bool:
        """Whether the object's time to live is over."""
        return bool(entry.expires_unix_ms) and entry.expires_unix_ms <= self.unix() * 1000

    def lose(self, entry: ColdEntry) -> None:
        """The object turned out to be unreadable: drop it, if it still lies where it was read."""
        now = self.index.find(entry.digest)
        if now is not None and now.places == entry.places:
            self._withdraw([now])
            self.mark_dead(self.index.drop(entry.digest))

    def drop(self, digests: Iterable[bytes]) -> int:
        """The tier gives up these objects: they are withdrawn, and their records marked dead. How many."""
        given_up = list(digests)
        entries = [entry for each in given_up if (entry := self.index.find(each)) is not None]
        if entries:
            self._withdraw(entries)
        for digest in given_up:  # also those without all their parts, which are not found
            self.mark_dead(self.index.drop(digest))
        return len(entries)

    # Segments.

    def write_failed(self, number: int, error: OSError) -> None:
        """A record could not be written: its segment takes no more, what it has remains."""
        self.health.write_failed(error)
        segment = self.table[number]
        if segment.state is SegmentState.OPEN:
            self.table.close(segment)
        self.state_may_have_changed()

    def read_failed(self, error: OSError) -> None:
        """A record could not be read, twice."""
        self.health.read_failed(error)
        self.state_may_have_changed()

    def retire(self, segment: Segment) -> None:
        """The segment cannot be trusted any more: all that is in it is dropped, nothing goes there."""
        if segment.state is SegmentState.RETIRED:
            return
        self.table.retire(segment)
        self.drop([record.digest for record in self.index.records_of(segment.number)])
        self.state_may_have_changed()

    def _sync_failed(self, error: OSError, in_doubt: set[int]) -> None:
        self.health.sync_failed(error)
        for number in in_doubt:
            self.retire(self.table[number])
        self.state_may_have_changed()

    def is_in_place(self) -> bool:
        """Whether the next start will find what is written now, by the last inspection. If not, the tier
        becomes read-only."""
        if why := self.disk.misplaced:
            self.health.misplaced(why)
            self.state_may_be_worse()
        return not why

    def state_may_have_changed(self) -> None:
        """Wake all waiting tasks, so that they look at the state; report it when it got worse."""
        if self.health.state is not self._told:
            self._told = self.health.state
            logger.error("the SSD tier is %s: %s", self._told.value, self.health.why)
            self._state_changed(self.health)
        self.room.unpark_all()
        self.drained.unpark_all()
        self.work.send()
        self.marked.send()
        self.marks_moved.unpark_all()

    def state_may_be_worse(self) -> None:
        """`state_may_have_changed` for frequent checks: wakes tasks only when the state did change."""
        if self.health.state is not self._told:
            self.state_may_have_changed()

    @property
    def is_off(self) -> bool:
        return self.health.state is TierState.OFF

    @property
    def is_writable(self) -> bool:
        return self.health.state is TierState.OK


class Signal:
    """Wakes one waiting task. A signal sent while none waits is kept for the next `wait`."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def send(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Returns when something happened since the last `wait` returned. For one task."""
        await self._event.wait()
        self._event = trio.Event()


@dataclass(slots=True, eq=False)
class _Round:
    """One sync of the disk, to come or under way."""

    over: trio.Event = field(default_factory=trio.Event)
    error: OSError | None = None


class GroupCommit:
    """A caller waits for the next sync that begins: all that come while one runs share the one after it.

    `failed` is called once for each failed sync, before its waiting tasks continue. Syncs run in `nursery`, so a
    cancelled caller does not affect the others.
    """

    def __init__(
        self, disk: Disk, nursery: trio.Nursery, failed: Callable[[OSError, set[int]], None]
    ) -> None:
        self.syncs = 0
        self._disk = disk
        self._nursery = nursery
        self._failed = failed
        self.unsynced: set[int] = set()
        """Segments to which a write returned: the next sync that begins makes it durable, or loses it."""
        self._next: _Round | None = None
        self._running = False

    async def sync(self) -> None:
        """Returns when all that was written before this call is durable.

        Raises the `OSError` of the disk when it is unknown whether it is: it stays so.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._next is None:
            self._next = _Round()
        this = self._next
        if not self._running:
            self._running = True
            self._nursery.start_soon(self._run)
        await this.over.wait()
        if this.error is not None:
            raise OSError(*this.error.args) from this.error

    async def sync_writes(self) -> None:
        """The same, for records and the like alone: without a sync when all that `wrote` was told of is durable."""
        if self.unsynced or self._running:
            await self.sync()

    async def _run(self) -> None:
        try:
            while self._next is not None:
                this, self._next = self._next, None
                covered, self.unsynced = self.unsynced, set()
                await self._sync_once(this, covered)
        finally:
            self._running = False
            if self._next is not None:  # the tier is closed
                self._next.error = OSError(_CLOSED)
                self._next.over.set()

    async def _sync_once(self, this: _Round, covered: set[int]) -> None:
        this.error = OSError(_CLOSED)
        try:
            await self._disk.sync()
            self.syncs += 1
            this.error = None
        except OSError as error:
            # Writes that returned while it ran are in doubt as well.
            in_doubt, self.unsynced = covered | self.unsynced, set()
            this.error = error
            self._failed(error, in_doubt)
        finally:
            this.over.set()
