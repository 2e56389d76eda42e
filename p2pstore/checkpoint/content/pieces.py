"""How files are cut into pieces, the unit of what is hashed, asked for and verified. Pure.

Large files (at least one piece long) begin with a piece of their own, and their last piece ends with them. All
smaller ones share pieces: each goes whole into the last piece that small files have, or begins the next. So

- a file that grows or shrinks changes no piece of another large file: a checkpoint that differs a little from the
  one before has the same pieces, by hash, wherever bytes kept their place within their file;
- a piece is one range of one file (or some whole small files), so a rank that wants ranges of some files asks for
  few pieces that it does not want;
- a hundred thousand tiny tensors are not a hundred thousand pieces.

Pieces run over the concatenation of files in many other systems: there the first file that grows
moves every byte behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

from p2pstore.checkpoint.content.piece_map import PieceMap, full_map, sum_of
from p2pstore.errors import CheckpointRefused

MIN_PIECE_BYTES: Final = 16 * 1024
MAX_PIECE_BYTES: Final = 256 * 1024 * 1024
"""What a publisher may choose; both are powers of two."""
SMALLEST_USUAL: Final = 512 * 1024
LARGEST_USUAL: Final = 64 * 1024 * 1024
USUAL_PIECES: Final = 2048
"""With so many, the start and the end of a broadcast, when not everybody has something to send, cost 1 % of it."""
FEWER_PIECES: Final = 512
"""They cost 2 or 3 % then; where `USUAL_PIECES` would be smaller than `CHEAP`, so many are usual: deciding and messages
cost a piece of any length as much, 16 % of a core for 1 GB/s in pieces of 512 KiB."""
CHEAP: Final = 4 * 1024 * 1024
MAX_PIECES: Final = 65_536
MAX_FILE_BYTES: Final = 1 << 44
MAX_TOTAL_BYTES: Final = 1 << 44


class Extent(NamedTuple):
    """A range of one file, which is given by its number in the manifest."""

    file: int
    offset: int
    length: int


class PieceLayout:
    """Which piece has which bytes of which file."""

    def __init__(self, file_sizes: Sequence[int], piece_bytes: int) -> None:
        """Raises `CheckpointRefused` when a size is not allowed, or there would be too many pieces."""
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
        """How many pieces there are; 0 when all files are empty."""
        return self._shared_from + len(self._shared)

    def is_shared(self, piece: int) -> bool:
        """Whether it has whole small files, not a range of a large one."""
        return piece >= self._shared_from

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of all pieces, in bytes; each between 1 and `piece_bytes`."""
        large = [
            min(self.piece_bytes, self.file_sizes[file] - offset)
            for file in self._large
            for offset in range(0, self.file_sizes[file], self.piece_bytes)
        ]
        shared = [sum(extent.length for extent in extents) for extents in self._shared]
        return (*large, *shared)

    def size(self, piece: int) -> int:
        """In bytes; between 1 and `piece_bytes`."""
        return self.sizes[piece]

    def size_of(self, pieces: PieceMap) -> int:
        """Of these pieces together, in bytes."""
        if pieces == full_map(self.count):
            return self.total_bytes
        return sum_of(pieces, self.sizes)

    def extents(self, piece: int) -> list[Extent]:
        """Where the piece's bytes are, in their order."""
        if not 0 <= piece < self.count:
            raise IndexError(f"piece {piece} of {self.count}")
        if piece >= self._shared_from:
            return self._shared[piece - self._shared_from]
        number = bisect_right(self._first_pieces, piece) - 1
        file = self._large[number]
        offset = (piece - self._first_pieces[number]) * self.piece_bytes
        return [Extent(file, offset, min(self.piece_bytes, self.file_sizes[file] - offset))]

    def pieces_of(self, file: int, start: int = 0, stop: int | None = None) -> range:
        """The pieces that have bytes `start` to `stop` (default: the end) of a file."""
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
    """Raises `CheckpointRefused` for a length that pieces cannot have."""
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes.bit_count() != 1:
        raise CheckpointRefused(
            f"pieces of {piece_bytes:,} bytes: they are a power of two long, from {MIN_PIECE_BYTES:,} "
            f"to {MAX_PIECE_BYTES:,} bytes"
        )


def choose_piece_bytes(file_sizes: Sequence[int], previous: int = 0) -> int:
    """The usual length of pieces: 512 to 2,048 of them, 512 KiB to 64 MiB each, larger only where there would be too
    many. `previous` is that of the version before, which is kept as long as it is within a factor of four: with
    another one, no piece would be the same. Raises `CheckpointRefused` for what is too large."""
    total = sum(file_sizes)
    wanted = max(1, total // USUAL_PIECES, min(CHEAP, total // FEWER_PIECES))
    usual = min(max(_next_power_of_two(wanted), SMALLEST_USUAL), LARGEST_USUAL)
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
