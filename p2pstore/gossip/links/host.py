"""The control host: admitted, encrypted connections to other peers. Shell.

Sockets, dialling and tasks are ours instead of libp2p's Swarm and BasicHost: those leak sockets when cancelled, end
the process when a handler raises, listen with SO_REUSEPORT (two peers on one port would each get half of the
connections), wait 250 ms in every dial, and dial on their own. (`secured_connections` says what of libp2p is used,
`yamux` why yamux is ours.) Every connection is a task of the host's nursery, and a failure in it ends that connection
with one line in the log.

Connections with the peers named to its `keeper` stay open; others are closed, with a farewell, when they were
unused for a while or there are too many.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import trio

from p2pstore.access.crowding import ConnectionLimits
from p2pstore.access.keyring import AllowList, KeyRing
from p2pstore.errors import ProtocolError
from p2pstore.gossip.links.admission import NONCE_BYTES, AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.connection_keeper import Attempts, Connection, ConnectionKeeper, Connections
from p2pstore.gossip.links.control_link import (
    ADMISSION_SECONDS,
    Handler,
    LinkError,
    admit_stream,
    open_asking_stream,
)
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.multiplexer import MuxedStream
from p2pstore.gossip.links.secured_connections import (
    Arrivals,
    Dialler,
    Refusals,
    Securing,
    call_back,
    contain_logging,
    negotiate_control,
    reason_of,
    select_control,
)
from p2pstore.gossip.links.sockets import listen_tcp
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.runtime.byte_budget import ByteBudget
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.wire import Message

logger = logging.getLogger("p2pstore.host")

_S = TypeVar("_S", Opener, Listener)

MAX_ADMITTED: Final = 256
"""Connections of members. The keeper closes unused ones from 192 on; a member that comes when all are in use
takes the place of one, or is refused (`crowding.yielding`)."""
MAX_FAREWELLS: Final = 3
"""A request that crosses the farewell of an idle connection is made again; more often than this is no chance."""
FAREWELL_SECONDS: Final = 0.5
"""By when a connection has ended whose stream is lost."""
CONNECTING_SECONDS: Final = 15.0
"""By when a connection has been made, also when no request waits for it any more."""


class _Farewell(LinkError):
    """The connection was closed as useless while a request was on its way: it was not read, and may be made again."""


def _ignore(_address: str, _reason: str) -> None:
    return


@dataclass(slots=True, kw_only=True)
class HostSettings:
    """Settings and callbacks of a control host: `handler` for members, `readers` for those that may only read (None:
    refused), `on_lost(peer_id)` when a member's last connection ended unintended, `on_refused(address, reason)` for
    what was dropped of a stranger. `allowed` is the allow list; `budget` bounds what is held for others."""

    identity: Identity
    ring: KeyRing
    cluster: str
    handler: Handler
    on_lost: Callable[[PeerId], None]
    software: str
    on_refused: Callable[[str, str], None] = _ignore
    allowed: AllowList = field(default_factory=AllowList)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    readers: Handler | None = None
    budget: ByteBudget = field(default_factory=ByteBudget)

    def side(self, side: type[_S], peer_id: PeerId) -> _S:
        """This peer's side of an admission, as opener or listener, with `peer_id`."""
        return side(
            ring=self.ring,
            allowed=self.allowed,
            cluster=self.cluster,
            own_id=self.identity.peer_id,
            peer_id=peer_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            software=self.software,
        )


class ControlHost:
    """This peer's connections. Made by `open_control_host`."""

    listening: tuple[str, int]
    """Host and port, the real one when port 0 was asked."""

    def __init__(self, listener: socket.socket, settings: HostSettings) -> None:
        host, port = listener.getsockname()[:2]
        self.listening = (host, port)
        self.settings = settings
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery
        self._refusals = Refusals(settings.on_refused)
        self.connections = Connections()
        self.keeper = ConnectionKeeper(self.connections, settings.limits)
        self._attempts: Attempts[Connection] = Attempts(CONNECTING_SECONDS)
        self._closing = False
        securing = Securing(settings.identity, settings.budget, self._accept_stream, self._drop)
        self.dialler = Dialler(securing, settings.identity.peer_id, self._start)
        self.arrivals = Arrivals(listener, securing, self._refusals, self._serve)

    async def discover(self, address: str, timeout_seconds: float) -> PeerId:
        """The id that the peer at `HOST:PORT` (any record of a host name) proves with its key; the first `ask` shows
        whether it belongs to the cluster. Raises `LinkError`."""
        return (await self.dialler.dial(None, [address], timeout_seconds)).peer_id

    async def ask(
        self,
        peer_id: PeerId,
        addresses: Sequence[str],
        kind: int,
        request: Message,
        timeout_seconds: float,
    ) -> Message:
        """The peer's reply, over the one stream for our requests; connects at need, trying `addresses` in turn. Raises
        `LinkError`; `ValueError` when the request is over 4 MiB."""
        try:
            with trio.fail_after(timeout_seconds):
                for _ in range(MAX_FAREWELLS):
                    with suppress(_Farewell):
                        return await self._ask(peer_id, addresses, kind, request)
                raise LinkError(f"{format_peer_id(peer_id)} closes every connection at once")
        except trio.TooSlowError:
            raise LinkError(
                f"{format_peer_id(peer_id)} did not answer within {timeout_seconds:g} s"
            ) from None

    async def disconnect(self, peer_id: PeerId) -> None:
        """End all connections with a peer, and attempts to make one; `on_lost` is not called."""
        await self._attempts.end(peer_id)
        for connection in list(self.connections.get(peer_id, ())):
            connection.parting = True
            connection.abort()
            await connection.ended.wait()
        await trio.lowlevel.checkpoint()

    def recheck(self) -> None:
        """Ring or allow list were replaced: end connections not admitted now. Connections that are wanted are opened
        anew."""
        for connection in self.connections.each():
            self._recheck(connection)

    def _recheck(self, connection: Connection) -> None:
        if not connection.admitted:
            return  # its streams are yet to be admitted, by what holds then
        if not self.settings.allowed.allows(connection.peer_id):
            reason = "it is not on the allow list any more"
        elif not all(map(self.settings.ring.find, connection.key_ids)):
            reason = "it was admitted with a cluster key that was removed"
        else:
            return
        who = format_peer_id(connection.peer_id)
        logger.info("closing the connection with %s at %s: %s", who, connection.address, reason)
        connection.abort()

    def connected(self) -> list[PeerId]:
        """Peers with an admitted stream in either direction."""
        return [
            peer_id
            for peer_id, connections in self.connections.items()
            if any(connection.admitted for connection in connections)
        ]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `close`."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.arrivals.run, self._nursery)
                self._nursery.start_soon(self.keeper.run)
                task_status.started()

    def close(self) -> None:
        """Stop listening and end all connections, without waiting. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._refusals.silence()
        self.arrivals.close()
        for connection in self.connections.each():
            connection.abort()
        self._scope.cancel()

    async def _ask(
        self, peer_id: PeerId, addresses: Sequence[str], kind: int, request: Message
    ) -> Message:
        connection = await self._asking(peer_id, addresses)
        assert connection.asking is not None
        try:
            return await connection.asking.ask(kind, request)
        except LinkError as error:
            if not error.refused:
                await self._notice_farewell(connection)
            raise

    async def _notice_farewell(self, connection: Connection) -> None:
        """Raise `_Farewell` if that is why a request failed. A write may fail before the farewell was read."""
        with trio.move_on_after(FAREWELL_SECONDS):
            await connection.ended.wait()
        if connection.muxed.session.said_goodbye or connection.unused:
            raise _Farewell("the connection was closed just when it was used")

    async def _asking(self, peer_id: PeerId, addresses: Sequence[str]) -> Connection:
        """A connection with a usable stream for our requests, made in the host's own time: a request that gives up
        waiting leaves the attempt to the next one. Raises `LinkError`."""
        connection = self.keeper.newest(peer_id)
        if connection is not None and connection.can_ask:
            return connection
        if self._closing:
            raise LinkError("this peer stops")
        if connection is None:
            connect = partial(self._connect, peer_id, addresses)
            return await self._attempts.join(self._nursery, peer_id, tuple(addresses), connect)
        reopen = partial(self._open_asking, connection)
        return await self._attempts.join(self._nursery, peer_id, connection, reopen)

    async def _connect(self, peer_id: PeerId, addresses: Sequence[str]) -> Connection:
        connection = await self.dialler.dial(peer_id, addresses, CONNECTING_SECONDS)
        return await self._open_asking(connection)

    def _drop(self, connection: Connection, why: str) -> None:
        who = format_peer_id(connection.peer_id)
        self._refusals.dropped(connection.address, f"{who}: {why}")
        connection.abort()

    async def _open_asking(self, connection: Connection) -> Connection:
        """The connection, with a stream for our requests. Raises `LinkError`."""
        who = f"{format_peer_id(connection.peer_id)} at {connection.address}"
        assert connection.nursery is not None
        connection.activity.begin()
        try:
            async with connection.opening:
                if not connection.can_ask:
                    await connection.nursery.start(self._run_asking, connection)
            return connection
        except AdmissionRefused as refusal:
            self._refusals.log(connection.address, f"not admitted by {who}")
            raise LinkError(f"{who}: {refusal}", refused=True, code=refusal.code) from None
        except Exception as error:  # RuntimeError when the connection ends meanwhile
            await self._notice_farewell(connection)
            raise LinkError(f"no stream to {who}: {reason_of(error)}") from None
        finally:
            connection.activity.end()

    async def _run_asking(
        self, connection: Connection, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        stream = await connection.muxed.open_stream()
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await select_control(stream)
            side = self.settings.side(Opener, connection.peer_id)
            asking = await open_asking_stream(stream, side, connection.activity, connection.account)
            await stream.lift_allowance()
            with connection.using(asking.key_id):
                self._admitted(connection)
                connection.asking = asking
                task_status.started()
                try:
                    await asking.run()
                except OSError as error:
                    logger.debug("stream to %s: %s", connection.address, error)
                except ProtocolError as error:
                    self._refusals.dropped(connection.address, str(error))
        finally:
            await stream.close()

    def _admitted(self, connection: Connection) -> None:
        self.arrivals.admitted(connection)
        self.keeper.review()  # strangers did not count
        self._recheck(connection)  # a reload may have come between proof and welcome

    async def _start(self, connection: Connection) -> None:
        self.keeper.counts.opened += 1
        await self._nursery.start(self._run_connection, connection)

    async def _serve(self, connection: Connection) -> None:
        self.keeper.counts.accepted += 1
        if connection.peer_id == self.settings.identity.peer_id:  # `discover` of our own address
            connection.account.close()
            self.dialler.own_dial_arrived()
        else:
            await self._run_connection(connection)

    async def _run_connection(
        self, connection: Connection, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Everything that happens on a connection; ends, without an error, when it does."""
        try:
            async with trio.open_nursery() as nursery:
                connection.nursery = nursery
                self.connections.add(connection)
                self.keeper.review()
                for task in (self._run_muxer, self._end_when_useless):
                    nursery.start_soon(task, connection)
                task_status.started()
        except* OSError as group:  # the ordinary end
            logger.debug("connection with %s: %s", connection.address, reason_of(group))
        except* Exception as group:
            self._refusals.dropped(connection.address, reason_of(group))
        finally:
            connection.abort()
            connection.account.close()
            connection.ended.set()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connections = self.connections.remove(connection)
        if connection.muxed.session.said_goodbye and not connection.parting:
            self.keeper.counts.closed_by_others += 1
        others = any(each.ever_admitted for each in connections)
        lost = connection.ever_admitted and not connection.parted
        if lost and not others and not self._closing:
            call_back(partial(self.settings.on_lost, connection.peer_id))

    async def _run_muxer(self, connection: Connection) -> None:
        try:
            await connection.muxed.run()
        finally:
            connection.abort()

    async def _end_when_useless(self, connection: Connection) -> None:
        with connection.useless:
            await trio.sleep_forever()
        who = format_peer_id(connection.peer_id)
        self._refusals.dropped(connection.address, f"{who} opened no stream that was admitted")
        connection.abort()

    def _accept_stream(self, connection: Connection, stream: MuxedStream) -> None:
        assert connection.nursery is not None
        connection.nursery.start_soon(self._serve_stream, connection, stream)

    async def _serve_stream(self, connection: Connection, stream: MuxedStream) -> None:
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await negotiate_control(stream)
            answering = await admit_stream(
                stream,
                self.settings.side(Listener, connection.peer_id),
                self.settings.handler,
                may_come=partial(self.keeper.make_room, connection, MAX_ADMITTED),
                activity=connection.activity,
                readers=self.settings.readers,
                account=connection.account,
            )
            with connection.using(answering.key_id):
                await stream.lift_allowance()
                self._admitted(connection)
                await answering.run()
        except AdmissionRefused as refusal:
            who = format_peer_id(connection.peer_id)
            self._refusals.dropped(connection.address, f"{who}: {refusal}")
        except OSError as error:
            logger.debug("stream from %s: %s", connection.address, error)
        except Exception as error:  # a ProtocolError, or what the library made of a bad negotiation
            self._refusals.dropped(connection.address, reason_of(error))
        finally:
            await stream.close()


@asynccontextmanager
async def open_control_host(
    listen: tuple[str, int | None], settings: HostSettings
) -> AsyncIterator[ControlHost]:
    """A host that listens at `listen` (port 0: any; None: the default one, or any when that is taken) until the block
    ends. Call `recheck` after ring or allow list changed; tell `keeper` the peers to stay connected with. Raises
    `ConfigError` when the address cannot be bound. Errors of the block come out as themselves."""
    contain_logging()
    host = ControlHost(await listen_tcp(*listen), settings)
    async with open_background_nursery() as nursery:
        try:
            await nursery.start(host.run)
            yield host
        finally:
            host.close()
