"""One authenticated connection and what it is used for. Shell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import trio

from p2pstore.gossip.links.connection_limits import Use
from p2pstore.gossip.links.control_link import ADMISSION_SECONDS, Activity, AskingStream
from p2pstore.gossip.links.multiplexer import Multiplexer
from p2pstore.gossip.links.sockets import GuardedSocket
from p2pstore.gossip.records import PeerId
from p2pstore.runtime.byte_budget import Account

_STRANGER_BYTES: Final = 256 * 1024
"""All that a connection may carry before it is admitted: a handshake is 1 KiB."""


@dataclass(slots=True)
class ConnectionCounts:
    """What became of this host's connections since it was opened."""

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
        self,
        peer_id: PeerId,
        address: str,
        sock: GuardedSocket,
        account: Account,
        *,
        incoming: bool,
    ) -> None:
        """`account` holds what this process keeps of what came, and what is to go."""
        self.peer_id = peer_id
        self.account = account
        self.incoming = incoming
        self.address = address
        self.asking: AskingStream | None = None
        self.opening = trio.Lock()
        """Held by who opens that stream."""
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
        self._used = trio.Event()
        self._unused = trio.Event()
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
        return self.parting or self.muxed.said_goodbye

    def use(self, *, kept: bool) -> Use:
        """The facts that decide whether it stays open."""
        activity, owner = self.activity, self.account.owner
        return Use(
            kept,
            not self.incoming,
            activity.in_flight > 0,
            activity.used_at,
            owner.host,
            owner.member,
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
        if len(self.key_ids) == 1:
            self._used.set()
            self._unused = trio.Event()
        try:
            yield
        finally:
            self.key_ids.remove(key_id)
            if not self.key_ids:
                self._unused.set()
                self._used = trio.Event()

    async def wait_useless(self) -> None:
        """Return when there has been no admitted stream for 10 s."""
        while True:
            with trio.move_on_after(ADMISSION_SECONDS) as scope:
                await self._used.wait()
            if scope.cancelled_caught:
                return
            await self._unused.wait()

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
        """A connection was made."""
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
        """All of them now."""
        return list(chain.from_iterable(self.values()))

    @property
    def carried(self) -> ControlBytes:
        """Bytes carried by all connections since the start."""
        return self._ended.plus(self.each())

    def key_ids(self, peer_id: PeerId) -> list[bytes]:
        """The ids of the keys with which this peer's streams were admitted."""
        return [key_id for connection in self.get(peer_id, ()) for key_id in connection.key_ids]
