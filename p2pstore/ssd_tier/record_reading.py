"""Reading objects straight into the memory where they are wanted, and checking every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import trio

from p2pstore.objects import PART_BYTES
from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.disk_protocol import Check
from p2pstore.ssd_tier.health import PATIENCE_SECONDS, ColdMiss, Miss, Overdue, Waiting
from p2pstore.ssd_tier.index import ColdEntry, with_care
from p2pstore.ssd_tier.log_layout import (
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    part_bytes,
    part_count,
    round_up_to_page,
)
from p2pstore.ssd_tier.record_format import (
    RecordHeader,
    check_part,
    decode_record_header,
    joined_facts,
    unpack_part,
)

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
        if log.is_expired(entry):
            log.measures.expired += 1
            log.drop([digest])
            raise ColdMiss(Miss.EXPIRED, "the object's time to live is over")
        return entry

    async def load(
        self,
        digest: bytes,
        prepare: Prepare,
        overdue: Overdue | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> ColdFacts:
        """See `SsdTier.load`."""
        log = self._log
        waiting = Waiting(trio.current_time(), patience_seconds, overdue or (lambda why: None))
        log.waiting.add(waiting)
        try:
            if log.is_silent:
                waiting.told = True
                raise ColdMiss(Miss.SILENT, "the SSD does not answer just now")
            facts = await self._load(self.find(digest), prepare, waiting)
        except ColdMiss:
            log.measures.misses += 1
            raise
        finally:
            log.waiting.remove(waiting)
            log.measures.unanswered += waiting.told
        log.measures.hits += 1
        log.index.touch(digest)
        return with_care(facts, log.index.find(digest))

    async def _load(self, entry: ColdEntry, prepare: Prepare, waiting: Waiting) -> ColdFacts:
        log = self._log
        started = trio.current_time()
        view = prepare(facts_known(entry))
        if len(view) < round_up_to_page(entry.length):
            raise ValueError(
                f"{len(view):,} bytes for a value of {entry.length:,}: it needs whole pages"
            )
        while True:
            try:
                with self._pinned(entry):
                    facts = joined_facts(await self._read_parts(entry, view, waiting))
                break
            except (DamagedRecord, OSError) as error:
                now = log.index.find(entry.digest)
                if now is None or now.version != entry.version or now.places == entry.places:
                    raise self._lost(entry, error) from error
                entry = now  # reclaim has kept a copy elsewhere meanwhile
        log.measures.read_latency.add_seconds(trio.current_time() - started)
        return facts

    def _lost(self, entry: ColdEntry, error: DamagedRecord | OSError) -> ColdMiss:
        """It cannot be read where it lies, so it is dropped."""
        log = self._log
        if isinstance(error, DamagedRecord):
            log.measures.damaged += 1
            log.lose(entry)
            return ColdMiss(Miss.DAMAGED, str(error))
        log.read_failed(error)
        log.lose(entry)
        return ColdMiss(Miss.READ_ERROR, f"the disk failed: {error}")

    @contextmanager
    def _pinned(self, entry: ColdEntry) -> Iterator[None]:
        """Segments with reads under way are not written anew."""
        for place in entry.places:
            self._log.table.begin_read(place.segment)
        try:
            yield
        finally:
            self._log.end_reads(place.segment for place in entry.places)

    async def _read_parts(
        self, entry: ColdEntry, view: memoryview, waiting: Waiting
    ) -> Sequence[RecordHeader]:
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
                waiting.moved = trio.current_time()
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
        """Read a record's header and payload with one request. The value is at the beginning of `view` then, every byte
        checked. One that is not compressed comes straight there, and is checked by the reading thread.

        `view` has room for whole pages. Raises `DamagedRecord`, and `OSError` when the disk failed twice.
        """
        place, length, stored = entry.places[part], part_bytes(entry.length, part), entry.stored[part]
        log = self._log
        with log.scratch.page() as page:
            if stored < length:
                async with log.scratch.buffer(stored) as memory:
                    await self._read(place, [page, memory])
                    header = self._header(page, entry, part)
                    packed, value = memory[: header.stored_bytes], view[:length]
                    await log.workers.run(length, unpack_part, header, packed, value)
                    return header
            headers: list[RecordHeader] = []

            def check() -> None:
                headers[:] = [self._header(page, entry, part)]
                check_part(headers[0], view[:length])

            target = [view[: round_up_to_page(length)]] if length else []
            await self._read(place, [page, *target], check)
            return headers[0]

    def _header(self, page: memoryview, entry: ColdEntry, part: int) -> RecordHeader:
        place = entry.places[part]
        header = decode_record_header(
            page, self._log.store_id, place.segment, place.generation, place.page
        )
        facts = header.facts
        found = facts.digest, facts.version, header.part, header.stored_bytes
        if found != (entry.digest, entry.version, part, entry.stored[part]):
            raise DamagedRecord("another record lies where this one should")
        return header

    async def _read(
        self, place: RecordPlace, buffers: Sequence[memoryview], check: Check | None = None
    ) -> None:
        """From the beginning of a record on. A read that fails is tried again once."""
        log = self._log
        position = log.position(place)
        try:
            await log.disk.read_into(position, buffers, check)
        except OSError:
            await log.disk.read_into(position, buffers, check)
        log.health.read_worked()
        log.measures.read.add(sum(map(len, buffers)), log.unix())


def facts_known(entry: ColdEntry) -> ColdFacts:
    """The facts of an object in the index: all but its sums, dtype and shape."""
    return ColdFacts(
        digest=entry.digest,
        version=entry.version,
        length=entry.length,
        namespace=entry.namespace,
        key=entry.key,
        sums=b"",
        expires_unix_ms=entry.expires_unix_ms,
        replicas=entry.replicas,
        pin=entry.pin,
        soft=entry.soft,
    )
