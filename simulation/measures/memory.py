"""Whether memory stays where it is: a million operations, and a thousand peers that join and go.

All machines run in this process, so its resident memory holds every table of every peer several times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.members.member_table import MembershipConfig
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import Case, Figure, Measured, no_problems, record_of

SIZES: Final = (4,)
LIMIT: Final = 0.05
KEYS: Final = 1000
OPERATIONS: Final = 1_000_000
QUICK_OPERATIONS: Final = 100_000
GUESTS: Final = 1000
QUICK_GUESTS: Final = 100
BATCH: Final = 250
BATCH_SECONDS: Final = 0.05
GUEST_SECONDS: Final = 2.0
DEAD_KEPT_SECONDS: Final = 60.0
"""In place of a day."""
SETTLE_SECONDS: Final = 150.0


def measure(case: Case) -> Measured:
    """Growth of resident memory, after as much of the same as fills all rings and pools."""
    operations = QUICK_OPERATIONS if case.quick else OPERATIONS
    guests = QUICK_GUESTS if case.quick else GUESTS
    cluster = GossipCluster(case.seed, case.peers, config=_config())
    cluster.keeps_truth = False
    for peer in cluster.peers:
        peer.boot([cluster.peers[0].address])
    cluster.run(5.0)
    work = _Work(cluster, list(cluster.peers))
    work.operate(operations // 3)
    work.entertain(guests // 3)
    _resident(case, cluster)  # gives back what guests left free, or it would count as memory in use
    work.operate(operations // 5)  # pools are full again
    before = _resident(case, cluster)
    work.operate(operations)
    after_operations = _resident(case, cluster)
    work.entertain(guests)
    after_guests = _resident(case, cluster)
    return Measured(
        [
            Figure("resident memory before", before / 1e6, "MB"),
            Figure(f"growth by {operations:,} operations", after_operations / before - 1, "", LIMIT),
            Figure(f"growth by {guests:,} joins and leaves", after_guests / before - 1, "", LIMIT),
            Figure("members known at the end", float(work.most_members()), "", case.peers),
            no_problems(cluster),
        ]
    )


def _config() -> GossipConfig:
    membership = replace(MembershipConfig(), dead_kept_seconds=DEAD_KEPT_SECONDS)
    return GossipConfig(membership=membership, ring_limit=4096, forget_seconds=10.0)


def _resident(case: Case, cluster: GossipCluster) -> float:
    """Bytes, when everything that was to be forgotten is."""
    cluster.run(SETTLE_SECONDS)
    gc.collect()
    return float(case.resident_bytes())


class _Work:
    """Operations and guests."""

    def __init__(self, cluster: GossipCluster, hosts: list[GossipPeer]) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._number = 0
        self._guests = 0

    def operate(self, count: int) -> None:
        """Put and evict, all hosts in turn, as fast as gossip takes it up."""
        done = 0
        while done < count:
            for peer in self._hosts:
                for _ in range(BATCH // 2):
                    self._number += 1
                    peer.hold(record_of(self._number))
                    if len(peer.held) > KEYS:
                        peer.release(next(iter(peer.held)))
                done += BATCH
            self._cluster.run(BATCH_SECONDS)

    def entertain(self, count: int) -> None:
        """Have new peers come, put something and go, half of them without a word."""
        for _ in range(count):
            self._guests += 1
            guest = self._cluster.add_peer()
            guest.boot([self._hosts[0].address])
            guest.hold(record_of(self._guests, guest.number))
            go = guest.leave if self._guests % 2 else partial(guest.crash, silent=True)
            self._cluster.kernel.after(GUEST_SECONDS, partial(self._dismiss, guest, go))
            self._cluster.run(GUEST_SECONDS / 4)
        self._cluster.run(GUEST_SECONDS)

    def _dismiss(self, guest: GossipPeer, go: Callable[[], None]) -> None:
        go()
        self._cluster.remove_peer(guest)

    def most_members(self) -> int:
        """Of all hosts' tables."""
        return max(len(peer.gossip.membership) for peer in self._hosts)
