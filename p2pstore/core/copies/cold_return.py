"""Objects that a returning peer still has from an earlier life (on its SSD), held back until they are
known to be good."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from p2pstore.objects import Version


@dataclass(frozen=True, slots=True)
class ColdObject:
    """One object of an earlier life. `namespace` is the namespace's digest."""

    digest: bytes
    namespace: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class ColdSorted:
    """Of the objects that the peer returned with: `good` may be served and announced, `discarded` are to be
    destroyed. When all of that is done and durable after the `last` of these, tell `Floors.cold_settled`."""

    good: tuple[ColdObject, ...]
    discarded: tuple[ColdObject, ...]
    last: bool


class ColdReturn:
    """The objects that are held back, and how they are told apart, some at a time."""

    def __init__(self, objects: Iterable[ColdObject], newest_clock: int) -> None:
        self.newest_clock = newest_clock
        self._objects = iter(objects)  # they may be many more than fit in memory at once

    def sort(self, count: int, is_good: Callable[[ColdObject], bool]) -> ColdSorted:
        """Up to `count` of those left."""
        some = list(islice(self._objects, count))
        good = {each for each in some if is_good(each)}
        return ColdSorted(
            tuple(each for each in some if each in good),
            tuple(each for each in some if each not in good),
            last=len(some) < count,
        )
