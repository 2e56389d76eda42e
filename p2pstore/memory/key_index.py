"""The published key index: its entries, and the table as the owner writes it. Pure.

Open addressing with linear probing, 32 bytes an entry. The owner keeps its own copy and never reads
the shared one back, so nothing that another process scribbles there confuses it. Readers may miss a
key for the moment in which it is moved.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Final

from p2pstore.memory.segment_layout import INDEX_ENTRY_BYTES

_INDEX_ENTRY: Final = struct.Struct("<16sII8x")
INDEX_USED: Final = 1
pack_index_entry_into: Final = _INDEX_ENTRY.pack_into
"""(buffer, offset, digest, slot number, `INDEX_USED`): `encode_index_entry` in place."""
_UNUSED = bytes(INDEX_ENTRY_BYTES)


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


class KeyIndex:
    """Writes entries into `section`, which begins zeroed. `entries` is a power of two."""

    def __init__(self, section: memoryview, entries: int) -> None:
        self._section = section
        self._entries = entries
        self._digests: list[bytes | None] = [None] * entries
        self._slots = array("I", bytes(4 * entries))

    def set_all(self, found: Iterable[tuple[bytes, int]]) -> None:
        """Publish in which slot each digest is, in place of an earlier slot of the same digest."""
        digests, slots, section = self._digests, self._slots, self._section
        mask = self._entries - 1
        for digest, slot in found:
            position = int.from_bytes(digest[:8], "little") & mask  # `index_home`, without its call
            while (there := digests[position]) is not None and there != digest:
                position = (position + 1) & mask
            digests[position] = digest
            slots[position] = slot
            pack_index_entry_into(section, position * INDEX_ENTRY_BYTES, digest, slot, INDEX_USED)

    def remove(self, *gone: bytes) -> None:
        """Take digests out and move later entries of their runs back: no tombstones remain."""
        digests, slots, mask = self._digests, self._slots, self._entries - 1
        for digest in gone:
            hole = int.from_bytes(digest[:8], "little") & mask  # `index_home`, without its call
            while (there := digests[hole]) != digest:
                if there is None:
                    raise KeyError(digest)
                hole = (hole + 1) & mask
            position = hole
            while (moving := digests[position := (position + 1) & mask]) is not None:
                home = int.from_bytes(moving[:8], "little")
                if (position - home) & mask >= (position - hole) & mask:
                    self._write(hole, moving, slots[position])
                    hole = position
            digests[hole] = None
            start = hole * INDEX_ENTRY_BYTES
            self._section[start : start + INDEX_ENTRY_BYTES] = _UNUSED

    def restore(self, first: int, count: int) -> int:
        """Write entries anew that another process changed; how many there were."""
        restored = 0
        for position in range(first, min(first + count, self._entries)):
            digest = self._digests[position]
            start = position * INDEX_ENTRY_BYTES
            expected = _UNUSED if digest is None else encode_index_entry(digest, self._slots[position])
            if self._section[start : start + INDEX_ENTRY_BYTES] != expected:
                self._section[start : start + INDEX_ENTRY_BYTES] = expected
                restored += 1
        return restored

    def detach(self) -> None:
        """Let go of the memory."""
        self._section = memoryview(b"")

    def _write(self, position: int, digest: bytes, slot: int) -> None:
        self._digests[position] = digest
        self._slots[position] = slot
        pack_index_entry_into(self._section, position * INDEX_ENTRY_BYTES, digest, slot, INDEX_USED)
