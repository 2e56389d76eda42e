"""What simulated peers say on data connections: snapshots, and pushes to the homes of keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec

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

P = ParamSpec("P")
SNAPSHOT_BYTES_PER_SECOND: Final = 1e9
DATA_KIND: Final = 0x80
"""Marks messages of data connections in traces."""
SNAPSHOT: Final = DATA_KIND | data.DataKind.SNAPSHOT
PUSH: Final = DATA_KIND | data.DataKind.PUSH


def fetch_snapshot(peer: GossipPeer, fetch: FetchSnapshot) -> None:
    cluster, network = peer.cluster, peer.cluster.network

    def take(head: SnapshotHead | None, packed: bytes) -> None:
        peer.traffic.data_bytes_in += HEADER_BYTES + len(packed)
        cluster.snapshots += head is not None
        peer.install_snapshot(fetch, head, packed)

    comes = first_outcome(peer, take)
    cluster.kernel.after(fetch.timeout_seconds / peer.clock_rate, lambda: comes(None, b""))
    target = cluster.by_peer_id.get(fetch.peer_id)
    if target is None:
        return

    def serve() -> None:
        head, packed = log_snapshot(target.gossip, fetch.member) or (None, b"")
        leaves_at = target.charge(MESSAGE_SECONDS) + len(packed) / SNAPSHOT_BYTES_PER_SECOND
        size_bytes = HEADER_BYTES + len(packed)
        deliver = partial(comes, head, packed)
        network.send(target.number, peer.number, size_bytes, SNAPSHOT, leaves_at, deliver)

    leaves_at = peer.charge(MESSAGE_SECONDS)
    arrives = partial(_serve_in_turn, target, serve)
    network.send(peer.number, target.number, HEADER_BYTES, SNAPSHOT, leaves_at, arrives)


def send_push(peer: GossipPeer, push: HomePush) -> None:
    cluster, network = peer.cluster, peer.cluster.network

    def take(reply: Pushed | None, reply_bytes: int) -> None:
        peer.traffic.data_bytes_in += reply_bytes
        behind = None if reply is None else reply.behind
        rivals = [] if reply is None else rivals_of(reply)
        peer.gossip.partitions.pushed(push.token, behind, rivals, peer.now)

    comes = first_outcome(peer, take)
    cluster.kernel.after(push.timeout_seconds / peer.clock_rate, partial(comes, None, 0))
    target = cluster.by_peer_id.get(push.peer_id)
    if target is None:
        return
    size_bytes = HEADER_BYTES + len(encode_body(push.message))
    peer.traffic.data_messages_out += 1

    def serve() -> None:
        target.charge(MESSAGE_SECONDS)
        target.traffic.data_bytes_in += size_bytes
        reply = pushed_reply(*take_push(target.gossip, peer.member, push.message, target.now))
        reply_bytes = HEADER_BYTES + len(encode_body(reply))
        leaves_at = target.charge(MESSAGE_SECONDS)
        deliver = partial(comes, reply, reply_bytes)
        network.send(target.number, peer.number, reply_bytes, PUSH, leaves_at, deliver)

    leaves_at = peer.charge(MESSAGE_SECONDS)
    arrives = partial(_serve_in_turn, target, serve)
    network.send(peer.number, target.number, size_bytes, PUSH, leaves_at, arrives)


def first_outcome(peer: GossipPeer, take: Callable[P, None]) -> Callable[P, None]:
    """`take` in a turn of the process that runs now, and only the first time."""
    life, done = peer.life, False

    def turn(*outcome: P.args, **named: P.kwargs) -> None:
        nonlocal done
        if not done:
            done = True
            take(*outcome, **named)

    def comes(*outcome: P.args, **named: P.kwargs) -> None:
        peer.arrive(life, partial(turn, *outcome, **named))

    return comes


def _serve_in_turn(target: GossipPeer, serve: Callable[[], None]) -> None:
    target.arrive(target.life, serve)


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
