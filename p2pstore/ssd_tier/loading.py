"""Reading objects straight into the memory where they are wanted, and checking every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import trio

from p2pstore.objects import MIB, PART_BYTES, chunk_sums
from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.layout import (
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    part_bytes,
    part_count,
    round_up_to_page,
)
from p2pstore.ssd_tier.misses import ColdMiss, Miss
from p2pstore.ssd_tier.record_header import RecordHeader, decode_record_header, joined_facts

INLINE_BYTES: Final = MIB
"""Values up to this length are checked at once; longer ones by a thread, for they would hold up everything else."""
PARTS_AT_ONCE: Final = 4

Prepare = Callable[[ColdFacts], memoryview]


class Reader:
    """Reads objects. Calls run side by side."""

    def __init__(self, log: ColdLog) -> None:
        self._log = log

    def find(self, digest: bytes) -> ColdEntry:
        """The entry. Raises `ColdMiss`."""
        log = self._log
        if log.is_off:
            raise ColdMiss(Miss.OFF, f"the tier is off: {log.health.why}")
        entry = log.index.find(digest)
        if entry is None:
            raise ColdMiss(Miss.ABSENT, "the tier does not hold the object")
        if entry.expires_unix_ms and entry.expires_unix_ms <= log.unix() * 1000:
            log.measures.expired += 1
            log.drop([digest])
            raise ColdMiss(Miss.EXPIRED, "the object's time to live is over")
        return entry

    async def load(self, digest: bytes, prepare: Prepare) -> ColdFacts:
        """See `SsdTier.load`."""
        log = self._log
        try:
            facts = await self._load(self.find(digest), prepare)
        except ColdMiss:
            log.measures.misses += 1
            raise
        log.measures.hits += 1
        log.index.touch(digest)
        return facts

    async def _load(self, entry: ColdEntry, prepare: Prepare) -> ColdFacts:
        log = self._log
        started = trio.current_time()
        with self._pinned(entry):
            view = prepare(facts_known(entry))
            if len(view) < round_up_to_page(entry.length):
                raise ValueError(
                    f"{len(view):,} bytes for a value of {entry.length:,}: it needs whole pages"
                )
            try:
                facts = joined_facts(await self._read_parts(entry, view))
                if (facts.digest, facts.version) != (entry.digest, entry.version):
                    raise DamagedRecord("another object lies where this one should")
            except DamagedRecord as error:
                log.measures.damaged += 1
                log.lose(entry)
                raise ColdMiss(Miss.DAMAGED, str(error)) from error
            except OSError as error:
                log.read_failed(error)
                log.lose(entry)
                raise ColdMiss(Miss.READ_ERROR, f"the disk failed: {error}") from error
        log.measures.read_latency.add(trio.current_time() - started)
        return facts

    @contextmanager
    def _pinned(self, entry: ColdEntry) -> Iterator[None]:
        """Segments with reads under way are not written anew."""
        for place in entry.places:
            self._log.table.begin_read(place.segment)
        try:
            yield
        finally:
            self._log.end_reads(place.segment for place in entry.places)

    async def _read_parts(self, entry: ColdEntry, view: memoryview) -> Sequence[RecordHeader]:
        parts = part_count(entry.length)
        if parts == 1:
            return [await self._read_part(entry, 0, view)]
        headers: list[RecordHeader | None] = [None] * parts
        failures: list[Exception] = []
        limit = trio.CapacityLimiter(PARTS_AT_ONCE)

        async def read(part: int, scope: trio.CancelScope) -> None:
            try:
                async with limit:
                    headers[part] = await self._read_part(entry, part, view[part * PART_BYTES :])
            except (DamagedRecord, OSError) as error:
                failures.append(error)
                scope.cancel()

        async with trio.open_nursery() as nursery:
            for part in range(parts):
                nursery.start_soon(read, part, nursery.cancel_scope)
        if failures:
            raise failures[0]
        return [header for header in headers if header is not None]

    async def _read_part(self, entry: ColdEntry, part: int, view: memoryview) -> RecordHeader:
        """One record, its value at the beginning of `view`. Raises `DamagedRecord` and `OSError`."""
        place, length = entry.places[part], part_bytes(entry.length, part)
        target = view[: round_up_to_page(length)]
        with self._log.scratch.page() as page:
            await self._read(place, [page, target] if length else [page])
            header = self._header(page, place)
        if (header.facts.digest, header.part) != (entry.digest, part):
            raise DamagedRecord("another record lies where this one should")
        await self._run(length, check_sums, target[:length], header.facts.chunk_sums)
        return header

    def _header(self, page: memoryview, place: RecordPlace) -> RecordHeader:
        return decode_record_header(
            page, self._log.store_id, place.segment, place.generation, place.page
        )

    async def _read(self, place: RecordPlace, buffers: Sequence[memoryview]) -> None:
        """From the beginning of a record. Tried twice."""
        log = self._log
        position = log.position(place)
        try:
            await log.disk.read_into(position, buffers)
        except OSError:
            await log.disk.read_into(position, buffers)
        log.health.read_worked()
        log.measures.read.add(sum(map(len, buffers)), log.unix())

    async def _run(self, length: int, work: Callable[..., None], *arguments: object) -> None:
        """In a thread, where it takes long. The memory is in use until it returns, cancelled or not."""
        if length <= INLINE_BYTES:
            work(*arguments)
        else:
            await trio.to_thread.run_sync(work, *arguments, limiter=self._log.workers)


def check_sums(value: memoryview, sums: Sequence[int]) -> None:
    """Raises `DamagedRecord` unless these are the sums of the value's chunks."""
    if chunk_sums(value) != np.array(sums, "<u8").tobytes():
        raise DamagedRecord("the value is not the one that was written")


def facts_known(entry: ColdEntry) -> ColdFacts:
    """What the index knows of an object: all but its sums, dtype and shape."""
    return ColdFacts(
        digest=entry.digest,
        version=entry.version,
        length=entry.length,
        namespace=entry.namespace,
        key=entry.key,
        chunk_sums=(),
        expires_unix_ms=entry.expires_unix_ms,
        replicas=entry.replicas,
        pin=entry.pin,
        soft=entry.soft,
    )
