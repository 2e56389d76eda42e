"""Reading objects straight into the memory where they are wanted, and checking every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import trio

from p2pstore.objects import PART_BYTES
from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.index import ColdEntry, with_care
from p2pstore.ssd_tier.log_layout import (
    ColdFacts,
    DamagedRecord,
    part_count,
    round_up_to_page,
)
from p2pstore.ssd_tier.misses import ColdMiss, Miss
from p2pstore.ssd_tier.patience import PATIENCE_SECONDS, Overdue, Waiting
from p2pstore.ssd_tier.record_header import RecordHeader, joined_facts
from p2pstore.ssd_tier.record_reader import RecordReader

PARTS_AT_ONCE: Final = 4

Prepare = Callable[[ColdFacts], memoryview]


class Reader:
    """Reads objects. Calls run side by side."""

    def __init__(self, log: ColdLog) -> None:
        self._log = log
        self._records = RecordReader(log)

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
        waiting = Waiting(trio.current_time(), patience_seconds, overdue or _wait_on)
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
        log.measures.read_latency.add(trio.current_time() - started)
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
            return [await self._records.read_part(entry, 0, view)]
        headers: list[RecordHeader | None] = [None] * parts
        failures: list[Exception] = []
        limit = trio.CapacityLimiter(PARTS_AT_ONCE)

        async def read(part: int, scope: trio.CancelScope) -> None:
            try:
                async with limit:
                    headers[part] = await self._records.read_part(
                        entry, part, view[part * PART_BYTES :]
                    )
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


def _wait_on(why: str) -> None:
    """Nobody wants to know."""


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
