"""lz4 for parts that it makes smaller. Pure.

Each chunk (1 MiB) is compressed for itself, so that a reader checks and unpacks one after the other; one that does not
shrink lies there as it is. KV caches hardly compress, and finding out costs as much as compressing: so ask a sample
first. Everything here works through megabytes: not for the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import lz4.block

from p2pstore.objects import CHUNK_BYTES, KIB, chunk_bounds
from p2pstore.ssd_tier.log_layout import DamagedRecord, round_up_to_page

WORTH_RATIO: Final = 0.85
"""What is not smaller than this is stored as it is."""
SAMPLES: Final = 4
SAMPLE_BYTES: Final = 16 * KIB
SMALLEST_SAMPLE_BYTES: Final = 2 * KIB


def sample_ratio(value: memoryview) -> float:
    """Compressed size over size, of four pieces spread over the value, together at most a quarter of it and 64 KiB; of
    all of a small value; 1.0 for an empty one."""
    piece_bytes = min(SAMPLE_BYTES, len(value) // (4 * SAMPLES))
    if piece_bytes < SMALLEST_SAMPLE_BYTES:
        sample: bytes | memoryview = value
    else:
        step = (len(value) - piece_bytes) // (SAMPLES - 1)
        # Compressed in one go: each call gives up the interpreter lock, and has to get it back.
        sample = b"".join(value[at * step : at * step + piece_bytes] for at in range(SAMPLES))
    return len(lz4.block.compress(sample, store_size=False)) / len(sample) if len(sample) else 1.0


def is_worth_it(packed_bytes: int, part_bytes: int) -> bool:
    """Whether storing so much less saves enough of the pages that a part takes."""
    pages_packed, pages = round_up_to_page(packed_bytes), round_up_to_page(part_bytes)
    return packed_bytes < part_bytes and pages_packed <= WORTH_RATIO * pages


def compress_part(part: memoryview) -> tuple[list[bytes | memoryview], tuple[int, ...]] | None:
    """(what to store, chunk by chunk; the sizes of these), or None when it is not worth it."""
    chunks: list[bytes | memoryview] = []
    for start, end in chunk_bounds(len(part)):
        chunk = part[start:end]
        packed = lz4.block.compress(chunk, store_size=False)
        chunks.append(packed if len(packed) < len(chunk) else chunk)
    sizes = tuple(len(chunk) for chunk in chunks)
    return (chunks, sizes) if is_worth_it(sum(sizes), len(part)) else None


def decompress_part(stored: memoryview, sizes: Sequence[int], into: memoryview) -> None:
    """Unpack what `compress_part` gave into memory of the part's size.

    Raises `DamagedRecord` when it cannot be unpacked, or not to just that size.
    """
    position = 0
    for number, size in enumerate(sizes):
        chunk = into[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        decompress_chunk(stored[position : position + size], chunk)
        position += size


def decompress_chunk(stored: memoryview, into: memoryview) -> None:
    """Unpack one chunk into memory of its size. Raises `DamagedRecord`."""
    if len(stored) == len(into):
        into[:] = stored
        return
    try:
        unpacked = lz4.block.decompress(stored, uncompressed_size=len(into), return_bytearray=True)
    except lz4.block.LZ4BlockError as error:
        raise DamagedRecord(f"a compressed chunk is damaged: {error}") from error
    if len(unpacked) != len(into):
        raise DamagedRecord(f"a compressed chunk has {len(unpacked):,} bytes, not {len(into):,}")
    into[:] = unpacked
