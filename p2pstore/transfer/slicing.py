"""Which chunks of one value are there, and who brings the others. Pure.

A chunk is FREE, UNDER_WAY with just one reader, or THERE: verified, and never touched again. So whatever happens to
readers, nobody writes where verified bytes are, and two never write to the same place.
"""

from __future__ import annotations

from typing import Final

FREE: Final = 0
UNDER_WAY: Final = 1
THERE: Final = 2


class Slices:
    """The chunks of a value, handed out in runs of at most `slice_chunks`."""

    def __init__(self, chunks: int, slice_chunks: int) -> None:
        self.chunks = chunks
        self.slice_chunks = slice_chunks
        self.there = 0
        self._states = bytearray(chunks)
        self._under_way: dict[int, set[int]] = {}

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.there == self.chunks

    def next_free(self) -> range:
        """The first chunks that nobody brings; empty when there are none."""
        first = self._states.find(FREE)
        if first < 0:
            return range(0)
        last = first + 1
        end = min(self.chunks, first + self.slice_chunks)
        while last < end and self._states[last] == FREE:
            last += 1
        return range(first, last)

    def take(self, reader: int) -> range:
        """`next_free`, for this reader to bring."""
        run = self.next_free()
        self.claim(reader, run)
        return run

    def claim(self, reader: int, run: range) -> None:
        """These chunks are this reader's to bring. Raises `ValueError` when one of them is not free."""
        if any(self._states[run.start : run.stop]):
            raise ValueError(f"chunks {run.start} to {run.stop - 1} are not all free")
        if run:
            self._under_way.setdefault(reader, set()).update(run)
            self._states[run.start : run.stop] = bytes([UNDER_WAY]) * len(run)

    def verified(self, reader: int, number: int) -> None:
        """A chunk that this reader brings is there. Raises `KeyError` for one that is not its own."""
        self._under_way[reader].remove(number)
        self._states[number] = THERE
        self.there += 1

    def leave(self, reader: int) -> None:
        """This reader brings nothing more, and nothing writes for it any more: what it had under way is free."""
        for number in self._under_way.pop(reader, ()):
            self._states[number] = FREE
