"""Writing objects: straight from the memory they are in, each part as one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import trio

from p2pstore.errors import CapacityExceeded
from p2pstore.objects import MIB
from p2pstore.ssd_tier.cold_log import ColdLog, UnderWay
from p2pstore.ssd_tier.log_layout import (
    PAGE_BYTES,
    Codec,
    ColdFacts,
    RecordPlace,
    part_bytes,
    part_count,
    record_bytes,
    round_up_to_page,
)
from p2pstore.ssd_tier.log_segments import Stream
from p2pstore.ssd_tier.record_format import (
    WORTH_RATIO,
    compress_part,
    encode_record_header,
    sample_ratio,
)
from p2pstore.ssd_tier.write_admission import WriteRefusal

ROOM_SECONDS: Final = 5.0
"""Time that a store waits for a segment to become free."""

SPARE_SHARE: Final = 64
MAX_SPARE_BYTES: Final = 16 * MIB
"""A namespace at its cap gives up this part of its share ahead of need, at most."""
SHARES_SECONDS: Final = 1.0
"""Between two looks whether namespaces have more than their shares."""
MAX_GIVEN_UP: Final = 4_096
"""Objects at a time."""
GIVEN_UP_PER_STEP: Final = 64

Buffers = Sequence[memoryview | bytes]


class _Refused(Exception):
    """The object is not written after all."""

    def __init__(self, refusal: WriteRefusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class Writer:
    """Writes objects to the open segments. Calls run side by side: placing takes no time, writes overlap."""

    def __init__(self, log: ColdLog) -> None:
        self.queued_bytes = 0
        """Bytes of values whose `store` has not returned."""
        self._coming: Counter[str] = Counter()
        """Most bytes of these values on the disk, by namespace."""
        self._log = log

    async def store(self, facts: ColdFacts, payload: memoryview, *, durable: bool) -> bool:
        """See `SsdTier.store`."""
        size = stored_bytes_of(facts.length)
        self.queued_bytes += facts.length
        self._coming[facts.namespace] += size
        try:
            await self._store(facts, payload, durable)
        except _Refused as refused:
            self._log.admission.refused[refused.refusal] += 1
            return False
        finally:
            self.queued_bytes -= facts.length
            self._coming[facts.namespace] -= size
            if not self._coming[facts.namespace]:
                del self._coming[facts.namespace]
        return True

    def fits_share(self, namespace: str, length: int) -> bool:
        """Whether a value may be there at all, whatever its namespace gives up for it."""
        share = self._log.shares().get(namespace)
        most = None if share is None else share.most_bytes
        return most is None or stored_bytes_of(length) <= most

    async def keep_shares(self) -> None:
        """Have namespaces give up what is above their shares, which change with what they have in memory."""
        while self._log.is_writable:
            await trio.sleep(SHARES_SECONDS)
            for namespace, share in self._log.shares().items():
                if share.most_bytes is not None:
                    await self._give_up(namespace, share.most_bytes, spare_bytes=0)

    async def _keep_within_share(self, facts: ColdFacts) -> None:
        """Have the namespace give up what it wrote first, until it may have this as well. Values count at their full
        size until they are there."""
        share = self._log.shares().get(facts.namespace)
        if share is None or share.most_bytes is None:
            return
        most = share.most_bytes - self._coming[facts.namespace]
        # Some more than that, as all of the index is looked through.
        spare = min(MAX_SPARE_BYTES, share.most_bytes // SPARE_SHARE)
        if most < 0 or not await self._give_up(facts.namespace, most, spare):
            raise _Refused(WriteRefusal.OVER_CAP)

    async def _give_up(self, namespace: str, most_bytes: int, spare_bytes: int) -> bool:
        """Whether the namespace has no more than `most_bytes` now. If it had, `spare_bytes` less."""
        log, counted = self._log, self._log.index.rows.of_namespaces
        above = counted.bytes_of(namespace) - most_bytes
        if above <= 0:
            return True
        oldest = log.index.oldest(namespace, above + spare_bytes, MAX_GIVEN_UP)
        for begin in range(0, len(oldest), GIVEN_UP_PER_STEP):
            log.measures.evicted_objects += log.drop(oldest[begin : begin + GIVEN_UP_PER_STEP])
            await trio.lowlevel.checkpoint()
        return counted.bytes_of(namespace) <= most_bytes

    async def _store(self, facts: ColdFacts, payload: memoryview, durable: bool) -> None:
        log = self._log
        self._check(facts)
        known = log.index.find(facts.digest)
        if known is not None and known.version > facts.version:
            raise _Refused(WriteRefusal.OUTDATED)
        if known is None or known.version < facts.version:
            await self._keep_within_share(facts)
            started = trio.current_time()
            with log.under_way(facts.digest, facts.version) as job:
                stored = await self._write_parts(job, facts, payload)
                self._publish(job, facts, stored)
            log.measures.write_latency.add_seconds(trio.current_time() - started)
            log.measures.stored_objects += 1
            log.measures.stored_bytes += facts.length
        else:
            await trio.lowlevel.checkpoint()
        if durable:
            await self._make_durable(facts)

    def _check(self, facts: ColdFacts) -> None:
        if not self._log.is_writable:
            raise _Refused(WriteRefusal.READ_ONLY)
        pages = record_bytes(part_bytes(facts.length, 0)) // PAGE_BYTES
        if not self._log.table.fits_empty(pages, text_bytes(facts)):
            raise _Refused(WriteRefusal.TOO_LARGE)

    async def _write_parts(self, job: UnderWay, facts: ColdFacts, payload: memoryview) -> list[int]:
        stored: list[int] = []
        start = 0
        for part in range(part_count(facts.length)):
            length = part_bytes(facts.length, part)
            stored.append(await self._write_part(job, facts, part, payload[start:], length))
            start += length
        return stored

    async def _write_part(
        self, job: UnderWay, facts: ColdFacts, part: int, payload: memoryview, length: int
    ) -> int:
        """Stored bytes of the part: compressed where a sample says that it pays."""
        log = self._log
        value = payload[:length]
        if log.admission.policy.compress and sample_ratio(value) <= WORTH_RATIO:
            async with log.scratch.buffer(length) as memory:
                sizes = await log.workers.run(length, _pack, value, memory)
                if sizes is not None:
                    stored = sum(sizes)
                    packed = [memory[: round_up_to_page(stored)]]
                    await self._write_record(job, facts, part, packed, stored, Codec.LZ4, sizes)
                    log.measures.compressed_parts += 1
                    return stored
        await self._write_record(job, facts, part, whole_pages(payload, length), length)
        return length

    async def _write_record(
        self,
        job: UnderWay,
        facts: ColdFacts,
        part: int,
        payload: Buffers,
        stored_bytes: int,
        codec: Codec = Codec.RAW,
        chunk_sizes: Sequence[int] = (),
    ) -> None:
        log = self._log
        size = record_bytes(stored_bytes)
        place = await self._place(job, size // PAGE_BYTES, text_bytes(facts))
        try:
            header = encode_record_header(
                log.store_id, place, facts, part, stored_bytes, codec, chunk_sizes
            )
            await log.disk.write_from(log.position(place), [header, *payload])
        except OSError as error:
            log.write_failed(place.segment, error)
            raise _Refused(WriteRefusal.FAILED) from error
        log.commit.unsynced.add(place.segment)
        log.measures.written.add(size, log.unix())

    async def _place(self, job: UnderWay, pages: int, text: int) -> RecordPlace:
        place = self._place_now(job, pages, text)
        with trio.move_on_after(ROOM_SECONDS) if place is None else nullcontext():
            while place is None:
                self._log.work.send()
                await self._log.room.park()
                place = self._place_now(job, pages, text)
        if place is None:
            raise _Refused(WriteRefusal.NO_ROOM)
        return place

    def _place_now(self, job: UnderWay, pages: int, text: int) -> RecordPlace | None:
        """Nothing is placed of what was discarded meanwhile: it would be on the disk, and not marked dead."""
        if job.discarded:
            raise _Refused(WriteRefusal.OUTDATED)
        if not self._log.is_writable:
            raise _Refused(WriteRefusal.READ_ONLY)
        place = self._log.table.place(pages, text, Stream.NEW)
        if place is not None:
            job.places.append(place)
        return place

    def _publish(self, job: UnderWay, facts: ColdFacts, stored: list[int]) -> None:
        """All parts are on the disk: from now on the object is found."""
        log = self._log
        if job.discarded:
            raise _Refused(WriteRefusal.OUTDATED)
        if not all(map(log.is_trusted, job.places)):
            raise _Refused(WriteRefusal.FAILED)
        try:
            for part, (place, stored_bytes) in enumerate(zip(job.places, stored, strict=True)):
                log.mark_dead(log.index.add(place, facts, part, stored_bytes))
        except CapacityExceeded as error:
            log.mark_dead(log.index.drop(facts.digest))
            raise _Refused(WriteRefusal.NO_ROOM) from error
        found = log.index.find(facts.digest)
        if found is None or found.version != facts.version:
            raise _Refused(WriteRefusal.OUTDATED)
        log.outdate(facts.digest, facts.version)

    async def _make_durable(self, facts: ColdFacts) -> None:
        """Wait for a sync, unless the object went meanwhile: then nothing of it is durable."""
        log = self._log
        try:
            await log.commit.sync()
        except OSError as error:
            raise _Refused(WriteRefusal.FAILED) from error
        if not log.is_in_place():
            raise _Refused(WriteRefusal.READ_ONLY)
        found = log.index.find(facts.digest)
        if found is None:
            raise _Refused(WriteRefusal.FAILED)


def _pack(value: memoryview, memory: memoryview) -> tuple[int, ...] | None:
    """Compress the value into memory of its length; the sizes of its chunks, None when it does not pay."""
    packed = compress_part(value)
    if packed is None:
        return None
    chunks, sizes = packed
    position = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        memory[position : position + size] = chunk
        position += size
    return sizes


def stored_bytes_of(length: int) -> int:
    """Bytes on the disk of an uncompressed value of this length."""
    return sum(record_bytes(part_bytes(length, part)) for part in range(part_count(length)))


def text_bytes(facts: ColdFacts) -> int:
    """Most bytes of the object's key and namespace in a footer."""
    return len(facts.key.encode()) + len(facts.namespace.encode())


def whole_pages(payload: memoryview, length: int) -> Buffers:
    """The first `length` bytes as whole pages. A view that reaches beyond is written
    to the end of the page; else the last page is a copy."""
    rounded = round_up_to_page(length)
    if len(payload) >= rounded:
        return [payload[:rounded]] if rounded else []
    full = length // PAGE_BYTES * PAGE_BYTES
    last = bytes(payload[full:length]).ljust(PAGE_BYTES, b"\0")
    return [payload[:full], last] if full else [last]
