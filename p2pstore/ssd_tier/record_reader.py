"""Reading one record of an object: straight to where its value is wanted, unless it is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from p2pstore.ssd_tier.cold_log import ColdLog
from p2pstore.ssd_tier.disk_protocol import Check
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import (
    PAGE_BYTES,
    Codec,
    DamagedRecord,
    RecordPlace,
    part_bytes,
    part_count,
    record_bytes,
    round_up_to_page,
)
from p2pstore.ssd_tier.payload import check_part, unpack_part
from p2pstore.ssd_tier.record_header import RecordHeader, decode_record_header


class RecordReader:
    """Header and payload come with one request where their sizes are known: always for what is not compressed, and
    for objects of one part."""

    def __init__(self, log: ColdLog) -> None:
        self._log = log

    async def read_part(self, entry: ColdEntry, part: int, view: memoryview) -> RecordHeader:
        """The record's value is at the beginning of `view` then, every byte checked.

        `view` has room for whole pages. Raises `DamagedRecord`, and `OSError` when the disk failed twice.
        """
        place, length = entry.places[part], part_bytes(entry.length, part)
        parts = part_count(entry.length)
        target = view[: round_up_to_page(length)]
        with self._log.scratch.page() as page:
            if entry.disk_bytes == plain_bytes(entry.length):
                header = await self._read_plain(entry, part, page, target, length)
            elif parts == 1:
                async with self._log.scratch.buffer(entry.disk_bytes - PAGE_BYTES) as memory:
                    await self._read(place, 0, [page, memory])
                    header = self._header(page, entry, part)
                    await self._unpack(header, memory, target[:length])
            else:
                await self._read(place, 0, [page])
                header = self._header(page, entry, part)
                await self._read_payload(place, header, target, length)
        return header

    async def _read_plain(
        self, entry: ColdEntry, part: int, page: memoryview, target: memoryview, length: int
    ) -> RecordHeader:
        """What is not compressed is checked by whoever read it. It may be compressed though it takes as many pages."""
        headers: list[RecordHeader] = []

        def check() -> None:
            headers[:] = [self._header(page, entry, part)]
            if headers[0].codec is Codec.RAW:
                check_part(headers[0], target[:length])

        await self._read(entry.places[part], 0, [page, target] if length else [page], check)
        [header] = headers
        if header.codec is not Codec.RAW:
            async with self._log.scratch.buffer(header.stored_bytes) as memory:
                memory[: header.stored_bytes] = target[: header.stored_bytes]
                await self._unpack(header, memory, target[:length])
        return header

    async def _read_payload(
        self, place: RecordPlace, header: RecordHeader, target: memoryview, length: int
    ) -> None:
        if header.codec is Codec.RAW:
            check = partial(check_part, header, target[:length])
            await self._read(place, PAGE_BYTES, [target], check)
            return
        async with self._log.scratch.buffer(header.stored_bytes) as memory:
            await self._read(place, PAGE_BYTES, [memory])
            await self._unpack(header, memory, target[:length])

    async def _unpack(self, header: RecordHeader, memory: memoryview, into: memoryview) -> None:
        stored = memory[: header.stored_bytes]
        await self._log.run(len(into), unpack_part, header, stored, into)

    def _header(self, page: memoryview, entry: ColdEntry, part: int) -> RecordHeader:
        place = entry.places[part]
        header = decode_record_header(
            page, self._log.store_id, place.segment, place.generation, place.page
        )
        facts = header.facts
        if (facts.digest, facts.version, header.part) != (entry.digest, entry.version, part):
            raise DamagedRecord("another record lies where this one should")
        return header

    async def _read(
        self,
        place: RecordPlace,
        offset: int,
        buffers: Sequence[memoryview],
        check: Check | None = None,
    ) -> None:
        """From that offset of a record on. A read that fails is tried again once."""
        log = self._log
        position = log.position(place) + offset
        try:
            await log.disk.read_into(position, buffers, check)
        except OSError:
            await log.disk.read_into(position, buffers, check)
        log.health.read_worked()
        log.measures.read.add(sum(map(len, buffers)), log.unix())


def plain_bytes(length: int) -> int:
    """What an object occupies when none of its parts is compressed."""
    full, last = part_count(length) - 1, part_bytes(length, part_count(length) - 1)
    return full * record_bytes(part_bytes(length, 0)) + record_bytes(last)
