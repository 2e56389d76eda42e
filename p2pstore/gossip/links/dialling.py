"""Dialling: connections that this side opens, by any of a peer's addresses. Shell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from p2pstore.errors import ConfigError
from p2pstore.gossip.links.control_connection import Connection
from p2pstore.gossip.links.control_link import (
    LinkError,
    OwnAddress,
    TwinAddress,
)
from p2pstore.gossip.links.libp2p_parts import (
    PeerIDMismatchesPubkey,
)
from p2pstore.gossip.links.secured_connections import UPGRADE_BYTES, Securing, reason_of
from p2pstore.gossip.links.sockets import (
    Endpoint,
    GuardedSocket,
    connect,
    first_success,
    resolve,
)
from p2pstore.gossip.records import PeerId

TCP_SECONDS: Final = 3.0
"""By when the other machine has answered at all. The kernel repeats itself ever less often: a machine that is
back would not be noticed for long."""

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
