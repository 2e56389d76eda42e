"""The removals, the peers that know of them, and the reads that must therefore not happen.

The rule. Let a floor f forbid the version v that a read at peer r returned. The read is wrong when, at
the time it began,

1. r had taken in f in its present life, or in an earlier one and had written it down; or
2. some peer q knew f in that sense for `SPREAD_SECONDS`, and for as long r and q were both running
   and no partition stood between them.

It does not matter that f has been dropped since, everywhere. A floor that was known only to peers which
were killed before they wrote it down or told others, is lost, and the rule asks nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from p2pstore.gossip.records import SCOPE_KEY, ClusterRecord, SignedRecord, read_cluster_record
from p2pstore.objects import Version
from simulation.peer import SimulatedPeer

SPREAD_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Known:
    """Floors that one peer took in: when, and which life of it."""

    volatile: list[tuple[float, ClusterRecord]] = field(default_factory=list)
    durable: list[tuple[float, ClusterRecord]] = field(default_factory=list)


class FloorOracle:
    """Sees all floors as peers take them in, and judges reads by the rule above."""

    def __init__(self, peers: Iterable[SimulatedPeer]) -> None:
        self._known: dict[int, _Known] = {}
        for peer in peers:
            known = self._known[peer.number] = _Known()
            peer.on_floor = partial(_note, peer, known)

    def wrote(self, peer: SimulatedPeer, before: float) -> None:
        """The peer has written down what it took in up to that time."""
        known = self._known[peer.number]
        known.durable += [item for item in known.volatile if item[0] <= before]
        known.volatile = [item for item in known.volatile if item[0] > before]

    def killed(self, peer: SimulatedPeer) -> None:
        """What the peer had not written down is gone."""
        self._known[peer.number].volatile.clear()

    def forbidden(
        self,
        reader: SimulatedPeer,
        others: Iterable[tuple[SimulatedPeer, float]],
        digest: bytes,
        namespace: bytes,
        now: float,
    ) -> Version:
        """The highest version of the key that a read which begins now at `reader` must not return. `others`
        are the peers that it has been together with, and since when."""
        floors = self._floors(reader, now, digest, namespace)
        for other, since in others:
            if since + SPREAD_SECONDS <= now:
                floors += self._floors(other, now - SPREAD_SECONDS, digest, namespace)
        return max(floors, default=Version(0, 0))

    def _floors(
        self, peer: SimulatedPeer, until: float, digest: bytes, namespace: bytes
    ) -> list[Version]:
        known = self._known[peer.number]
        return [
            record.version
            for at, record in (*known.durable, *known.volatile)
            if at <= until and record.name == (digest if record.scope == SCOPE_KEY else namespace)
        ]


def _note(peer: SimulatedPeer, known: _Known, signed: SignedRecord) -> None:
    known.volatile.append((peer.cluster.kernel.now, read_cluster_record(signed)))
