"""Which records of a segment were discarded: a page of bits, eight sectors that are checked each for itself. Pure.

A discard is durable when its mark is: nothing that is marked comes back after a crash. So whoever takes a record
out of the index, or never puts it in after it was written, marks it dead, unless the whole segment goes. A sector
that is damaged says of all its records that they are dead.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from p2pstore.ssd_tier.log_layout import PAGE_BYTES

SECTOR_BYTES: Final = 512
_SECTOR_BITS_BYTES: Final = SECTOR_BYTES - 8
_SECTORS: Final = PAGE_BYTES // SECTOR_BYTES
_BITS_BYTES: Final = _SECTORS * _SECTOR_BITS_BYTES
MAX_RECORDS_PER_SEGMENT: Final = _BITS_BYTES * 8
"""32,256: no more records are placed in a segment."""


class DeadMarks:
    """The dead marks of one generation of a segment.

    `dirty` says that there are marks that `encode` has not given out yet; set it when writing them failed.
    """

    def __init__(self, store_id: bytes, segment: int, generation: int) -> None:
        self.dirty = False
        self._bits = (
            bytearray()
        )  # grows with the highest number marked: most segments have no marks
        self._seeds = [
            xxhash.xxh3_64_intdigest(struct.pack("<16sIIQ", store_id, segment, sector, generation))
            for sector in range(_SECTORS)
        ]

    def mark(self, number: int) -> None:
        """The record of this number is dead. Raises `ValueError` for a number that no record has."""
        if not 0 <= number < MAX_RECORDS_PER_SEGMENT:
            raise ValueError(f"a segment has no record number {number}")
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        if not self._bits[byte] & bit:
            self._bits[byte] |= bit
            self.dirty = True

    def is_dead(self, number: int) -> bool:
        """Whether the record was marked."""
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & 1 << (number & 7))

    def dead_of(self, numbers: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
        """For each of many numbers, whether it was marked."""
        if not self._bits:
            return np.zeros(len(numbers), bool)
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little")
        dead = np.zeros(MAX_RECORDS_PER_SEGMENT, bool)
        dead[: len(bits)] = bits
        found: npt.NDArray[np.bool_] = dead[numbers]
        return found

    def encode(self) -> bytes:
        """The page to write; nothing is dirty then, until the next mark."""
        self.dirty = False
        bits = bytes(self._bits).ljust(_BITS_BYTES, b"\0")
        sectors = []
        for sector, seed in enumerate(self._seeds):
            part = bits[sector * _SECTOR_BITS_BYTES : (sector + 1) * _SECTOR_BITS_BYTES]
            sectors += [part, xxhash.xxh3_64_intdigest(part, seed).to_bytes(8, "little")]
        return b"".join(sectors)

    @classmethod
    def decode(
        cls, page: bytes | memoryview, store_id: bytes, segment: int, generation: int
    ) -> DeadMarks:
        """The marks that a page holds. Where a sector is damaged, all its records are dead, and `dirty` is set:
        what is written next says so for good."""
        marks = cls(store_id, segment, generation)
        bits = bytearray()
        for sector, seed in enumerate(marks._seeds):
            start = sector * SECTOR_BYTES
            part = bytes(page[start : start + _SECTOR_BITS_BYTES])
            checksum = bytes(page[start + _SECTOR_BITS_BYTES : start + SECTOR_BYTES])
            if xxhash.xxh3_64_intdigest(part, seed).to_bytes(8, "little") != checksum:
                part, marks.dirty = b"\xff" * _SECTOR_BITS_BYTES, True
            bits += part
        marks._bits = bits.rstrip(b"\0")
        return marks
