"""A record on the disk: its header page with the sums of the payload, and the payload, compressed with lz4 where that
pays. Pure. Payloads are megabytes: not for the event loop's thread.

Each chunk (1 MiB) is compressed alone, so that a reader checks and unpacks one after the other; a chunk that does not
shrink is stored as it is. KV caches hardly compress, so a sample is compressed first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import lz4.block
import msgspec

from p2pstore.errors import ProtocolError
from p2pstore.objects import (
    CHUNK_BYTES,
    KIB,
    MAX_OBJECT_BYTES,
    PART_BYTES,
    Version,
    chunk_bounds,
    chunk_count,
    chunk_sum,
    root_checksum,
)
from p2pstore.ssd_tier.log_layout import (
    PAGE_CONTENT_BYTES,
    Codec,
    ColdFacts,
    DamagedRecord,
    RecordPlace,
    page_is_sealed,
    part_bytes,
    part_count,
    place_seed,
    round_up_to_page,
    sealed_page,
)
from p2pstore.wire import Message, decode_body

RECORD_MAGIC: Final = b"P2PSREC\0"
RECORD_FORMAT: Final = 1
_PREFIX: Final = struct.Struct("<8sIIIIQIIQ16s")
"""magic, format, body length, segment, page, generation, number, 0, sequence, store id."""
_SUM_BYTES: Final = 8
MAX_BODY_BYTES: Final = PAGE_CONTENT_BYTES - _PREFIX.size
WORTH_RATIO: Final = 0.85
"""A part that compresses to more than this share is stored as it is."""
SAMPLES: Final = 4
SAMPLE_BYTES: Final = 16 * KIB
SMALLEST_SAMPLE_BYTES: Final = 2 * KIB


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header page, decoded. `facts.sums` are those of this part alone; `chunk_sizes` are the
    stored bytes of its chunks, none for a raw payload."""

    place: RecordPlace
    facts: ColdFacts
    part: int
    stored_bytes: int
    codec: Codec
    chunk_sizes: tuple[int, ...] = ()

    @property
    def part_bytes(self) -> int:
        return part_bytes(self.facts.length, self.part)


class _Body(Message, frozen=True):
    """The body of a header page, behind the prefix. New fields come at the end, with defaults."""

    digest: bytes
    clock: int
    writer: int
    root: int
    length: int
    part: int
    stored_bytes: int
    codec: int
    chunk_sizes: bytes
    chunk_sums: bytes
    namespace: str
    key: str
    expires_unix_ms: int = 0
    replicas: int = 1
    pin: int = 0
    soft: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    proof: bytes = b""


def encode_record_header(
    store_id: bytes,
    place: RecordPlace,
    facts: ColdFacts,
    part: int,
    stored_bytes: int,
    codec: Codec = Codec.RAW,
    chunk_sizes: Sequence[int] = (),
) -> bytes:
    """The header page of one part of the object; `facts.sums` are those of the whole object.

    Raises `ValueError` when key, namespace, dtype and shape together do not fit (a tensor with an absurd shape).
    """
    start = _SUM_BYTES * part * (PART_BYTES // CHUNK_BYTES)
    end = start + _SUM_BYTES * chunk_count(part_bytes(facts.length, part))
    header = RecordHeader(place, facts, part, stored_bytes, codec, tuple(chunk_sizes))
    return _encode(store_id, header, facts.sums[start:end])


def moved_record_header(store_id: bytes, header: RecordHeader, place: RecordPlace) -> bytes:
    """The header page of a record whose payload is copied, as it is, to another place."""
    return _encode(store_id, replace(header, place=place), header.facts.sums)


def _encode(store_id: bytes, header: RecordHeader, sums: bytes) -> bytes:
    """The header page with `sums` as those of its part."""
    place, facts, sizes = header.place, header.facts, header.chunk_sizes
    version = facts.version
    body = msgspec.msgpack.encode(
        _Body(
            digest=facts.digest,
            clock=version.clock,
            writer=version.writer,
            root=version.root,
            length=facts.length,
            part=header.part,
            stored_bytes=header.stored_bytes,
            codec=int(header.codec),
            chunk_sizes=struct.pack(f"<{len(sizes)}I", *sizes),
            chunk_sums=sums,
            namespace=facts.namespace,
            key=facts.key,
            expires_unix_ms=facts.expires_unix_ms,
            replicas=facts.replicas,
            pin=facts.pin,
            soft=facts.soft,
            dtype=facts.dtype,
            shape=facts.shape,
            proof=facts.proof,
        )
    )
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(
            f"the facts of the object need {len(body):,} bytes; a header page has room for {MAX_BODY_BYTES:,}"
        )
    prefix = _PREFIX.pack(
        RECORD_MAGIC,
        RECORD_FORMAT,
        len(body),
        place.segment,
        place.page,
        place.generation,
        place.number,
        0,
        place.sequence,
        store_id,
    )
    seed = place_seed(store_id, place.segment, place.generation, place.page)
    return sealed_page(prefix + body, seed)


def decode_record_header(
    page: bytes | memoryview, store_id: bytes, segment: int, generation: int, page_number: int
) -> RecordHeader:
    """The header that was read at this place. Raises `DamagedRecord` when it is none that was written there."""
    where = f"page {page_number} of segment {segment}, generation {generation}"
    if not page_is_sealed(page, place_seed(store_id, segment, generation, page_number)):
        raise DamagedRecord(f"no record header at {where}, or it is damaged")
    magic, version, length, *at, number, _, sequence, store = _PREFIX.unpack_from(page)
    if magic != RECORD_MAGIC or version != RECORD_FORMAT or length > MAX_BODY_BYTES:
        raise DamagedRecord(f"the page at {where} is no record header of format {RECORD_FORMAT}")
    if at != [segment, page_number, generation] or store != store_id:
        raise DamagedRecord(f"the record header at {where} belongs elsewhere")
    try:
        body = decode_body(_Body, page[_PREFIX.size : _PREFIX.size + length])
        header = _header(RecordPlace(segment, generation, page_number, number, sequence), body)
    except (ProtocolError, ValueError, struct.error) as error:
        raise DamagedRecord(f"the record header at {where} makes no sense: {error}") from error
    return header


def _header(place: RecordPlace, body: _Body) -> RecordHeader:
    sizes = body.chunk_sizes
    header = RecordHeader(
        place,
        ColdFacts(
            digest=body.digest,
            version=Version(body.clock, body.writer, body.root),
            length=body.length,
            namespace=body.namespace,
            key=body.key,
            sums=body.chunk_sums,
            expires_unix_ms=body.expires_unix_ms,
            replicas=body.replicas,
            pin=body.pin,
            soft=body.soft,
            dtype=body.dtype,
            shape=body.shape,
            proof=body.proof,
        ),
        body.part,
        body.stored_bytes,
        Codec(body.codec),
        struct.unpack(f"<{len(sizes) // 4}I", sizes),
    )
    if not 0 <= body.length <= MAX_OBJECT_BYTES or not 0 <= body.part < part_count(body.length):
        raise ValueError(f"part {body.part} of {body.length:,} bytes")
    chunks, raw = chunk_count(header.part_bytes), header.codec is Codec.RAW
    if (
        len(header.facts.sums) != _SUM_BYTES * chunks
        or len(header.chunk_sizes) != (0 if raw else chunks)
        or body.stored_bytes != (header.part_bytes if raw else sum(header.chunk_sizes))
        or body.stored_bytes > header.part_bytes
    ):
        raise ValueError("its sums and sizes are not those of its payload")
    return header


def record_generation(
    page: bytes | memoryview, store_id: bytes, segment: int, page_number: int
) -> int | None:
    """The generation of the segment in which this page was written here as a record header, None if it was not."""
    magic, _, _, _, _, generation, *_ = _PREFIX.unpack_from(page)
    seed = place_seed(store_id, segment, generation, page_number)
    return generation if magic == RECORD_MAGIC and page_is_sealed(page, seed) else None


def joined_facts(headers: Sequence[RecordHeader]) -> ColdFacts:
    """The facts of an object, with the sums of all its parts in order.

    Raises `DamagedRecord` unless these are all parts of one version, and their sums give its root.
    """
    first = headers[0].facts
    sums = b"".join(header.facts.sums for header in headers)
    if (
        [header.part for header in headers] != list(range(part_count(first.length)))
        or {(each.facts.digest, each.facts.version) for each in headers}
        != {(first.digest, first.version)}
        or root_checksum(first.length, sums) != first.version.root
    ):
        raise DamagedRecord(f"the records of {first.key!r} are not the parts of one object")
    return replace(first, sums=sums)


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
    """Whether storing `packed_bytes` saves enough of the pages that a part takes."""
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
    start = _SUM_BYTES * number
    wanted = header.facts.sums[start : start + _SUM_BYTES]
    if chunk_sum(chunk).to_bytes(_SUM_BYTES, "little") != wanted:
        raise DamagedRecord(
            f"the payload of {header.facts.key!r} is damaged in chunk {number} of part {header.part}"
        )
