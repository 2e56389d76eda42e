"""What is passed on with the next messages, each a bounded number of times, least often sent first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name")


class Rumors(Generic[Name]):
    """Names by how often they were sent. Taking some costs no more than their number, however many there
    are."""

    def __init__(self) -> None:
        self._sent: dict[Name, int] = {}
        self._levels: list[dict[Name, None]] = []
        """By how often they were sent; within that, the oldest first."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, name: Name) -> None:
        """Begin with a rumour, or begin it anew."""
        self.discard(name)
        self._put(name, 0)

    def discard(self, name: Name) -> None:
        """End a rumour; nothing happens when there is none."""
        level = self._sent.pop(name, None)
        if level is not None:
            del self._levels[level][name]
            if not self._sent:
                self.clear()  # a dictionary that was large once stays so

    def clear(self) -> None:
        """End all of them."""
        self._sent.clear()
        self._levels.clear()

    def least_sent(self) -> Iterator[Name]:
        """All of them, those first that were sent least. Call nothing else before it is closed."""
        for level in self._levels:
            yield from level

    def sent(self, name: Name, times: int) -> bool:
        """It was sent once more; after `times` it ends. Whether it goes on."""
        count = self._sent[name] + 1
        self.discard(name)
        if count < times:
            self._put(name, count)
        return count < times

    def _put(self, name: Name, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append({})
        self._levels[level][name] = None
        self._sent[name] = level
