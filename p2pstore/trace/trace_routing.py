"""Which peer a request goes to. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Final, Literal

RoutingName = Literal["round-robin", "random", "affine"]

DEFAULT_LOAD_BOUND: Final = 1.05
"""With a looser bound those that had the first block first get as many new conversations as it lets them, and the
memory of the others is not used."""


class Router(ABC):
    """Chooses among peers by number."""

    @abstractmethod
    def choose(self, local: Sequence[int]) -> int:
        """The peer for a request, of whose prefix each peer n has `local[n]` blocks in its own memory."""


class RoundRobin(Router):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, local: Sequence[int]) -> int:
        chosen = self._next % len(local)
        self._next = chosen + 1
        return chosen


class AtRandom(Router):
    """Any, each time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, local: Sequence[int]) -> int:
        return self._rng.randrange(len(local))


class PrefixAffine(Router):
    """The peer that has most of the prefix, among those that were sent less than `load_bound` times the mean of all
    requests so far, this one among them. Without a bound one peer would get all, since all share their first block."""

    def __init__(self, load_bound: float) -> None:
        if load_bound < 1:
            raise ValueError("the load bound is 1 at least: the mean")
        self._load_bound = load_bound
        self._sent: list[int] = []

    def choose(self, local: Sequence[int]) -> int:
        sent = self._sent = self._sent or [0] * len(local)
        most = self._load_bound * (sum(sent) + 1) / len(sent)
        free = [peer for peer, count in enumerate(sent) if count < most]
        chosen = max(free, key=lambda peer: (local[peer], -sent[peer]))
        sent[chosen] += 1
        return chosen


def make_router(name: RoutingName, load_bound: float, rng: Random) -> Router:
    """A new router."""
    if name == "affine":
        return PrefixAffine(load_bound)
    return RoundRobin() if name == "round-robin" else AtRandom(rng)
