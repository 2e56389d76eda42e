"""Which chunks of one value are there, who brings the others, and whom not to wait for any longer. Pure.

A chunk is FREE, UNDER_WAY with just one reader, or THERE: verified, and never touched again. So whatever happens to
readers, nobody writes where verified bytes are, and two never write to the same place. That is why a slow reader's
chunks are not brought twice: it is stopped, and what it leaves is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from p2pstore.objects import CHUNK_BYTES
from p2pstore.runtime.flow import ASSUMED_RATE, PATIENCE, is_outrun

FREE: Final = 0
UNDER_WAY: Final = 1
THERE: Final = 2

ASSUMED_CHUNK_SECONDS: Final = CHUNK_BYTES / ASSUMED_RATE
"""For a chunk, of a reader that brought none yet."""
CHANGE_SECONDS: Final = 0.02
"""What it costs to stop a reader: its connection, and what was on its way."""
MIN_WAIT_SECONDS: Final = 0.002
MAX_WAIT_SECONDS: Final = 1.0


class Step(NamedTuple):
    """What a reader with nothing under way does next: just one of these."""

    read: bool = False
    """Take some chunks: there are free ones."""
    overtake: int | None = None
    """Stop this reader, and look again."""
    wait_seconds: float = 0.0
    """Look again after a change, or so long."""

    @property
    def done(self) -> bool:
        """There is nothing left to do, or not for this reader."""
        return self == Step()


@dataclass(slots=True)
class _Reader:
    """`heard_at` is when its last chunk came, or it began to wait for one. Its time counts while chunks are under
    way: that before `since`, when its last ones were taken with none before them, is in `busy_seconds`."""

    under_way: set[int] = field(default_factory=set)
    brought: int = 0
    busy_seconds: float = 0.0
    since: float = 0.0
    heard_at: float = 0.0
    overtaken: bool = False

    def chunk_seconds(self) -> float | None:
        """What a chunk takes with it, on the whole; None when it has brought none."""
        busy = self.busy_seconds + (self.heard_at - self.since if self.under_way else 0.0)
        return busy / self.brought if self.brought else None


class Slices:
    """The chunks of a value, handed out in runs of at most `slice_chunks`. `now` in seconds; who reads alone may
    leave it out."""

    def __init__(self, chunks: int, slice_chunks: int) -> None:
        self.chunks = chunks
        self.slice_chunks = slice_chunks
        self.there = 0
        self._states = bytearray(chunks)
        self._readers: dict[int, _Reader] = {}

    def share(self, slice_chunks: int) -> None:
        """Go on with other readers, of which nothing is known. Raises `ValueError` while chunks are under way."""
        if UNDER_WAY in self._states:
            raise ValueError("chunks are under way")
        self.slice_chunks = slice_chunks
        self._readers.clear()

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

    def take(self, reader: int, now: float = 0.0) -> range:
        """`next_free`, for this reader to bring; empty as well for one that was overtaken."""
        if self.is_overtaken(reader):
            return range(0)
        run = self.next_free()
        self.claim(reader, run, now)
        return run

    def claim(self, reader: int, run: range, now: float = 0.0) -> None:
        """These chunks are this reader's to bring. Raises `ValueError` when one of them is not free."""
        if any(self._states[run.start : run.stop]):
            raise ValueError(f"chunks {run.start} to {run.stop - 1} are not all free")
        if not run:
            return
        its = self._readers.setdefault(reader, _Reader())
        if not its.under_way:
            its.since = its.heard_at = now
        its.under_way.update(run)
        self._states[run.start : run.stop] = bytes([UNDER_WAY]) * len(run)

    def verified(self, reader: int, number: int, now: float = 0.0) -> None:
        """A chunk that this reader brings is there. Raises `KeyError` for one that is not its own."""
        its = self._readers[reader]
        its.under_way.remove(number)
        its.brought += 1
        its.heard_at = now
        if not its.under_way:
            its.busy_seconds += now - its.since
        self._states[number] = THERE
        self.there += 1

    def leave(self, reader: int, now: float = 0.0) -> None:
        """This reader brings nothing more for now, and nothing writes for it any more: what it had under way is
        free."""
        its = self._readers.get(reader)
        if its is None or not its.under_way:
            return
        its.busy_seconds += now - its.since
        for number in its.under_way:
            self._states[number] = FREE
        its.under_way.clear()

    # --- several readers ---------------------------------------------------------------------

    def is_overtaken(self, reader: int) -> bool:
        """Whether others bring what this reader was to bring: it gets nothing more."""
        its = self._readers.get(reader)
        return its is not None and its.overtaken

    def next_step(self, reader: int, now: float) -> Step:
        """What a reader that has nothing under way does. One that must be waited for, and will need far longer for
        the rest than this one would, is overtaken."""
        if self.complete or self.is_overtaken(reader):
            return Step()
        if self.next_free():
            return Step(read=True)
        mine = self._readers.get(reader)
        pace = mine.chunk_seconds() if mine is not None else None
        if pace is None:
            pace = ASSUMED_CHUNK_SECONDS
        wait_seconds = MAX_WAIT_SECONDS
        for number, other in self._readers.items():
            if number == reader or other.overtaken or not other.under_way:
                continue
            left = len(other.under_way)
            instead_seconds = left * pace + CHANGE_SECONDS
            its_pace = max(other.chunk_seconds() or 0.0, now - other.heard_at)
            if is_outrun(left * its_pace, instead_seconds):
                other.overtaken = True
                return Step(overtake=number)
            heard_by = other.heard_at + PATIENCE * instead_seconds / left
            wait_seconds = min(wait_seconds, heard_by - now)
        return Step(wait_seconds=max(wait_seconds, MIN_WAIT_SECONDS))
