"""A whole cluster ends and starts again at once, while old claims about its dead are still around.

No bootstrap addresses: the address books must do. A few peers kept running and hold all others dead, some at
incarnations far above any that a restarted clock gives (memberlist #311).
"""

from __future__ import annotations

from functools import partial
from typing import Final

from p2pstore.gossip.gossip_messages import Claim, ControlKind, Ping, Status
from simulation.gossip_peer import GossipPeer
from simulation.measures.figures import Case, Figure, Measured, no_problems, settled_cluster

SIZES: Final = (10, 100)
SURVIVORS: Final = {"no survivors": 0, "2 survivors": 2}
PARTS: Final = SURVIVORS
LIMIT_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 120.0
DEAD_FOR_SECONDS: Final = 30.0
WITHIN_SECONDS: Final = 10.0
AHEAD: Final = 3_600_000
"""An incarnation is milliseconds: claims about the dead are an hour ahead of the clocks."""


def measure(case: Case) -> Measured:
    """With no survivor, or with two whose claims are ahead."""
    survivors = SURVIVORS[case.part]
    cluster = settled_cluster(case)
    gone = cluster.peers[survivors:]
    for peer in gone:
        peer.crash()
    cluster.run(DEAD_FOR_SECONDS)
    for peer in cluster.peers[:survivors]:
        _accuse(peer, gone)
    begin = cluster.kernel.now
    for peer in gone:
        at = begin + WITHIN_SECONDS * cluster.kernel.rng.random()
        cluster.kernel.at(at, partial(peer.boot, []))
    cluster.run(WITHIN_SECONDS)
    took = cluster.run_until(cluster.agreed, PATIENCE_SECONDS)
    label = f"{case.peers} peers restart within {WITHIN_SECONDS:g} s, {case.part}"
    seconds = PATIENCE_SECONDS if took is None else took
    return Measured(
        [Figure(f"{label}: all alive everywhere", seconds, "s", LIMIT_SECONDS), no_problems(cluster)]
    )


def _accuse(survivor: GossipPeer, gone: list[GossipPeer]) -> None:
    """Have a survivor believe in a death far in the future."""
    claims = [
        Claim(peer.peer_id, peer.top_incarnation + AHEAD, int(Status.DEAD), survivor.member)
        for peer in gone
    ]
    own = survivor.gossip.membership.own.incarnation
    for start in range(0, len(claims), 500):
        request = Ping(own, claims[start : start + 500])
        survivor.gossip.serve(gone[0].peer_id, ControlKind.PING, request, survivor.now)
