"""The base of all calls of a set-up store: its connection, its own peer, and errors as codes."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from p2pstore import blocking
from p2pstore.addresses import split_address
from p2pstore.blocking import BlockingClient
from p2pstore.errors import (
    AmbiguousLocalPeer,
    ConfigError,
    DeadlineExceeded,
    NoLocalPeer,
    NoSuchKey,
    P2PStoreError,
    StoreClosed,
)
from p2pstore.integrations.engine_client import QuietLog
from p2pstore.integrations.mooncake.memory import Registrations
from p2pstore.integrations.mooncake.mooncake_types import ErrorCode, code_of
from p2pstore.integrations.mooncake.setup_settings import (
    SetupSettings,
    free_port,
    peer_options,
    takes_over,
)
from p2pstore.local.peer_processes import READY_SECONDS, PeerProcess, new_folder
from p2pstore.local.socket_paths import SOCKET_VARIABLE, find_socket
from p2pstore.objects import is_about_a_key
from p2pstore.results import PeerInfo
from p2pstore.runtime.linux import take_lock
from p2pstore.ssd_tier.log_layout import FILE_NAME

LOG: Final = logging.getLogger("p2pstore.mooncake")
RECONNECT_SECONDS: Final = 1.0
RESTART_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 0.5
"""Time that the peer has for the answer to a probe, before the calls that wait for it fail. In plug-ins, where a
failure is only a miss, it has less."""
START_ATTEMPTS: Final = 16
"""Of starting a peer, when other programs of this host take the addresses that were free."""
HEALTHY, NOT_SET_UP, UNREACHABLE = 0, 1, 2
NO_SEGMENT: Final = "localhost:0"
STOP_SECONDS: Final = 15.0
MAX_FOLDERS: Final = 256


class Closable(Protocol):
    """An object that is told when its store is closed."""

    def store_closed(self) -> None: ...


class StoreBase:
    """One set-up of a store: all that lives between `setup` and `close`, and nothing else. It connects once (`_begin`),
    is closed once, and then dropped whole, so that the next set-up begins with nothing. Calls of other threads that
    are under way when it is closed end in errors, and keep to this one. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._client: BlockingClient | None = None
        self._own_peer: OwnPeer | None = None
        self._settings: SetupSettings | None = None
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._warn = QuietLog(LOG).warn
        self._warned: set[str] = set()
        self._buffers = Registrations()
        self._pooled: dict[int, object] = {}
        """Memory of buffer pools, by its address: it must be there as long as it is registered."""
        self._pools: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._closed = False

    def _begin(self, settings: SetupSettings, *, may_start: bool = True) -> None:
        """Connect to this machine's peer, or start one. Raises `P2PStoreError`, `ValueError` or `OSError`."""
        for text in settings.ignored:
            LOG.info("%s is no peer: ignored, as only peers are needed", text)
        with self._lock:
            self._settings = settings
            if may_start:
                self._connect(settings)
            else:
                self._client = _connected(settings.socket, settings.namespace)
        if self._own_peer is None and may_start and settings.for_own_peer:
            said = ", ".join(settings.for_own_peer)
            self._warn(
                f"the peer at {self._live.socket_path} runs already and is used as it is: {said} count "
                "only for a peer that setup starts"
            )
        for text in settings.unused:
            self._warn_once(text)

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
            self._client = _connected(socket, settings.namespace)
        except BaseException:
            if self._own_peer is not None:
                self._own_peer.close()
                self._own_peer = None
            raise

    @property
    def is_set_up(self) -> bool:
        """Whether there is a connection, or was until its peer ended."""
        return self._client is not None

    @property
    def current(self) -> StoreBase:
        """This set-up; a store's is the one that it has now."""
        return self

    def close(self) -> int:
        """Disconnect, and end the peer that `setup` started: it first hands over to others what it alone holds, where
        there are others. Returns 0; may be called twice, and before `setup`."""
        with self._lock:
            client, self._client = self._client, None
            peer, self._own_peer = self._own_peer, None
            pools = list(self._pools)
            self._closed = True
        for pool in pools:
            pool.store_closed()
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
        except (P2PStoreError, ValueError) as error:
            self._code(error)
            return NOT_SET_UP if self._closed else UNREACHABLE
        return HEALTHY

    def get_hostname(self) -> str:
        """The name of this peer's segment, `HOST:PORT`: the `local_hostname` that `setup` was told and, unless that
        has a port, the one where others read it. `localhost:0` before `setup`."""
        client = self._client
        if client is None:
            return NO_SEGMENT
        try:
            return next((self._segment_name(each) for each in client.peers() if each.me), NO_SEGMENT)
        except P2PStoreError as error:
            self._code(error)
            return NO_SEGMENT

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
            self._warn(str(error))
        return code

    def _read_code(self, error: Exception) -> int:
        """`_code` for reads and removals: a text that cannot be a key is an unknown key."""
        if is_about_a_key(error) and self._client is not None:
            return int(ErrorCode.OBJECT_NOT_FOUND)
        return self._code(error)

    def _add_pool(self, pool: Closable) -> None:
        """Tell a pool when the store is closed. Raises `RuntimeError` when it was."""
        with self._lock:
            if self._closed:
                raise RuntimeError("MooncakeDistributedStore was closed")
            self._pools.add(pool)

    def _segment_name(self, peer: PeerInfo) -> str:
        """The name of a peer's memory. Others know a peer by its name, which its store was told as `local_hostname`."""
        name = self._settings.hostname if peer.me and self._settings is not None else peer.name
        if not peer.data or has_port(name):
            return name if peer.data else NO_SEGMENT
        return f"{name}:{peer.data[0].rpartition(':')[2]}"

    def _segments_by_name(self) -> dict[str, str]:
        """The ids of living peers by the names of their segments and by their addresses. Raises as the client."""
        peers = sorted(self._live.peers(), key=lambda peer: peer.me)  # of one name, this one
        names = {each.removeprefix("tls://"): peer.peer_id for peer in peers for each in peer.data}
        return names | {self._segment_name(peer): peer.peer_id for peer in peers}

    def _warn_once(self, text: str) -> None:
        """Log, once while the store is set up, that something is not done."""
        if text not in self._warned:
            self._warned.add(text)
            LOG.warning("%s", text)

    def _reconnect(self) -> None:
        """The peer has gone: connect to the one in its place, or start the own one again. At most once a second."""
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
                threading.Thread(  # it takes a second or more; the caller does not wait
                    target=self._start_again, args=(client,), name="p2pstore-start-again", daemon=True
                ).start()
            else:
                self._client = _connected(client.socket_path, client.namespace)
                self._lost(client)
        except (P2PStoreError, OSError):
            pass  # the caller gets the code of the lost peer
        finally:
            self._lock.release()

    def _start_again(self, client: BlockingClient) -> None:
        """Another peer in the place of the store's own one, which has ended. Its objects are lost."""
        with self._lock:
            before, settings = self._own_peer, self._settings
            if self._client is not client or before is None or settings is None:
                return
            self._retry_at = time.monotonic() + RESTART_SECONDS
            self._warn(
                f"the peer of this store has ended, another one is started: {before.last_words()}"
            )
            self._own_peer = None
            try:
                self._connect(settings)
            except (P2PStoreError, OSError) as error:
                self._warn(f"no peer could be started again: {error}")
                self._own_peer = before
                return
            before.close()
            self._lost(client)

    def _lost(self, client: BlockingClient) -> None:
        """Let go of a connection whose peer has gone, when another one has taken its place."""
        client.close()


def _connected(socket: str | os.PathLike[str] | None, namespace: str) -> BlockingClient:
    """A client whose calls fail as soon as the peer hangs."""
    client = blocking.connect(socket, namespace=namespace)
    client.fail_fast(PATIENCE_SECONDS)
    return client


def has_port(name: str) -> bool:
    try:
        split_address(name, "name")
    except ConfigError:
        return False
    return True


def _start_peer(settings: SetupSettings) -> OwnPeer:
    """Start a peer; at an address that was named and is free here, if there is one. An address that another program
    takes in the meantime is not asked for again."""
    for attempt in range(1, START_ATTEMPTS + 1):
        place = takes_over(settings, os.environ)
        port = None if settings.http_port is None else free_port(settings.http_port)
        with ssd_folder(settings.ssd_path) as (folder, lock):
            options = peer_options(settings, os.environ, listen=place, ssd_path=folder, http_port=port)
            try:
                peer = OwnPeer(options, inherited=lock)
                break
            except P2PStoreError as error:
                free = place is None or takes_over(settings, os.environ) == place
                free = free and (port is None or free_port(port) == port)
                if free or attempt == START_ATTEMPTS:
                    raise
                LOG.info("started again, as an address was taken meanwhile: %s", error)
    if port != settings.http_port:
        LOG.warning(
            "client_http_port %s is taken: metrics are at 127.0.0.1:%s", settings.http_port, port
        )
    if settings.bootstrap and place is None and not peer.ready["joined"]:
        LOG.warning(
            "no peer answered at %s: this store shares with no other until one does (it keeps trying)",
            ", ".join(settings.bootstrap),
        )
    return peer


class OwnPeer(PeerProcess):
    """A peer in a folder of its own. Its socket is not in the usual places, as it may end at any moment. A thread
    starts it and waits for its end: the kernel kills it when that thread ends, so the thread must last."""

    def __init__(self, options: Sequence[str], *, inherited: int | None = None) -> None:
        """`inherited` is a descriptor that stays open in the peer. Raises `P2PStoreError` or `OSError`."""
        self._made_by = os.getpid()
        self.folder = new_folder("p2pstore-")
        super().__init__(self.folder, "peer")
        try:
            self._start_in_thread(options, () if inherited is None else (inherited,))
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def _start_in_thread(self, options: Sequence[str], inherited: Sequence[int]) -> None:
        started: SimpleQueue[OSError | None] = SimpleQueue()

        def keep() -> None:
            try:
                self.start(options, inherited=inherited)
            except OSError as error:
                started.put(error)
            else:
                started.put(None)
                self.wait()

        threading.Thread(target=keep, name="p2pstore-own-peer", daemon=True).start()
        try:
            problem = started.get(timeout=READY_SECONDS)
        except Empty:
            raise DeadlineExceeded(f"no peer was started within {READY_SECONDS:g} s") from None
        if problem is not None:
            raise P2PStoreError(f"no peer could be started: {problem}") from problem

    def close(self) -> None:
        """End the peer in good order, and remove its folder; idempotent. A forked child does nothing."""
        if os.getpid() != self._made_by:
            return
        atexit.unregister(self.close)
        self.end()
        self.reap(time.monotonic() + STOP_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ssd_folder(path: str) -> Iterator[tuple[str, int | None]]:
    """Where under `path` a peer may have its SSD tier, and the descriptor of a lock for it to keep: a folder of its own
    for each of the peers that are told one path, the first one that no living peer has. A path that is no directory,
    such as a device, is taken as it is; "" stays "". Raises `ConfigError`."""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        yield path, None
        return
    descriptor = -1
    try:
        for number in range(MAX_FOLDERS):
            folder = Path(path)
            if number or not (folder / FILE_NAME).exists():  # one that an earlier version made
                folder /= f"store-{number}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(
                    folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
                locked = take_lock(descriptor)
            except OSError as error:
                raise ConfigError(
                    f"ssd_offload_path: {folder} cannot be used ({error.strerror}): name a directory that this "
                    "program may write to"
                ) from error
            if locked:
                yield str(folder), descriptor
                return
            os.close(descriptor)
            descriptor = -1
        raise ConfigError(f"ssd_offload_path: {path} is used by {MAX_FOLDERS} peers already")
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the peer's own copy keeps the lock
