"""Which pieces somebody has, and how rare each piece is. Pure.

A map is one integer: bit k says that piece k is there. Python's integers make unions and differences of 65,536 pieces
cost a microsecond, and of a thousand pieces a tenth of that; so all choices below are a few operations on whole maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from random import Random
from typing import Final

from p2pstore.errors import ProtocolError

PieceMap = int
"""Bit k is set when piece k is there."""

NO_PIECES: Final = 0
_WORD: Final = 1024
_WORD_MASK: Final = (1 << _WORD) - 1
_DIGITS: Final = bytes.maketrans(b"01", b"\0\1")


def full_map(count: int) -> PieceMap:
    """All pieces of a checkpoint with `count` of them."""
    return (1 << count) - 1


def map_of(pieces: Iterable[int]) -> PieceMap:
    """A map of these pieces."""
    numbers = list(pieces)
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for piece in numbers:
        bits[piece // 8] |= 1 << piece % 8
    return int.from_bytes(bits, "little")


def pieces_in(pieces: PieceMap) -> list[int]:
    """The numbers of the pieces that are there, in their order; 2 ms for 65,536."""
    found: list[int] = []
    for start, bits in _words_in(pieces):
        found += compress(range(start, start + _WORD), bits)
    return found


def sum_of(pieces: PieceMap, sizes: Sequence[int]) -> int:
    """Of the sizes of all pieces, the sum of those that are there; 2 ms for 65,536."""
    return sum(
        sum(compress(sizes[start : start + _WORD], bits)) for start, bits in _words_in(pieces)
    )


def _words_in(pieces: PieceMap) -> Iterator[tuple[int, bytes]]:
    """The parts of a map that have pieces: the number of the first, and a byte for each, 1 when it is there."""
    for start in range(0, pieces.bit_length(), _WORD):
        word = pieces >> start & _WORD_MASK
        if word:
            yield start, f"{word:b}"[::-1].encode().translate(_DIGITS)


def pack_map(pieces: PieceMap, count: int) -> bytes:
    """As it travels: a bit a piece, lowest first, in whole bytes."""
    return pieces.to_bytes(-(-count // 8), "little")


def unpack_map(packed: bytes, count: int) -> PieceMap:
    """What `pack_map` made. Raises `ProtocolError` when it is not of `count` pieces."""
    if len(packed) != -(-count // 8):
        raise ProtocolError(f"a map of {len(packed)} bytes for {count} pieces")
    pieces = int.from_bytes(packed, "little")
    if pieces >> count:
        raise ProtocolError(f"a map with pieces beyond the last of {count}")
    return pieces


def any_piece(pieces: PieceMap, count: int, rng: Random) -> int:
    """One of `pieces`, of which there must be some: the first from a place chosen at random.

    So a piece behind a gap is chosen more often than others. That does no harm, and choosing evenly would mean
    looking at each.
    """
    start = int(rng.random() * count)
    beyond = pieces >> start
    if beyond:
        return start + (beyond & -beyond).bit_length() - 1
    return (pieces & -pieces).bit_length() - 1


class Availability:
    """How many of some peers have each piece.

    Pieces lie in levels, a map for each number of copies. A copy more moves a piece one level up; many pieces move in
    as many steps as there are levels. The rarest of some pieces are those in the lowest level that has any.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._levels = [full_map(count)]

    def add(self, pieces: PieceMap) -> None:
        """One more has these pieces."""
        levels = self._levels
        level = len(levels) - 1
        while pieces and level >= 0:
            moved = levels[level] & pieces
            if moved:
                if level + 1 == len(levels):
                    levels.append(moved)
                else:
                    levels[level + 1] |= moved
                levels[level] ^= moved
                pieces ^= moved
            level -= 1

    def remove(self, pieces: PieceMap) -> None:
        """One that had these pieces is gone. All of them must have been added."""
        levels = self._levels
        for level in range(1, len(levels)):
            moved = levels[level] & pieces
            if moved:
                levels[level] ^= moved
                levels[level - 1] |= moved
                pieces ^= moved
                if not pieces:
                    return
        if pieces:
            raise ValueError("pieces are removed that were not added")

    def copies(self, piece: int) -> int:
        """How many have the piece."""
        bit = 1 << piece
        return next(number for number, level in enumerate(self._levels) if level & bit)

    def fewest(self) -> int:
        """How many have the rarest piece of all; 0 when there are no pieces."""
        return next((number for number, level in enumerate(self._levels) if level), 0)

    def with_fewest(self, pieces: PieceMap) -> PieceMap:
        """The rarest of these pieces: all that are equally rare."""
        for level in self._levels:
            found = level & pieces
            if found:
                return found
        return NO_PIECES
