"""Noise and yamux over connected sockets: afterwards the other side's identity is proved. Shell; no other module uses
`libp2p_parts`.

From libp2p come the peer id, Noise and multistream-select, and the wire is libp2p's own. Only Noise is offered: with
libp2p's default choice a stranger negotiates plaintext and claims any identity. `Dialler` opens connections, by any of
a peer's addresses; `Arrivals` accepts them, and strangers wait for admission in a bounded number of places.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final

import trio

from p2pstore.access.crowding import Strangers, host_group
from p2pstore.addresses import join_address
from p2pstore.errors import ConfigError
from p2pstore.gossip.links.connection_keeper import Connection
from p2pstore.gossip.links.control_frames import printable
from p2pstore.gossip.links.control_link import ADMISSION_SECONDS, LinkError, OwnAddress, TwinAddress
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
from p2pstore.gossip.links.sockets import Endpoint, GuardedSocket, connect, first_success, resolve
from p2pstore.gossip.links.yamux import PROTOCOL as YAMUX_PROTOCOL
from p2pstore.gossip.records import PeerId, public_key_from_peer_id
from p2pstore.runtime.byte_budget import ByteBudget, Owner
from p2pstore.runtime.trio_streams import Accepting
from p2pstore.wire import CONTROL_PROTOCOL

logger = logging.getLogger("p2pstore.host")

_PROTOCOL: Final = TProtocol(CONTROL_PROTOCOL)

_YAMUX: Final = TProtocol(YAMUX_PROTOCOL)

UPGRADE_BYTES: Final = 32 * 1024
"""Most bytes from the other side before Noise and yamux are set up; they need about 500."""

MAX_STREAMS_PER_CONNECTION: Final = 4
"""Streams that the other side may have open: it needs one, and one more while that is replaced."""


class _Forward(logging.Handler):
    """libp2p's log, mostly tracebacks about strangers, as single lines at DEBUG of this module's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            with suppress(TypeError, ValueError):  # a malformed log call of the library
                logger.debug("%s: %s", record.name, printable(record.getMessage()))


def contain_logging() -> None:
    """Send libp2p's log lines through this module's logger. May be called twice."""
    library = logging.getLogger("libp2p")
    if not any(isinstance(handler, _Forward) for handler in library.handlers):
        library.addHandler(_Forward())
    library.propagate = False


class Securing:
    """Makes authenticated connections. `accept_stream` gets the streams that other sides open; `drop(connection, why)`
    ends a connection for what is held for its other side."""

    def __init__(
        self,
        identity: Identity,
        budget: ByteBudget,
        accept_stream: Callable[[Connection, MuxedStream], None],
        drop: Callable[[Connection, str], None],
    ) -> None:
        self._budget = budget
        self._accept_stream = accept_stream
        self._drop = drop
        self._noise = NoiseTransport(
            create_new_key_pair(identity.seed), noise_privkey=X25519PrivateKey.new()
        )
        self._security = SecurityMultistream({NOISE_PROTOCOL: self._noise})

    async def secure(
        self, sock: GuardedSocket, address: str, *, outgoing: bool, expected: PeerId | None = None
    ) -> Connection:
        """The connection on a connected socket. Raises `PeerIDMismatchesPubkey` for another peer than `expected`,
        `trio.TooSlowError`, and whatever libp2p makes of the other side's bytes."""
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


async def select_control(stream: MuxedStream) -> None:
    """Ask the other side to speak the control protocol on a new stream."""
    await MultiselectClient().select_one_of([_PROTOCOL], _communicator(stream))


async def negotiate_control(stream: MuxedStream) -> None:
    """Agree to the control protocol, and to nothing else, on a stream that the other side opened."""
    await Multiselect({_PROTOCOL: None}).negotiate(_communicator(stream))


def _communicator(stream: MuxedStream | Secured) -> MultiselectCommunicator:
    return MultiselectCommunicator(stream)  # type: ignore[arg-type] # it needs read and write only


def reason_of(error: BaseException) -> str:
    """The innermost cause of an error, in one line."""
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


TCP_SECONDS: Final = 3.0
"""By when the other machine must answer at all: the kernel's retries become so rare that its return goes unnoticed."""

OWN_ARRIVAL_SECONDS: Final = 2.0
"""By when a dial of this peer's own address has arrived here."""


class Dialler:
    """Opens connections. `start` begins the tasks of one."""

    def __init__(
        self, securing: Securing, own_id: PeerId, start: Callable[[Connection], Awaitable[None]]
    ) -> None:
        self._securing = securing
        self._own_id = own_id
        self._start = start
        self._own_arrivals = 0
        self._own_arrived = trio.Event()

    def own_dial_arrived(self) -> None:
        """This host was dialled by itself."""
        self._own_arrivals += 1
        self._own_arrived.set()
        self._own_arrived = trio.Event()

    async def dial(
        self, peer_id: PeerId | None, addresses: Sequence[str], timeout_seconds: float
    ) -> Connection:
        """A connection to `peer_id`, or (None) to any peer that listens there. Raises `LinkError`."""
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
                sock = GuardedSocket(await connect(endpoint), UPGRADE_BYTES)
        except trio.TooSlowError:
            raise LinkError(f"{endpoint} did not answer within {TCP_SECONDS:g} s") from None
        except OSError as error:
            raise LinkError(f"cannot reach {endpoint}: {error.strerror}") from None
        try:
            arrivals = self._own_arrivals
            connection = await self._securing.secure(
                sock, str(endpoint), outgoing=True, expected=peer_id
            )
            if connection.peer_id == self._own_id:
                connection.account.close()
                raise await self._itself_or_twin(endpoint, arrivals)
            await self._start(connection)
            return connection
        except LinkError:
            sock.abort()
            raise
        except PeerIDMismatchesPubkey:
            sock.abort()
            raise LinkError(f"another peer than the one wanted listens at {endpoint}") from None
        except Exception as error:  # whatever the library makes of what the other side sent
            sock.abort()
            raise LinkError(f"{endpoint} does not behave like a peer: {reason_of(error)}") from None
        except BaseException:
            sock.abort()
            raise

    async def _itself_or_twin(self, endpoint: Endpoint, arrivals_before: int) -> LinkError:
        """The error for this identity at the endpoint: this process, which then hears its own dial arrive (the
        addresses need not tell: it may come by way of a translation), or another one."""
        with trio.move_on_after(OWN_ARRIVAL_SECONDS):
            while self._own_arrivals == arrivals_before:
                await self._own_arrived.wait()
            return OwnAddress(f"{endpoint} is this peer itself")
        return TwinAddress(f"another process with this peer's identity listens at {endpoint}")


MAX_STRANGERS: Final = 256
"""Incoming connections that have not been admitted yet."""

MAX_STRANGERS_PER_HOST: Final = 128


class Arrivals:
    """Accepts connections at `listener`. `serve` runs each whose other side has proved an identity."""

    def __init__(
        self,
        listener: socket.socket,
        securing: Securing,
        refusals: Refusals,
        serve: Callable[[Connection], Awaitable[None]],
    ) -> None:
        self.strangers: Strangers[trio.CancelScope] = Strangers(MAX_STRANGERS, MAX_STRANGERS_PER_HOST)
        self._listener = listener
        self._securing = securing
        self._refusals = refusals
        self._serve = serve
        self._closed = False

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()

    def admitted(self, connection: Connection) -> None:
        """The connection is no stranger's any more."""
        if connection.stranger is not None:
            self.strangers.leave(connection.stranger)

    async def run(self, nursery: trio.Nursery) -> None:
        """Serve the listening socket until `close`; connections run in `nursery`."""
        with closing(Accepting(logger, "other peers")) as accepting:
            while not self._closed:
                await trio.lowlevel.checkpoint()
                try:
                    sock, address = await accepting.accept(self._listener)
                except (trio.ClosedResourceError, OSError):
                    return  # closed just now
                self._take_in(nursery, sock, address)

    def _take_in(self, nursery: trio.Nursery, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """A stranger waits to be admitted; another one may have to go for it."""
        where = join_address(*address[:2])
        scope = trio.CancelScope()
        dropped = self.strangers.arrive(address[0], scope)
        if dropped is scope:
            sock.close()
            self._refusals.dropped(
                where, f"{len(self.strangers)} connections wait to be admitted already"
            )
            return
        if dropped is not None:
            dropped.cancel()
        nursery.start_soon(self._receive, sock, where, scope)

    async def _receive(self, accepted: socket.socket, address: str, scope: trio.CancelScope) -> None:
        """One incoming connection, from its first byte to its end. `scope` ends it while it is a stranger's."""
        sock = None
        try:
            with scope:
                sock = GuardedSocket(accepted, UPGRADE_BYTES)
                connection = await self._securing.secure(sock, address, outgoing=False)
                connection.stranger = scope
                await self._serve(connection)
        except Exception as error:  # whatever the library makes of what a stranger sent
            self._refusals.dropped(address, reason_of(error))
        else:
            if scope.cancelled_caught:
                self._refusals.dropped(address, "it made room for a stranger from another host")
        finally:
            self.strangers.leave(scope)
            if sock is not None:
                sock.abort()
            accepted.close()


QUIET_SECONDS: Final = 60.0
"""After a line about one host the next ones are for DEBUG only."""
MAX_LINES: Final = 60
"""Lines within `QUIET_SECONDS` about all hosts: the owner of a network has any number of addresses."""


class Refusals:
    """Logs, at a bounded rate, and reports every refusal to a callback (a metric)."""

    def __init__(self, on_refused: Callable[[str, str], None]) -> None:
        """`on_refused(address, reason)` is called for every one."""
        self._on_refused = on_refused
        self._quiet_until: dict[str, float] = {}
        self._window_ends = 0.0
        self._lines = 0
        self._left_out = 0
        self._silent = False

    def silence(self) -> None:
        """From now on connections end because this side closes them."""
        self._silent = True

    def dropped(self, address: str, reason: str) -> None:
        """A connection or stream was dropped because of what the other side did."""
        if self._silent:
            return
        self.log(address, f"dropped {address}: {reason}")
        call_back(partial(self._on_refused, address, reason))

    def log(self, address: str, line: str) -> None:
        """One line about the host in `address` (`HOST:PORT`)."""
        host = address.rpartition(":")[0]
        now = trio.current_time()
        if now >= self._window_ends:
            self._quiet_until = {h: until for h, until in self._quiet_until.items() if until > now}
            self._window_ends, self._lines = now + QUIET_SECONDS, 0
        if self._quiet_until.get(host, 0.0) > now:
            logger.debug("%s", line)
        elif self._lines >= MAX_LINES:
            self._left_out += 1
            logger.debug("%s", line)
        else:
            self._quiet_until[host] = now + QUIET_SECONDS
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
            more = f" ({left_out} lines about other hosts were left out)" if left_out else ""
            logger.warning("%s%s", line, more)


def call_back(function: Callable[[], None]) -> None:
    """Call a function of the peer's; its faults must not end the host."""
    try:
        function()
    except Exception:
        logger.exception("a callback of the control host failed")
