"""Zero-copy views, and the leases that keep what they show in place."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Final

import numpy as np

from p2pstore.memory.hazards import HazardPage
from p2pstore.objects import Announced, Version
from p2pstore.transfer.reading.segment_reader import Sighting

KEEP_COUNT: Final = 256
KEEP_SECONDS: Final = 0.05
"""Time for which a lease without views is kept: to be given back with others, or used again."""

Array = np.ndarray[Any, Any]


class _Whole(weakref.ref[Array]):
    """Of the array under all views of a lease. When that is collected, this goes to the leases that ended, without
    a line of Python that a signal could interrupt."""

    number: int | None = None
    """None for one whose making was interrupted."""


@dataclass(slots=True)
class _Lease:
    """One lease. `whole` is the array under all of its views, while there are any. `number` is the peer's, or
    below 0 for a lease that it was not asked for."""

    number: int
    digest: bytes
    memory: memoryview
    offset: int
    length: int
    version: Version
    whole: _Whole | None = None
    sighting: Sighting | None = None


class LeaseBook:
    """The leases of one client: live ones, and those whose last view is gone.

    A lease ends when the last view derived from it is collected: Python counts references, so that
    is at once, in whichever thread let go last, possibly inside the garbage collector. Nothing
    happens there but one append to a deque; the next call does the rest.

    Another view of an object under a lease, or under one that ended a moment ago and was not given
    back yet, needs no request: while the slot says that it is still that version, it is shared. Neither does the first
    one, with a page of `hazards`, while all leases keep at most `max_bytes`.
    """

    def __init__(self, hazards: HazardPage | None = None, max_bytes: int = 0) -> None:
        self._hazards = hazards
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._numbers = count(1)
        self._cells: dict[int, int] = {}
        """Where the page of hazards says what is looked at, by numbers of leases, which are never used again."""
        self._lock = threading.Lock()  # never taken by finalizers
        self._leases: dict[int, _Lease] = {}
        self._by_digest: dict[bytes, _Lease] = {}
        self._unused: deque[int] = deque()
        self._ended: deque[int | _Whole] = deque()
        self._kept: dict[int, float] = {}

    def view(
        self, number: int, digest: bytes, memory: memoryview, slot: tuple[int, int, Version]
    ) -> memoryview:
        """A read-only view under a new lease. `slot` is (offset, length, version) in `memory`."""
        offset, length, version = slot
        lease = _Lease(number, digest, memory, offset, length, version)
        with self._lock:
            self._add(lease)
            return self._view_of(lease)

    def take(self, digest: bytes, seen: Sighting, memory: memoryview) -> memoryview | None:
        """A read-only view of what was seen, under a lease that needs no request. None when it does not stand any more,
        or the peer is to be asked: it has given no page for that, that is full, or this client holds too much."""
        slot, number = seen.slot, -next(self._numbers)
        with self._lock:
            self._keep_ended()
            hazards = self._hazards
            if hazards is None or not self._may_hold(slot.length):
                return None
            try:
                cell = hazards.write(seen.number)
                if cell is None:
                    return None
                if not seen.still_stands(memory):
                    hazards.undo()
                    return None
                self._cells[number] = cell
                hazards.keep(cell)
                lease = _Lease(number, digest, memory, slot.offset, slot.length, slot.version)
                lease.sighting = seen
                self._add(lease)
                return self._view_of(lease)
            except BaseException:  # interrupted
                self.forsake(number)
                hazards.undo()
                raise

    def _may_hold(self, more_bytes: int) -> bool:
        if self._held_bytes + more_bytes > self._max_bytes:
            # An interrupt may have come between what is held and its sum.
            self._held_bytes = sum(lease.length for lease in self._leases.values())
        return self._held_bytes + more_bytes <= self._max_bytes

    def _add(self, lease: _Lease) -> None:
        self._leases[lease.number] = self._by_digest[lease.digest] = lease
        self._held_bytes += lease.length

    def share(self, digest: bytes, sighting: Sighting) -> memoryview | None:
        """One more view under a lease that is there already, if it covers what was seen."""
        slot = sighting.slot
        with self._lock:
            lease = self._by_digest.get(digest)
            if lease is None or lease.version != slot.version or lease.offset != slot.offset:
                return None
            lease.sighting = sighting
            return self._share(lease)

    def share_again(self, digest: bytes, announced: Announced | None) -> memoryview | None:
        """`share`, if what was seen then still stands, and is what was `announced`, if that matters."""
        with self._lock:
            lease = self._by_digest.get(digest)
            if lease is None or lease.sighting is None:
                return None
            if announced is not None and not announced.allows(lease.version):
                return None
            return self._share(lease) if lease.sighting.still_stands(lease.memory) else None

    def _share(self, lease: _Lease) -> memoryview | None:
        whole = lease.whole() if lease.whole is not None else None
        if whole is not None:
            return memoryview(whole)  # type: ignore[arg-type] # an array is a buffer
        self._keep_ended()
        if lease.number not in self._kept:
            return None
        view = self._view_of(lease)
        self._kept.pop(lease.number, None)
        return view

    def _view_of(self, lease: _Lease) -> memoryview:
        if lease.length:
            whole = np.frombuffer(lease.memory, np.uint8, lease.length, lease.offset)
        else:
            whole = np.empty(0, np.uint8)
        whole.flags.writeable = False
        ends = _Whole(whole, self._ended.append)
        ends.number, lease.whole = lease.number, ends
        return memoryview(whole)  # type: ignore[arg-type] # an array is a buffer

    def forget(self) -> None:
        """The session has ended, and all leases with it: only views keep what they show. Waits for no lock, which a
        forked child may have inherited locked: then the garbage collector does it."""
        if self._lock.acquire(blocking=False):
            try:
                for some in (self._leases, self._by_digest, self._kept):
                    some.clear()
                self._hazards = None
            finally:
                self._lock.release()

    def covers(self, digest: bytes) -> bool:
        """Whether some lease, live or not given back yet, is of this object."""
        return digest in self._by_digest

    def end_unasked(self) -> None:
        """End at once those leases that were not asked for and have no view any more, which the next call would."""
        with self._lock:
            self._keep_ended()

    def sighting(self, digest: bytes) -> Sighting | None:
        """The slot that was seen when a view of this object was last shared, or taken without a request."""
        lease = self._by_digest.get(digest)
        return None if lease is None else lease.sighting

    def give_back(self, number: int) -> None:
        """End a lease of which no view was made, and none will be. The next request tells it: otherwise a loop of
        copies would keep all objects of the last 50 ms in the peer's memory."""
        self._unused.append(number)

    def forsake(self, number: int) -> None:
        """End a lease of which a view was to be made, when that was interrupted at any moment: the last view ends it,
        if there was one."""
        lease = self._leases.get(number)
        if lease is None or lease.whole is None:
            self._ended.append(number)

    def take_ended(self, numbers: list[int], *, everything: bool) -> list[int]:
        """Move leases to give back to `numbers`, and return it: unused ones, and those that ended 50 ms ago, or all
        that ended; after an interrupt some are there twice. Those that were not asked for end here.

        A loop of views gives its leases back in batches.
        """
        if not self._unused and not self._ended and not self._kept:
            return numbers
        with self._lock:
            while self._unused:
                numbers.append(self._unused[0])
                self._unused.popleft()
            self._keep_ended()
            if not self._kept:  # another thread has shared or given back what there was
                return numbers
            now = time.monotonic()
            oldest = next(iter(self._kept.values()))
            if not everything and len(self._kept) < KEEP_COUNT and now - oldest < 2 * KEEP_SECONDS:
                return numbers
            until = math.inf if everything else now - KEEP_SECONDS
            due = list(takewhile(lambda number: self._kept[number] <= until, self._kept))
            for number in due:
                self._end(number)
                numbers.append(number)
                del self._kept[number]
            return numbers

    def _end(self, number: int) -> None:
        """May be interrupted, and repeated before its cell is used again."""
        cell = self._cells.get(number)
        if cell is not None:
            if self._hazards is not None:
                self._hazards.clear(cell)
            del self._cells[number]
        lease = self._leases.get(number)
        if lease is not None:
            if self._by_digest.get(lease.digest) is lease:
                del self._by_digest[lease.digest]
            self._held_bytes -= lease.length
            del self._leases[number]

    def _keep_ended(self) -> None:
        now = time.monotonic()
        while self._ended:
            ended = self._ended[0]
            number = ended if isinstance(ended, int) else ended.number
            if number is not None and number < 0:
                self._end(number)  # to take another one costs no more than to keep it
            elif number is not None:
                self._kept[number] = now
            self._ended.popleft()  # only now: it may be interrupted before

    @property
    def outstanding(self) -> bool:
        """Whether a lease is live, or was not given back."""
        return bool(self._leases or self.keeps)

    @property
    def keeps(self) -> bool:
        """Whether giving back what ended would make room now."""
        return bool(self._unused or self._ended or self._kept)
