"""The bytes of a record, checked against its header. Pure; megabytes at a time, so not for the event loop's thread."""

from __future__ import annotations

from p2pstore.objects import CHUNK_BYTES, chunk_bounds, chunk_sum
from p2pstore.ssd_tier.compression import decompress_chunk, decompress_part
from p2pstore.ssd_tier.log_layout import Codec, DamagedRecord
from p2pstore.ssd_tier.record_header import RecordHeader


def check_part(header: RecordHeader, part: memoryview) -> None:
    """Whether these are the bytes of the value that the header tells of.

    Raises `DamagedRecord` when a chunk does not have its sum, or the part not its length.
    """
    if len(part) != header.part_bytes:
        raise DamagedRecord(f"a part of {len(part):,} bytes, not {header.part_bytes:,}")
    for number, (start, end) in enumerate(chunk_bounds(len(part))):
        _check_chunk(header, number, part[start:end])


def unpack_part(header: RecordHeader, stored: memoryview, into: memoryview) -> None:
    """Unpack a compressed payload into memory of the part's size, and check it there.

    Raises `DamagedRecord`; what `into` holds then is worth nothing.
    """
    if header.codec is not Codec.LZ4 or len(stored) != header.stored_bytes:
        raise DamagedRecord(f"not the compressed payload of {header.facts.key!r}")
    decompress_part(stored, header.chunk_sizes, into)
    check_part(header, into)


def stored_chunk_bytes(header: RecordHeader) -> list[int]:
    """What each chunk of the payload takes, as it is stored."""
    if header.codec is Codec.LZ4:
        return list(header.chunk_sizes)
    return [end - start for start, end in chunk_bounds(header.part_bytes)]


def check_stored_chunk(header: RecordHeader, number: int, stored: memoryview) -> None:
    """Whether this is a chunk of the payload, as it is stored. Raises `DamagedRecord`."""
    if header.codec is Codec.LZ4:
        start = number * CHUNK_BYTES
        unpacked = memoryview(bytearray(min(CHUNK_BYTES, header.part_bytes - start)))
        decompress_chunk(stored, unpacked)
        stored = unpacked
    _check_chunk(header, number, stored)


def _check_chunk(header: RecordHeader, number: int, chunk: memoryview) -> None:
    if chunk_sum(chunk) != header.facts.chunk_sums[number]:
        raise DamagedRecord(
            f"the payload of {header.facts.key!r} is damaged in chunk {number} of part {header.part}"
        )
