"""What happens to segments in the background: they are started, sealed, and reclaimed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Final

import trio

from p2pstore.ssd_tier.cold_keeping import Keeper
from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.dead_mark_writer import DeadMarkWriter
from p2pstore.ssd_tier.dead_marks import DeadMarks
from p2pstore.ssd_tier.health import TierOff
from p2pstore.ssd_tier.log_segments import Segment, SegmentState
from p2pstore.ssd_tier.superblock import encode_segment_start

logger = logging.getLogger("p2pstore.ssd_tier")

BATCH: Final = 128
"""Objects dropped in one go: a few milliseconds."""
DRAIN_WARNING_SECONDS: Final = 30.0


Step = Callable[[Segment], Awaitable[None]]


class Upkeep:
    """Seals what is full, reclaims what is needed, and starts what is empty: one step of a segment after the other,
    those of different segments side by side. Each takes a sync or two, which they share so."""

    def __init__(
        self, log: ColdLog, marks: DeadMarkWriter, is_last_copy: Callable[[bytes], bool]
    ) -> None:
        self._log = log
        self._marks = marks
        self._keeper = Keeper(log, is_last_copy)
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
        """A segment that needs something, and has no step under way."""
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
        above = index.of_namespaces.above_reserve(self._log.shares())
        victim = table.choose_reclaim(
            index.segment_live_bytes,
            under_way,
            lambda number: index.of_namespaces.reserved_in(number, above),
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
            log.room.changed()

    async def _seal(self, segment: Segment) -> None:
        """Sync the records, write the footer behind them, sync that."""
        log = self._log
        if not await self._synced() or segment.state is not SegmentState.SEALING:
            return
        footer = log.footer(segment)
        end = log.segment_position(segment) + log.segment_bytes
        await self._write(segment, end - len(footer), footer)
        if await self._synced() and segment.state is SegmentState.SEALING:
            log.table.sealed(segment)

    async def _write(self, segment: Segment, position: int, content: bytes) -> None:
        """The segment is retired when that fails."""
        log = self._log
        try:
            await log.disk.write_from(position, [content])
        except OSError as error:
            log.health.write_failed(error)
            log.retire(segment)
        else:
            log.commit.wrote(segment.number)
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
                await log.drained.wait()
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
