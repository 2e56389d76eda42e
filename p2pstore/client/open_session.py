"""An open client of the local peer, and the objects that do its work."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from p2pstore import arguments
from p2pstore.client.device_memory import GpuMapping
from p2pstore.client.fetcher import Fetcher
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.leasing import Leaser
from p2pstore.client.object_store import ObjectStore
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains, Presence
from p2pstore.client.writing import Writer
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access
from p2pstore.local.socket_paths import find_socket
from p2pstore.objects import DEFAULT_NAMESPACE, batch_key_hasher, key_hasher
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver
from p2pstore.values import RegisteredBuffer


class _Parts:
    """The parts of an open client that share its connection."""

    def __init__(
        self,
        link: PeerLink,
        namespace: str,
        digests_of: Callable[[Sequence[str]], list[bytes]],
        *,
        in_threads: bool,
    ) -> None:
        self.link = link
        chains = PrefixChains()
        self.fetcher = Fetcher(link, namespace, chains, in_threads=in_threads)
        self.writer = Writer(link, namespace, chains)
        self.neighbours = Neighbours(link, namespace)
        self.leaser = Leaser(link, self.fetcher, self.neighbours)
        self.presence = Presence(link, digests_of, chains)
        self.gpus: GpuMapping | None = None
        self.registering = link.driver.lock()

    def close(self) -> None:
        """Close the connections that this process opened; a forked child leaves those of its parent open."""
        self.gpus = None
        self.neighbours.close()
        self.link.close()
        if not self.link.connection.is_inherited:
            self.fetcher.close()
            self.writer.close()


class OpenSession(ObjectStore):
    """The connection of one client to the local peer: `open` it, use it, `close` it. Its subclasses have the methods of
    `ObjectStore`, which says what each of them does."""

    how_to_connect: ClassVar[str] = "open() it first"
    """Hint in the error of a call before `open`."""
    in_threads: ClassVar[bool] = False
    """Whether concurrent work runs in threads, which cannot be cancelled from outside."""

    def __init__(
        self,
        driver: Driver,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self.namespace = arguments.text("namespace", namespace)
        self.timeout = arguments.seconds("timeout", timeout, above_zero=True)
        self._driver = driver
        self._wanted_socket = None if socket is None else os.fspath(socket)
        self._digest = key_hasher(namespace)
        self._digests = batch_key_hasher(namespace)
        self._parts: _Parts | None = None
        self._registered: weakref.WeakSet[RegisteredBuffer] = weakref.WeakSet()

    async def open(self) -> None:
        """Connect. Raises `NoLocalPeer`, `AmbiguousLocalPeer`, `ProtocolMismatch`."""
        path = str(find_socket(self._wanted_socket))
        opening = Opening(self.namespace, Access.WRITE, location_table=True, hazards=True)
        link = await PeerLink.open(self._driver, path, opening, self.timeout)
        try:
            self._parts = _Parts(link, self.namespace, self._digests, in_threads=self.in_threads)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        """Disconnect; may be called twice. Reservations, leases and registrations end with it.

        In a forked child it only lets go: the connection belongs to the parent, which goes on using it.
        """
        for registered in list(self._registered):
            registered.close()
        if self._parts is not None:
            self._parts.close()

    @property
    def socket_path(self) -> str:
        """The socket this client is connected to."""
        return self._link.connection.path

    @property
    def peer_name(self) -> str:
        """The name of the local peer, which `PutResult.location` is where a value is stored there."""
        return self._link.connection.hello.name

    @property
    def _link(self) -> PeerLink:
        """The connection, which may have ended. Raises `RuntimeError` before there was one."""
        if self._parts is None:
            raise RuntimeError(f"this client is not connected: {self.how_to_connect}")
        return self._parts.link

    @property
    def _live(self) -> _Parts:
        """The parts, checked to be usable. Raises `StoreClosed` once the peer is gone, `ClientForked` in a forked
        child."""
        self._link.check()
        assert self._parts is not None
        return self._parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        socket = self._wanted_socket if self._parts is None else self.socket_path
        return _restore, (type(self), socket, self.namespace, self.timeout)


def _restore(kind: type[OpenSession], socket: str | None, namespace: str, timeout: float) -> OpenSession:
    return kind(socket=socket, namespace=namespace, timeout=timeout)  # type: ignore[call-arg]
