"""Keeps a host's connections with neighbours, and closes those without a use. Shell around `connection_limits`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import trio

from p2pstore.access.crowding import Holder, yielding
from p2pstore.gossip.links.connection_limits import (
    SPARE_AFTER_SECONDS,
    ConnectionLimits,
    idle,
    next_due,
    surplus,
)
from p2pstore.gossip.links.control_connection import Connection, ConnectionCounts
from p2pstore.gossip.records import PeerId


class ConnectionKeeper:
    """Watches over `connections`, the newest of each peer last. Call `review` when one was added."""

    def __init__(
        self, connections: Mapping[PeerId, Sequence[Connection]], limits: ConnectionLimits
    ) -> None:
        self.counts = ConnectionCounts()
        self.kept: frozenset[PeerId] = frozenset()
        self._connections = connections
        self._limits = limits
        self._review = trio.Event()
        self._closing: list[Connection] = []
        """Those that `make_room` chose."""

    def keep(self, peer_ids: Iterable[PeerId]) -> None:
        """From now on connections with these peers, and only these, stay open while they are idle."""
        self.kept = frozenset(peer_ids)
        self.review()

    def review(self) -> None:
        """Look again: something changed."""
        self._review.set()

    def newest(self, peer_id: PeerId) -> Connection | None:
        """The newest connection that nobody is closing. A peer that came back without a word, after its
        machine lost power, does not hear what is said on an older one."""
        for connection in reversed(self._connections.get(peer_id, ())):
            if not connection.parted:
                return connection
        return None

    async def run(self) -> None:
        """Close what has no use, until cancelled. Nothing wakes it while all connections have one."""
        async with trio.open_nursery() as nursery:
            while True:
                self._review = trio.Event()
                with trio.move_on_at(self._close_unused(nursery)):
                    await self._review.wait()

    def admitted(self) -> list[Connection]:
        """Those of members that nobody is closing."""
        return [
            each
            for some in self._connections.values()
            for each in some
            if each.ever_admitted and not each.parted
        ]

    def holders(self) -> list[Holder]:
        """Who has the places of `admitted`, in its order. A neighbour's counts as being in use."""
        now = trio.current_time()
        return [self._holder(each, now) for each in self.admitted()]

    def _holder(self, connection: Connection, now: float) -> Holder:
        owner, activity = connection.account.owner, connection.activity
        busy = (
            activity.in_flight > 0
            or activity.used_at + SPARE_AFTER_SECONDS > now
            or self._is_kept(connection)
        )
        return Holder(owner.host, owner.member, busy, activity.used_at)

    def make_room(self, newcomer: Connection, limit: int) -> bool:
        """Whether a connection may be admitted beside the others: at most `limit`, of which one may have to go for
        it."""
        if newcomer.ever_admitted:
            return True  # one stream more
        connections = self.admitted()
        if len(connections) < limit:
            return True
        owner = newcomer.account.owner
        place = yielding(self.holders(), owner.host, owner.member, limit)
        if place is None:
            self.counts.refused_full += 1
            return False
        self.counts.yielded += 1
        self._part_soon(connections[place])
        return True

    def _part_soon(self, connection: Connection) -> None:
        connection.parting = connection.unused = True
        self._closing.append(connection)
        self.review()

    def _close_unused(self, nursery: trio.Nursery) -> float:
        """Close what is to be closed now. When to look again."""
        closing, self._closing = self._closing, []
        for connection in closing:
            nursery.start_soon(_part, connection)
        connections = [
            each
            for some in self._connections.values()
            for each in some
            if not each.parted and (each.ever_admitted or not each.incoming)
        ]
        uses = [each.use(kept=self._is_kept(each)) for each in connections]
        now = trio.current_time()
        unused = idle(uses, now, self._limits)
        excess = [place for place in surplus(uses, now, self._limits) if place not in unused]
        self.counts.closed_idle += len(unused)
        self.counts.closed_surplus += len(excess)
        for place in unused + excess:
            connections[place].parting = connections[place].unused = True
            nursery.start_soon(_part, connections[place])
        return next_due(uses, now, self._limits)

    def _is_kept(self, connection: Connection) -> bool:
        """Whether it leads to a neighbour, and is not the spare one of two."""
        return connection.peer_id in self.kept and self.newest(connection.peer_id) is connection


async def _part(connection: Connection) -> None:
    """Close a connection with a farewell, so that the other side does not take it for a loss."""
    await connection.muxed.say_goodbye()
    connection.abort()
