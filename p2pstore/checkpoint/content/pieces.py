"""Cutting files into pieces, the unit of hashing, requests and verification; maps of pieces; files in memory. Pure.

A large file (one piece or longer) begins with a piece of its own and ends with one. Smaller files share pieces: each
goes whole into the last shared piece, or begins the next. So

- a file that grows or shrinks changes no piece of another large file: versions that differ a little share the pieces of
  all bytes that kept their place in their file;
- a piece is one range of one file (or some whole small files): a rank that needs ranges of files fetches few bytes of
  others;
- a hundred thousand tiny tensors are not a hundred thousand pieces.

In systems whose pieces run over the concatenation of files, the first file that grows moves all bytes behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import compress
from random import Random
from typing import Final, NamedTuple

from p2pstore.errors import CheckpointRefused, ProtocolError

MIN_PIECE_BYTES: Final = 16 * 1024
MAX_PIECE_BYTES: Final = 256 * 1024 * 1024
"""Limits for publishers; both are powers of two."""
SMALLEST_USUAL: Final = 512 * 1024
MAX_USUAL_BYTES: Final = 64 * 1024 * 1024
USUAL_PIECES: Final = 2048
"""With this number, the start and the end of a broadcast, when not all peers send, cost 1 % of its time."""
FEWER_PIECES: Final = 512
"""With this number they cost 2 to 3 %. Usual where `USUAL_PIECES` pieces would be smaller than `CHEAP`: decisions and
messages cost the same for a piece of any length, 16 % of a core for 1 GB/s in pieces of 512 KiB."""
CHEAP: Final = 4 * 1024 * 1024
MAX_PIECES: Final = 65_536
MAX_FILE_BYTES: Final = 1 << 44
MAX_TOTAL_BYTES: Final = 1 << 44
NO_PIECES: Final = 0
_WORD: Final = 1024
_WORD_MASK: Final = (1 << _WORD) - 1
_DIGITS: Final = bytes.maketrans(b"01", b"\0\1")
ALIGNMENT: Final = 64


class Extent(NamedTuple):
    """A range of one file, by its number in the manifest."""

    file: int
    offset: int
    length: int


class PieceLayout:
    """Which piece has which bytes of which file."""

    def __init__(self, file_sizes: Sequence[int], piece_bytes: int) -> None:
        """Raises `CheckpointRefused` for an invalid size, and for too many pieces."""
        check_piece_bytes(piece_bytes)
        if any(not 0 <= size <= MAX_FILE_BYTES for size in file_sizes):
            raise CheckpointRefused(
                f"a file of {max(file_sizes, key=abs):,} bytes; at most {MAX_FILE_BYTES:,} are allowed"
            )
        self.piece_bytes = piece_bytes
        self.file_sizes = tuple(file_sizes)
        self.total_bytes = sum(file_sizes)
        self._large = [file for file, size in enumerate(file_sizes) if size >= piece_bytes]
        self._first_pieces: list[int] = []
        """Of each large file."""
        count = 0
        for file in self._large:
            self._first_pieces.append(count)
            count += -(-file_sizes[file] // piece_bytes)
        self._shared_from = count
        self._shared: list[list[Extent]] = []
        self._piece_of_small: dict[int, int] = {}
        self._share(piece_bytes)
        if self.total_bytes > MAX_TOTAL_BYTES or self.count > MAX_PIECES:
            raise CheckpointRefused(
                f"{self.total_bytes:,} bytes in {self.count:,} pieces; at most {MAX_TOTAL_BYTES:,} bytes and "
                f"{MAX_PIECES:,} pieces are allowed"
            )

    @property
    def count(self) -> int:
        """Number of pieces; 0 when all files are empty."""
        return self._shared_from + len(self._shared)

    def is_shared(self, piece: int) -> bool:
        """Whether the piece has whole small files, not a range of a large one."""
        return piece >= self._shared_from

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each piece, between 1 and `piece_bytes`."""
        large = [
            min(self.piece_bytes, self.file_sizes[file] - offset)
            for file in self._large
            for offset in range(0, self.file_sizes[file], self.piece_bytes)
        ]
        shared = [sum(extent.length for extent in extents) for extents in self._shared]
        return (*large, *shared)

    def size_of(self, pieces: PieceMap) -> int:
        if pieces == full_map(self.count):
            return self.total_bytes
        return sum_of(pieces, self.sizes)

    def extents(self, piece: int) -> list[Extent]:
        """The ranges of a piece, in order."""
        if not 0 <= piece < self.count:
            raise IndexError(f"piece {piece} of {self.count}")
        if piece >= self._shared_from:
            return self._shared[piece - self._shared_from]
        number = bisect_right(self._first_pieces, piece) - 1
        file = self._large[number]
        offset = (piece - self._first_pieces[number]) * self.piece_bytes
        return [Extent(file, offset, min(self.piece_bytes, self.file_sizes[file] - offset))]

    def pieces_of(self, file: int, start: int = 0, stop: int | None = None) -> range:
        """The pieces with bytes `start` to `stop` (default: the end) of a file."""
        stop = self.file_sizes[file] if stop is None else min(stop, self.file_sizes[file])
        if start >= stop:
            return range(0)
        shared = self._piece_of_small.get(file)
        if shared is not None:
            return range(shared, shared + 1)
        first = self._first_pieces[bisect_right(self._large, file) - 1]
        return range(first + start // self.piece_bytes, first + -(-stop // self.piece_bytes))

    def _share(self, piece_bytes: int) -> None:
        used = piece_bytes
        for file, size in enumerate(self.file_sizes):
            if not 0 < size < piece_bytes:
                continue
            if used + size > piece_bytes:
                self._shared.append([])
                used = 0
            self._shared[-1].append(Extent(file, 0, size))
            self._piece_of_small[file] = self._shared_from + len(self._shared) - 1
            used += size


def check_piece_bytes(piece_bytes: int) -> None:
    """Raises `CheckpointRefused` for an invalid length of pieces."""
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes.bit_count() != 1:
        raise CheckpointRefused(
            f"pieces of {piece_bytes:,} bytes: they are a power of two long, from {MIN_PIECE_BYTES:,} "
            f"to {MAX_PIECE_BYTES:,} bytes"
        )


def choose_piece_bytes(file_sizes: Sequence[int], previous: int = 0) -> int:
    """The usual length of pieces: 512 to 2,048 of them, 512 KiB to 64 MiB each, larger only where there would be too
    many. `previous` is the length in the version before; it is kept within a factor of four, as with another length no
    piece would be unchanged. Raises `CheckpointRefused` for too large a checkpoint."""
    total = sum(file_sizes)
    wanted = max(1, total // USUAL_PIECES, min(CHEAP, total // FEWER_PIECES))
    usual = min(max(_next_power_of_two(wanted), SMALLEST_USUAL), MAX_USUAL_BYTES)
    chosen = previous if previous and usual <= 4 * previous <= 16 * usual else usual
    while True:
        try:
            PieceLayout(file_sizes, chosen)
        except CheckpointRefused:
            if chosen >= MAX_PIECE_BYTES:
                raise
            chosen *= 2
        else:
            return chosen


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


PieceMap = int
"""Bit k is set when piece k is there."""


def full_map(count: int) -> PieceMap:
    return (1 << count) - 1


def map_of(pieces: Iterable[int]) -> PieceMap:
    numbers = list(pieces)
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for piece in numbers:
        bits[piece // 8] |= 1 << piece % 8
    return int.from_bytes(bits, "little")


def pieces_in(pieces: PieceMap) -> list[int]:
    """Numbers of the pieces in a map, in order; 2 ms for 65,536."""
    found: list[int] = []
    for start, bits in _words_in(pieces):
        found += compress(range(start, start + _WORD), bits)
    return found


def sum_of(pieces: PieceMap, sizes: Sequence[int]) -> int:
    """Sum of the sizes of the pieces in a map; 2 ms for 65,536."""
    return sum(sum(compress(sizes[start : start + _WORD], bits)) for start, bits in _words_in(pieces))


def _words_in(pieces: PieceMap) -> Iterator[tuple[int, bytes]]:
    """The parts of a map with pieces: number of the first, and a byte for each, 1 for a piece."""
    for start in range(0, pieces.bit_length(), _WORD):
        word = pieces >> start & _WORD_MASK
        if word:
            yield start, f"{word:b}"[::-1].encode().translate(_DIGITS)


def pack_map(pieces: PieceMap, count: int) -> bytes:
    """Encode a map: a bit a piece, lowest first, in whole bytes."""
    return pieces.to_bytes(-(-count // 8), "little")


def unpack_map(packed: bytes, count: int) -> PieceMap:
    """Decode `pack_map`. Raises `ProtocolError` for another number of pieces."""
    if len(packed) != -(-count // 8):
        raise ProtocolError(f"a map of {len(packed)} bytes for {count} pieces")
    pieces = int.from_bytes(packed, "little")
    if pieces >> count:
        raise ProtocolError(f"a map with pieces beyond the last of {count}")
    return pieces


def any_piece(pieces: PieceMap, count: int, rng: Random) -> int:
    """One of `pieces` (at least one): the first from a random place on. So a piece behind a gap is chosen more often,
    which does no harm; an even choice would have to look at each."""
    start = int(rng.random() * count)
    beyond = pieces >> start
    if beyond:
        return start + (beyond & -beyond).bit_length() - 1
    return (pieces & -pieces).bit_length() - 1


class Availability:
    """The number of copies of each piece among some peers. Each number of copies has a map, a level. A further copy
    moves a piece one level up; many pieces move in as many steps as there are levels. The rarest of some pieces are in
    the lowest level with any of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._levels = [full_map(count)]

    def add(self, pieces: PieceMap) -> None:
        """One more peer has these pieces."""
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
        """A peer with these pieces has gone. All of them must have been added."""
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
        bit = 1 << piece
        return next(number for number, level in enumerate(self._levels) if level & bit)

    def fewest(self) -> int:
        """Copies of the rarest piece; 0 without pieces."""
        return next((number for number, level in enumerate(self._levels) if level), 0)

    def with_fewest(self, pieces: PieceMap) -> PieceMap:
        """The rarest of these pieces, all of them."""
        for level in self._levels:
            found = level & pieces
            if found:
                return found
        return NO_PIECES


class MemoryLayout(NamedTuple):
    """Offsets of a version in memory, in bytes: its files, then the manifest."""

    files: tuple[int, ...]
    """The beginning of each file."""
    manifest: int
    total_bytes: int


def plan_memory(file_sizes: Sequence[int], manifest_bytes: int) -> MemoryLayout:
    """The layout of files of these sizes, in the manifest's order."""
    files, at = [], 0
    for size in file_sizes:
        files.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return MemoryLayout(tuple(files), at, at + manifest_bytes)
