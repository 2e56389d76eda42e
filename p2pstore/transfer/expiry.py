"""When objects' times to live and pins end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from p2pstore.transfer.entries import ObjectEntry


class ExpiryTimers:
    """A heap of times at which to look at an entry again. Times of entries that are gone stay in it
    until they come up, or until they outnumber the others."""

    def __init__(self, live: Mapping[bytes, ObjectEntry]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, ObjectEntry]] = []
        self._numbers = count()  # so that equal times never compare entries

    def set(self, entry: ObjectEntry) -> None:
        """Look at the entry when its time to live ends, and when its pin does."""
        if len(self._heap) <= 4 * len(self._live) + 1024:
            for timer in self._timers_of(entry):
                heappush(self._heap, timer)
        else:
            live = self._live.values()
            self._heap = [timer for entry in live for timer in self._timers_of(entry)]
            heapify(self._heap)

    def due(self, now: float) -> Iterator[ObjectEntry]:
        """Entries whose time has come, among them some that are gone or have a later time now."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)

    def _timers_of(self, entry: ObjectEntry) -> list[tuple[float, int, ObjectEntry]]:
        times = (entry.expires_unix_ms / 1000, entry.pin_until)
        return [(time, next(self._numbers), entry) for time in times if time]
