"""The SSD tier: cold objects on one disk, kept in a log of segments.

Invariants:

1. An object is read as it was stored, or not at all: every byte is checked against sums that are bound to key, version
   and place.
2. Every record on the disk is in the index, or marked dead, or under way (`cold_log`). So what is discarded cannot
   come back once its marks are durable, whatever is reclaimed, fails or crashes afterwards.
3. A segment is written anew only when nothing in it is in the index, the marks that say so are durable, no read uses
   it, and its new generation is durable (`upkeep`). So an old record can never be taken for a new one.
4. After a failed sync nothing that was written before it is relied on: its segments are retired (`cold_log`).
5. Every queue is bounded: a refused object stays in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

from p2pstore.objects import KIB, Version
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.ssd_tier.cold_log import ColdLog, TierHooks
from p2pstore.ssd_tier.disk_protocol import Disk, Waits
from p2pstore.ssd_tier.health import PATIENCE_SECONDS, ColdMiss, Overdue, TierOff, TierState
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import SEGMENT_BYTES, ColdFacts, Superblock
from p2pstore.ssd_tier.log_segments import SegmentState
from p2pstore.ssd_tier.opening import open_superblock, read_log, restore, unsafe_segments
from p2pstore.ssd_tier.record_reading import Prepare, Reader
from p2pstore.ssd_tier.record_writing import Writer
from p2pstore.ssd_tier.upkeep import DeadMarkWriter, DiskWatch, Upkeep
from p2pstore.ssd_tier.write_admission import Admission, AdmissionPolicy, WriteRefusal

CLOSE_SECONDS: Final = 5.0
"""For the last discards, when the tier is closed."""
BYTES_PER_RECORD: Final = 64 * KIB
MAX_RECORDS: Final = 4_000_000
MIN_RECORDS: Final = 65_536


class SsdTier:
    """Made by `open_tier`. For one trio loop; calls run side by side."""

    def __init__(self, log: ColdLog, marks: DeadMarkWriter, nursery: trio.Nursery) -> None:
        self._log = log
        self._nursery = nursery
        self._stopped = False
        self._marks = marks
        self._reader = Reader(log)
        self._writer = Writer(log)

    @property
    def state(self) -> TierState:
        return self._log.health.state

    @property
    def why(self) -> str:
        """The cause of a state worse than OK; empty while it is OK."""
        return self._log.health.why

    def __len__(self) -> int:
        return self._log.index.objects

    @property
    def capacity_bytes(self) -> int:
        return self._log.table.count * self._log.segment_bytes

    @property
    def live_bytes(self) -> int:
        return self._log.index.rows.live_bytes

    @property
    def newest_clock(self) -> int:
        """The highest clock of the versions of all objects; 0 without any."""
        return self._log.index.rows.newest_clock

    def bytes_of(self, namespace: str) -> int:
        return self._log.index.rows.of_namespaces.bytes_of(namespace)

    # Looking.

    def find(self, digest: bytes) -> ColdEntry | None:
        """The entry of an object; None when it is absent or expired, or the tier is off."""
        try:
            return self._reader.find(digest)
        except ColdMiss:
            return None

    def entries(
        self, namespace: str, prefix: str = "", after: str = "", limit: int = 1000
    ) -> tuple[list[ColdEntry], bool]:
        """Up to `limit` objects in the order of their keys, above `after`; and whether there are more."""
        return self._log.index.page(namespace, prefix, after, limit)

    def prepare_entries(self, namespace: str) -> bool:
        """A step of a few milliseconds towards `entries`, which takes seconds for a million objects otherwise. Whether
        it was the last one."""
        return self._log.index.prepare_page(namespace)

    def digests(self, namespace_digest: bytes | None) -> Iterator[list[bytes]]:
        """Those of all objects, or of a namespace by its digest, that are there now; `find` tells more of each. A few
        at a time, or none: others may come and go while they are gone through."""
        return self._log.index.digests(namespace_digest)

    # Reading and writing.

    def admit(self, digest: bytes, length: int, hits: int, namespace: str = "") -> WriteRefusal | None:
        """Whether an object that leaves memory should be stored: None, or why not. An admitted object is charged to the
        write budget; `store` is to follow."""
        log = self._log
        return log.admission.decide(
            length,
            hits=hits,
            last_copy=log.is_last_copy(digest),
            queued_bytes=self._writer.queued_bytes,
            fits_share=self._writer.fits_share(namespace, length),
            read_only=not log.is_writable,
            now=log.unix(),
        )

    async def store(self, facts: ColdFacts, payload: memoryview, durable: bool = False) -> bool:
        """Write an object, from memory that keeps still until this returns. Whether it can be found now.

        `payload` begins at an address that is a multiple of 4 KiB. Where it reaches beyond the value's length, up to a
        whole page is written with it. A version that is there already is not written again; a lower one than that is
        refused, like anything when the disk is full or fails. With `durable`, it returns when the object survives a
        crash of the machine. When cancelled, the object is not there.
        """
        return await self._writer.store(facts, payload, durable=durable)

    async def load(
        self,
        digest: bytes,
        prepare: Prepare,
        overdue: Overdue | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> ColdFacts:
        """Read an object into memory that `prepare` gives, and return all that is known of it.

        `prepare` is called once, with what the index knows: all but sums, dtype and shape. It returns memory that
        begins at a multiple of 4 KiB and has the value's length, rounded up to whole pages; what it raises is passed
        on. Nothing touches this memory after the call. Raises `ColdMiss`.

        There is no way to end a read that hangs, so the call lasts as long. But `overdue` is called, once and with the
        reason, when the disk hangs and nothing of the object came for `patience_seconds`.
        """
        return await self._reader.load(digest, prepare, overdue, patience_seconds)

    def set_care(
        self,
        digest: bytes,
        version: Version,
        *,
        pin: int,
        replicas: int,
        soft: bool,
        expires_unix_ms: int | None = None,
    ) -> bool:
        """How firmly an object is kept, or (unless None) when it ends, has changed since it was written. Whether that
        version is there. (Until a restart: the record is not written again for that.)"""
        return self._log.index.set_care(
            digest, version, pin=pin, replicas=replicas, soft=soft, expires_unix_ms=expires_unix_ms
        )

    async def keep_shares(self) -> None:
        """For as long as the tier writes: see `Writer.keep_shares`."""
        await self._writer.keep_shares()

    # Discarding.

    def discard(self, digest: bytes, up_to: Version) -> bool:
        """Forget an object, unless it is newer. At once here, within a second on the disk. Whether it was there."""
        return self._log.discard(digest, up_to)

    async def discards_durable(self) -> None:
        """Returns when nothing that was discarded so far can come back. Raises `TierOff` when that never will be."""
        await self._marks.durable()

    # A disk that hangs.

    @property
    def waits(self) -> Waits:
        return self._log.disk.waits

    @property
    def is_silent(self) -> bool:
        """Whether the disk has not answered for seconds. Then loads fail at once."""
        return self._log.is_silent

    async def write_last_marks(self) -> None:
        """Nothing depends on it: it saves the next start from finding what was discarded a moment ago."""
        if self._stopped or self._log.is_silent:
            return
        with trio.move_on_after(CLOSE_SECONDS, shield=True), suppress(TierOff):
            await self._marks.durable()

    def stop(self) -> None:
        """End what goes on in the background, whatever it was about. For a disk that is abandoned."""
        self._stopped = True
        self._nursery.cancel_scope.cancel()

    # Telling.

    def statistics(self) -> dict[str, Any]:
        """For JSON. Latencies in ms, the rest in bytes or as counts since the process began."""
        log = self._log
        health, admission = log.health, log.admission
        segments = [each.state for each in log.table.segments]
        return {
            "state": health.state.value,
            "why": health.why,
            "cure": health.cure,
            "capacity_bytes": self.capacity_bytes,
            "live_bytes": self.live_bytes,
            "objects": len(self),
            "records": log.index.rows.records,
            "segments": {each.value: segments.count(each) for each in SegmentState},
            "retired_segments": segments.count(SegmentState.RETIRED),
            "queued_bytes": self._writer.queued_bytes,
            "admitted": admission.admitted,
            "refused": dict(sorted((each.value, count) for each, count in admission.refused.items())),
            "syncs": log.commit.syncs,
            "read_errors": health.read_errors,
            "write_errors": health.write_errors,
            "sync_errors": health.sync_errors,
            "discard_errors": health.discard_errors,
            **log.measures.document(log.unix()),
        }


def default_max_records(superblock: Superblock) -> int:
    """How many records the index has room for: enough for records of 64 KiB, up to some 450 MB of memory."""
    fitting = superblock.total_bytes // BYTES_PER_RECORD
    return min(MAX_RECORDS, max(MIN_RECORDS, fitting))


@asynccontextmanager
async def open_tier(
    disk: Disk,
    policy: AdmissionPolicy,
    hooks: TierHooks,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    max_records: int | None = None,
    cluster: str = "",
) -> AsyncIterator[SsdTier]:
    """The tier on this disk, for as long as the block runs. Objects on the disk are found at once.

    `segment_bytes` counts for a disk without a log. The log belongs to the first `cluster` that opens it. The disk is
    not closed.

    Raises `ConfigError` when the disk is too small, or holds something else or another cluster's log, and `OSError`
    when it fails at once.
    """
    superblock = await open_superblock(disk, segment_bytes, cluster)
    found = await read_log(disk, superblock)
    await disk.sync()  # records that were read may not be durable yet
    wanted = default_max_records(superblock) if max_records is None else max_records
    table, index = await trio.to_thread.run_sync(restore, superblock, found, wanted, [*hooks.shares()])
    async with open_background_nursery() as nursery:
        log = ColdLog(
            disk,
            superblock,
            table,
            index,
            [each.marks for each in found],
            Admission(policy, hooks.unix()),
            nursery,
            hooks,
        )
        marks = DeadMarkWriter(log)
        upkeep = Upkeep(log, marks)
        for number in unsafe_segments(found):
            await upkeep.start(table[number])
        nursery.start_soon(marks.run)
        nursery.start_soon(upkeep.run)
        tier = SsdTier(log, marks, nursery)
        if hooks.shares():
            nursery.start_soon(tier.keep_shares)
        watch = DiskWatch(log, nursery)
        nursery.start_soon(watch.watch_place)
        nursery.start_soon(watch.watch_answers)
        log.work.send()
        try:
            yield tier
        finally:
            await tier.write_last_marks()
