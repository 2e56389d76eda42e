"""Keeps a host's connections with neighbours, and closes those without a use. Shell around `connection_limits`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

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
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.records import PeerId, format_peer_id


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
        """The newest connection that is not being closed. A peer that came back without a word, after its
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
        """Those of members that are not being closed."""
        return [
            each
            for some in self._connections.values()
            for each in some
            if each.ever_admitted and not each.parted
        ]

    def holders(self) -> list[Holder]:
        """The holders of the places of `admitted`, in its order. A neighbour's counts as being in use."""
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


MAX_ATTEMPTS: Final = 256
"""Under way at once. Gossip talks to some dozens of peers at a time, and an attempt lasts seconds at most."""

T = TypeVar("T")


@dataclass(slots=True)
class _Attempt(Generic[T]):
    scope: trio.CancelScope
    ended: trio.Event = field(default_factory=trio.Event)
    result: T | None = None
    error: Exception | None = None


class Attempts(Generic[T]):
    """Attempts to get something of a peer: one per key, however many want it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._under_way: dict[tuple[PeerId, Hashable], _Attempt[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def join(
        self,
        nursery: trio.Nursery,
        peer_id: PeerId,
        key: Hashable,
        start: Callable[[], Awaitable[T]],
    ) -> T:
        """What the attempt with this key brings; `start()` makes it, in `nursery`, if none is under way.

        Raises what the attempt raised, and `LinkError` when it took too long, was ended, or is one too many.
        """
        attempt = self._under_way.get((peer_id, key))
        if attempt is None:
            if len(self._under_way) >= MAX_ATTEMPTS:
                raise LinkError(f"{MAX_ATTEMPTS} connections are being made already; try again")
            attempt = _Attempt(trio.CancelScope())
            nursery.start_soon(self._run, attempt, peer_id, key, start)  # raises when all is ending
            self._under_way[peer_id, key] = attempt
        await attempt.ended.wait()
        if attempt.error is not None:
            raise attempt.error.with_traceback(None)  # each who waits would add to it
        assert attempt.result is not None
        return attempt.result

    async def end(self, peer_id: PeerId) -> None:
        """End all attempts that concern a peer, and wait until they have: a task that wants one's outcome gets a
        `LinkError`."""
        ended = [each for (of, _), each in self._under_way.items() if of == peer_id]
        for attempt in ended:
            attempt.scope.cancel()
        for attempt in ended:
            await attempt.ended.wait()

    async def _run(
        self,
        attempt: _Attempt[T],
        peer_id: PeerId,
        key: Hashable,
        start: Callable[[], Awaitable[T]],
    ) -> None:
        who = format_peer_id(peer_id)
        deadline = trio.current_time() + self._timeout_seconds
        attempt.scope.deadline = min(attempt.scope.deadline, deadline)
        try:
            with attempt.scope:
                attempt.result = await start()
            if attempt.result is None:
                in_time = trio.current_time() < deadline
                why = "was ended" if in_time else f"took over {self._timeout_seconds:g} s"
                attempt.error = LinkError(f"connecting with {who} {why}")
        except Exception as error:  # it is for those who wait; this task's nursery has others' work
            attempt.error = error
        except BaseException:
            attempt.error = LinkError(f"connecting with {who} was ended: this peer stops")
            raise
        finally:
            if self._under_way.get((peer_id, key)) is attempt:
                del self._under_way[peer_id, key]
            attempt.ended.set()
