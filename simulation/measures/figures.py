"""What all measures share: cases, figures with their limits, and clusters in their usual state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from p2pstore.gossip.records import LocationRecord
from p2pstore.objects import Version
from p2pstore.trace.one_cache import Request
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.gossip_run import key_of
from simulation.network import Faults

Curve = list[tuple[float, float]]

LOSSES: Final = {"loss 0%": 0.0, "loss 5%": 0.05}
"""Parts of measures that are taken with and without loss."""


def _not_handed_in() -> int:
    raise RuntimeError(
        "a measure of memory needs to be handed in how much there is: Case.resident_bytes"
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a measure. `quick` takes fewer samples and shorter windows."""

    peers: int
    seed: int = 1
    quick: bool = False
    part: str = ""
    """One of the measure's `PARTS`, if it has any: a part that can be taken in a process of its own."""
    resident_bytes: Callable[[], int] = _not_handed_in
    """How much memory this process has; handed in, because it is not of the simulated world."""
    requests: Sequence[Request] = ()
    """A trace, for measures that replay one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and what it has to be: at most `limit`, or at least where `at_least`."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is within its limit; true without one."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def wanted(self) -> str:
        if self.limit is None:
            return ""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(slots=True)
class Measured:
    """What one case gave. `curves` are for pictures: title of the plot -> label -> points."""

    figures: list[Figure]
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)


def settled_cluster(case: Case, *, loss: float = 0.0, settle_seconds: float = 3.0) -> GossipCluster:
    """A cluster whose peers know each other and have nothing to tell."""
    cluster = GossipCluster(case.seed, case.peers)
    cluster.boot_acquainted()
    cluster.network.faults = replace(Faults(), loss=loss)
    cluster.run(settle_seconds)
    return cluster


def record_of(number: int, writer: int = 1) -> LocationRecord:
    return LocationRecord(key_of(number), Version(number + 1, writer), number & 0x3FFFFF, 256)


def in_index(peer: GossipPeer, digest: bytes) -> bool:
    """Whether this peer's answer about a prefix would count the key."""
    return any(not each.hidden for each in peer.gossip.directory.holders(digest))


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that this fraction of them does not exceed (nearest rank); infinity of none."""
    ordered = sorted(values)
    if not ordered:
        return math.inf
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def no_problems(cluster: GossipCluster) -> Figure:
    """The checks that hold for every measure."""
    return Figure("messages refused by honest peers", cluster.problem_count, "", 0)
