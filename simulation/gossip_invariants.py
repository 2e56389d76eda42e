"""What must hold in a simulated gossip cluster at every moment, whatever goes wrong.

- A view of a log is exactly what its owner's log held at that place: no ghost keys, no lost ones.
- A location that a reader is shown was held by its owner at the place that it names.
- A location that its owner denied is shown no more.
- The stored incarnation of a member never falls, and no member has one that it never used.
- No process that stalled accuses a member, or gives one up, on the strength of that time.
"""

from __future__ import annotations

from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.members.member_table import MemberChange
from p2pstore.gossip.records import PeerId
from simulation.gossip_cluster import GossipCluster, packed_hash
from simulation.gossip_data import view_snapshot
from simulation.gossip_peer import GossipPeer


class Watch:
    """Looks at one peer at a time; what it finds wrong becomes a problem of the cluster."""

    def __init__(self, cluster: GossipCluster, *, judges_stalls: bool) -> None:
        self._cluster = cluster
        self._judges_stalls = judges_stalls
        self._incarnations: dict[tuple[int, int, PeerId], int] = {}
        self.checks = 0
        self.deaths = 0
        self.false_deaths = 0
        self.denials = 0
        cluster.on_change = self._changed

    def check(self, peer: GossipPeer, digests: list[bytes]) -> None:
        """All that can be seen of one running peer; `digests` are looked up in its directory."""
        self.checks += 1
        for other in self._cluster.peers:
            other.note_incarnation()
        self._check_incarnations(peer)
        for owner in self._cluster.peers:
            if owner is not peer:
                self._check_view(peer, owner)
        for digest in digests:
            self._check_lookup(peer, digest)

    def check_all(self, digests: list[bytes]) -> None:
        """`check` every running peer."""
        for peer in self._cluster.running:
            self.check(peer, digests)

    def _check_incarnations(self, peer: GossipPeer) -> None:
        for state in peer.gossip.membership.states():
            key = (peer.number, peer.life, state.peer_id)
            if state.incarnation < self._incarnations.get(key, 0):
                self._wrong(peer, f"lowered the incarnation of {state.peer_id.hex()[-8:]}")
            self._incarnations[key] = state.incarnation
            subject = self._cluster.by_peer_id.get(state.peer_id)
            if subject is None:
                self._wrong(peer, f"knows a member that never was: {state.peer_id.hex()[-8:]}")
            elif state.incarnation > subject.top_incarnation:
                self._wrong(peer, f"has a made-up incarnation of peer {subject.number}")

    def _check_view(self, peer: GossipPeer, owner: GossipPeer) -> None:
        known = view_snapshot(peer.gossip.directory, owner.member)
        if known is None:
            return
        incarnation, sequence, set_hash, packed = known
        truth = owner.truth.get(incarnation)
        if truth is None or sequence >= len(truth.hashes):
            self._wrong(peer, f"is at ({incarnation}, {sequence}) of a log of {owner.number}")
        elif not packed_hash(packed) == set_hash == truth.hashes[sequence]:
            self._wrong(peer, f"has ghost keys of {owner.number} at sequence {sequence}")

    def _check_lookup(self, peer: GossipPeer, digest: bytes) -> None:
        owners = {owner.member: owner for owner in self._cluster.peers}
        for location in peer.gossip.directory.holders(digest):
            owner = owners.get(location.member)
            if owner is None:
                self._wrong(peer, "names a holder that never was")
                continue
            truth = owner.truth.get(location.incarnation)
            packed = truth.at(digest, location.sequence) if truth is not None else None
            if packed != location.record.encode():
                self._wrong(peer, f"shows a ghost key of {owner.number} at sequence {location.sequence}")
            elif owner.running and owner.held.get(digest) != location.record:
                self._deny(peer, owner, digest)

    def _deny(self, peer: GossipPeer, owner: GossipPeer, digest: bytes) -> None:
        """A reader went there and was told that there is no such thing (any more)."""
        directory, log = peer.gossip.directory, owner.gossip.log
        directory.mark_stale(owner.member, digest, log.incarnation, log.sequence)
        self.denials += 1
        if any(location.member == owner.member for location in directory.holders(digest)):
            self._wrong(peer, f"shows a key of {owner.number} that it was told is not there")

    def _changed(self, peer: GossipPeer, change: MemberChange) -> None:
        subject = self._cluster.by_peer_id[change.peer_id]
        if change.new == Status.DEAD:
            self.deaths += 1
            self.false_deaths += subject.running
        if not self._judges_stalls or not subject.running:
            return
        accused = change.new in (Status.SUSPECT, Status.DEAD) and change.by is None
        never_stood_still = not subject.stalled and subject.resumed_at < 0.0
        if accused and never_stood_still and self._cluster.kernel.now == peer.resumed_at:
            self._wrong(peer, f"stood still, and accused peer {subject.number} as it went on")

    def _wrong(self, peer: GossipPeer, text: str) -> None:
        self._cluster.problem(f"peer {peer.number} {text}")
