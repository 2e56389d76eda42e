"""Where a value goes that is read from other peers, and how much of it is there.

One read may ask several holders, one after the other or side by side. Slot and trailer name the version, and the
trailer has the sums of all chunks: so chunks that were verified stay, whoever brings the others. They are kept only
for the same version, length and sums, and when the destination gives the same memory for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from p2pstore.errors import BufferTooSmall, NoSuchKey
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import (
    CHUNK_BYTES,
    PART_BYTES,
    ZERO_VERSION,
    Version,
    chunk_count,
    chunk_sum,
    format_bytes,
)
from p2pstore.runtime.flow import ASSUMED_RATE, PATIENCE, is_outrun
from p2pstore.transfer.failover import PullFailed, Unannounced
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.wire import Code

PART_CHUNKS: Final = PART_BYTES // CHUNK_BYTES
PARTS_AHEAD: Final = 4
"""Who reads alone asks for the next parts when so many are left: the holder sends all that it was asked for at once."""
ONLY_READER: Final = 0
"""The number of a reader that reads alone, and of the first one of several."""
AHEAD_CHUNKS: Final = 4
"""A reader among several asks for its next slice when so few are left of one: earlier would take it from others,
later let a path of 100 Gb/s and 0.3 ms run dry."""

FREE: Final = 0
UNDER_WAY: Final = 1
THERE: Final = 2
ASSUMED_CHUNK_SECONDS: Final = CHUNK_BYTES / ASSUMED_RATE
"""For a chunk, of a reader that brought none yet."""
CHANGE_SECONDS: Final = 0.02
"""What it costs to stop a reader: its connection, and what was on its way."""
MIN_WAIT_SECONDS: Final = 0.002
MAX_WAIT_SECONDS: Final = 1.0


class Announced(NamedTuple):
    """What a holder may send of an object: the version that was announced, with the root that its writer vouches for;
    or a newer one that the holder wrote itself. `writer` is the holder's hash, as versions carry it."""

    writer: int
    version: Version = ZERO_VERSION

    def allows(self, version: Version) -> bool:
        """Whether this is one of them."""
        return version == self.version or (
            version.writer == self.writer and version.covers(self.version)
        )


class Destination(Protocol):
    """Where pulled bytes go."""

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """Exactly `slot.length` writable bytes. Asked once slot and trailer are verified, before any
        payload byte moves; asked again when another holder is tried after a failure, perhaps for another
        version. Who gives the same memory again for the same version gives it with what was written there
        meanwhile: chunks that were verified are not read again. What the view holds is undefined until the
        pull returned, and after it failed.

        Raises `NoSuchKey` for a version that is not wanted: the next holder is tried. `BufferTooSmall`,
        `CapacityExceeded` and all other errors end the read.
        """
        ...


class BufferDestination:
    """A caller's writable buffer: the value goes to its beginning.

    `watch` is told how the read goes. Raises `ValueError` for a buffer that is read-only or not
    contiguous.
    """

    def __init__(self, buffer: bytearray | memoryview, watch: ReadWatch | None = None) -> None:
        self.watch = watch
        self.announced: Announced | None = None
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise ValueError("the buffer must be writable and contiguous")
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B") if view.nbytes else memoryview(bytearray())
        self._view = view

    def take_in(self, value: memoryview) -> bool:
        """Copy a whole value, verified, to the beginning of the buffer; whether it fits, and nobody watches."""
        length = len(value)
        if self.watch is not None or length > len(self._view):
            return False
        self._view[:length] = value
        return True

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        if slot.length > len(self._view):
            raise too_small(slot.length, self._view)
        return self._view[: slot.length]


def too_small(length: int, room: memoryview) -> BufferTooSmall:
    """The error of a read into a buffer that has less room than the object needs."""
    return BufferTooSmall(
        f"the object has {length:,} bytes ({format_bytes(length)}); the buffer has room for "
        f"{len(room):,}: give one of that length, or use get()",
        length,
    )


def watch_of(destination: Destination) -> ReadWatch | None:
    """The watch that a destination carries, if it does."""
    watch: ReadWatch | None = getattr(destination, "watch", None)
    return watch


def announcing(destination: Destination, announced: Announced | None) -> Destination:
    """The destination, for one read from a holder that may send this. One that can be given nothing is wrapped."""
    if not isinstance(destination, BufferDestination):
        destination = resumable(destination)
    destination.announced = announced
    return destination


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


def verify_chunk(chunk: memoryview, expected: int, number: int, watch: ReadWatch | None) -> None:
    """Raise `PullFailed` (STALE) unless the chunk is what it must be."""
    began = 0.0 if watch is None else watch.clock()
    check_sum(chunk_sum(chunk), expected, number)
    if watch is not None:
        watch.verified(watch.clock() - began)


def check_sum(payload_sum: int, expected: int, number: int) -> None:
    """`verify_chunk`, by the sum of what came."""
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
    """A value on its way into `view`: which of its chunks are there, and who brings the others.

    Who writes to a chunk has taken it before, says `verify` when it is there, and `leave` when it writes nothing more.
    """

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
        """By reader, since this value was begun or gone on with."""

    def share(self, sharing: Sharing) -> None:
        """Go on like this. Nobody may have anything under way."""
        self.sharing = sharing
        self._slices.share(sharing.slice_chunks)

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks on."""
        return self._watch is not None

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._slices.complete

    @property
    def left_chunks(self) -> int:
        """How many are not there yet."""
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
        """Where this chunk goes."""
        return self.view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def next_free(self) -> range:
        """What `take` would give."""
        with self.sharing.lock:
            return self._slices.next_free()

    def take(self, reader: int = ONLY_READER) -> range:
        """Chunks for this reader to bring; none when nothing is free."""
        with self.sharing.lock:
            return self._slices.take(reader, self.sharing.clock())

    def claim(self, reader: int, first: int, count: int) -> range:
        """Those of these chunks that the value has, for this reader to bring: all of them must be free."""
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
        """A chunk has been written, and has this sum if one is given; or it is in `chunk` and copied from there. Raises
        `PullFailed` (STALE) unless it is what it must be; then it stays this reader's."""
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
        """Nothing writes for this reader any more; others may bring what it did not."""
        with self.sharing.lock:
            self._slices.leave(reader, self.sharing.clock())

    def next_step(self, reader: int) -> Step:
        """See `Slices.next_step`. For who has the lock."""
        return self._slices.next_step(reader, self.sharing.clock())

    def is_overtaken(self, reader: int) -> bool:
        """Whether others bring what this reader was to bring. For who has the lock."""
        return self._slices.is_overtaken(reader)


class ResumableDestination:
    """A destination for one read over several holders: remembers what is there already.

    `error` is what the destination itself raised. `when_begun` is called when the first bytes of a value
    are about to come, which is known by then.
    """

    # Of the class until they change: every small read makes a destination.
    error: BaseException | None = None
    arriving: Arriving | None = None
    announced: Announced | None = None
    """What the holder that is asked now may send; None while the reader's own peer is read."""
    when_begun: Callable[[Arriving], None] = staticmethod(lambda arriving: None)
    _sharing = ALONE

    def __init__(self, destination: Destination) -> None:
        self.watch = watch_of(destination)
        if (announced := getattr(destination, "announced", None)) is not None:
            self.announced = announced
        self._destination = destination

    def share(self, sharing: Sharing) -> None:
        """Have chunks handed out like this. Nobody may have anything under way."""
        self._sharing = sharing
        if self.arriving is not None:
            self.arriving.share(sharing)

    def prepare(self, slot: Slot, trailer: TrailerBody) -> memoryview:
        """For who begins anew: nothing counts as being there."""
        self.arriving = None
        try:
            return self._destination.prepare(slot, trailer)
        except BaseException as error:
            self.error = error
            raise

    def resume(self, slot: Slot, trailer: TrailerBody) -> Arriving:
        """For who goes on where others stopped, as far as it is the same value in the same memory. Raises like
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
        """The chunks to ask a holder for when nobody knows yet what it has: the first, and how many."""
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
    """The value as far as it is there, for a transport that goes on where others stopped. Raises like
    `checked_view`."""
    return resumable(destination).resume(slot, trailer)


def _is_same(one: memoryview, other: memoryview) -> bool:
    """Whether both are the same memory. The first still holds it, so it is not other memory at the same address."""
    return one.nbytes == other.nbytes and _address(one) == _address(other)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


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
