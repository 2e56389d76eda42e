"""The published part of a segment: header, key index, object slots and trailers. Pure.

The order of writes matters to readers: trailer, slot, index entry when an object appears; index
entry, then slot when it goes. Nothing that was written is believed when it is read back: clients that write map it
all, and may write anywhere. What they spoil is written anew (`restore_header` and the like).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence, Set
from itertools import islice
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from p2pstore.memory.entries import ObjectEntry, Reservation
from p2pstore.memory.segment_layout import (
    FREE_SLOT,
    INDEX_ENTRY_BYTES,
    INDEX_USED,
    MAX_TRAILER_BYTES,
    SEGMENT_STATE_OFFSET,
    SLOT_BYTES,
    SLOT_FLAG_LASTING,
    SLOT_FLAG_SOFT,
    SLOT_FLAG_TENSOR,
    SLOT_STATE_OFFSET,
    Geometry,
    SegmentHeader,
    SegmentState,
    Slot,
    SlotState,
    TrailerBody,
    decode_trailer,
    encode_index_entry,
    encode_segment_header,
    encode_slot,
    encode_trailer,
    pack_index_entry_into,
    pack_slots,
    trailer_offset,
)
from p2pstore.objects import Version


def packed_slots(*entries: ObjectEntry) -> list[bytes]:
    """Each entry as its slot says it."""
    flags = [
        (0 if entry.expires_unix_ms else SLOT_FLAG_LASTING)
        | (SLOT_FLAG_SOFT if entry.soft else 0)
        | (SLOT_FLAG_TENSOR if entry.dtype else 0)
        for entry in entries
    ]
    return pack_slots(entries, flags)


class ObjectTable:
    """Writes the parts of a segment that describe objects; at first there are none. Slots of the numbers `kept` are
    taken, and stay as they are."""

    def __init__(
        self,
        buffer: memoryview,
        segment_id: bytes,
        incarnation: int,
        geometry: Geometry,
        kept: Set[int] = frozenset(),
    ) -> None:
        if len(buffer) < geometry.total_bytes:
            raise ValueError(
                f"the segment needs {geometry.total_bytes:,} bytes, the buffer has {len(buffer):,}"
            )
        self.geometry = geometry
        self._buffer = buffer
        self._slots_offset = geometry.slots_offset
        self._free_slots: list[int] = []
        self._unused_slots = (each for each in range(geometry.slots) if each not in kept)
        memory = np.frombuffer(buffer, np.uint8)
        memory[geometry.index_offset : geometry.slots_offset].fill(0)
        slots_end = geometry.slots_offset + geometry.slots * SLOT_BYTES
        if kept:
            free = np.ones(geometry.slots, np.bool_)
            free[list(kept)] = False
            memory[geometry.slots_offset : slots_end].reshape(-1, SLOT_BYTES)[free] = 0
        else:
            memory[geometry.slots_offset : slots_end].fill(0)
        memory[slots_end : geometry.data_offset].fill(0)
        self._index = KeyIndex(buffer[geometry.index_offset :], geometry.index_entries, geometry.slots)
        slots = memory[geometry.slots_offset : slots_end]
        self._slots: NDArray[np.uint8] = slots.reshape(-1, SLOT_BYTES)
        header = SegmentHeader(segment_id, incarnation, geometry, SegmentState.OPEN)
        self._header = encode_segment_header(header)
        self._write(0, self._header)

    def take_slot(self) -> int | None:
        """A free slot number, the one freed last if there is one; None when all are taken."""
        taken = self.take_slots(1)
        return taken[0] if taken else None

    def take_slots(self, count: int) -> list[int]:
        """`take_slot` up to `count` times: as many as there are."""
        free = self._free_slots
        if len(free) < count:
            free[:0] = reversed(list(islice(self._unused_slots, count - len(free))))
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        return taken

    @property
    def has_free_slot(self) -> bool:
        """Whether `take_slot` would give one."""
        if not self._free_slots:
            self._free_slots += islice(self._unused_slots, 1)
        return bool(self._free_slots)

    def free_slots(self, numbers: Sequence[int]) -> None:
        """Clear the slots and let them be taken again."""
        buffer, base = self._buffer, self._slots_offset
        for number in numbers:
            start = base + number * SLOT_BYTES
            buffer[start : start + SLOT_BYTES] = FREE_SLOT
        self._free_slots += numbers

    def publish(
        self, entries: Sequence[ObjectEntry], trailers: Iterable[bytes] = (), *, new: bool = False
    ) -> None:
        """Make filled extents objects that readers find, in place of those of the same digests; `new`: there are none.
        Without `trailers`, those of an earlier life are there already."""
        buffer = self._buffer
        for entry, trailer in zip(entries, trailers, strict=False):
            start = entry.offset + (entry.length + 7 & ~7)  # `trailer_offset`, without its call
            buffer[start : start + len(trailer)] = trailer
        self.write_slots(*entries)
        self._index.set_all(entries, new=new)

    def write_reservation(self, reservation: Reservation) -> None:
        """Mark the slot as one whose bytes may be written."""
        filling = Slot(
            SlotState.FILLING, bytes(16), Version(0, 0), reservation.offset, reservation.capacity, 0
        )
        self._write(self._slot_offset(reservation.slot), encode_slot(filling))

    def spoil(self, entries: Iterable[ObjectEntry]) -> None:
        """Let no reader accept these slots any more: their checksums are those of another state."""
        at = self._slots_offset + SLOT_STATE_OFFSET
        for entry in entries:
            self._buffer[at + entry.slot * SLOT_BYTES] = SlotState.DOOMED

    def withdraw(self, entries: Sequence[ObjectEntry]) -> None:
        """Readers no longer find the object; its slot stays as it is."""
        self._index.remove(entries)

    def write_slots(self, *entries: ObjectEntry) -> None:
        """Bring slots up to date with the entries."""
        buffer, base = self._buffer, self._slots_offset
        for entry, packed in zip(entries, packed_slots(*entries), strict=True):
            start = base + entry.slot * SLOT_BYTES
            buffer[start : start + SLOT_BYTES] = packed

    def write_care(self, entry: ObjectEntry) -> None:
        """Bring the trailer's pin, replica count and end up to date with the entry. The first two are one byte in
        msgpack (at most 127). An end that is new makes the trailer longer: it is left out of the trailer where the
        extent has no room for it, and the owner alone acts on it."""
        trailer = decode_trailer(self.trailer_bytes(entry))
        if trailer is None:
            return
        care = msgspec.structs.replace(trailer, pin=int(entry.pin), replicas=entry.replicas)
        packed = encode_trailer(msgspec.structs.replace(care, expires_unix_ms=entry.expires_unix_ms))
        room = min(entry.extent_bytes - trailer_offset(entry.length), MAX_TRAILER_BYTES)
        if len(packed) > room:
            packed = encode_trailer(care)
        self._write(entry.offset + trailer_offset(entry.length), packed)
        entry.trailer_length = len(packed)
        self._restore(self._slot_offset(entry.slot), packed_slots(entry)[0])

    def write_proof(self, entry: ObjectEntry, proof: bytes) -> None:
        """Add a proof to a trailer that has none, where the extent has room for it."""
        trailer = decode_trailer(self.trailer_bytes(entry))
        if trailer is None or trailer.proof:
            return
        packed = encode_trailer(msgspec.structs.replace(trailer, proof=proof))
        if len(packed) > min(entry.extent_bytes - trailer_offset(entry.length), MAX_TRAILER_BYTES):
            return
        self._write(entry.offset + trailer_offset(entry.length), packed)
        entry.trailer_length = len(packed)
        self.write_slots(entry)

    def slot_bytes(self, entry: ObjectEntry) -> bytes:
        """A copy of the entry's slot."""
        start = self._slot_offset(entry.slot)
        return bytes(self._buffer[start : start + SLOT_BYTES])

    def slot_rows(self, numbers: list[int]) -> NDArray[np.uint8]:
        """Copies of many slots, a row of 64 bytes each. From any thread: one that is being changed may be torn, as
        its checksum shows."""
        return self._slots[numbers]

    def trailer_bytes(self, entry: ObjectEntry) -> bytes:
        """A copy of the entry's trailer."""
        start = entry.offset + trailer_offset(entry.length)
        return bytes(self._buffer[start : start + entry.trailer_length])

    def restore_header(self) -> bool:
        """Write the header anew if another process wrote there. Whether it had."""
        return self._restore(0, self._header)

    def restore_index(self, first: int, count: int) -> int:
        """The same for entries of the index; how many were changed."""
        return self._index.restore(first, count)

    def restore_slot(self, number: int, held: ObjectEntry | Reservation | None) -> bool:
        """The same for the slot of what is held there."""
        if isinstance(held, ObjectEntry):
            expected = packed_slots(held)[0]
        elif held is None:
            expected = FREE_SLOT
        else:  # no reader uses it
            return False
        return self._restore(self._slot_offset(number), expected)

    def restore_trailer(self, entry: ObjectEntry, sums: bytes) -> bool:
        """The same for the trailer of an object whose payload has these chunk sums. False, too, when it cannot be made
        anew."""
        trailer = TrailerBody(
            entry.namespace,
            entry.key,
            sums,
            entry.expires_unix_ms,
            entry.replicas,
            int(entry.pin),
            entry.dtype,
            tuple(entry.shape),
        )
        packed = encode_trailer(trailer)
        if len(packed) != entry.trailer_length:
            return False
        return self._restore(entry.offset + trailer_offset(entry.length), packed)

    def _restore(self, offset: int, expected: bytes) -> bool:
        if self._buffer[offset : offset + len(expected)] == expected:
            return False
        self._write(offset, expected)
        return True

    def close(self) -> None:
        """Mark the segment as abandoned by its owner."""
        begin, end = SEGMENT_STATE_OFFSET, SEGMENT_STATE_OFFSET + 4
        closed = int(SegmentState.CLOSED).to_bytes(4, "little")
        self._header = self._header[:begin] + closed + self._header[end:]
        self._write(0, self._header)  # all of it: the next life may begin with this memory

    def detach(self) -> None:
        """Let go of the buffer."""
        self._buffer = memoryview(b"")
        self._slots = np.empty((0, SLOT_BYTES), np.uint8)
        self._index.detach()

    def _slot_offset(self, number: int) -> int:
        return self.geometry.slots_offset + number * SLOT_BYTES

    def _write(self, offset: int, data: bytes) -> None:
        self._buffer[offset : offset + len(data)] = data


_DIGEST: Final = attrgetter("digest")
_UNUSED: Final = bytes(INDEX_ENTRY_BYTES)


def _first_words(entries: Sequence[ObjectEntry]) -> Sequence[int]:
    """The first 64 bits of each digest."""
    return struct.unpack(f"<{2 * len(entries)}Q", b"".join(map(_DIGEST, entries)))[::2]


class KeyIndex:
    """Writes the published key index into `section`, which begins zeroed. `entries` is a power of two, `slots` is less.

    Open addressing with linear probing. The owner keeps its own copy and never reads the shared one back, so nothing
    that another process scribbles there confuses it. Readers may miss a key for the moment in which it is moved.
    """

    def __init__(self, section: memoryview, entries: int, slots: int) -> None:
        self._section = section
        self._entries = entries
        self._mask = entries - 1
        self._none = slots
        """In place of a slot's number, of an unused entry."""
        self._slots = array("I", [slots]) * entries
        self._homes = array("I", bytes(4 * entries))
        """Where the search for what is in an entry begins."""
        self._digests: list[bytes] = [b""] * slots
        """By slot: looked at seldom, as each is another place in memory."""

    def set_all(self, entries: Sequence[ObjectEntry], *, new: bool) -> None:
        """Publish in which slot each object is, in place of an earlier one of the same digest; `new`: there is none."""
        digests, slots, homes, section = self._digests, self._slots, self._homes, self._section
        mask, none = self._mask, self._none
        for entry, word in zip(entries, _first_words(entries), strict=True):
            digest, slot = entry.digest, entry.slot
            home = position = word & mask
            while (there := slots[position]) != none and (new or digests[there] != digest):
                position = (position + 1) & mask
            digests[slot] = digest
            slots[position], homes[position] = slot, home
            pack_index_entry_into(section, position * INDEX_ENTRY_BYTES, digest, slot, INDEX_USED)

    def remove(self, entries: Sequence[ObjectEntry]) -> None:
        """Take objects out and move later entries of their runs back: no tombstones remain."""
        slots, homes, mask, none = self._slots, self._homes, self._mask, self._none
        for entry, word in zip(entries, _first_words(entries), strict=True):
            slot, hole = entry.slot, word & mask
            while (there := slots[hole]) != slot:
                if there == none:
                    raise KeyError(entry.digest)
                hole = (hole + 1) & mask
            position = hole
            while (moving := slots[position := (position + 1) & mask]) != none:
                home = homes[position]
                if (position - home) & mask >= (position - hole) & mask:
                    slots[hole], homes[hole] = moving, home
                    start = hole * INDEX_ENTRY_BYTES
                    pack_index_entry_into(
                        self._section, start, self._digests[moving], moving, INDEX_USED
                    )
                    hole = position
            slots[hole] = none
            start = hole * INDEX_ENTRY_BYTES
            self._section[start : start + INDEX_ENTRY_BYTES] = _UNUSED

    def restore(self, first: int, count: int) -> int:
        """Write entries anew that another process changed; how many there were."""
        restored = 0
        for position in range(first, min(first + count, self._entries)):
            slot = self._slots[position]
            start = position * INDEX_ENTRY_BYTES
            used = slot != self._none
            expected = encode_index_entry(self._digests[slot], slot) if used else _UNUSED
            if self._section[start : start + INDEX_ENTRY_BYTES] != expected:
                self._section[start : start + INDEX_ENTRY_BYTES] = expected
                restored += 1
        return restored

    def detach(self) -> None:
        """Let go of the memory."""
        self._section = memoryview(b"")
