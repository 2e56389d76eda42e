"""Reading a segment that another process owns and changes meanwhile.

No lock, fence or generation: slot, trailer and payload are copied into private memory and accepted
only if all of them match on that copy. A torn, moved or reused object does not match, and
the caller asks the segment's owner or another holder instead.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from p2pstore.errors import ProtocolError
from p2pstore.memory.segment_layout import (
    GRANULE_BYTES,
    INDEX_ENTRY_BYTES,
    SEGMENT_STATE_OFFSET,
    SLOT_BYTES,
    Geometry,
    SegmentState,
    Slot,
    SlotRows,
    TrailerBody,
    decode_index_entry,
    decode_segment_header,
    decode_slot,
    decode_trailer,
    index_entry_at_home,
    index_home,
    needs_trailer,
    slot_matches,
    trailer_matches,
    trailer_offset,
)
from p2pstore.objects import CHUNK_BYTES, Announced, Version, chunk_bounds
from p2pstore.runtime.side_by_side import MAX_THREADS, PIECE_BYTES, side_by_side, step_bytes, threads_for

PROBE_LIMIT: Final = 4096
"""Index entries looked at before a search gives up; at half load, runs are far shorter."""

SMALL_COPY_BYTES: Final = 64 * 1024
"""Up to here a plain copy, which holds the interpreter lock for a few microseconds, is quicker."""

FEW_DIGESTS: Final = 8
"""Up to here one look after the other is quicker than a column: numpy takes 30 us for any."""
NOWHERE: Final = 1 << 32
"""Above all slot numbers."""

_STATE: Final = struct.Struct("<I")
_SUM: Final = struct.Struct("<Q")
_LENGTH_AND_SUM: Final = struct.Struct("<QQ")
_SLOT_MASK: Final = np.uint64(0xFFFFFFFF)
_USED_SHIFT: Final = np.uint64(32)
"""An index entry is four words: digest, digest, slot and (from this bit on) whether it is used, reserved."""


class Copied(NamedTuple):
    """A verified copy: `length` bytes were delivered; `slot` and `trailer` say what they are."""

    length: int
    slot: Slot
    trailer: TrailerBody


class Spots:
    """Where objects lie in a segment, in columns: a private copy of what their slots say, each whole and undamaged."""

    def __init__(
        self,
        places: list[int] | None = None,
        offsets: list[int] | None = None,
        lengths: list[int] | None = None,
        roots: list[int] | None = None,
        sums: dict[int, bytes] | None = None,
    ) -> None:
        self.places = [] if places is None else places
        """Of each its number among those that were asked for."""
        self.offsets = [] if offsets is None else offsets
        self.lengths = [] if lengths is None else lengths
        self.roots = [] if roots is None else roots
        self.sums = {} if sums is None else sums
        """By place, of those that have several chunks at least: the sums of these, packed."""

    def add(self, place: int, slot: Slot, sums: bytes) -> None:
        """One more; `sums` of its chunks, where it has several."""
        self.places.append(place)
        self.offsets.append(slot.offset)
        self.lengths.append(slot.length)
        self.roots.append(slot.version.root)
        if slot.length > CHUNK_BYTES:
            self.sums[place] = sums


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
        return _is_over(self.expires_unix_ms)


def expired(trailer: TrailerBody) -> bool:
    """Whether the object's time to live is over, though its owner did not collect it yet."""
    return _is_over(trailer.expires_unix_ms)


def _is_over(expires_unix_ms: int) -> bool:
    return 0 < expires_unix_ms <= time.time() * 1000


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
        self._slots = np.frombuffer(
            view,
            np.dtype((np.void, SLOT_BYTES)),
            count=self.geometry.slots,
            offset=self.geometry.slots_offset,
        )
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
        there, _, used = index_entry_at_home(self._view, self._index_offset, self._index_entries, digest)
        if not used or there == digest:  # nearly always that settles it
            return used
        return self._find_slot(digest) is not None

    def contains_many(self, digests: bytes) -> NDArray[np.bool_]:
        """`contains` for packed digests, all probed side by side: some 0.1 us each."""
        numbers = self._find_slots(np.frombuffer(digests, dtype="<u8").reshape(-1, 2))
        present: NDArray[np.bool_] = numbers != NOWHERE
        return present

    def sight(self, digest: bytes) -> Sighting | None:
        """`find`, for callers that check again and again whether it is still so."""
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
        seen = self._slot_of(digest)
        if seen is None:
            return None
        trailer = self._trailer_of(*seen[1:])
        return None if trailer is None else (*seen, trailer)

    def _slot_of(self, digest: bytes) -> tuple[int, int, bytes, Slot] | None:
        number = self._find_slot(digest)
        if number is None or number >= self.geometry.slots:
            return None
        start = self.geometry.slots_offset + number * SLOT_BYTES
        packed = bytes(self._view[start : start + SLOT_BYTES])
        slot = decode_slot(packed)
        if slot is None or not slot_matches(slot, digest, self.geometry):
            return None
        return number, start, packed, slot

    def _trailer_of(self, start: int, packed: bytes, slot: Slot) -> TrailerBody | None:
        """The verified trailer of the object whose slot, which begins there, says that."""
        begin = slot.offset + trailer_offset(slot.length)
        trailer = decode_trailer(bytes(self._view[begin : begin + slot.trailer_length]))
        if trailer is None or not trailer_matches(trailer, slot):
            return None
        # Another object of the same bytes, or of none, may lie there by now: its trailer would match as well.
        if bytes(self._view[start : start + SLOT_BYTES]) != packed:
            return None
        return trailer

    # --- copies ------------------------------------------------------------------------------

    def spots(
        self,
        digests: Sequence[bytes],
        announced: Announced | None = None,
        versions: Sequence[Version] = (),
    ) -> Spots:
        """Where those objects lie that are here and have not expired. Not verified yet: that `copy_steps` does.
        `announced`: the versions that count; with `versions`, those were announced, one a digest."""
        if len(digests) > FEW_DIGESTS:
            return self._many_spots(digests, announced, versions)
        spots = Spots()
        for place, digest in enumerate(digests):
            seen = self._slot_of(digest)
            if seen is None:
                continue
            _, start, packed, slot = seen
            if versions and announced is not None:
                announced = Announced(announced.writer, versions[place])
            if announced is None or announced.allows(slot.version):
                sums = self._sums_of(start, packed, slot)
                if sums is not None:
                    spots.add(place, slot, sums)
        return spots

    def _many_spots(
        self, digests: Sequence[bytes], announced: Announced | None, versions: Sequence[Version]
    ) -> Spots:
        """`spots` by a few steps for all of them, at some 0.6 us each."""
        wanted = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
        numbers = self._find_slots(wanted)
        places = (numbers < self.geometry.slots).nonzero()[0]
        numbers = numbers[places]
        rows = SlotRows(self._slots.take(numbers, axis=0))
        good = rows.match(wanted.take(places, axis=0), self.geometry)
        if announced is not None:
            those = [versions[place] for place in places.tolist()] if versions else ()
            good &= rows.are_announced(announced.writer, those)
        sums: dict[int, bytes] = {}
        for row in (good & rows.need_trailers()).nonzero()[0].tolist():
            packed = rows[row]
            start = self.geometry.slots_offset + int(numbers[row]) * SLOT_BYTES
            slot = decode_slot(packed)
            found = None if slot is None else self._sums_of(start, packed, slot)
            if found is None:
                good[row] = False
            else:
                sums[int(places[row])] = found
        if not good.all():
            places, rows = places[good], rows.only(good)
        offsets, lengths, roots = map(rows.column, ("offset", "length", "root"))
        return Spots(places.tolist(), offsets, lengths, roots, sums)

    def _sums_of(self, start: int, packed: bytes, slot: Slot) -> bytes | None:
        """The sums of the chunks, packed, where there are several. None for an object that has expired, or has
        changed."""
        if not needs_trailer(slot):
            return b""
        trailer = self._trailer_of(start, packed, slot)
        if trailer is None or expired(trailer):
            return None
        return trailer.sums

    def spots_told(self, told: Iterable[tuple[Slot, bytes]]) -> Spots:
        """Where the owner said that objects lie, by slots and sums that belong together. Not looked at: that
        `copy_steps` does."""
        spots = Spots()
        for place, (slot, sums) in enumerate(told):
            if slot_matches(slot, slot.digest, self.geometry):
                spots.add(place, slot, sums)
        return spots

    def copy_steps(
        self, spots: Spots, rooms: Sequence[memoryview], most_threads: int = MAX_THREADS
    ) -> Generator[int, None, bytearray]:
        """Copy objects to the beginnings of `rooms` (writable bytes), one room a spot, and verify the copies. In steps
        of some 4 MiB, or of more where several threads do it: yields the bytes done so far between steps, so that a
        caller can run steps on a thread, or stop. Returns one byte a spot: 1 where the object was copied, 0 where it
        changed meanwhile or its room is too small; the bytes of that room are undefined."""
        copying = _Copying(self._view, self._bytes, spots, rooms)
        lengths = spots.lengths
        total_bytes = sum(lengths)
        if total_bytes <= PIECE_BYTES and not spots.sums:
            copying.copy_wholes(0, len(lengths))
            return copying.good
        threads = threads_for(sum(length for length in lengths if length > SMALL_COPY_BYTES))
        threads = min(threads, most_threads)
        done_bytes = 0
        for pieces, piece_bytes in _in_steps(_pieces(lengths), step_bytes(threads)):
            if done_bytes or threads > 1:  # more than a thread's piece is for threads alone
                yield done_bytes
            side_by_side(threads, copying.copy_piece, pieces)
            if not any(copying.good):  # all of them have changed
                break
            done_bytes += piece_bytes
        return copying.good

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

    def _find_slots(self, wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The slot numbers of digests, each a row of two words; `NOWHERE` for those that are not listed."""
        found = np.full(len(wanted), NOWHERE, np.int64)
        mask = np.uint64(self._index_entries - 1)
        searching = np.arange(len(wanted))
        position = wanted[:, 0] & mask
        for _ in range(PROBE_LIMIT):
            there = self._index.take(position, axis=0)
            used = (there[:, 2] >> _USED_SHIFT).nonzero()[0]
            if not used.size:
                break
            if used.size < len(there):
                there, searching, position = there[used], searching[used], position[used]
            sought = wanted.take(searching, axis=0)
            same = (there[:, 0] == sought[:, 0]) & (there[:, 1] == sought[:, 1])
            found[searching[same]] = there[same, 2] & _SLOT_MASK
            if same.all():
                break
            further = ~same
            searching, position = searching[further], (position[further] + np.uint64(1)) & mask
        return found


class _Copying:
    """Copies of objects to rooms, piece by piece. Any thread may do pieces; each piece writes to its own rooms."""

    def __init__(
        self, view: memoryview, memory: NDArray[np.uint8], spots: Spots, rooms: Sequence[memoryview]
    ) -> None:
        self.good = bytearray(b"\1" * len(rooms))
        self._view = view
        self._memory = memory
        self._spots = spots
        self._rooms = rooms

    def copy_piece(self, piece: _Piece) -> None:
        """One piece: whole objects, or a chunk of one."""
        if piece.chunk is None:
            self.copy_wholes(piece.first, piece.last)
        else:
            self._copy_chunk(piece.first, piece.chunk)

    def copy_wholes(self, first: int, last: int) -> None:
        """Copy objects of at most one chunk each. Each is summed while it is in the processor's cache."""
        view, spots = self._view, self._spots
        for number, room, offset, length, root in zip(
            range(first, last),
            self._rooms[first:last],
            spots.offsets[first:last],
            spots.lengths[first:last],
            spots.roots[first:last],
            strict=True,
        ):
            target = room if len(room) == length else room[:length]
            if len(target) != length:
                self.good[number] = 0
                continue
            if length > SMALL_COPY_BYTES:
                into = np.frombuffer(target, np.uint8)
                np.copyto(into, self._memory[offset : offset + length])
            elif length:
                target[:] = view[offset : offset + length]
            else:  # there is no byte to look at, and the trailer was
                continue
            if xxh3_64_intdigest(_LENGTH_AND_SUM.pack(length, xxh3_64_intdigest(target))) != root:
                self.good[number] = 0

    def _copy_chunk(self, number: int, chunk: int) -> None:
        spots, room = self._spots, self._rooms[number]
        length = spots.lengths[number]
        if not self.good[number] or len(room) < length:
            self.good[number] = 0
            return
        start = chunk * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, length)
        target, offset = room[start:end], spots.offsets[number]
        np.copyto(np.frombuffer(target, np.uint8), self._memory[offset + start : offset + end])
        wanted = _SUM.unpack_from(spots.sums[spots.places[number]], chunk * _SUM.size)[0]
        if xxh3_64_intdigest(target) != wanted:
            self.good[number] = 0


class _Piece(NamedTuple):
    """Whole objects from `first` to before `last`; or that chunk of the first one."""

    first: int
    last: int
    length_bytes: int
    chunk: int | None = None


def _pieces(lengths: Sequence[int]) -> Iterator[_Piece]:
    """All bytes of objects of these lengths: chunks of those that have several; of others as many as make a chunk."""
    first = group_bytes = 0
    for number, length in enumerate(lengths):
        if length + group_bytes > CHUNK_BYTES:
            if number > first:
                yield _Piece(first, number, group_bytes)
            first, group_bytes = number, 0
        if length <= CHUNK_BYTES:
            group_bytes += length
            continue
        for chunk, (start, end) in enumerate(chunk_bounds(length)):
            yield _Piece(number, number + 1, end - start, chunk)
        first = number + 1
    if len(lengths) > first:
        yield _Piece(first, len(lengths), group_bytes)


def _in_steps(pieces: Iterable[_Piece], most_bytes: int) -> Iterator[tuple[list[_Piece], int]]:
    """Pieces of about `most_bytes` together, and how many bytes they have."""
    step: list[_Piece] = []
    step_length = 0
    for piece in pieces:
        if step and step_length + piece.length_bytes > most_bytes:
            yield step, step_length
            step, step_length = [], 0
        step.append(piece)
        step_length += piece.length_bytes
    if step:
        yield step, step_length


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
