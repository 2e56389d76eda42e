"""What simulated peers say on data connections: snapshots, and pushes to the homes of keys."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from p2pstore.core.serving import pushed_reply, rivals_of
from p2pstore.gossip.gossip_messages import FetchSnapshot, HomePush, SnapshotHead
from p2pstore.gossip.locations.directory import Directory
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import Member
from p2pstore.home_messages import Push, Pushed
from p2pstore.transfer import data_messages as data
from p2pstore.wire import HEADER_BYTES, encode_body
from simulation.gossip_network import MESSAGE_SECONDS

if TYPE_CHECKING:
    from simulation.gossip_peer import GossipPeer

SNAPSHOT_BYTES_PER_SECOND: Final = 1e9
DATA_KIND: Final = 0x80
"""Marks messages of data connections in traces."""
SNAPSHOT: Final = DATA_KIND | data.DataKind.SNAPSHOT
PUSH: Final = DATA_KIND | data.DataKind.PUSH


class SnapshotFetch:
    """One snapshot that a peer asked another for; its first outcome counts."""

    def __init__(self, peer: GossipPeer, fetch: FetchSnapshot) -> None:
        self._peer = peer
        self._life = peer.life
        self._fetch = fetch
        self._done = False

    def start(self) -> None:
        """Ask."""
        peer, cluster = self._peer, self._peer.cluster
        seconds = self._fetch.timeout_seconds / peer.clock_rate
        cluster.kernel.after(seconds, lambda: self._comes(None, b""))
        target = cluster.by_peer_id.get(self._fetch.peer_id)
        if target is None:
            return
        leaves_at = peer.charge(MESSAGE_SECONDS)
        arrives = partial(self._arrives, target)
        cluster.network.send(peer.number, target.number, HEADER_BYTES, SNAPSHOT, leaves_at, arrives)

    def _arrives(self, target: GossipPeer) -> None:
        if target.running:
            target.arrive(target.life, partial(self._serve, target))

    def _serve(self, target: GossipPeer) -> None:
        head, packed = log_snapshot(target.gossip, self._fetch.member) or (None, b"")
        size_bytes = HEADER_BYTES + len(packed)
        target.traffic.data_bytes_out += size_bytes
        leaves_at = target.charge(MESSAGE_SECONDS) + len(packed) / SNAPSHOT_BYTES_PER_SECOND
        comes = partial(self._comes, head, packed)
        network = self._peer.cluster.network
        network.send(target.number, self._peer.number, size_bytes, SNAPSHOT, leaves_at, comes)

    def _comes(self, head: SnapshotHead | None, packed: bytes) -> None:
        self._peer.arrive(self._life, partial(self._take, head, packed))

    def _take(self, head: SnapshotHead | None, packed: bytes) -> None:
        if self._done:
            return
        self._done = True
        self._peer.traffic.data_bytes_in += HEADER_BYTES + len(packed)
        self._peer.cluster.snapshots += head is not None
        self._peer.install_snapshot(self._fetch, head, packed)


class TravellingPush:
    """One push to a home peer; its first outcome counts."""

    def __init__(self, peer: GossipPeer, push: HomePush) -> None:
        self._peer = peer
        self._life = peer.life
        self._push = push
        self._done = False

    def start(self) -> None:
        """Send it."""
        peer, cluster = self._peer, self._peer.cluster
        cluster.kernel.after(self._push.timeout_seconds / peer.clock_rate, partial(self._comes, None, 0))
        target = cluster.by_peer_id.get(self._push.peer_id)
        if target is None:
            return
        message = self._push.message
        size_bytes = HEADER_BYTES + len(encode_body(message))
        peer.traffic.data_bytes_out += size_bytes
        peer.traffic.data_messages_out += 1
        leaves_at = peer.charge(MESSAGE_SECONDS)
        take = partial(self._serve, target, message, size_bytes)
        cluster.network.send(
            peer.number,
            target.number,
            size_bytes,
            PUSH,
            leaves_at,
            lambda: target.arrive(target.life, take),
        )

    def _serve(self, target: GossipPeer, message: Push, size_bytes: int) -> None:
        target.charge(MESSAGE_SECONDS)
        target.traffic.data_bytes_in += size_bytes
        reply = pushed_reply(*take_push(target.gossip, self._peer.member, message, target.now))
        reply_bytes = HEADER_BYTES + len(encode_body(reply))
        target.traffic.data_bytes_out += reply_bytes
        leaves_at = target.charge(MESSAGE_SECONDS)
        comes = partial(self._comes, reply, reply_bytes)
        network = self._peer.cluster.network
        network.send(target.number, self._peer.number, reply_bytes, PUSH, leaves_at, comes)

    def _comes(self, reply: Pushed | None, reply_bytes: int) -> None:
        self._peer.arrive(self._life, partial(self._take, reply, reply_bytes))

    def _take(self, reply: Pushed | None, reply_bytes: int) -> None:
        if self._done:
            return
        self._done = True
        peer = self._peer
        peer.traffic.data_bytes_in += reply_bytes
        behind = None if reply is None else reply.behind
        rivals = [] if reply is None else rivals_of(reply)
        peer.gossip.partitions.pushed(self._push.token, behind, rivals, peer.now)


def take_push(
    gossip: Gossip, sender: Member, push: Push, now: float
) -> tuple[list[int], list[Location]]:
    """Take in an owner's push at once. What to answer: see `PartitionedDirectory.pushed`."""
    intake = gossip.intake(sender, push)
    while not intake.step(now):
        pass
    return intake.behind, intake.rivals


def log_snapshot(gossip: Gossip, member: Member) -> tuple[SnapshotHead, bytes] | None:
    """A machine's whole location set, packed; None of another member: only an owner is asked for its set."""
    if member != gossip.member:
        return None
    head = gossip.log.head
    return SnapshotHead(gossip.incarnation, head.sequence, head.set_hash), gossip.log.snapshot()


def view_snapshot(directory: Directory, member: Member) -> tuple[int, int, int, bytes] | None:
    """(incarnation, sequence, set hash, packed records) of a view; None of an empty one."""
    view = directory._views.get(member)
    if view is None or not view.sequence:
        return None
    return *view.position, directory.index.hash(view.slot), directory.index.pack(view.slot)
