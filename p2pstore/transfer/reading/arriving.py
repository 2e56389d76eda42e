"""The destination of a value that is read from other peers, and its chunks that have arrived. Pure.

One read may ask several holders, one after the other or side by side. Slot and trailer name the version, and the
trailer has the sums of all chunks, so verified chunks stay when another holder brings the rest. They are kept only
for the same version, length and sums, and while the destination gives the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from p2pstore.errors import NoSuchKey
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import CHUNK_BYTES, PART_BYTES, Announced, Version, chunk_count, chunk_sum
from p2pstore.runtime.flow import ASSUMED_RATE, PATIENCE, is_outrun
from p2pstore.transfer.failover import PullFailed, Unannounced
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.wire import Code

PART_CHUNKS: Final = PART_BYTES // CHUNK_BYTES
PARTS_AHEAD: Final = 4
"""A lone reader asks for the next parts when this number is left: the holder sends all that was asked for at once."""
ONLY_READER: Final = 0
"""The number of a reader that reads alone, and of the first one of several."""
AHEAD_CHUNKS: Final = 4
"""A reader among several asks for its next slice when this number of chunks is left. Earlier takes slices from faster
readers; later lets a path of 100 Gb/s and 0.3 ms run dry."""

FREE: Final = 0
UNDER_WAY: Final = 1
THERE: Final = 2
ASSUMED_CHUNK_SECONDS: Final = CHUNK_BYTES / ASSUMED_RATE
"""Of a reader that has brought no chunk yet."""
CHANGE_SECONDS: Final = 0.02
"""Cost of stopping a reader: its connection, and bytes in flight."""
MIN_WAIT_SECONDS: Final = 0.002
MAX_WAIT_SECONDS: Final = 1.0


class Destination(Protocol):
    """Where pulled bytes go."""

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """Exactly `slot.length` writable bytes. Called once slot and trailer are verified, before any payload byte
        moves, and again when another holder is tried, perhaps for another version. Same memory for the same version
        keeps its verified chunks. The bytes are undefined until the pull returned, and after it failed.

        Raises `NoSuchKey` for a version that is not wanted: the next holder is tried. `BufferTooSmall`,
        `CapacityExceeded` and all other errors end the read.
        """


def watch_of(destination: Destination) -> ReadWatch | None:
    """The watch that a destination carries, if it does."""
    watch: ReadWatch | None = getattr(destination, "watch", None)
    return watch


def check_announced(destination: Destination, version: Version) -> None:
    """Raise `Unannounced` for a version that the holder may not send. `destination.announced` says which it may: it is
    set while a peer is read that is not the reader's own."""
    announced: Announced | None = getattr(destination, "announced", None)
    if announced is not None and not announced.allows(version):
        raise Unannounced()


def checked_view(destination: Destination, slot: Slot, trailer: TrailerBody) -> memoryview:
    """The destination's view, for a read that begins anew. Raises what `prepare` raises, but `PullFailed` for a
    version that is not wanted or not `check_announced`, and `ValueError` when the destination does not keep to its
    contract."""
    check_announced(destination, slot.version)
    try:
        view = destination.prepare(slot, trailer)
    except NoSuchKey as error:
        raise PullFailed(Code.NO_SUCH_KEY, str(error)) from error
    if view.nbytes != slot.length or view.readonly:
        raise ValueError(f"the destination gave {view.nbytes:,} bytes for {slot.length:,}")
    return view


def unpack_sums(sums: bytes, length: int) -> tuple[int, ...]:
    """The chunk sums of a value of `length` bytes as numbers."""
    return tuple(memoryview(sums).cast("Q")[: chunk_count(length)])


def check_sum(payload_sum: int, expected: int, number: int) -> None:
    """Raise `PullFailed` (STALE) for a damaged chunk, by the sum of the received bytes."""
    if payload_sum != expected:
        raise PullFailed(
            Code.STALE, f"chunk {number} of the object arrived damaged; nothing was delivered"
        )


@dataclass(frozen=True)
class Sharing:
    """How chunks are handed out: alone, in parts of 64 MiB, or among several readers, which may be threads."""

    slice_chunks: int = PART_CHUNKS
    ahead_chunks: int = PARTS_AHEAD * PART_CHUNKS
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    clock: Callable[[], float] = lambda: 0.0


ALONE: Final = Sharing()


class Arriving:
    """A value on its way into `view`. A reader takes a chunk before it writes there, calls `verify` when it has
    arrived, and `leave` when it writes no more."""

    def __init__(
        self,
        slot: Slot,
        trailer: TrailerBody,
        view: memoryview,
        watch: ReadWatch | None = None,
        sharing: Sharing = ALONE,
    ) -> None:
        self.slot = slot
        self.trailer = trailer
        self.view = view
        self._sums: Sequence[int] = unpack_sums(trailer.sums, slot.length)
        self._slices = Slices(len(self._sums), sharing.slice_chunks)
        self._watch = watch
        self._there_bytes = 0
        self.sharing = sharing
        self.brought_bytes: Counter[int] = Counter()
        """By reader, since the value was begun or resumed."""

    def share(self, sharing: Sharing) -> None:
        """Change the sharing. No chunk may be under way."""
        self.sharing = sharing
        self._slices.share(sharing.slice_chunks)

    @property
    def is_watched(self) -> bool:
        """Whether a `ReadWatch` follows the read."""
        return self._watch is not None

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._slices.complete

    @property
    def left_chunks(self) -> int:
        """Number of chunks that have not arrived."""
        return self._slices.chunks - self._slices.there

    def is_of(self, slot: Slot, trailer: TrailerBody) -> bool:
        """Whether these describe the same bytes."""
        mine = self.slot
        return (mine.version, mine.length, self.trailer.sums) == (
            slot.version,
            slot.length,
            trailer.sums,
        )

    def chunk(self, number: int) -> memoryview:
        """The memory of this chunk."""
        return self.view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def next_free(self) -> range:
        """The chunks that `take` would give."""
        with self.sharing.lock:
            return self._slices.next_free()

    def take(self, reader: int = ONLY_READER) -> range:
        """Free chunks, given to this reader; none when nothing is free."""
        with self.sharing.lock:
            return self._slices.take(reader, self.sharing.clock())

    def claim(self, reader: int, first: int, count: int) -> range:
        """Give these chunks, as far as the value has them, to this reader. All must be free."""
        run = range(first, max(first, min(first + count, len(self._sums))))
        with self.sharing.lock:
            self._slices.claim(reader, run, self.sharing.clock())
        return run

    def verify(
        self,
        number: int,
        reader: int = ONLY_READER,
        chunk: memoryview | None = None,
        payload_sum: int | None = None,
    ) -> None:
        """Check a chunk that was written, by `payload_sum` if given; or copy it from `chunk`. Raises `PullFailed`
        (STALE) when it is damaged; it stays this reader's then."""
        watch = self._watch
        began = 0.0 if watch is None else watch.clock()
        place = self.chunk(number)
        if payload_sum is None:
            payload_sum = chunk_sum(place if chunk is None else chunk)
        check_sum(payload_sum, self._sums[number], number)
        seconds = 0.0 if watch is None else watch.clock() - began
        if chunk is not None:
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(chunk, np.uint8))
        with self.sharing.lock:
            self._slices.verified(reader, number, self.sharing.clock())
            self._there_bytes += len(place)
            self.brought_bytes[reader] += len(place)
            if watch is not None:
                watch.verified(seconds)
                watch.advanced(self._there_bytes, len(self.view))

    def leave(self, reader: int = ONLY_READER) -> None:
        """This reader writes no more; its open chunks are free."""
        with self.sharing.lock:
            self._slices.leave(reader, self.sharing.clock())

    def next_step(self, reader: int) -> Step:
        """See `Slices.next_step`. The caller holds the lock."""
        return self._slices.next_step(reader, self.sharing.clock())

    def is_overtaken(self, reader: int) -> bool:
        """See `Slices.is_overtaken`. The caller holds the lock."""
        return self._slices.is_overtaken(reader)


class ResumableDestination:
    """A destination for one read over several holders, with the chunks that have arrived.

    `error` is the destination's own. `when_begun` is called before the first bytes of a value arrive.
    """

    # Of the class until they change: every small read makes a destination.
    error: BaseException | None = None
    arriving: Arriving | None = None
    announced: Announced | None = None
    """The versions that the current holder may send; None while the reader's own peer is read."""
    when_begun: Callable[[Arriving], None] = staticmethod(lambda arriving: None)
    _sharing = ALONE

    def __init__(self, destination: Destination) -> None:
        self.watch = watch_of(destination)
        if (announced := getattr(destination, "announced", None)) is not None:
            self.announced = announced
        self._destination = destination

    def share(self, sharing: Sharing) -> None:
        """Change the sharing. No chunk may be under way."""
        self._sharing = sharing
        if self.arriving is not None:
            self.arriving.share(sharing)

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """Begin anew: no chunk counts as arrived."""
        self.arriving = None
        try:
            return self._destination.prepare(slot, trailer)
        except BaseException as error:
            self.error = error
            raise

    def resume(self, slot: Slot, trailer: TrailerBody) -> Arriving:
        """Go on where an earlier holder stopped, if it is the same value in the same memory. Raises as
        `checked_view`."""
        before = self.arriving
        view = checked_view(self, slot, trailer)
        if before is None or not before.is_of(slot, trailer) or not _is_same(before.view, view):
            before = Arriving(slot, trailer, view, self.watch, self._sharing)
        else:
            before.brought_bytes.clear()
        self.arriving = before
        return before

    def wanted_first(self) -> tuple[int, int]:
        """The chunks to ask a holder for before its version is known: the first, and their number."""
        if self.arriving is None:
            return 0, self._sharing.slice_chunks
        run = self.arriving.next_free()
        return run.start, len(run)


def resumable(destination: Destination) -> ResumableDestination:
    """The destination, with a memory."""
    if isinstance(destination, ResumableDestination):
        return destination
    return ResumableDestination(destination)


def resume(destination: Destination, slot: Slot, trailer: TrailerBody) -> Arriving:
    """See `ResumableDestination.resume`."""
    return resumable(destination).resume(slot, trailer)


def _is_same(one: memoryview, other: memoryview) -> bool:
    """Whether both are the same memory. The first still holds it, so it is not other memory at the same address."""
    return one.nbytes == other.nbytes and _address(one) == _address(other)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Step(NamedTuple):
    """The next action of a reader with nothing under way: one of these."""

    read: bool = False
    """Take free chunks."""
    overtake: int | None = None
    """Stop this reader, and look again."""
    wait_seconds: float = 0.0
    """Look again after a change, at the latest after this time."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do for this reader."""
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
        """Mean time of a chunk; None before the first one."""
        busy = self.busy_seconds + (self.heard_at - self.since if self.under_way else 0.0)
        return busy / self.brought if self.brought else None


class Slices:
    """The chunks of a value, handed out in runs of at most `slice_chunks`. `now` in seconds; a lone reader may omit it.

    A chunk is FREE, UNDER_WAY with one reader, or THERE: verified, and never touched again. So no reader writes where
    verified bytes are, and no two write to one place. A slow reader is stopped, and its chunks are free again."""

    def __init__(self, chunks: int, slice_chunks: int) -> None:
        self.chunks = chunks
        self.slice_chunks = slice_chunks
        self.there = 0
        self._states = bytearray(chunks)
        self._readers: dict[int, _Reader] = {}

    def share(self, slice_chunks: int) -> None:
        """Forget the readers, and use this run length. Raises `ValueError` while chunks are under way."""
        if UNDER_WAY in self._states:
            raise ValueError("chunks are under way")
        self.slice_chunks = slice_chunks
        self._readers.clear()

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.there == self.chunks

    def next_free(self) -> range:
        """The first run of free chunks; empty when there is none."""
        first = self._states.find(FREE)
        if first < 0:
            return range(0)
        last = first + 1
        end = min(self.chunks, first + self.slice_chunks)
        while last < end and self._states[last] == FREE:
            last += 1
        return range(first, last)

    def take(self, reader: int, now: float = 0.0) -> range:
        """`next_free`, given to this reader; empty for an overtaken one."""
        if self.is_overtaken(reader):
            return range(0)
        run = self.next_free()
        self.claim(reader, run, now)
        return run

    def claim(self, reader: int, run: range, now: float = 0.0) -> None:
        """Give these chunks to this reader. Raises `ValueError` when one of them is not free."""
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
        """A chunk of this reader has arrived. Raises `KeyError` for one that is not its own."""
        its = self._readers[reader]
        its.under_way.remove(number)
        its.brought += 1
        its.heard_at = now
        if not its.under_way:
            its.busy_seconds += now - its.since
        self._states[number] = THERE
        self.there += 1

    def leave(self, reader: int, now: float = 0.0) -> None:
        """This reader writes no more; its chunks under way are free."""
        its = self._readers.get(reader)
        if its is None or not its.under_way:
            return
        its.busy_seconds += now - its.since
        for number in its.under_way:
            self._states[number] = FREE
        its.under_way.clear()

    # --- several readers ---------------------------------------------------------------------

    def is_overtaken(self, reader: int) -> bool:
        """Whether this reader was stopped for a faster one: it gets no more chunks."""
        its = self._readers.get(reader)
        return its is not None and its.overtaken

    def next_step(self, reader: int, now: float) -> Step:
        """The next action of a reader with nothing under way. It overtakes a reader that needs far longer for its rest
        than itself."""
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
