"""The control host: admitted, encrypted connections to other peers. Shell; the only module that knows libp2p.

From libp2p come the peer id, Noise, yamux and multistream-select, so the wire is libp2p's own. Sockets,
dialling and tasks are ours instead of its `Swarm` and `BasicHost`: those leak sockets when cancelled, end
the process when a handler raises, listen with SO_REUSEPORT (two peers on one port would each get half of
the connections), wait 250 ms in every dial, and dial on their own. Here every connection is a task of the
host's nursery, and whatever goes wrong in it ends that connection with one line in the log.

Only Noise is offered: with libp2p's default choice a stranger negotiates plaintext and claims any identity.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import trio

# Read by yamux at run time: without it every read sends a window update of its own.
os.environ.setdefault("PY_YAMUX_RELEASE_ON_READ", "0")

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import X25519PrivateKey
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.security_multistream import SecurityMultistream
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from p2pstore.config import join_address
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.admission import NONCE_BYTES, AdmissionRefused, Listener, Opener
from p2pstore.gossip.identity import Identity
from p2pstore.gossip.link import (
    ADMISSION_SECONDS,
    AskingStream,
    Handler,
    LinkError,
    admit_stream,
    open_asking_stream,
    printable,
)
from p2pstore.gossip.records import PeerId, format_peer_id, public_key_from_peer_id
from p2pstore.gossip.sockets import (
    Endpoint,
    GuardedSocket,
    connect,
    first_success,
    listen_tcp,
    resolve,
)
from p2pstore.keyring import KeyRing
from p2pstore.wire import CONTROL_PROTOCOL, Message

logger = logging.getLogger("p2pstore.host")

_S = TypeVar("_S", Opener, Listener)

MAX_ADMITTED_STREAMS: Final = 256
"""Streams on which others ask this peer."""
MAX_STRANGERS: Final = 256
"""Incoming connections that have not been admitted (yet)."""
MAX_STREAMS_PER_CONNECTION: Final = 4
"""Streams that the other side may have open: it needs one, and one more while that is replaced."""

_PROTOCOL: Final = TProtocol(CONTROL_PROTOCOL)
_UPGRADE_BYTES: Final = 32 * 1024
"""What the other side may send before Noise and yamux are set up; they need about 500 bytes."""
_STRANGER_STREAM_BYTES: Final = 32 * 1024
"""What a stream may carry before it is admitted."""
_STRANGER_BUFFER_BYTES: Final = 256 * 1024
_BUFFER_BYTES: Final = 40 * 1024 * 1024
"""Unread bytes of one connection: yamux announces windows of up to 16 MiB but does not enforce them."""
_RESET_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 60.0
"""One line in the log per dropped stranger's host in this time."""
_MAX_REMEMBERED_HOSTS: Final = 1024


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


class _Stream:
    """A yamux stream whose every failure is an `OSError`, with a cap on what a stranger may send."""

    def __init__(self, stream: YamuxStream) -> None:
        self._stream = stream
        self._allowance_bytes: int | None = _STRANGER_STREAM_BYTES

    def lift_allowance(self) -> None:
        self._allowance_bytes = None

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = await self._stream.read(n)
        except Exception as error:
            raise ConnectionResetError(f"the stream ended ({type(error).__name__})") from None
        if self._allowance_bytes is not None:
            self._allowance_bytes -= len(data)
            if self._allowance_bytes < 0:
                raise ConnectionResetError("it sends more than a handshake needs")
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except Exception as error:
            raise ConnectionResetError(f"the stream broke ({type(error).__name__})") from None

    async def close(self) -> None:
        """Tell the other side that the stream is over, if that is possible at once."""
        with trio.CancelScope(shield=True), trio.move_on_after(_RESET_SECONDS), suppress(Exception):
            await self._stream.reset()


class _Connection:
    """One authenticated connection, running in its own nursery."""

    def __init__(
        self, peer_id: PeerId, address: str, muxed: Yamux, sock: GuardedSocket, *, incoming: bool
    ) -> None:
        self.peer_id = peer_id
        self.incoming = incoming
        self.address = address
        self.muxed = muxed
        self.asking: AskingStream | None = None
        self.ever_admitted = False
        self.opened_by_other = 0
        self.ended = trio.Event()
        self.nursery: trio.Nursery | None = None
        self._sock = sock
        self._admitted_streams = 0
        self._used = trio.Event()
        self._unused = trio.Event()
        sock.lift_allowance(self._check_buffers)

    @property
    def admitted(self) -> bool:
        return self._admitted_streams > 0

    def abort(self) -> None:
        """End the connection at once."""
        self._sock.abort()
        if self.nursery is not None:
            self.nursery.cancel_scope.cancel()

    @contextmanager
    def using(self) -> Iterator[None]:
        """An admitted stream exists inside."""
        self.ever_admitted = True
        self._admitted_streams += 1
        if self._admitted_streams == 1:
            self._used.set()
            self._unused = trio.Event()
        try:
            yield
        finally:
            self._admitted_streams -= 1
            if self._admitted_streams == 0:
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

    def _check_buffers(self) -> None:
        unread = sum(map(len, self.muxed.stream_buffers.values()))
        if unread > (_BUFFER_BYTES if self.admitted else _STRANGER_BUFFER_BYTES):
            self._sock.abort()
            raise ConnectionResetError(f"{unread:,} bytes that nobody reads")


class ControlHost:
    """This peer's connections. Made by `open_control_host`; satisfies `p2pstore.gossip.link.Link`."""

    listening: tuple[str, int]
    """Host and port, the real one when port 0 was asked."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        identity: Identity,
        ring: KeyRing,
        cluster: str,
        handler: Handler,
        on_lost: Callable[[PeerId], None],
        on_refused: Callable[[str, str], None],
        software: str,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.listening = (host, port)
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery
        self._listener = listener
        self._identity = identity
        self._ring = ring
        self._cluster = cluster
        self._handler = handler
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._software = software
        self._connections: dict[PeerId, list[_Connection]] = {}
        self._opening: dict[PeerId, trio.Lock] = {}
        self._incoming = 0
        self._admitted_streams = 0
        self._quiet_until: dict[str, float] = {}
        self._closing = False
        self._noise = NoiseTransport(
            create_new_key_pair(identity.seed), noise_privkey=X25519PrivateKey.new()
        )
        self._security = SecurityMultistream({NOISE_PROTOCOL: self._noise})
        self._muxers = MuxerMultistream({TProtocol(YAMUX_PROTOCOL): Yamux})

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
                stream = await self._asking_stream(peer_id, addresses, timeout_seconds)
                return await stream.ask(kind, request)
        except trio.TooSlowError:
            raise LinkError(
                f"{format_peer_id(peer_id)} did not answer within {timeout_seconds:g} s"
            ) from None

    async def disconnect(self, peer_id: PeerId) -> None:
        """End all connections with a peer; `on_lost` is not called."""
        for connection in list(self._connections.get(peer_id, ())):
            connection.ever_admitted = False
            connection.abort()
            await connection.ended.wait()
        await trio.lowlevel.checkpoint()

    def connected(self) -> list[PeerId]:
        """Peers with an admitted stream in either direction."""
        return [
            peer_id
            for peer_id, connections in self._connections.items()
            if any(connection.admitted for connection in connections)
        ]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `close`."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._accept_connections)
                task_status.started()

    def close(self) -> None:
        """Stop listening and end all connections, without waiting. May be called twice."""
        if self._closing:
            return
        self._closing = True
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()
        for connections in list(self._connections.values()):
            for connection in list(connections):
                connection.abort()
        self._scope.cancel()

    # --- dialling ----------------------------------------------------------------------------

    async def _asking_stream(
        self, peer_id: PeerId, addresses: Sequence[str], timeout_seconds: float
    ) -> AskingStream:
        stream = self._usable_stream(peer_id)
        if stream is not None:
            return stream
        lock = self._opening.setdefault(peer_id, trio.Lock())
        try:
            async with lock:
                stream = self._usable_stream(peer_id)
                if stream is not None:
                    return stream
                connections = self._connections.get(peer_id)
                if connections:
                    connection = connections[-1]
                else:
                    connection = await self._dial(peer_id, addresses, timeout_seconds)
                return await self._open_asking(connection)
        finally:
            statistics = lock.statistics()
            if not statistics.locked and not statistics.tasks_waiting:
                self._opening.pop(peer_id, None)

    def _usable_stream(self, peer_id: PeerId) -> AskingStream | None:
        for connection in self._connections.get(peer_id, ()):
            if connection.asking is not None and connection.asking.usable:
                return connection.asking
        return None

    async def _dial(
        self, peer_id: PeerId | None, addresses: Sequence[str], timeout_seconds: float
    ) -> _Connection:
        """A connection to `peer_id`, or to whoever listens there. Raises `LinkError`."""
        where = ", ".join(addresses) or "no address"
        try:
            with trio.fail_after(timeout_seconds):
                endpoints = await resolve(addresses)
                attempts = [partial(self._dial_endpoint, peer_id, each) for each in endpoints]
                return await first_success(attempts, (LinkError,))
        except trio.TooSlowError:
            raise LinkError(f"{where} did not answer within {timeout_seconds:g} s") from None
        except (OSError, ConfigError) as error:
            raise LinkError(f"cannot reach {where}: {error}") from None

    async def _dial_endpoint(self, peer_id: PeerId | None, endpoint: Endpoint) -> _Connection:
        try:
            sock = GuardedSocket(await connect(endpoint), _UPGRADE_BYTES)
        except OSError as error:
            raise LinkError(f"cannot reach {endpoint}: {error.strerror}") from None
        try:
            connection = await self._upgrade(sock, str(endpoint), outgoing=True, expected=peer_id)
            if connection.peer_id == self._identity.peer_id:
                raise LinkError(f"{endpoint} is this peer itself")
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

    async def _upgrade(
        self, sock: GuardedSocket, address: str, *, outgoing: bool, expected: PeerId | None = None
    ) -> _Connection:
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
            muxed = await self._muxers.new_conn(secured, ID(peer_id))
        assert isinstance(muxed, Yamux)
        return _Connection(peer_id, address, muxed, sock, incoming=not outgoing)

    async def _open_asking(self, connection: _Connection) -> AskingStream:
        """The stream for our requests on a connection. Raises `LinkError`."""
        who = f"{format_peer_id(connection.peer_id)} at {connection.address}"
        assert connection.nursery is not None
        try:
            stream: AskingStream = await connection.nursery.start(self._run_asking, connection)
        except AdmissionRefused as refusal:
            self._say(connection.address, f"not admitted by {who}: {refusal}")
            raise LinkError(f"{who}: {refusal}", refused=True, code=refusal.code) from None
        except Exception as error:  # RuntimeError when the connection ends meanwhile
            raise LinkError(f"no stream to {who}: {_reason(error)}") from None
        return stream

    async def _run_asking(
        self,
        connection: _Connection,
        task_status: trio.TaskStatus[AskingStream] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.fail_after(ADMISSION_SECONDS):
            stream = _Stream(await connection.muxed.open_stream())
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await MultiselectClient().select_one_of(
                    [_PROTOCOL], MultiselectCommunicator(stream)
                )  # type: ignore[arg-type] # reads and writes
            asking = await open_asking_stream(stream, self._side(Opener, connection))
            stream.lift_allowance()
            with connection.using():
                connection.asking = asking
                task_status.started(asking)
                try:
                    await asking.run()
                except OSError as error:
                    logger.debug("stream to %s: %s", connection.address, error)
                except ProtocolError as error:
                    self._refuse(connection.address, str(error))
        finally:
            await stream.close()

    # --- being dialled -----------------------------------------------------------------------

    async def _accept_connections(self) -> None:
        """Serve the listening socket until `close`."""
        while not self._closing:
            await trio.lowlevel.checkpoint()
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._listener)
                continue
            except OSError as error:  # out of descriptors, or the connection is gone already
                self._say("accept", f"cannot accept connections: {error}; check `ulimit -n`")
                await trio.sleep(0.1)
                continue
            where = join_address(*address[:2])
            if self._strangers() >= MAX_STRANGERS:
                sock.close()
                self._refuse(where, f"{MAX_STRANGERS} connections wait to be admitted already")
                continue
            self._incoming += 1
            self._nursery.start_soon(self._receive, sock, where)

    def _strangers(self) -> int:
        connections = (each for all_of_peer in self._connections.values() for each in all_of_peer)
        return self._incoming - sum(each.incoming and each.admitted for each in connections)

    async def _receive(self, accepted: socket.socket, address: str) -> None:
        """One incoming connection, from its first byte to its end."""
        sock = None
        try:
            sock = GuardedSocket(accepted, _UPGRADE_BYTES)
            connection = await self._upgrade(sock, address, outgoing=False)
        except Exception as error:  # whatever the library makes of what a stranger sent
            self._refuse(address, _reason(error))
            return
        else:
            if (
                connection.peer_id != self._identity.peer_id
            ):  # that was `discover` on our own address
                await self._run_connection(connection)
        finally:
            self._incoming -= 1
            if sock is not None:
                sock.abort()
            accepted.close()

    async def _run_connection(
        self,
        connection: _Connection,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Everything that happens on a connection; ends, without an error, when it does."""
        peer_id = connection.peer_id
        try:
            async with trio.open_nursery() as nursery:
                connection.nursery = nursery
                self._connections.setdefault(peer_id, []).append(connection)
                for task in (self._run_muxer, self._accept_streams, self._end_when_useless):
                    nursery.start_soon(task, connection)
                task_status.started()
        except* OSError as group:  # the ordinary end
            logger.debug("connection with %s: %s", connection.address, _reason(group))
        except* Exception as group:
            self._refuse(connection.address, _reason(group))
        finally:
            connection.abort()
            connection.ended.set()
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        connections = self._connections.get(connection.peer_id, [])
        with suppress(ValueError):
            connections.remove(connection)
        if not connections:
            self._connections.pop(connection.peer_id, None)
        others = any(each.ever_admitted for each in connections)
        if connection.ever_admitted and not others and not self._closing:
            self._call_back(partial(self._on_lost, connection.peer_id))

    async def _run_muxer(self, connection: _Connection) -> None:
        try:
            await connection.muxed.start()
        finally:
            connection.abort()

    async def _end_when_useless(self, connection: _Connection) -> None:
        await connection.wait_useless()
        who = format_peer_id(connection.peer_id)
        self._refuse(connection.address, f"{who} opened no stream that was admitted")
        connection.abort()

    async def _accept_streams(self, connection: _Connection) -> None:
        assert connection.nursery is not None
        while True:
            try:
                accepted = await connection.muxed.accept_stream()
            except Exception:  # the connection ends; `_run_muxer` sees it too
                return
            assert isinstance(accepted, YamuxStream)
            stream = _Stream(accepted)
            if connection.opened_by_other >= MAX_STREAMS_PER_CONNECTION:
                await stream.close()
                continue
            connection.opened_by_other += 1
            connection.nursery.start_soon(self._serve_stream, connection, stream)

    async def _serve_stream(self, connection: _Connection, stream: _Stream) -> None:
        """Admit whoever opened this stream, then answer its requests."""
        try:
            with trio.fail_after(ADMISSION_SECONDS):
                await Multiselect({_PROTOCOL: None}).negotiate(MultiselectCommunicator(stream))  # type: ignore[arg-type] # reads and writes
            answering = await admit_stream(
                stream,
                self._side(Listener, connection),
                self._handler,
                full=self._admitted_streams >= MAX_ADMITTED_STREAMS,
            )
            stream.lift_allowance()
            self._admitted_streams += 1
            try:
                with connection.using():
                    await answering.run()
            finally:
                self._admitted_streams -= 1
        except AdmissionRefused as refusal:
            who = format_peer_id(connection.peer_id)
            self._refuse(connection.address, f"{who}: {refusal}")
        except OSError as error:
            logger.debug("stream from %s: %s", connection.address, error)
        except Exception as error:  # a ProtocolError, or what the library made of a bad negotiation
            self._refuse(connection.address, _reason(error))
        finally:
            await stream.close()
            connection.opened_by_other -= 1

    # --- small things ------------------------------------------------------------------------

    def _side(self, side: type[_S], connection: _Connection) -> _S:
        return side(
            ring=self._ring,
            cluster=self._cluster,
            own_id=self._identity.peer_id,
            peer_id=connection.peer_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            software=self._software,
        )

    def _refuse(self, address: str, reason: str) -> None:
        """A connection or stream was dropped because of what the other side did."""
        if self._closing:
            return
        self._say(address, f"dropped {address}: {reason}")
        self._call_back(partial(self._on_refused, address, reason))

    def _call_back(self, function: Callable[[], None]) -> None:
        """A fault of the callback must not end the host."""
        try:
            function()
        except Exception:
            logger.exception("a callback of the control host failed")

    def _say(self, address: str, line: str) -> None:
        """One line, at most once a minute for one host."""
        host = address.rpartition(":")[0]
        now = trio.current_time()
        if self._quiet_until.get(host, 0.0) > now:
            logger.debug("%s", line)
            return
        if len(self._quiet_until) >= _MAX_REMEMBERED_HOSTS:
            self._quiet_until.clear()
        self._quiet_until[host] = now + _QUIET_SECONDS
        logger.warning("%s", line)


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
    listen: tuple[str, int],
    ring: KeyRing,
    cluster: str,
    handler: Handler,
    on_lost: Callable[[PeerId], None],
    on_refused: Callable[[str, str], None] = _ignore,
    software: str,
) -> AsyncIterator[ControlHost]:
    """A host that listens at `listen` (port 0: any) and serves `handler` to admitted peers until the block ends.

    `on_lost(peer_id)` is called when the last connection of an admitted peer has ended other than by
    `disconnect`; `on_refused(address, reason)` whenever something of a stranger was dropped. Raises
    `ConfigError` when the address cannot be bound. Errors of the block come out as themselves.
    """
    _contain_logging()
    listener = await listen_tcp(*listen)
    failure: BaseException | None = None
    host = ControlHost(
        listener=listener,
        identity=identity,
        ring=ring,
        cluster=cluster,
        handler=handler,
        on_lost=on_lost,
        on_refused=on_refused,
        software=software,
    )
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(host.run)
            yield host
        except (Exception, KeyboardInterrupt) as error:  # kept out of the nursery's group
            failure = error
        finally:
            host.close()
    if failure is not None:
        raise failure
