"""Records that are written again when their segment is reclaimed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import trio

from p2pstore.errors import CapacityExceeded
from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.index import ColdRecord, with_care
from p2pstore.ssd_tier.log_layout import PAGE_BYTES, DamagedRecord
from p2pstore.ssd_tier.log_segments import Segment, SegmentState, Stream
from p2pstore.ssd_tier.record_header import RecordHeader, decode_record_header, moved_record_header
from p2pstore.ssd_tier.record_writing import text_bytes
from p2pstore.ssd_tier.reinsertion import Candidate, choose_kept

CHECKPOINT_EVERY: Final = 128


class Keeper:
    """Copies records of a sealed segment, as they are, to the segment of those that are kept."""

    def __init__(self, log: ColdLog, is_last_copy: Callable[[bytes], bool]) -> None:
        self._log = log
        self._is_last_copy = is_last_copy

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
        above_reserve = self._log.index.of_namespaces.above_reserve(self._log.shares())
        for number, record in enumerate(self._log.index.records_of(segment.number)):
            if number % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
                await trio.lowlevel.checkpoint()
            entry = self._log.index.find(record.digest)
            if entry is not None and not self._log.is_expired(entry):
                last_copy = self._is_last_copy(record.digest)
                above = above_reserve.get(entry.namespace)
                if above:
                    above_reserve[entry.namespace] = max(0, above - record.disk_bytes)
                found.append(
                    Candidate(record, record.disk_bytes, record.hits, last_copy, above == 0)
                )
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
            log.commit.wrote(place.segment)
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
