"""Reading a segment that somebody else owns and changes meanwhile.

No lock, fence or generation: slot, trailer and payload are copied into private memory and accepted
only if all of them match on that copy. What was torn, moved or reused simply does not match, and
the caller asks the segment's owner or another holder instead.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pstore.errors import BufferTooSmall, ProtocolError
from p2pstore.objects import (
    CHUNK_BYTES,
    chunk_bounds,
    chunk_sum,
    format_bytes,
)
from p2pstore.side_by_side import PIECE_BYTES, side_by_side, step_bytes, threads_for
from p2pstore.transfer.layout import (
    GRANULE_BYTES,
    INDEX_ENTRY_BYTES,
    SEGMENT_STATE_OFFSET,
    SLOT_BYTES,
    Geometry,
    SegmentState,
    Slot,
    TrailerBody,
    decode_index_entry,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    index_entry_at_home,
    index_home,
    slot_matches,
    trailer_matches,
    trailer_offset,
)

PROBE_LIMIT: Final = 4096
"""Index entries looked at before a search gives up; at half load, runs are far shorter."""

SMALL_COPY_BYTES: Final = 64 * 1024
"""Up to here a plain copy, which holds the interpreter lock for a few microseconds, is quicker."""

_STATE: Final = struct.Struct("<I")
_SUM: Final = struct.Struct("<Q")
_USED_SHIFT: Final = np.uint64(32)
"""An index entry is four words: digest, digest, slot and (from this bit on) whether it is used, reserved."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A verified copy: `length` bytes were delivered; `slot` and `trailer` say what they are."""

    length: int
    slot: Slot
    trailer: TrailerBody


class Sighting(NamedTuple):
    """An object that was found: as long as its slot has these bytes there, it is that version at that place."""

    number: int
    start: int
    packed: bytes
    slot: Slot
    expires_unix_ms: int
    sums: bytes
    """Of its chunks, packed u64s."""

    def still_stands(self, segment: memoryview) -> bool:
        """Whether a look at the mapped segment shows the same, and the object has not expired."""
        return segment[self.start : self.start + SLOT_BYTES] == self.packed and not self.expired

    @property
    def expired(self) -> bool:
        """Whether the object's time to live is over, though its owner did not collect it yet."""
        return 0 < self.expires_unix_ms <= time.time() * 1000


class SegmentReader:
    """Looks up and copies objects of a mapped segment. Any thread may use its own reader.

    Raises `ProtocolError` when `view` does not begin with a segment header that fits it.
    """

    def __init__(self, view: memoryview) -> None:
        self.header = decode_segment_header(view)
        self.geometry = self.header.geometry
        _check_geometry(self.geometry, len(view))
        self._view = view
        self._bytes = np.frombuffer(view, dtype=np.uint8)
        self._index_offset = self.geometry.index_offset
        self._index_entries = self.geometry.index_entries
        self._index = np.frombuffer(
            view, dtype="<u8", count=4 * self._index_entries, offset=self._index_offset
        ).reshape(-1, 4)

    def is_open(self) -> bool:
        """Whether the owner has not closed the segment. (An owner that died leaves it open.)"""
        state: int = _STATE.unpack_from(self._view, SEGMENT_STATE_OFFSET)[0]
        return state == SegmentState.OPEN

    def contains(self, digest: bytes) -> bool:
        """Whether the index lists `digest` now. Not verified: expired objects count until the
        owner collects them, and a key may be missed for the moment in which its entry moves."""
        there, _, used = index_entry_at_home(
            self._view, self._index_offset, self._index_entries, digest
        )
        if not used or there == digest:  # nearly always that settles it
            return used
        return self._find_slot(digest) is not None

    def contains_many(self, digests: bytes) -> NDArray[np.bool_]:
        """`contains` for packed digests, all probed side by side: some 0.1 us each."""
        wanted = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        present = np.zeros(len(wanted), dtype=np.bool_)
        mask = np.uint64(self._index_entries - 1)
        searching = np.arange(len(wanted))
        position = wanted[:, 0] & mask
        for _ in range(PROBE_LIMIT):
            there = self._index.take(position, axis=0)
            used = (there[:, 2] >> _USED_SHIFT).nonzero()[0]
            if not used.size:
                break
            there, searching, position = there[used], searching[used], position[used]
            same = (there[:, :2] == wanted[searching]).all(axis=1)
            present[searching[same]] = True
            further = ~same
            searching, position = searching[further], (position[further] + np.uint64(1)) & mask
        return present

    def sight(self, digest: bytes) -> Sighting | None:
        """`find`, for who will want to know again and again whether it is still so."""
        seen = self._look(digest)
        if seen is None:
            return None
        number, start, packed, slot, trailer = seen
        return Sighting(number, start, packed, slot, trailer.expires_unix_ms, trailer.sums)

    def find(self, digest: bytes) -> tuple[Slot, TrailerBody] | None:
        """The object's verified slot and trailer, or None. Its bytes are not looked at."""
        seen = self._look(digest)
        return None if seen is None else seen[3:]

    def _look(self, digest: bytes) -> tuple[int, int, bytes, Slot, TrailerBody] | None:
        """The number of the object's slot, where that is and what it says, packed and verified; the trailer."""
        number = self._find_slot(digest)
        if number is None or number >= self.geometry.slots:
            return None
        start = self.geometry.slots_offset + number * SLOT_BYTES
        packed = bytes(self._view[start : start + SLOT_BYTES])
        slot = decode_slot(packed)
        if slot is None or not slot_matches(slot, digest, self.geometry):
            return None
        begin = slot.offset + trailer_offset(slot.length)
        trailer = decode_trailer(bytes(self._view[begin : begin + slot.trailer_length]))
        if trailer is None or not trailer_matches(trailer, slot):
            return None
        # Another object of the same bytes, or of none, may lie there by now: its trailer would match as well.
        if bytes(self._view[start : start + SLOT_BYTES]) != packed:
            return None
        return number, start, packed, slot, trailer

    def copy_into(self, digest: bytes, destination: memoryview) -> Copied | None:
        """Copy the object to the start of `destination` (writable, contiguous bytes), verified.

        None on a miss or a mismatch; what is in `destination` then means nothing. Raises
        `BufferTooSmall`. The trailer says when the object expires; that is not looked at here.
        """
        pieces = self.copy_pieces(digest, destination)
        try:
            while True:
                next(pieces)
        except StopIteration as stop:
            copied: Copied | None = stop.value
            return copied

    def copy_pieces(
        self, digest: bytes, destination: memoryview
    ) -> Generator[int, None, Copied | None]:
        """`copy_into` in steps of 4 MiB, or of more where several threads do it: yields the bytes done so far between
        steps and returns the result, so that a caller can run steps on a thread, or stop."""
        found = self.find(digest)
        if found is None:
            return None
        slot, trailer = found
        if len(destination) < slot.length:
            raise BufferTooSmall(
                f"the object has {slot.length:,} bytes ({format_bytes(slot.length)}); the buffer has room for "
                f"{len(destination):,}: give one of that length, or use get()",
                slot.length,
            )
        if slot.length <= SMALL_COPY_BYTES:
            target = destination[: slot.length]
            target[:] = self._view[slot.offset : slot.offset + slot.length]
            good = slot.length == 0 or chunk_sum(target) == _SUM.unpack(trailer.sums)[0]
            return Copied(slot.length, slot, trailer) if good else None
        threads = threads_for(slot.length)
        copy = partial(self._copy_piece, slot, trailer, destination)
        for start in range(0, slot.length, step_bytes(threads)):
            if start or threads > 1:  # more than a thread's piece is for threads alone
                yield start
            end = min(start + step_bytes(threads), slot.length)
            if not all(side_by_side(threads, copy, range(start, end, PIECE_BYTES))):
                return None
        return Copied(slot.length, slot, trailer)

    def _copy_piece(
        self, slot: Slot, trailer: TrailerBody, destination: memoryview, first: int
    ) -> bool:
        """Copy a piece, which begins with this byte; whether its chunks match their sums."""
        length = min(PIECE_BYTES, slot.length - first)
        source = self._bytes[slot.offset + first : slot.offset + first + length]
        target = destination[first : first + length]
        into = np.frombuffer(target, dtype=np.uint8)
        for start, end in chunk_bounds(length):
            np.copyto(into[start:end], source[start:end])
            at = (first + start) // CHUNK_BYTES * _SUM.size
            if chunk_sum(target[start:end]) != _SUM.unpack_from(trailer.sums, at)[0]:
                return False
        return True

    def view_of(self, slot: Slot) -> memoryview:
        """The payload in place, read-only. Only under a lease, and after `find` under it, is it
        known to stay what it is."""
        return self._view[slot.offset : slot.offset + slot.length].toreadonly()

    def _find_slot(self, digest: bytes) -> int | None:
        entries = self._index_entries
        position = index_home(digest, entries)
        for _ in range(PROBE_LIMIT):
            there, slot, used = decode_index_entry(
                self._view, self._index_offset + position * INDEX_ENTRY_BYTES
            )
            if not used:
                return None
            if there == digest:
                return slot
            position = (position + 1) & (entries - 1)
        return None


def _check_geometry(geometry: Geometry, mapped_bytes: int) -> None:
    """Raise `ProtocolError` unless the parts follow one another within the mapping."""
    parts = (
        GRANULE_BYTES,
        geometry.index_offset,
        geometry.index_offset + geometry.index_entries * INDEX_ENTRY_BYTES,
        geometry.slots_offset,
        geometry.slots_offset + geometry.slots * SLOT_BYTES,
        geometry.data_offset,
        geometry.data_offset + geometry.data_bytes,
        geometry.total_bytes,
        mapped_bytes,
    )
    entries = geometry.index_entries
    if list(parts) != sorted(parts) or entries < 2 or entries & (entries - 1):
        raise ProtocolError(
            f"the segment's header describes {geometry.total_bytes:,} bytes in parts that do not "
            f"fit the {mapped_bytes:,} bytes mapped"
        )
