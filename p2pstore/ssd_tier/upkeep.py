"""Background work of the tier: segments are started, sealed and reclaimed, records worth it kept, dead marks written,
and the disk watched."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Final

import trio

from p2pstore.errors import CapacityExceeded
from p2pstore.ssd_tier.cold_log import ColdLog, Signal
from p2pstore.ssd_tier.footer import encode_footer
from p2pstore.ssd_tier.health import PATIENCE_SECONDS, TierOff
from p2pstore.ssd_tier.index import ColdRecord, with_care
from p2pstore.ssd_tier.log_layout import PAGE_BYTES, DamagedRecord, DeadMarks, encode_segment_start
from p2pstore.ssd_tier.log_segments import Candidate, Segment, SegmentState, Stream, choose_kept
from p2pstore.ssd_tier.record_format import RecordHeader, decode_record_header, moved_record_header
from p2pstore.ssd_tier.record_writing import text_bytes

logger = logging.getLogger("p2pstore.ssd_tier")

CHECKPOINT_EVERY: Final = 128
GATHER_SECONDS: Final = 0.5
"""Time in which marks are collected for one write: discards are durable within a second."""
RETRY_SECONDS: Final = 1.0
WRITES_AT_ONCE: Final = 16
INSPECT_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.5
BATCH: Final = 128
"""Objects dropped in one go: a few milliseconds."""
DRAIN_WARNING_SECONDS: Final = 30.0


class Keeper:
    """Copies records of a sealed segment, as they are, to the segment of those that are kept."""

    def __init__(self, log: ColdLog) -> None:
        self._log = log

    async def keep(self, segment: Segment) -> None:
        """Copy what is worth it, as far as there is room."""
        for candidate in choose_kept(await self._candidates(segment), self._log.segment_bytes):
            if segment.state is not SegmentState.SEALED or not self._log.is_writable:
                return
            try:
                if not await self._copy(candidate.record):
                    return
            except DamagedRecord:
                self._lose(candidate.record)
                self._log.measures.damaged += 1
            except OSError as error:
                self._lose(candidate.record)
                self._log.read_failed(error)

    async def _candidates(self, segment: Segment) -> list[Candidate[ColdRecord]]:
        found = []
        above_reserve = self._log.index.rows.of_namespaces.above_reserve(self._log.shares())
        for number, record in enumerate(self._log.index.records_of(segment.number)):
            if number % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
                await trio.lowlevel.checkpoint()
            entry = self._log.index.find(record.digest)
            if entry is not None and not self._log.is_expired(entry):
                last_copy = self._log.is_last_copy(record.digest)
                above = above_reserve.get(entry.namespace)
                if above:
                    above_reserve[entry.namespace] = max(0, above - record.disk_bytes)
                found.append(Candidate(record, record.disk_bytes, record.hits, last_copy, above == 0))
        return found

    async def _copy(self, record: ColdRecord) -> bool:
        """False when there is no room for it."""
        log, place = self._log, record.place
        async with log.scratch.buffer(record.disk_bytes) as memory:
            log.table.begin_read(place.segment)
            try:
                await log.disk.read_into(log.position(place), [memory])
            finally:
                log.end_reads([place.segment])
            log.health.read_worked()
            log.measures.read.add(record.disk_bytes, log.unix())
            header = decode_record_header(
                memory[:PAGE_BYTES], log.store_id, place.segment, place.generation, place.page
            )
            return await self._write(record, header, memory)

    async def _write(self, record: ColdRecord, header: RecordHeader, memory: memoryview) -> bool:
        log = self._log
        facts = with_care(header.facts, log.index.find(record.digest))
        header = replace(header, facts=facts)
        if not self._is_there(record):
            return True  # it went while it was read
        pages = record.disk_bytes // PAGE_BYTES
        with log.under_way(facts.digest, facts.version) as job:
            place = log.table.place(pages, text_bytes(facts), Stream.KEPT)
            if place is None:
                return False
            job.places.append(place)
            try:
                page = moved_record_header(log.store_id, header, place)
                await log.disk.write_from(log.position(place), [page, memory[PAGE_BYTES:]])
            except OSError as error:
                log.write_failed(place.segment, error)
                return False
            log.commit.unsynced.add(place.segment)
            log.measures.written.add(record.disk_bytes, log.unix())
            log.admission.spend(record.disk_bytes, log.unix())
            if self._is_there(record) and log.is_trusted(place) and not job.discarded:
                try:
                    log.mark_dead(log.index.add(place, facts, header.part, header.stored_bytes))
                except CapacityExceeded:
                    return False
                log.measures.kept_records += 1
        return True

    def _is_there(self, record: ColdRecord) -> bool:
        entry = self._log.index.find(record.digest)
        return entry is not None and record.place in entry.places

    def _lose(self, record: ColdRecord) -> None:
        entry = self._log.index.find(record.digest)
        if entry is not None and record.place in entry.places:
            self._log.lose(entry)


class DeadMarkWriter:
    """Writes pages of marks and syncs, in rounds. Failed pages are written again, until the tier is off.

    A page is written whole and anew each time, so a sync that follows speaks for it, whatever became of the last one:
    unless another sync failed in between, which may have taken the page away.
    """

    def __init__(self, log: ColdLog) -> None:
        self._log = log
        self._begun = 0
        self._done = 0
        """The last round that worked: all marks made before it began are durable."""
        self._hurry = Signal()

    async def durable(self) -> None:
        """Returns when all records marked dead so far stay so whatever happens. Raises `TierOff`."""
        log = self._log
        if not log.dirty and self._begun == self._done:
            await trio.lowlevel.checkpoint()
            return
        wanted = self._begun + 1
        while self._done < wanted:
            if log.is_off:
                raise TierOff(f"discards cannot be written: {log.health.why}")
            self._hurry.send()
            log.marked.send()
            await log.marks_moved.park()

    async def run(self) -> None:
        """Until the tier is off."""
        log = self._log
        while not log.is_off:
            await log.marked.wait()
            with trio.move_on_after(GATHER_SECONDS):
                await self._hurry.wait()
            while not await self._round():
                if log.is_off:
                    break
                await trio.sleep(RETRY_SECONDS)
            log.marks_moved.unpark_all()

    async def _round(self) -> bool:
        """Whether all marks made before are durable."""
        log = self._log
        self._begun += 1
        # The pages as they are now: a record that dies later lost to one that the first sync does not cover.
        this, pages = self._begun, {number: log.marks[number].encode() for number in log.dirty}
        log.dirty.clear()
        try:
            if pages:
                # First what the dead records lost to: a crash in between must leave one of them.
                await log.commit.sync_writes()
                failures = log.health.sync_errors
                await self._write(pages)
                await log.commit.sync()
                if log.health.sync_errors != failures:
                    raise OSError(errno.EIO, "another sync failed while dead marks were written")
        except OSError as error:
            log.dirty.update(pages)
            log.health.discards_failed(error)
            log.state_may_have_changed()
            return False
        log.health.discards_worked()
        self._done = this
        return True

    async def _write(self, pages: dict[int, bytes]) -> None:
        errors: list[OSError] = []
        limit = trio.CapacityLimiter(WRITES_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for number, page in pages.items():
                nursery.start_soon(self._write_page, number, page, limit, errors)
        if errors:
            raise errors[0]

    async def _write_page(
        self, number: int, page: bytes, limit: trio.CapacityLimiter, errors: list[OSError]
    ) -> None:
        log = self._log
        async with limit:
            position = log.segment_position(log.table[number]) + PAGE_BYTES
            try:
                await log.disk.write_from(position, [page])
            except OSError as error:
                errors.append(error)
            else:
                log.measures.written.add(PAGE_BYTES, log.unix())


class DiskWatch:
    """Two tasks: one looks whether the log is still in its place, one whether the disk answers."""

    def __init__(self, log: ColdLog, nursery: trio.Nursery) -> None:
        self._log = log
        self._nursery = nursery
        self._probing = False

    async def watch_place(self) -> None:
        """While the tier writes at all. Nothing fails when the log's file is deleted, moved or replaced: it has to be
        looked for."""
        log = self._log
        while log.is_writable:
            await log.disk.inspect()
            log.is_in_place()
            await trio.sleep(INSPECT_SECONDS)

    async def watch_answers(self) -> None:
        """Until the tier is off."""
        log = self._log
        while not log.is_off:
            await trio.sleep(LOOK_SECONDS)
            waits = log.disk.waits
            self._note(waits.silent_seconds)
            log.health.waited(waits)
            log.state_may_be_worse()
            now = trio.current_time()
            for waiting in list(log.waiting):
                waiting.judge(waits, now)

    def _note(self, silent_seconds: float) -> None:
        """From the first silence until the disk answers again, it is asked only whether it does."""
        log, silent = self._log, silent_seconds >= PATIENCE_SECONDS
        if silent and not log.is_silent:
            logger.warning(
                "the SSD has not answered for %.0f s: nothing is read there until it does",
                silent_seconds,
                extra={"event": "ssd_silent"},
            )
        elif log.is_silent and not silent:
            logger.info("the SSD answers again", extra={"event": "ssd_answers"})
        log.is_silent = silent
        if silent and not self._probing:
            self._probing = True
            self._nursery.start_soon(self._probe)

    async def _probe(self) -> None:
        """Read one page: any answer ends the silence, which may be due to a single stuck request."""
        try:
            with self._log.scratch.page() as page, suppress(OSError):
                await self._log.disk.read_into(0, [page])
        finally:
            self._probing = False


Step = Callable[[Segment], Awaitable[None]]


class Upkeep:
    """Seals what is full, reclaims what is needed, and starts what is empty: one step of a segment after the other,
    those of different segments side by side. Each takes a sync or two, which they share so."""

    def __init__(self, log: ColdLog, marks: DeadMarkWriter) -> None:
        self._log = log
        self._marks = marks
        self._keeper = Keeper(log)
        self._under_way: set[int] = set()
        """Segments of which a step is under way."""

    async def run(self) -> None:
        """While the tier writes at all."""
        log = self._log
        async with trio.open_nursery() as nursery:
            while log.is_writable:
                await log.work.wait()
                while due := self._next_due():
                    self._under_way.add(due[0].number)
                    nursery.start_soon(self._do, *due)

    def _next_due(self) -> tuple[Segment, Step] | None:
        table, under_way = self._log.table, self._under_way
        if not self._log.is_writable:
            return None
        for segment in table.to_seal():
            if segment.number not in under_way:
                return segment, self._seal
        empty = table.in_state(SegmentState.EMPTY)
        starting = sum(segment.number in under_way for segment in empty)
        if table.free_count + starting < table.wanted_free:
            for segment in empty:
                if segment.number not in under_way:
                    return segment, self.start
        index = self._log.index
        above = index.rows.of_namespaces.above_reserve(self._log.shares())
        victim = table.choose_reclaim(
            index.segment_live_bytes,
            under_way,
            lambda number: index.rows.of_namespaces.reserved_in(number, above),
        )
        return (victim, self._reclaim) if victim is not None else None

    async def _do(self, segment: Segment, step: Step) -> None:
        try:
            await step(segment)
        finally:
            self._under_way.discard(segment.number)
            self._log.work.send()

    async def start(self, segment: Segment) -> None:
        """Give an empty segment a new generation: from then on nothing that was in it can come back."""
        log = self._log
        generation = segment.generation + 1
        log.dirty.discard(
            segment.number
        )  # marks of the old one must not come after the start of the new one
        start = encode_segment_start(log.store_id, segment.number, generation, opened=True)
        await self._write(segment, log.segment_position(segment), start)
        if await self._synced() and segment.state is SegmentState.EMPTY:
            log.marks[segment.number] = DeadMarks(log.store_id, segment.number, generation)
            log.table.started(segment, generation)
            log.room.unpark_all()

    async def _seal(self, segment: Segment) -> None:
        """Sync the records, write the footer behind them, sync that."""
        log = self._log
        if not await self._synced() or segment.state is not SegmentState.SEALING:
            return
        rows = log.index.rows.footer(segment.number)
        footer = encode_footer(log.store_id, segment.number, segment.generation, rows)
        end = log.segment_position(segment) + log.segment_bytes
        await self._write(segment, end - len(footer), footer)
        if await self._synced() and segment.state is SegmentState.SEALING:
            log.table.sealed(segment)

    async def _write(self, segment: Segment, position: int, content: bytes) -> None:
        log = self._log
        try:
            await log.disk.write_from(position, [content])
        except OSError as error:
            log.health.write_failed(error)
            log.retire(segment)
        else:
            log.commit.unsynced.add(segment.number)
            log.measures.written.add(len(content), log.unix())

    async def _synced(self) -> bool:
        """False when a sync failed: that has retired what it left in doubt."""
        try:
            await self._log.commit.sync()
        except OSError:
            return False
        return True

    async def _reclaim(self, segment: Segment) -> None:
        """Keep what is worth it, withdraw the rest, wait for its readers, and make it dead for good."""
        log = self._log
        await self._keeper.keep(segment)
        if segment.state is not SegmentState.SEALED:
            return
        records = log.index.records_of(segment.number)
        while batch := [record.digest for record in islice(records, BATCH)]:
            log.measures.evicted_objects += log.drop(batch)
            await trio.lowlevel.checkpoint()
        if segment.state is not SegmentState.SEALED:
            return
        log.table.drain(segment)
        await self._empty(segment)

    async def _empty(self, segment: Segment) -> None:
        """Readers keep the bytes of what they found, as long as the disk takes: there is no way to end a read."""
        log = self._log
        while segment.reads and segment.state is SegmentState.DRAINING:
            with trio.move_on_after(DRAIN_WARNING_SECONDS) as scope:
                await log.drained.park()
            if scope.cancelled_caught:
                logger.warning(
                    "a segment of the SSD tier waits for %d reads that take over %d s: is the disk hung?",
                    segment.reads,
                    DRAIN_WARNING_SECONDS,
                )
        try:
            await self._marks.durable()
        except TierOff:
            return
        if segment.state is SegmentState.DRAINING:
            log.table.emptied(segment)
            log.measures.reclaimed_segments += 1
