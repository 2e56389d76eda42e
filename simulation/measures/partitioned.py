"""A cluster too large for every peer to know every location: what it costs, and how far a lookup has to go.

Every machine is there, whole, and knows all others. Of the 1,024 partitions only a sample exists: all objects, and
all changes, are of keys in these, at the rate that falls to them. Each partition has all its homes, and all owners
tell them. Messages to homes carry one change each, at such rates, however many partitions there are; so what they
cost in the whole cluster is what they cost here, divided by the sample's share. Gossip does not depend on it.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.homes.partition_homes import PartitionConfig, table_of
from p2pstore.gossip.records import PARTITION_COUNT, LocationRecord, Member, partition_of
from p2pstore.home_messages import PartitionSet, Push
from p2pstore.objects import Version
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_data import take_push
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import Case, Figure, Measured, no_problems, percentile
from simulation.settled import acquaint_at_once

SIZES: Final = (5000,)
QUICK_SIZES: Final = (50,)
KEYS_PER_PEER: Final = 1000
CHANGES_PER_SECOND: Final = 100.0
PARTITIONS: Final = 32
BYTES_LIMIT: Final = 100e3
MESSAGES_LIMIT: Final = 120.0
WARM_SECONDS: Final = 3.0
"""Keys changed for this long before anything is measured: a lookup is owed those older than a second."""
WINDOW_SECONDS: Final = 4.0
LOOKUPS: Final = 5000
ABSENT: Final = 500
OLD_SECONDS: Final = 1.0
HOUSEKEEPING_SECONDS: Final = 0.25
_MISS: Final = 99


def measure(case: Case) -> Measured:
    """Bytes per peer under load, and round trips of lookups."""
    sample = _Sample(case.peers, Random(case.seed))
    cluster = GossipCluster(case.seed, case.peers, config=sample.config)
    cluster.keeps_truth = False
    for peer in cluster.peers:
        peer.boot([])
    acquaint_at_once(cluster.peers)
    work = _Work(cluster, sample)
    work.fill()
    work.tell_homes()
    gc.collect()
    gc.freeze()  # nearly all of it stays for good: looking through it again and again takes most of the time
    try:
        work.begin()
        cluster.run(WARM_SECONDS)
        window = _Window(cluster, sample)
        cluster.run(WINDOW_SECONDS)
        figures = window.figures()
        figures += work.look_up()
    finally:
        gc.unfreeze()
    return Measured([*figures, no_problems(cluster)])


class _Sample:
    """Some partitions, and who is home of them."""

    def __init__(self, peers: int, rng: Random) -> None:
        self.partitions = sorted(rng.sample(range(PARTITION_COUNT), PARTITIONS))
        self.share = PARTITIONS / PARTITION_COUNT
        self._rng = rng
        members = GossipCluster(0, peers).by_number.values()
        table = table_of(peer.member for peer in members)
        self.by_home: dict[Member, list[int]] = {}
        for partition in self.partitions:
            for member in table.homes[partition]:
                self.by_home.setdefault(member, []).append(partition)
        usual = PartitionConfig()
        self.round_seconds = max(usual.audit_seconds, len(table.by_home) * usual.audit_pause_seconds)
        """In what time owners audit all homes, in the whole cluster and here."""
        self.config = GossipConfig(
            directory_setting="partitioned", partitions=replace(usual, audit_seconds=self.round_seconds)
        )

    def digest(self) -> bytes:
        partition, rest = self._rng.choice(self.partitions), self._rng.randbytes(15)
        return bytes((partition >> 2, (partition & 3) << 6 | rest[0] & 63)) + rest[1:]


class _Work:
    """What every peer holds and changes, and lookups by peers that hold nothing of it."""

    def __init__(self, cluster: GossipCluster, sample: _Sample) -> None:
        self._cluster = cluster
        self._sample = sample
        self._rng = Random(cluster.kernel.rng.getrandbits(64))
        self._keys = max(1, round(KEYS_PER_PEER * sample.share))
        self._pause_seconds = 1.0 / (CHANGES_PER_SECOND * sample.share)
        self._clock = 0
        self._by_member = {peer.member: peer for peer in cluster.peers}

    def fill(self) -> None:
        """Have every peer hold its objects, without telling others yet."""
        for peer in self._cluster.peers:
            for _ in range(self._keys):
                record = self._record(peer)
                peer.held[record.digest] = record
                operation = peer.gossip.log.add(record)
                assert operation is not None
                peer.gossip.partitions.pushes.sets.note([partition_of(operation)], [operation])

    def tell_homes(self) -> None:
        """Have homes know what owners hold, and owners know that they do."""
        for peer in self._cluster.peers:
            directory = peer.gossip.partitions
            table = directory.current.table
            table.by_home = self._sample.by_home
            pushes = directory.pushes
            pushes.table, pushes._confirmed.by = table, list(table.homes)
            self._tell(peer)

    def _tell(self, peer: GossipPeer) -> None:
        gossip, sets = peer.gossip, peer.gossip.partitions.pushes.sets
        wholes = {
            partition: PartitionSet(
                partition, sets.number(partition), sets.set_hash(partition), sets.pack(partition)
            )
            for partition in self._sample.partitions
        }
        for member, partitions in self._sample.by_home.items():
            home = self._by_member[member]
            if home is not peer:
                whole = [wholes[partition] for partition in partitions]
                # As by an audit, of which one in a round is enough.
                seconds = math.ceil(self._sample.round_seconds)
                push = Push(
                    gossip.incarnation,
                    [],
                    b"",
                    sequence=gossip.log.sequence,
                    sets=whole,
                    audit_seconds=seconds,
                )
                behind, _ = take_push(home.gossip, peer.member, push, home.now)
                assert not behind

    def begin(self) -> None:
        """Let all machines go, each at another moment, and have each change something at its rate."""
        pause = self._sample.round_seconds / len(self._sample.by_home)
        for peer in self._cluster.peers:
            gossip, rng, now = peer.gossip, self._rng, peer.now
            gossip._housekeeping.due = now + rng.random() * HOUSEKEEPING_SECONDS
            gossip.partitions._mode_at = now - rng.random()
            gossip.partitions.pushes._audit_at = now + rng.random() * pause
            self._cluster.kernel.after(rng.random() * HOUSEKEEPING_SECONDS, peer.turn)
            self._cluster.kernel.after(rng.random() * self._pause_seconds, partial(self._change, peer))

    def _change(self, peer: GossipPeer) -> None:
        if len(peer.held) > self._keys:
            peer.release(next(iter(peer.held)))
        else:
            peer.hold(self._record(peer))
        pause = self._rng.uniform(0.5, 1.5) * self._pause_seconds
        self._cluster.kernel.after(pause, partial(self._change, peer))

    def _record(self, peer: GossipPeer) -> LocationRecord:
        self._clock += 1
        version = Version(self._clock, peer.number & 0xFFFF)
        return LocationRecord(self._sample.digest(), version, self._clock & 0x3FFFFF, 256)

    # --- lookups -----------------------------------------------------------------------------

    def look_up(self) -> list[Figure]:
        """Of keys that are old enough, and of such that are nowhere."""
        old = {peer.number: list(peer.held.values())[self._keys // 2 :] for peer in self._cluster.peers}
        self._cluster.run(OLD_SECONDS)
        trips: list[int] = []
        while len(trips) < LOOKUPS:
            owner, reader = self._rng.sample(self._cluster.peers, 2)
            record = self._rng.choice(old[owner.number])
            if owner.held.get(record.digest) == record:
                trips.append(self._round_trips(reader, record.digest, owner))
        absent = Counter(
            self._round_trips(self._rng.choice(self._cluster.peers), self._sample.digest(), None)
            for _ in range(ABSENT)
        )
        label = f"{len(self._cluster.peers)} peers"
        soon = sum(each <= 1 for each in trips) / len(trips)
        return [
            Figure(f"{label}: lookups answered at the first home", soon, "", 1.0, True),
            Figure(f"{label}: round trips, most", max(trips), ""),
            Figure(f"{label}: false misses of {LOOKUPS} lookups", trips.count(_MISS), "", 0),
            Figure(
                f"{label}: keys that are nowhere, known at the first home",
                (absent[0] + absent[1]) / ABSENT,
                "",
            ),
        ]

    def _round_trips(self, reader: GossipPeer, digest: bytes, owner: GossipPeer | None) -> int:
        """0 when the reader knows, else how many homes it has to ask. `owner` None: until one vouches for it that
        the key is nowhere."""
        asked = [reader.peer_id, *(h for h in reader.gossip.homes(digest) if h != reader.peer_id)]
        for trips, peer_id in enumerate(asked):
            peer = self._cluster.by_peer_id[peer_id]
            known = peer.gossip.directory.holders(digest)
            if owner is not None and (peer is owner or any(at.member == owner.member for at in known)):
                return trips
            if peer.gossip.partitions.vouches(digest, peer.now):
                return trips if owner is None else _MISS
        return _MISS


class _Window:
    """Count what all peers send and get from now on."""

    def __init__(self, cluster: GossipCluster, sample: _Sample) -> None:
        self._cluster = cluster
        self._sample = sample
        self._before = cluster.totals()
        self._each_before = [self._bytes_in(peer) for peer in cluster.peers]

    @staticmethod
    def _bytes_in(peer: GossipPeer) -> tuple[int, int]:
        return peer.traffic.bytes_in, peer.traffic.data_bytes_in

    def figures(self) -> list[Figure]:
        """Per peer and second."""
        peers, before, after = self._cluster.peers, self._before, self._cluster.totals()
        label = f"{len(peers)} peers"
        unit = 1.0 / (len(peers) * WINDOW_SECONDS)
        gossip = (after.control_bytes_in - before.control_bytes_in) * unit
        homes = (after.data_bytes_in - before.data_bytes_in) * unit / self._sample.share
        messages = (after.control_messages_out - before.control_messages_out) * unit
        pushes = (after.data_messages_out - before.data_messages_out) * unit / self._sample.share
        gossips = [
            (peer.traffic.bytes_in - earlier) / WINDOW_SECONDS
            for peer, (earlier, _) in zip(peers, self._each_before, strict=True)
        ]
        partitions = [
            (peer.traffic.data_bytes_in - earlier) / WINDOW_SECONDS / len(served)
            for peer, (_, earlier) in zip(peers, self._each_before, strict=True)
            if (served := self._sample.by_home.get(peer.member))
        ]
        return [
            Figure(f"{label}: bytes in, mean", gossip + homes, "B/s", BYTES_LIMIT),
            Figure(f"{label}: of which gossip", gossip, "B/s"),
            Figure(f"{label}: gossip, p99 of peers", percentile(gossips, 0.99), "B/s"),
            Figure(f"{label}: bytes in for each partition served", max(partitions), "B/s"),
            Figure(f"{label}: gossip messages sent", messages, "/s", MESSAGES_LIMIT),
            Figure(f"{label}: home pushes sent", pushes, "/s"),
        ]
