"""A host's connections: those with neighbours stay open, those without a use are closed. Shell around `crowding`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

import trio

from p2pstore.access.crowding import (
    SPARE_AFTER_SECONDS,
    ConnectionLimits,
    PlaceOwner,
    Use,
    idle,
    next_due,
    surplus,
    yielding,
)
from p2pstore.gossip.links.control_link import ADMISSION_SECONDS, Activity, AskingStream, LinkError
from p2pstore.gossip.links.multiplexer import Multiplexer
from p2pstore.gossip.links.sockets import GuardedSocket
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.runtime.byte_budget import Account


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

    def holders(self) -> list[PlaceOwner]:
        """The holders of the places of `admitted`, in its order. A neighbour's counts as being in use."""
        now = trio.current_time()
        return [self._holder(each, now) for each in self.admitted()]

    def _holder(self, connection: Connection, now: float) -> PlaceOwner:
        owner, activity = connection.account.owner, connection.activity
        busy = (
            activity.in_flight > 0
            or activity.used_at + SPARE_AFTER_SECONDS > now
            or self._is_kept(connection)
        )
        return PlaceOwner(owner.host, owner.member, busy, activity.used_at)

    def make_room(self, newcomer: Connection, limit: int) -> bool:
        """Whether a connection may be admitted beside the others: at most `limit`; one may have to go for it."""
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
        self, nursery: trio.Nursery, peer_id: PeerId, key: Hashable, start: Callable[[], Awaitable[T]]
    ) -> T:
        """The result of the attempt with this key; `start()` makes it, in `nursery`, if none is under way. Raises what
        that raised, and `LinkError` when it took too long, was ended, or is one too many."""
        attempt = self._under_way.get((peer_id, key))
        if attempt is None:
            if len(self._under_way) >= MAX_ATTEMPTS:
                raise LinkError(f"{MAX_ATTEMPTS} connections are being made already; try again")
            attempt = _Attempt(trio.CancelScope())
            nursery.start_soon(self._run, attempt, peer_id, key, start)  # raises when all is ending
            self._under_way[peer_id, key] = attempt
        await attempt.ended.wait()
        if attempt.error is not None:
            raise attempt.error.with_traceback(None)  # each waiting task would add to it
        assert attempt.result is not None
        return attempt.result

    async def end(self, peer_id: PeerId) -> None:
        """End all attempts that concern a peer, and wait for that: tasks that want an outcome get a `LinkError`."""
        ended = [each for (of, _), each in self._under_way.items() if of == peer_id]
        for attempt in ended:
            attempt.scope.cancel()
        for attempt in ended:
            await attempt.ended.wait()

    async def _run(
        self, attempt: _Attempt[T], peer_id: PeerId, key: Hashable, start: Callable[[], Awaitable[T]]
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
        except Exception as error:  # it is for the waiting tasks; this task's nursery has others' work
            attempt.error = error
        except BaseException:
            attempt.error = LinkError(f"connecting with {who} was ended: this peer stops")
            raise
        finally:
            if self._under_way.get((peer_id, key)) is attempt:
                del self._under_way[peer_id, key]
            attempt.ended.set()


_STRANGER_BYTES: Final = 256 * 1024
"""All that a connection may carry before it is admitted: a handshake is 1 KiB."""


@dataclass(slots=True)
class ConnectionCounts:
    """Counts of this host's connections since it was opened, by their fate."""

    opened: int = 0
    """By this side."""
    accepted: int = 0
    """Those of the other side whose identity was proved."""
    closed_idle: int = 0
    closed_surplus: int = 0
    """To stay within the limit."""
    closed_by_others: int = 0
    """With a farewell."""
    yielded: int = 0
    """Closed for one that was wanted when all places were taken."""
    refused_full: int = 0
    """Not admitted because all places were taken."""


class ControlBytes(NamedTuple):
    """Encrypted bytes that connections carried, both ways."""

    sent: int
    received: int

    def plus(self, connections: Iterable[Connection]) -> ControlBytes:
        """These and what `connections` carried."""
        each = list(connections)
        return ControlBytes(
            self.sent + sum(connection.sent_bytes for connection in each),
            self.received + sum(connection.received_bytes for connection in each),
        )


class Connection:
    """One authenticated connection; its tasks run in its own nursery. `muxed` is set before any of them."""

    muxed: Multiplexer

    def __init__(
        self, peer_id: PeerId, address: str, sock: GuardedSocket, account: Account, *, incoming: bool
    ) -> None:
        """`account` holds what this process keeps of what came, and what is to go."""
        self.peer_id = peer_id
        self.account = account
        self.incoming = incoming
        self.address = address
        self.asking: AskingStream | None = None
        self.opening = trio.Lock()
        """Held by the task that opens that stream."""
        self.activity = Activity()
        self.ever_admitted = False
        self.parting = False
        """Whether this side closes it on purpose."""
        self.unused = False
        """Whether that is because it was unused: a request that comes now may open another one."""
        self.ended = trio.Event()
        self.nursery: trio.Nursery | None = None
        self.stranger: trio.CancelScope | None = None
        """Of an incoming connection: its place among those that are not admitted yet."""
        self.key_ids: list[bytes] = []
        """The cluster key with which each admitted stream was admitted."""
        self._sock = sock
        self.useless = trio.CancelScope(deadline=trio.current_time() + ADMISSION_SECONDS)
        """Cancelled when there has been no admitted stream for 10 s."""
        sock.lift_allowance(self._check_received)

    @property
    def sent_bytes(self) -> int:
        """Encrypted, as all that went to the network."""
        return self._sock.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._sock.received_bytes

    @property
    def admitted(self) -> bool:
        return bool(self.key_ids)

    @property
    def can_ask(self) -> bool:
        """Whether there is a stream for our requests."""
        return self.asking is not None and self.asking.usable

    @property
    def parted(self) -> bool:
        """Whether either side closes it, or closed it, on purpose: its end is no loss."""
        return self.parting or self.muxed.session.said_goodbye

    def use(self, *, kept: bool) -> Use:
        """The facts that decide whether it stays open."""
        activity, owner = self.activity, self.account.owner
        return Use(
            kept, not self.incoming, activity.in_flight > 0, activity.used_at, owner.host, owner.member
        )

    def abort(self) -> None:
        """End the connection at once."""
        self._sock.abort()
        if self.nursery is not None:
            self.nursery.cancel_scope.cancel()

    @contextmanager
    def using(self, key_id: bytes) -> Iterator[None]:
        """An admitted stream exists inside."""
        self.ever_admitted = True
        self.key_ids.append(key_id)
        self.useless.deadline = math.inf
        try:
            yield
        finally:
            self.key_ids.remove(key_id)
            if not self.key_ids:
                self.useless.deadline = trio.current_time() + ADMISSION_SECONDS

    def _check_received(self) -> None:
        if not self.ever_admitted and self._sock.received_bytes > _STRANGER_BYTES:
            self._sock.abort()
            raise ConnectionResetError("it sends more than a handshake needs")


class Connections(dict[PeerId, list[Connection]]):
    """A host's connections by peer, the newest of each last; and the bytes of those that are over."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = ControlBytes(0, 0)

    def add(self, connection: Connection) -> None:
        self.setdefault(connection.peer_id, []).append(connection)

    def remove(self, connection: Connection) -> list[Connection]:
        """A connection has ended. The others of its peer."""
        self._ended = self._ended.plus([connection])
        others = self.get(connection.peer_id, [])
        with suppress(ValueError):
            others.remove(connection)
        if not others:
            self.pop(connection.peer_id, None)
        return others

    def each(self) -> list[Connection]:
        return list(chain.from_iterable(self.values()))

    @property
    def carried(self) -> ControlBytes:
        """Bytes carried by all connections since the start."""
        return self._ended.plus(self.each())

    def key_ids(self, peer_id: PeerId) -> list[bytes]:
        """The ids of the keys with which this peer's streams were admitted."""
        return [key_id for connection in self.get(peer_id, ()) for key_id in connection.key_ids]
