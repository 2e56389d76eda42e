"""The cost of gossip: bytes and messages per peer, idle and with all peers writing."""

from __future__ import annotations

from functools import partial
from typing import Final

from p2pstore.gossip.gossip_messages import ControlKind
from p2pstore.gossip.records import LOCATION_BYTES
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import (
    Case,
    Curve,
    Figure,
    Measured,
    no_problems,
    record_of,
    settled_cluster,
)

SIZES: Final = (10, 100)
CHANGES_PER_SECOND: Final = 100.0
IDLE_BYTES: Final = {100: 60e3}
LOADED_FACTOR: Final = {100: 1.3}
MESSAGES_PER_SECOND: Final = 120.0
KEYS_PER_PEER: Final = 1000


def measure(case: Case) -> Measured:
    cluster = settled_cluster(case, settle_seconds=10.0)
    idle = _Window(cluster)
    idle.run(10.0 if case.quick else 60.0)
    name = f"{case.peers} peers"
    figures = [
        Figure(
            f"{name}, idle: bytes in and out",
            idle.bytes_in + idle.bytes_out,
            "B/s",
            IDLE_BYTES.get(case.peers),
        ),
        Figure(f"{name}, idle: messages sent", idle.messages_out, "/s", MESSAGES_PER_SECOND),
        Figure(f"{name}, idle: connections opened", idle.opened, "/s"),
    ]
    _write(cluster)
    cluster.run(5.0)
    loaded = _Window(cluster)
    loaded.run(3.0 if case.quick else 10.0)
    necessary = (case.peers - 1) * CHANGES_PER_SECOND * LOCATION_BYTES
    figures += [
        Figure(
            f"{name}, loaded: bytes in / necessary",
            loaded.bytes_in / necessary,
            "x",
            LOADED_FACTOR.get(case.peers),
        ),
        Figure(f"{name}, loaded: bytes in", loaded.bytes_in, "B/s"),
        Figure(f"{name}, loaded: messages sent", loaded.messages_out, "/s", MESSAGES_PER_SECOND),
        Figure(f"{name}, loaded: home pushes sent", loaded.data_messages, "/s"),
        Figure(f"{name}, loaded: bytes of home pushes in", loaded.data_bytes, "B/s"),
        Figure(f"{name}, loaded: connections opened", loaded.opened, "/s"),
        no_problems(cluster),
    ]
    figures += [
        Figure(f"{name}, loaded: bytes of {ControlKind(kind).name}", rate, "B/s")
        for kind, rate in loaded.by_kind.items()
    ]
    return Measured(figures, {"bytes/s in, per peer": {name: idle.curve + loaded.curve}})


class _Window:
    """Rates per peer and second of a stretch of virtual time."""

    def __init__(self, cluster: GossipCluster) -> None:
        self._cluster = cluster
        self.curve: Curve = []
        self.bytes_in = self.bytes_out = self.messages_out = 0.0
        self.data_messages = self.data_bytes = self.opened = 0.0
        self.by_kind: dict[int, float] = {}

    def run(self, seconds: float) -> None:
        cluster = self._cluster
        before, opened = cluster.totals(), cluster.network.opened
        kinds = cluster.bytes_by_kind()
        each, last = max(1, round(seconds)), before
        for _ in range(each):
            cluster.run(seconds / each)
            totals = cluster.totals()
            rate = (totals.control_bytes_in - last.control_bytes_in) / len(cluster.peers)
            self.curve.append((cluster.kernel.now, rate * each / seconds))
            last = totals
        unit = 1.0 / (len(cluster.peers) * seconds)
        self.bytes_in = (last.control_bytes_in - before.control_bytes_in) * unit
        self.bytes_out = (last.control_bytes_out - before.control_bytes_out) * unit
        self.messages_out = (last.control_messages_out - before.control_messages_out) * unit
        self.data_messages = (last.data_messages_out - before.data_messages_out) * unit
        self.data_bytes = (last.data_bytes_in - before.data_bytes_in) * unit
        self.opened = (cluster.network.opened - opened) * unit
        self.by_kind = {
            kind: (count - kinds[kind]) * unit for kind, count in cluster.bytes_by_kind().items()
        }


def _write(cluster: GossipCluster) -> None:
    """Have every peer change something at this rate, from now on: records come, and the oldest go."""
    for peer in cluster.peers:
        cluster.kernel.after(cluster.kernel.rng.random() / CHANGES_PER_SECOND, partial(_change, peer, 0))


def _change(peer: GossipPeer, number: int) -> None:
    key = peer.number * 10_000_000 + number
    if len(peer.held) >= KEYS_PER_PEER:
        peer.release(next(iter(peer.held)))
    else:
        peer.hold(record_of(key, peer.number))
    pause = peer.cluster.kernel.rng.uniform(0.5, 1.5) / CHANGES_PER_SECOND
    peer.cluster.kernel.after(pause, partial(_change, peer, number + 1))
