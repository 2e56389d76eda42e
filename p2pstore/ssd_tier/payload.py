"""The bytes of a record, checked against its header. Pure; megabytes at a time, so not for the event loop's thread."""

from __future__ import annotations

from p2pstore.objects import chunk_bounds, chunk_sum
from p2pstore.ssd_tier.compression import decompress_part
from p2pstore.ssd_tier.layout import Codec, DamagedRecord
from p2pstore.ssd_tier.record_header import RecordHeader


def check_part(header: RecordHeader, part: memoryview) -> None:
    """Whether these are the bytes of the value that the header tells of.

    Raises `DamagedRecord` when a chunk does not have its sum, or the part not its length.
    """
    if len(part) != header.part_bytes:
        raise DamagedRecord(f"a part of {len(part):,} bytes, not {header.part_bytes:,}")
    bounds = chunk_bounds(len(part))
    for (start, end), expected in zip(bounds, header.facts.chunk_sums, strict=True):
        if chunk_sum(part[start:end]) != expected:
            raise DamagedRecord(
                f"the payload of {header.facts.key!r} is damaged in chunk {start >> 20} of part {header.part}"
            )


def unpack_part(header: RecordHeader, stored: memoryview, into: memoryview) -> None:
    """Unpack a compressed payload into memory of the part's size, and check it there.

    Raises `DamagedRecord`; what `into` holds then is worth nothing.
    """
    if header.codec is not Codec.LZ4 or len(stored) != header.stored_bytes:
        raise DamagedRecord(f"not the compressed payload of {header.facts.key!r}")
    decompress_part(stored, header.chunk_sizes, into)
    check_part(header, into)
