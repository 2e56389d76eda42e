"""The store for threads and plain scripts: `p2pstore.blocking.connect()`. Imports no event loop."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from p2pstore.arguments import possible_keys
from p2pstore.client.peer_link import LOOK_SECONDS, TIDY_SECONDS, PeerLink
from p2pstore.client.session import ClientSession
from p2pstore.client.transfers import TransferBatch
from p2pstore.errors import P2PStoreError
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.results import TransferRequest
from p2pstore.runtime.blocking_streams import (
    BlockingDriver,
    Facade,
    in_blocking_form,
    plain_form,
    run_blocking,
)
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS

if TYPE_CHECKING:
    from p2pstore.checkpoint.client.checkpoint_calls import BlockingCheckpoints

__all__ = ["BlockingClient", "connect"]


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    timeout: float = DEFAULT_PROGRESS_SECONDS,
) -> BlockingClient:
    """Connect to the local peer; close the client, or use it as a context manager.

    `socket` is the peer's local socket: by default `MOONCAKE_P2P_SOCKET`, else the only live one.
    All keys are in `namespace`. `timeout` is the deadline of every call, in seconds without
    progress. Raises `NoLocalPeer` or `AmbiguousLocalPeer`.
    """
    return BlockingClient(socket=socket, namespace=namespace, timeout=timeout)


T = TypeVar("T")

_connected: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


class _ThreadedSession(ClientSession):
    in_threads = True


class BlockingTransfers(Facade):
    """Transfers of one blocking client, in threads of their own; made by its `transfers()`. Any thread may use it.

    The methods are those of `TransferBatch`, plain.
    """

    def __len__(self) -> int:
        return len(self._original)

    submit = plain_form(TransferBatch.submit)
    status = plain_form(TransferBatch.status)
    statuses = plain_form(TransferBatch.statuses)
    wait = in_blocking_form(TransferBatch.wait)
    results = in_blocking_form(TransferBatch.results)
    cancel = plain_form(TransferBatch.cancel)


class BlockingClient(Facade):
    """A connected client of the local peer; the methods are those of `p2pstore.ObjectStore`, plain.

    Their documentation is that of the `ObjectStore` methods of the same names; `help` shows it.

    Any number of threads may use it at once. Close it, or use it as a context manager. Pickles as
    its socket path and namespace, and connects again where it is unpickled.
    """

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self._session = _ThreadedSession(
            BlockingDriver(), socket=socket, namespace=namespace, timeout=timeout
        )
        super().__init__(self._session)
        run_blocking(self._session.open())
        self._janitor = _Janitor(self._session._link)
        _connected.add(self)

    @property
    def namespace(self) -> str:
        return self._session.namespace

    @property
    def socket_path(self) -> str:
        """The socket this client is connected to."""
        return self._session.socket_path

    @property
    def peer_name(self) -> str:
        """The name of the local peer, which `PutResult.location` is where a value is stored there."""
        return self._session.peer_name

    def close(self) -> None:
        """Disconnect; may be called twice. Views stay readable, but their leases have ended."""
        self._session.close()
        self._janitor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_janitor"):
            self.close()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _reconnect, (self.socket_path, self.namespace, self._session.timeout)

    put = in_blocking_form(ClientSession.put)
    put_tensor = in_blocking_form(ClientSession.put_tensor)
    put_many = in_blocking_form(ClientSession.put_many)
    get = in_blocking_form(ClientSession.get)
    get_into = in_blocking_form(ClientSession.get_into)
    get_tensor = in_blocking_form(ClientSession.get_tensor)
    get_many = in_blocking_form(ClientSession.get_many)
    get_new_views = in_blocking_form(ClientSession.get_new_views)
    get_into_views = in_blocking_form(ClientSession.get_into_views)
    get_many_into = in_blocking_form(ClientSession.get_many_into)
    take_lease = in_blocking_form(ClientSession.take_lease)
    take_leases = in_blocking_form(ClientSession.take_leases)
    register_gpu = in_blocking_form(ClientSession.register_gpu)
    contains = in_blocking_form(ClientSession.contains)
    contains_many = in_blocking_form(ClientSession.contains_many)
    match_prefix = in_blocking_form(ClientSession.match_prefix)
    match_prefix_by_peer = in_blocking_form(ClientSession.match_prefix_by_peer)
    estimate = in_blocking_form(ClientSession.estimate)
    locate = in_blocking_form(ClientSession.locate)
    remove = in_blocking_form(ClientSession.remove)
    remove_many = in_blocking_form(ClientSession.remove_many)
    list_keys = in_blocking_form(ClientSession.list_keys)
    peers = in_blocking_form(ClientSession.peers)
    statistics = in_blocking_form(ClientSession.statistics)
    pin = in_blocking_form(ClientSession.pin)
    unpin = in_blocking_form(ClientSession.unpin)
    replicate = in_blocking_form(ClientSession.replicate)
    prefetch = in_blocking_form(ClientSession.prefetch)
    flush = in_blocking_form(ClientSession.flush)
    leave = in_blocking_form(ClientSession.leave)
    register = plain_form(ClientSession.register)

    def contains_many_nowait(self, keys: Sequence[str]) -> list[bool | None]:
        """`contains_many` as far as shared memory tells: never waits for the peer. None: `contains_many` would ask."""
        return self._session._live.presence.contains_many_nowait(keys)

    def touch(self, keys: Sequence[str]) -> None:
        """Have the local peer evict these objects later, as if they were read now. Does not wait."""
        digests, _ = possible_keys(keys, self._session._digests)
        self._session._live.link.ledger.touched(digests)

    def fail_fast(self, patience_seconds: float) -> None:
        """Have calls raise `DeadlineExceeded` as soon as the peer answers not even a probe for that long. Objects in
        its memory are read all the same."""
        self._session._link.connection.silence.patience_seconds = patience_seconds

    def hear(self, seconds: float) -> None:
        """Wait for a sign of life of the peer. Raises `DeadlineExceeded` when there is none in time."""
        run_blocking(self._session._link.connection.hear(seconds))

    @contextmanager
    def lease(self, key: str, *, wait: float = 0.0, here: bool = False) -> Iterator[memoryview]:
        """A view of the value in place. A view that is still in use after the block, or anything
        made from it, keeps its lease."""
        view = self.take_lease(key, wait=wait, here=here)
        try:
            yield view
        finally:
            del view

    @contextmanager
    def transfers(
        self, requests: Iterable[TransferRequest] = (), *, limit: int = 8
    ) -> Iterator[BlockingTransfers]:
        """A batch of gets and puts that run side by side in threads, `limit` at once (1 to 256), for the length of the
        block: `submit` more, `status` to poll, `wait` and `results` to wait, `cancel`; see `TransferBatch`. The block
        ends when all of them have ended; when it raises, they are cancelled."""
        manager = self._session.transfers(requests, limit=limit)
        batch = run_blocking(_enter(manager))
        try:
            yield BlockingTransfers(batch)
        except BaseException as error:
            run_blocking(_leave(manager, error))
            raise
        run_blocking(_leave(manager, None))

    @property
    def checkpoints(self) -> BlockingCheckpoints:
        """Directories that are published and fetched as a whole; see `Checkpoints`."""
        from p2pstore.checkpoint.client.checkpoint_calls import BlockingCheckpoints

        return BlockingCheckpoints(self._session.checkpoints)


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Any], error: BaseException | None) -> None:
    kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
    await manager.__aexit__(kind, error, traceback)


class _Janitor:
    """Tidies up behind a client: a thread that runs only while there is something to tidy, or memory of another peer
    is mapped."""

    def __init__(self, link: PeerLink) -> None:
        self._link = weakref.ref(link)
        # No Event: `stop` may run anywhere (in `__del__`, while the interpreter ends) and must not wait, and an
        # Event has a lock, which a thread that was waiting for it takes with it when the interpreter ends.
        self._running = threading.Lock()
        self._running.acquire()
        self._watching = threading.Lock()
        link.on_busy = self._start

    def _start(self) -> None:
        threading.Thread(target=self._run, name="p2pstore-janitor", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._is_stopped_within(TIDY_SECONDS):
                link = self._link()
                if link is None:
                    return
                if not link.needs_tidying:
                    link.end_tidying()
                    del link
                    self._watch()
                    return
                run_blocking(link.tidy())
                del link
        except P2PStoreError:
            return  # the next call raises it

    def _watch(self) -> None:
        """Let go of dead neighbours within a second, as long as there are any. In one thread at a time: this one."""
        if not self._watching.acquire(blocking=False):
            return
        try:
            while (link := self._link()) is not None and link.maps_others:
                link.let_go_of_the_dead()
                del link
                if self._is_stopped_within(LOOK_SECONDS):
                    return
        finally:
            self._watching.release()

    def _is_stopped_within(self, seconds: float) -> bool:
        stopped = self._running.acquire(timeout=seconds)
        if stopped:
            self.stop()  # for other waiters
        return stopped

    def stop(self) -> None:
        with suppress(RuntimeError):  # released already
            self._running.release()


def _close_all() -> None:
    """At the end of the program: its peers are told what it still held, and need not find out."""
    for client in list(_connected):
        if not client._session._link.connection.is_inherited:  # that is the parent's
            client.close()


atexit.register(_close_all)


def _reconnect(socket: str, namespace: str, timeout: float) -> BlockingClient:
    return BlockingClient(socket=socket, namespace=namespace, timeout=timeout)
