"""Noise and yamux over connected sockets: afterwards the other side's identity is proved. Shell; no other module uses
`libp2p_parts`.

From libp2p come the peer id, Noise and multistream-select, and the wire is libp2p's own. Only Noise is offered: with
libp2p's default choice a stranger negotiates plaintext and claims any identity.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from p2pstore.access.crowding import host_group
from p2pstore.gossip.links.control_connection import Connection
from p2pstore.gossip.links.control_frames import printable
from p2pstore.gossip.links.control_link import (
    ADMISSION_SECONDS,
)
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.links.libp2p_parts import (
    ID,
    NOISE_PROTOCOL,
    Multiselect,
    MultiselectClient,
    MultiselectCommunicator,
    NoiseTransport,
    RawConnection,
    SecurityMultistream,
    TProtocol,
    X25519PrivateKey,
    create_new_key_pair,
)
from p2pstore.gossip.links.multiplexer import Multiplexer, MuxedStream, Secured
from p2pstore.gossip.links.sockets import (
    GuardedSocket,
)
from p2pstore.gossip.links.yamux import PROTOCOL as YAMUX_PROTOCOL
from p2pstore.gossip.records import PeerId, public_key_from_peer_id
from p2pstore.runtime.byte_budget import ByteBudget, Owner
from p2pstore.wire import CONTROL_PROTOCOL

logger = logging.getLogger("p2pstore.host")

_PROTOCOL: Final = TProtocol(CONTROL_PROTOCOL)

_YAMUX: Final = TProtocol(YAMUX_PROTOCOL)

UPGRADE_BYTES: Final = 32 * 1024
"""What the other side may send before Noise and yamux are set up; they need about 500 bytes."""

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
