"""The header page of a record: whose payload follows it, and its sums. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from p2pstore.errors import ProtocolError
from p2pstore.objects import (
    CHUNK_BYTES,
    MAX_OBJECT_BYTES,
    PART_BYTES,
    Version,
    chunk_count,
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
    sealed_page,
)
from p2pstore.wire import Message, decode_body

RECORD_MAGIC: Final = b"P2PSREC\0"
RECORD_FORMAT: Final = 1
_PREFIX: Final = struct.Struct("<8sIIIIQIIQ16s")
"""magic, format, body length, segment, page, generation, number, 0, sequence, store id."""
MAX_BODY_BYTES: Final = PAGE_CONTENT_BYTES - _PREFIX.size


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header page, decoded. `facts.chunk_sums` are those of this part alone; `chunk_sizes` are the
    stored bytes of its chunks, none for a raw payload."""

    place: RecordPlace
    facts: ColdFacts
    part: int
    stored_bytes: int
    codec: Codec
    chunk_sizes: tuple[int, ...] = ()

    @property
    def part_bytes(self) -> int:
        """Bytes of the value that this part is."""
        return part_bytes(self.facts.length, self.part)


class _Body(Message, frozen=True):
    """What follows the prefix of a header page. New fields come at the end, with defaults."""

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
    """The header page of one part of the object; `facts.chunk_sums` are those of the whole object.

    Raises `ValueError` when key, namespace, dtype and shape together do not fit (a tensor with an absurd shape).
    """
    first = part * (PART_BYTES // CHUNK_BYTES)
    sums = facts.chunk_sums[first : first + chunk_count(part_bytes(facts.length, part))]
    return _encode(store_id, place, facts, sums, part, stored_bytes, codec, chunk_sizes)


def moved_record_header(store_id: bytes, header: RecordHeader, place: RecordPlace) -> bytes:
    """The header page of a record whose payload is copied, as it is, to another place."""
    sums, sizes = header.facts.chunk_sums, header.chunk_sizes
    return _encode(
        store_id, place, header.facts, sums, header.part, header.stored_bytes, header.codec, sizes
    )


def _encode(
    store_id: bytes,
    place: RecordPlace,
    facts: ColdFacts,
    sums: Sequence[int],
    part: int,
    stored_bytes: int,
    codec: Codec,
    chunk_sizes: Sequence[int],
) -> bytes:
    version = facts.version
    body = msgspec.msgpack.encode(
        _Body(
            digest=facts.digest,
            clock=version.clock,
            writer=version.writer,
            root=version.root,
            length=facts.length,
            part=part,
            stored_bytes=stored_bytes,
            codec=int(codec),
            chunk_sizes=struct.pack(f"<{len(chunk_sizes)}I", *chunk_sizes),
            chunk_sums=struct.pack(f"<{len(sums)}Q", *sums),
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
            f"what belongs to the object needs {len(body):,} bytes; on disk at most {MAX_BODY_BYTES:,} fit"
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
    sums, sizes = body.chunk_sums, body.chunk_sizes
    header = RecordHeader(
        place,
        ColdFacts(
            digest=body.digest,
            version=Version(body.clock, body.writer, body.root),
            length=body.length,
            namespace=body.namespace,
            key=body.key,
            chunk_sums=struct.unpack(f"<{len(sums) // 8}Q", sums),
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
        len(header.facts.chunk_sums) != chunks
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
    sums = tuple(each for header in headers for each in header.facts.chunk_sums)
    if (
        [header.part for header in headers] != list(range(part_count(first.length)))
        or {(each.facts.digest, each.facts.version) for each in headers}
        != {(first.digest, first.version)}
        or root_checksum(first.length, np.array(sums, "<u8").tobytes()) != first.version.root
    ):
        raise DamagedRecord(f"the records of {first.key!r} are not the parts of one object")
    return replace(first, chunk_sums=sums)
