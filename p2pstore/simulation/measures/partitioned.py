"""A cluster too large for every peer to know every location: what it costs, and how far a lookup has to go.

Every peer holds the same number of objects and changes some all the time. Locations go to the homes of their
partitions only; a reader that does not know a key asks a home.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Final

from p2pstore.gossip.config import GossipConfig
from p2pstore.simulation.gossip_cluster import GossipCluster, Totals
from p2pstore.simulation.gossip_peer import GossipPeer
from p2pstore.simulation.measures.figures import (
    Case,
    Figure,
    Measured,
    no_problems,
    percentile,
    record_of,
)

SIZES: Final = (5000,)
QUICK_SIZES: Final = (50,)
KEYS_PER_PEER: Final = 1000
QUICK_KEYS_PER_PEER: Final = 200
CHANGES_PER_SECOND: Final = 100.0
BYTES_LIMIT: Final = 100e3
WARM_SECONDS: Final = 2.0
"""Keys changed for this long before anything is measured: a lookup is owed those older than a second."""
WINDOW_SECONDS: Final = 1.0
LOOKUPS: Final = 2000
OLD_SECONDS: Final = 1.0


def measure(case: Case) -> Measured:
    """Bytes per peer under load, and round trips of lookups."""
    cluster = GossipCluster(
        case.seed, case.peers, config=GossipConfig(directory_setting="partitioned")
    )
    cluster.keeps_truth = False
    cluster.boot_acquainted()
    keys = QUICK_KEYS_PER_PEER if case.quick else KEYS_PER_PEER
    work = _Work(cluster, keys)
    work.fill()
    label = f"{case.peers} peers with {keys} keys each"
    work.write()
    cluster.run(WARM_SECONDS)
    before = cluster.totals()
    bytes_before = [_bytes_in(peer) for peer in cluster.peers]
    cluster.run(WINDOW_SECONDS)
    window = cluster.totals()
    each = [
        (_bytes_in(peer) - earlier) / WINDOW_SECONDS
        for peer, earlier in zip(cluster.peers, bytes_before, strict=True)
    ]
    trips = work.look_up(LOOKUPS)
    return Measured(
        [
            Figure(f"{label}: bytes in, mean", sum(each) / len(each), "B/s", BYTES_LIMIT),
            Figure(f"{label}: bytes in, p99 of peers", percentile(each, 0.99), "B/s"),
            *_rates(label, before, window, case.peers),
            Figure(
                f"{label}: lookups answered at the first home", _share(trips, 1), "", 0.99, True
            ),
            Figure(f"{label}: round trips, most", max(trips), ""),
            Figure(f"{label}: false misses of {LOOKUPS} lookups", trips.count(_MISS), "", 0),
            no_problems(cluster),
        ]
    )


_MISS: Final = 99


def _bytes_in(peer: GossipPeer) -> int:
    return peer.traffic.bytes_in + peer.traffic.data_bytes_in


def _share(trips: list[int], most: int) -> float:
    return sum(each <= most for each in trips) / len(trips)


def _rates(label: str, before: Totals, after: Totals, peers: int) -> list[Figure]:
    unit = 1.0 / (peers * WINDOW_SECONDS)
    gossip = (after.control_bytes_in - before.control_bytes_in) * unit
    messages = (after.control_messages_out - before.control_messages_out) * unit
    pushes = (after.data_messages_out - before.data_messages_out) * unit
    return [
        Figure(f"{label}: of which gossip", gossip, "B/s"),
        Figure(f"{label}: gossip messages sent", messages, "/s", 120.0),
        Figure(f"{label}: home pushes sent", pushes, "/s"),
    ]


class _Work:
    """What every peer holds and changes, and lookups by peers that hold nothing of it."""

    def __init__(self, cluster: GossipCluster, keys: int) -> None:
        self._cluster = cluster
        self._keys = keys
        self._rng = Random(cluster.kernel.rng.getrandbits(64))

    def fill(self) -> None:
        """Have every peer hold its objects, and its homes know."""
        for peer in self._cluster.peers:
            for number in range(self._keys):
                peer.hold(record_of(_key(peer, number), peer.number & 0xFFFF))
            self._cluster.run(0.01)
        self._cluster.run(10.0)

    def write(self) -> None:
        """Have every peer change something so often, from now on."""
        for peer in self._cluster.peers:
            delay = self._rng.random() / CHANGES_PER_SECOND
            self._cluster.kernel.after(delay, partial(self._change, peer, self._keys))

    def _change(self, peer: GossipPeer, number: int) -> None:
        if len(peer.held) > self._keys:
            peer.release(next(iter(peer.held)))
        else:
            peer.hold(record_of(_key(peer, number), peer.number & 0xFFFF))
        pause = self._rng.uniform(0.5, 1.5) / CHANGES_PER_SECOND
        self._cluster.kernel.after(pause, partial(self._change, peer, number + 1))

    def look_up(self, count: int) -> list[int]:
        """Round trips of so many lookups of keys that are old enough, and not those that go next."""
        old = {
            peer.number: list(peer.held.values())[self._keys // 2 :] for peer in self._cluster.peers
        }
        self._cluster.run(OLD_SECONDS)
        trips: list[int] = []
        while len(trips) < count:
            owner, reader = self._rng.sample(self._cluster.peers, 2)
            record = self._rng.choice(old[owner.number])
            if owner.held.get(record.digest) == record:
                trips.append(self._round_trips(reader, owner, record.digest))
        return trips

    def _round_trips(self, reader: GossipPeer, owner: GossipPeer, digest: bytes) -> int:
        """0 when the reader knows, else how many homes it has to ask."""
        asked = [reader.peer_id, *(h for h in reader.gossip.homes(digest) if h != reader.peer_id)]
        for trips, peer_id in enumerate(asked):
            peer = self._cluster.by_peer_id[peer_id]
            if peer is owner:  # a home that holds the object itself
                return trips
            if any(at.member == owner.member for at in peer.gossip.holders(digest, peer.now)):
                return trips
        return _MISS


def _key(peer: GossipPeer, number: int) -> int:
    return peer.number * 1_000_000 + number
