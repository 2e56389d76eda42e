"""What all calls of a store stand on: its connection, and errors as codes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import (
    AmbiguousLocalPeer,
    NoLocalPeer,
    NoSuchKey,
    P2PStoreError,
    StoreClosed,
)
from p2pstore.integrations.mooncake.codes import ErrorCode, code_of
from p2pstore.integrations.mooncake.memory import Registrations
from p2pstore.integrations.mooncake.own_peer import OwnPeer
from p2pstore.integrations.mooncake.settings import (
    DEFAULT_SEGMENT_BYTES,
    SetupSettings,
    from_arguments,
    peer_options,
    takes_over,
)
from p2pstore.local.paths import SOCKET_VARIABLE, find_socket
from p2pstore.objects import is_about_a_key

LOG: Final = logging.getLogger("p2pstore.mooncake")
RECONNECT_SECONDS: Final = 1.0
RESTART_SECONDS: Final = 10.0
QUIET_SECONDS: Final = 10.0
HEALTHY, NOT_SET_UP, UNREACHABLE = 0, 1, 2


class StoreBase:
    """A store that can be set up and closed. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._client: BlockingClient | None = None
        self._own_peer: OwnPeer | None = None
        self._settings: SetupSettings | None = None
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._said: dict[str, float] = {}
        self._buffers = Registrations()
        self._pooled: dict[int, object] = {}
        """Memory of buffer pools, by its address: it must be there as long as it is registered."""
        self._at_close: list[Callable[[], None]] = []

    def setup(
        self,
        local_hostname: str | dict[str, Any] = "localhost",
        metadata_server: str = "",
        global_segment_size: int | str = DEFAULT_SEGMENT_BYTES,
        local_buffer_size: int | str = DEFAULT_SEGMENT_BYTES,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect to this machine's peer; where none runs, start one that lives as long as this store. Returns 0. A
        peer that ends under its store (killed for memory, say) is started again, empty, with the next calls.

        The peer is the one whose socket is named (`socket` in a dict, or `MOONCAKE_P2P_SOCKET`), else the only one in
        the usual places. One that is started offers `global_segment_size` bytes; all other settings of a peer may
        come from the environment (`MOONCAKE_P2P_CLUSTER_KEY_FILE` and so on: see `mooncake-p2p join`).

        Where this differs from Mooncake: there is no master and no metadata server. Their addresses are optional, and
        taken as those of peers to join. When nobody is at one that belongs to this machine, the peer that is started
        listens there itself, so that programs given the same address find each other; an address that no peer can
        have (etcd, http, P2PHANDSHAKE) is ignored. `engine` is not needed, `local_buffer_size` is what a
        `BufferPool` may have. `tenant_id` (or
        `namespace` in a dict, or `MOONCAKE_P2P_NAMESPACE`) is the namespace of all keys. A failure is raised, within
        seconds: `P2PStoreError` or one of its kinds.

        The settings may also be one dict with the parameters' names, values as text such as "16MB" included.
        """
        arguments = dict(locals())
        del arguments["self"]
        values = local_hostname if isinstance(local_hostname, dict) else arguments
        settings = from_arguments(values, os.environ)
        with self._lock:
            if self._client is not None:
                self._say("this store is set up already: close() it first")
                return int(ErrorCode.INVALID_PARAMS)
            for address in settings.ignored:
                LOG.info("%s is nobody's peer: ignored, as nothing but peers is needed", address)
            self._connect(settings)
            self._settings = settings
        return 0

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect to this machine's peer and never start one. `server_address` is its socket's path; anything else,
        such as the address of a Mooncake client, means the only one that there is. Returns 0, and raises as `setup`.
        """
        named = {"socket": server_address} if "/" in server_address else {}
        sizes = {"global_segment_size": mem_pool_size, "local_buffer_size": local_buffer_size}
        settings = from_arguments({**sizes, **named}, os.environ)
        with self._lock:
            if self._client is not None:
                return int(ErrorCode.INVALID_PARAMS)
            self._client = blocking.connect(settings.socket, namespace=settings.namespace)
            self._settings = settings
        return 0

    def _connect(self, settings: SetupSettings) -> None:
        try:
            socket = find_socket(settings.socket)
        except AmbiguousLocalPeer:
            raise
        except NoLocalPeer:
            self._own_peer = _start_peer(settings)
            socket = self._own_peer.socket
            LOG.info("started a peer; for `mooncake-p2p`: %s=%s", SOCKET_VARIABLE, socket)
        try:
            self._client = blocking.connect(socket, namespace=settings.namespace)
        except BaseException:
            if self._own_peer is not None:
                self._own_peer.close()
                self._own_peer = None
            raise

    def close(self) -> int:
        """Disconnect, and end the peer that `setup` started: it first hands over to others what it alone holds, where
        there are others. Returns 0; may be called twice, and before `setup`."""
        with self._lock:
            client, self._client = self._client, None
            peer, self._own_peer = self._own_peer, None
        while self._at_close:
            self._at_close.pop()()
        self._buffers.clear()
        self._pooled.clear()
        if client is not None:
            client.close()
        if peer is not None:
            peer.close()
        return 0

    def health_check(self) -> int:
        """0 when the peer answers, 1 before `setup` and after `close`, 2 when it does not answer."""
        if self._client is None:
            return NOT_SET_UP
        try:
            self._live.statistics(cluster=False)
        except P2PStoreError as error:
            self._code(error)
            return UNREACHABLE
        return HEALTHY

    def get_hostname(self) -> str:
        """The name of this peer's segment, `HOST:PORT`: where others read it. `localhost:0` before `setup`."""
        if self._client is None:
            return "localhost:0"
        try:
            return next(segment_name(peer.data) for peer in self._live.peers() if peer.me)
        except (P2PStoreError, StopIteration) as error:
            if isinstance(error, P2PStoreError):
                self._code(error)
            return "localhost:0"

    # --- for the calls -----------------------------------------------------------------------

    @property
    def _live(self) -> BlockingClient:
        """The connection. Raises `ValueError` before `setup` and after `close`."""
        client = self._client
        if client is None:
            raise ValueError("the store is not set up, or was closed")
        return client

    def _code(self, error: Exception) -> int:
        """The code for an error, which is said in the log unless it is an ordinary miss."""
        code = code_of(error)
        if isinstance(error, StoreClosed):
            self._reconnect()
        if not isinstance(error, NoSuchKey):
            self._say(str(error))
        return code

    def _read_code(self, error: Exception) -> int:
        """`_code` for reads and removals: a text that cannot be a key is one that nobody has. Any other `ValueError`
        is about what was asked for."""
        if is_about_a_key(error) and self._client is not None:
            return int(ErrorCode.OBJECT_NOT_FOUND)
        return self._code(error)

    def _say(self, text: str) -> None:
        """Say it in the log, the same thing every ten seconds at most."""
        now = time.monotonic()
        if now >= self._said.get(text, 0.0):
            if len(self._said) > 100:
                self._said.clear()
            self._said[text] = now + QUIET_SECONDS
            LOG.warning("%s", text)

    def _reconnect(self) -> None:
        """The peer has gone: connect to the one that took its place at that socket, if one did; one of the store's own
        is started again. At most once a second."""
        client = self._client
        if client is None or time.monotonic() < self._retry_at:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._retry_at = time.monotonic() + RECONNECT_SECONDS
            if self._client is not client:
                return
            if self._own_peer is not None and self._own_peer.has_ended:
                threading.Thread(  # it takes a second or more, and whoever called need not wait for it
                    target=self._start_again,
                    args=(client,),
                    name="p2pstore-start-again",
                    daemon=True,
                ).start()
            else:
                self._client = blocking.connect(client.socket_path, namespace=client.namespace)
                client.close()
        except (P2PStoreError, OSError):
            pass  # whoever called is told that the peer is gone
        finally:
            self._lock.release()

    def _start_again(self, client: BlockingClient) -> None:
        """Another peer in the place of the store's own one, which has ended. What that one held is lost."""
        with self._lock:
            before, settings = self._own_peer, self._settings
            if self._client is not client or before is None or settings is None:
                return
            self._retry_at = time.monotonic() + RESTART_SECONDS
            self._say(
                f"the peer of this store has ended, another one is started: {before.last_words()}"
            )
            self._own_peer = None
            try:
                self._connect(settings)
            except (P2PStoreError, OSError) as error:
                self._say(f"no peer could be started again: {error}")
                self._own_peer = before
                return
            before.close()
            client.close()


def segment_name(data_addresses: list[str]) -> str:
    """The name of a peer's segment, by the addresses where its data is served."""
    return data_addresses[0].removeprefix("tls://") if data_addresses else "localhost:0"


def _start_peer(settings: SetupSettings) -> OwnPeer:
    """Start a peer; at an address that was named and is free here, if there is one."""
    place = takes_over(settings, os.environ)
    if place is not None:
        try:
            return OwnPeer(peer_options(settings, os.environ, listen=place))
        except P2PStoreError as error:  # somebody else took it just now
            LOG.info("%s cannot be taken: %s", place, error)
    peer = OwnPeer(peer_options(settings, os.environ))
    if settings.bootstrap and not peer.ready["joined"]:
        LOG.warning(
            "no peer answered at %s: this store shares with nobody until one does (it goes on trying)",
            ", ".join(settings.bootstrap),
        )
    return peer
