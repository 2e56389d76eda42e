"""The control host: admitted, encrypted connections to other peers. Shell; no other module uses `libp2p_parts`.

From libp2p come the peer id, Noise and multistream-select, and the wire is libp2p's own. Sockets, dialling
and tasks are ours instead of its `Swarm` and `BasicHost`: those leak sockets when cancelled, end
the process when a handler raises, listen with SO_REUSEPORT (two peers on one port would each get half of
the connections), wait 250 ms in every dial, and dial on their own. (Why yamux is ours too, `yamux` says.)
Here every connection is a task of the host's nursery, and whatever goes wrong in it ends that connection
with one line in the log.

Connections with the peers named to its `keeper` stay open; others are closed, with a farewell, when nobody has
used them for a while or there are too many.

Only Noise is offered: with libp2p's default choice a stranger negotiates plaintext and claims any identity.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import trio

from p2pstore.access.allowlist import AllowList
from p2pstore.access.crowding import Strangers, host_group
from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import join_address
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.links.admission import NONCE_BYTES, AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.connection_keeper import Attempts, ConnectionKeeper
from p2pstore.gossip.links.connection_limits import ConnectionLimits
from p2pstore.gossip.links.control_connection import Connection, ControlBytes
from p2pstore.gossip.links.control_link import (
    ADMISSION_SECONDS,
    Handler,
    LinkError,
    OwnAddress,
    TwinAddress,
    admit_stream,
    open_asking_stream,
    printable,
)
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.libp2p_parts import (
    ID,
    NOISE_PROTOCOL,
    Multiselect,
    MultiselectClient,
    MultiselectCommunicator,
    NoiseTransport,
    PeerIDMismatchesPubkey,
    RawConnection,
    SecurityMultistream,
    TProtocol,
    X25519PrivateKey,
    create_new_key_pair,
)
from p2pstore.gossip.links.multiplexer import Multiplexer, MuxedStream, Secured
from p2pstore.gossip.links.refusals import Refusals, call_back
from p2pstore.gossip.links.sockets import (
    Endpoint,
    GuardedSocket,
    connect,
    first_success,
    listen_tcp,
    resolve,
)
from p2pstore.gossip.links.yamux import PROTOCOL as YAMUX_PROTOCOL
from p2pstore.gossip.records import PeerId, format_peer_id, public_key_from_peer_id
from p2pstore.runtime.accepting import Accepting
from p2pstore.runtime.byte_budget import ByteBudget, Owner
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.wire import CONTROL_PROTOCOL, Message

logger = logging.getLogger("p2pstore.host")

_S = TypeVar("_S", Opener, Listener)

MAX_ADMITTED: Final = 256
"""Connections of members. The keeper closes those that nobody uses from 192 on; who comes when all of these are in use
takes the place of one, or is refused (`member_places`)."""
MAX_STRANGERS: Final = 256
"""Incoming connections that have not been admitted yet."""
MAX_STRANGERS_PER_HOST: Final = 128
MAX_STREAMS_PER_CONNECTION: Final = 4
"""Streams that the other side may have open: it needs one, and one more while that is replaced."""

MAX_FAREWELLS: Final = 3
"""A request that crosses the farewell of an idle connection is made again; more often than this is no chance."""
FAREWELL_SECONDS: Final = 0.5
"""By when a connection has ended whose stream is lost."""
CONNECTING_SECONDS: Final = 15.0
"""By when a connection has been made, whoever waits for it or does not any more."""
TCP_SECONDS: Final = 3.0
"""By when the other machine has answered at all. The kernel repeats itself ever less often: who is back would not
be noticed for long."""
OWN_ARRIVAL_SECONDS: Final = 2.0
"""By when a dial of this peer's own address has arrived here."""

_PROTOCOL: Final = TProtocol(CONTROL_PROTOCOL)
_YAMUX: Final = TProtocol(YAMUX_PROTOCOL)
_LIMITS: Final = ConnectionLimits()
_UPGRADE_BYTES: Final = 32 * 1024
"""What the other side may send before Noise and yamux are set up; they need about 500 bytes."""


class _Farewell(LinkError):
    """The connection was closed as useless while a request was on its way: it was not read, and may be made again."""


class _Forward(logging.Handler):
    """libp2p's log, mostly tracebacks about strangers, as single lines at DEBUG of this module's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            with suppress(TypeError, ValueError):  # a malformed log call of the library
                logger.debug("%s: %s", record.name, printable(record.getMessage()))


def _contain_logging() -> None:
    library = logging.getLogger("libp2p")
    if not any(isinstance(handler, _Forward) for handler in library.handlers):
        library.addHandler(_Forward())
    library.propagate = False


class ControlHost:
    """This peer's connections. Made by `open_control_host`; satisfies `p2pstore.gossip.links.control_link.Link`."""

    listening: tuple[str, int]
    """Host and port, the real one when port 0 was asked."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        identity: Identity,
        ring: KeyRing,
        allowed: AllowList,
        cluster: str,
        handler: Handler,
        on_lost: Callable[[PeerId], None],
        on_refused: Callable[[str, str], None],
        software: str,
        limits: ConnectionLimits,
        readers: Handler | None,
        budget: ByteBudget,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.listening = (host, port)
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery
        self._listener = listener
        self._identity = identity
        self._ring = ring
        self._allowed = allowed
        self._cluster = cluster
        self._handler = handler
        self._readers = readers
        self._on_lost = on_lost
        self._refusals = Refusals(on_refused)
        self._software = software
        self._connections: dict[PeerId, list[Connection]] = {}
        self._ended_bytes = ControlBytes(0, 0)
        """What connections carried that are over."""
        self.keeper = ConnectionKeeper(self._connections, limits)
        self._attempts: Attempts[Connection] = Attempts(CONNECTING_SECONDS)
        self._own_arrivals = 0
        self._own_arrived = trio.Event()
        self._strangers: Strangers[trio.CancelScope] = Strangers(
            MAX_STRANGERS, MAX_STRANGERS_PER_HOST
        )
        self._budget = budget
        self._closing = False
        self._noise = NoiseTransport(
            create_new_key_pair(identity.seed), noise_privkey=X25519PrivateKey.new()
        )
        self._security = SecurityMultistream({NOISE_PROTOCOL: self._noise})

    # --- what the peer calls -----------------------------------------------------------------

    async def discover(self, address: str, timeout_seconds: float) -> PeerId:
        """Who listens at `HOST:PORT` (every record of a host name is tried): connects, and returns the id that
        the other side proved with its key. Whether it belongs to the cluster the first `ask` shows.

        Raises `LinkError`.
        """
        connection = await self._dial(None, [address], timeout_seconds)
        return connection.peer_id

    async def ask(
        self,
        peer_id: PeerId,
        addresses: Sequence[str],
        kind: int,
        request: Message,
        timeout_seconds: float,
    ) -> Message:
        """The peer's reply, over the one stream for our requests; connects at need, trying `addresses` in turn.

        Raises `LinkError`; `ValueError` when the request is over 4 MiB.
        """
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

    @property
    def open_connections(self) -> int:
        """How many there are now, of both directions."""
        return sum(map(len, self._connections.values()))

    @property
    def carried(self) -> ControlBytes:
        """By all connections since the start."""
        return self._ended_bytes.plus(chain.from_iterable(self._connections.values()))

    async def disconnect(self, peer_id: PeerId) -> None:
        """End all connections with a peer, and attempts to make one; `on_lost` is not called."""
        await self._attempts.end(peer_id)
        for connection in list(self._connections.get(peer_id, ())):
            connection.parting = True
            connection.abort()
            await connection.ended.wait()
        await trio.lowlevel.checkpoint()

    def recheck(self) -> None:
        """Ring or allow list were replaced: end the connections that would not be admitted any more. What
        is still wanted connects anew."""
        for connections in list(self._connections.values()):
            for connection in list(connections):
                self._recheck(connection)

    def _recheck(self, connection: Connection) -> None:
        if not connection.admitted:
            return  # its streams are yet to be admitted, by what holds then
        if not self._allowed.allows(connection.peer_id):
            reason = "it is not on the allow list any more"
        elif not all(map(self._ring.find, connection.key_ids)):
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
            for peer_id, connections in self._connections.items()
            if any(connection.admitted for connection in connections)
        ]

    def key_ids(self, peer_id: PeerId) -> list[bytes]:
        """The ids of the keys with which this peer's streams were admitted."""
        connections = self._connections.get(peer_id, ())
        return [key_id for connection in connections for key_id in connection.key_ids]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `close`."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._accept_connections)
                self._nursery.start_soon(self.keeper.run)
                task_status.started()

    def close(self) -> None:
        """Stop listening and end all connections, without waiting. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._refusals.silence()
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()
        for connections in list(self._connections.values()):
            for connection in list(connections):
                connection.abort()
        self._scope.cancel()

    # --- dialling ----------------------------------------------------------------------------

    async def _ask(
        self,
        peer_id: PeerId,
        addresses: Sequence[str],
        kind: int,
        request: Message,
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
        if connection.muxed.said_goodbye or connection.unused:
            raise _Farewell("the connection was closed just when it was used")

    async def _asking(self, peer_id: PeerId, addresses: Sequence[str]) -> Connection:
        """A connection with a usable stream for our requests. Raises `LinkError`.

        It is made in the host's own time: who gives up waiting leaves the attempt to the next one who asks.
        """
        connection = self.keeper.newest(peer_id)
        if connection is None:
            connect = partial(self._connect, peer_id, addresses)
            return await self._attempt(peer_id, tuple(addresses), connect)
        if connection.can_ask:
            return connection
        return await self._attempt(peer_id, connection, partial(self._open_asking, connection))

    async def _connect(self, peer_id: PeerId, addresses: Sequence[str]) -> Connection:
        connection = await self._dial(peer_id, addresses, CONNECTING_SECONDS)
        return await self._open_asking(connection)

    async def _attempt(
        self, peer_id: PeerId, key: Hashable, start: Callable[[], Awaitable[Connection]]
    ) -> Connection:
        if self._closing:
            raise LinkError("this peer stops")
        return await self._attempts.join(self._nursery, peer_id, key, start)

    async def _dial(
        self, peer_id: PeerId | None, addresses: Sequence[str], timeout_seconds: float
    ) -> Connection:
        """A connection to `peer_id`, or to whoever listens there. Raises `LinkError`."""
        where = ", ".join(addresses) or "no address"
        try:
            with trio.fail_after(timeout_seconds):
                endpoints = await resolve(addresses)
                attempts = [partial(self._dial_endpoint, peer_id, each) for each in endpoints]
                return await first_success(attempts, (LinkError,))
        except trio.TooSlowError:
            raise LinkError(f"{where} did not answer within {timeout_seconds:g} s") from None
        except (OSError, ConfigError, ValueError) as error:  # ValueError: a name that cannot be one
            raise LinkError(f"cannot reach {where}: {error}") from None

    async def _dial_endpoint(self, peer_id: PeerId | None, endpoint: Endpoint) -> Connection:
        try:
            with trio.fail_after(TCP_SECONDS):
                sock = GuardedSocket(await connect(endpoint), _UPGRADE_BYTES)
        except trio.TooSlowError:
            raise LinkError(f"{endpoint} did not answer within {TCP_SECONDS:g} s") from None
        except OSError as error:
            raise LinkError(f"cannot reach {endpoint}: {error.strerror}") from None
        try:
            arrivals = self._own_arrivals
            connection = await self._upgrade(sock, str(endpoint), outgoing=True, expected=peer_id)
            if connection.peer_id == self._identity.peer_id:
                connection.account.close()
                raise await self._itself_or_twin(endpoint, arrivals)
            self.keeper.counts.opened += 1
            await self._nursery.start(self._run_connection, connection)
            return connection
        except LinkError:
            sock.abort()
            raise
        except PeerIDMismatchesPubkey:
            sock.abort()
            raise LinkError(f"another peer than the one wanted listens at {endpoint}") from None
        except Exception as error:  # whatever the library makes of what the other side sent
            sock.abort()
            raise LinkError(f"{endpoint} does not behave like a peer: {_reason(error)}") from None
        except BaseException:
            sock.abort()
            raise

    async def _itself_or_twin(self, endpoint: Endpoint, arrivals_before: int) -> LinkError:
        """Who has this identity at the endpoint: this process, which then hears its own dial arrive (the
        addresses need not tell: it may come by way of a translation), or another one."""
        with trio.move_on_after(OWN_ARRIVAL_SECONDS):
            while self._own_arrivals == arrivals_before:
                await self._own_arrived.wait()
            return OwnAddress(f"{endpoint} is this peer itself")
        return TwinAddress(f"another process with this peer's identity listens at {endpoint}")

    async def _upgrade(
        self, sock: GuardedSocket, address: str, *, outgoing: bool, expected: PeerId | None = None
    ) -> Connection:
        """Noise and yamux over a connected socket: afterwards the other side's identity is proved."""
        raw = RawConnection(sock, outgoing)  # type: ignore[arg-type] # has its four methods
        with trio.fail_after(ADMISSION_SECONDS):
            if outgoing:
                await self._security.select_transport_and_protocol(raw, True)
                wanted = ID(expected) if expected is not None else None
                secured = await self._noise.get_pattern().handshake_outbound(raw, wanted)
            else:
                secured = await self._security.secure_inbound(raw)
            peer_id = secured.get_remote_peer().to_bytes()
            public_key_from_peer_id(peer_id)
            if outgoing:
                await MultiselectClient().select_one_of([_YAMUX], _communicator(secured))
            else:
                await Multiselect({_YAMUX: None}).negotiate(_communicator(secured))
        owner = Owner(host_group(address.rpartition(":")[0].strip("[]")), peer_id)
        account = self._budget.open(owner, lambda why: self._drop(connection, why))
        connection = Connection(peer_id, address, sock, account, incoming=not outgoing)
        connection.muxed = Multiplexer(
            secured,
            initiator=outgoing,
            max_incoming=MAX_STREAMS_PER_CONNECTION,
            accept=partial(self._accept_stream, connection),
            account=account,
        )
        return connection

    def _drop(self, connection: Connection, why: str) -> None:
        """End a connection for what is held for its other side."""
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
            self._refusals.say(connection.address, f"not admitted by {who}")
            raise LinkError(f"{who}: {refusal}", refused=True, code=refusal.code) from None
        except Exception as error:  # RuntimeError when the connection ends meanwhile
            await self._notice_farewell(connection)
            raise LinkError(f"no stream to {who}: {_reason(error)}") from None
        finally:
            connection.activity.end()

    async def _run_asking(
        self,
        connection: Connection,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        stream = await connection.muxed.open_stream()
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await MultiselectClient().select_one_of([_PROTOCOL], _communicator(stream))
            side = self._side(Opener, connection)
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

    # --- being dialled -----------------------------------------------------------------------

    async def _accept_connections(self) -> None:
        """Serve the listening socket until `close`."""
        with closing(Accepting(logger, "other peers")) as accepting:
            while not self._closing:
                await trio.lowlevel.checkpoint()
                try:
                    sock, address = await accepting.accept(self._listener)
                except (trio.ClosedResourceError, OSError):
                    return  # closed just now
                self._take_in(sock, address)

    def _take_in(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """A stranger waits to be admitted; another one may have to go for it."""
        where = join_address(*address[:2])
        scope = trio.CancelScope()
        dropped = self._strangers.arrive(address[0], scope)
        if dropped is scope:
            sock.close()
            self._refusals.dropped(
                where, f"{len(self._strangers)} connections wait to be admitted already"
            )
            return
        if dropped is not None:
            dropped.cancel()
        self._nursery.start_soon(self._receive, sock, where, scope)

    async def _receive(
        self, accepted: socket.socket, address: str, scope: trio.CancelScope
    ) -> None:
        """One incoming connection, from its first byte to its end. `scope` ends it while it is a stranger's."""
        sock = None
        try:
            with scope:
                sock = GuardedSocket(accepted, _UPGRADE_BYTES)
                connection = await self._upgrade(sock, address, outgoing=False)
                connection.stranger = scope
                self.keeper.counts.accepted += 1
                if connection.peer_id == self._identity.peer_id:  # `discover` of our own address
                    connection.account.close()
                    self._own_arrivals += 1
                    self._own_arrived.set()
                    self._own_arrived = trio.Event()
                else:
                    await self._run_connection(connection)
        except Exception as error:  # whatever the library makes of what a stranger sent
            self._refusals.dropped(address, _reason(error))
        else:
            if scope.cancelled_caught:
                self._refusals.dropped(address, "it made room for a stranger from another host")
        finally:
            self._strangers.leave(scope)
            if sock is not None:
                sock.abort()
            accepted.close()

    def _admitted(self, connection: Connection) -> None:
        """A stream of the connection was admitted just now."""
        if connection.stranger is not None:
            self._strangers.leave(connection.stranger)
        self.keeper.review()  # strangers did not count
        self._recheck(connection)  # a reload may have come between proof and welcome

    async def _run_connection(
        self,
        connection: Connection,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Everything that happens on a connection; ends, without an error, when it does."""
        peer_id = connection.peer_id
        try:
            async with trio.open_nursery() as nursery:
                connection.nursery = nursery
                self._connections.setdefault(peer_id, []).append(connection)
                self.keeper.review()
                for task in (self._run_muxer, self._end_when_useless):
                    nursery.start_soon(task, connection)
                task_status.started()
        except* OSError as group:  # the ordinary end
            logger.debug("connection with %s: %s", connection.address, _reason(group))
        except* Exception as group:
            self._refusals.dropped(connection.address, _reason(group))
        finally:
            connection.abort()
            connection.account.close()
            connection.ended.set()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._ended_bytes = self._ended_bytes.plus([connection])
        connections = self._connections.get(connection.peer_id, [])
        with suppress(ValueError):
            connections.remove(connection)
        if not connections:
            self._connections.pop(connection.peer_id, None)
        if connection.muxed.said_goodbye and not connection.parting:
            self.keeper.counts.closed_by_others += 1
        others = any(each.ever_admitted for each in connections)
        lost = connection.ever_admitted and not connection.parted
        if lost and not others and not self._closing:
            call_back(partial(self._on_lost, connection.peer_id))

    async def _run_muxer(self, connection: Connection) -> None:
        try:
            await connection.muxed.run()
        finally:
            connection.abort()

    async def _end_when_useless(self, connection: Connection) -> None:
        await connection.wait_useless()
        who = format_peer_id(connection.peer_id)
        self._refusals.dropped(connection.address, f"{who} opened no stream that was admitted")
        connection.abort()

    def _accept_stream(self, connection: Connection, stream: MuxedStream) -> None:
        assert connection.nursery is not None
        connection.nursery.start_soon(self._serve_stream, connection, stream)

    async def _serve_stream(self, connection: Connection, stream: MuxedStream) -> None:
        """Admit whoever opened this stream, then answer its requests."""
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await Multiselect({_PROTOCOL: None}).negotiate(_communicator(stream))
            answering = await admit_stream(
                stream,
                self._side(Listener, connection),
                self._handler,
                may_come=partial(self.keeper.make_room, connection, MAX_ADMITTED),
                activity=connection.activity,
                readers=self._readers,
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
            self._refusals.dropped(connection.address, _reason(error))
        finally:
            await stream.close()

    # --- small things ------------------------------------------------------------------------

    def _side(self, side: type[_S], connection: Connection) -> _S:
        return side(
            ring=self._ring,
            allowed=self._allowed,
            cluster=self._cluster,
            own_id=self._identity.peer_id,
            peer_id=connection.peer_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            software=self._software,
        )


def _communicator(stream: MuxedStream | Secured) -> MultiselectCommunicator:
    return MultiselectCommunicator(stream)  # type: ignore[arg-type] # it needs read and write only


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom, in one line."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    if isinstance(error, trio.TooSlowError):
        return f"the handshake took longer than {ADMISSION_SECONDS:g} s"
    return printable(str(error)) or type(error).__name__


def _ignore(_address: str, _reason: str) -> None:
    return


@asynccontextmanager
async def open_control_host(
    *,
    identity: Identity,
    listen: tuple[str, int | None],
    ring: KeyRing,
    cluster: str,
    handler: Handler,
    on_lost: Callable[[PeerId], None],
    on_refused: Callable[[str, str], None] = _ignore,
    software: str,
    allowed: AllowList | None = None,
    limits: ConnectionLimits = _LIMITS,
    readers: Handler | None = None,
    budget: ByteBudget | None = None,
) -> AsyncIterator[ControlHost]:
    """A host that listens at `listen` (port 0: any; None: the default one, or any when that is taken) and serves
    `handler` to admitted members until the block ends; `readers` answers those that may only read (None: refused).
    After `ring` or `allowed` (None: everybody who holds a key) were changed, call its `recheck`; tell its `keeper` the
    peers that it is to stay connected with. `budget` bounds what is held for others.

    `on_lost(peer_id)` is called when the last connection of an admitted peer has ended without either side having
    meant it; `on_refused(address, reason)` whenever something of a stranger was dropped. Raises
    `ConfigError` when the address cannot be bound. Errors of the block come out as themselves.
    """
    _contain_logging()
    listener = await listen_tcp(*listen)
    host = ControlHost(
        listener=listener,
        identity=identity,
        ring=ring,
        allowed=allowed if allowed is not None else AllowList(),
        cluster=cluster,
        handler=handler,
        on_lost=on_lost,
        on_refused=on_refused,
        software=software,
        limits=limits,
        readers=readers,
        budget=budget if budget is not None else ByteBudget(),
    )
    async with open_background_nursery() as nursery:
        try:
            await nursery.start(host.run)
            yield host
        finally:
            host.close()
