"""Probes and lost connections among real peers in one trio loop."""

from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from p2pstore.gossip.gossip_messages import Ack, ControlKind, PingRequest, Status
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.records import PeerId
from p2pstore.peer import Peer
from p2pstore.wire import Message
from tests.cluster.peers import cluster
from tests.waiting import until

Answered = list[tuple[int, Message, Message | None]]


def id_of(peer: Peer) -> PeerId:
    return peer.node.core.peer_id


def holds(peer: Peer, other: Peer, status: Status) -> bool:
    state = peer.node.core.gossip.membership.get(id_of(other))
    return state is not None and state.status is status


def acquainted(peers: Sequence[Peer]) -> Callable[[], bool]:
    return lambda: all(holds(p, o, Status.ALIVE) for p in peers for o in peers if o is not p)


def cut(peer: Peer, other: Peer) -> Answered:
    """From now on what `peer` asks `other` is lost. (kind, request, reply) of all that it asks the rest."""
    seen: Answered = []
    ask = peer.node.host.ask

    async def lossy(
        peer_id: PeerId, addresses: Sequence[str], kind: int, request: Message, timeout_seconds: float
    ) -> Message:
        if peer_id == id_of(other):
            await trio.sleep(timeout_seconds)
            raise LinkError("lost")
        try:
            reply = await ask(peer_id, addresses, kind, request, timeout_seconds)
        except LinkError:
            seen.append((kind, request, None))
            raise
        seen.append((kind, request, reply))
        return reply

    peer.node.host.ask = lossy  # type: ignore[method-assign]
    return seen


def relayed(seen: Answered, target: Peer) -> list[Message | None]:
    """Replies to requests to ping the target."""
    return [
        reply
        for kind, request, reply in seen
        if kind == ControlKind.PING_REQUEST
        and isinstance(request, PingRequest)
        and request.peer_id == id_of(target)
    ]


async def test_who_cannot_be_reached_from_here_is_kept_by_those_who_reach_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, network="local") as peers:
        a, b, c = peers
        assert a.node.core.gossip.config.membership.probe_timeout_seconds == 0.2
        await until(acquainted(peers))
        doubts: list[Status] = []
        take_changes = a.node.core.gossip.take_changes

        def watched() -> list[object]:
            changes = take_changes()
            doubts.extend(each.new for each in changes)
            return list(changes)

        a.node.core.gossip.take_changes = watched  # type: ignore[assignment, method-assign]
        seen = cut(a, c)
        cut(c, a)
        await until(lambda: len(relayed(seen, c)) >= 3)
        assert all(isinstance(reply, Ack) for reply in relayed(seen, c))
        assert doubts == []
        assert holds(a, c, Status.ALIVE)
        assert len(b.node.control.later_replies) == 0


async def test_helpers_say_when_they_cannot_reach_it_either(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, network="local") as peers:
        a, b, c = peers
        await until(acquainted(peers))
        seen = cut(a, c)
        for one, other in ((c, a), (b, c), (c, b)):
            cut(one, other)
        await until(lambda: holds(a, c, Status.SUSPECT))
        assert not any(isinstance(reply, Ack) for reply in relayed(seen, c))
        assert holds(a, b, Status.ALIVE)
        await until(lambda: holds(a, c, Status.DEAD))
        assert a.node.core.gossip.membership.health.score <= 4  # its helper answered each time


async def test_a_reset_turns_readers_away_at_once_and_is_no_verdict(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as peers:
        a, _, c = peers
        await until(acquainted(peers))
        await until(lambda: id_of(c) in a.node.host.connected())
        core = a.node.core
        assert not core.holders.is_avoided(c.node.core.member, a.node.now)
        for connection in list(c.node.host.connections[id_of(a)]):
            connection.abort()
        await until(lambda: core.holders.is_avoided(c.node.core.member, a.node.now))
        assert holds(a, c, Status.ALIVE)
        await until(lambda: id_of(c) in a.node.host.connected())  # it was probed at once
        assert holds(a, c, Status.ALIVE)
        assert core.gossip.membership.own.incarnation == core.gossip.incarnation
