"""When objects' times to live and pins end. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from p2pstore.memory.entries import ObjectEntry


class ExpiryTimers:
    """The next time of each entry that has one, as a binary heap in which each entry knows its place (`timer`): so an
    entry that goes takes its time with it, and nothing is left to be cleared away, all at once, later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, ObjectEntry]] = []

    def set(self, entry: ObjectEntry) -> None:
        """Look at the entry when its time to live ends, and when its pin does."""
        self.drop(entry)
        times = [time for time in (entry.expires_unix_ms / 1000, entry.pin_until) if time]
        if times:
            self._heap.append((min(times), entry))
            self._rise(len(self._heap) - 1)

    def drop(self, entry: ObjectEntry) -> None:
        """The entry is gone, or has no times any more."""
        place = entry.timer
        if place is None:
            return
        entry.timer = None
        last = self._heap.pop()
        if last[1] is not entry:
            self._heap[place] = last
            self._sink(place)
            self._rise(last[1].timer or 0)

    def due(self, now: float) -> Iterator[ObjectEntry]:
        """Entries whose time has come, whose timers are over with that."""
        while self.any_due(now):
            entry = self._heap[0][1]
            self.drop(entry)
            yield entry

    def any_due(self, now: float) -> bool:
        """Whether `due` would give an entry."""
        return bool(self._heap) and self._heap[0][0] <= now

    def __len__(self) -> int:
        return len(self._heap)

    def _rise(self, place: int) -> None:
        heap = self._heap
        timer = heap[place]
        while place and timer[0] < heap[parent := (place - 1) // 2][0]:
            heap[place] = heap[parent]
            heap[place][1].timer = place
            place = parent
        heap[place] = timer
        timer[1].timer = place

    def _sink(self, place: int) -> None:
        heap = self._heap
        timer = heap[place]
        while (child := 2 * place + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1][0] < heap[child][0]:
                child += 1
            if timer[0] <= heap[child][0]:
                break
            heap[place] = heap[child]
            heap[place][1].timer = place
            place = child
        heap[place] = timer
        timer[1].timer = place
