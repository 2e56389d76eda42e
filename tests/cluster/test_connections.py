"""Connections over their life: kept for neighbours, closed with a farewell when idle or too many; no leaks."""

import contextlib
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from p2pstore.access.crowding import ConnectionLimits
from p2pstore.gossip.gossip_messages import Ack, ControlKind, PingRequest
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost, HostSettings
from p2pstore.gossip.records import PeerId
from p2pstore.wire import Empty, Message
from tests.cluster.peers import cluster
from tests.cluster.test_control_host import Seen, address_of, opened, peer_id, ping
from tests.waiting import until

BRIEF = ConnectionLimits(idle_seconds=0.2)
FEW = ConnectionLimits(idle_seconds=1_000.0, max_open=6)


@dataclass
class Party:
    """Some hosts that can reach each other."""

    hosts: list[ControlHost]
    seen: list[Seen]

    def id(self, place: int) -> PeerId:
        return peer_id(place + 1)

    async def ping(self, asker: int, target: int) -> None:
        await ping(self.hosts[asker], self.id(target), address_of(self.hosts[target]))

    def open(self, place: int) -> int:
        return len(self.hosts[place].connections.each())

    @property
    def lost(self) -> list[PeerId]:
        return [peer for seen in self.seen for peer in seen.lost]


@contextlib.asynccontextmanager
async def party(count: int, *limits: ConnectionLimits) -> AsyncIterator[Party]:
    """Hosts with these limits, the last ones for all further hosts."""
    async with contextlib.AsyncExitStack() as stack:
        seen = [Seen() for _ in range(count)]
        hosts = [
            await stack.enter_async_context(
                opened(place + 1, seen[place], limits=limits[min(place, len(limits) - 1)])
            )
            for place in range(count)
        ]
        with trio.fail_after(60):
            yield Party(hosts, seen)


async def test_an_idle_connection_is_closed_by_who_opened_it_and_is_no_loss() -> None:
    async with party(2, BRIEF) as two:
        await two.ping(0, 1)
        assert two.open(0) == 1
        await until(lambda: two.open(0) == two.open(1) == 0)
        assert two.hosts[0].keeper.counts.closed_idle == 1
        assert two.hosts[1].keeper.counts.closed_idle == 0
        assert two.hosts[1].keeper.counts.closed_by_others == 1
        assert not two.lost
        await two.ping(0, 1)
        await two.ping(1, 0)
        assert two.hosts[0].keeper.counts.opened == 2
        assert two.hosts[1].keeper.counts.accepted == 2


async def test_the_listener_never_closes_an_idle_connection() -> None:
    async with party(2, ConnectionLimits(), BRIEF) as two:
        await two.ping(0, 1)
        await two.ping(1, 0)
        with trio.move_on_after(0.6):  # three times what is idle there
            await until(lambda: two.open(1) == 0)
        assert two.open(0) == two.open(1) == 1


async def test_neighbours_stay_connected_until_they_are_none() -> None:
    async with party(3, BRIEF) as three:
        three.hosts[0].keeper.keep([three.id(1)])
        await three.ping(0, 1)
        await three.ping(0, 2)
        await until(lambda: three.hosts[0].connected() == [three.id(1)])
        await until(lambda: three.open(2) == 0)
        with trio.move_on_after(0.5):
            await until(lambda: three.open(0) == 0)
        assert three.hosts[0].connected() == [three.id(1)]
        three.hosts[0].keeper.keep([])
        await until(lambda: three.open(0) == 0)
        assert three.hosts[0].keeper.counts.closed_idle == 2


async def test_a_peer_whose_neighbour_hangs_up_connects_itself_and_keeps_that() -> None:
    """A connection lives when either side has a use for it: the listener's use makes it the opener."""
    async with party(2, BRIEF) as two:
        two.hosts[1].keeper.keep([two.id(0)])
        await two.ping(0, 1)
        await until(lambda: two.open(1) == 0)
        await two.ping(1, 0)
        with trio.move_on_after(0.5):
            await until(lambda: two.open(1) == 0)
        assert two.open(0) == two.open(1) == 1


async def test_a_connection_with_a_request_under_way_is_not_closed() -> None:
    """Whichever side asks: the gate is opened long after the connection became idle otherwise."""
    for asker, target in ((0, 1), (1, 0)):
        async with party(2, BRIEF) as two:
            await two.ping(0, 1)
            replies: list[Any] = []

            async def hold(asker: int, target: int, two: Party, replies: list[Any]) -> None:
                replies.append(
                    await two.hosts[asker].ask(
                        two.id(target), [], ControlKind.PING_REQUEST, PingRequest(b"", 1), 30
                    )
                )

            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold, asker, target, two, replies)
                await until(partial(held, two, target))
                with trio.move_on_after(0.7):
                    await until(partial(alone, two))
                assert two.open(0) == 1
                two.seen[target].gate.set()
            assert replies == [Ack(0, [])]
            await until(partial(alone, two))


def held(party: Party, place: int) -> bool:
    return party.seen[place].held > 0


def alone(party: Party) -> bool:
    return party.open(0) == 0


async def test_requests_that_cross_a_farewell_are_sent_again() -> None:
    """A host that closes after a twentieth of a second, asked all the time by both sides: nothing fails."""
    hasty = ConnectionLimits(idle_seconds=0.05)
    async with party(2, hasty) as two:
        rng = Random(1)

        async def ask(asker: int) -> None:
            while sum(host.keeper.counts.closed_idle for host in two.hosts) <= 10:
                await two.ping(asker, 1 - asker)
                await trio.sleep(rng.uniform(0.0, 0.12))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 0)
                nursery.start_soon(ask, 1)
        assert not two.lost


async def test_over_the_limit_the_longest_unused_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstore.access.crowding.SPARE_AFTER_SECONDS", 0.0)
    async with party(12, FEW, ConnectionLimits()) as many:
        hub = many.hosts[0]
        hub.keeper.keep([many.id(1)])
        for other in (1, 2, 3, 4, 5, 6):
            await many.ping(0, other)
        assert many.open(0) == 6
        await many.ping(0, 2)  # no longer the longest unused
        for newcomer in (7, 8):  # of others as well
            await many.ping(newcomer, 0)
            await until(lambda: many.open(0) == 6)
        assert set(hub.connected()) == {many.id(place) for place in (1, 2, 5, 6, 7, 8)}
        assert hub.keeper.counts.closed_surplus == 2
        await until(lambda: many.open(3) == many.open(4) == 0)
        assert not many.lost


async def test_forty_hosts_with_room_for_a_few_reach_each_other_whenever_they_want() -> None:
    """A cluster larger than what a peer may hold: no request fails, and no peer is taken for lost."""
    async with party(40, ConnectionLimits(idle_seconds=0.3, max_open=8)) as many:
        rng = Random(2)
        for place, host in enumerate(many.hosts):
            host.keeper.keep(many.id(other) for other in rng.sample(range(40), 4) if other != place)

        async def talk(place: int) -> None:
            for target in rng.sample(range(40), 6):
                if target != place:
                    await many.ping(place, target)

        async with trio.open_nursery() as nursery:
            for place in range(40):
                nursery.start_soon(talk, place)
        await until(lambda: all(many.open(place) <= 8 for place in range(40)), 20)
        assert not many.lost


async def test_peers_keep_the_connections_with_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three peers that close what is idle for half a second: all are neighbours, so nothing is."""
    settings = partial(HostSettings, limits=ConnectionLimits(idle_seconds=0.5))
    monkeypatch.setattr("p2pstore.peer.assembly.HostSettings", settings)
    async with cluster(tmp_path, 3) as peers:
        nodes = [peer.node for peer in peers]
        for node in nodes:
            others = {other.core.peer_id for other in nodes if other is not node}
            await until(lambda node=node, others=others: node.host.keeper.kept == others)  # type: ignore[misc]
        await until(lambda: all(len(node.host.connected()) == 2 for node in nodes))
        before = [node.host.keeper.counts.opened for node in nodes]
        with trio.move_on_after(1.5):
            await until(lambda: any(node.host.keeper.counts.closed_idle for node in nodes))
        assert [node.host.keeper.counts.opened for node in nodes] == before
        document = nodes[0].statistics.document()["connections"]
        assert (document["neighbours"], document["closed_idle"]) == (2, 0)
        assert document["open"] >= 2
        assert document["opened"] + document["accepted"] >= 2


def counted() -> tuple[int, int]:
    """Open descriptors and living tasks."""
    return len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living


async def test_connections_that_come_and_go_leak_nothing() -> None:
    """Ended in every way: idle, disconnected, cancelled while dialling, the other side gone, refused."""
    gc.collect()  # what another test left
    async with party(2, ConnectionLimits(idle_seconds=0.02)) as two:
        host, other = two.hosts
        rng = Random(3)

        async def rounds(count: int) -> None:
            for _ in range(count):
                match rng.choice([0, 1, 1, 2, 2, 2, 3, 3]):
                    case 0:
                        await two.ping(0, 1)
                        await until(lambda: not host.connections)
                    case 1:
                        await until(lambda: not other.connections)  # none of a cancelled dial
                        await two.ping(1, 0)
                        await host.disconnect(two.id(1))
                    case 2:
                        with trio.move_on_after(rng.uniform(0.0, 0.008)):
                            await two.ping(0, 1)
                    case 3:
                        await two.ping(0, 1)
                        for connection in host.connections.get(two.id(1), ()):
                            connection._sock.abort()
                        await until(lambda: not host.connections)

        async def settled() -> tuple[int, int]:
            await until(lambda: not host.connections and not other.connections)
            await until(lambda: not len(host.arrivals.strangers) and not len(other.arrivals.strangers))
            await until(lambda: not len(host._attempts) and not len(other._attempts))
            with trio.move_on_after(1):  # the last tasks end
                await until(lambda: counted() == before)
            return counted()

        before = (0, 0)
        await rounds(40)
        before = await settled()
        gc.collect()
        objects = len(gc.get_objects())
        await rounds(400)
        assert await settled() == before
        gc.collect()
        assert len(gc.get_objects()) < objects + 1_000  # some 200 for each connection that stayed
        assert not len(host._attempts)
        for each in (host, other):
            assert not each.keeper.admitted()
            assert not each.settings.budget.held_bytes


async def test_a_peer_that_hangs_up_on_every_request_is_not_dialled_for_ever() -> None:
    async with party(2, ConnectionLimits()) as two:

        async def hang_up(_peer_id: PeerId, _kind: int, _request: Message) -> Message:
            for connection in two.hosts[1].connections[two.id(0)]:
                await connection.muxed.say_goodbye()
                connection.abort()
            return Empty()

        two.hosts[1].settings.handler = hang_up
        with pytest.raises(LinkError, match="closes every connection"):
            await two.ping(0, 1)
        assert two.hosts[0].keeper.counts.opened == 3


async def test_requests_leave_nothing_behind_whatever_becomes_of_them() -> None:
    async with party(2, ConnectionLimits()) as two:
        two.seen[1].gate.set()
        rng = Random(4)
        request = PingRequest(b"", 1)
        await two.ping(0, 1)
        for _ in range(200):
            with trio.move_on_after(rng.choice([0, 0.0005, 1])):
                await two.hosts[0].ask(two.id(1), [], ControlKind.PING_REQUEST, request, 1)
        for place in (0, 1):
            [[connection]] = two.hosts[place].connections.values()
            await until(lambda connection=connection: not connection.activity.in_flight)  # type: ignore[misc]
            assert connection.asking is None or not connection.asking._pending


async def test_the_end_of_one_of_two_connections_is_no_loss() -> None:
    async with party(2, ConnectionLimits()) as two:
        await two.ping(0, 1)
        await two.hosts[0].discover(address_of(two.hosts[1]), 10)
        await two.ping(0, 1)  # on the newer one
        older, newer = two.hosts[0].connections[two.id(1)]
        older.abort()
        await until(older.ended.is_set)
        assert two.hosts[0].connections[two.id(1)] == [newer]
        assert not two.seen[0].lost
        newer.abort()
        await until(lambda: two.seen[0].lost == [two.id(1)])


async def test_disconnecting_fails_what_is_under_way_and_does_not_dial_again() -> None:
    async with party(2, ConnectionLimits()) as two:
        await two.ping(0, 1)
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                request = PingRequest(b"", 1)
                addresses = [address_of(two.hosts[1])]
                with pytest.raises(LinkError, match="lost"):
                    await two.hosts[0].ask(two.id(1), addresses, ControlKind.PING_REQUEST, request, 30)

            nursery.start_soon(hold)
            await until(lambda: two.seen[1].held)
            await two.hosts[0].disconnect(two.id(1))
        assert two.hosts[0].keeper.counts.opened == 1
        assert two.open(0) == 0
