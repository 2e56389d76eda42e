"""How a memory segment is laid out: header, key index, object slots, trailers. Pure codecs.

    0                 header, one page
    index_offset      key index: 32 bytes an entry (`KeyIndex` writes them)
    slots_offset      object table: 64 bytes a slot
    data_offset       extents of whole granules (4 KiB): payload, padding to 8, trailer

Only the owner writes. Readers map the segment read-only and trust nothing that they did not copy
out and check: a slot carries its own checksum, a trailer too, and the payload's chunk sums must
give the slot's root. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from p2pstore.errors import ProtocolError
from p2pstore.objects import CHUNK_BYTES, DIGEST_BYTES, MIB, Version, are_sums_of
from p2pstore.wire import Message, decode_body

SEGMENT_MAGIC: Final = b"P2PSSEG\0"
SEGMENT_FORMAT: Final = 1
SLOT_FORMAT: Final = 1
TRAILER_FORMAT: Final = 1

GRANULE_BYTES: Final = 4096
SLOT_BYTES: Final = 64
INDEX_ENTRY_BYTES: Final = 32
MAX_SLOTS: Final = 1 << 22
MAX_TRAILER_BYTES: Final = 0xFFFF
SEGMENT_ID_BYTES: Final = 16

# magic, format, state, segment id, total bytes, index offset, index entries, slots offset, slots,
# data offset, data bytes, owner's incarnation, checksum of all before it
_HEADER: Final = struct.Struct("<8sII16sQQQQQQQQQ")
SEGMENT_STATE_OFFSET: Final = 12


class SegmentState(IntEnum):
    """Where the segment's life is. The state byte is outside the header's checksum."""

    OPEN = 1
    CLOSED = 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """Offsets and sizes of the parts of a segment, in bytes unless it says otherwise."""

    total_bytes: int
    index_offset: int
    index_entries: int
    slots_offset: int
    slots: int
    data_offset: int
    data_bytes: int


def plan_geometry(data_bytes: int, max_objects: int | None = None) -> Geometry:
    """Geometry for a data area of `data_bytes` (rounded up to 4 KiB), by default a slot per 16 KiB.

    The index has at least twice as many entries as there are slots. With 0 bytes, the smallest segment
    that can be mapped, for a peer that offers no memory. Raises `ValueError` for little more than that.
    """
    data_bytes = round_up(data_bytes, GRANULE_BYTES)
    if 0 != data_bytes < 4 * GRANULE_BYTES:
        raise ValueError("a segment needs at least 16 KiB of data, or none at all")
    wanted = max_objects if max_objects is not None else max(1024, data_bytes // (16 * 1024))
    slots = max(1, min(wanted, MAX_SLOTS, data_bytes // GRANULE_BYTES))
    index_entries = 1 << (2 * slots - 1).bit_length()
    index_offset = GRANULE_BYTES
    slots_offset = round_up(index_offset + index_entries * INDEX_ENTRY_BYTES, GRANULE_BYTES)
    data_offset = round_up(slots_offset + slots * SLOT_BYTES, GRANULE_BYTES)
    if data_bytes >= 64 * MIB:  # keep extents on huge page boundaries where that costs nothing
        data_offset = round_up(data_offset, 2 * MIB)
    return Geometry(
        total_bytes=data_offset + data_bytes,
        index_offset=index_offset,
        index_entries=index_entries,
        slots_offset=slots_offset,
        slots=slots,
        data_offset=data_offset,
        data_bytes=data_bytes,
    )


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return (value + unit - 1) // unit * unit


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    segment_id: bytes
    incarnation: int
    geometry: Geometry
    state: SegmentState


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The first bytes of a segment."""
    geometry = header.geometry
    fields = (
        SEGMENT_MAGIC,
        SEGMENT_FORMAT,
        int(header.state),
        header.segment_id,
        geometry.total_bytes,
        geometry.index_offset,
        geometry.index_entries,
        geometry.slots_offset,
        geometry.slots,
        geometry.data_offset,
        geometry.data_bytes,
        header.incarnation,
    )
    return _HEADER.pack(*fields, _header_checksum(_HEADER.pack(*fields, 0)))


def _header_checksum(packed: bytes) -> int:
    stateless = packed[:SEGMENT_STATE_OFFSET] + b"\0\0\0\0" + packed[SEGMENT_STATE_OFFSET + 4 : -8]
    return xxhash.xxh3_64_intdigest(stateless)


def segment_format_of(data: bytes | memoryview) -> int | None:
    """Which format a segment says it has, whole or not; None for what is no segment."""
    packed = bytes(data[: len(SEGMENT_MAGIC) + 4])
    if len(packed) < len(SEGMENT_MAGIC) + 4 or not packed.startswith(SEGMENT_MAGIC):
        return None
    return int.from_bytes(packed[len(SEGMENT_MAGIC) :], "little")


def decode_segment_header(data: bytes | memoryview) -> SegmentHeader:
    """Parse and check a header. Raises `ProtocolError` on anything that is not one."""
    if len(data) < _HEADER.size:
        raise ProtocolError("the segment is shorter than its header")
    packed = bytes(data[: _HEADER.size])
    magic, fmt, state, segment_id, *numbers, incarnation, checksum = _HEADER.unpack(packed)
    if magic != SEGMENT_MAGIC or checksum != _header_checksum(packed):
        raise ProtocolError("this is not a p2pstore memory segment, or its header is damaged")
    if fmt != SEGMENT_FORMAT:
        raise ProtocolError(
            f"segment format {fmt} is not supported; this version reads {SEGMENT_FORMAT}"
        )
    try:
        return SegmentHeader(segment_id, incarnation, Geometry(*numbers), SegmentState(state))
    except ValueError:
        raise ProtocolError(f"segment state {state} is unknown") from None


SEGMENT_HEADER_BYTES: Final = _HEADER.size

# --- object slot -----------------------------------------------------------------------------

# format, state, writer hash, trailer length, flags, digest, clock, offset, length, root, checksum
_SLOT: Final = struct.Struct("<BBHHH16sQQQQQ")
assert _SLOT.size == SLOT_BYTES
_PACK_CHECKED: Final = struct.Struct("<BBHHH16sQQQQ").pack
SLOT_STATE_OFFSET: Final = 1
_DIGEST_OFFSET: Final = 8
_PACK_SUM: Final = struct.Struct("<Q").pack
_checksum: Final = xxhash.xxh3_64_intdigest


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    LIVE = 2
    DOOMED = 3
    RETURNED = 4
    """From an earlier life of its owner, and not known to be good yet: readers take it for absent."""


_SLOT_STATES: Final = tuple(SlotState)
_LIVE: Final = int(SlotState.LIVE)
_LENGTH_AND_SUM: Final = struct.Struct("<QQ")
SLOT_FLAG_SOFT: Final = 1
"""A soft replica: kept because it was hot, evicted first."""
SLOT_FLAG_TENSOR: Final = 2
"""The trailer has dtype and shape."""
SLOT_FLAG_LASTING: Final = 4
"""The object has no time to live. Its reader need not look that up in the trailer; without the flag, it must."""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """One object as the table holds it. `offset` counts from the segment's start, in bytes."""

    state: SlotState
    digest: bytes
    version: Version
    offset: int
    length: int
    trailer_length: int
    flags: int = 0


def encode_slot(slot: Slot) -> bytes:
    """64 bytes, with their own checksum at the end."""
    return pack_slots([slot], [slot.flags])[0]


def pack_slots(described: Iterable[Any], flags: Iterable[int]) -> list[bytes]:
    """`encode_slot` of each, by these flags and its other fields, which it has by the names that `Slot` gives them."""
    slots: list[bytes] = []
    for each, flag in zip(described, flags, strict=True):
        clock, writer, root = each.version
        # fmt: off
        packed = _PACK_CHECKED(
            SLOT_FORMAT, each.state, writer, each.trailer_length, flag, each.digest, clock, each.offset, each.length,
            root,
        )
        # fmt: on
        slots.append(packed + _PACK_SUM(_checksum(packed)))
    return slots


def decode_slot(packed: bytes) -> Slot | None:
    """The slot in a private 64-byte copy, or None when it is torn, damaged or of another format."""
    if len(packed) != SLOT_BYTES:
        return None
    fmt, state, writer, trailer_length, flags, digest, clock, offset, length, root, checksum = (
        _SLOT.unpack(packed)
    )
    if (
        fmt != SLOT_FORMAT
        or checksum != xxhash.xxh3_64_intdigest(packed[:-8])
        or state >= len(_SLOT_STATES)
    ):
        return None
    return Slot(
        _SLOT_STATES[state], digest, Version(clock, writer, root), offset, length, trailer_length, flags
    )


def slot_version(packed: bytes) -> Version:
    """The version in a slot that was found good."""
    _, _, writer, _, _, _, clock, _, _, root, _ = _SLOT.unpack(packed)
    return Version(clock, writer, root)


def digests_in_slots(packed: bytes) -> list[bytes]:
    """The digests in packed slots, one after the other, good or not."""
    places = range(_DIGEST_OFFSET, len(packed), SLOT_BYTES)
    return [packed[at : at + DIGEST_BYTES] for at in places]


def is_only_chunk(packed: bytes, digest: bytes, payload_bytes: int, payload_sum: int) -> bool:
    """Whether a slot, in a private copy, is that of the live object under `digest` with `payload_bytes` bytes, at
    most one chunk, of this xxh3-64. Its root is made of the length and the only sum: the trailer has nothing to add."""
    if len(packed) != SLOT_BYTES:
        return False
    fmt, state, _, _, _, found, _, _, length, root, checksum = _SLOT.unpack(packed)
    if fmt != SLOT_FORMAT or state != _LIVE or found != digest or length != payload_bytes:
        return False
    if checksum != xxhash.xxh3_64_intdigest(packed[:-8]):
        return False
    sums = _LENGTH_AND_SUM.pack(length, payload_sum)
    expected: int = xxhash.xxh3_64_intdigest(sums)
    return bool(0 < length <= CHUNK_BYTES and root == expected)


FREE_SLOT: Final = bytes(SLOT_BYTES)
_SLOT_COLUMNS: Final = np.dtype(
    {
        "names": [
            *("format", "state", "writer", "trailer", "flags", "first", "second", "clock"),
            *("offset", "length", "root", "checked", "checksum"),
        ],
        "formats": [
            *("u1", "u1", "<u2", "<u2", "<u2", "<u8", "<u8", "<u8"),
            *("<u8", "<u8", "<u8", "V56", "<u8"),
        ],
        "offsets": [0, 1, 2, 4, 6, 8, 16, 24, 32, 40, 48, 0, 56],
        "itemsize": SLOT_BYTES,
    }
)
_SUMS: Final = np.dtype(">u8")
_DIGEST_COLUMNS: Final = np.dtype([("first", "<u8"), ("second", "<u8")])


class SlotRows:
    """Many packed slots, in a private copy, one after the other."""

    def __init__(self, packed: bytes | memoryview | NDArray[Any]) -> None:
        self._rows = np.frombuffer(packed, _SLOT_COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> bytes:
        """One slot, packed."""
        return bytes(self._rows[number].tobytes())

    def only(self, wanted: NDArray[np.bool_]) -> SlotRows:
        """The rows for which `wanted` is true."""
        return SlotRows(self._rows[wanted])

    def column(self, name: str) -> list[int]:
        """One field of all values, unchecked: `length` in bytes, `root`, or `offset` in bytes from the segment's
        start."""
        listed: list[int] = self._rows[name].tolist()
        return listed

    def need_trailers(self) -> NDArray[np.bool_]:
        """`needs_trailer` of each."""
        rows = self._rows
        lasting = (rows["flags"] & SLOT_FLAG_LASTING) != 0
        needed: NDArray[np.bool_] = ~lasting | (rows["length"] == 0) | (rows["length"] > CHUNK_BYTES)
        return needed

    def match(self, digests: NDArray[np.uint64], geometry: Geometry) -> NDArray[np.bool_]:
        """`slot_matches` of each that is whole, by digests as rows of two words."""
        rows = self._rows
        good = self._are_live(digests.view(_DIGEST_COLUMNS)[:, 0])
        offsets, lengths = rows["offset"], rows["length"]
        good &= (offsets >= geometry.data_offset) & (offsets <= geometry.total_bytes)
        room = np.uint64(geometry.total_bytes) - offsets
        good &= lengths <= room
        good &= (lengths + np.uint64(7) & ~np.uint64(7)) + rows["trailer"] <= room
        return good

    def _are_live(self, digests: NDArray[Any]) -> NDArray[np.bool_]:
        rows = self._rows
        good: NDArray[np.bool_] = (rows["format"] == SLOT_FORMAT) & (rows["state"] == _LIVE)
        good &= (rows["first"] == digests["first"]) & (rows["second"] == digests["second"])
        good &= rows["checksum"] == _sums_of(rows["checked"].tolist())
        return good

    def are_announced(self, writer: int, versions: Sequence[Version]) -> NDArray[np.bool_]:
        """Which of them are versions of this writer, not older than these; or one of these, each at its place. Without
        versions, any of this writer."""
        rows = self._rows
        by_writer: NDArray[np.bool_] = rows["writer"] == writer
        if not versions:
            return by_writer
        clocks, writers, roots = (np.array(column, np.uint64) for column in zip(*versions, strict=True))
        allowed: NDArray[np.bool_] = (rows["clock"] == clocks) & (rows["writer"] == writers)
        allowed &= rows["root"] == roots
        newer = (rows["clock"] > clocks) | ((rows["clock"] == clocks) & (rows["writer"] >= writers))
        allowed |= by_writer & newer
        return allowed

    def are_only_chunks(self, digests: bytes, packed_sums: bytes) -> NDArray[np.bool_]:
        """`is_only_chunk` of each, by packed digests, and what `xxh3_64_digest` gives for each payload, one after the
        other. That the payloads have the slots' lengths is the caller's word."""
        rows = self._rows
        lengths_and_sums = np.empty((len(rows), 2), np.uint64)
        lengths_and_sums[:, 0] = rows["length"]
        lengths_and_sums[:, 1] = np.frombuffer(packed_sums, _SUMS)
        good = self._are_live(np.frombuffer(digests, _DIGEST_COLUMNS))
        good &= (rows["length"] > 0) & (rows["length"] <= CHUNK_BYTES)
        roots = _sums_of(lengths_and_sums.view("V16")[:, 0].tolist())
        good &= rows["root"] == roots
        return good


def _sums_of(packed: list[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, packed)), _SUMS)


# --- trailer ---------------------------------------------------------------------------------


class Pin(IntEnum):
    NONE = 0
    SOFT = 1
    HARD = 2


class TrailerBody(Message, frozen=True):
    """The facts of an object behind its bytes. `sums` are packed little-endian u64, one per chunk.

    `expires_unix_ms` is 0 for an object without a time to live. `replicas` is the number of copies
    asked for when it was put. `dtype` is empty unless the value is a tensor. `proof`, of a copy: who wrote it
    (`core.copies.proofs`).
    """

    namespace: str
    key: str
    sums: bytes
    expires_unix_ms: int = 0
    replicas: int = 1
    pin: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    proof: bytes = b""


_TRAILER_PREFIX: Final = struct.Struct("<HHIQ")
"""format, reserved, body length, xxh3-64 of the body."""

EXPIRY_BYTES: Final = 8
"""A trailer grows by this many bytes when its object is given a time to live."""


def pack_trailers(trailers: Iterable[TrailerBody]) -> list[bytes]:
    """Prefix and body of each, even where that is too long."""
    pack, checksum = _TRAILER_PREFIX.pack, xxhash.xxh3_64_intdigest
    bodies = map(msgspec.msgpack.encode, trailers)
    return [pack(TRAILER_FORMAT, 0, len(body), checksum(body)) + body for body in bodies]


def encode_trailer(trailer: TrailerBody) -> bytes:
    """Prefix and body. Raises `ValueError` above 64 KiB (a tensor with an absurd shape)."""
    [packed] = pack_trailers([trailer])
    if len(packed) > MAX_TRAILER_BYTES:
        raise ValueError(
            f"the object's metadata needs {len(packed):,} bytes; at most 65,535 are allowed"
        )
    return packed


def decode_trailer(packed: bytes | memoryview) -> TrailerBody | None:
    """The trailer in a private copy, or None when it is torn, damaged or of another format."""
    if len(packed) < _TRAILER_PREFIX.size:
        return None
    fmt, _, body_length, checksum = _TRAILER_PREFIX.unpack_from(packed)
    body = bytes(packed[_TRAILER_PREFIX.size : _TRAILER_PREFIX.size + body_length])
    if fmt != TRAILER_FORMAT or len(body) != body_length or checksum != xxhash.xxh3_64_intdigest(body):
        return None
    try:
        return decode_body(TrailerBody, body)
    except ProtocolError:
        return None


def trailer_offset(length: int) -> int:
    """Where the trailer begins, from the start of its extent."""
    return (length + 7) & ~7


def extent_bytes(length: int, trailer_length: int) -> int:
    """Length of an object's extent: payload, padding and trailer in whole granules."""
    return (((length + 7) & ~7) + trailer_length + GRANULE_BYTES - 1) & -GRANULE_BYTES


def slot_matches(slot: Slot, digest: bytes, geometry: Geometry) -> bool:
    """Whether a slot copied by a reader is a live object under `digest` inside the data area."""
    return (
        slot.state is SlotState.LIVE
        and slot.digest == digest
        and slot.offset >= geometry.data_offset
        and slot.offset + trailer_offset(slot.length) + slot.trailer_length <= geometry.total_bytes
    )


def needs_trailer(slot: Slot) -> bool:
    """Whether a reader has to look at the trailer: for the sums of several chunks, or a time to live. The root of one
    chunk is made of the length and the only sum, so that the bytes alone show whether they are the slot's."""
    return not (slot.flags & SLOT_FLAG_LASTING and 0 < slot.length <= CHUNK_BYTES)


def trailer_matches(trailer: TrailerBody, slot: Slot) -> bool:
    """Whether the chunk sums are those that the slot's root was made from."""
    return are_sums_of(trailer.sums, slot.length, slot.version.root)


# --- key index -------------------------------------------------------------------------------

_INDEX_ENTRY: Final = struct.Struct("<16sII8x")
INDEX_USED: Final = 1
pack_index_entry_into: Final = _INDEX_ENTRY.pack_into
"""(buffer, offset, digest, slot number, `INDEX_USED`): `encode_index_entry` in place."""


def index_home(digest: bytes, index_entries: int) -> int:
    """The entry number where the search for `digest` begins (index_entries is a power of two)."""
    return int.from_bytes(digest[:8], "little") & (index_entries - 1)


def index_entry_at_home(
    data: bytes | memoryview, index_offset: int, index_entries: int, digest: bytes
) -> tuple[bytes, int, bool]:
    """`decode_index_entry` where the search for `digest` begins."""
    home = int.from_bytes(digest[:8], "little") & (index_entries - 1)
    found, slot, used = _INDEX_ENTRY.unpack_from(data, index_offset + home * INDEX_ENTRY_BYTES)
    return found, slot, used == INDEX_USED


def encode_index_entry(digest: bytes, slot: int) -> bytes:
    """An entry in use; an unused one is all zero."""
    return _INDEX_ENTRY.pack(digest, slot, INDEX_USED)


def decode_index_entry(data: bytes | memoryview, offset: int = 0) -> tuple[bytes, int, bool]:
    """(digest, slot number, whether in use) of the entry at `offset`."""
    digest, slot, used = _INDEX_ENTRY.unpack_from(data, offset)
    return digest, slot, used == INDEX_USED
