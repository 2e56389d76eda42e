"""How often a peer that lives is given up, in how many peer-hours; and by whom."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberChange
from simulation.gossip_cluster import GossipCluster
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import Case, Figure, Measured, no_problems, settled_cluster

SIZES: Final = (10, 100)
LOSSES: Final = {"loss 5%": (0.05, 0.0), "loss 20%": (0.20, 0.3)}
"""Which, and how many false deaths a peer-hour it may cause."""
STALLS: Final = "stalls"
PARTS: Final = (*LOSSES, STALLS)
PEER_HOURS: Final = 100.0
QUICK_PEER_HOURS: Final = 2.0
STALLED_PORTION: Final = 0.1
STALL_SECONDS: Final = 1.5
STALL_EVERY_SECONDS: Final = 5.0
FRESH_SECONDS: Final = 1.0
"""A verdict so soon after its own stall was cast by a stalled peer."""


def measure(case: Case) -> Measured:
    """Figures at 5 % or 20 % loss, or with a tenth of the peers standing still again and again."""
    hours = QUICK_PEER_HOURS if case.quick else PEER_HOURS
    return _stalls(case, hours / 4) if case.part == STALLS else _losses(case, hours)


def _losses(case: Case, hours: float) -> Measured:
    loss, limit = LOSSES[case.part]
    count = _Count(settled_cluster(case, loss=loss))
    count.run(hours)
    label = f"{case.peers} peers, {case.part}, {hours:g} peer-hours"
    return Measured(
        [
            Figure(f"{label}: peers falsely given up, per hour", count.deaths / hours, "", limit),
            Figure(f"{label}: suspicions per peer-hour", count.suspicions / hours, ""),
            no_problems(count.cluster),
        ]
    )


def _stalls(case: Case, hours: float) -> Measured:
    count = _Count(settled_cluster(case))
    count.stall_some()
    count.run(hours)
    label = (
        f"{case.peers} peers, a tenth stalled {STALL_SECONDS:g} s of {STALL_EVERY_SECONDS:g}, "
        f"{hours:g} peer-hours"
    )
    return Measured(
        [
            Figure(f"{label}: healthy peers given up", count.healthy_deaths, "", 0),
            Figure(f"{label}: given up by a stalled peer", count.by_stalled, "", 0),
            Figure(f"{label}: stalled peers given up", count.deaths - count.healthy_deaths, ""),
            no_problems(count.cluster),
        ]
    )


class _Count:
    """Counts the peers that were given up though they ran: each once, however many believed it."""

    def __init__(self, cluster: GossipCluster) -> None:
        self.cluster = cluster
        self.deaths = self.healthy_deaths = self.by_stalled = self.suspicions = 0
        self._stalling: set[int] = set()
        self._last_death: dict[bytes, float] = {}
        self._last_suspicion: dict[bytes, float] = {}
        cluster.on_change = self._changed

    def run(self, peer_hours: float) -> None:
        self.cluster.run(peer_hours * 3600.0 / len(self.cluster.peers))

    def stall_some(self) -> None:
        """A tenth of the peers stand still now and then."""
        rng = self.cluster.kernel.rng
        count = max(1, round(STALLED_PORTION * len(self.cluster.peers)))
        for peer in rng.sample(self.cluster.peers, count):
            self._stalling.add(peer.number)
            self._stall(peer)

    def _stall(self, peer: GossipPeer) -> None:
        rng = self.cluster.kernel.rng

        def stall() -> None:
            peer.stall(rng.expovariate(1.0 / STALL_SECONDS))
            self._stall(peer)

        self.cluster.kernel.after(rng.uniform(0.5, 1.5) * STALL_EVERY_SECONDS, stall)

    def _changed(self, peer: GossipPeer, change: MemberChange) -> None:
        now = self.cluster.kernel.now
        table = self._last_suspicion if change.new == Status.SUSPECT else self._last_death
        if change.new not in (Status.SUSPECT, Status.DEAD):
            return
        if now < table.get(change.peer_id, -60.0) + 30.0:
            return  # of the same wave
        table[change.peer_id] = now
        if change.new == Status.SUSPECT:
            self.suspicions += 1
            return
        self.deaths += 1
        if self.cluster.by_peer_id[change.peer_id].number not in self._stalling:
            self.healthy_deaths += 1
        if change.by is None and now < peer.resumed_at + FRESH_SECONDS:
            self.by_stalled += 1
