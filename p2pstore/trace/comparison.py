"""One pool beside what it is compared with: caches that know nothing of each other, and one with all memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from p2pstore.trace.pool import Pool, PoolOutcome, PoolSettings
from p2pstore.trace.trace_requests import Model, Request

PRIVATE: Final = "each peer alone"
ONE_CACHE: Final = "one cache of all memory"
ENDLESS: Final = "one cache without end"
SCALES: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the memory that was asked for, in `by_memory`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    name: str
    settings: PoolSettings


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a case."""

    case: Case
    outcome: PoolOutcome


def cases(settings: PoolSettings, blocks: int) -> list[Case]:
    """The cases to replay for a pool with these settings, the baseline first; `blocks` is the number in the trace."""
    memory = replace(settings, ssd_blocks=0)
    one = replace(memory, peers=1, shared=True)
    found = [
        Case(PRIVATE, replace(memory, shared=False)),
        Case("pool", memory),
        Case(ONE_CACHE, replace(one, memory_blocks=settings.peers * settings.memory_blocks)),
        Case(ENDLESS, replace(one, memory_blocks=max(1, blocks))),
    ]
    if settings.ssd_blocks:
        alone = Case(f"{PRIVATE}, with SSDs", replace(settings, shared=False))
        found[2:2] = [alone, Case("pool with SSDs", settings)]
    return found


def compare(requests: Sequence[Request], compared: Iterable[Case], model: Model) -> Iterator[Replayed]:
    """Replay each case."""
    for case in compared:
        yield Replayed(case, Pool(case.settings, model).replay(requests))


def by_memory(
    requests: Sequence[Request], settings: PoolSettings, model: Model
) -> dict[str, list[tuple[float, float]]]:
    """For a picture: the hit rate over the memory of each peer, which is scaled up and down. By name of the curve,
    (blocks, hit rate)."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for scale in SCALES:
        memory = max(1, round(settings.memory_blocks * scale))
        scaled = replace(settings, memory_blocks=memory)
        for name, shared in ((PRIVATE, False), ("pool", True)):
            outcome = Pool(replace(scaled, shared=shared), model).replay(requests)
            curves.setdefault(name, []).append((memory, outcome.counts.ratio))
    return curves
